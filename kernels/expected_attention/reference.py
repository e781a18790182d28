"""Moments of queries and the expected logits of keys in PyTorch. Derivation: README.md."""

import torch
from torch import Tensor

from kvbench.kernels.expected_attention.gaussian import Moments

CHUNK = 1024  # keys that are multiplied with all covariances of their group at once


def undo_rotation(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotation of queries (B, H, T, d) by cos, sin (T, r/2) in pairs of channels i and i + r/2."""
    cos, sin = cos.to(queries.dtype), sin.to(queries.dtype)
    square = cos.square() + sin.square()  # a model may also scale (YaRN)
    cos, sin, half = cos / square, sin / square, cos.shape[-1]
    one, other, rest = queries.split([half, half, queries.shape[-1] - 2 * half], dim=-1)
    return torch.cat([one * cos + other * sin, other * cos - one * sin, rest], -1)


def moments_reference(queries: Tensor, scatter: bool, turn: tuple[Tensor, Tensor] | None) -> Moments:
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
    queries = queries if turn is None else undo_rotation(queries, *turn)
    mean = queries.mean(2)
    apart = queries - mean[:, :, None]
    return Moments(queries.shape[2], mean, apart.mT @ apart if scatter else None)


def logits_reference(mean: Tensor, covariance: Tensor | None, keys: Tensor, scaling: float) -> Tensor:
    batch, heads, rows, dim = keys.shape
    linear = scaling * mean.view(batch, heads, -1, dim)
    group = linear.shape[2]
    if covariance is not None:  # the Σ of a group side by side, (B, H, d, G·d)
        square = (scaling**2 / 2) * covariance.view(batch, heads, group, dim, dim)
        square = square.transpose(2, 3).reshape(batch, heads, dim, group * dim)
    parts = []
    for some in keys.split(CHUNK, dim=2):
        some = some.to(mean.dtype)
        if covariance is None:
            parts.append(linear @ some.mT)
        else:
            sides = (some @ square).view(batch, heads, -1, group, dim) + linear[:, :, None]
            parts.append((sides @ some[..., None]).squeeze(-1).mT)
    return torch.cat(parts, dim=-1).reshape(batch, heads * group, rows)


def scores_reference(
    mean: Tensor,
    covariance: Tensor | None,
    keys: Tensor,
    mass: Tensor,
    scaling: float,
    values: Tensor | None,
    epsilon: float,
) -> Tensor:
    logits = logits_reference(mean, covariance, keys, scaling).unflatten(1, (keys.shape[1], -1))
    scores = (logits + mass.log()[:, :, None]).softmax(-1).mean(2)
    if values is not None:
        scores = (scores + epsilon) * values.to(scores.dtype).norm(dim=-1)
    return scores.masked_fill(mass == 0, 0)
