"""Round the newest row of each head to codes, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.coded_rows.form import LARGEST, CodedRows, Form
from kvbench.kernels.coded_rows.triton import base_number, list_parts, read_factor


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
        small = (tl.minimum(size, 2.0 ** (1 - BIAS)) * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32)
        code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
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
def turn_row(row, matrix, column, DIM: tl.constexpr, BACK: tl.constexpr):
    """Return a row (D,) times the matrix (DIM, DIM), or with BACK times the transposed matrix."""
    inside = (column < DIM)[:, None] & (column < DIM)[None]
    strides: tl.constexpr = (1, DIM) if BACK else (DIM, 1)
    turns = tl.load(matrix + column[:, None] * strides[0] + column[None] * strides[1], mask=inside, other=0.0)  # (D, D)
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
    BACK: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Round the newest row of one head, in place, and store its codes as row `line` of the memory.

    With BACK the row is turned back.
    """
    column = tl.arange(0, D)
    there = column < DIM
    numbers = tl.load(newest + row * DIM + column, mask=there, other=0.0).to(tl.float32)  # (D,)
    if TURN:
        numbers = turn_row(numbers, matrix, column, DIM, False)
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
    if TURN and BACK:
        turned = turn_row(turned, matrix, column, DIM, True)
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
    KEY_EACH: tl.constexpr,
    VALUE_EACH: tl.constexpr,
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
    BACK: tl.constexpr,
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
            read_factor(key_factor, index, KEY_EACH),
            KEY_CODE,
            KEY_SCALE,
            KEY_GROUP,
            KEY_LEAST,
            KEY_CLIP,
            KEY_ROUNDING,
            KEY_LARGEST,
            KEY_TURN,
            ROUNDS,
            BACK,
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
            read_factor(value_factor, index - heads, VALUE_EACH),
            VALUE_CODE,
            VALUE_SCALE,
            VALUE_GROUP,
            VALUE_LEAST,
            VALUE_CLIP,
            VALUE_ROUNDING,
            VALUE_LARGEST,
            VALUE_TURN,
            ROUNDS,
            BACK,
            DIM,
            D,
        )
    else:
        column = tl.arange(0, D)
        there = column < DIM
        place = (index - 2 * heads) * DIM + column
        row = tl.load(queries + place, mask=there, other=0.0).to(tl.float32)  # (D,)
        tl.store(out + place, turn_row(row, key_matrix, column, DIM, False), mask=there)


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
    turned = rows.keys.turn is not None
    out = torch.empty_like(queries, memory_format=torch.contiguous_format) if turned else queries
    launch_rounding(rows, step, queries.contiguous(), out, rows.rounds_newest, back=False)
    return out


def round_in_place_triton(rows: CodedRows, step: Tensor) -> None:
    launch_rounding(rows, step, None, None, rounds=True, back=True)


def launch_rounding(
    rows: CodedRows, step: Tensor, queries: Tensor | None, out: Tensor | None, rounds: bool, back: bool
) -> None:
    """Round the newest row of each head, turned back if `back`, and write turned queries (B, Hq, 1, d) to `out`."""
    batch, heads, dim = rows.newest.shape[1:]
    padded = triton.next_power_of_2(dim)
    turns = rows.keys.turn is not None, rows.values.turn is not None
    asking = batch * queries.shape[1] if turns[0] and queries is not None else 0
    matrices = [rows.newest if side.turn is None else side.turn for side in (rows.keys, rows.values)]
    _round_newest[(2 * batch * heads + asking,)](
        rows.newest if queries is None else queries,
        rows.newest if out is None else out,
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
        KEY_EACH=isinstance(rows.keys.factor, Tensor),
        VALUE_EACH=isinstance(rows.values.factor, Tensor),
        **name_form(rows.keys.form, "KEY", dim, padded),
        **name_form(rows.values.form, "VALUE", dim, padded),
        KEY_TURN=turns[0],
        VALUE_TURN=turns[1],
        ROUNDS=rounds,
        BACK=back,
        DIM=dim,
        D=padded,
        num_warps=4 if any(turns) else 1,
    )
