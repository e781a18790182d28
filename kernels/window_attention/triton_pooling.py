"""Smooth scores along rows and average them over a group, in one launch that reads them once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def pool_kernel(
    scores,
    hidden,
    order,
    pooled,
    group,
    rows,
    N: tl.constexpr,
    KERNEL: tl.constexpr,
    LARGEST: tl.constexpr,
    BEFORE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ORDER: tl.constexpr,
):
    """Pool scores (B·H, G, n) to (B·H, n), N rows per program.

    LARGEST: pools take the maximum, otherwise the average. The group's mean is a sum of pools or, with BEFORE, a pool
    of sums, and is divided at the end. ORDER: neighbours are those in the order of the text, `order` (B·H, n).
    """
    pair, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    result = tl.zeros((N,), tl.float32)
    for first in range(0, 1 if BEFORE else group):
        pool = tl.full((N,), float("-inf") if LARGEST else 0.0, tl.float32)
        for offset in tl.static_range(KERNEL):
            near = row + (offset - KERNEL // 2)
            inside = (near >= 0) & (near < rows)
            if ORDER:
                near = tl.load(order + pair * rows + near, mask=inside, other=0)  # (N,)
            shown = inside
            if HIDDEN:
                shown = inside & (tl.load(hidden + pair * rows + near, mask=inside, other=1) == 0)  # (N,)
            score = tl.load(scores + (pair * group + first) * rows + near, mask=shown, other=0.0)  # (N,)
            if BEFORE:
                for member in range(1, group):
                    score += tl.load(scores + (pair * group + member) * rows + near, mask=shown, other=0.0)  # (N,)
            if LARGEST:
                pool = tl.maximum(pool, tl.where(inside, score, float("-inf")), propagate_nan=tl.PropagateNan.ALL)
            else:
                pool += score
        result += pool
    place = row
    if ORDER:
        place = tl.load(order + pair * rows + row, mask=row < rows, other=0).to(tl.int32)  # (N,)
    if HIDDEN:
        result = tl.where(tl.load(hidden + pair * rows + place, mask=row < rows, other=1) == 0, result, 0.0)  # (N,)
    tl.store(pooled + pair * rows + place, result / (group if LARGEST else group * KERNEL), mask=row < rows)


def pool_group_triton(
    scores: Tensor, hidden: Tensor | None, order: Tensor | None, kernel: int, largest: bool, before: bool
) -> Tensor:
    batch, heads, group, rows = scores.shape
    pooled = scores.new_empty(batch, heads, rows, dtype=torch.float32)
    pool_kernel[(triton.cdiv(rows, 512), batch * heads)](
        scores.contiguous(),
        pooled if hidden is None else hidden.contiguous().view(torch.uint8),
        pooled if order is None else order,
        pooled,
        group,
        rows,
        N=512,
        KERNEL=kernel,
        LARGEST=largest,
        BEFORE=before,
        HIDDEN=hidden is not None,
        ORDER=order is not None,
    )
    return pooled
