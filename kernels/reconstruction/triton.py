"""Both operations in Triton: one launch takes codes, four attend.

Every program finds out by itself which rows are compressed, from the number of tokens on the device. Keys are made in
registers. Weights of rows become weights of bases, so that values are read once, and codes are summed before they are
multiplied with f_d's last matrix. Derivation: README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows

ROWS = 16  # listed rows of a program that gathers codes
TILE = 32  # listed rows of which keys are made at once
ADDED = 64  # rows, codes or bases that are added to a sum at once
RANGES = (64, 32)  # most ranges of rows of a head's keys, and of other sums, that are joined
PROGRAMS = 528  # most programs of a launch
NUMBERS = 128  # most numbers of a code that a program sums
CHANNELS = 32  # of an output that a program writes
UNIT = tl.constexpr(2.0**32)  # parts of the largest weight that weights of bases are counted in
RAISED = tl.constexpr(2.0**14)  # factor of the weights in a product, so that float16 holds small ones
CLEARED = tl.constexpr(1024)  # weights of bases that are set to 0 at once
SIZES = [  # what varies from prompt to prompt
    *("listed_count", "seen", "compressed", "raw_from", "splits", "weighed"),
    *("base_count", "base_room", "reference_room", "raw_room"),
]


@triton.jit
def _rounded(x, like):
    """Round float32 numbers to the dtype that the pointer `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _below(column, stop: tl.constexpr, size: tl.constexpr):
    """Return which of the columns 0, …, size − 1 are below `stop`. If all are, no register holds it."""
    return tl.full((size,), True, tl.int1) if stop == size else column < stop


@triton.jit
def _find_stop(step, seen, sinks, compressed, block):
    """Return the row after the last compressed one, and the first row that does not exist yet."""
    since = tl.load(step)
    blocks = tl.maximum((seen - sinks - compressed + since) // block - 1, 0)
    return sinks + compressed + block * blocks, seen + since


@triton.jit(do_not_specialize=["listed_count", "seen", "compressed", "room"])
def _take(
    listed, codes, more, out, step, listed_count, seen, sinks, compressed, block, room, width,
    ROWS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    entry, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W)
    row = tl.load(listed + b * listed_count + entry, mask=entry < listed_count, other=0).to(tl.int32)
    stop, _ = _find_stop(step, seen, sinks, compressed, block)
    old = row - sinks
    stored, there = (entry < listed_count) & (old >= 0) & (row < stop), (column < width)[None]
    at = (b * compressed + old)[:, None] * width + column[None]
    found = tl.load(codes + at, mask=(stored & (old < compressed))[:, None] & there, other=0)
    at = (b * room + old - compressed)[:, None] * width + column[None]
    others = tl.load(more + at, mask=(stored & (old >= compressed))[:, None] & there, other=0)
    found = tl.where((old < compressed)[:, None], found, others)
    into = (b * listed_count + entry)[:, None] * width + column[None]
    tl.store(out + into, found, mask=(entry < listed_count)[:, None] & there)


@triton.jit
def _refer(references, more_references, at, compressed, stored, NEAREST: tl.constexpr):
    """Return which base a reference of each row is, (ROWS,), by its place among those of all rows; 0 without one."""
    known, first = at < compressed * NEAREST, more_references - compressed.to(tl.int64) * NEAREST
    base = tl.load(references + at, mask=stored & known, other=0).to(tl.int32)
    return base + tl.load(first + at, mask=stored & (known == 0), other=0).to(tl.int32)


@triton.jit
def _read(at, here, column, there):
    """Return some columns (D,) of the rows at the pointers `at` (ROWS,) in float32, zeros where `here` is false."""
    return tl.load(at[:, None] + column[None], mask=here[:, None] & there[None], other=0.0).to(tl.float32)


@triton.jit
def _normed(x, column, there, inverse, scale, like):
    """Multiply some columns by the inverse of their head's root mean square and by the norm's weight."""
    weight = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)[None]
    return _rounded(_rounded(x * inverse, scale) * weight, like)


@triton.jit
def _turn(x, partner, c, s, like):
    """Return x·c + partner·s."""
    return _rounded(x * c, like) + _rounded(partner * s, like)


@triton.jit
def _list(listed, entry, listed_count, seen, sinks, compressed, block, step):
    """Return which rows some entries of a list are, (N,), which of these exist, and which are compressed.

    The token's own row is the last entry. Rows that do not exist are 0.
    """
    stop, now = _find_stop(step, seen, sinks, compressed, block)
    row = tl.load(listed + entry, mask=entry < listed_count, other=0).to(tl.int32)
    row = tl.where(entry == listed_count, now, row)
    exists = ((entry < listed_count) & (row < now)) | (entry == listed_count)
    return tl.where(exists, row, 0), exists, exists & (row >= sinks) & (row < stop)


@triton.jit(do_not_specialize=SIZES)
def _weigh(
    queries, listed, decoded, references, more_references, bases, more_bases, raw, cos, sin, scale, step,
    logits, part_most, base_weights, counts, number,
    listed_count, seen, sinks, compressed, block, raw_from, base_count, base_room, reference_room, raw_room,
    splits, heads, group, dim, factor, epsilon,
    NEAREST: tl.constexpr, DECODED: tl.constexpr, NORM: tl.constexpr, REST: tl.constexpr, COUNT: tl.constexpr,
    CAST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Make the keys of a KV head in a range of the list, and their logits in base 2 with the head's queries.

    A head has the channels that turn, in two halves, and perhaps others. All programs together set the weights of
    bases to 0.
    """
    line, split, turning = tl.program_id(0), tl.program_id(1), 2 * HALF
    b, head, query_heads, entries = (line // heads).to(tl.int64), line % heads, heads * group, listed_count + 1
    cleared = tl.num_programs(0) // heads * (base_count + base_room + raw_room + 2) * query_heads
    size = tl.cdiv(cleared, tl.num_programs(0) * splits)
    begin = (line * splits + split).to(tl.int64) * size
    for done in range(0, size, CLEARED):
        at = done + tl.arange(0, CLEARED)
        tl.store(base_weights + begin + at, tl.zeros((CLEARED,), tl.int64), mask=(at < size) & (begin + at < cleared))
    member, first, rest = tl.arange(0, M), tl.arange(0, H), turning + tl.arange(0, R)
    second, there, others = first + HALF, _below(first, HALF, H), rest < dim
    asking = member < group
    query = queries + (line * group + member) * dim
    qx = tl.load(query[:, None] + first[None], mask=asking[:, None] & there[None], other=0.0)
    qy = tl.load(query[:, None] + second[None], mask=asking[:, None] & there[None], other=0.0)
    qz = tl.load(query[:, None] + rest[None], mask=asking[:, None] & others[None], other=0.0)
    if CAST:
        qx, qy, qz = qx.to(tl.float32), qy.to(tl.float32), qz.to(tl.float32)
    width, listed = 2 * heads * dim, listed + b * listed_count
    references += b * compressed * NEAREST
    more_references += b * reference_room * NEAREST
    own_bases = bases + b * base_count * width + head * dim
    further = more_bases + (b * base_room - base_count) * width + head * dim
    own_raw = raw + (b * raw_room - raw_from) * width + head * dim
    logits += b * entries * query_heads + head * group
    most, attended = tl.full([M], float("-inf"), tl.float32), tl.zeros([N], tl.int32)
    share = tl.cdiv(tl.cdiv(entries, splits), N) * N
    for start in range(split * share, tl.minimum((split + 1) * share, entries), N):
        entry = start + tl.arange(0, N)
        row, exists, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
        plain = exists & (stored == 0)
        at = tl.where(row < raw_from, own_bases, own_raw) + row.to(tl.int64) * width
        x, y, z = _read(at, plain, first, there), _read(at, plain, second, there), tl.zeros((N, R), tl.float32)
        if REST:
            z = _read(at, plain, rest, others)
        if NEAREST:
            for nearest in tl.static_range(NEAREST):
                at = (row - sinks) * NEAREST + nearest
                base = _refer(references, more_references, at, compressed, stored, NEAREST)
                at = tl.where(base < base_count, own_bases, further) + base.to(tl.int64) * width
                x += _read(at, stored, first, there)
                y += _read(at, stored, second, there)
                if REST:
                    z += _read(at, stored, rest, others)
            share_of_one = tl.where(stored, 1.0 / NEAREST, 1.0)[:, None]
            x, y, z = x * share_of_one, y * share_of_one, z * share_of_one
        if DECODED:
            at = decoded + (b * listed_count + entry) * (width // 2) + head * dim
            x = _rounded(x, raw) + _read(at, stored, first, there)
            y = _rounded(y, raw) + _read(at, stored, second, there)
            if REST:
                z = _rounded(z, raw) + _read(at, stored, rest, others)
        x, y, z = _rounded(x, raw), _rounded(y, raw), _rounded(z, raw)
        if NORM:
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
            inverse = (1.0 / tl.sqrt(square / dim + epsilon))[:, None]
            x = _normed(x, first, there, inverse, scale, raw)
            y = _normed(y, second, there, inverse, scale, raw)
            z = _normed(z, rest, others, inverse, scale, raw)
        angle = row[:, None] * turning + first[None]
        c = _rounded(tl.load(cos + angle, mask=there[None], other=1.0).to(tl.float32), raw)
        s = _rounded(tl.load(sin + angle, mask=there[None], other=0.0).to(tl.float32), raw)
        kx, ky = _turn(x, -y, c, s, raw).to(qx.dtype), _turn(y, x, c, s, raw).to(qx.dtype)
        own = tl.dot(qy, ky.T, tl.dot(qx, kx.T, input_precision="ieee"), input_precision="ieee")
        if REST:
            own = tl.dot(qz, z.to(qz.dtype).T, own, input_precision="ieee")
        own = tl.where(exists[None], own * factor, float("-inf"))
        most = tl.maximum(most, tl.max(own, 1))
        attended += exists.to(tl.int32)
        into = logits + entry[None].to(tl.int64) * query_heads + member[:, None]
        tl.store(into, own, mask=asking[:, None] & (entry < entries)[None])
    if COUNT:
        tl.atomic_add(counts + tl.load(number), (tl.sum(attended) * group).to(tl.int64))
    tl.store(part_most + (b * splits + split) * query_heads + head * group + member, most, mask=asking)


@triton.jit
def _count(counted, of_row, query_heads, head, units, here):
    """Add weights (N, M) to those of a base of each row, in whole numbers, so that the order does not matter."""
    at = counted + of_row[:, None].to(tl.int64) * query_heads + head[None]
    tl.atomic_add(at, units, mask=here[:, None] & (head < query_heads)[None], sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _spread(
    listed, logits, part_most, references, more_references, inner, step, base_weights, part_sum,
    listed_count, seen, sinks, compressed, block, raw_from, base_count, base_room, reference_room, raw_room,
    weighed, splits, inner_width, numbers, query_heads,
    NEAREST: tl.constexpr, DECODED: tl.constexpr, CAST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, L: tl.constexpr, Z: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Sum some numbers of the codes of a range of the list, by the weights of all queries of a sample.

    The programs of a range share its rows to add their weights to those of their bases.
    """
    part, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, ranges, entries = tl.arange(0, M), tl.arange(0, S), listed_count + 1
    asking, places = head < query_heads, base_count + base_room + raw_room
    parts = part_most + (b * weighed + ranges)[:, None] * query_heads + head[None]
    most = tl.max(tl.load(parts, mask=(ranges < weighed)[:, None] & asking[None], other=float("-inf")), 0)
    most = tl.where(asking, most, 0.0)
    share = tl.cdiv(tl.cdiv(entries, splits), L) * L
    low, high = split * share, tl.minimum((split + 1) * share, entries)
    logits += b * entries * query_heads
    listed += b * listed_count
    references += b * compressed * NEAREST
    more_references += b * reference_room * NEAREST
    base_weights += b * (places + 2) * query_heads
    total, coded = tl.zeros([M], tl.int64), tl.zeros([M], tl.int64)
    for start in range(low + part * N, high, tl.num_programs(0) * N):
        entry = start + tl.arange(0, N)
        row, exists, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
        exists, stored = exists & (entry < high), stored & (entry < high)
        at = logits + entry[:, None].to(tl.int64) * query_heads + head[None]
        p = tl.exp2(tl.load(at, mask=exists[:, None] & asking[None], other=float("-inf")) - most[None])
        units = (p * UNIT).to(tl.int64)
        total += tl.sum(units, 0)
        coded += tl.sum(tl.where(stored[:, None], units, 0), 0)
        place = tl.where(row < raw_from, row, base_count + base_room + row - raw_from)
        _count(base_weights, place, query_heads, head, units * max(NEAREST, 1), exists & (stored == 0))
        for nearest in tl.static_range(NEAREST):
            at = (row - sinks) * NEAREST + nearest
            base = _refer(references, more_references, at, compressed, stored, NEAREST)
            _count(base_weights, base, query_heads, head, units, stored)
    tl.atomic_add(base_weights + places * query_heads + head, total, mask=asking, sem="relaxed")
    tl.atomic_add(base_weights + (places + 1) * query_heads + head, coded, mask=asking, sem="relaxed")
    if DECODED:
        column = part * Z + tl.arange(0, Z)
        there, acc = column < numbers, tl.zeros([M, Z], tl.float32)
        for start in range(low, high, L):
            entry = start + tl.arange(0, L)
            row, exists, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
            at = logits + entry[None].to(tl.int64) * query_heads + head[:, None]
            p = tl.exp2(tl.load(at, mask=stored[None] & asking[:, None], other=float("-inf")) - most[:, None])
            at = inner + (b * listed_count + entry) * inner_width
            z = tl.load(at[:, None] + column[None], mask=stored[:, None] & there[None], other=0.0)
            if CAST:
                z = z.to(tl.float32)
            acc = tl.dot(p.to(z.dtype), z, acc, input_precision="ieee")
        into = part_sum + ((b * splits + split) * query_heads + head)[:, None] * numbers + column[None]
        tl.store(into, acc, mask=asking[:, None] & there[None])


@triton.jit(do_not_specialize=["base_count", "base_room", "raw_room", "splits", "spread"])
def _gather(
    base_weights, part_sum, bases, more_bases, raw, part_out, sums,
    base_count, base_room, raw_room, splits, spread, numbers, heads, group, dim,
    NEAREST: tl.constexpr, CAST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, Z: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Sum a range of the bases and of the rows that are not compressed, for the queries of a KV head.

    Further programs join the sums of codes.
    """
    line, split = tl.program_id(0), tl.program_id(1)
    b, head, query_heads = (line // heads).to(tl.int64), line % heads, heads * group
    places, width = base_count + base_room + raw_room, 2 * heads * dim
    if split < splits:
        member, columns = tl.arange(0, M), tl.arange(0, D)
        asking = member < group
        base_weights += b * (places + 2) * query_heads + head * group
        norm = tl.load(base_weights + places * query_heads + member, mask=asking, other=1).to(tl.float32)
        factor = RAISED / (norm * max(NEAREST, 1))
        values = (heads + head) * dim
        bases += b * base_count * width + values
        more_bases += (b * base_room - base_count) * width + values
        raw += (b * raw_room - base_count - base_room) * width + values
        share = tl.cdiv(tl.cdiv(places, splits), N) * N
        total = tl.zeros([M, D], tl.float32)
        for start in range(split * share, tl.minimum((split + 1) * share, places), N):
            place = start + tl.arange(0, N)
            here = place < places
            at = base_weights + place[None].to(tl.int64) * query_heads + member[:, None]
            units = tl.load(at, mask=asking[:, None] & here[None], other=0)
            at = tl.where(place < base_count, bases, tl.where(place < base_count + base_room, more_bases, raw))
            at = at[:, None] + place[:, None].to(tl.int64) * width + columns[None]
            v = tl.load(at, mask=here[:, None] & (columns < dim)[None], other=0.0)
            v = tl.where((tl.max(units, 0) > 0)[:, None], v, 0.0)  # memory for further rows may hold anything
            if CAST:
                v = v.to(tl.float32)
            p = (units.to(tl.float32) * factor[:, None]).to(v.dtype)
            total = tl.dot(p, v, total, input_precision="ieee")
        into = part_out + ((line * splits + split) * group + member)[:, None] * dim + columns[None]
        tl.store(into, total, mask=asking[:, None] & (columns < dim)[None])
    else:
        column, ranges = (split - splits) * Z + tl.arange(0, Z), tl.arange(0, S)
        here = (ranges < spread)[:, None] & (column < numbers)[None]
        for query in range(head * group, (head + 1) * group):
            at = part_sum + ((b * spread + ranges) * query_heads + query)[:, None] * numbers + column[None]
            found = tl.sum(tl.load(at, mask=here, other=0.0), 0)
            tl.store(sums + (b * query_heads + query) * numbers + column, found, mask=column < numbers)


@triton.jit(do_not_specialize=["places", "splits"])
def _finish(
    part_out, base_weights, sums, weight, bias, outputs, places, splits, numbers, query_heads, group, dim,
    DECODED: tl.constexpr, BIAS: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Join the sums of a query, and add f_d's last product of the summed codes."""
    index = tl.program_id(0)
    b, query = (index // query_heads).to(tl.int64), index % query_heads
    column, ranges = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, S)
    line, here, row = index // group, column < dim, query // group * dim + column
    parts = part_out + ((line * splits + ranges) * group + query % group)[:, None] * dim + column[None]
    out = tl.sum(tl.load(parts, mask=(ranges < splits)[:, None] & here[None], other=0.0), 0) / RAISED
    if DECODED:
        added = tl.zeros([C], tl.float32)
        for first in range(0, numbers, Z):
            z = first + tl.arange(0, Z)
            summed = tl.load(sums + index * numbers + z, mask=z < numbers, other=0.0)
            at = weight + row[:, None] * numbers + z[None]
            matrix = tl.load(at, mask=here[:, None] & (z < numbers)[None], other=0.0)
            added += tl.sum(matrix.to(tl.float32) * summed[None], 1)
        norms = base_weights + (b * (places + 2) + places) * query_heads + query
        added /= tl.load(norms).to(tl.float32) / UNIT
        if BIAS:
            coded = tl.load(norms + query_heads).to(tl.float32) / tl.load(norms).to(tl.float32)
            added += tl.load(bias + row, mask=here, other=0.0).to(tl.float32) * coded
        out += added
    tl.store(outputs + index * dim + column, out, mask=here)


def take_codes_triton(listed: Tensor, codes: Tensor, more: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    batch, count = listed.shape
    out = torch.empty(batch, count, codes.shape[2], dtype=codes.dtype, device=codes.device)
    _take[triton.cdiv(count, ROWS), batch](
        listed.contiguous(), codes.contiguous(), more, out, step, count, rows.seen, rows.sinks, rows.compressed,
        rows.block, more.shape[1], codes.shape[2], ROWS=ROWS, W=triton.next_power_of_2(codes.shape[2]),
    )  # fmt: skip
    return out


def split_rows(count: int, lines: int, tile: int, most: int) -> int:
    """Return how many ranges of `count` rows each of `lines` programs gets, of at least two tiles each."""
    return min(max(1, PROGRAMS // lines), most, triton.cdiv(count, 2 * tile))


def attend_compressed_triton(
    queries: Tensor, listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, cos: Tensor, sin: Tensor,
    step: Tensor, scaling: float, norm: tuple[Tensor, float] | None, counts: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    (batch, query_heads, _, dim), (_, count), raw = queries.shape, listed.shape, rows.raw
    heads, turning = raw.shape[2] // (2 * dim), cos.shape[1]
    group, listed, bases = query_heads // heads, listed.contiguous(), rows.bases.contiguous()
    decoded, inner, weight, bias = raw, raw, raw, None
    if expansion is not None:
        decoded, inner = expansion.keys.contiguous(), expansion.inner
        inner = inner if inner.stride(2) == 1 and inner.stride(0) == count * inner.stride(1) else inner.contiguous()
        weight, bias = expansion.weight.contiguous(), expansion.bias
    numbers = 0 if expansion is None else inner.shape[2]
    known, more, nearest = listed, listed, 0
    if rows.references is not None and rows.more_references is not None:
        known, more, nearest = rows.references.contiguous(), rows.more_references, rows.references.shape[2]
    rooms = bases.shape[1], rows.more_bases.shape[1], more.shape[1], raw.shape[1]
    places = rooms[0] + rooms[1] + rooms[3]
    sizes = count, rows.seen, rows.sinks, rows.compressed, rows.block, rows.raw_from, *rooms
    wide, of_code = triton.next_power_of_2(dim), max(16, triton.next_power_of_2(numbers))
    part = min(NUMBERS, of_code)
    parts = max(1, triton.cdiv(numbers, part))
    tile = 32 if raw.dtype == torch.float32 else ADDED
    weighed = split_rows(count + 1, batch * heads, TILE, RANGES[0])
    spread = split_rows(count + 1, batch * parts, tile, RANGES[1])
    gathered = split_rows(places, batch * heads, tile, RANGES[1])

    def reserve(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=raw.device)

    logits, most = reserve(batch, count + 1, query_heads), reserve(batch, weighed, query_heads)
    weights, sums = reserve(batch, places + 2, query_heads, dtype=torch.int64), reserve(batch, query_heads, numbers)
    part_sum, part_out = reserve(batch, spread, query_heads, numbers), reserve(batch * heads, gathered, group, dim)
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=raw.device)
    (counted, number), (scale, epsilon) = counts or (step, step), norm or (raw, 0.0)
    kinds = dict(NEAREST=nearest, CAST=is_interpreting() and raw.dtype == torch.bfloat16)
    run, own = dict(num_warps=4, num_stages=3), max(16, triton.next_power_of_2(group))
    _weigh[batch * heads, weighed](
        queries.contiguous(), listed, decoded, known, more, bases, rows.more_bases, raw, cos.contiguous(),
        sin.contiguous(), scale, step, logits, most, weights, counted, number,
        *sizes, weighed, heads, group, dim, scaling * LOG2E.value, epsilon,
        **kinds, DECODED=numbers > 0, NORM=norm is not None, REST=turning < dim, COUNT=counts is not None,
        M=own, N=TILE, HALF=turning // 2, H=max(16, triton.next_power_of_2(turning // 2)),
        R=max(16, triton.next_power_of_2(dim - turning)), num_warps=4, num_stages=1,
    )  # fmt: skip
    _spread[parts, spread, batch](
        listed, logits, most, known, more, inner, step, weights, part_sum,
        *sizes, weighed, spread, inner.stride(1), numbers, query_heads,
        **kinds, DECODED=numbers > 0, M=max(16, triton.next_power_of_2(query_heads)), N=16, L=tile, Z=part,
        S=RANGES[0], **run,
    )  # fmt: skip
    _gather[batch * heads, gathered + (triton.cdiv(numbers, part))](
        weights, part_sum, bases, rows.more_bases, raw, part_out, sums,
        rooms[0], rooms[1], rooms[3], gathered, spread, numbers, heads, group, dim,
        **kinds, M=own, N=tile, D=max(16, wide), Z=part, S=RANGES[1], **run,
    )  # fmt: skip
    _finish[batch * query_heads, triton.cdiv(dim, CHANNELS)](
        part_out, weights, sums, weight, raw if bias is None else bias, outputs, places, gathered, numbers,
        query_heads, group, dim,
        DECODED=numbers > 0, BIAS=bias is not None, C=CHANNELS, Z=min(512, of_code), S=RANGES[1], num_warps=4,
    )  # fmt: skip
    return outputs
