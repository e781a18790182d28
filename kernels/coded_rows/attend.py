"""Attend to codes, in Triton. README.md says how codes become numbers.

A program reads tiles of words of 16 bits, or of 24 bits for codes of 3, and multiplies the queries with what each code
of the words stands for without its scale, in 16 bits. A scale of the whole row is then a factor of the row's logit, or
of its weight. A product sums over pairs of words that one register holds, so a few instructions turn a register into
two floats.
"""

import math
import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, cap_tile, combine_splits, find_cap
from kvbench.kernels.coded_rows.form import LARGEST, CodedRows, CodedSide
from kvbench.kernels.coded_rows.numbers import STORED, base_number, list_memory, read_stored
from kvbench.kernels.coded_rows.turning import turn_back
from kvbench.kernels.coded_rows.window import attend_window, count_programs
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

MOST = 128  # programs of one head, which `combine_splits` reads at once
STAGES = 3  # tiles that a program reads ahead


@dataclass(frozen=True)
class Reading:
    """How `_attend` reads keys or values: constants of the kernel."""

    code: str
    """`Form.code`, but "levels" for "uint3" too."""
    bits: int
    levels: tuple[float, ...]
    """The numbers of "levels"."""
    table: tuple[str, ...]
    """The levels as `pack_table` returns them."""
    normed: bool
    """`Form.normed`."""
    steps: int
    """Numbers that a group stores beside its codes; 3 for a scale with a point in its lowest bits, 4 for a shift."""
    group: int
    """Channels of a group."""
    groups: bool
    """Whether a row has several groups with scales."""
    stored: str | None
    """The float of 8 bits that scales are stored as, or None for a wider one."""
    per: int
    """Codes of a word."""
    words: int
    """Words of a row."""
    wide: int
    """Words of a row, padded."""
    aligned: bool
    """Whether words of 24 bits are read as words of 32 bits."""
    fast: bool
    """Whether `write_asm` turns codes into floats."""
    each: bool
    """Whether each head has a factor of its own."""


