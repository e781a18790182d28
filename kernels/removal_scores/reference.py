"""The equations in PyTorch, over the probabilities as they are: B·Hq·w·n numbers."""

import torch
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention.reference import window_probabilities_reference


def flatten_anchors(outputs: Tensor, p: Tensor) -> Tensor:
    """(B, H, G·w, d) anchors in p's dtype."""
    return outputs.to(p.dtype).reshape(*p.shape[:2], -1, outputs.shape[-1])


def dropkv_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    epsilon: float,
    rounded: bool,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    p = window_probabilities_reference(queries, keys, mass, scaling, extras)
    if rounded:
        p = p.bfloat16().to(p.dtype)
    weights = (p / (1 - p + epsilon)).square()  # (B, H, G, w, n)
    # differences, not ‖a‖² + ‖v‖² - 2a·v: where p is near 1 the weight is about 1/ε² and a is near v
    distances = torch.cdist(
        flatten_anchors(outputs, p), values.to(p.dtype), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return (weights.flatten(2, 3) * distances.square()).sum(-2) / weights.shape[2]


def andpro_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    p = window_probabilities_reference(queries, keys, mass, scaling, extras)
    return (p.flatten(2, 3) * (flatten_anchors(outputs, p) @ values.to(p.dtype).mT)).sum(2) / p.shape[2]
