"""Round the newest row to codes, and attend to codes, in Triton. README.md says how codes become numbers.

A program reads tiles of codes and multiplies the queries with what the codes stand for without their scales, which is
exact in 16 bits. A scale of the whole row is then a factor of the row's logit, or of its weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, cap_tile, combine_splits, find_cap
from kvbench.kernels.coded_rows.form import LARGEST, CodedRows, CodedSide, Form
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

PROGRAMS = 528  # programs that rows are split over: 4 on each of 132 multiprocessors
MOST = 128  # programs of one head, which `combine_splits` reads at once
TILE, WARPS, STAGES = 64, 4, 3  # rows of a tile, and how a program reads them


E4M3 = tl.constexpr(
    "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}"
)
INT8 = tl.constexpr(  # a byte below 0x64 is the float 1024 and the byte's number
    "{.reg .b32 x, y, z; xor.b32 x, $2, 0x80808080; prmt.b32 y, x, 0x64646464, 0x4140; "
    "prmt.b32 z, x, 0x64646464, 0x4342; mov.b32 x, 0x64806480; sub.rn.f16x2 $0, y, x; sub.rn.f16x2 $1, z, x;}"
)
LOW = tl.constexpr(
    "{.reg .b32 x, y, z; and.b32 x, $2, 0x0f0f0f0f; prmt.b32 y, x, 0x64646464, 0x4140; "
    "prmt.b32 z, x, 0x64646464, 0x4342; mov.b32 x, 0x64006400; sub.rn.f16x2 $0, y, x; sub.rn.f16x2 $1, z, x;}"
)
HIGH = tl.constexpr(
    "{.reg .b32 x, y, z; shr.u32 x, $2, 4; and.b32 x, x, 0x0f0f0f0f; prmt.b32 y, x, 0x64646464, 0x4140; "
    "prmt.b32 z, x, 0x64646464, 0x4342; mov.b32 x, 0x64006400; sub.rn.f16x2 $0, y, x; sub.rn.f16x2 $1, z, x;}"
)


@triton.jit
def widen(code, ASM: tl.constexpr):
    """Return what four bytes at a time stand for, float16."""
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def read_codes(code, CODE: tl.constexpr, like: tl.constexpr, FAST: tl.constexpr):
    """Return what codes stand for, without scale: those of a byte, or of its low half; and those of its high half."""
    if CODE == "uint4":
        if FAST:
            low, high = widen(code, LOW), widen(code, HIGH)
        else:
            low, high = base_number(code & 15, CODE, like), base_number(code >> 4, CODE, like)
    else:
        if FAST and CODE == "e4m3":
            low = widen(code, E4M3)
        elif FAST and CODE == "int8":
            low = widen(code, INT8)
        else:
            low = base_number(code, CODE, like)
        high = low
    return low, high


@triton.jit
def base_number(code, CODE: tl.constexpr, like: tl.constexpr):
    """Return what codes stand for, without scale, in the dtype `like`, float16 or float32. It is exact.

    A float of 8 bits becomes a wider one by a shift, which leaves the difference of their exponents' biases.
    So no hardware with such floats is needed.
    """
    if CODE == "e4m3":
        word = code.to(tl.int32)
        if like == tl.float16:
            number = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        else:
            raised = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
            number = raised * 18446744073709551616.0 * 72057594037927936.0  # 2^120 in two steps, within the exponents
        number = tl.where((word & 0x7F) == 0x7F, float("nan"), number)
    elif CODE == "e5m2":
        number = (code.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    elif CODE == "int8":
        number = code.to(tl.int8, bitcast=True)
    else:
        number = code
    return number.to(like)


@triton.jit
def to_code(number, CODE: tl.constexpr, ROUNDING: tl.constexpr, LARGEST: tl.constexpr):
    """Round numbers to codes, uint8. Numbers beyond the largest code become that one, and NaN stays NaN in a float."""
    broken = number != number
    number = tl.where(broken, 0.0, number)
    if CODE == "e4m3" or CODE == "e5m2":
        MANTISSA: tl.constexpr = 3 if CODE == "e4m3" else 2
        BIAS: tl.constexpr = 7 if CODE == "e4m3" else 15
        size = tl.minimum(tl.abs(number), LARGEST)
        power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 2.0 ** (1 - BIAS))  # smaller numbers have the smallest normal one's step
        size = round_to_even(size / power * 2.0**MANTISSA) * (power * 2.0**-MANTISSA)
        normal = (size.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
        code = tl.where(size < 2.0 ** (1 - BIAS), (size * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32), normal)
        code = tl.where(broken, 0x7F, code | tl.where(number < 0.0, 0x80, 0)).to(tl.uint8)
    else:
        if ROUNDING == "even":
            whole = round_to_even(number)
        else:
            size = tl.floor(tl.abs(number) + (0.5 if ROUNDING == "up" else 0.0))
            whole = tl.where(number < 0, -size, size)
        if CODE == "int8":
            code = tl.clamp(whole, -128.0, 127.0).to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
        else:
            code = tl.clamp(whole, 0.0, 15.0).to(tl.int32).to(tl.uint8)
    return code


@triton.jit
def round_to_even(number):
    """Return the nearest whole numbers, and of two the even one."""
    low = tl.floor(number)
    rest, odd = number - low, low - 2.0 * tl.floor(low * 0.5)
    return low + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), 1.0, 0.0)


@triton.jit
def turn_row(row, matrix, column, DIM: tl.constexpr):
    """Return a row (D,) times the matrix (DIM, DIM)."""
    inside = (column < DIM)[:, None] & (column < DIM)[None]
    turns = tl.load(matrix + column[:, None] * DIM + column[None], mask=inside, other=0.0)  # (D, D)
    return tl.sum(row[:, None] * turns, 0)


@triton.jit
def _round_side(
    newest,
    matrix,
    codes,
    scales,
    zeros,
    row,
    line,
    factor,
    FORM_CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    CLIP: tl.constexpr,
    ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr,
    TURN: tl.constexpr,
    ROUNDS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Round the newest row of one head, in place, and store its codes as row `line` of the memory."""
    column = tl.arange(0, D)
    there = column < DIM
    numbers = tl.load(newest + row * DIM + column, mask=there, other=0.0).to(tl.float32)  # (D,)
    if TURN:
        numbers = turn_row(numbers, matrix, column, DIM)
    turned = numbers
    numbers = numbers / factor
    GROUPS: tl.constexpr = D // GROUP
    grouped = tl.reshape(numbers, [GROUPS, GROUP])
    real = tl.reshape(there, [GROUPS, GROUP])
    group = tl.arange(0, GROUPS)
    known = group * GROUP < DIM
    scale = tl.full([GROUPS], 1.0, tl.float32)
    zero = tl.zeros([GROUPS], tl.float32)
    COUNT: tl.constexpr = (DIM + GROUP - 1) // GROUP
    broken = tl.max(tl.where(grouped != grouped, 1, 0), 1) > 0  # the largest of numbers and NaN is a number
    shift = tl.zeros([GROUPS], tl.float32)  # the code of zero, if it is a whole number
    if SCALE == "largest":
        scale = tl.maximum(tl.max(tl.abs(grouped), 1) / LARGEST, LEAST)
        scale = tl.where(broken, float("nan"), scale).to(scales.dtype.element_ty)
        tl.store(scales + line * COUNT + group, scale, mask=known)
        scale = scale.to(tl.float32)
    elif SCALE != "none":
        low = tl.min(tl.where(real, grouped, float("inf")), 1) * CLIP
        high = tl.max(tl.where(real, grouped, float("-inf")), 1) * CLIP
        scale = tl.maximum(high - low, LEAST) / (15.0 if FORM_CODE == "uint4" else 255.0)
        scale = tl.where(broken, float("nan"), scale)
        if SCALE == "point":
            shift = tl.where(broken, 0.0, tl.clamp(tl.floor(0.5 - low / scale), 0.0, 15.0))
            bits = (scale.to(tl.int32, bitcast=True) & -16) | shift.to(tl.int32)
            tl.store(scales + line * COUNT + group, bits.to(tl.float32, bitcast=True), mask=known)
        else:
            zero = low
            if SCALE == "middle":
                zero = (low + high) / 2.0
            scale, zero = scale.to(scales.dtype.element_ty), zero.to(scales.dtype.element_ty)
            tl.store(scales + line * COUNT + group, scale, mask=known)
            tl.store(zeros + line * COUNT + group, zero, mask=known)
            scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    code = to_code((grouped - zero[:, None]) / divisor[:, None] + shift[:, None], FORM_CODE, ROUNDING, LARGEST)
    if SCALE == "point":
        scale = (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
        zero = -shift * scale
    code = tl.reshape(code, [D])
    if FORM_CODE == "uint4":
        pair = tl.reshape(code.to(tl.int32), [D // 2, 2])
        byte = tl.arange(0, D // 2)
        packed = tl.sum(pair << (4 * tl.arange(0, 2))[None], 1).to(tl.uint8)
        tl.store(codes + line * (DIM // 2) + byte, packed, mask=byte < DIM // 2)
    else:
        tl.store(codes + line * DIM + column, code, mask=there)
    if ROUNDS:
        base = tl.reshape(base_number(code, FORM_CODE, tl.float32), [GROUPS, GROUP])
        turned = tl.reshape(base * scale[:, None] + zero[:, None], [D]) * factor
    if ROUNDS or TURN:
        tl.store(newest + row * DIM + column, turned, mask=there)


@triton.jit
def _round_newest(
    queries,
    out,
    newest,
    step,
    key_matrix,
    key_codes,
    key_scales,
    key_zeros,
    value_matrix,
    value_codes,
    value_scales,
    value_zeros,
    room,
    heads,
    key_factor,
    value_factor,
    KEY_CODE: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_LEAST: tl.constexpr,
    KEY_CLIP: tl.constexpr,
    KEY_ROUNDING: tl.constexpr,
    KEY_LARGEST: tl.constexpr,
    KEY_TURN: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_LEAST: tl.constexpr,
    VALUE_CLIP: tl.constexpr,
    VALUE_ROUNDING: tl.constexpr,
    VALUE_LARGEST: tl.constexpr,
    VALUE_TURN: tl.constexpr,
    ROUNDS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Round one head's newest key or value, or turn one query. `heads`: B·H."""
    index = tl.program_id(0).to(tl.int64)
    if index < heads:
        line = index * room + tl.load(step)
        _round_side(
            newest,
            key_matrix,
            key_codes,
            key_scales,
            key_zeros,
            index,
            line,
            key_factor,
            KEY_CODE,
            KEY_SCALE,
            KEY_GROUP,
            KEY_LEAST,
            KEY_CLIP,
            KEY_ROUNDING,
            KEY_LARGEST,
            KEY_TURN,
            ROUNDS,
            DIM,
            D,
        )
    elif index < 2 * heads:
        line = (index - heads) * room + tl.load(step)
        _round_side(
            newest,
            value_matrix,
            value_codes,
            value_scales,
            value_zeros,
            index,
            line,
            value_factor,
            VALUE_CODE,
            VALUE_SCALE,
            VALUE_GROUP,
            VALUE_LEAST,
            VALUE_CLIP,
            VALUE_ROUNDING,
            VALUE_LARGEST,
            VALUE_TURN,
            ROUNDS,
            DIM,
            D,
        )
    else:
        column = tl.arange(0, D)
        there = column < DIM
        place = (index - 2 * heads) * DIM + column
        row = tl.load(queries + place, mask=there, other=0.0).to(tl.float32)  # (D,)
        tl.store(out + place, turn_row(row, key_matrix, column, DIM), mask=there)


@triton.jit
def _load_steps(scales, zeros, place, there, STEPS: tl.constexpr):
    """Return the scales and zeros at places, float32."""
    scale = tl.load(scales + place, mask=there, other=0.0)
    if STEPS == 3:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (bits & -16).to(tl.float32, bitcast=True)
        zero = -(bits & 15).to(tl.float32) * scale
    elif STEPS == 2:
        zero = tl.load(zeros + place, mask=there, other=0.0).to(tl.float32)
    else:
        zero = tl.zeros_like(scale).to(tl.float32)
    return scale.to(tl.float32), zero


@triton.jit
def _spread_steps(
    scales,
    zeros,
    row,
    here,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    W: tl.constexpr,
    PER: tl.constexpr,
):
    """Return the scale and the zero of each code of rows (N,), (N, W) each. A column of codes has PER channels."""
    channel = tl.arange(0, W) * PER
    COUNT: tl.constexpr = DIM // GROUP
    where = here[:, None] & (channel < DIM)[None]
    return _load_steps(scales, zeros, row[:, None] * COUNT + (channel // GROUP)[None], where, STEPS)


@triton.jit
def _attend_codes(
    q_low,
    q_high,
    q_sum,
    q_scale,
    m,
    norm,
    low,
    high,
    shift,
    key_codes,
    key_scales,
    key_zeros,
    value_codes,
    value_scales,
    value_zeros,
    mass,
    row,
    here,
    scale,
    KEY_CODE: tl.constexpr,
    KEY_STEPS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    MASS: tl.constexpr,
    LIKE: tl.constexpr,
    FAST: tl.constexpr,
    CAP: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Process the rows (N,) of a tile. Pointers are those of row 0.

    `low` and `high` sum the values' codes in the low and the high half of each byte, (M, D/2); codes of 8 bits are in
    `low`, (M, D). `shift` sums the zeros of whole rows, (M,).
    """
    HALF: tl.constexpr = KEY_CODE == "uint4"
    W: tl.constexpr = D // 2 if HALF else D
    BYTES: tl.constexpr = DIM // 2 if HALF else DIM
    byte = tl.arange(0, W)
    where = here[:, None] & (byte < BYTES)[None]
    code = tl.load(key_codes + row[:, None] * BYTES + byte[None], mask=where, other=0)  # (N, W)
    WHOLE: tl.constexpr = KEY_STEPS > 0 and KEY_GROUP == DIM  # one scale a row
    k, k_high = read_codes(code, KEY_CODE, LIKE, FAST)
    if KEY_STEPS > 0 and not WHOLE:
        PER: tl.constexpr = 2 if HALF else 1
        step, zero = _spread_steps(key_scales, key_zeros, row, here, KEY_STEPS, KEY_GROUP, DIM, W, PER)
        k = (k.to(tl.float32) * step + zero).to(LIKE)
        if HALF:
            k_high = (k_high.to(tl.float32) * step + zero).to(LIKE)
    logits = tl.dot(q_low, k.T, input_precision="ieee")  # (M, N)
    if HALF:
        logits += tl.dot(q_high, k_high.T, input_precision="ieee")
    if WHOLE:
        step, zero = _load_steps(key_scales, key_zeros, row, here, KEY_STEPS)
        logits *= step[None]
        if KEY_STEPS > 1:
            logits += q_sum[:, None] * zero[None]
    logits = cap_tile(logits * (q_scale * scale)[:, None], CAP)
    if MASS:
        logits += tl.log2(tl.load(mass + row, mask=here, other=1).to(tl.float32))[None]
    logits = tl.where(here[None], logits, float("-inf"))
    new = tl.maximum(m, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(m - safe)
    norm = norm * shrink + tl.sum(p, 1)
    V_HALF: tl.constexpr = VALUE_CODE == "uint4"
    VW: tl.constexpr = D // 2 if V_HALF else D
    V_BYTES: tl.constexpr = DIM // 2 if V_HALF else DIM
    V_WHOLE: tl.constexpr = VALUE_STEPS > 0 and VALUE_GROUP == DIM
    byte = tl.arange(0, VW)
    where = here[:, None] & (byte < V_BYTES)[None]
    code = tl.load(value_codes + row[:, None] * V_BYTES + byte[None], mask=where, other=0)  # (N, VW)
    v, v_high = read_codes(code, VALUE_CODE, LIKE, FAST)
    if VALUE_STEPS > 0 and not V_WHOLE:
        V_PER: tl.constexpr = 2 if V_HALF else 1
        step, zero = _spread_steps(value_scales, value_zeros, row, here, VALUE_STEPS, VALUE_GROUP, DIM, VW, V_PER)
        v = (v.to(tl.float32) * step + zero).to(LIKE)
        if V_HALF:
            v_high = (v_high.to(tl.float32) * step + zero).to(LIKE)
    weight = p
    if V_WHOLE:
        step, zero = _load_steps(value_scales, value_zeros, row, here, VALUE_STEPS)
        weight = p * step[None]
        if VALUE_STEPS > 1:
            shift = shift * shrink + tl.sum(p * zero[None], 1)
    low = low * shrink[:, None] + tl.dot(weight.to(LIKE), v, input_precision="ieee")
    if V_HALF:
        high = high * shrink[:, None] + tl.dot(weight.to(LIKE), v_high, input_precision="ieee")
    return new, norm, low, high, shift


@triton.jit(do_not_specialize=["splits", "room"])
def _attend(
    queries,
    step,
    lengths,
    starts,
    mass,
    newest,
    key_codes,
    key_scales,
    key_zeros,
    value_codes,
    value_scales,
    value_zeros,
    more_key_codes,
    more_key_scales,
    more_key_zeros,
    more_value_codes,
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
    MASS: tl.constexpr,
    KEY_CODE: tl.constexpr,
    KEY_STEPS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_STEPS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    LIKE: tl.constexpr,
    FAST: tl.constexpr,
    CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Attend with M queries of one KV head to one of `splits` ranges of its rows. `heads`: B·H."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.program_id(2) * M + tl.arange(0, M)
    asking = index < group
    KEY_HALF: tl.constexpr = KEY_CODE == "uint4"
    W: tl.constexpr = D // 2 if KEY_HALF else D
    STRIDE: tl.constexpr = 2 if KEY_HALF else 1
    column = tl.arange(0, W)
    line = queries + (head * group + index)[:, None] * DIM
    where = asking[:, None] & (column * STRIDE < DIM)[None]
    q_low = tl.load(line + (column * STRIDE)[None], mask=where, other=0.0).to(tl.float32)  # (M, W)
    q_high = q_low
    q_sum, largest = tl.sum(q_low, 1), tl.max(tl.abs(q_low), 1)
    if KEY_HALF:
        q_high = tl.load(line + (column * STRIDE + 1)[None], mask=where, other=0.0).to(tl.float32)  # (M, W)
        q_sum += tl.sum(q_high, 1)
        largest = tl.maximum(largest, tl.max(tl.abs(q_high), 1))
    # a power of two, so that 16 bits hold queries of any size
    q_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))
    q_low, q_high, q_sum = (q_low / q_scale[:, None]).to(LIKE), (q_high / q_scale[:, None]).to(LIKE), q_sum / q_scale
    q_scale *= key_factor
    VALUE_HALF: tl.constexpr = VALUE_CODE == "uint4"
    VW: tl.constexpr = D // 2 if VALUE_HALF else D
    V_STRIDE: tl.constexpr = 2 if VALUE_HALF else 1
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    low = tl.zeros([M, VW], tl.float32)
    high = tl.zeros([M, VW], tl.float32)
    shift = tl.zeros([M], tl.float32)
    length, more = tl.load(lengths + head).to(tl.int32), tl.load(step)
    start = tl.load(starts + head)
    share = tl.cdiv(tl.cdiv(length + more, splits), N) * N
    first = split * share
    last = tl.minimum(first + share, length + more)
    stop = tl.minimum(last, length)
    for begin in range(first, stop, N):
        row = begin + tl.arange(0, N)
        m, norm, low, high, shift = _attend_codes(
            q_low,
            q_high,
            q_sum,
            q_scale,
            m,
            norm,
            low,
            high,
            shift,
            key_codes,
            key_scales,
            key_zeros,
            value_codes,
            value_scales,
            value_zeros,
            mass,
            start + row,
            row < stop,
            scale,
            KEY_CODE,
            KEY_STEPS,
            KEY_GROUP,
            VALUE_CODE,
            VALUE_STEPS,
            VALUE_GROUP,
            MASS,
            LIKE,
            FAST,
            CAP,
            DIM,
            D,
        )
    for begin in range(tl.maximum(first - length, 0), last - length, N):
        row = begin + tl.arange(0, N)
        m, norm, low, high, shift = _attend_codes(
            q_low,
            q_high,
            q_sum,
            q_scale,
            m,
            norm,
            low,
            high,
            shift,
            more_key_codes,
            more_key_scales,
            more_key_zeros,
            more_value_codes,
            more_value_scales,
            more_value_zeros,
            mass,
            head * room + row,
            row < last - length,
            scale,
            KEY_CODE,
            KEY_STEPS,
            KEY_GROUP,
            VALUE_CODE,
            VALUE_STEPS,
            VALUE_GROUP,
            False,
            LIKE,
            FAST,
            CAP,
            DIM,
            D,
        )
    low, high, shift = low * value_factor, high * value_factor, shift * value_factor
    if split == 0:  # the token's own row, which is no code
        k = tl.load(newest + head * DIM + (column * STRIDE)[None], mask=(column * STRIDE < DIM)[None], other=0.0)
        logit = tl.sum(q_low.to(tl.float32) * k.to(tl.float32), 1)  # (M,)
        if KEY_HALF:
            k = tl.load(
                newest + head * DIM + (column * STRIDE + 1)[None], mask=(column * STRIDE < DIM)[None], other=0.0
            )
            logit += tl.sum(q_high.to(tl.float32) * k.to(tl.float32), 1)
        logit = cap_tile(logit * (q_scale / key_factor * scale), CAP)
        new = tl.maximum(m, logit)
        p, shrink = tl.exp2(logit - new), tl.exp2(m - new)
        m, norm, shift = new, norm * shrink + p, shift * shrink
        own = newest + (heads + head) * DIM
        value = tl.arange(0, VW) * V_STRIDE
        v = tl.load(own + value[None], mask=(value < DIM)[None], other=0.0).to(tl.float32)  # (1, VW)
        low = low * shrink[:, None] + p[:, None] * v
        if VALUE_HALF:
            v = tl.load(own + value[None] + 1, mask=(value < DIM)[None], other=0.0).to(tl.float32)
            high = high * shrink[:, None] + p[:, None] * v
    part = (head * splits + split) * group + index
    value = tl.arange(0, VW) * V_STRIDE
    kept = asking[:, None] & (value < DIM)[None]
    tl.store(part_acc + part[:, None] * DIM + value[None], low + shift[:, None], mask=kept)
    if VALUE_HALF:
        tl.store(part_acc + part[:, None] * DIM + value[None] + 1, high + shift[:, None], mask=kept)
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def list_parts(side: CodedSide, held: bool) -> list[Tensor]:
    """Return the codes, scales and zeros of a side's rows; codes stand for what its form lacks."""
    parts = list(side.held if held else side.more)
    return parts + [parts[0]] * (3 - len(parts))


def count_steps(form: Form) -> int:
    """Return how many steps of a group `_load_steps` reads: 3 for a scale with a point in its lowest bits."""
    return 3 if form.scale == "point" else form.steps


def name_form(form: Form, prefix: str, dim: int, padded: int) -> dict[str, object]:
    """Return the constants that say how `_round_newest` rounds keys or values."""
    return {
        f"{prefix}_CODE": form.code,
        f"{prefix}_SCALE": form.scale,
        f"{prefix}_GROUP": form.group or padded,
        f"{prefix}_LEAST": form.least,
        f"{prefix}_CLIP": form.clip,
        f"{prefix}_ROUNDING": form.rounding,
        f"{prefix}_LARGEST": LARGEST[form.code],
    }


def round_newest_triton(queries: Tensor, rows: CodedRows, step: Tensor) -> Tensor:
    batch, heads, dim = rows.newest.shape[1:]
    padded = triton.next_power_of_2(dim)
    turned = rows.keys.turn is not None
    out = torch.empty_like(queries, memory_format=torch.contiguous_format) if turned else queries
    asking = queries.contiguous()
    matrices = [rows.newest if side.turn is None else side.turn for side in (rows.keys, rows.values)]
    _round_newest[(2 * batch * heads + (batch * queries.shape[1] if turned else 0),)](
        asking,
        out,
        rows.newest,
        step,
        matrices[0],
        *list_parts(rows.keys, held=False),
        matrices[1],
        *list_parts(rows.values, held=False),
        rows.keys.more[0].shape[2],
        batch * heads,
        rows.keys.factor,
        rows.values.factor,
        **name_form(rows.keys.form, "KEY", dim, padded),
        **name_form(rows.values.form, "VALUE", dim, padded),
        KEY_TURN=turned,
        VALUE_TURN=rows.values.turn is not None,
        ROUNDS=rows.rounds_newest,
        DIM=dim,
        D=padded,
        num_warps=4 if turned or rows.values.turn is not None else 1,
    )
    return out


def attend_triton(
    queries: Tensor, rows: CodedRows, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    batch, heads, dim = rows.newest.shape[1:]
    query_heads = queries.shape[1]
    group = query_heads // heads
    padded = max(16, triton.next_power_of_2(dim))
    each = max(16, triton.next_power_of_2(min(group, 64)))
    tiles = triton.cdiv(group, each)
    splits = max(1, min(MOST, PROGRAMS // (batch * heads * tiles), triton.cdiv(rows.longest + 1, TILE)))
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    parts = [
        torch.empty(batch * heads, splits, group, *more, dtype=torch.float32, device=queries.device)
        for more in ((dim,), (), ())
    ]
    forms = rows.keys.form, rows.values.form
    _attend[batch * heads, splits, tiles](
        queries.contiguous(),
        step,
        rows.lengths,
        rows.starts,
        rows.starts if rows.mass is None else rows.mass,
        rows.newest,
        *list_parts(rows.keys, held=True),
        *list_parts(rows.values, held=True),
        *list_parts(rows.keys, held=False),
        *list_parts(rows.values, held=False),
        *parts,
        group,
        batch * heads,
        splits,
        rows.keys.more[0].shape[2],
        scaling * LOG2E.value,
        rows.keys.factor,
        rows.values.factor,
        MASS=rows.mass is not None,
        KEY_CODE=forms[0].code,
        KEY_STEPS=count_steps(forms[0]),
        KEY_GROUP=forms[0].group or dim,
        VALUE_CODE=forms[1].code,
        VALUE_STEPS=count_steps(forms[1]),
        VALUE_GROUP=forms[1].group or dim,
        LIKE=tl.float32 if queries.dtype == torch.float32 else tl.float16,
        FAST=converts_fast(queries),
        CAP=find_cap(extras),
        M=each,
        N=TILE,
        DIM=dim,
        D=padded,
        num_warps=WARPS,
        num_stages=STAGES,
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


def converts_fast(queries: Tensor) -> bool:
    """Return whether the GPU turns several codes at once into float16: from Ada and Hopper on."""
    like = queries.dtype != torch.float32 and not triton.knobs.runtime.interpret
    return like and torch.cuda.get_device_capability(queries.device) >= (8, 9)


def turn_back(outputs: Tensor, turn: Tensor) -> Tensor:
    """Return outputs (B, Hq, 1, d) times the transposed matrix."""
    return (outputs.float() @ turn.T).to(outputs.dtype)
