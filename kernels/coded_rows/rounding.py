"""Round rows to codes, and read them back, in Triton: many rows, or the newest row of each head."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.coded_rows.form import LARGEST, SIZES, CodedRows, CodedSide, Form, Parts
from kvbench.kernels.coded_rows.numbers import STORED, base_number, list_memory, read_point, read_stored
from kvbench.kernels.coded_rows.reference import turn_wide
from kvbench.kernels.coded_rows.turning import count_warps, name_turn, turn_row, turn_tile
from kvbench.kernels.rope_append.triton import rotate_head

EVEN = tl.constexpr(1.5 * 2**23)  # a float32 above 2^23 has no places behind the point
WIDEST = 128  # channels of rows that a tile turns; the matrix of wider ones exceeds a program's memory
TILE = 4096  # numbers of a tile
TURNED = 64  # rows of a tile that is turned


Names = tuple[tuple[str, object], ...]
"""What kernels know of a form or a side as they are compiled, under names that `take` finds."""


@cache
def name_form(form: Form, dim: int) -> Names:
    """Return the constants of a form."""
    levels = torch.tensor(form.levels if form.code == "levels" else SIZES)
    return (
        ("code", form.code),
        ("bits", form.bits),
        ("largest", LARGEST.get(form.code, 0.0)),
        ("borders", tuple(((levels[1:] + levels[:-1]) / 2).tolist())),
        ("levels", tuple(levels.tolist())),
        ("normed", form.normed),
        ("scale", form.scale),
        ("steps", form.steps),
        ("group", 0 if form.group == dim else form.group),
        ("groups", form.count_groups(dim)),
        ("least", form.least),
        ("clip", form.clip),
        ("stored", STORED.get(form.stored, "")),
        ("by_stored", form.rounds_by_stored and form.scale != "point"),
        ("rounding", form.rounding),
    )


def name_side(form: Form, dim: int, turn: Tensor | None, factor: float | Tensor) -> Names:
    """Return the constants of a form, a turn and a factor."""
    kind = "each" if isinstance(factor, Tensor) else "all" if factor != 1 else "none"
    return (*name_form(form, dim), ("turn", name_turn(turn)), ("factor", kind))


@triton.constexpr_function
def take(side, name):
    """Return what `name_side` gives under a name."""
    return dict(side)[name]


@triton.constexpr_function
def find_group(side, padded):
    """Return the channels of a group of a row of so many channels."""
    return dict(side)["group"] or padded


@triton.jit
def round_to_even(number):
    """Return the whole numbers nearest to numbers below 2^22, and of two the even one."""
    return (number + EVEN) - EVEN


@triton.jit
def divide(numbers, divisor):
    """Return quotients that are rounded once, as PyTorch's are; `/` may miss the last bit."""
    return tl.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))


