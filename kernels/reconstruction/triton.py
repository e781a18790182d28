"""Both operations in Triton. A program owns some listed rows: of one head of their keys or values, or all their codes.

Every program finds out by itself which rows are compressed, from the number of tokens on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.reconstruction.rows import ReferencedRows

ROWS = 16  # listed rows of a program
SIZES = [  # what varies from prompt to prompt
    *("listed_count", "seen", "compressed", "raw_from"),
    *("base_count", "base_room", "reference_room", "raw_room"),
]


@triton.jit
def _rounded(x, like):
    """Round float32 numbers to the dtype that the pointer `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


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
def _gather(
    column, there, b, row, old, entry, plain, stored, raw_from, listed_count, decoded, bases, more_bases, references,
    more_references, raw, compressed, base_count, base_room, reference_room, raw_room, width,
    NEAREST: tl.constexpr, DECODED: tl.constexpr,
):  # fmt: skip
    """Return some columns (D,) of rows (ROWS,) before norm and rotation, in float32 but rounded to the rows' dtype."""
    is_raw = row >= raw_from
    at = (b * base_count + row)[:, None] * width + column[None]
    kv = tl.load(bases + at, mask=(plain & (is_raw == 0))[:, None] & there, other=0.0).to(tl.float32)
    at = (b * raw_room + row - raw_from)[:, None] * width + column[None]
    kv += tl.load(raw + at, mask=(plain & is_raw)[:, None] & there, other=0.0).to(tl.float32)
    if NEAREST:
        total = tl.zeros_like(kv)
        is_new = old >= compressed
        for number in tl.static_range(NEAREST):
            at = (b * compressed + old) * NEAREST + number
            base = tl.load(references + at, mask=stored & (is_new == 0), other=0).to(tl.int32)
            at = (b * reference_room + old - compressed) * NEAREST + number
            base += tl.load(more_references + at, mask=stored & is_new, other=0).to(tl.int32)
            at = (b * base_count + base)[:, None] * width + column[None]
            total += tl.load(bases + at, mask=(stored & (base < base_count))[:, None] & there, other=0.0).to(tl.float32)
            at = (b * base_room + base - base_count)[:, None] * width + column[None]
            known = (stored & (base >= base_count))[:, None] & there
            total += tl.load(more_bases + at, mask=known, other=0.0).to(tl.float32)
        kv += _rounded(total / NEAREST, raw)
    if DECODED:
        at = (b * listed_count + entry)[:, None] * width + column[None]
        kv = _rounded(kv + tl.load(decoded + at, mask=stored[:, None] & there, other=0.0).to(tl.float32), raw)
    return kv


@triton.jit
def _normed(x, column, there, inverse, scale, like):
    """Multiply some columns by the inverse of their head's root mean square and by the norm's weight."""
    weight = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)[None]
    return _rounded(_rounded(x * inverse, scale) * weight, like)


@triton.jit
def _turned(x, partner, column, there, row, exists, cos, sin, turning, like):
    """Return x·cos + partner·sin of some columns."""
    at, here = row[:, None].to(tl.int64) * turning + column[None], exists[:, None] & there[None]
    c = _rounded(tl.load(cos + at, mask=here, other=1.0).to(tl.float32), like)
    s = _rounded(tl.load(sin + at, mask=here, other=0.0).to(tl.float32), like)
    return _rounded(x * c, like) + _rounded(partner * s, like)


@triton.jit(do_not_specialize=SIZES)
def _rebuild(
    listed, decoded, bases, more_bases, references, more_references, raw, cos, sin, scale, step, keys, values, slots,
    listed_count, seen, sinks, compressed, block, raw_from, base_count, base_room, reference_room, raw_room,
    heads, dim, half, epsilon,
    NEAREST: tl.constexpr, DECODED: tl.constexpr, NORM: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Make one head of the keys or of the values of some listed rows.

    A head has the channels that turn, in two halves, and perhaps others. Each part is read and written as a whole.
    """
    part, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, turning = entry < listed_count, 2 * half
    first, rest = tl.arange(0, H), turning + tl.arange(0, R)
    second, there, others = first + half, first < half, rest < dim
    row = tl.load(listed + b * listed_count + entry, mask=inside, other=0).to(tl.int32)
    stop, now = _find_stop(step, seen, sinks, compressed, block)
    exists, old = inside & (row < now), row - sinks
    stored = exists & (old >= 0) & (row < stop)
    plain = exists & (stored == 0)
    begin, width = part * dim, 2 * heads * dim
    x = _gather(
        begin + first, there[None], b, row, old, entry, plain, stored, raw_from, listed_count, decoded, bases,
        more_bases, references, more_references, raw, compressed, base_count, base_room, reference_room, raw_room,
        width, NEAREST, DECODED,
    )  # fmt: skip
    y = _gather(
        begin + second, there[None], b, row, old, entry, plain, stored, raw_from, listed_count, decoded, bases,
        more_bases, references, more_references, raw, compressed, base_count, base_room, reference_room, raw_room,
        width, NEAREST, DECODED,
    )  # fmt: skip
    z = tl.zeros((ROWS, R), tl.float32)
    if REST:
        z = _gather(
            begin + rest, others[None], b, row, old, entry, plain, stored, raw_from, listed_count, decoded, bases,
            more_bases, references, more_references, raw, compressed, base_count, base_room, reference_room, raw_room,
            width, NEAREST, DECODED,
        )  # fmt: skip
    out = values
    if part < heads:
        out = keys
        if NORM:
            square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
            inverse = (1.0 / tl.sqrt(square / dim + epsilon))[:, None]
            x = _normed(x, first, there, inverse, scale, keys)
            y = _normed(y, second, there, inverse, scale, keys)
            z = _normed(z, rest, others, inverse, scale, keys)
        turned = _turned(x, -y, first, there, row, exists, cos, sin, turning, keys)
        y = _turned(y, x, second, there, row, exists, cos, sin, turning, keys)
        x = turned
        if part == 0:
            slot = tl.where(exists, entry, listed_count + 1).to(tl.int64)
            tl.store(slots + b * listed_count + entry, slot, mask=inside)
    into = out + ((b * heads + part % heads) * (listed_count + 1) + entry)[:, None] * dim
    tl.store(into + first[None], x, mask=inside[:, None] & there[None])
    tl.store(into + second[None], y, mask=inside[:, None] & there[None])
    if REST:
        tl.store(into + rest[None], z, mask=inside[:, None] & others[None])


def take_codes_triton(listed: Tensor, codes: Tensor, more: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    batch, count = listed.shape
    out = torch.empty(batch, count, codes.shape[2], dtype=codes.dtype, device=codes.device)
    _take[triton.cdiv(count, ROWS), batch](
        listed.contiguous(), codes.contiguous(), more, out, step, count, rows.seen, rows.sinks, rows.compressed,
        rows.block, more.shape[1], codes.shape[2], ROWS=ROWS, W=triton.next_power_of_2(codes.shape[2]),
    )  # fmt: skip
    return out


def rebuild_rows_triton(
    listed: Tensor, decoded: Tensor | None, rows: ReferencedRows, cos: Tensor, sin: Tensor, step: Tensor, heads: int,
    norm: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, count), raw = listed.shape, rows.raw
    dim, turning = raw.shape[2] // (2 * heads), cos.shape[1]
    keys, values = (torch.empty(batch, heads, count + 1, dim, dtype=raw.dtype, device=raw.device) for _ in range(2))
    slots = torch.empty(batch, 1, count, dtype=torch.int64, device=raw.device)
    references, more = rows.references, rows.more_references
    weight, epsilon = norm or (raw, 0.0)
    _rebuild[triton.cdiv(count, ROWS), 2 * heads, batch](
        listed.contiguous(), raw if decoded is None else decoded.contiguous(), rows.bases.contiguous(),
        rows.more_bases, listed if references is None else references.contiguous(), listed if more is None else more,
        raw, cos.contiguous(), sin.contiguous(), weight, step, keys, values, slots,
        count, rows.seen, rows.sinks, rows.compressed, rows.block, rows.raw_from, rows.bases.shape[1],
        rows.more_bases.shape[1], 0 if more is None else more.shape[1], raw.shape[1], heads, dim, turning // 2, epsilon,
        NEAREST=0 if references is None else references.shape[2], DECODED=decoded is not None, NORM=norm is not None,
        REST=turning < dim, ROWS=ROWS, H=triton.next_power_of_2(turning // 2),
        R=triton.next_power_of_2(max(1, dim - turning)), num_warps=4,
    )  # fmt: skip
    return keys, values, slots
