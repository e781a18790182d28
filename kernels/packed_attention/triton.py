"""Decode over packed rows in Triton, in three launches: append, attend to ranges of rows, join the ranges.

README.md says why codes are taken apart in the order that they are.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, add_tile, cap_tile, combine_splits, find_cap
from kvbench.kernels.packed_attention.rows import PackedRows
from kvbench.kernels.quantize.triton import round_tile
from kvbench.kernels.rope_append.triton import rotate_head
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

WARPS = 1056  # most warps that rows are split over: 8 on each of 132 multiprocessors, by their registers
SPLITS = 256  # most programs of one head, which `combine_splits` reads at once
LEAST = 16  # least tiles of a head that the plan counts, because an answer may fill them
RAWS = 4  # most programs of one head that read rows with raw values
UNITS = 8  # words of a channel in a tile of keys, as many as the matrix units take columns
CODES = 4  # codes of each of these words that are unpacked at once, so that a tile has 32 rows
ROWS = 16  # rows of a tile of raw rows


@triton.jit(do_not_specialize=["key_room", "value_room"])
def _append(
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    out,
    step,
    lengths,
    ring_keys,
    ring_values,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    heads,
    query_heads,
    turning,
    epsilon,
    s_q,
    s_k,
    s_v,
    key_room,
    value_room,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RING: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Rotate or write one head of one token, or quantize a group of keys or the row of values that is due.

    A sample has programs for its query heads, the heads of its new keys, those of its new values, the rows of values
    that leave the residual, and the groups of keys that do.
    """
    b, index = tl.program_id(0), tl.program_id(1)
    since = tl.load(step)
    column = tl.arange(0, D)
    there = column < DIM
    PER: tl.constexpr = 8 // BITS
    SIZE: tl.constexpr = GROUP // PER  # bytes of a group
    if index < query_heads:
        source = queries + b.to(tl.int64) * s_q + index * DIM
        head_row = rotate_head(source, query_norm, cos, sin, since, column, turning, DIM, epsilon, out, NORM)
        tl.store(out + (b.to(tl.int64) * query_heads + index) * DIM + column, head_row, mask=there)
    else:
        kind, rest = (index - query_heads) // heads, (index - query_heads) % heads
        h, number = rest, 0
        if kind >= 3:  # the groups of one head have consecutive programs
            number = index - query_heads - 3 * heads
            h = number // (RESIDUAL // GROUP)
            number = number % (RESIDUAL // GROUP)
        head = (b * heads + h).to(tl.int64)
        held = tl.load(lengths + head)
        now = held + since
        slot = now % RING
        byte, part = tl.arange(0, BYTES), tl.arange(0, PER)
        element = byte[:, None] * PER + part[None]
        if kind == 0:
            source = keys + b.to(tl.int64) * s_k + h * DIM
            head_row = rotate_head(source, key_norm, cos, sin, since, column, turning, DIM, epsilon, out, NORM)
            tl.store(ring_keys + (head * RING + slot) * DIM + column, head_row, mask=there)
        elif kind == 1:
            head_row = tl.load(values + b.to(tl.int64) * s_v + h * DIM + column, mask=there)  # (D,)
            tl.store(ring_values + (head * RING + slot) * DIM + column, head_row, mask=there)
        elif kind == 2:
            if (since > 0) & (now > RESIDUAL):
                row = now - RESIDUAL - 1
                group = tl.arange(0, GROUPS)
                real = group < DIM // GROUP
                in_group = (element < GROUP)[None]
                at = group[:, None, None] * GROUP + element[None]
                here = real[:, None, None] & in_group
                # (GROUPS, BYTES, PER)
                numbers = tl.load(ring_values + (head * RING + row % RING) * DIM + at, mask=here, other=0.0)
                scale, zero, codes = round_tile(numbers.to(tl.float32), in_group, part, BITS)
                line = head * value_room + row - tl.maximum(held - RESIDUAL, 0)
                into = value_codes + line * (DIM // PER) + group[:, None] * SIZE + byte[None]
                tl.store(into, codes, mask=real[:, None] & (byte < SIZE)[None])
                tl.store(value_scale + line * (DIM // GROUP) + group, scale, mask=real)
                tl.store(value_zero + line * (DIM // GROUP) + group, zero, mask=real)
        else:
            if (since > 0) & (now % RESIDUAL == 0):
                first = now - RESIDUAL + number * GROUP
                in_group = (element < GROUP)[None]
                at = ((first + element) % RING * DIM)[None] + column[:, None, None]
                here = there[:, None, None] & in_group
                numbers = tl.load(ring_keys + head * RING * DIM + at, mask=here, other=0.0)  # (D, BYTES, PER)
                scale, zero, codes = round_tile(numbers.to(tl.float32), in_group, part, BITS)
                line = (head * key_room + (first - (held - held % RESIDUAL)) // GROUP) * DIM + column
                into = key_codes + line[:, None] * SIZE + byte[None]
                tl.store(into, codes, mask=there[:, None] & (byte < SIZE)[None])
                tl.store(key_scale + line, scale, mask=there)
                tl.store(key_zero + line, zero, mask=there)


@triton.jit
def _expand(words, scale, zero, shift, like, BITS: tl.constexpr):
    """Return the numbers whose codes begin at these bits below 16 of the words, in the dtype of `like`.

    A code is cut out where it is, into the mantissa of 2^23. Multiplied and subtracted it is exact.
    """
    raised = ((words & ((2**BITS - 1) << shift)) | 0x4B000000).to(tl.float32, bitcast=True)
    factor = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    code = raised * factor - 8388608.0 * factor
    return (code * scale.to(tl.float32) + zero.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
def _values(
    row,
    here,
    codes,
    scale,
    zero,
    shifts,
    like,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WORDS: tl.constexpr,
    HALVES: tl.constexpr,
    PART: tl.constexpr,
):
    """Return quantized values of the rows (N,), with the channels in the order of `_channels`."""
    PER: tl.constexpr = HALVES * PART
    word = tl.arange(0, WORDS)
    where = here[:, None] & (word < DIM // PER)[None]
    words = tl.load(codes + (row * (DIM // PER))[:, None] + word[None], mask=where, other=0).to(tl.int32)  # (N, WORDS)
    at = (row * (DIM // GROUP))[:, None] + (word * PER // GROUP)[None]
    steps, least = tl.load(scale + at, mask=where, other=0.0), tl.load(zero + at, mask=where, other=0.0)  # (N, WORDS)
    halves = words[:, None, :] >> tl.load(shifts + tl.arange(0, HALVES) * PART)[None, :, None]  # (HALVES,)
    shift = tl.load(shifts + tl.arange(0, PART))[None, None, :, None]  # (PART,)
    values = _expand(halves[:, :, None, :], steps[:, None, None, :], least[:, None, None, :], shift, like, BITS)
    return tl.reshape(values, [row.shape[0], PER * WORDS])


@triton.jit
def _channels(DIM: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr):
    """Return the channel of each column of the values, (PER·WORDS,), and which columns have one."""
    place = tl.arange(0, PER * WORDS)
    return place % WORDS * PER + place // WORDS, place % WORDS < DIM // PER


@triton.jit
def _ring_values(row, here, head, ring, RING: tl.constexpr, DIM: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr):
    """Return raw values of the rows (N,), with the channels in the order of `_channels`."""
    channel, known = _channels(DIM, PER, WORDS)
    at = ((head * RING + row % RING) * DIM)[:, None] + channel[None]
    return tl.load(ring + at, mask=here[:, None] & known[None], other=0.0)  # (N, PER * WORDS)


@triton.jit
def _update(q, m, norm, acc, k, v, here, weight, scale, MASS: tl.constexpr, CAST: tl.constexpr, CAP: tl.constexpr):
    """Process keys (D, N) and values (N, …) of N rows, of which those `here` exist, with an online softmax."""
    if CAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    logits = cap_tile(tl.dot(q, k, input_precision="ieee") * scale, CAP)  # (M, N)
    if MASS:
        logits += tl.log2(weight)[None]
    logits = tl.where(here[None], logits, float("-inf"))
    return add_tile(logits, v, m, norm, acc)


@triton.jit
def _tile(
    q,
    m,
    norm,
    acc,
    first,
    low,
    high,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    head,
    held,
    mass,
    shifts,
    like,
    scale,
    RAW: tl.constexpr,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RING: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    HALVES: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    CODES: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Process the tile of rows from `first` on, of which those from `low` to `high` exist.

    Pointers to keys and values are those of row 0. With RAW the values are not quantized and lie in a ring.
    """
    PER: tl.constexpr = HALVES * PART
    IN: tl.constexpr = GROUP // PER  # words of a group
    word, column = tl.arange(0, UNITS), tl.arange(0, D)
    if UNITS % IN == 0:  # then a tile begins with a group, which tells the compiler which words are neighbours
        group, within = first // GROUP + word // IN, word % IN
    else:
        group, within = (first // PER + word) // IN, (first // PER + word) % IN
    unit = first // PER + word
    where = (column < DIM)[:, None] & (unit * PER < high)[None]
    at = (group * DIM)[None] + column[:, None]
    words = tl.load(key_codes + at * IN + within[None], mask=where, other=0).to(tl.int32)  # (D, UNITS)
    # (D, UNITS)
    steps, least = tl.load(key_scale + at, mask=where, other=0.0), tl.load(key_zero + at, mask=where, other=0.0)
    some = tl.arange(0, CODES)
    shift = tl.load(shifts + some)[None, :, None]  # (CODES,)
    for turn in range(PER // CODES):
        begun = words >> tl.load(shifts + turn * CODES + tl.zeros([1, 1], tl.int32))  # (1, 1)
        k = _expand(begun[:, None, :], steps[:, None, :], least[:, None, :], shift, like, BITS)
        k = tl.reshape(k, [D, CODES * UNITS])
        row = tl.reshape((unit * PER)[None] + (turn * CODES + some)[:, None], [CODES * UNITS])
        here = (row >= low) & (row < high)
        if RAW:
            v = _ring_values(row, here, head, value_codes, RING, DIM, PER, WORDS)
        else:
            v = _values(
                row, here, value_codes, value_scale, value_zero, shifts, like, BITS, GROUP, DIM, WORDS, HALVES, PART
            )
        weight = norm
        if MASS:
            weight = tl.load(mass + row, mask=here & (row < held), other=1).to(tl.float32)  # (CODES * UNITS,)
        m, norm, acc = _update(q, m, norm, acc, k, v, here, weight, scale, MASS, CAST, CAP)
    return m, norm, acc


@triton.jit
def _tiles(low, high, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return in how many tiles the rows from `low` to `high` are read. The first tile begins with a group."""
    return tl.where(high > low, tl.cdiv(high - low // GROUP * GROUP, TILE), 0)


@triton.jit(do_not_specialize=["splits", "raws", "key_room", "value_room"])
def _attend(
    queries,
    step,
    lengths,
    mass,
    starts,
    shifts,
    key_codes,
    key_scale,
    key_zero,
    key_starts,
    value_codes,
    value_scale,
    value_zero,
    value_starts,
    more_key_codes,
    more_key_scale,
    more_key_zero,
    more_value_codes,
    more_value_scale,
    more_value_zero,
    ring_keys,
    ring_values,
    part_acc,
    part_max,
    part_norm,
    group,
    splits,
    raws,
    key_room,
    value_room,
    scale,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RING: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    HALVES: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend with M queries of one KV head to some of its rows.

    The first `raws` programs of a head take the tiles of rows with raw values in turn, and the others those of
    quantized rows.
    """
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)
    index = tl.program_id(2) * M + tl.arange(0, M)
    asking = index < group
    where = asking[:, None] & (column < DIM)[None]
    q = tl.load(queries + (head * group + index)[:, None] * DIM + column[None], mask=where, other=0.0)  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    PER: tl.constexpr = HALVES * PART
    TILE: tl.constexpr = UNITS * PER
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, PER * WORDS], tl.float32)
    held = tl.load(lengths + head).to(tl.int32)
    now = held + tl.load(step)
    mass += tl.load(starts + head)
    old_keys, old_values = held - held % RESIDUAL, tl.maximum(held - RESIDUAL, 0)
    past_keys, past_values = now - now % RESIDUAL, tl.maximum(now - RESIDUAL, 0)
    # the first row of this head in each part of the memory
    line = tl.load(key_starts + head) * DIM
    key_codes, key_scale, key_zero = key_codes + line * (GROUP // PER), key_scale + line, key_zero + line
    line = (head * key_room - old_keys // GROUP) * DIM
    more_key_codes += line * (GROUP // PER)
    more_key_scale += line
    more_key_zero += line
    line = tl.load(value_starts + head)
    value_codes += line * (DIM // PER)
    value_scale += line * (DIM // GROUP)
    value_zero += line * (DIM // GROUP)
    line = head * value_room - old_values
    more_value_codes += line * (DIM // PER)
    more_value_scale += line * (DIM // GROUP)
    more_value_zero += line * (DIM // GROUP)
    if split >= raws:
        middle = tl.minimum(old_keys, past_values)
        one = _tiles(0, old_values, GROUP, TILE)  # keys and values are held
        two = one + _tiles(old_values, middle, GROUP, TILE)  # keys are held, values appended
        for tile in range(split - raws, two + _tiles(old_keys, past_values, GROUP, TILE), splits - raws):
            more_keys, more_values = tile >= two, tile >= one
            low = tl.where(more_keys, old_keys, tl.where(more_values, old_values, 0))
            high = tl.where(more_keys, past_values, tl.where(more_values, middle, old_values))
            turn = tile - tl.where(more_keys, two, tl.where(more_values, one, 0))
            m, norm, acc = _tile(
                q,
                m,
                norm,
                acc,
                low // GROUP * GROUP + turn * TILE,
                low,
                high,
                tl.where(more_keys, more_key_codes, key_codes),
                tl.where(more_keys, more_key_scale, key_scale),
                tl.where(more_keys, more_key_zero, key_zero),
                tl.where(more_values, more_value_codes, value_codes),
                tl.where(more_values, more_value_scale, value_scale),
                tl.where(more_values, more_value_zero, value_zero),
                head,
                held,
                mass,
                shifts,
                queries,
                scale,
                False,
                MASS,
                BITS,
                GROUP,
                RING,
                DIM,
                D,
                WORDS,
                HALVES,
                PART,
                UNITS,
                CODES,
                CAST,
                CAP,
            )
    else:
        one = _tiles(past_values, old_keys, GROUP, TILE)  # keys are held
        middle = tl.maximum(old_keys, past_values)
        for tile in range(split, one + _tiles(middle, past_keys, GROUP, TILE), raws):
            more_keys = tile >= one
            low = tl.where(more_keys, middle, past_values)
            m, norm, acc = _tile(
                q,
                m,
                norm,
                acc,
                low // GROUP * GROUP + (tile - tl.where(more_keys, one, 0)) * TILE,
                low,
                tl.where(more_keys, past_keys, old_keys),
                tl.where(more_keys, more_key_codes, key_codes),
                tl.where(more_keys, more_key_scale, key_scale),
                tl.where(more_keys, more_key_zero, key_zero),
                ring_values,
                ring_values,
                ring_values,
                head,
                held,
                mass,
                shifts,
                queries,
                scale,
                True,
                MASS,
                BITS,
                GROUP,
                RING,
                DIM,
                D,
                WORDS,
                HALVES,
                PART,
                UNITS,
                CODES,
                CAST,
                CAP,
            )
        for first in range(past_keys + split * ROWS, now + 1, raws * ROWS):
            row = first + tl.arange(0, ROWS)
            here = row <= now
            there = (column < DIM)[:, None] & here[None]
            # (D, ROWS)
            k = tl.load(ring_keys + ((head * RING + row % RING) * DIM)[None] + column[:, None], mask=there, other=0.0)
            v = _ring_values(row, here, head, ring_values, RING, DIM, PER, WORDS)
            weight = norm
            if MASS:
                weight = tl.load(mass + row, mask=row < held, other=1).to(tl.float32)  # (ROWS,)
            m, norm, acc = _update(q, m, norm, acc, k, v, here, weight, scale, MASS, CAST, CAP)
    channel, known = _channels(DIM, PER, WORDS)
    part = (head * splits + split) * group + index
    tl.store(part_acc + part[:, None] * DIM + channel[None], acc, mask=asking[:, None] & known[None])
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def append_packed_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: PackedRows,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    batch, heads, ring, dim = rows.ring_keys.shape
    query_heads = queries.shape[1] // dim
    out = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    query_norm, key_norm, epsilon = norms or (queries, keys, 0.0)
    _append[(batch, query_heads + heads * (3 + rows.residual // rows.group))](
        queries,
        keys,
        values,
        cos,
        sin,
        query_norm,
        key_norm,
        out,
        step,
        rows.lengths,
        rows.ring_keys,
        rows.ring_values,
        *rows.more_keys,
        *rows.more_values,
        heads,
        query_heads,
        cos.shape[1],
        epsilon,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        rows.more_keys.codes.shape[2],
        rows.more_values.codes.shape[2],
        NORM=norms is not None,
        BITS=rows.bits,
        GROUP=rows.group,
        RESIDUAL=rows.residual,
        RING=ring,
        DIM=dim,
        D=triton.next_power_of_2(dim),
        BYTES=triton.next_power_of_2(rows.group * rows.bits // 8),
        GROUPS=triton.next_power_of_2(dim // rows.group),
        num_warps=2,
    )
    return out


def attend_packed_triton(
    queries: Tensor, rows: PackedRows, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    batch, query_heads, _, dim = queries.shape
    heads, ring = rows.ring_keys.shape[1:3]
    group = query_heads // heads
    word = choose_word(rows.group * rows.bits // 8)
    per = word.itemsize * 8 // rows.bits
    shape = choose_shape(dim, rows.bits, word, queries.dtype == torch.float32)
    queries_each = max(16, triton.next_power_of_2(min(group, 64)))
    tiles = triton.cdiv(group, queries_each)
    splits = max(2, min(WARPS // (shape["num_warps"] * batch * heads * tiles), SPLITS * 128 // max(128, shape["D"])))
    raws = max(1, min(RAWS, splits // 16))
    # the plan ignores the room for an answer, because with more room it would add the same numbers in another order
    packed = max(LEAST, triton.cdiv(rows.longest, UNITS * per))  # tiles of a head; each program reads as many
    most = splits  # `combine_splits` is compiled for this number, which does not depend on lengths
    splits = raws + triton.cdiv(packed, triton.cdiv(packed, splits - raws))
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    parts = [
        torch.empty(batch * heads, splits, group, *more, dtype=torch.float32, device=queries.device)
        for more in ((dim,), (), ())
    ]
    held_keys, held_values, more_keys, more_values = (
        (groups.codes.view(word), groups.scale, groups.zero)
        for groups in (rows.held_keys, rows.held_values, rows.more_keys, rows.more_values)
    )
    _attend[batch * heads, splits, tiles](
        queries.contiguous(),
        step,
        rows.lengths,
        rows.starts if rows.mass is None else rows.mass,
        rows.starts,
        list_shifts(rows.bits, queries.device),
        *held_keys,
        rows.key_starts,
        *held_values,
        rows.value_starts,
        *more_keys,
        *more_values,
        rows.ring_keys,
        rows.ring_values,
        *parts,
        group,
        splits,
        raws,
        more_keys[0].shape[2],
        more_values[0].shape[2],
        scaling * LOG2E.value,
        MASS=rows.mass is not None,
        BITS=rows.bits,
        GROUP=rows.group,
        RESIDUAL=rows.residual,
        RING=ring,
        DIM=dim,
        M=queries_each,
        CAST=triton.knobs.runtime.interpret and queries.dtype == torch.bfloat16,
        CAP=find_cap(extras),
        **shape,
    )
    combine_splits[(batch * query_heads,)](
        *parts,
        outputs,
        outputs,
        1,
        group,
        splits,
        dim,
        LSE=False,
        S=triton.next_power_of_2(most),
        D=shape["D"],
        sinks=get_sinks(extras),
        query_heads=query_heads,
        num_warps=4 if most <= 128 else 8,
    )
    return outputs


@cache
def list_shifts(bits: int, device: torch.device) -> Tensor:
    """Return the bits of a word at which its codes begin."""
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


def choose_word(size: int) -> torch.dtype:
    """Return the widest integers that the bytes of a group divide into."""
    return torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8


def choose_shape(dim: int, bits: int, word: torch.dtype, exact: bool) -> dict[str, int]:
    """Return the sizes of a program's tiles for heads of `dim` channels whose codes are read in such words.

    Products that are `exact` do not use the matrix units.
    """
    size = word.itemsize * 8
    return {
        "D": max(16, triton.next_power_of_2(dim)),
        "WORDS": triton.next_power_of_2(dim * bits // size),
        "HALVES": max(1, size // 16),
        "PART": min(size, 16) // bits,
        "UNITS": UNITS,
        "CODES": min(size // bits, CODES),
        "ROWS": ROWS,
        "num_warps": 1 if dim <= 128 and not exact else 4,
        "num_stages": 1,
    }
