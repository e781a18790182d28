"""Smoothing of scores along rows."""

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

POOLINGS = {"avg": avg_pool1d, "max": max_pool1d}


def pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """1-D pooling of scores (…, n) over an odd `kernel`, stride 1, same length; zeros beyond the ends count in
    averages, as in every published implementation. `pooling`: avg | max.
    """
    if scores.shape[-1] == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return POOLINGS[pooling](flat, kernel, stride=1, padding=kernel // 2).view_as(scores)
