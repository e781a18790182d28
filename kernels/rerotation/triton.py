"""Rotation in one pass: a program owns some rows of one head, and each row's angles are read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # rows of a program


@triton.jit(do_not_specialize=["rows"])
def _rerotate(
    x, cos, sin, new_cos, new_sin, out, rows, dim, turning, x_h, x_n, c_h, c_n, a_h, a_n,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)[None]
    half = turning // 2
    here, turned = (row < rows) & (column < dim), (row < rows) & (column < turning)
    other = tl.where(column < half, column + half, tl.where(column < turning, column - half, column))
    x += head * x_h + row * x_n
    own = tl.load(x + column, mask=here, other=0.0)
    y, z = own.to(tl.float32), tl.load(x + other, mask=here, other=0.0).to(tl.float32)
    z = tl.where(column < half, -z, z)
    angle = head * c_h + row * c_n + column  # both channels of a pair have the same angle
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    length = c * c + s * s
    plain, partner = (y * c - z * s) / length, (z * c + y * s) / length
    angle = head * a_h + row * a_n + column
    c = tl.load(new_cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(new_sin + angle, mask=turned, other=0.0).to(tl.float32)
    found = tl.where(turned, (plain * c + partner * s).to(out.dtype.element_ty), own)
    tl.store(out + (head * rows + row) * dim + column, found, mask=here)


def rerotate_triton(x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    flat = lines(x)
    heads, rows, dim = flat.shape
    turning = before[0].shape[-1]
    angles = [lines(part.expand(*x.shape[:-1], turning)) for part in (*before, *after)]
    for first in (0, 2):  # a cos and its sin are read at the same offsets
        if angles[first].stride() != angles[first + 1].stride():
            angles[first : first + 2] = (part.contiguous() for part in angles[first : first + 2])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rerotate[triton.cdiv(rows, ROWS), heads](
            flat, *angles, out, rows, dim, turning, *flat.stride()[:2], *angles[0].stride()[:2],
            *angles[2].stride()[:2], ROWS=ROWS, D=triton.next_power_of_2(dim),
        )  # fmt: skip
    return out


def lines(x: Tensor) -> Tensor:
    """Return x (…, n, d) as (heads, n, d) with neighbouring channels. Copies only what is no view."""
    flat = x.reshape(-1, *x.shape[-2:])
    return flat if flat.stride(-1) == 1 else flat.contiguous()
