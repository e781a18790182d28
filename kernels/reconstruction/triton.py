"""Both operations in Triton: one launch takes codes, four attend.

Every program finds out by itself which rows are compressed, from the number of tokens on the device. Keys are made in
registers. Weights of rows become weights of bases, so that values are read once, and codes are summed before they are
multiplied with f_d's last matrix. Derivation: README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows
from kvbench.kernels.row_selection.triton import number_to_score, score_to_number
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

ROWS = 16  # listed rows of a program that gathers codes
TILE = 32  # listed rows whose keys a program makes
REGISTERS = 128  # registers of a thread that makes keys, if it needs no more; then four programs fit a multiprocessor
HEADS = 4  # heads whose keys a program makes
LISTED = 4  # listed rows whose weights are counted at once
SHARE = 4  # times that a program counts LISTED rows
ADDED = 32  # codes that are added to a sum at once
PLACES = 64  # bases that are added to a sum at once, in 16 bits
RANGES = 128  # most ranges of the list whose sums are joined
SPLITS, OTHERS = 28, 4  # most ranges of bases, and of other places, whose sums are joined
NUMBERS = 128  # most numbers of a code that a program sums
CHANNELS = 32  # channels of an output that a program writes
UNIT = tl.constexpr(2.0**32)  # the largest weight, as a whole number; weights of bases are counted in such parts of it
RAISED = tl.constexpr(2.0**14)  # the weights of a product are scaled to add up to at most this. float16 can hold them
# then, and among 2^17 rows also weights down to 2^-21 of the largest
SIZES = [  # arguments that vary from prompt to prompt
    *("listed_count", "seen", "compressed", "raw_from", "splits"),
    *("base_count", "base_room", "reference_room", "raw_room"),
]


@triton.jit
def _rounded(x, like):
    """Round float32 numbers to the dtype that the pointer `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _below(column, stop: tl.constexpr, size: tl.constexpr):
    """Return which of the columns 0, …, size − 1 are below `stop`. If all are, this is a constant."""
    return tl.full((size,), True, tl.int1) if stop == size else column < stop


@triton.jit
def _find_stop(step, seen, sinks, compressed, block):
    """Return the row after the last compressed one, and the first row that does not exist yet."""
    since = tl.load(step)
    blocks = tl.maximum((seen - sinks - compressed + since) // block - 1, 0)
    return sinks + compressed + block * blocks, seen + since


@triton.jit(do_not_specialize=["listed_count", "seen", "compressed", "room"])
def _take(
    listed,
    codes,
    more,
    out,
    step,
    listed_count,
    seen,
    sinks,
    compressed,
    block,
    room,
    width,
    ROWS: tl.constexpr,
    W: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    entry, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, W)
    row = tl.load(listed + b * listed_count + entry, mask=entry < listed_count, other=0).to(tl.int32)  # (ROWS,)
    stop, _ = _find_stop(step, seen, sinks, compressed, block)
    old = row - sinks
    stored, there = (entry < listed_count) & (old >= 0) & (row < stop), (column < width)[None]
    at = (b * compressed + old)[:, None] * width + column[None]
    taken = tl.load(codes + at, mask=(stored & (old < compressed))[:, None] & there, other=0)  # (ROWS, W)
    at = (b * room + old - compressed)[:, None] * width + column[None]
    others = tl.load(more + at, mask=(stored & (old >= compressed))[:, None] & there, other=0)  # (ROWS, W)
    taken = tl.where((old < compressed)[:, None], taken, others)
    into = (b * listed_count + entry)[:, None] * width + column[None]
    tl.store(out + into, taken, mask=(entry < listed_count)[:, None] & there)


@triton.jit
def _refer(references, more_references, at, compressed, stored, NEAREST: tl.constexpr):
    """Load the references at the indices `at`, which are numbers of bases; 0 for rows that are not compressed."""
    known, first = at < compressed * NEAREST, more_references - compressed.to(tl.int64) * NEAREST
    base = tl.load(references + at, mask=stored & known, other=0).to(tl.int32)  # (N,)
    return base + tl.load(first + at, mask=stored & (known == 0), other=0).to(tl.int32)  # (N,)


@triton.jit
def _read(at, here, column, there):
    """Return some columns (D,) of the rows at the pointers `at` (ROWS,) in float32, zeros where `here` is false."""
    return tl.load(at[:, None] + column[None], mask=here[:, None] & there[None], other=0.0).to(tl.float32)  # (ROWS, D)


@triton.jit
def _normed(x, column, there, inverse, scale, like):
    """Multiply some columns by the inverse of their head's root mean square and by the norm's weight."""
    weight = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)[None]  # (C,)
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
    row = tl.load(listed + entry, mask=entry < listed_count, other=0).to(tl.int32)  # (N,)
    row = tl.where(entry == listed_count, now, row)
    exists = ((entry < listed_count) & (row < now)) | (entry == listed_count)
    return tl.where(exists, row, 0), exists, exists & (row >= sinks) & (row < stop)


@triton.jit(do_not_specialize=SIZES)
def _weigh(
    queries,
    listed,
    decoded,
    references,
    more_references,
    bases,
    more_bases,
    raw,
    cos,
    sin,
    scale,
    step,
    logits,
    counted,
    counts,
    number,
    listed_count,
    seen,
    sinks,
    compressed,
    block,
    raw_from,
    base_count,
    base_room,
    reference_room,
    raw_room,
    heads,
    group,
    dim,
    factor,
    epsilon,
    NEAREST: tl.constexpr,
    DECODED: tl.constexpr,
    NORM: tl.constexpr,
    REST: tl.constexpr,
    COUNT: tl.constexpr,
    CAST: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HALF: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    CAP: tl.constexpr,
):
    """Make some heads of the keys of N listed rows, and their logits in base 2 with these heads' queries.

    A head has the channels that turn, in two halves, and perhaps others.
    """
    b, turning, query_heads = tl.program_id(2).to(tl.int64), 2 * HALF, heads * group
    entries, places, width = listed_count + 1, base_count + base_room + raw_room, 2 * heads * dim
    member, first, rest = tl.arange(0, M), tl.arange(0, H), turning + tl.arange(0, R)
    second, there, others = first + HALF, _below(first, HALF, H), rest < dim
    asking = member < group
    references += b * compressed * NEAREST
    more_references += b * reference_room * NEAREST
    sample_bases = bases + b * base_count * width
    further = more_bases + (b * base_room - base_count) * width
    sample_raw = raw + (b * raw_room - raw_from) * width
    entry = tl.program_id(0) * N + tl.arange(0, N)
    listed += b * listed_count
    row, exists, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
    angle, plain = row[:, None] * turning + first[None], exists & (stored == 0)
    cosine = tl.load(cos + angle, mask=there[None], other=1.0).to(raw.dtype.element_ty)  # (N, H)
    sine = tl.load(sin + angle, mask=there[None], other=0.0).to(raw.dtype.element_ty)  # (N, H)
    raw_at = tl.where(row < raw_from, sample_bases, sample_raw) + row.to(tl.int64) * width
    decoded_at = decoded + (b * listed_count + entry) * (width // 2)
    bases_at = tl.tuple([])  # of each reference
    for nearest in tl.static_range(NEAREST):
        base = _refer(references, more_references, (row - sinks) * NEAREST + nearest, compressed, stored, NEAREST)
        bases_at += (tl.where(base < base_count, sample_bases, further) + base.to(tl.int64) * width,)
    share, any_plain = tl.where(stored, 1.0 / max(NEAREST, 1), 1.0)[:, None], tl.max(plain.to(tl.int32), 0) > 0
    begin = tl.program_id(1) * HEADS
    for head in range(begin, tl.minimum(begin + HEADS, heads)):
        x, y, z = tl.zeros((N, H), tl.float32), tl.zeros((N, H), tl.float32), tl.zeros((N, R), tl.float32)
        for nearest in tl.static_range(NEAREST):
            at = bases_at[nearest] + head * dim
            x += _read(at, stored, first, there)
            y += _read(at, stored, second, there)
            if REST:
                z += _read(at, stored, rest, others)
        x, y, z = x * share, y * share, z * share
        if any_plain:
            at = raw_at + head * dim
            x += _read(at, plain, first, there)
            y += _read(at, plain, second, there)
            if REST:
                z += _read(at, plain, rest, others)
        if DECODED:
            at = decoded_at + head * dim
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
        c, s = cosine.to(tl.float32), sine.to(tl.float32)
        kx, ky = _turn(x, -y, c, s, raw).to(raw.dtype.element_ty), _turn(y, x, c, s, raw).to(raw.dtype.element_ty)
        query = queries + ((b * heads + head) * group + member) * dim
        qx = tl.load(query[:, None] + first[None], mask=asking[:, None] & there[None], other=0.0)  # (M, H)
        qy = tl.load(query[:, None] + second[None], mask=asking[:, None] & there[None], other=0.0)  # (M, H)
        if CAST:
            qx, qy, kx, ky = qx.to(tl.float32), qy.to(tl.float32), kx.to(tl.float32), ky.to(tl.float32)
        head_logits = tl.dot(qy, ky.T, tl.dot(qx, kx.T, input_precision="ieee"), input_precision="ieee")  # (M, N)
        if REST:
            qz = tl.load(query[:, None] + rest[None], mask=asking[:, None] & others[None], other=0.0)  # (M, R)
            kz = z.to(raw.dtype.element_ty)
            if CAST:
                qz, kz = qz.to(tl.float32), kz.to(tl.float32)
            head_logits = tl.dot(qz, kz.T, head_logits, input_precision="ieee")  # (M, N)
        head_logits = tl.where(exists[None], cap_tile(head_logits * factor, CAP), float("-inf"))
        asked = head * group + member
        into = logits + (b * entries + entry[None]) * query_heads + asked[:, None]
        tl.store(into, head_logits, mask=asking[:, None] & (entry < entries)[None])
        into = counted + (b * (places + 2) + places) * query_heads + asked
        tl.atomic_max(into, tl.max(score_to_number(head_logits).to(tl.int64), 1), mask=asking, sem="relaxed")
    if COUNT and tl.program_id(1) == 0:
        tl.atomic_add(counts + tl.load(number), (tl.sum(exists.to(tl.int32)) * query_heads).to(tl.int64))


@triton.jit
def _count(counted, place, query_heads, head, units, here):
    """Add the weights (N, M) of rows to those of their places, as whole numbers, so that the order does not matter."""
    at = counted + place[:, None].to(tl.int64) * query_heads + head[None]
    tl.atomic_add(at, units, mask=here[:, None] & (head < query_heads)[None], sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _spread(
    listed,
    logits,
    references,
    more_references,
    inner,
    step,
    counted,
    part_sum,
    listed_count,
    seen,
    sinks,
    compressed,
    block,
    raw_from,
    base_count,
    base_room,
    reference_room,
    raw_room,
    splits,
    parts,
    inner_width,
    numbers,
    query_heads,
    NEAREST: tl.constexpr,
    CAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    Z: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Sum codes, or add weights of rows to those of their bases, in a range of the list.

    This is done for all queries of a sample. Each of the first `parts` programs of a range sums some numbers of a code.
    """
    part, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, entries, places = tl.arange(0, M), listed_count + 1, base_count + base_room + raw_room
    asking = head < query_heads
    counted += b * (places + 2) * query_heads
    # (M,)
    most = number_to_score(tl.load(counted + places * query_heads + head, mask=asking, other=2**31).to(tl.uint32))
    logits += b * entries * query_heads
    listed += b * listed_count
    if part < parts:
        column = part * Z + tl.arange(0, Z)
        there, acc = column < numbers, tl.zeros([M, Z], tl.float32)
        share = tl.cdiv(tl.cdiv(entries, splits), L) * L
        for start in range(split * share, tl.minimum((split + 1) * share, entries), L):
            entry = start + tl.arange(0, L)
            at = logits + entry[None].to(tl.int64) * query_heads + head[:, None]
            p = tl.load(at, mask=(entry < entries)[None] & asking[:, None], other=float("-inf"))  # (M, L)
            _, _, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
            p = tl.where(stored[None], tl.exp2(p - most[:, None]), 0.0)
            at = inner + (b * listed_count + entry) * inner_width
            # (L, Z)
            z = tl.load(at[:, None] + column[None], mask=(entry < listed_count)[:, None] & there[None], other=0.0)
            if CAST:
                z = z.to(tl.float32)
            acc = tl.dot(p.to(z.dtype), z, acc, input_precision="ieee")  # (M, Z)
        into = part_sum + ((b * splits + split) * query_heads + head)[:, None] * numbers + column[None]
        tl.store(into, acc, mask=asking[:, None] & there[None])
    else:
        references += b * compressed * NEAREST
        more_references += b * reference_room * NEAREST
        first = (split * (tl.num_programs(0) - parts) + part - parts) * N * SHARE
        for start in range(first, tl.minimum(first + N * SHARE, entries), N):
            entry = start + tl.arange(0, N)
            at = logits + entry[:, None].to(tl.int64) * query_heads + head[None]
            p = tl.load(at, mask=(entry < entries)[:, None] & asking[None], other=float("-inf"))  # (N, M)
            row, exists, stored = _list(listed, entry, listed_count, seen, sinks, compressed, block, step)
            p = tl.exp2(p - most[None])
            units = (tl.where(p <= 1.0, p, 0.0) * UNIT).to(tl.int64)
            place = tl.where(row < raw_from, row, base_count + base_room + row - raw_from)
            _count(counted, place, query_heads, head, units * max(NEAREST, 1), exists & (stored == 0))
            for nearest in tl.static_range(NEAREST):
                at = (row - sinks) * NEAREST + nearest
                base = _refer(references, more_references, at, compressed, stored, NEAREST)
                _count(counted, base, query_heads, head, units, stored)
            if NEAREST == 0:  # rows without a base
                units = tl.sum(tl.where(stored[:, None], units, 0), 0)
                tl.atomic_add(counted + (places + 1) * query_heads + head, units, mask=asking, sem="relaxed")


@triton.jit
def _add_places(
    acc,
    total,
    counted,
    values,
    low,
    high,
    factor,
    asked,
    query_heads,
    width,
    CHECK: tl.constexpr,
    CAST: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Add the weighed values (N, D) of a range of places to the sums (M, D) of G queries, and the weights to theirs."""
    columns = tl.arange(0, D)
    for start in range(low, high, N):
        place = start + tl.arange(0, N)
        here = place < high
        at = counted + place[None].to(tl.int64) * query_heads + asked[:, None]
        units = tl.load(at, mask=here[None] & (asked < query_heads)[:, None], other=0)  # (G, N)
        if CHECK:  # memory for further rows may hold anything
            here &= tl.max(units, 0) > 0
        at = values + place[:, None].to(tl.int64) * width + columns[None]
        v = tl.load(at, mask=here[:, None] & _below(columns, DIM, D)[None], other=0.0)  # (N, D)
        if CAST:
            v = v.to(tl.float32)
        total += units
        p = (units.to(tl.float32) * factor).to(v.dtype)
        p = tl.reshape(tl.broadcast_to(p[None], (M // G, G, N)), (M, N))  # as many rows as matrix units take
        acc = tl.dot(p, v, acc, input_precision="ieee")  # (M, D)
    return acc, total


@triton.jit(do_not_specialize=["entries", "base_count", "base_room", "raw_room", "own_splits", "splits", "spread"])
def _gather(
    counted,
    part_sum,
    bases,
    more_bases,
    raw,
    part_out,
    part_total,
    sums,
    entries,
    base_count,
    base_room,
    raw_room,
    own_splits,
    splits,
    spread,
    numbers,
    heads,
    group,
    NEAREST: tl.constexpr,
    CAST: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    Z: tl.constexpr,
    S: tl.constexpr,
):
    """Sum a range of the bases, or of further bases and the rows that are not compressed, for the queries of a KV head.

    Further programs join the sums of codes.
    """
    line, split = tl.program_id(0), tl.program_id(1)
    b, head, query_heads = (line // heads).to(tl.int64), line % heads, heads * group
    if split < splits:
        width, member, columns = 2 * heads * DIM, tl.arange(0, G), tl.arange(0, D)
        asked = tl.where(member < group, head * group + member, query_heads)
        counted += b * (base_count + base_room + raw_room + 2) * query_heads
        factor = RAISED / (UNIT * max(NEAREST, 1)) / entries
        values, acc, total = (heads + head) * DIM, tl.zeros([M, D], tl.float32), tl.zeros([G, N], tl.int64)
        if split < own_splits:
            share = tl.cdiv(base_count, own_splits)
            acc, total = _add_places(
                acc,
                total,
                counted,
                bases + b * base_count * width + values,
                split * share,
                tl.minimum((split + 1) * share, base_count),
                factor,
                asked,
                query_heads,
                width,
                False,
                CAST,
                DIM,
                M,
                G,
                N,
                D,
            )
        else:
            first, all_others = split - own_splits, splits - own_splits
            for is_raw in tl.static_range(2):
                room = raw_room if is_raw else base_room
                before = base_count + base_room if is_raw else base_count
                source = raw if is_raw else more_bases
                share = tl.cdiv(room, all_others)
                acc, total = _add_places(
                    acc,
                    total,
                    counted + before * query_heads,
                    source + b * room * width + values,
                    first * share,
                    tl.minimum((first + 1) * share, room),
                    factor,
                    asked,
                    query_heads,
                    width,
                    True,
                    CAST,
                    DIM,
                    M,
                    G,
                    N,
                    D,
                )
        into = part_total + (line * splits + split) * group + member
        tl.store(into, tl.sum(total, 1), mask=member < group)
        member = tl.arange(0, M)
        out = part_out + ((line * splits + split) * group + member)[:, None] * DIM + columns[None]
        tl.store(out, acc, mask=(member < group)[:, None] & (columns < DIM)[None])
    else:
        part, query = (split - splits) // group, head * group + (split - splits) % group
        column, ranges = part * Z + tl.arange(0, Z), tl.arange(0, S)
        here = (ranges < spread)[:, None] & (column < numbers)[None]
        sums_at = part_sum + ((b * spread + ranges) * query_heads + query)[:, None] * numbers + column[None]
        total_of_codes = tl.sum(tl.load(sums_at, mask=here, other=0.0), 0)  # (S, Z)
        tl.store(sums + (b * query_heads + query) * numbers + column, total_of_codes, mask=column < numbers)


@triton.jit(do_not_specialize=["entries", "places", "splits"])
def _finish(
    part_out,
    part_total,
    counted,
    sums,
    weight,
    outputs,
    sinks,
    entries,
    places,
    splits,
    numbers,
    query_heads,
    group,
    dim,
    NEAREST: tl.constexpr,
    DECODED: tl.constexpr,
    C: tl.constexpr,
    Z: tl.constexpr,
    S: tl.constexpr,
):
    """Join the sums of a query, and its head's sink, and add f_d's last product of the summed codes."""
    index = tl.program_id(0)
    b, query = (index // query_heads).to(tl.int64), index % query_heads
    column, ranges = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, S)
    here, parts = column < dim, (index // group * splits + ranges) * group + query % group
    counted += (b * (places + 2) + places) * query_heads + query
    # (S,)
    total = tl.sum(tl.load(part_total + parts, mask=ranges < splits, other=0), 0) + tl.load(counted + query_heads)
    total = total.to(tl.float32) / (UNIT * max(NEAREST, 1))  # the sum of all weights, of which the largest is 1
    parts = part_out + parts[:, None] * dim + column[None]
    # (S, C)
    out = tl.sum(tl.load(parts, mask=(ranges < splits)[:, None] & here[None], other=0.0), 0) * (entries / RAISED)
    if DECODED:
        for first in range(0, numbers, Z):
            z = first + tl.arange(0, Z)
            summed = tl.load(sums + index * numbers + z, mask=z < numbers, other=0.0)  # (Z,)
            at = weight + (query // group * dim + column)[:, None] * numbers + z[None]
            matrix = tl.load(at, mask=here[:, None] & (z < numbers)[None], other=0.0)  # (C, Z)
            out += tl.sum(matrix.to(tl.float32) * summed[None], 1)
    whole = tl.maximum(total, 1)
    if sinks is not None:
        most = number_to_score(tl.load(counted).to(tl.uint32))
        whole += tl.exp2(tl.load(sinks + query).to(tl.float32) * LOG2E - most)
    out = tl.where(total > 0, out / whole, float("nan"))  # all weights are 0 if a logit is not a number
    tl.store(outputs + index * dim + column, out, mask=here)


def take_codes_triton(listed: Tensor, codes: Tensor, more: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    batch, count = listed.shape
    out = torch.empty(batch, count, codes.shape[2], dtype=codes.dtype, device=codes.device)
    _take[triton.cdiv(count, ROWS), batch](
        listed.contiguous(),
        codes.contiguous(),
        more,
        out,
        step,
        count,
        rows.seen,
        rows.sinks,
        rows.compressed,
        rows.block,
        more.shape[1],
        codes.shape[2],
        ROWS=ROWS,
        W=triton.next_power_of_2(codes.shape[2]),
    )
    return out


def attend_compressed_triton(
    queries: Tensor,
    listed: Tensor,
    expansion: Expansion | None,
    rows: ReferencedRows,
    cos: Tensor,
    sin: Tensor,
    step: Tensor,
    scaling: float,
    norm: tuple[Tensor, float] | None,
    counts: tuple[Tensor, Tensor] | None,
    counted: Tensor,
    extras: SoftmaxExtras | None,
) -> Tensor:
    (batch, query_heads, _, dim), (_, count), raw = queries.shape, listed.shape, rows.raw
    heads, turning = raw.shape[2] // (2 * dim), cos.shape[1]
    group, listed, bases = query_heads // heads, listed.contiguous(), rows.bases.contiguous()
    decoded, inner, weight, numbers = raw, raw, raw, 0
    if expansion is not None:
        decoded, inner, numbers = expansion.keys.contiguous(), expansion.inner, expansion.inner.shape[2]
        inner = inner if inner.stride(2) == 1 and inner.stride(0) == count * inner.stride(1) else inner.contiguous()
        weight = expansion.weight.contiguous()
    known, more, nearest = listed, listed, 0
    if rows.references is not None and rows.more_references is not None:
        known, more, nearest = rows.references.contiguous(), rows.more_references, rows.references.shape[2]
    rooms = bases.shape[1], rows.more_bases.shape[1], more.shape[1], raw.shape[1]
    places = rooms[0] + rooms[1] + rooms[3]
    sizes = count, rows.seen, rows.sinks, rows.compressed, rows.block, rows.raw_from, *rooms
    of_code, of_group = max(16, triton.next_power_of_2(numbers)), triton.next_power_of_2(group)
    part, tile = min(NUMBERS, of_code), 32 if raw.dtype == torch.float32 else PLACES
    parts = triton.cdiv(numbers, part)
    spread = min(RANGES, triton.cdiv(count + 1, 2 * ADDED))
    of_bases = min(SPLITS, triton.cdiv(rooms[0], 2 * tile))
    gathered = of_bases + min(OTHERS, triton.cdiv(rooms[1] + rooms[3], 2 * tile))

    def reserve(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=raw.device)

    logits, sums = reserve(batch, count + 1, query_heads), reserve(batch, query_heads, numbers)
    part_sum, part_out = reserve(batch, spread, query_heads, numbers), reserve(batch * heads, gathered, group, dim)
    part_total = reserve(batch * heads, gathered, group, dtype=torch.int64)
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=raw.device)
    (attended, number), (scale, epsilon) = counts or (step, step), norm or (raw, 0.0)
    kinds = dict(NEAREST=nearest, CAST=is_interpreting() and raw.dtype == torch.bfloat16)
    run, padded_group = dict(num_warps=4, num_stages=3), max(16, of_group)
    more_needed = raw.dtype == torch.float32 or norm is not None or turning < dim or dim > 128
    more_needed |= padded_group > 16 or nearest > 8
    limit = {} if more_needed else {"maxnreg": REGISTERS}
    _weigh[triton.cdiv(count + 1, TILE), triton.cdiv(heads, HEADS), batch](
        queries.contiguous(),
        listed,
        decoded,
        known,
        more,
        bases,
        rows.more_bases,
        raw,
        cos.contiguous(),
        sin.contiguous(),
        scale,
        step,
        logits,
        counted,
        attended,
        number,
        *sizes,
        heads,
        group,
        dim,
        scaling * LOG2E.value,
        epsilon,
        **kinds,
        DECODED=numbers > 0,
        NORM=norm is not None,
        REST=turning < dim,
        COUNT=counts is not None,
        HEADS=HEADS,
        M=padded_group,
        N=TILE,
        HALF=turning // 2,
        H=max(16, triton.next_power_of_2(turning // 2)),
        R=max(16, triton.next_power_of_2(dim - turning)),
        CAP=find_cap(extras),
        num_warps=4,
        num_stages=1,
        **limit,
    )
    _spread[parts + triton.cdiv(count + 1, spread * LISTED * SHARE), spread, batch](
        listed,
        logits,
        known,
        more,
        inner,
        step,
        counted,
        part_sum,
        *sizes,
        spread,
        parts,
        inner.stride(1),
        numbers,
        query_heads,
        **kinds,
        M=max(16, triton.next_power_of_2(query_heads)),
        N=LISTED,
        L=ADDED,
        Z=part,
        SHARE=SHARE,
        **run,
    )
    _gather[batch * heads, gathered + parts * group](
        counted,
        part_sum,
        bases,
        rows.more_bases,
        raw,
        part_out,
        part_total,
        sums,
        count + 1,
        rooms[0],
        rooms[1],
        rooms[3],
        of_bases,
        gathered,
        spread,
        numbers,
        heads,
        group,
        **kinds,
        DIM=dim,
        M=padded_group,
        G=of_group,
        N=tile,
        D=max(16, triton.next_power_of_2(dim)),
        Z=part,
        S=RANGES,
        **run,
    )
    _finish[batch * query_heads, triton.cdiv(dim, CHANNELS)](
        part_out,
        part_total,
        counted,
        sums,
        weight,
        outputs,
        get_sinks(extras),
        count + 1,
        places,
        gathered,
        numbers,
        query_heads,
        group,
        dim,
        NEAREST=nearest,
        DECODED=numbers > 0,
        C=CHANNELS,
        Z=min(512, of_code),
        S=SPLITS + OTHERS,
        num_warps=4,
    )
    return outputs
