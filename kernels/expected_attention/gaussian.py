"""Count, mean and scatter: what a Gaussian of queries is known by."""

from dataclasses import dataclass

from torch import Tensor


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


def merge(one: Moments, other: Moments) -> Moments:
    """Moments of both together (Chan, Golub, LeVeque 1979): nothing large is subtracted from anything large."""
    count = one.count + other.count
    step = other.mean - one.mean
    mean = one.mean + step * (other.count / count)
    if one.scatter is None:
        return Moments(count, mean, None)
    between = step[..., :, None] * step[..., None, :] * (one.count * other.count / count)
    return Moments(count, mean, one.scatter + other.scatter + between)
