"""Moments of queries and the expected logits under them, in PyTorch. Derivation: README.md."""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024  # keys whose products with all covariances of their group are held at once


@dataclass(frozen=True)
class Moments:
    """Of queries, per head: how many, their mean, and the sum of outer products of what differs from it."""

    count: int
    mean: Tensor  # (B, H, d)
    scatter: Tensor | None  # (B, H, d, d), None where it is not wanted

    @property
    def covariance(self) -> Tensor | None:
        """(B, H, d, d), biased: divided by the count."""
        return None if self.scatter is None else self.scatter / self.count


def moments_reference(queries: Tensor, scatter: bool) -> Moments:
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
    mean = queries.mean(2)
    apart = queries - mean[:, :, None]
    return Moments(queries.shape[2], mean, apart.mT @ apart if scatter else None)


def merge(one: Moments, other: Moments) -> Moments:
    """Moments of both together (Chan, Golub, LeVeque 1979): nothing large is subtracted from anything large."""
    count = one.count + other.count
    step = other.mean - one.mean
    mean = one.mean + step * (other.count / count)
    if one.scatter is None:
        return Moments(count, mean, None)
    between = step[..., :, None] * step[..., None, :] * (one.count * other.count / count)
    return Moments(count, mean, one.scatter + other.scatter + between)


def logits_reference(mean: Tensor, covariance: Tensor | None, keys: Tensor, scaling: float) -> Tensor:
    batch, heads, rows, dim = keys.shape
    linear = scaling * mean.view(batch, heads, -1, dim)
    group = linear.shape[2]
    if covariance is not None:  # Σ of a group side by side: (B, H, d, G·d)
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
