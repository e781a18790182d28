"""Codes in PyTorch: the definition."""

import torch
from torch import Tensor

from kvbench.kernels.coded_rows.form import LARGEST, SIZES, CodedRows, CodedSide, Form, Parts
from kvbench.kernels.rope_append.reference import rotate_projected
from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits, get_sinks

FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encode_reference(rows: Tensor, form: Form, factor: float | Tensor, turn: Tensor | None) -> Parts:
    """Round rows (R, d). It turns as `turn_wide`, then computes in float32, or in float64 (`Form.wide`)."""
    count, dim = rows.shape
    wide = torch.promote_types(rows.dtype, torch.float32) if form.wide else torch.float32
    numbers = (rows if turn is None else turn_wide(rows, turn)).to(wide)
    if isinstance(factor, Tensor) or factor != 1:
        numbers = divide(numbers, factor)
    group = form.group or dim
    numbers = numbers.view(count, dim // group, group)
    exact = find_steps(numbers, form)
    stored = store_steps(exact, form)
    steps = stored if form.rounds_by_stored and form.scale != "point" else exact
    if form.scale == "point":
        numbers = numbers / steps[0][..., None] + steps[1][..., None]
    elif steps:
        scale = steps[0].to(wide)
        numbers = numbers - steps[1].to(wide)[..., None] if len(steps) > 1 else numbers
        numbers = numbers / scale.masked_fill(scale == 0, 1.0)[..., None]
    return pack_codes(find_codes(numbers.reshape(count, dim), form), form.bits), *stored


def divide(numbers: Tensor, divisor: float | Tensor) -> Tensor:
    """Return quotients that are rounded once. On a GPU, PyTorch multiplies with the inverse of a plain number."""
    if isinstance(divisor, Tensor):
        return numbers / divisor
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def find_power(numbers: Tensor, above: bool = False) -> Tensor:
    """Return the largest powers of two up to numbers, or the smallest ones from them on; 0, infinity and NaN stay."""
    half, exponent = numbers.frexp()
    power = torch.ones_like(numbers).ldexp(exponent - 1 + (above & (half > 0.5)))
    return torch.where((numbers == 0) | ~numbers.isfinite(), numbers, power)


def find_steps(numbers: Tensor, form: Form) -> Parts:
    """Return the scales, or the scales and zeros, of groups (R, groups, channels), not rounded.

    The zero of a point is its code, a whole number.
    """
    if form.scale == "none":
        return ()
    if form.scale == "norm":
        return (numbers.norm(dim=-1),)
    if form.scale in ("range", "middle"):
        low, high = (extreme * form.clip for extreme in numbers.aminmax(dim=-1))
        spread = divide((high - low).clamp(min=form.least), 255 if form.code == "int8" else LARGEST[form.code])
        zero = low if form.scale == "range" else (low + high) / 2
        return spread, zero
    if form.scale == "point":
        low, high = (extreme * form.clip for extreme in numbers.aminmax(dim=-1))
        scale = divide((high - low).clamp(min=form.least), 15)
        return scale, (0.5 - low / scale).floor().clamp(0, 15)
    scale = divide(numbers.abs().amax(-1), LARGEST[form.code]).clamp(min=form.least)
    if form.scale == "power":
        scale = find_power(scale, above=True)
    elif form.scale == "power_below":
        scale = find_power(numbers.abs().amax(-1).clamp(min=form.least)) / 4
    if form.stored in FLOATS.values():
        scale = scale.clamp(max=torch.finfo(form.stored).max)
    return (scale,)


def store_steps(steps: Parts, form: Form) -> Parts:
    """Return what groups store of what `find_steps` returns."""
    if form.scale == "point":
        scale, point = steps
        return (((scale.float().view(torch.int32) & -16) | point.to(torch.int32)).view(torch.float32),)
    return tuple(step.to(form.stored) for step in steps)


def read_steps(steps: Parts, form: Form) -> tuple[Tensor, Tensor | None]:
    """Return the scales that groups store, and the zeros if there are some, in at least float32."""
    if form.scale == "point":
        bits = steps[0].view(torch.int32)
        scale = (bits & -16).view(torch.float32)
        return scale, -(bits & 15) * scale
    wide = [step if step.dtype == torch.float64 else step.float() for step in steps]
    return wide[0], wide[1] if len(wide) > 1 else None


def find_codes(numbers: Tensor, form: Form) -> Tensor:
    """Return the codes of numbers, uint8."""
    if form.code in FLOATS:
        largest = LARGEST[form.code]
        return numbers.clamp(-largest, largest).to(FLOATS[form.code]).view(torch.uint8)
    if form.code == "levels":
        levels = torch.tensor(form.levels, dtype=numbers.dtype, device=numbers.device)
        return torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2, right=True).to(torch.uint8)
    if form.code == "e2m1":
        sizes = torch.tensor(SIZES, dtype=numbers.dtype, device=numbers.device)
        borders, size = (sizes[1:] + sizes[:-1]) / 2, numbers.abs()
        code = torch.bucketize(size, borders, right=True)
        if form.rounding == "even":  # a number on the border below an odd code
            below = torch.bucketize(size, borders)
            code = torch.where(code % 2 == 0, code, below)
        return (code | (numbers < 0).long() << 3).to(torch.uint8)
    if form.rounding == "up":
        whole = (numbers.abs() + 0.5).floor().copysign(numbers)
    else:
        whole = numbers.trunc() if form.rounding == "cut" else numbers.round()
    if form.code == "int8":
        return whole.clamp(-128, 127).to(torch.int8).view(torch.uint8)
    return whole.clamp(0, LARGEST[form.code]).to(torch.uint8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (R, d) in d·bits/8 bytes, the first in the lowest bits: as they are, 2 to 8 in a byte, or 8 in 3."""
    if bits == 8:
        return codes
    if bits != 3:
        shifts = torch.arange(0, 8, bits, device=codes.device)
        together = codes.view(len(codes), codes.shape[1] * bits // 8, 8 // bits)
        return (together.long() << shifts).sum(-1).to(torch.uint8)
    shifts = torch.arange(0, 3 * 8, 3, device=codes.device)
    words = (codes.view(len(codes), codes.shape[1] // 8, 8).long() << shifts).sum(-1)
    return torch.stack([words & 255, (words >> 8) & 255, words >> 16], -1).flatten(1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes (…, d) that `pack_codes` has packed."""
    if bits == 8:
        return packed
    if bits != 3:
        shifts = torch.arange(0, 8, bits, device=packed.device)
        return ((packed[..., None].long() >> shifts) & (2**bits - 1)).flatten(-2).to(torch.uint8)
    three = packed.view(*packed.shape[:-1], packed.shape[-1] // 3, 3).long()
    words = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
    shifts = torch.arange(0, 3 * 8, 3, device=packed.device)
    return ((words[..., None] >> shifts) & 7).flatten(-2)


def decode_reference(
    parts: Parts, form: Form, dtype: torch.dtype, factor: float | Tensor, turn: Tensor | None
) -> Tensor:
    """Return what codes stand for, (R, d) in `dtype`.

    It computes in float32, or in float64 (`Form.wide`), then turns as `turn_wide`.
    """
    wide = torch.promote_types(dtype, torch.float32) if form.wide else torch.float32
    codes = unpack_codes(parts[0], form.bits)
    if form.code in FLOATS:
        numbers = codes.view(FLOATS[form.code]).to(wide)
    elif form.code == "int8":
        numbers = codes.view(torch.int8).to(wide)
    elif form.code.startswith("uint"):
        numbers = codes.to(wide)
    elif form.code == "e2m1":
        signed = torch.tensor([*SIZES, *(-size for size in SIZES)], dtype=wide, device=codes.device)
        numbers = signed[codes.long()]
    else:
        numbers = torch.tensor(form.levels, dtype=wide, device=codes.device)[codes.long()]
        if form.normed:
            numbers = numbers / numbers.norm(dim=-1, keepdim=True)
    shape = numbers.shape
    if form.steps:
        groups = parts[1].shape[-1]
        scale, zero = read_steps(parts[1:], form)
        numbers = numbers.reshape(*shape[:-1], groups, shape[-1] // groups)
        if form.scale == "shift" and zero is not None:
            numbers, zero = numbers - zero[..., None], None
        numbers = numbers * scale[..., None]
        numbers = numbers if zero is None else numbers + zero[..., None]
    numbers = numbers.reshape(shape) * factor
    return numbers.to(dtype) if turn is None else turn_wide(numbers, turn.T, dtype).to(dtype)


def turn_wide(rows: Tensor, turn: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows (…, d) times a matrix, in float64 if they or `dtype` are, else in float32.

    In float64 the order of sums, which differs between machines, does not change codes.
    """
    wide = torch.float64 if torch.float64 in (rows.dtype, dtype) else torch.float32
    return rows.to(wide) @ turn.to(wide)


def store_newest(rows: CodedRows, step: Tensor) -> tuple[Parts, Parts]:
    """Store the codes of the newest keys and values of each head. Returns them, flat."""
    batch, heads, dim = rows.newest.shape[1:]
    keys, values = (
        encode_reference(newest.reshape(batch * heads, dim), side.form, spread_factor(side), side.turn)
        for side, newest in zip((rows.keys, rows.values), rows.newest, strict=True)
    )
    for side, parts in ((rows.keys, keys), (rows.values, values)):
        for memory, part in zip(side.more, parts, strict=True):
            memory[:, :, int(step)] = part.view(batch, heads, *part.shape[1:])
    return keys, values


def spread_factor(side: CodedSide) -> float | Tensor:
    """Return a side's factor, or those of the newest rows of all heads, (B·H, 1)."""
    return side.factor.view(-1, 1) if isinstance(side.factor, Tensor) else side.factor


def round_in_place_reference(rows: CodedRows, step: Tensor) -> None:
    both = store_newest(rows, step)
    for side, newest, parts in zip((rows.keys, rows.values), rows.newest, both, strict=True):
        newest.copy_(decode_reference(parts, side.form, newest.dtype, spread_factor(side), side.turn).view_as(newest))


def append_newest_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: CodedRows,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    _, batch, heads, dim = rows.newest.shape
    rotated = rotate_projected(queries, keys, values, cos, sin, batch, dim, step, norms, None)
    for newest, given in zip(rows.newest, rotated[1:], strict=True):
        newest.copy_(given.squeeze(2))
    both, asking = store_newest(rows, step), rotated[0]
    for side, newest, parts in zip((rows.keys, rows.values), rows.newest, both, strict=True):
        if rows.rounds_newest:
            newest.copy_(decode_reference(parts, side.form, newest.dtype, spread_factor(side), None).view_as(newest))
        elif side.turn is not None:
            newest.copy_(turn_wide(newest, side.turn))
    return asking if rows.keys.turn is None else turn_wide(asking, rows.keys.turn).to(asking.dtype)


def attend_reference(
    queries: Tensor, rows: CodedRows, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    batch, heads, dim = rows.newest.shape[1:]
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    asking = queries.view(batch, heads, -1, dim).to(wide)
    outputs = torch.empty_like(asking)
    sinks = get_sinks(extras)
    sinks = None if sinks is None else sinks.view(heads, -1)
    raw, rounded = rows.newest[..., None, :], int(step)
    if rows.window is not None:
        rounded = rows.window.count_rounded(int(step))
        slots = rows.window.find_slots(rounded, rows.window.waiting + int(step) + 1)
        raw = rows.window.ring.index_select(3, slots)
    for b in range(batch):
        for h in range(heads):
            start, length = int(rows.starts[b, h]), int(rows.lengths[b, h])
            keys, values = (
                torch.cat([read_side(side, b, h, start, length, rounded, wide), raw[number, b, h].to(wide)])
                for number, side in enumerate((rows.keys, rows.values))
            )
            logits = cap_logits(asking[b, h] @ keys.to(wide).T * scaling, extras)
            if rows.mass is not None:
                logits[:, :length] += rows.mass[start : start + length].to(wide).log()
            lse = logits.logsumexp(-1)
            sums = (logits - lse[:, None]).exp() @ values.to(wide)
            if sinks is not None:
                sums *= torch.sigmoid(lse - sinks[h].to(wide))[:, None]
            outputs[b, h] = sums
    outputs = outputs if rows.values.turn is None else outputs @ rows.values.turn.T.to(wide)
    return outputs.view(batch, -1, 1, dim).to(queries.dtype)


def read_side(side: CodedSide, b: int, h: int, start: int, length: int, more: int, dtype: torch.dtype) -> Tensor:
    """Return the turned keys or values of one head, (n, d), of rows held and of `more` further ones."""
    held = tuple(part[start : start + length] for part in side.held)
    further = tuple(part[b, h, :more] for part in side.more)
    factor = side.factor[b, h] if isinstance(side.factor, Tensor) else side.factor
    return torch.cat([decode_reference(parts, side.form, dtype, factor, None) for parts in (held, further)])
