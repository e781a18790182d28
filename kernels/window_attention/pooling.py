"""Smoothing of scores along rows."""

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.kernels.dispatch import choose_implementation

POOLINGS = {"avg": avg_pool1d, "max": max_pool1d}


def pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """1-D pooling of scores (…, n) over an odd `kernel`, stride 1, same length; zeros beyond the ends count in
    averages, as in every published implementation. `pooling`: avg | max.
    """
    if scores.shape[-1] == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return POOLINGS[pooling](flat, kernel, stride=1, padding=kernel // 2).view_as(scores)


def pool_group(
    scores: Tensor,
    hidden: Tensor | None,
    kernel: int,
    pooling: str,
    group: str = "after",
    *,
    implementation: str | None = None,
) -> Tensor:
    """(B, H, n) mean over the group of `pool`ed scores (B, H, G, n); `group`: after | before pooling.

    hidden (B, H, n) bool: rows that count as 0 in their neighbours' pools and have 0 themselves, None for none.
    `implementation`: "reference" | "triton"; None chooses. ValueError for shapes that do not fit.
    """
    if hidden is not None and hidden.shape != scores[:, :, 0].shape:
        raise ValueError(f"pool_group: scores {tuple(scores.shape)}, hidden {tuple(hidden.shape)}")
    if choose_implementation("pool_group", implementation, scores) == "triton":
        from kvbench.kernels.window_attention.triton_pooling import pool_group_triton

        return pool_group_triton(scores, hidden, kernel, pooling == "max", group == "before")
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, :, None], 0)
    before = group == "before"
    pooled = pool(scores.mean(2), kernel, pooling) if before else pool(scores, kernel, pooling).mean(2)
    return pooled if hidden is None else pooled.masked_fill(hidden, 0)
