"""The probabilities softmax(q·k·scaling + log mass), causal within the window, and their statistics in PyTorch."""

import torch
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits, weigh_logits


def window_probabilities_reference(
    queries: Tensor, keys: Tensor, mass: Tensor | None, scaling: float, extras: SoftmaxExtras | None = None
) -> Tensor:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    dtype = torch.promote_types(keys.dtype, torch.float32) if mass is None else mass.dtype
    grouped = queries.view(batch, heads, query_heads // heads, tokens, dim).to(dtype)
    logits = cap_logits(grouped @ keys[:, :, None].to(dtype).mT * scaling, extras)
    if mass is not None:
        logits = logits + mass.log()[:, :, None, None]
    last = torch.arange(rows - tokens, rows, device=keys.device)[:, None]
    return weigh_logits(logits.masked_fill(torch.arange(rows, device=keys.device) > last, -torch.inf), extras)


def mean(p: Tensor) -> Tensor:
    return p.mean(-2)


def variance(p: Tensor) -> Tensor:
    return p.var(-2) if p.shape[-2] > 1 else torch.zeros_like(p.squeeze(-2))


def entropy(p: Tensor) -> Tensor:
    double = p.double()
    return -(double * (double + 1e-10).log()).sum(-2).to(p.dtype)


def window_statistics_reference(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    scaling: float,
    of: tuple[str, ...],
    extras: SoftmaxExtras | None,
) -> tuple[Tensor, ...]:
    p = window_probabilities_reference(queries, keys, mass, scaling, extras)
    reduce = {"mean": mean, "variance": variance, "entropy": entropy}
    return tuple(reduce[name](p) for name in of)