@triton.jit
def to_float8(number, CODE: tl.constexpr):
    """Round numbers (float32) to e4m3 or e5m2, int32. Numbers beyond the largest one become it, and NaN stays NaN."""
    MANTISSA: tl.constexpr = 3 if CODE == "e4m3" else 2
    BIAS: tl.constexpr = 7 if CODE == "e4m3" else 15
    MOST: tl.constexpr = 448.0 if CODE == "e4m3" else 57344.0
    size = tl.where(number != number, 0.0, tl.minimum(tl.abs(number), MOST))
    power = tl.maximum(find_power(size), 2.0 ** (1 - BIAS))  # smaller numbers have the smallest normal one's step
    inverse = ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    size = round_to_even(size * inverse * 2.0**MANTISSA) * (power * 2.0**-MANTISSA)
    normal = (size.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    small = (tl.minimum(size, 2.0 ** (1 - BIAS)) * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32)
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    sign = (number.to(tl.int32, bitcast=True) >> 24) & 0x80  # that of -0 too
    return tl.where(number != number, 0x7F, code | sign)


@triton.jit
def find_power(number):
    """Return the largest powers of two up to normal numbers above 0; 0 for smaller ones, and infinity for infinity."""
    return (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def to_code(number, SIDE: tl.constexpr):
    """Round numbers to codes, int32.

    Numbers beyond the largest code become that one. NaN stays NaN in floats of 8 bits, and gets any other code.
    """
    CODE: tl.constexpr = take(SIDE, "code")
    ROUNDING: tl.constexpr = take(SIDE, "rounding")
    if CODE == "e4m3" or CODE == "e5m2":
        code = to_float8(number, CODE)
    elif CODE == "e2m1" or CODE == "levels":
        BORDERS: tl.constexpr = take(SIDE, "borders")
        size = tl.abs(number) if CODE == "e2m1" else number
        code = tl.zeros(number.shape, tl.int32)
        for i in tl.static_range(len(BORDERS)):
            if CODE == "e2m1" and ROUNDING == "even" and i % 2 == 0:
                code += tl.where(size <= BORDERS[i], 0, 1)
            else:
                code += tl.where(size < BORDERS[i], 0, 1)
        if CODE == "e2m1":
            code |= tl.where(number < 0.0, 8, 0)
    else:
        LARGEST: tl.constexpr = take(SIDE, "largest")
        LEAST: tl.constexpr = -128.0 if CODE == "int8" else 0.0
        number = tl.where(number != number, 0.0, number)
        if ROUNDING == "even":
            whole = round_to_even(tl.clamp(number, LEAST, LARGEST))
        else:
            size = tl.floor(tl.abs(number) + (0.5 if ROUNDING == "up" else 0.0))
            whole = tl.clamp(tl.where(number < 0, -size, size), LEAST, LARGEST)
        code = whole.to(tl.int32) & 255
    return code


@triton.jit
def find_base(code, SIDE: tl.constexpr):
    """Return what codes (N, D) stand for without scale, float32."""
    CODE: tl.constexpr = take(SIDE, "code")
    if CODE == "levels":
        LEVELS: tl.constexpr = take(SIDE, "levels")
        number = tl.full(code.shape, LEVELS[0], tl.float32)
        for i in tl.static_range(1, len(LEVELS)):
            number = tl.where(code == i, LEVELS[i], number)
    else:
        number = base_number(code.to(tl.uint8), CODE, tl.float32)
    return number


@triton.jit
def find_steps(grouped, real, SIDE: tl.constexpr):
    """Return the scales and zeros (N, G) of groups (N, G, GROUP), not rounded. The zero of a point is its code.

    `real` (1, G, GROUP) says which channels are there; others are 0.
    """
    SCALE: tl.constexpr = take(SIDE, "scale")
    LEAST: tl.constexpr = take(SIDE, "least")
    broken = tl.max(tl.where(grouped != grouped, 1, 0), 2) > 0  # the largest of numbers and NaN is a number
    scale = tl.full(broken.shape, 1.0, tl.float32)
    zero = tl.zeros(broken.shape, tl.float32)
    if SCALE == "norm":
        scale = tl.sqrt_rn(tl.sum(grouped * grouped, 2))
    elif SCALE == "range" or SCALE == "middle" or SCALE == "point":
        known = tl.max(real.to(tl.int32), 2) > 0  # other groups fill the tile
        low = tl.where(known, tl.min(tl.where(real, grouped, float("inf")), 2), 0.0) * take(SIDE, "clip")
        high = tl.where(known, tl.max(tl.where(real, grouped, float("-inf")), 2), 0.0) * take(SIDE, "clip")
        CODES: tl.constexpr = 255.0 if take(SIDE, "code") == "int8" else take(SIDE, "largest")
        scale = divide(tl.maximum(high - low, LEAST), tl.full([1, 1], CODES, tl.float32))
        zero = low
        if SCALE == "middle":
            zero = (low + high) * 0.5
        elif SCALE == "point":
            zero = tl.where(broken, 0.0, tl.clamp(tl.floor(0.5 - divide(low, scale)), 0.0, 15.0))
    elif SCALE != "none":
        largest = tl.max(tl.abs(grouped), 2)
        if SCALE == "power_below":
            scale = find_power(tl.maximum(largest, LEAST)) * 0.25
        else:
            MOST: tl.constexpr = take(SIDE, "largest")
            scale = tl.maximum(divide(largest, tl.full([1, 1], MOST, tl.float32)), LEAST)
            if SCALE == "power":
                below = find_power(scale)
                scale = tl.where(below < scale, below * 2.0, below)
    return tl.where(broken, float("nan"), scale), zero


@triton.jit
def to_stored(step, like, STORED: tl.constexpr):
    """Return scales or zeros as they are stored, in the dtype that the pointer `like` points to."""
    if STORED == "e4m3":
        step = to_float8(step, STORED)
    elif STORED == "e8m0":  # the nearest power of two, of two the upper one; no number has the code 255
        bits = step.to(tl.int32, bitcast=True)
        power = (bits >> 23) & 255
        rest = bits & 0x7FFFFF
        up = (power < 255) & ((rest > 0x400000) | ((rest == 0x400000) & (power > 0)))
        step = power + tl.where(up, 1, 0)
    return step.to(like.dtype.element_ty)


@triton.jit
def round_tile(numbers, line, here, codes, scales, zeros, SIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Round a tile of rows (N, D) float32, and store them as the rows `line` (N,) of the memory, if they are `here`.

    Returns their codes (N, D) int32, and their scales and zeros as they are read, (N, G) float32.
    """
    N: tl.constexpr = numbers.shape[0]
    GROUP: tl.constexpr = find_group(SIDE, D)
    COUNT: tl.constexpr = take(SIDE, "groups")
    STEPS: tl.constexpr = take(SIDE, "steps")
    STORED: tl.constexpr = take(SIDE, "stored")
    G: tl.constexpr = D // GROUP
    grouped = tl.reshape(numbers, [N, G, GROUP])
    scale, zero = find_steps(grouped, tl.reshape(tl.arange(0, D) < DIM, [1, G, GROUP]), SIDE)
    exact_scale, exact_zero = scale, zero
    group = tl.arange(0, G)
    place = line[:, None] * COUNT + group[None]
    known = here[:, None] & (group < COUNT)[None]
    if take(SIDE, "scale") == "point":
        bits = (scale.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
        scale = bits.to(tl.float32, bitcast=True)
        tl.store(scales + place, scale, mask=known)
        scale, zero = read_point(scale)
    elif STEPS > 0:
        if STORED == "e4m3":
            scale = tl.where(scale > 448.0, 448.0, scale)
        stored = to_stored(scale, scales, STORED)
        tl.store(scales + place, stored, mask=known)
        scale = read_stored(stored, STORED)
        if STEPS > 1:
            stored = to_stored(zero, zeros, STORED)
            tl.store(zeros + place, stored, mask=known)
            zero = read_stored(stored, STORED)
    if STEPS > 0:
        divisor, shift = exact_scale, exact_zero
        if take(SIDE, "by_stored"):
            divisor, shift = scale, zero
        divisor = tl.where(divisor == 0.0, 1.0, divisor)[:, :, None]
        if take(SIDE, "scale") == "point":
            grouped = divide(grouped, divisor) + shift[:, :, None]
        else:
            if STEPS > 1:
                grouped -= shift[:, :, None]
            grouped = divide(grouped, divisor)
    code = to_code(tl.reshape(grouped, [N, D]), SIDE)
    store_codes(code, line, here, codes, take(SIDE, "bits"), DIM, D)
    return code, scale, zero


@triton.jit
def store_codes(code, line, here, codes, BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Store codes (N, D) as the rows `line` of the memory: one in a byte, 2 to 8 in a byte, or 8 in 3 bytes."""
    PER: tl.constexpr = 8 if BITS == 3 else 8 // BITS  # codes of a word
    BYTES: tl.constexpr = PER * BITS // 8  # of a word
    WORDS: tl.constexpr = DIM // PER
    W: tl.constexpr = D // PER
    word = code
    if PER > 1:
        parts = tl.reshape(code, [code.shape[0], W, PER])
        word = tl.sum(parts << (BITS * tl.arange(0, PER))[None, None], 2)
    index = tl.arange(0, W)
    place = codes + (line[:, None] * WORDS + index[None]) * BYTES
    mask = here[:, None] & (index < WORDS)[None]
    for byte in tl.static_range(BYTES):
        tl.store(place + byte, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_codes(line, here, codes, BITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return the codes (N, D) int32 that `store_codes` stored as the rows `line` of the memory."""
    PER: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    BYTES: tl.constexpr = PER * BITS // 8
    WORDS: tl.constexpr = DIM // PER
    W: tl.constexpr = D // PER
    index = tl.arange(0, W)
    place = codes + (line[:, None] * WORDS + index[None]) * BYTES
    mask = here[:, None] & (index < WORDS)[None]
    word = tl.load(place, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, BYTES):
        word |= tl.load(place + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    code = word
    if PER > 1:
        code = tl.reshape(word[:, :, None] >> (BITS * tl.arange(0, PER))[None, None], [word.shape[0], D])
    return code & (2**BITS - 1)


@triton.jit
def read_tile(code, scale, zero, SIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return what codes (N, D) stand for, with the scales and zeros (N, G) of their groups, float32."""
    N: tl.constexpr = code.shape[0]
    GROUP: tl.constexpr = find_group(SIDE, D)
    number = find_base(code, SIDE)
    if take(SIDE, "normed"):
        real = tl.where((tl.arange(0, D) < DIM)[None], number, 0.0)
        number = divide(number, tl.sqrt_rn(tl.sum(real * real, 1))[:, None])
    if take(SIDE, "steps") > 0:
        grouped = tl.reshape(number, [N, D // GROUP, GROUP])
        if take(SIDE, "scale") == "shift":
            grouped -= zero[:, :, None]
        grouped *= scale[:, :, None]
        if take(SIDE, "scale") == "point" or (take(SIDE, "steps") > 1 and take(SIDE, "scale") != "shift"):
            grouped += zero[:, :, None]
        number = tl.reshape(grouped, [N, D])
    return number


@triton.jit
def load_factor(factor, row, here, SIDE: tl.constexpr):
    """Return the factors of rows (N,), (N, 1), or the factor of all, (1, 1)."""
    out = tl.full([1, 1], 1.0, tl.float32)
    if take(SIDE, "factor") == "each":
        out = tl.load(factor + row, mask=here, other=1.0)[:, None]
    elif take(SIDE, "factor") == "all":
        out = out * factor
    return out


@triton.jit
def _encode(
    rows,
    matrix,
    codes,
    scales,
    zeros,
    factor,
    count,
    SIDE: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Round N of `count` rows."""
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    column = tl.arange(0, D)
    here = row < count
    inside = here[:, None] & (column < DIM)[None]
    numbers = tl.load(rows + row[:, None] * DIM + column[None], mask=inside, other=0.0)
    if take(SIDE, "turn") != "none":
        numbers = turn_tile(numbers, matrix, take(SIDE, "turn"), False, DIM, D)
    numbers = numbers.to(tl.float32)
    if take(SIDE, "factor") != "none":
        numbers = divide(numbers, load_factor(factor, row, here, SIDE))
    round_tile(numbers, row, here, codes, scales, zeros, SIDE, DIM, D)


@triton.jit
def _decode(
    out,
    matrix,
    codes,
    scales,
    zeros,
    factor,
    count,
    SIDE: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Write what the codes of N of `count` rows stand for."""
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    column = tl.arange(0, D)
    here = row < count
    GROUP: tl.constexpr = find_group(SIDE, D)
    COUNT: tl.constexpr = take(SIDE, "groups")
    group = tl.arange(0, D // GROUP)
    place = row[:, None] * COUNT + group[None]
    known = here[:, None] & (group < COUNT)[None]
    scale = tl.full([N, D // GROUP], 1.0, tl.float32)
    zero = tl.zeros([N, D // GROUP], tl.float32)
    if take(SIDE, "scale") == "point":
        scale, zero = read_point(tl.load(scales + place, mask=known, other=0.0))
    elif take(SIDE, "steps") > 0:
        scale = read_stored(tl.load(scales + place, mask=known, other=0), take(SIDE, "stored"))
        if take(SIDE, "steps") > 1:
            zero = read_stored(tl.load(zeros + place, mask=known, other=0), take(SIDE, "stored"))
    numbers = read_tile(load_codes(row, here, codes, take(SIDE, "bits"), DIM, D), scale, zero, SIDE, DIM, D)
    numbers *= load_factor(factor, row, here, SIDE)
    inside = here[:, None] & (column < DIM)[None]
    if take(SIDE, "turn") != "none":
        numbers = turn_tile(tl.where(inside, numbers, 0.0), matrix, take(SIDE, "turn"), True, DIM, D)
    tl.store(out + row[:, None] * DIM + column[None], numbers, mask=inside)


@triton.jit
def _round_row(
    row,
    place,
    matrix,
    codes,
    scales,
    zeros,
    factor,
    head,
    line,
    SIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BACK: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Round the newest row of a head, (D,) float32, and store its codes as row `line` of the memory.

    What the token attends to is stored at `place`, turned back if BACK.
    """
    TURN: tl.constexpr = take(SIDE, "turn")
    column = tl.arange(0, D)
    there = column < DIM
    turned = row
    if BACK:
        tl.debug_barrier()  # the row lies at `place` itself, and several warps may read the same numbers
    if TURN != "none":
        turned = turn_row(turned, matrix, TURN, False, DIM, D)
    one = tl.arange(0, 1)
    here = one == 0
    numbers = tl.reshape(turned, [1, D])
    size = load_factor(factor, head + one, here, SIDE)
    if take(SIDE, "factor") != "none":
        numbers = divide(numbers, size)
    code, scale, zero = round_tile(numbers, line + one, here, codes, scales, zeros, SIDE, DIM, D)
    if ROUNDS:
        turned = tl.reshape(read_tile(code, scale, zero, SIDE, DIM, D) * size, [D])
    if TURN != "none" and BACK:
        turned = turn_row(tl.where(there, turned, 0.0), matrix, TURN, True, DIM, D)
    tl.store(place + column, turned, mask=there)


@triton.jit(do_not_specialize=["room"])
def _round_newest(
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    out,
    newest,
    step,
    key_matrix,
    key_codes,
    key_scales,
    key_zeros,
    key_factor,
    value_matrix,
    value_codes,
    value_scales,
    value_zeros,
    value_factor,
    room,
    batch,
    heads,
    query_heads,
    turning,
    epsilon,
    s_q,
    s_k,
    s_v,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROTATES: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    BACK: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Round one head's newest key or value, or turn one query. With ROTATES keys are rotated before, as queries are.

    `room` counts rows of a head's memory, and `s_q`, `s_k` and `s_v` are the numbers from one sample to the next.
    """
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    there = column < DIM
    number = tl.load(step)
    if index < 2 * batch * heads:
        head = index % (batch * heads)
        b, h = head // heads, head % heads
        line = head * room + number
        place = newest + index * DIM
        if index < batch * heads:
            source = keys + b * s_k + h * DIM
            if ROTATES:
                row = rotate_head(source, key_norm, cos, sin, number, column, turning, DIM, epsilon, out, NORM)
                row = row.to(newest.dtype.element_ty).to(tl.float32)
            else:
                row = tl.load(source + column, mask=there, other=0.0).to(tl.float32)
            _round_row(
                row, place, key_matrix, key_codes, key_scales, key_zeros, key_factor,
                head, line, KEY, ROUNDS, BACK, DIM, D,
            )  # fmt: skip
        else:
            row = tl.load(values + b * s_v + h * DIM + column, mask=there, other=0.0).to(tl.float32)
            _round_row(
                row, place, value_matrix, value_codes, value_scales, value_zeros, value_factor,
                head, line, VALUE, ROUNDS, BACK, DIM, D,
            )  # fmt: skip
    else:
        asking = index - 2 * batch * heads
        source = queries + asking // query_heads * s_q + asking % query_heads * DIM
        row = rotate_head(source, query_norm, cos, sin, number, column, turning, DIM, epsilon, out, NORM)
        row = row.to(out.dtype.element_ty).to(tl.float32)
        if take(KEY, "turn") != "none":
            row = turn_row(row, key_matrix, take(KEY, "turn"), False, DIM, D)
        tl.store(out + asking * DIM + column, row, mask=there)


def choose_rows(turn: str, dim: int, reads: bool) -> tuple[int, int]:
    """Return the rows of a tile of `encode`, or of `decode` if it `reads`, and the warps of its program.

    They were the fastest ones on an H200 for 262,144 rows of 128 channels.
    """
    if turn == "none":
        return max(1, TILE // (2 if reads else 1) // triton.next_power_of_2(dim)), 4
    return TURNED if reads or turn == "hadamard" else TURNED // 4, 4


def encode_triton(rows: Tensor, form: Form, factor: float | Tensor, turn: Tensor | None) -> Parts:
    count, dim = rows.shape
    if turn is not None and dim > WIDEST:
        rows, turn = turn_wide(rows, turn), None
    groups = form.count_groups(dim)
    parts = (
        torch.empty(count, dim * form.bits // 8, dtype=torch.uint8, device=rows.device),
        *(torch.empty(count, groups, dtype=form.stored, device=rows.device) for _ in range(form.steps)),
    )
    if count:
        grid, given, constants = plan_tiles(rows.contiguous(), parts, form, factor, turn, reads=False)
        _encode[grid](*given, **constants)
    return parts


def decode_triton(parts: Parts, form: Form, dtype: torch.dtype, factor: float | Tensor, turn: Tensor | None) -> Tensor:
    count, dim = len(parts[0]), parts[0].shape[1] * 8 // form.bits
    wide = turn is not None and dim > WIDEST
    rows = torch.empty(count, dim, dtype=torch.float32 if wide else dtype, device=parts[0].device)
    parts = tuple(part.contiguous() for part in parts)
    if count:
        grid, given, constants = plan_tiles(rows, parts, form, factor, None if wide else turn, reads=True)
        _decode[grid](*given, **constants)
    return turn_wide(rows, turn.T).to(dtype) if wide and turn is not None else rows


def plan_tiles(
    rows: Tensor, parts: Parts, form: Form, factor: float | Tensor, turn: Tensor | None, reads: bool
) -> tuple[tuple[int], list[float | Tensor], dict[str, object]]:
    """Return the grid, the arguments and the constants of `_encode` or `_decode` for rows (R, d)."""
    count, dim = rows.shape
    tile, warps = choose_rows(name_turn(turn), dim, reads)
    padded = triton.next_power_of_2(dim)
    given = [
        rows,
        rows if turn is None else turn.contiguous(),
        *list_memory(parts),
        factor.expand(count, 1).contiguous() if isinstance(factor, Tensor) else factor,
        count,
    ]
    constants: dict[str, object] = {
        "SIDE": name_side(form, dim, turn, factor),
        "DIM": dim,
        "D": padded if turn is None else max(16, padded),
        "N": tile,
        "num_warps": warps,
        "enable_fp_fusion": False,  # products are rounded before they are added, as in PyTorch
    }
    return (triton.cdiv(count, tile),), given, constants


def append_newest_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: CodedRows,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    batch, dim = len(queries), rows.newest.shape[-1]
    out = torch.empty(batch, queries.shape[1] // dim, 1, dim, dtype=queries.dtype, device=queries.device)
    launch_rounding(rows, step, rows.rounds_newest, (queries, keys, values), out, (cos, sin), norms)
    return out


def round_in_place_triton(rows: CodedRows, step: Tensor) -> None:
    launch_rounding(rows, step, rounds=True, back=True)


def launch_rounding(
    rows: CodedRows,
    step: Tensor,
    rounds: bool,
    given: tuple[Tensor, ...] | None = None,
    out: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    back: bool = False,
) -> None:
    """Round the newest row of each head, and write turned queries.

    Args:
        rows: The rows.
        step: Number of tokens read since the memory was made.
        rounds: Whether `newest` becomes what codes stand for.
        given: Queries, keys and values, (B, heads·d) each; None takes the newest rows, and no queries.
        out: Memory for queries, (B, Hq, 1, d); None for no queries.
        angles: cos and sin, by which queries and keys are rotated; None for rotated ones.
        norms: Weights and ε of the norms of queries and keys before rotation.
        back: Whether `newest` is turned back.
    """
    batch, heads, dim = rows.newest.shape[1:]
    query_heads = 0 if out is None else out.shape[1]
    queries, keys, values = given or (rows.newest[0].flatten(1), *rows.newest.flatten(2))
    cos, sin = angles or (queries, queries)
    query_norm, key_norm, epsilon = norms or (queries, queries, 0.0)
    _round_newest[(batch * (2 * heads + query_heads),)](
        queries,
        keys,
        values,
        cos,
        sin,
        query_norm,
        key_norm,
        rows.newest if out is None else out,
        rows.newest,
        step,
        *list_side(rows.keys, rows.newest),
        *list_side(rows.values, rows.newest),
        rows.keys.more[0].shape[2],
        batch,
        heads,
        query_heads,
        cos.shape[1],
        epsilon,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        KEY=name_side(rows.keys.form, dim, rows.keys.turn, rows.keys.factor),
        VALUE=name_side(rows.values.form, dim, rows.values.turn, rows.values.factor),
        ROTATES=angles is not None,
        NORM=norms is not None,
        ROUNDS=rounds,
        BACK=back,
        DIM=dim,
        D=triton.next_power_of_2(dim),
        num_warps=count_warps(name_turn(rows.keys.turn), name_turn(rows.values.turn)),
        enable_fp_fusion=False,
    )


def list_side(side: CodedSide, instead: Tensor) -> list[float | Tensor]:
    """Return a side's matrix, or a tensor `instead` of it, its codes, scales and zeros, and its factor."""
    return [instead if side.turn is None else side.turn.contiguous(), *list_memory(side.more), side.factor]
