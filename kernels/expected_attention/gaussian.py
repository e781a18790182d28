"""Count, mean and scatter of queries, which describe a Gaussian."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """The moments of each head's queries."""

    count: int
    """Number of queries."""
    mean: Tensor
    """(B, H, d)"""
    scatter: Tensor | None
    """The sum of the outer products of the differences from the mean, (B, H, d, d); None if not computed."""

    @property
    def covariance(self) -> Tensor | None:
        """The biased covariance (divided by the count), (B, H, d, d), or None."""
        return None if self.scatter is None else self.scatter / self.count


def merge(one: Moments, other: Moments) -> Moments:
    """Return the moments of both together (Chan, Golub, LeVeque 1979), without cancellation of large numbers."""
    count = one.count + other.count
    step = other.mean - one.mean
    mean = one.mean + step * (other.count / count)
    if one.scatter is None or other.scatter is None:
        return Moments(count, mean, None)
    between = step[..., :, None] * step[..., None, :] * (one.count * other.count / count)
    return Moments(count, mean, one.scatter + other.scatter + between)
