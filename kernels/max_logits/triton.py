"""The largest logits in one pass over the keys: a program owns a tile of rows and goes through all heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting


@triton.jit(do_not_specialize=["rows"])
def _largest(
    queries,
    keys,
    out,
    rows,
    heads,
    group,
    dim,
    scale,
    q_b,
    q_h,
    q_d,
    k_b,
    k_h,
    k_n,
    k_d,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    CAST: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    row, column, member = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D), tl.arange(0, M)
    keys += b * k_b
    best = tl.full((N,), float("-inf"), tl.float32)
    here = (row < rows)[:, None] & (column < dim)[None]
    asking = (member < group)[:, None] & (column < dim)[None]
    for head in range(heads):
        at = queries + b * q_b + (head * group + member)[:, None].to(tl.int64) * q_h + column[None] * q_d
        query = tl.load(at, mask=asking, other=0.0)  # (M, D)
        at = row[:, None].to(tl.int64) * k_n + column[None] * k_d
        key = tl.load(keys + at, mask=here, other=0.0)  # (N, D)
        keys += k_h
        if CAST:
            query, key = query.to(tl.float32), key.to(tl.float32)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (M, N)
        logits = tl.where((member < group)[:, None], logits, float("-inf"))
        best = tl.maximum(best, tl.max(logits, 0))
    tl.store(out + b * rows + row, best, mask=row < rows)


def max_logits_triton(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    batch, heads, rows, dim = keys.shape
    group = queries.shape[1] // heads
    out = torch.empty(batch, rows, dtype=torch.float32, device=keys.device)
    wide = max(16, triton.next_power_of_2(dim))
    tile = 32 if queries.dtype == torch.float32 or wide > 128 else 64
    if out.numel():
        _largest[triton.cdiv(rows, tile), batch](
            queries,
            keys,
            out,
            rows,
            heads,
            group,
            dim,
            scaling,
            *queries.stride(),
            *keys.stride(),
            M=max(16, triton.next_power_of_2(group)),
            N=tile,
            D=wide,
            CAST=is_interpreting() and queries.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=3,
        )
    return out
