"""The norms in Triton. Projected values are summed in registers and never written."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _norms(
    values,
    weight,
    out,
    rows,
    heads,
    group,
    dim,
    hidden,
    sv_b,
    sv_h,
    sv_n,
    sw,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    CAST: tl.constexpr,
):
    """Process N rows of one KV head with all query heads of its group, M projected channels at a time."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, h = head // heads, head % heads
    row, column = block * N + tl.arange(0, N), tl.arange(0, D)
    start = values + b.to(tl.int64) * sv_b + h.to(tl.int64) * sv_h
    where = (row < rows)[:, None] & (column < dim)[None]
    v = tl.load(start + row[:, None].to(tl.int64) * sv_n + column[None], mask=where, other=0.0)  # (N, D)
    if CAST:
        v = v.to(tl.float32)
    total = tl.zeros([N, M], tl.float32)
    for query_head in range(h * group, h * group + group):
        for first in range(0, hidden, M):
            channel = first + tl.arange(0, M)
            place = weight + channel[:, None].to(tl.int64) * sw + query_head * dim + column[None]
            w = tl.load(place, mask=(channel < hidden)[:, None] & (column < dim)[None], other=0.0)  # (M, D)
            if CAST:
                w = w.to(tl.float32)
            total += tl.abs(tl.dot(v, w.T, input_precision="ieee"))  # (N, M)
    tl.store(out + head.to(tl.int64) * rows + row, tl.sum(total, 1) / group, mask=row < rows)


def projected_norms_triton(values: Tensor, weight: Tensor, query_heads: int) -> Tensor:
    batch, heads, rows, dim = values.shape
    values, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (values, weight))
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=values.device)
    size = max(16, triton.next_power_of_2(dim))
    wide = values.dtype == torch.float32 or size > 128
    tile = 32 if wide else 128
    _norms[(triton.cdiv(rows, tile), batch * heads)](
        values,
        weight,
        out,
        rows,
        heads,
        query_heads // heads,
        dim,
        len(weight),
        *values.stride()[:3],
        weight.stride(0),
        N=tile,
        M=tile,
        D=size,
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 3,
        CAST=triton.knobs.runtime.interpret and values.dtype == torch.bfloat16,
    )
    return out
