"""Both operations in Triton. A program owns some listed rows: of one head of their keys or values, or all their codes.

Every program finds out by itself which rows are compressed, from the number of tokens on the device. A program that
makes rows does all of it: it multiplies codes with f_d's last matrix, adds the mean of the references, norms, rotates
and writes. Derivation: README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows

ROWS = 16  # listed rows of a program that gathers codes
TILE = 128  # listed rows of a program that makes rows of 16 bits
WARPS = 8  # of this program
COLUMNS = 32  # numbers of a code that it multiplies at once, and of which STAGES - 1 parts are loaded ahead
STAGES = 4
REGISTERS = 128  # of a thread, where no more are needed: a multiprocessor holds two programs
SIZES = [  # what varies from prompt to prompt
    *("listed_count", "seen", "compressed", "raw_from"),
    *("base_count", "base_room", "reference_room", "raw_room", "code_room"),
]


@triton.jit
def _rounded(x, like):
    """Round float32 numbers to the dtype that the pointer `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _below(column, stop: tl.constexpr, size: tl.constexpr):
    """Return which of the columns 0, …, size − 1 are below `stop`. If all are, no register holds it."""
    return tl.full((size,), True, tl.int1) if stop == size else column < stop


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
def _multiply(
    at, weight, bias, stored, row, there, width,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Return the products of the `width` numbers at the pointers `at` (ROWS,) with rows (N,) of a weight, (ROWS, N)."""
    total = tl.zeros((ROWS, N), tl.float32)
    of_row = row * width
    for first in range(0, width, K):
        column = first + tl.arange(0, K)
        here = (column < width)[None]
        z = tl.load(at[:, None] + column[None], mask=stored[:, None] & here, other=0.0)
        w = tl.load(weight + of_row[:, None] + column[None], mask=there[:, None] & here, other=0.0)
        if CAST:
            z, w = z.to(tl.float32), w.to(tl.float32)
        total = tl.dot(z, w.T, total, input_precision="ieee")  # for float32 inputs; other products are exact anyway
    if BIAS:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[None]
    return total


@triton.jit
def _refer(references, more_references, at, compressed, stored, NEAREST: tl.constexpr):
    """Return which base a reference of each row is, (ROWS,), by its place among those of all rows; 0 without one."""
    known, first = at < compressed * NEAREST, more_references - compressed.to(tl.int64) * NEAREST
    base = tl.load(references + at, mask=stored & known, other=0).to(tl.int32)
    return base + tl.load(first + at, mask=stored & (known == 0), other=0).to(tl.int32)


@triton.jit
def _read(at, here, column, there):
    """Return some columns (D,) of the rows at the pointers `at` (ROWS,) in float32, zeros where `here` is false."""
    return tl.load(at[:, None] + column[None], mask=here[:, None] & there[None], other=0.0).to(tl.float32)


@triton.jit
def _add(kv, decoded, stored, BIAS: tl.constexpr):
    """Add what f_d gives to the means of compressed rows. Without a bias it gives 0 for other rows."""
    if BIAS:
        decoded = tl.where(stored[:, None], decoded, 0.0)
    return (kv.to(tl.float32) + decoded.to(tl.float32)).to(kv.dtype).to(tl.float32)


@triton.jit
def _normed(x, column, there, inverse, scale, like):
    """Multiply some columns by the inverse of their head's root mean square and by the norm's weight."""
    weight = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)[None]
    return _rounded(_rounded(x * inverse, scale) * weight, like)


@triton.jit
def _turned(x, partner, column, there, row, cos, sin, turning, like):
    """Return x·cos + partner·sin of some columns."""
    at = row[:, None] * turning + column[None]
    c = _rounded(tl.load(cos + at, mask=there[None], other=1.0).to(tl.float32), like)
    s = _rounded(tl.load(sin + at, mask=there[None], other=0.0).to(tl.float32), like)
    return _rounded(x * c, like) + _rounded(partner * s, like)


@triton.jit(do_not_specialize=SIZES)
def _rebuild(
    listed, inner, more_inner, weight, bias, bases, more_bases, references, more_references, raw, cos, sin, scale, step,
    keys,
    listed_count, seen, sinks, compressed, block, raw_from, base_count, base_room, reference_room, raw_room, code_room,
    inner_width, numbers, heads, dim, epsilon,
    NEAREST: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, REST: tl.constexpr,
    CAST: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Make one head of the keys of some listed rows.

    A head has the channels that turn, in two halves, and perhaps others. `inner` holds what f_d's last matrix is
    multiplied with: of each compressed row (INNER 1), of each listed row (2), or nothing (0).
    """
    head, b = tl.program_id(0), tl.program_id(2).to(tl.int64)  # all heads of a tile, then those of the next
    entry = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside, turning = entry < listed_count, 2 * HALF
    first, rest = tl.arange(0, H), turning + tl.arange(0, R)
    second, there, others = first + HALF, _below(first, HALF, H), rest < dim
    row = tl.load(listed + b * listed_count + entry, mask=inside, other=0).to(tl.int32)
    stop, now = _find_stop(step, seen, sinks, compressed, block)
    exists, old = inside & (row < now), row - sinks
    stored = exists & (old >= 0) & (row < stop)
    plain, row = exists & (stored == 0), tl.where(exists, row, 0)  # others are 0, however they are turned
    width, begin = 2 * heads * dim, head * dim
    own_bases = bases + b * base_count * width + begin
    at = tl.where(row < raw_from, own_bases, raw + (b * raw_room - raw_from) * width + begin) + row.to(tl.int64) * width
    x, y, z = _read(at, plain, first, there), _read(at, plain, second, there), tl.zeros((ROWS, R), tl.float32)
    if REST:
        z = _read(at, plain, rest, others)
    if NEAREST:
        references += b * compressed * NEAREST
        more_references += b * reference_room * NEAREST
        further = more_bases + (b * base_room - base_count) * width + begin
        base = _refer(references, more_references, old * NEAREST, compressed, stored, NEAREST)
        for number in range(NEAREST):  # not unrolled, because the sums need the registers
            at = tl.where(base < base_count, own_bases, further) + base.to(tl.int64) * width
            following = stored & (number + 1 < NEAREST)  # found while these bases are read
            base = _refer(references, more_references, old * NEAREST + number + 1, compressed, following, NEAREST)
            x += _read(at, stored, first, there)
            y += _read(at, stored, second, there)
            if REST:
                z += _read(at, stored, rest, others)
        share = tl.where(stored, 1.0 / NEAREST, 1.0)[:, None]
        x, y, z = x * share, y * share, z * share
    x, y, z = x.to(raw.dtype.element_ty), y.to(raw.dtype.element_ty), z.to(raw.dtype.element_ty)
    if INNER:
        if INNER == 1:
            further = more_inner + (b * code_room - compressed) * inner_width
            at = tl.where(old < compressed, inner + b * compressed * inner_width, further)
            at += old.to(tl.int64) * inner_width
        else:
            at = inner + b * listed_count * inner_width + entry.to(tl.int64) * inner_width
        pair = tl.arange(0, 2 * H)  # channels that turn together lie side by side, so that a thread has both
        of_row, known = begin + pair % 2 * HALF + pair // 2, _below(pair, 2 * HALF, 2 * H)
        both = _multiply(at, weight, bias, stored, of_row, known, numbers, ROWS, 2 * H, K, BIAS, CAST)
        one, two = tl.split(tl.reshape(both.to(x.dtype), (ROWS, H, 2)))
        x, y = _add(x, one, stored, BIAS), _add(y, two, stored, BIAS)
        if REST:
            both = _multiply(at, weight, bias, stored, begin + rest, others, numbers, ROWS, R, K, BIAS, CAST)
            z = _add(z, both.to(z.dtype), stored, BIAS)
    x, y, z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
    if NORM:
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        inverse = (1.0 / tl.sqrt(square / dim + epsilon))[:, None]
        x = _normed(x, first, there, inverse, scale, keys)
        y = _normed(y, second, there, inverse, scale, keys)
        z = _normed(z, rest, others, inverse, scale, keys)
    turned = _turned(x, -y, first, there, row, cos, sin, turning, keys)
    y = _turned(y, x, second, there, row, cos, sin, turning, keys)
    into = keys + (b * heads + head) * (listed_count + 1) * dim + entry[:, None] * dim
    tl.store(into + first[None], turned, mask=inside[:, None] & there[None])
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


def rebuild_keys_triton(
    listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, cos: Tensor, sin: Tensor, step: Tensor,
    heads: int, norm: tuple[Tensor, float] | None,
) -> Tensor:  # fmt: skip
    (batch, count), raw = listed.shape, rows.raw
    dim, turning = raw.shape[2] // (2 * heads), cos.shape[1]
    keys = torch.empty(batch, heads, count + 1, dim, dtype=raw.dtype, device=raw.device)
    references, more = rows.references, rows.more_references
    scale, epsilon = norm or (raw, 0.0)
    given, sizes, kind, biased = [raw] * 4, [0] * 3, 0, False
    if expansion is not None:
        inner, further, weight, bias = (
            expansion.inner.contiguous(),
            expansion.more,
            *(own[0] for own in (expansion.weights, expansion.biases)),
        )
        kind, biased = 2 if further is None else 1, bias is not None
        given = [inner, inner if further is None else further, weight.contiguous(), raw if bias is None else bias]
        sizes = [given[1].shape[1], inner.shape[2], weight.shape[1]]
    exact, half = raw.dtype == torch.float32, max(8, triton.next_power_of_2(turning // 2))
    tile = 32 if exact else TILE if half <= 64 else TILE // 2
    more_needed = exact or biased or norm is not None or turning < dim or half > 64 or references is None
    limit = {} if more_needed else {"maxnreg": REGISTERS}
    _rebuild[heads, triton.cdiv(count, tile), batch](
        listed.contiguous(), *given, rows.bases.contiguous(), rows.more_bases,
        listed if references is None else references.contiguous(), listed if more is None else more,
        raw, cos.contiguous(), sin.contiguous(), scale, step, keys,
        count, rows.seen, rows.sinks, rows.compressed, rows.block, rows.raw_from, rows.bases.shape[1],
        rows.more_bases.shape[1], 0 if more is None else more.shape[1], raw.shape[1], *sizes, heads, dim, epsilon,
        NEAREST=0 if references is None else references.shape[2], INNER=kind, BIAS=biased,
        NORM=norm is not None, REST=turning < dim, CAST=is_interpreting() and raw.dtype == torch.bfloat16, ROWS=tile,
        HALF=turning // 2, H=half, R=max(16, triton.next_power_of_2(dim - turning)), K=COLUMNS,
        num_warps=4 if exact else WARPS, num_stages=STAGES, **limit,
    )  # fmt: skip
    return keys
