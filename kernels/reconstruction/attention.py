"""Attention to listed rows of which some are codes and references, in Triton, in four launches.

Weights of rows become weights of bases, so every base is read once, and codes are summed before they are multiplied
with f_d's last matrix. Derivation: README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows
from kvbench.kernels.reconstruction.triton import SIZES, _find_stop, _refer

PROGRAMS = 264  # most programs of a launch
RANGES = 32  # most ranges of rows whose sums are joined
UNIT = tl.constexpr(2.0**32)  # parts of the largest weight that weights of bases are counted in
RAISED = tl.constexpr(2.0**14)  # factor of the weights in a product, so that float16 holds small ones
CODES = 128  # most numbers of a code that a program sums


@triton.jit
def _read_entries(listed, entry, count, now):
    """Return which rows some entries of a list are, the token's own row behind it, and which of them exist."""
    row = tl.load(listed + entry, mask=entry < count, other=0).to(tl.int32)
    exists = ((entry < count) & (row < now)) | (entry == count)
    return tl.where(entry == count, now, row), exists


@triton.jit(do_not_specialize=["listed_count", "seen", "splits"])
def _weigh(
    queries, keys, listed, step, logits, part_most, cleared, counts, number,
    listed_count, seen, splits, to_clear, query_heads, group, dim, scale,
    COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a KV head's queries and a range of the list in base 2, and the largest of each query.

    All programs together set the weights of bases to 0.
    """
    line, split = tl.program_id(0), tl.program_id(1)
    heads = query_heads // group
    b, first_query = (line // heads).to(tl.int64), line % heads * group
    size = tl.cdiv(to_clear, tl.num_programs(0) * splits)
    begin = (line * splits + split).to(tl.int64) * size
    for done in range(0, size, 1024):
        at = done + tl.arange(0, 1024)
        tl.store(cleared + begin + at, tl.zeros((1024,), tl.int64), mask=(at < size) & (begin + at < to_clear))
    now, entries = seen + tl.load(step), listed_count + 1
    columns, member = tl.arange(0, D), tl.arange(0, M)
    asking = member < group
    own = queries + (line * group + member)[:, None] * dim + columns[None]
    q = tl.load(own, mask=asking[:, None] & (columns < dim)[None], other=0.0)
    if CAST:
        q = q.to(tl.float32)
    share = tl.cdiv(tl.cdiv(entries, splits), N) * N
    keys += line.to(tl.int64) * entries * dim
    logits += b * entries * query_heads + first_query
    most = tl.full([M], float("-inf"), tl.float32)
    attended = tl.zeros([N], tl.int32)
    for first in range(split * share, tl.minimum((split + 1) * share, entries), N):
        entry = first + tl.arange(0, N)
        _, exists = _read_entries(listed + b * listed_count, entry, listed_count, now)
        k = tl.load(
            keys + entry[:, None] * dim + columns[None], mask=(exists[:, None]) & (columns < dim)[None], other=0.0
        )
        if CAST:
            k = k.to(tl.float32)
        found = tl.dot(q, k.T, input_precision="ieee") * scale
        found = tl.where(exists[None], found, float("-inf"))
        most = tl.maximum(most, tl.max(found, 1))
        attended += exists.to(tl.int32)
        into = logits + entry[None].to(tl.int64) * query_heads + member[:, None]
        tl.store(into, found, mask=asking[:, None] & (entry < entries)[None])
    if COUNT:
        tl.atomic_add(counts + tl.load(number), (tl.sum(attended) * group).to(tl.int64))
    tl.store(part_most + (b * splits + split) * query_heads + first_query + member, most, mask=asking)


@triton.jit(do_not_specialize=[*SIZES, "weighed", "splits"])
def _spread(
    listed, logits, part_most, step, references, more_references, inner, more_inner, base_weights, part_norm, part_sum,
    listed_count, seen, sinks, compressed, block, raw_from, base_count, base_room, reference_room, raw_room, code_room,
    inner_width, numbers, skipped, weighed, splits, query_heads,
    NEAREST: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, Z: tl.constexpr, S: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """Weigh a range of the list, for all queries of a sample.

    The first program of a range adds the rows' weights to those of their bases, in whole numbers, so that the order
    does not matter. The others sum some numbers of the rows' codes.
    """
    part, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, ranges = tl.arange(0, M), tl.arange(0, S)
    asking = head < query_heads
    parts = part_most + (b * weighed + ranges)[:, None] * query_heads + head[None]
    most = tl.max(tl.load(parts, mask=(ranges < weighed)[:, None] & asking[None], other=float("-inf")), 0)
    most = tl.where(asking, most, 0.0)
    stop, now = _find_stop(step, seen, sinks, compressed, block)
    entries = listed_count + 1
    share = tl.cdiv(tl.cdiv(entries, splits), N) * N
    low, high = split * share, tl.minimum((split + 1) * share, entries)
    logits += b * entries * query_heads
    line = (b * splits + split) * query_heads + head
    if part == 0:
        norm, coded = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
        if NEAREST:
            references += b * compressed * NEAREST
            more_references += b * reference_room * NEAREST
        base_weights += b * (base_count + base_room + raw_room) * query_heads
        for first in range(low, high, N):
            entry = first + tl.arange(0, N)
            row, exists = _read_entries(listed + b * listed_count, entry, listed_count, now)
            old = row - sinks
            stored = exists & (old >= 0) & (row < stop)
            at = logits + entry[:, None].to(tl.int64) * query_heads + head[None]
            p = tl.exp2(tl.load(at, mask=exists[:, None] & asking[None], other=float("-inf")) - most[None])
            norm += tl.sum(p, 0)
            coded += tl.sum(tl.where(stored[:, None], p, 0.0), 0)
            units = (p * UNIT).to(tl.int64)
            place = tl.where(row < raw_from, row, base_count + base_room + row - raw_from).to(tl.int64)
            plain = (exists & (stored == 0))[:, None] & asking[None]
            tl.atomic_add(
                base_weights + place[:, None] * query_heads + head[None],
                units * max(NEAREST, 1),
                mask=plain,
                sem="relaxed",
            )
            for number in tl.static_range(NEAREST):
                base = _refer(references, more_references, old * NEAREST + number, compressed, stored, NEAREST)
                at = base_weights + base[:, None].to(tl.int64) * query_heads + head[None]
                tl.atomic_add(at, units, mask=stored[:, None] & asking[None], sem="relaxed")
        tl.store(part_norm + 2 * line, norm, mask=asking)
        tl.store(part_norm + 2 * line + 1, coded, mask=asking)
    elif INNER:
        column = (part - 1) * Z + tl.arange(0, Z)
        total = tl.zeros([M, Z], tl.float32)
        for first in range(low, high, N):
            entry = first + tl.arange(0, N)
            row, exists = _read_entries(listed + b * listed_count, entry, listed_count, now)
            old = row - sinks
            stored = exists & (old >= 0) & (row < stop)
            at = logits + entry[None].to(tl.int64) * query_heads + head[:, None]
            p = tl.exp2(tl.load(at, mask=stored[None] & asking[:, None], other=float("-inf")) - most[:, None])
            if INNER == 1:
                known, further = (
                    inner + b * compressed * inner_width,
                    more_inner + (b * code_room - compressed) * inner_width,
                )
                at = tl.where(old < compressed, known, further) + old.to(tl.int64) * inner_width
            else:
                at = inner + (b * listed_count + entry) * inner_width
            z = tl.load(
                at[:, None] + skipped + column[None], mask=stored[:, None] & (column < numbers)[None], other=0.0
            )
            if CAST:
                z = z.to(tl.float32)
            total = tl.dot(p.to(z.dtype), z, total, input_precision="ieee")
        tl.store(
            part_sum + line[:, None] * numbers + column[None], total, mask=asking[:, None] & (column < numbers)[None]
        )


@triton.jit(do_not_specialize=["base_count", "base_room", "raw_room", "splits", "spread"])
def _gather(
    base_weights, part_norm, bases, more_bases, raw, part_out,
    base_count, base_room, raw_room, splits, spread, query_heads, group, dim,
    NEAREST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, S: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Sum a range of the bases and of the rows that are not compressed, for the queries of a KV head."""
    line, split = tl.program_id(0), tl.program_id(1)
    heads = query_heads // group
    b, head = (line // heads).to(tl.int64), line % heads
    places, width = base_count + base_room + raw_room, 2 * heads * dim
    member, columns = tl.arange(0, M), tl.arange(0, D)
    asking, ranges = member < group, tl.arange(0, S)
    parts = part_norm + 2 * ((b * spread + ranges)[:, None] * query_heads + head * group + member[None])
    norm = tl.sum(tl.load(parts, mask=(ranges < spread)[:, None] & asking[None], other=0.0), 0)
    factor = RAISED / (UNIT * max(NEAREST, 1) * tl.where(asking, norm, 1.0))
    base_weights += b * places * query_heads + head * group
    bases += b * base_count * width + (heads + head) * dim
    more_bases += (b * base_room - base_count) * width + (heads + head) * dim
    raw += (b * raw_room - base_count - base_room) * width + (heads + head) * dim
    share = tl.cdiv(tl.cdiv(places, splits), N) * N
    total = tl.zeros([M, D], tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, places), N):
        place = first + tl.arange(0, N)
        at = base_weights + place[None].to(tl.int64) * query_heads + member[:, None]
        units = tl.load(at, mask=asking[:, None] & (place < places)[None], other=0)
        used = tl.max(units, 0) > 0  # memory for further rows may hold anything
        at = tl.where(place < base_count, bases, tl.where(place < base_count + base_room, more_bases, raw))
        at = at[:, None] + place[:, None].to(tl.int64) * width + columns[None]
        v = tl.load(at, mask=used[:, None] & (columns < dim)[None], other=0.0)
        if CAST:
            v = v.to(tl.float32)
        total = tl.dot((units.to(tl.float32) * factor[:, None]).to(v.dtype), v, total, input_precision="ieee")
    into = part_out + ((line * splits + split) * group + member)[:, None] * dim + columns[None]
    tl.store(into, total, mask=asking[:, None] & (columns < dim)[None])


@triton.jit(do_not_specialize=["splits", "spread"])
def _finish(
    part_out, part_norm, part_sum, weight, bias, outputs, splits, spread, numbers, query_heads, group, dim,
    INNER: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, Z: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Join the sums of a query, and add f_d's last product of the summed codes."""
    index = tl.program_id(0)
    b, query = index // query_heads, index % query_heads
    column, ranges = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    line, member = b * (query_heads // group) + query // group, query % group
    parts = part_out + ((line * splits + ranges) * group + member)[:, None] * dim + column[None]
    out = tl.sum(tl.load(parts, mask=(ranges < splits)[:, None] & (column < dim)[None], other=0.0), 0) / RAISED
    if INNER:
        parts, there = (b * spread + ranges) * query_heads + query, ranges < spread
        norm = tl.sum(tl.load(part_norm + 2 * parts, mask=there, other=0.0), 0)
        row = query // group * dim + column
        decoded = tl.zeros([BLOCK], tl.float32)
        for first in range(0, numbers, Z):
            z = first + tl.arange(0, Z)
            at = part_sum + parts[:, None] * numbers + z[None]
            summed = tl.sum(tl.load(at, mask=there[:, None] & (z < numbers)[None], other=0.0), 0)
            at = weight + row[:, None] * numbers + z[None]
            own = tl.load(at, mask=(column < dim)[:, None] & (z < numbers)[None], other=0.0)
            decoded += tl.sum(own.to(tl.float32) * summed[None], 1)
        if BIAS:
            coded = tl.sum(tl.load(part_norm + 2 * parts + 1, mask=there, other=0.0), 0)
            decoded += tl.load(bias + row, mask=column < dim, other=0.0).to(tl.float32) * coded
        out += decoded / norm
    tl.store(outputs + index * dim + column, out, mask=column < dim)


def attend_compressed_triton(
    queries: Tensor, keys: Tensor, listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, step: Tensor,
    scaling: float, counts: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    (batch, heads, entries, dim), query_heads, raw = keys.shape, queries.shape[1], rows.raw
    group, count, nearest = query_heads // heads, entries - 1, 0
    queries, listed, keys = queries.contiguous(), listed.contiguous(), keys.contiguous()
    given, sizes, kind, weight, bias = [raw] * 2, [0, 0, 0, 0], 0, raw, None
    if expansion is not None:
        inner, further, weight, bias = (
            expansion.inner.contiguous(),
            expansion.more,
            expansion.weights[1].contiguous(),
            expansion.biases[1],
        )
        kind, numbers = 2 if further is None else 1, weight.shape[1]
        given = [inner, inner if further is None else further]
        sizes = [given[1].shape[1], inner.shape[2], numbers, inner.shape[2] - numbers]
    references, more = listed, listed
    if rows.references is not None and rows.more_references is not None:
        references, more, nearest = rows.references.contiguous(), rows.more_references, rows.references.shape[2]
    rooms = rows.bases.shape[1], rows.more_bases.shape[1], more.shape[1] if nearest else 0, raw.shape[1]
    places = rooms[0] + rooms[1] + rooms[3]
    exact, cast = raw.dtype == torch.float32, is_interpreting() and raw.dtype == torch.bfloat16
    wide, tile, asking = (
        max(16, triton.next_power_of_2(dim)),
        32 if exact else 64,
        max(16, triton.next_power_of_2(query_heads)),
    )
    codes = min(CODES, max(16, triton.next_power_of_2(sizes[2])))
    parts = triton.cdiv(sizes[2], codes) + 1
    weighed, gathered = (split_rows(n, batch * heads, 2 * tile) for n in (entries, places))
    spread = split_rows(entries, batch * parts, tile)

    def reserve(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=raw.device)

    logits, most = reserve(batch, entries, query_heads), reserve(batch, weighed, query_heads)
    base_weights, norm = reserve(batch, places, query_heads, dtype=torch.int64), reserve(batch, spread, query_heads, 2)
    sums, outs = reserve(batch, spread, query_heads, sizes[2]), reserve(batch, heads, gathered, group, dim)
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=raw.device)
    counted, number = (step, step) if counts is None else counts
    of_head = dict(M=max(16, triton.next_power_of_2(group)), D=wide, CAST=cast)
    _weigh[batch * heads, weighed](
        queries, keys, listed, step, logits, most, base_weights, counted, number,
        count, rows.seen, weighed, base_weights.numel(), query_heads, group, dim, scaling * LOG2E.value,
        COUNT=counts is not None, N=tile, **of_head, num_warps=4, num_stages=3,
    )  # fmt: skip
    _spread[parts, spread, batch](
        listed, logits, most, step, references, more, *given, base_weights, norm, sums,
        count, rows.seen, rows.sinks, rows.compressed, rows.block, rows.raw_from, *rooms, *sizes, weighed, spread, query_heads,
        NEAREST=nearest, INNER=kind, M=asking, N=tile, Z=codes, S=RANGES, CAST=cast, num_warps=4, num_stages=3,
    )  # fmt: skip
    _gather[batch * heads, gathered](
        base_weights, norm, rows.bases.contiguous(), rows.more_bases, raw, outs,
        rooms[0], rooms[1], rooms[3], gathered, spread, query_heads, group, dim,
        NEAREST=nearest, N=tile, S=RANGES, **of_head, num_warps=4, num_stages=3,
    )  # fmt: skip
    _finish[batch * query_heads, triton.cdiv(dim, 32)](
        outs, norm, sums, weight, raw if bias is None else bias, outputs, gathered, spread, sizes[2], query_heads, group, dim,
        INNER=kind, BIAS=bias is not None, BLOCK=32, Z=codes, S=RANGES, num_warps=4,
    )  # fmt: skip
    return outputs


def split_rows(count: int, lines: int, least: int) -> int:
    """Return the number of ranges that `count` rows are split into for each of `lines` programs, at least `least` each."""
    return min(max(1, PROGRAMS // lines), RANGES, triton.cdiv(count, least))
