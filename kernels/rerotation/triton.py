"""Rotation in one pass: a program owns some rows of one head and looks their angles up by position."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # rows of a program


@triton.jit(do_not_specialize=["rows", "heads", "p_b", "p_h", "s_b", "s_h"])
def _rotate(
    x,
    cos,
    sin,
    places,
    slots,
    out,
    rows,
    heads,
    dim,
    turning,
    x_b,
    x_h,
    x_n,
    p_b,
    p_h,
    p_n,
    s_b,
    s_h,
    s_n,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    place = tl.load(places + b * p_b + h * p_h + row * p_n, mask=row < rows, other=0).to(tl.int64)  # (ROWS,)
    place = tl.maximum(place, 0)[:, None]
    slot = tl.load(slots + b * s_b + h * s_h + row * s_n, mask=row < rows, other=0).to(tl.int64)[:, None]  # (ROWS,)
    row, column = row[:, None], tl.arange(0, D)[None]
    half = turning // 2
    here, turned = (row < rows) & (column < dim), (row < rows) & (column < turning)
    other = tl.where(column < half, column + half, tl.where(column < turning, column - half, column))
    x += b * x_b + h * x_h + row * x_n
    stored = tl.load(x + column, mask=here, other=0.0)  # (ROWS, D)
    y, z = stored.to(tl.float32), tl.load(x + other, mask=here, other=0.0).to(tl.float32)  # (ROWS, D)
    z = tl.where(column < half, -z, z)
    # (ROWS, D)
    c = tl.load(cos + place * turning + column, mask=turned, other=1.0).to(tl.float32)  # the same for both channels
    s = tl.load(sin + place * turning + column, mask=turned, other=0.0).to(tl.float32)  # (ROWS, D)
    length = c * c + s * s
    plain, partner = (y * c - z * s) / length, (z * c + y * s) / length
    c = tl.load(cos + slot * turning + column, mask=turned, other=1.0).to(tl.float32)  # (ROWS, D)
    s = tl.load(sin + slot * turning + column, mask=turned, other=0.0).to(tl.float32)  # (ROWS, D)
    rotated = tl.where(turned, (plain * c + partner * s).to(out.dtype.element_ty), stored)
    tl.store(out + (head * rows + row) * dim + column, rotated, mask=here)


def rotate_rows_triton(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, slots: Tensor) -> Tensor:
    batch, heads, rows, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    places, slots = places.expand(x.shape[:3]), slots.expand(x.shape[:3])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate[triton.cdiv(rows, ROWS), batch * heads](
            x,
            cos.contiguous(),
            sin.contiguous(),
            places,
            slots,
            out,
            rows,
            heads,
            dim,
            cos.shape[1],
            *x.stride()[:3],
            *places.stride(),
            *slots.stride(),
            ROWS=ROWS,
            D=triton.next_power_of_2(dim),
        )
    return out
