"""Smooth scores along rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.kernels.dispatch import announced, choose_implementation

POOLINGS: dict[str, Callable[..., Tensor]] = {"avg": avg_pool1d, "max": max_pool1d}


def pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """Pool scores along rows with stride 1. The length does not change.

    Zeros beyond the ends count in averages, as in every published implementation.

    Args:
        scores: (…, n)
        kernel: Width of the pooling, an odd number.
        pooling: "avg" or "max".
    """
    if scores.shape[-1] == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return POOLINGS[pooling](flat, kernel, stride=1, padding=kernel // 2).view_as(scores)


@announced
def pool_group(
    scores: Tensor,
    hidden: Tensor | None,
    kernel: int,
    pooling: str,
    group: str = "after",
    *,
    order: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Pool scores along rows and average them over the group.

    Args:
        scores: (B, H, G, n)
        hidden: Rows that count as 0 in their neighbours' pools and have 0 themselves, (B, H, n) bool; None for none.
        kernel: Width of the pooling, an odd number.
        pooling: "avg" or "max".
        group: Whether the group is averaged "after" or "before" pooling.
        order: The index here of each row in the order of the text, (B, H, n) int64; None if rows are in that order.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n)

    Raises:
        ValueError: Shapes do not fit.
    """
    if hidden is not None and hidden.shape != scores[:, :, 0].shape:
        raise ValueError(f"pool_group: scores {tuple(scores.shape)}, hidden {tuple(hidden.shape)}")
    if choose_implementation("pool_group", implementation, scores) == "triton":
        from kvbench.kernels.window_attention.triton_pooling import pool_group_triton

        return pool_group_triton(scores, hidden, order, kernel, pooling == "max", group == "before")
    if order is not None:
        scores = scores.gather(-1, order[:, :, None].expand_as(scores))
        shown = None if hidden is None else hidden.gather(-1, order)
        pooled = pool_group(scores, shown, kernel, pooling, group, implementation=implementation)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, :, None], 0)
    before = group == "before"
    pooled = pool(scores.mean(2), kernel, pooling) if before else pool(scores, kernel, pooling).mean(2)
    return pooled if hidden is None else pooled.masked_fill(hidden, 0)