def make_reading(side: CodedSide, dim: int, fast: bool) -> Reading:
    """Return how `_attend` reads keys or values of `dim` channels, with `write_asm` if `fast` and where it serves.

    Raises:
        ValueError: A word would hold codes of two groups, or groups are no power of two.
    """
    form, size = side.form, side.held[0].shape[-1]
    groups = form.steps > 0 and form.group not in (0, dim)
    per = 8 if form.bits == 3 else 16 // form.bits
    wide = form.bits == 3 or (size % 2 == 0 and not (groups and form.group % per))
    per = per if wide else 8 // form.bits
    if groups and (form.group % per or form.group & (form.group - 1)):
        raise ValueError(f"attend_coded: groups of {form.group} channels; a power of two of at least {per}")
    levels = tuple(float(n) for n in range(8)) if form.code == "uint3" else form.levels
    table = pack_table(levels)
    return Reading(
        code="levels" if levels else form.code,
        bits=form.bits,
        levels=levels,
        table=table,
        normed=form.normed,
        steps={"point": 3, "shift": 4}.get(form.scale, form.steps),
        group=form.group or dim,
        groups=groups,
        stored=STORED.get(form.stored),
        per=per,
        words=dim // per,
        wide=max(16, triton.next_power_of_2(dim // per)),
        aligned=form.bits == 3 and size % 4 == 0,
        fast=fast and wide and bool(table or not levels),
        each=isinstance(side.factor, Tensor),
    )


def pack_table(levels: tuple[float, ...]) -> tuple[str, ...]:
    """Return the table of `write_lookup`: the low bytes of 8 floats of 16 bits in two registers, and the high bytes.

    It is empty for numbers of levels that have no table, and for 16 levels that are not the same for both signs.
    """
    halves = struct.pack(f"<{len(levels)}e", *levels)
    if len(levels) == 16:
        if halves != struct.pack("<16e", *(-level for level in reversed(levels))):
            return ()
        halves = halves[16:]
    if len(halves) != 16:
        return ()
    parts = halves[:8:2], halves[8::2], halves[1:8:2], halves[9::2]
    return tuple(f"0x{int.from_bytes(part, 'little'):08x}" for part in parts)


@triton.constexpr_function
def write_asm(side, number):
    """Return PTX that makes two floats of 16 bits from code `number` of two words.

    A word has 16 bits, and a register two words: neighbours in the dimension that a product sums over. Words of 24 bits
    have a register each. Some codes become smaller floats, see `find_gain`.
    """
    code, high, odd = side.code, number >= 2, number % 2 == 1
    if code == "e4m3":
        return write_conversion(number)
    if code == "e5m2":
        return "and.b32 $0, $1, 0xff00ff00;" if odd else "{.reg .b32 x; shl.b32 x, $1, 8; and.b32 $0, x, 0xff00ff00;}"
    if code == "e2m1":  # as a float of 16 bits, which is 2^14 times as small
        size = "shr.u32 y, $1, 3;" if number == 3 else f"shl.b32 y, $1, {9 - 4 * number};"
        sign = f"shl.b32 x, $1, {12 - 4 * number}; and.b32 y, y, 0x0e000e00;"
        multiply = "mov.b32 x, 0x74007400; mul.rn.f16x2 y, y, x;" if side.groups and side.stored is None else ""
        return f"{{.reg .b32 x, y; {size} {sign} lop3.b32 y, x, 0x80008000, y, 0xea; {multiply} mov.b32 $0, y;}}"
    if code == "levels":
        return write_lookup(side.table, side.bits, number)
    if code == "uint2":  # a number below 2^10 below 0x6400 is the float 1024 and the number
        move, high = f"shr.u32 x, x, {2 * number % 8}; lop3.b32 x, x, 0x00030003, 0x64006400, 0xea;", number >= 4
        make = "mov.b32 y, 0x64006400; sub.rn.f16x2 $0, x, y;"
    elif code == "uint8":
        move, high = "lop3.b32 x, x, 0x00ff00ff, 0x64006400, 0xea;", odd
        make = "mov.b32 y, 0x64006400; sub.rn.f16x2 $0, x, y;"
    elif code == "int8":  # a byte below 0x64 is the float 1024 and the byte's number
        move, high = "lop3.b32 x, x, 0x00ff00ff, 0x64806480, 0x6a;", odd
        make = "mov.b32 y, 0x64806480; sub.rn.f16x2 $0, x, y;"
    elif code == "uint4" and not side.groups:
        move, make = "", "and.b32 $0, x, 0x00f000f0;" if odd else "and.b32 $0, x, 0x000f000f;"
    elif code == "uint4" and odd:  # 1024 and 16 times the number
        move = "lop3.b32 x, x, 0x00f000f0, 0x64006400, 0xea;"
        make = "mov.b32 y, 0x2c002c00; mov.b32 z, 0xd400d400; fma.rn.f16x2 $0, x, y, z;"
    else:
        move = "lop3.b32 x, x, 0x000f000f, 0x64006400, 0xea;"
        make = "mov.b32 y, 0x64006400; sub.rn.f16x2 $0, x, y;"
    return f"{{.reg .b32 x, y, z; {'shr.u32' if high else 'mov.b32'} x, $1{', 8' if high else ''}; {move} {make}}}"


@triton.constexpr_function
def write_conversion(number):
    """Return PTX that makes two floats of 16 bits from the e4m3 `number` of two words of 16 bits."""
    take = f"prmt.b32 x, $1, $1, {'0x0031' if number else '0x0020'}; mov.b32 {{low, high}}, x;"
    return f"{{.reg .b32 x; .reg .b16 low, high; {take} cvt.rn.f16x2.e4m3x2 $0, low;}}"


@triton.constexpr_function
def write_lookup(table, bits, number):
    """Return PTX that makes two floats of 16 bits from code `number` of two words by a table.

    A permutation of bytes looks up the low bytes of up to four levels by the lower 3 bits of a code each, and another
    one the high bytes. Of 16 levels the upper 8 are in the table, and a lower one is an upper one with its sign.
    """
    if bits == 3:
        move = 3 * number - 4
        codes = (
            f"shr.u32 x, $1, {3 * number}; {'shr.u32' if move > 0 else 'shl.b32'} y, $2, {abs(move)};"
            " lop3.b32 x, x, y, 0x70, 0xd8; and.b32 x, x, 0x77;"
        )
        order, sign = "0x5140", "mov.b32 $0, y;"
    else:
        # codes i of two words, then i + 2 of both; a code below 8 has its lower bits inverted
        codes = "shr.u32 y, $1, 16; shr.u32 x, $1, 4;" if number % 2 else "shr.u32 y, $1, 12; mov.b32 x, $1;"
        codes += (
            " lop3.b32 x, x, y, 0xf0f0, 0xd8; not.b32 y, x; and.b32 y, y, 0x8888; shr.u32 z, y, 3; sub.u32 y, y, z;"
            " xor.b32 x, x, y; and.b32 x, x, 0x7777;"
        )
        order = "0x7362" if number >= 2 else "0x5140"
        sign = f"shl.b32 x, $1, {12 - 4 * number}; not.b32 x, x; and.b32 x, x, 0x80008000; xor.b32 $0, x, y;"
    load = f"mov.b32 a, {table[0]}; mov.b32 b, {table[1]}; mov.b32 c, {table[2]}; mov.b32 d, {table[3]};"
    look = f"prmt.b32 y, a, b, x; prmt.b32 z, c, d, x; prmt.b32 y, y, z, {order};"
    return f"{{.reg .b32 a, b, c, d, x, y, z; {load} {codes} {look} {sign}}}"


@triton.constexpr_function
def find_gain(side, number):
    """Return the factor of what `read_codes` returns for code `number` of a word."""
    if side.fast and side.code == "uint4" and not side.groups:
        return 2.0 ** (4 * (number % 2) - 24)
    if side.fast and side.code == "e2m1" and (not side.groups or side.stored == "e4m3"):
        return 2.0**-14
    return 1.0


@triton.jit
def read_codes(words, NUMBER: tl.constexpr, SIDE: tl.constexpr, LIKE: tl.constexpr):
    """Return what code NUMBER of each word stands for without scale, times `find_gain`."""
    if SIDE.fast:
        ASM: tl.constexpr = write_asm(SIDE, NUMBER)
        REGISTERS: tl.constexpr = "=r,r,r" if SIDE.bits == 3 else "=r,r"
        number = tl.inline_asm_elementwise(ASM, REGISTERS, [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        code = (words.to(tl.int32) >> (SIDE.bits * NUMBER)) & (2**SIDE.bits - 1)
        if SIDE.code == "levels":
            number = tl.zeros(code.shape, tl.float32)
            for level in tl.static_range(tl.constexpr(2**SIDE.bits)):
                number = tl.where(code == level, SIDE.levels[level], number)
            number = number.to(LIKE)
        else:
            CODE: tl.constexpr = SIDE.code
            number = base_number(code.to(tl.uint8), CODE, LIKE)
    return number


@triton.jit
def _read_words(words, row, here, SIDE: tl.constexpr):
    """Return the words of codes of rows (N,), (N, W).

    A word of 24 bits is put together from its bytes, or from the one or two words of 32 bits that it lies in.
    """
    word = tl.arange(0, SIDE.wide)
    there = here[:, None] & (word < SIDE.words)[None]
    place = row[:, None] * SIDE.words + word[None]
    if SIDE.aligned:
        first, over = word * 3 // 4, word * 3 % 4
        place = row[:, None] * (SIDE.words * 3 // 4) + first[None]
        low = tl.load(words + place, mask=there, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(words + place + 1, mask=there & (over > 1)[None], other=0).to(tl.uint32, bitcast=True)
        over = (over * 8).to(tl.uint32)[None]
        out = ((low >> over) | (high << ((32 - over) & 31))).to(tl.int32, bitcast=True)
    elif SIDE.bits == 3:
        low = tl.load(words + place * 3, mask=there, other=0).to(tl.int32)
        middle = tl.load(words + place * 3 + 1, mask=there, other=0).to(tl.int32)
        high = tl.load(words + place * 3 + 2, mask=there, other=0).to(tl.int32)
        out = low | (middle << 8) | (high << 16)
    else:
        out = tl.load(words + place, mask=there, other=0)
    return out


@triton.jit
def _read_steps(scales, zeros, row, here, SIDE: tl.constexpr):
    """Return scales and zeros as they are stored: one each for rows (N,), or for each group, (N, G)."""
    COUNT: tl.constexpr = SIDE.words * SIDE.per // SIDE.group
    if SIDE.groups:
        group = tl.arange(0, SIDE.wide * SIDE.per // SIDE.group)
        where = here[:, None] & (group < COUNT)[None]
        place = row[:, None] * COUNT + group[None]
    else:
        where = here
        place = row
    scale = tl.zeros([1], tl.float32)
    zero = tl.zeros([1], tl.float32)
    if SIDE.steps > 0:
        scale = tl.load(scales + place, mask=where, other=0)
    if SIDE.steps == 2 or SIDE.steps == 4:
        zero = tl.load(zeros + place, mask=where, other=0)
    return scale, zero


@triton.jit
def _widen_steps(scale, zero, SIDE: tl.constexpr):
    """Return scales and zeros as float32; for a scale with a point in its lowest bits, the point as zero.

    A shift becomes the number that the code 0 stands for.
    """
    STORED: tl.constexpr = SIDE.stored
    if SIDE.steps == 3:
        bits = scale.to(tl.int32, bitcast=True)
        scale, zero = (bits & -16).to(tl.float32, bitcast=True), bits & 15
    else:
        scale = read_stored(scale, STORED)
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    if SIDE.steps == 4:
        zero = -zero * scale
    return scale, zero


@triton.jit
def _split_steps(scale, zero, SIDE: tl.constexpr, LIKE: tl.constexpr):
    """Return scales and zeros of groups in the dtype that they are applied in, and a factor for each row or 1.

    The powers of two of a row are divided by the largest one, so that 16 bits hold them.
    """
    WIDE: tl.constexpr = LIKE if SIDE.fast else tl.float32
    top = tl.full([1], 1.0, tl.float32)
    if SIDE.stored == "e8m0":
        most = tl.max(scale.to(tl.int32), 1)  # (N,)
        top = _widen_steps(most, most, SIDE)[0]
        LOW: tl.constexpr = 2.0**14 if SIDE.fast and SIDE.code == "e2m1" else 1.0
        scale = tl.exp2((scale.to(tl.int32) - most[:, None]).to(tl.float32)) * LOW
    elif SIDE.stored == "e4m3" and SIDE.fast:
        ASM: tl.constexpr = write_conversion(0)
        words = scale.to(tl.int16)
        scale = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        scale, zero = _widen_steps(scale, zero, SIDE)
    if SIDE.steps > 1:
        zero = _spread(zero.to(WIDE), SIDE)
    return _spread(scale.to(WIDE), SIDE), zero, top


@triton.jit
def _spread(step, SIDE: tl.constexpr):
    """Return the numbers of groups (N, G) for each word, (N, W)."""
    N: tl.constexpr = step.shape[0]
    GROUPS: tl.constexpr = step.shape[1]
    EACH: tl.constexpr = SIDE.group // SIDE.per
    return tl.reshape(tl.broadcast_to(step[:, :, None], [N, GROUPS, EACH]), [N, GROUPS * EACH])


@triton.jit
def _apply_steps(number, scale, zero, SIDE: tl.constexpr, LIKE: tl.constexpr):
    """Return what codes (N, W) stand for by the scales and zeros of their groups."""
    number = number.to(scale.dtype)
    if SIDE.steps == 3:
        number -= zero
    number *= scale
    if SIDE.steps == 2 or SIDE.steps == 4:
        number += zero
    return number.to(LIKE)


@triton.jit
def _invert_norms(words, M: tl.constexpr, SIDE: tl.constexpr, LIKE: tl.constexpr):
    """Return one over the norms of what the codes of rows (N, W) stand for without scale, M times, (M, N)."""
    WIDE: tl.constexpr = SIDE.wide
    there = tl.arange(0, WIDE) < SIDE.words
    ones = tl.broadcast_to(there.to(LIKE)[None], [M, WIDE])
    total = tl.zeros([M, words.shape[0]], tl.float32)
    for j in tl.static_range(tl.constexpr(SIDE.per)):
        number = read_codes(words, j, SIDE, LIKE)
        total = tl.dot(ones, (number * number).T, total, input_precision="ieee")
    return tl.rsqrt(total)


@triton.jit
def read_factor(factor, head, EACH: tl.constexpr):
    """Return a side's factor, or that of a head if each has its own."""
    out = factor
    if EACH:
        out = tl.load(factor + head)
    return out


@triton.jit
def _attend_codes(
    q,
    q_sum,
    q_scale,
    m,
    norm,
    sums,
    shift,
    key_words,
    key_steps,
    value_words,
    value_steps,
    mass,
    row,
    here,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LIFT: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Process the rows (N,) of a tile. `mass` is that of row 0.

    `q` has the queries' channels for each code of a word, (M, W) each, and `sums` those of the values. `shift` sums
    the zeros of whole rows, (M,).
    """
    logits = tl.zeros([q_sum.shape[0], row.shape[0]], tl.float32)  # (M, N)
    key_scale, key_zero, key_top = key_steps[0], key_steps[1], key_steps[0]
    if KEY.groups:
        key_scale, key_zero, key_top = _split_steps(key_scale, key_zero, KEY, LIKE)
    for j in tl.static_range(tl.constexpr(KEY.per)):
        k = read_codes(key_words, j, KEY, LIKE)
        if KEY.groups:
            k = _apply_steps(k, key_scale, key_zero, KEY, LIKE)
        logits = tl.dot(q[j], k.T, logits, input_precision="ieee")
    if KEY.normed:
        logits *= _invert_norms(key_words, q_sum.shape[0], KEY, LIKE)
    if KEY.groups:
        logits *= key_top[None]
    elif KEY.steps > 0:
        step, zero = _widen_steps(key_scale, key_zero, KEY)
        logits *= step[None]
        if KEY.steps > 1:
            logits += q_sum[:, None] * (-zero * step if KEY.steps == 3 else zero)[None]
    logits = cap_tile(logits * (q_scale * scale)[:, None], CAP)
    if MASS:
        logits += tl.log2(tl.load(mass + row, mask=here, other=1).to(tl.float32))[None]
    logits = tl.where(here[None], logits, float("-inf"))
    new = tl.maximum(m, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(m - safe)
    norm = norm * shrink + tl.sum(p, 1)
    weight = p
    value_scale, value_zero, value_top = value_steps[0], value_steps[1], value_steps[0]
    if VALUE.groups:
        value_scale, value_zero, value_top = _split_steps(value_scale, value_zero, VALUE, LIKE)
        weight *= (value_top * LIFT)[None]
    elif VALUE.steps > 0:
        step, zero = _widen_steps(value_scale, value_zero, VALUE)
        weight *= (step * LIFT)[None]
        if VALUE.steps > 1:
            shift = shift * shrink + tl.sum(p * (-zero * step if VALUE.steps == 3 else zero)[None], 1)
    if VALUE.normed:
        weight *= _invert_norms(value_words, q_sum.shape[0], VALUE, LIKE)
    weight = weight.to(LIKE)
    updated = ()
    for j in tl.static_range(tl.constexpr(VALUE.per)):
        v = read_codes(value_words, j, VALUE, LIKE)
        if VALUE.groups:
            v = _apply_steps(v, value_scale, value_zero, VALUE, LIKE)
        updated = updated + (tl.dot(weight, v, sums[j] * shrink[:, None], input_precision="ieee"),)  # type: ignore[assignment]
    return new, norm, updated, shift


@triton.jit
def _attend_range(
    q,
    q_sum,
    q_scale,
    m,
    norm,
    sums,
    shift,
    keys,
    values,
    mass,
    start,
    begin,
    stop,
    scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LIFT: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    CAP: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Process the rows from `start` + `begin` to before `start` + `stop`. `keys` and `values`: words, scales, zeros.

    Scales are read one tile ahead, because the compiler does not read numbers below 32 bits ahead itself.
    """
    offset = tl.arange(0, N)
    here = begin + offset < stop
    key_steps = _read_steps(keys[1], keys[2], start + begin + offset, here, KEY)
    value_steps = _read_steps(values[1], values[2], start + begin + offset, here, VALUE)
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        row = at + offset
        here = row < stop
        ahead = row + N < stop
        next_key_steps = _read_steps(keys[1], keys[2], start + row + N, ahead, KEY)
        next_value_steps = _read_steps(values[1], values[2], start + row + N, ahead, VALUE)
        m, norm, sums, shift = _attend_codes(
            q,
            q_sum,
            q_scale,
            m,
            norm,
            sums,
            shift,
            _read_words(keys[0], start + row, here, KEY),
            key_steps,
            _read_words(values[0], start + row, here, VALUE),
            value_steps,
            mass,
            start + row,
            here,
            scale,
            KEY,
            VALUE,
            LIFT,
            MASS,
            LIKE,
            CAP,
        )
        key_steps, value_steps = next_key_steps, next_value_steps
    return m, norm, sums, shift


@triton.jit(do_not_specialize=["splits", "total", "room", "waiting"])
def _attend(
    queries,
    step,
    lengths,
    starts,
    mass,
    newest,
    keys,
    values,
    more_keys,
    more_values,
    part_acc,
    part_max,
    part_norm,
    group,
    heads,
    splits,
    total,
    room,
    waiting,
    scale,
    key_factor,
    value_factor,
    EVERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    LIFT: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Attend with M queries of one KV head to one of `splits` ranges of its rows, for the first of `total` parts.

    `heads`: B·H. With EVERY, `waiting` rows and those of the tokens become codes when there are EVERY of them, and the
    token's own row is in a window.
    `keys`, `values` and those of further tokens have words, scales and zeros. KEY and VALUE are `Reading`s.
    """
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.program_id(2) * M + tl.arange(0, M)
    asking = index < group
    column = tl.arange(0, D)
    line = queries + (head * group + index)[:, None] * DIM
    inside = column < DIM
    whole = tl.load(line + column[None], mask=asking[:, None] & inside[None], other=0.0).to(tl.float32)  # (M, D)
    # a power of two, so that 16 bits hold queries of any size
    q_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(whole), 1), 1e-30))))
    GAIN: tl.constexpr = find_gain(KEY, 0)
    q_sum = tl.sum(whole, 1) / q_scale * GAIN
    word = tl.arange(0, KEY.wide) * KEY.per
    q = ()
    for j in tl.static_range(tl.constexpr(KEY.per)):
        part = tl.load(line + (word + j)[None], mask=asking[:, None] & (word < DIM)[None], other=0.0).to(tl.float32)
        q = q + ((part * (GAIN / find_gain(KEY, j) / q_scale)[:, None]).to(LIKE),)  # type: ignore[assignment]
    key_scale = q_scale * (read_factor(key_factor, head, KEY.each) / GAIN)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    shift = tl.zeros([M], tl.float32)
    WIDE: tl.constexpr = VALUE.wide
    sums = ()
    for _ in tl.static_range(tl.constexpr(VALUE.per)):
        sums = sums + (tl.zeros([M, WIDE], tl.float32),)  # type: ignore[assignment]
    length, more = tl.load(lengths + head).to(tl.int32), tl.load(step)
    if EVERY > 0:
        more = (more + waiting) // EVERY * EVERY
    share = tl.cdiv(tl.cdiv(length + more, splits), N) * N
    first = split * share
    last = tl.minimum(first + share, length + more)
    m, norm, sums, shift = _attend_range(
        q,
        q_sum,
        key_scale,
        m,
        norm,
        sums,
        shift,
        keys,
        values,
        mass,
        tl.load(starts + head),
        first,
        tl.minimum(last, length),
        scale,
        KEY,
        VALUE,
        LIFT,
        MASS,
        LIKE,
        CAP,
        N,
        STAGES,
    )
    m, norm, sums, shift = _attend_range(
        q,
        q_sum,
        key_scale,
        m,
        norm,
        sums,
        shift,
        more_keys,
        more_values,
        mass,
        head * room,
        tl.maximum(first - length, 0),
        last - length,
        scale,
        KEY,
        VALUE,
        LIFT,
        False,
        LIKE,
        CAP,
        N,
        STAGES,
    )
    p = tl.zeros([M], tl.float32)
    shrink = tl.full([M], 1.0, tl.float32)
    if EVERY == 0 and split == 0:  # the token's own row, which is no code
        k = tl.load(newest + head * DIM + column, mask=inside, other=0.0).to(tl.float32)  # (D,)
        logit = cap_tile(tl.sum(whole * k[None], 1) * scale, CAP)  # (M,)
        new = tl.maximum(m, logit)
        p, shrink = tl.exp2(logit - new), tl.exp2(m - new)
        m, norm = new, norm * shrink + p
    part = (head * total + split) * group + index
    word = tl.arange(0, VALUE.wide) * VALUE.per
    there = word < DIM
    value_size = read_factor(value_factor, head, VALUE.each)
    shift *= shrink * value_size
    for j in tl.static_range(tl.constexpr(VALUE.per)):
        outputs = sums[j] * (shrink * (value_size / (LIFT * find_gain(VALUE, j))))[:, None] + shift[:, None]
        if EVERY == 0:
            v = tl.load(newest + (heads + head) * DIM + word + j, mask=there, other=0.0).to(tl.float32)
            outputs += p[:, None] * v[None]
        tl.store(part_acc + part[:, None] * DIM + (word + j)[None], outputs, mask=asking[:, None] & there[None])
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def list_words(side: CodedSide, held: bool, reading: Reading) -> tuple[Tensor, ...]:
    """Return `list_memory` of a side's rows, with the codes as words of 16 or 32 bits if these are read."""
    codes, *steps = list_memory(side.held if held else side.more)
    if reading.aligned:
        return codes.view(torch.int32), *steps
    return codes.view(torch.int16) if reading.per * reading.bits == 16 else codes, *steps


def attend_triton(
    queries: Tensor, rows: CodedRows, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    batch, heads, dim = rows.newest.shape[1:]
    query_heads = queries.shape[1]
    group = query_heads // heads
    padded = max(16, triton.next_power_of_2(dim))
    each = max(16, triton.next_power_of_2(min(group, 64)))
    tiles = triton.cdiv(group, each)
    tile, warps, programs = choose_tile(rows, each, queries)
    window = rows.window
    raw = 0 if window is None else count_programs(window)
    splits = max(1, min(MOST - raw, programs // (batch * heads * tiles), triton.cdiv(rows.longest + 1, tile)))
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    parts = [
        torch.empty(batch * heads, splits + raw, group, *more, dtype=torch.float32, device=queries.device)
        for more in ((dim,), (), ())
    ]
    fast = converts_fast(queries)
    sides = [(side, make_reading(side, dim, fast)) for side in (rows.keys, rows.values)]
    queries = queries.contiguous()
    _attend[batch * heads, splits, tiles](
        queries,
        step,
        rows.lengths,
        rows.starts,
        rows.starts if rows.mass is None else rows.mass,
        rows.newest,
        *(list_words(side, held, reading) for held in (True, False) for side, reading in sides),
        *parts,
        group,
        batch * heads,
        splits,
        splits + raw,
        rows.keys.more[0].shape[2],
        0 if window is None else window.waiting,
        scaling * LOG2E.value,
        rows.keys.factor,
        rows.values.factor,
        EVERY=0 if window is None else window.every,
        KEY=sides[0][1],
        VALUE=sides[1][1],
        LIFT=find_lift(rows.values, sides[1][1]),
        MASS=rows.mass is not None,
        LIKE=tl.float32 if queries.dtype == torch.float32 else tl.float16,
        CAP=find_cap(extras),
        M=each,
        N=tile,
        STAGES=STAGES,
        DIM=dim,
        D=padded,
        num_warps=warps,
    )
    if window is not None:
        attend_window(queries, window, scaling, step, extras, parts, splits, each)
    combine_splits[(batch * query_heads,)](
        *parts,
        outputs,
        outputs,
        1,
        group,
        splits + raw,
        dim,
        LSE=False,
        S=128 if splits + raw > 16 else 16,
        D=padded,
        sinks=get_sinks(extras),
        query_heads=query_heads,
        num_warps=4,
    )
    return outputs if rows.values.turn is None else turn_back(outputs, rows.values.turn)


def find_lift(side: CodedSide, reading: Reading) -> float:
    """Return what weights times scales are multiplied with: a power of two, so that those of large rows fit 16 bits."""
    if not reading.steps or (reading.groups and reading.stored != "e8m0") or side.form.scale == "norm":
        return 1.0
    return 2.0 ** int(math.log2(2 * LARGEST[side.form.code]))


def choose_tile(rows: CodedRows, each: int, queries: Tensor) -> tuple[int, int, int]:
    """Return the rows of a tile, the warps of a program that reads it, and the number of programs.

    They were the fastest ones on an H200 with 132 multiprocessors, for 131,072 rows of 128 channels. Tiles that take
    more registers or memory there have half the rows, or with codes of 3 bits a quarter.

    Args:
        rows: The rows.
        each: Queries of a program.
        queries: In their dtype.
    """
    dim = rows.newest.shape[-1]
    forms = rows.keys.form, rows.values.form
    if queries.dtype == torch.float32:  # products without tensor cores keep their tiles in registers
        return 32, 4, 528
    if any(form.bits == 3 for form in forms):
        return 32, 1, 1056
    slow = any(form.group not in (0, dim) or form.code == "levels" for form in forms)
    if each > 16 or dim > 128 or slow:
        return 64, 2, 528
    return (128, 2, 528) if all(form.bits == 4 for form in forms) else (128, 4, 264)


def converts_fast(queries: Tensor) -> bool:
    """Return whether the GPU turns several codes at once into float16: from Ada and Hopper on."""
    like = queries.dtype != torch.float32 and not triton.knobs.runtime.interpret
    return like and torch.cuda.get_device_capability(queries.device) >= (8, 9)
