"""Share whole rows out in given proportions so that the total is exact."""

from collections.abc import Sequence
from fractions import Fraction


def scale_quotas(quotas: Sequence[int], before: int, quota: int) -> list[int]:
    """Scale the quotas of layers to another mean and keep their proportions.

    Args:
        quotas: Rows per head of every layer.
        before: The mean of `quotas`.
        quota: The new mean.

    Returns:
        Rows per head of every layer. They sum to `quota` times the number of layers.
    """
    targets = [rows * quota / before for rows in quotas]
    return apportion(targets, [1] * len(targets), [quota * len(targets)] * len(targets), quota * len(targets))


def apportion(targets: Sequence[float | Fraction], least: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Round `targets` to whole numbers with an exact sum, by largest remainder.

    What a bound takes from one entry goes to the others, in the order of their remaining distance to the target. Of
    equal distances the lower index comes first.

    Args:
        targets: The numbers to round.
        least: The smallest allowed result for each of them.
        most: The largest allowed result for each of them.
        total: The sum of the results.

    Returns:
        Whole numbers that sum to `total`, or to the nearest sum that the bounds allow.
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
