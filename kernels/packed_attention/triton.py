"""Decode over packed rows in Triton, in three launches: append, attend to ranges of rows, join the ranges.

README.md says why codes are taken apart in the order that they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, _combine
from kvbench.kernels.packed_attention.rows import PackedRows
from kvbench.kernels.quantize.triton import round_tile
from kvbench.kernels.rope_append.triton import rotate_head

PROGRAMS = 1056  # most programs that rows are split into: 8 warps on each of 132 multiprocessors
SPLITS = 128  # most programs of one head, which `_combine` reads at once
UNITS = 8  # units of codes that a tile of keys has beside each other, which is a column block of the matrix units
ROWS = 32  # rows of a tile of raw rows


@triton.jit(do_not_specialize=["key_room", "value_room"])
def _append(
    queries, keys, values, cos, sin, query_norm, key_norm, out, step, lengths, ring_keys, ring_values,
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    heads, query_heads, turning, epsilon, s_q, s_k, s_v, key_room, value_room,
    NORM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
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
        found = rotate_head(source, query_norm, cos, sin, since, column, turning, DIM, epsilon, out, NORM)
        tl.store(out + (b.to(tl.int64) * query_heads + index) * DIM + column, found, mask=there)
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
            found = rotate_head(source, key_norm, cos, sin, since, column, turning, DIM, epsilon, out, NORM)
            tl.store(ring_keys + (head * RING + slot) * DIM + column, found, mask=there)
        elif kind == 1:
            found = tl.load(values + b.to(tl.int64) * s_v + h * DIM + column, mask=there)
            tl.store(ring_values + (head * RING + slot) * DIM + column, found, mask=there)
        elif kind == 2:
            if (since > 0) & (now > RESIDUAL):
                row = now - RESIDUAL - 1
                group = tl.arange(0, GROUPS)
                real = group < DIM // GROUP
                own = (element < GROUP)[None]
                at = group[:, None, None] * GROUP + element[None]
                here = real[:, None, None] & own
                numbers = tl.load(ring_values + (head * RING + row % RING) * DIM + at, mask=here, other=0.0)
                scale, zero, codes = round_tile(numbers.to(tl.float32), own, part, BITS)
                line = head * value_room + row - tl.maximum(held - RESIDUAL, 0)
                into = value_codes + line * (DIM // PER) + group[:, None] * SIZE + byte[None]
                tl.store(into, codes, mask=real[:, None] & (byte < SIZE)[None])
                tl.store(value_scale + line * (DIM // GROUP) + group, scale, mask=real)
                tl.store(value_zero + line * (DIM // GROUP) + group, zero, mask=real)
        else:
            if (since > 0) & (now % RESIDUAL == 0):
                first = now - RESIDUAL + number * GROUP
                own = (element < GROUP)[None]
                at = ((first + element) % RING * DIM)[None] + column[:, None, None]
                here = there[:, None, None] & own
                numbers = tl.load(ring_keys + head * RING * DIM + at, mask=here, other=0.0)
                scale, zero, codes = round_tile(numbers.to(tl.float32), own, part, BITS)
                line = (head * key_room + (first - (held - held % RESIDUAL)) // GROUP) * DIM + column
                into = key_codes + line[:, None] * SIZE + byte[None]
                tl.store(into, codes, mask=there[:, None] & (byte < SIZE)[None])
                tl.store(key_scale + line, scale, mask=there)
                tl.store(key_zero + line, zero, mask=there)


@triton.jit
def _select(before, held, more, at, further):
    """Return pointers: `held` + `at` where `before`, otherwise `more` + `further`."""
    return tl.where(before, held + at, more + further)


@triton.jit
def _expand(words, scale, zero, code, like, BITS: tl.constexpr):
    """Return the numbers of these codes of each unit, rounded to the dtype of `like`. All arguments broadcast."""
    number = (words.to(tl.int32) >> (code * BITS)) & (2**BITS - 1)
    return (number.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
def _values(
    row, here, past, head, start, room, codes, scale, zero, more_codes, more_scale, more_zero, like,
    BITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return quantized values (N, PER·WORDS) of the rows (N,): column j·WORDS + w is channel w·PER + j.

    Those before `past` are held, from `start` on, and the others appended.
    """
    before, further = row < past, head * room + row - past
    word = tl.arange(0, WORDS)
    where = here[:, None] & (word < DIM // PER)[None]
    line = _select(before, codes, more_codes, (start + row) * (DIM // PER), further * (DIM // PER))
    words = tl.load(line[:, None] + word[None], mask=where, other=0)
    group = (word * PER // GROUP)[None]
    line = _select(before, scale, more_scale, (start + row) * (DIM // GROUP), further * (DIM // GROUP))
    steps = tl.load(line[:, None] + group, mask=where, other=0.0)
    line = _select(before, zero, more_zero, (start + row) * (DIM // GROUP), further * (DIM // GROUP))
    least = tl.load(line[:, None] + group, mask=where, other=0.0)
    code = tl.arange(0, PER)[None, :, None]
    found = _expand(words[:, None, :], steps[:, None, :], least[:, None, :], code, like, BITS)
    return tl.reshape(found, [row.shape[0], PER * WORDS])


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
    return tl.load(ring + at, mask=here[:, None] & known[None], other=0.0)


@triton.jit
def _update(q, m, norm, acc, k, v, here, weight, scale, MASS: tl.constexpr, CAST: tl.constexpr):
    """Process keys (D, N) and values (N, …) of N rows, of which those `here` exist, with an online softmax."""
    if CAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    logits = tl.dot(q, k, input_precision="ieee") * scale
    if MASS:
        logits += tl.log2(weight)[None]
    logits = tl.where(here[None], logits, float("-inf"))
    new = tl.maximum(m, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(m - safe)
    norm = norm * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new, norm, acc


@triton.jit
def _tile(
    q, m, norm, acc, tile, head, held, now, start, key_start, value_start, like, mass,
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    more_key_codes, more_key_scale, more_key_zero, more_value_codes, more_value_scale, more_value_zero,
    ring_values, key_room, value_room, scale,
    RAW: tl.constexpr, MASS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    RING: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr,
    UNITS: tl.constexpr, CODES: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Process the UNITS·PER rows of a tile whose values are quantized, or with RAW those whose keys alone are."""
    IN: tl.constexpr = GROUP // PER  # units of a group
    old_keys, old_values = held - held % RESIDUAL, tl.maximum(held - RESIDUAL, 0)
    past_keys, past_values = now - now % RESIDUAL, tl.maximum(now - RESIDUAL, 0)
    unit, column = tile * UNITS + tl.arange(0, UNITS), tl.arange(0, D)
    number = unit // IN
    before = unit * PER < old_keys
    where = (column < DIM)[:, None] & (unit * PER < past_keys)[None]
    at, further = (key_start + number) * DIM, (head * key_room + number - old_keys // GROUP) * DIM
    line = _select(before, key_codes, more_key_codes, at * IN + unit % IN, further * IN + unit % IN)
    words = tl.load(line[None] + (column * IN)[:, None], mask=where, other=0)
    line = _select(before, key_scale, more_key_scale, at, further)
    steps = tl.load(line[None] + column[:, None], mask=where, other=0.0)
    line = _select(before, key_zero, more_key_zero, at, further)
    least = tl.load(line[None] + column[:, None], mask=where, other=0.0)
    for turn in tl.static_range(PER // CODES):
        code = turn * CODES + tl.arange(0, CODES)
        k = _expand(words[:, None, :], steps[:, None, :], least[:, None, :], code[None, :, None], like, BITS)
        k = tl.reshape(k, [D, CODES * UNITS])
        row = tl.reshape(unit[None] * PER + code[:, None], [CODES * UNITS])
        if RAW:
            here = (row >= past_values) & (row < past_keys)
            v = _ring_values(row, here, head, ring_values, RING, DIM, PER, WORDS)
        else:
            here = row < past_values
            v = _values(
                row, here, old_values, head, value_start, value_room, value_codes, value_scale, value_zero,
                more_value_codes, more_value_scale, more_value_zero, like, BITS, GROUP, DIM, PER, WORDS,
            )  # fmt: skip
        weight = norm
        if MASS:
            weight = tl.load(mass + start + row, mask=here & (row < held), other=1).to(tl.float32)
        m, norm, acc = _update(q, m, norm, acc, k, v, here, weight, scale, MASS, CAST)
    return m, norm, acc


@triton.jit(do_not_specialize=["splits", "key_room", "value_room"])
def _attend(
    queries, step, lengths, mass, starts, key_codes, key_scale, key_zero, key_starts,
    value_codes, value_scale, value_zero, value_starts,
    more_key_codes, more_key_scale, more_key_zero, more_value_codes, more_value_scale, more_value_zero,
    ring_keys, ring_values, part_acc, part_max, part_norm,
    group, splits, key_room, value_room, scale,
    MASS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Attend with M queries of one KV head to some of its rows.

    The first program of a head reads the rows whose values are raw. The others share the tiles of UNITS·PER quantized
    rows in turn.
    """
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)
    index = tl.program_id(2) * M + tl.arange(0, M)
    asking = index < group
    where = asking[:, None] & (column < DIM)[None]
    q = tl.load(queries + (head * group + index)[:, None] * DIM + column[None], mask=where, other=0.0)
    if CAST:
        q = q.to(tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, PER * WORDS], tl.float32)
    held = tl.load(lengths + head).to(tl.int32)
    now = held + tl.load(step)
    start, key_start, value_start = tl.load(starts + head), tl.load(key_starts + head), tl.load(value_starts + head)
    past_keys, past_values = now - now % RESIDUAL, tl.maximum(now - RESIDUAL, 0)
    TILE: tl.constexpr = UNITS * PER
    if split > 0:
        for tile in range(split - 1, tl.cdiv(past_values, TILE), splits - 1):
            m, norm, acc = _tile(
                q, m, norm, acc, tile, head, held, now, start, key_start, value_start, queries, mass,
                key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
                more_key_codes, more_key_scale, more_key_zero, more_value_codes, more_value_scale, more_value_zero,
                ring_values, key_room, value_room, scale,
                False, MASS, BITS, GROUP, RESIDUAL, RING, DIM, D, PER, WORDS, UNITS, CODES, CAST,
            )  # fmt: skip
    else:
        for tile in range(past_values // TILE, tl.cdiv(past_keys, TILE)):
            m, norm, acc = _tile(
                q, m, norm, acc, tile, head, held, now, start, key_start, value_start, queries, mass,
                key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
                more_key_codes, more_key_scale, more_key_zero, more_value_codes, more_value_scale, more_value_zero,
                ring_values, key_room, value_room, scale,
                True, MASS, BITS, GROUP, RESIDUAL, RING, DIM, D, PER, WORDS, UNITS, CODES, CAST,
            )  # fmt: skip
        for first in range(past_keys, now + 1, ROWS):
            row = first + tl.arange(0, ROWS)
            here = row <= now
            there = (column < DIM)[:, None] & here[None]
            k = tl.load(ring_keys + ((head * RING + row % RING) * DIM)[None] + column[:, None], mask=there, other=0.0)
            v = _ring_values(row, here, head, ring_values, RING, DIM, PER, WORDS)
            weight = norm
            if MASS:
                weight = tl.load(mass + start + row, mask=row < held, other=1).to(tl.float32)
            m, norm, acc = _update(q, m, norm, acc, k, v, here, weight, scale, MASS, CAST)
    channel, known = _channels(DIM, PER, WORDS)
    part = (head * splits + split) * group + index
    tl.store(part_acc + part[:, None] * DIM + channel[None], acc, mask=asking[:, None] & known[None])
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def append_packed_triton(
    queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, rows: PackedRows, step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:  # fmt: skip
    batch, heads, ring, dim = rows.ring_keys.shape
    query_heads = queries.shape[1] // dim
    out = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    query_norm, key_norm, epsilon = norms or (queries, keys, 0.0)
    _append[(batch, query_heads + heads * (3 + rows.residual // rows.group))](
        queries, keys, values, cos, sin, query_norm, key_norm, out, step, rows.lengths, rows.ring_keys,
        rows.ring_values, *rows.more_keys, *rows.more_values, heads, query_heads, cos.shape[1], epsilon,
        queries.stride(0), keys.stride(0), values.stride(0), rows.more_keys.codes.shape[2],
        rows.more_values.codes.shape[2],
        NORM=norms is not None, BITS=rows.bits, GROUP=rows.group, RESIDUAL=rows.residual, RING=ring, DIM=dim,
        D=triton.next_power_of_2(dim), BYTES=triton.next_power_of_2(rows.group * rows.bits // 8),
        GROUPS=triton.next_power_of_2(dim // rows.group), num_warps=2,
    )  # fmt: skip
    return out


def attend_packed_triton(queries: Tensor, rows: PackedRows, scaling: float, step: Tensor) -> Tensor:
    batch, query_heads, _, dim = queries.shape
    heads, ring = rows.ring_keys.shape[1:3]
    group = query_heads // heads
    word = choose_word(rows.group * rows.bits // 8)
    per = word.itemsize * 8 // rows.bits
    shape = choose_shape(dim, per)
    queries_each = max(16, triton.next_power_of_2(min(group, 64)))
    tiles = triton.cdiv(group, queries_each)
    splits = PROGRAMS // (batch * heads * tiles)
    splits = max(2, min(splits, SPLITS, 1 + triton.cdiv(rows.longest, UNITS * per)))
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
        queries.contiguous(), step, rows.lengths, rows.starts if rows.mass is None else rows.mass, rows.starts,
        *held_keys, rows.key_starts, *held_values, rows.value_starts, *more_keys, *more_values,
        rows.ring_keys, rows.ring_values, *parts, group, splits, more_keys[0].shape[2], more_values[0].shape[2],
        scaling * LOG2E.value,
        MASS=rows.mass is not None, BITS=rows.bits, GROUP=rows.group, RESIDUAL=rows.residual, RING=ring, DIM=dim,
        PER=per, M=queries_each, CAST=triton.knobs.runtime.interpret and queries.dtype == torch.bfloat16, **shape,
    )  # fmt: skip
    _combine[(batch * query_heads,)](
        *parts, outputs, outputs, 1, group, splits, dim,
        LSE=False, S=triton.next_power_of_2(splits), D=shape["D"], num_warps=4,
    )  # fmt: skip
    return outputs


def choose_word(size: int) -> torch.dtype:
    """Return the widest integers that the bytes of a group divide into."""
    return torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8


def choose_shape(dim: int, per: int) -> dict[str, int]:
    """Return the sizes of a program's tiles for heads of `dim` channels and words of `per` codes."""
    warps = 1 if dim <= 128 else 4
    return {
        "D": max(16, triton.next_power_of_2(dim)), "WORDS": triton.next_power_of_2(dim // per), "UNITS": UNITS,
        "CODES": min(per, 2 if warps == 1 else 4), "ROWS": ROWS, "num_warps": warps, "num_stages": 2,
    }  # fmt: skip
