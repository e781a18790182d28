"""Quantize and dequantize in one pass each.

A program processes some neighbours along the last dimension but one, and one group of each. Keys per channel are a
transposed view, whose neighbours are contiguous, so they are not copied.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(65504.0)  # the largest float16
EVEN = tl.constexpr(12582912.0)  # 1.5·2^23: adding it to a number below 2^22 rounds it, halves to even
ELEMENTS = 2048  # elements that a program holds


@triton.jit
def _place(middle, groups, tiles, ROWS: tl.constexpr):
    """Return the outer index, the rows (ROWS,) of the middle dimension, which of them exist, and the group."""
    number, rest = tl.program_id(0) % groups, tl.program_id(0) // groups
    row = rest % tiles * ROWS + tl.arange(0, ROWS)
    return (rest // tiles).to(tl.int64), row, row < middle, number


@triton.jit
def round_tile(values, real, part, BITS: tl.constexpr, SCALES: tl.constexpr = tl.float16):
    """Quantize a tile of groups, (ROWS, BYTES, PER): `real` says which numbers exist, `part` are the codes of a byte.

    Returns scale and zero (ROWS,) in the dtype SCALES, and the bytes (ROWS, BYTES).
    """
    low = tl.min(tl.min(tl.where(real, values, float("inf")), 2), 1)
    high = tl.max(tl.max(tl.where(real, values, float("-inf")), 2), 1)
    step = tl.minimum(tl.div_rn(high - low, tl.full(low.shape, 2.0**BITS - 1, tl.float32)), LARGEST).to(SCALES)
    least = tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(SCALES)
    size = tl.where(step == 0, float("inf"), step.to(tl.float32))[:, None, None]  # in a constant group all codes are 0
    share = tl.div_rn(values - least.to(tl.float32)[:, None, None], tl.broadcast_to(size, values.shape))
    code = (tl.minimum(tl.maximum(share, 0.0), 2.0**BITS - 1) + EVEN) - EVEN
    packed = tl.sum(code.to(tl.int32) << (part * BITS)[None, None], 2)
    return step, least, packed.to(tl.uint8)


@triton.jit(do_not_specialize=["middle", "groups", "tiles"])
def _pack(
    x,
    codes,
    scale,
    zero,
    middle,
    groups,
    group,
    tiles,
    x_a,
    x_b,
    x_n,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    outer, row, real, number = _place(middle, groups, tiles, ROWS)
    PER: tl.constexpr = 8 // BITS
    byte, part = tl.arange(0, BYTES), tl.arange(0, PER)
    element = byte[:, None] * PER + part[None]
    here = real[:, None, None] & (element < group)[None]
    at = outer * x_a + row[:, None, None].to(tl.int64) * x_b + (number * group + element)[None].to(tl.int64) * x_n
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)  # (ROWS, BYTES, PER)
    in_group = (element < group)[None]
    step, least, packed = round_tile(values, in_group, part, BITS, scale.dtype.element_ty)
    line = outer * middle + row
    bytes_ = group // PER
    out = (line * groups + number)[:, None] * bytes_ + byte[None]
    tl.store(codes + out, packed, mask=real[:, None] & (byte < bytes_)[None])
    tl.store(scale + line * groups + number, step, mask=real)
    tl.store(zero + line * groups + number, least, mask=real)


@triton.jit(do_not_specialize=["middle", "groups", "tiles"])
def _unpack(
    codes,
    scale,
    zero,
    out,
    middle,
    groups,
    group,
    tiles,
    o_a,
    o_b,
    o_n,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    outer, row, real, number = _place(middle, groups, tiles, ROWS)
    PER: tl.constexpr = 8 // BITS
    element = tl.arange(0, GROUP)
    here = real[:, None] & (element < group)[None]
    line = (outer * middle + row) * groups + number
    # (ROWS, GROUP)
    packed = tl.load(codes + line[:, None] * (group // PER) + (element // PER)[None], mask=here, other=0)
    code = (packed.to(tl.int32) >> (element % PER * BITS)[None]) & (2**BITS - 1)
    step = tl.load(scale + line, mask=real, other=0.0).to(tl.float32)[:, None]  # (ROWS,)
    least = tl.load(zero + line, mask=real, other=0.0).to(tl.float32)[:, None]  # (ROWS,)
    at = outer * o_a + row[:, None].to(tl.int64) * o_b + (number * group + element)[None].to(tl.int64) * o_n
    tl.store(out + at, (code.to(tl.float32) * step + least).to(out.dtype.element_ty), mask=here)


def lines(x: Tensor) -> Tensor:
    """Return x as (outer, middle, n), which is a view for up to three dimensions."""
    return x.reshape(math.prod(x.shape[:-2]), math.prod(x.shape[-2:-1]), x.shape[-1])


def grid(outer: int, middle: int, groups: int, wide: int) -> tuple[int, int, int]:
    """Choose programs, tiles of the middle dimension, and rows of a tile."""
    rows = min(max(1, ELEMENTS // wide), triton.next_power_of_2(middle))
    tiles = triton.cdiv(middle, rows)
    return outer * groups * tiles, tiles, rows


def quantize_triton(x: Tensor, bits: int, group: int, scales: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    flat = lines(x)
    outer, middle, size = flat.shape
    groups = size // group
    codes = torch.empty(*x.shape[:-1], size * bits // 8, dtype=torch.uint8, device=x.device)
    scale, zero = (torch.empty(*x.shape[:-1], groups, dtype=scales, device=x.device) for _ in range(2))
    if x.numel():
        programs, tiles, rows = grid(outer, middle, groups, triton.next_power_of_2(group))
        _pack[programs,](
            flat,
            codes,
            scale,
            zero,
            middle,
            groups,
            group,
            tiles,
            *flat.stride(),
            BITS=bits,
            ROWS=rows,
            BYTES=triton.next_power_of_2(group * bits // 8),
        )
    return codes, scale, zero


def dequantize_triton(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int, dtype: torch.dtype, turned: bool
) -> Tensor:
    size, groups = codes.shape[-1] * 8 // bits, scale.shape[-1]
    codes, scale, zero = codes.contiguous(), scale.contiguous(), zero.contiguous()
    outer, middle, _ = lines(codes).shape
    if turned:
        flat = torch.empty(outer, size, middle, dtype=dtype, device=codes.device).mT
    else:
        flat = torch.empty(outer, middle, size, dtype=dtype, device=codes.device)
    if flat.numel():
        wide = triton.next_power_of_2(group)
        programs, tiles, rows = grid(outer, middle, groups, wide)
        _unpack[programs,](
            codes, scale, zero, flat, middle, groups, group, tiles, *flat.stride(), BITS=bits, ROWS=rows, GROUP=wide
        )
    return flat.view(*codes.shape[:-1], size)
