"""Share whole rows out in given proportions, so that the total is exact."""

from collections.abc import Sequence
from fractions import Fraction


def scale_quotas(quotas: Sequence[int], before: int, quota: int) -> list[int]:
    """Quotas that layers were given when the mean was `before`, kept in proportion when it is `quota`."""
    targets = [own * quota / before for own in quotas]
    return apportion(targets, [1] * len(targets), [quota * len(targets)] * len(targets), quota * len(targets))


def apportion(targets: Sequence[float | Fraction], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole numbers near `targets` that sum to `total` (or as near as the bounds allow) within least…most.

    Largest remainder; what the bounds take from one goes to the others by their remaining distance to the target,
    ties to the lower index.
    """
    counts = [min(max(int(t), low), high) for t, low, high in zip(targets, least, most, strict=True)]
    total = min(max(total, sum(least)), sum(most))
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        open_ = [i for i in range(len(counts)) if (counts[i] < most[i] if step > 0 else counts[i] > least[i])]
        open_.sort(key=lambda i: (step * (counts[i] - targets[i]), i))
        # give whole shares at once while much is missing, single rows at the end
        share = max(1, abs(missing) // len(open_))
        for i in open_[: abs(missing) // share]:
            counts[i] += step * min(share, (most[i] - counts[i]) if step > 0 else (counts[i] - least[i]))
    return counts
