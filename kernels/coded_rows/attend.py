"""Attend to codes, in Triton. README.md says how codes become numbers.

A program reads tiles of words of 16 bits, and multiplies the queries with what each code of the words stands for
without its scale, which is exact in 16 bits. A scale of the whole row is then a factor of the row's logit, or of its
weight. A product sums over pairs of words that one register holds, so a mask or two turn a register into two floats.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, cap_tile, combine_splits, find_cap
from kvbench.kernels.coded_rows.form import LARGEST, CodedRows, CodedSide
from kvbench.kernels.coded_rows.triton import STORED, base_number, list_parts, read_factor
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

MOST = 128  # programs of one head, which `combine_splits` reads at once
STAGES = 3  # tiles that a program reads ahead


@triton.constexpr_function
def write_asm(code, number, groups):
    """Return PTX that makes two floats of 16 bits from code `number` of two words, or None where there is none.

    A word has 16 bits, and a register two words: neighbours in the dimension that a product sums over. Codes of 4 bits
    without groups become subnormal floats, see `find_gain`.
    """
    high, odd = number >= 2, number % 2 == 1
    if code == "e4m3":
        take = f"prmt.b32 x, $1, $1, {'0x0031' if odd else '0x0020'}; mov.b32 {{low, high}}, x;"
        return f"{{.reg .b32 x; .reg .b16 low, high; {take} cvt.rn.f16x2.e4m3x2 $0, low;}}"
    if code == "e5m2":
        return "and.b32 $0, $1, 0xff00ff00;" if odd else "{.reg .b32 x; shl.b32 x, $1, 8; and.b32 $0, x, 0xff00ff00;}"
    if code == "e2m1":  # as a float of 16 bits, which is 2^14 times as small
        size = "shr.u32 y, $1, 3;" if number == 3 else f"shl.b32 y, $1, {9 - 4 * number};"
        sign = f"shl.b32 x, $1, {12 - 4 * number}; and.b32 y, y, 0x0e000e00; lop3.b32 y, x, 0x80008000, y, 0xea;"
        return f"{{.reg .b32 x, y; {size} {sign} mov.b32 x, 0x74007400; mul.rn.f16x2 $0, y, x;}}"
    if code == "int8":  # a byte below 0x64 is the float 1024 and the byte's number
        move, high = "lop3.b32 x, x, 0x00ff00ff, 0x64806480, 0x6a;", odd
        make = "mov.b32 y, 0x64806480; sub.rn.f16x2 $0, x, y;"
    elif code == "uint4" and not groups:
        move, make = "", "and.b32 $0, x, 0x00f000f0;" if odd else "and.b32 $0, x, 0x000f000f;"
    elif code == "uint4" and odd:  # 1024 and 16 times the number
        move = "lop3.b32 x, x, 0x00f000f0, 0x64006400, 0xea;"
        make = "mov.b32 y, 0x2c002c00; mov.b32 z, 0xd400d400; fma.rn.f16x2 $0, x, y, z;"
    elif code == "uint4":
        move = "lop3.b32 x, x, 0x000f000f, 0x64006400, 0xea;"
        make = "mov.b32 y, 0x64006400; sub.rn.f16x2 $0, x, y;"
    else:
        return None
    return f"{{.reg .b32 x, y, z; {'shr.u32' if high else 'mov.b32'} x, $1{', 8' if high else ''}; {move} {make}}}"


@triton.constexpr_function
def find_gain(code, number, groups, fast):
    """Return the factor of what `read_codes` returns for code `number` of a word."""
    return 2.0 ** (4 * (number % 2) - 24) if code == "uint4" and fast and not groups else 1.0


@triton.jit
def read_codes(
    words, NUMBER: tl.constexpr, CODE: tl.constexpr, GROUPS: tl.constexpr, LIKE: tl.constexpr, FAST: tl.constexpr
):
    """Return what code NUMBER of each word stands for without scale, times `find_gain`."""
    if FAST:
        ASM: tl.constexpr = write_asm(CODE, NUMBER, GROUPS)
        number = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        BITS: tl.constexpr = 4 if CODE == "uint4" or CODE == "e2m1" else 8
        code = (words.to(tl.int32) >> (BITS * NUMBER)) & (2**BITS - 1)
        number = base_number(code.to(tl.uint8), CODE, LIKE)
    return number


@triton.jit
def _read_words(words, row, here, WORDS: tl.constexpr, W: tl.constexpr):
    """Return the words of codes of rows (N,), (N, W). A row has WORDS of them."""
    word = tl.arange(0, W)
    return tl.load(words + row[:, None] * WORDS + word[None], mask=here[:, None] & (word < WORDS)[None], other=0)


@triton.jit
def _read_steps(
    scales,
    zeros,
    row,
    here,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    WORDS: tl.constexpr,
    W: tl.constexpr,
):
    """Return scales and zeros as they are stored: one each for rows (N,), or for each word of PER codes, (N, W)."""
    COUNT: tl.constexpr = WORDS * PER // GROUP
    if COUNT == 1:
        where = here
        place = row
    else:
        word = tl.arange(0, W)
        where = here[:, None] & (word < WORDS)[None]
        place = row[:, None] * COUNT + (word * PER // GROUP)[None]
    scale = tl.zeros([1], tl.float32)
    zero = tl.zeros([1], tl.float32)
    if STEPS > 0:
        scale = tl.load(scales + place, mask=where, other=0)
    if STEPS == 2:
        zero = tl.load(zeros + place, mask=where, other=0)
    return scale, zero


@triton.jit
def _widen_steps(scale, zero, STEPS: tl.constexpr, STORED: tl.constexpr):
    """Return scales and zeros as float32; for a scale with a point in its lowest bits, STEPS == 3, the point as zero.

    STORED names the float of 8 bits that scales are stored as, or is None.
    """
    if STEPS == 3:
        bits = scale.to(tl.int32, bitcast=True)
        scale, zero = (bits & -16).to(tl.float32, bitcast=True), bits & 15
    elif STORED == "e4m3":
        scale = base_number(scale, "e4m3", tl.float32)
    elif STORED == "e8m0":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def _apply_steps(
    number, scale, zero, STEPS: tl.constexpr, STORED: tl.constexpr, LIKE: tl.constexpr, FAST: tl.constexpr
):
    """Return what codes (N, W) stand for by the scales and zeros of their groups."""
    scale, zero = _widen_steps(scale, zero, STEPS, STORED)
    WIDE: tl.constexpr = LIKE if FAST else tl.float32
    number = number.to(WIDE)
    if STEPS == 3:
        number -= zero.to(WIDE)
    number *= scale.to(WIDE)
    if STEPS == 2:
        number += zero.to(WIDE)
    return number.to(LIKE)


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
    KEY_CODE: tl.constexpr,
    KEY_STEPS: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    KEY_STORED: tl.constexpr,
    KEY_PER: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KEY_W: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    VALUE_STORED: tl.constexpr,
    VALUE_PER: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_W: tl.constexpr,
    LIFT: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    KEY_FAST: tl.constexpr,
    VALUE_FAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Process the rows (N,) of a tile. Pointers are those of row 0.

    `q` has the queries' channels for each code of a word, (M, KEY_W) each, and `sums` those of the values. `shift` sums
    the zeros of whole rows, (M,).
    """
    words = _read_words(key_words, row, here, KEY_WORDS, KEY_W)
    v_words = _read_words(value_words, row, here, VALUE_WORDS, VALUE_W)
    logits = tl.zeros([q_sum.shape[0], row.shape[0]], tl.float32)  # (M, N)
    for j in tl.static_range(KEY_PER):
        k = read_codes(words, j, KEY_CODE, KEY_GROUPS, LIKE, KEY_FAST)
        if KEY_GROUPS:
            k = _apply_steps(k, key_steps[0], key_steps[1], KEY_STEPS, KEY_STORED, LIKE, KEY_FAST)
        logits = tl.dot(q[j], k.T, logits, input_precision="ieee")
    GAIN: tl.constexpr = 1.0 / find_gain(KEY_CODE, 0, KEY_GROUPS, KEY_FAST)
    if KEY_STEPS > 0 and not KEY_GROUPS:
        step, zero = _widen_steps(key_steps[0], key_steps[1], KEY_STEPS, KEY_STORED)
        logits *= (step * GAIN)[None]
        if KEY_STEPS > 1:
            logits += q_sum[:, None] * (-zero * step if KEY_STEPS == 3 else zero)[None]
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
    if VALUE_STEPS > 0 and not VALUE_GROUPS:
        step, zero = _widen_steps(value_steps[0], value_steps[1], VALUE_STEPS, VALUE_STORED)
        weight = p * (step * LIFT)[None]
        if VALUE_STEPS > 1:
            shift = shift * shrink + tl.sum(p * (-zero * step if VALUE_STEPS == 3 else zero)[None], 1)
    weight = weight.to(LIKE)
    updated = ()
    for j in tl.static_range(VALUE_PER):
        v = read_codes(v_words, j, VALUE_CODE, VALUE_GROUPS, LIKE, VALUE_FAST)
        if VALUE_GROUPS:
            v = _apply_steps(v, value_steps[0], value_steps[1], VALUE_STEPS, VALUE_STORED, LIKE, VALUE_FAST)
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
    key_words,
    key_scales,
    key_zeros,
    value_words,
    value_scales,
    value_zeros,
    mass,
    start,
    begin,
    stop,
    scale,
    KEY_CODE: tl.constexpr,
    KEY_STEPS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_STORED: tl.constexpr,
    KEY_PER: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KEY_W: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_STORED: tl.constexpr,
    VALUE_PER: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_W: tl.constexpr,
    LIFT: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    KEY_FAST: tl.constexpr,
    VALUE_FAST: tl.constexpr,
    CAP: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Process the rows from `start` + `begin` to before `start` + `stop`.

    Scales are read one tile ahead, because the compiler does not read numbers of 16 bits ahead itself.
    """
    offset = tl.arange(0, N)
    KEY_GROUPS: tl.constexpr = KEY_STEPS > 0 and KEY_GROUP < KEY_WORDS * KEY_PER
    VALUE_GROUPS: tl.constexpr = VALUE_STEPS > 0 and VALUE_GROUP < VALUE_WORDS * VALUE_PER
    here = begin + offset < stop
    key_steps = _read_steps(
        key_scales, key_zeros, start + begin + offset, here, KEY_STEPS, KEY_GROUP, KEY_PER, KEY_WORDS, KEY_W
    )
    value_steps = _read_steps(
        value_scales,
        value_zeros,
        start + begin + offset,
        here,
        VALUE_STEPS,
        VALUE_GROUP,
        VALUE_PER,
        VALUE_WORDS,
        VALUE_W,
    )
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        row = at + offset
        ahead = row + N < stop
        next_key_steps = _read_steps(
            key_scales, key_zeros, start + row + N, ahead, KEY_STEPS, KEY_GROUP, KEY_PER, KEY_WORDS, KEY_W
        )
        next_value_steps = _read_steps(
            value_scales, value_zeros, start + row + N, ahead, VALUE_STEPS, VALUE_GROUP, VALUE_PER, VALUE_WORDS, VALUE_W
        )
        m, norm, sums, shift = _attend_codes(
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
            start + row,
            row < stop,
            scale,
            KEY_CODE,
            KEY_STEPS,
            KEY_GROUPS,
            KEY_STORED,
            KEY_PER,
            KEY_WORDS,
            KEY_W,
            VALUE_CODE,
            VALUE_STEPS,
            VALUE_GROUPS,
            VALUE_STORED,
            VALUE_PER,
            VALUE_WORDS,
            VALUE_W,
            LIFT,
            MASS,
            LIKE,
            KEY_FAST,
            VALUE_FAST,
            CAP,
        )
        key_steps, value_steps = next_key_steps, next_value_steps
    return m, norm, sums, shift


@triton.jit(do_not_specialize=["splits", "room"])
def _attend(
    queries,
    step,
    lengths,
    starts,
    mass,
    newest,
    key_words,
    key_scales,
    key_zeros,
    value_words,
    value_scales,
    value_zeros,
    more_key_words,
    more_key_scales,
    more_key_zeros,
    more_value_words,
    more_value_scales,
    more_value_zeros,
    part_acc,
    part_max,
    part_norm,
    group,
    heads,
    splits,
    room,
    scale,
    key_factor,
    value_factor,
    KEY_EACH: tl.constexpr,
    VALUE_EACH: tl.constexpr,
    MASS: tl.constexpr,
    KEY_CODE: tl.constexpr,
    KEY_STEPS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_STORED: tl.constexpr,
    KEY_PER: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    KEY_W: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_STORED: tl.constexpr,
    VALUE_PER: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    VALUE_W: tl.constexpr,
    LIFT: tl.constexpr,
    LIKE: tl.constexpr,
    KEY_FAST: tl.constexpr,
    VALUE_FAST: tl.constexpr,
    CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Attend with M queries of one KV head to one of `splits` ranges of its rows. `heads`: B·H.

    A word holds PER codes. A row of keys or values has WORDS words, padded to W.
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
    q_sum = tl.sum(whole, 1) / q_scale
    word = tl.arange(0, KEY_W) * KEY_PER
    KEY_GROUPS: tl.constexpr = KEY_STEPS > 0 and KEY_GROUP < DIM
    VALUE_GROUPS: tl.constexpr = VALUE_STEPS > 0 and VALUE_GROUP < DIM
    q = ()
    for j in tl.static_range(KEY_PER):
        part = tl.load(line + (word + j)[None], mask=asking[:, None] & (word < DIM)[None], other=0.0).to(tl.float32)
        ratio = find_gain(KEY_CODE, 0, KEY_GROUPS, KEY_FAST) / find_gain(KEY_CODE, j, KEY_GROUPS, KEY_FAST)
        q = q + ((part * (ratio / q_scale)[:, None]).to(LIKE),)  # type: ignore[assignment]
    key_scale = q_scale * read_factor(key_factor, head, KEY_EACH)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    shift = tl.zeros([M], tl.float32)
    sums = ()
    for _ in tl.static_range(VALUE_PER):
        sums = sums + (tl.zeros([M, VALUE_W], tl.float32),)  # type: ignore[assignment]
    length, more = tl.load(lengths + head).to(tl.int32), tl.load(step)
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
        key_words,
        key_scales,
        key_zeros,
        value_words,
        value_scales,
        value_zeros,
        mass,
        tl.load(starts + head),
        first,
        tl.minimum(last, length),
        scale,
        KEY_CODE,
        KEY_STEPS,
        KEY_GROUP,
        KEY_STORED,
        KEY_PER,
        KEY_WORDS,
        KEY_W,
        VALUE_CODE,
        VALUE_STEPS,
        VALUE_GROUP,
        VALUE_STORED,
        VALUE_PER,
        VALUE_WORDS,
        VALUE_W,
        LIFT,
        MASS,
        LIKE,
        KEY_FAST,
        VALUE_FAST,
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
        more_key_words,
        more_key_scales,
        more_key_zeros,
        more_value_words,
        more_value_scales,
        more_value_zeros,
        mass,
        head * room,
        tl.maximum(first - length, 0),
        last - length,
        scale,
        KEY_CODE,
        KEY_STEPS,
        KEY_GROUP,
        KEY_STORED,
        KEY_PER,
        KEY_WORDS,
        KEY_W,
        VALUE_CODE,
        VALUE_STEPS,
        VALUE_GROUP,
        VALUE_STORED,
        VALUE_PER,
        VALUE_WORDS,
        VALUE_W,
        LIFT,
        False,
        LIKE,
        KEY_FAST,
        VALUE_FAST,
        CAP,
        N,
        STAGES,
    )
    p = tl.zeros([M], tl.float32)
    shrink = tl.full([M], 1.0, tl.float32)
    if split == 0:  # the token's own row, which is no code
        k = tl.load(newest + head * DIM + column, mask=inside, other=0.0).to(tl.float32)  # (D,)
        logit = cap_tile(tl.sum(whole * k[None], 1) * scale, CAP)  # (M,)
        new = tl.maximum(m, logit)
        p, shrink = tl.exp2(logit - new), tl.exp2(m - new)
        m, norm = new, norm * shrink + p
    part = (head * splits + split) * group + index
    word = tl.arange(0, VALUE_W) * VALUE_PER
    there = word < DIM
    value_size = read_factor(value_factor, head, VALUE_EACH)
    shift *= shrink * value_size
    for j in tl.static_range(VALUE_PER):
        lifted = LIFT * find_gain(VALUE_CODE, j, VALUE_GROUPS, VALUE_FAST)
        v = tl.load(newest + (heads + head) * DIM + word + j, mask=there, other=0.0).to(tl.float32)
        total = sums[j] * (shrink * (value_size / lifted))[:, None] + p[:, None] * v[None] + shift[:, None]
        tl.store(part_acc + part[:, None] * DIM + (word + j)[None], total, mask=asking[:, None] & there[None])
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def list_words(side: CodedSide, held: bool) -> list[Tensor]:
    """Return `list_parts` with two bytes of codes in a word, if these divide a row."""
    codes, *steps = list_parts(side, held)
    return [codes.view(torch.int16) if codes.shape[-1] % 2 == 0 else codes, *steps]


def name_words(side: CodedSide, prefix: str, dim: int, like: Tensor) -> dict[str, object]:
    """Return the constants that say how `_attend` reads keys or values."""
    form, size = side.form, side.held[0].shape[-1]
    wide = size % 2 == 0
    words = size // 2 if wide else size
    groups = form.steps > 0 and form.group not in (0, dim)
    return {
        f"{prefix}_CODE": form.code,
        f"{prefix}_STEPS": 3 if form.scale == "point" else form.steps,
        f"{prefix}_GROUP": form.group or dim,
        f"{prefix}_STORED": STORED.get(form.stored),
        f"{prefix}_PER": dim // words,
        f"{prefix}_WORDS": words,
        f"{prefix}_W": max(16, triton.next_power_of_2(words)),
        f"{prefix}_FAST": wide and converts_fast(like) and write_asm(form.code, 0, groups) is not None,
    }


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
    splits = max(1, min(MOST, programs // (batch * heads * tiles), triton.cdiv(rows.longest + 1, tile)))
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    parts = [
        torch.empty(batch * heads, splits, group, *more, dtype=torch.float32, device=queries.device)
        for more in ((dim,), (), ())
    ]
    lift = 1.0
    if rows.values.form.steps and rows.values.form.group in (0, dim):
        lift = 2.0 ** int(math.log2(2 * LARGEST[rows.values.form.code]))
    _attend[batch * heads, splits, tiles](
        queries.contiguous(),
        step,
        rows.lengths,
        rows.starts,
        rows.starts if rows.mass is None else rows.mass,
        rows.newest,
        *list_words(rows.keys, held=True),
        *list_words(rows.values, held=True),
        *list_words(rows.keys, held=False),
        *list_words(rows.values, held=False),
        *parts,
        group,
        batch * heads,
        splits,
        rows.keys.more[0].shape[2],
        scaling * LOG2E.value,
        rows.keys.factor,
        rows.values.factor,
        KEY_EACH=isinstance(rows.keys.factor, Tensor),
        VALUE_EACH=isinstance(rows.values.factor, Tensor),
        MASS=rows.mass is not None,
        **name_words(rows.keys, "KEY", dim, queries),
        **name_words(rows.values, "VALUE", dim, queries),
        LIFT=lift,
        LIKE=tl.float32 if queries.dtype == torch.float32 else tl.float16,
        CAP=find_cap(extras),
        M=each,
        N=tile,
        STAGES=STAGES,
        DIM=dim,
        D=padded,
        num_warps=warps,
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
        S=128 if splits > 16 else 16,
        D=padded,
        sinks=get_sinks(extras),
        query_heads=query_heads,
        num_warps=4,
    )
    return outputs if rows.values.turn is None else turn_back(outputs, rows.values.turn)


def choose_tile(rows: CodedRows, each: int, queries: Tensor) -> tuple[int, int, int]:
    """Return the rows of a tile, the warps of a program that reads it, and the number of programs.

    They were the fastest ones on an H200 with 132 multiprocessors, for 131,072 rows of 128 channels. Tiles that take
    more registers or memory there have half the rows.

    Args:
        rows: The rows.
        each: Queries of a program.
        queries: In their dtype.
    """
    dim = rows.newest.shape[-1]
    forms = rows.keys.form, rows.values.form
    groups = any(form.group not in (0, dim) for form in forms)
    if each > 16 or dim > 128 or groups or queries.dtype == torch.float32:
        return 64, 2, 528
    return (128, 2, 528) if all(form.bits == 4 for form in forms) else (128, 4, 264)


def converts_fast(queries: Tensor) -> bool:
    """Return whether the GPU turns several codes at once into float16: from Ada and Hopper on."""
    like = queries.dtype != torch.float32 and not triton.knobs.runtime.interpret
    return like and torch.cuda.get_device_capability(queries.device) >= (8, 9)


def turn_back(outputs: Tensor, turn: Tensor) -> Tensor:
    """Return outputs (B, Hq, 1, d) times the transposed matrix."""
    return (outputs.float() @ turn.T).to(outputs.dtype)
