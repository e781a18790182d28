"""Compare a method's scores with the full cache's on the same samples, with 95 % intervals. All tables use this module.

Samples are paired by uid, and only if their prompts and targets are equal. The difference of a subtask is the mean of
method_i − full_i in points, and the difference of several subtasks is their weighted mean. kvbench.analysis.intervals
defines the interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvbench.analysis.intervals import (
    BOUND,
    TAIL,
    TOLERANCE,
    Mean,
    Values,
    compute_means,
    normalize_weights,
    weighted_mean,
)
from kvbench.validation import SettingError

Pair = tuple[dict[str, Any], dict[str, Any]]  # records of one sample, with the full cache and with the method


@dataclass(frozen=True)
class PairedScores:
    """The scores of one subtask's samples with the full cache and with the method. The sequences are aligned.

    Args:
        full: Scores with the full cache.
        method: Scores with the method.
        groups: The group (context) of each sample.
        most: Largest possible score; inf if unbounded, such as a number of tokens.

    Raises:
        ValueError: There are no samples, the lengths differ, or a score is out of range.
    """

    full: Sequence[float]
    method: Sequence[float]
    groups: Sequence[str]
    most: float = BOUND

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.method) == len(self.groups) > 0:
            raise ValueError(f"{len(self.full)} full, {len(self.method)} method scores, {len(self.groups)} groups")
        self.full_values, self.method_values  # noqa: B018 - checks the scores

    def _make_values(self, scores: Sequence[float]) -> Values:
        return Values(scores, self.groups, 0.0 if math.isfinite(self.most) else -self.most, self.most)

    @cached_property
    def full_values(self) -> Values:
        """The full cache's scores."""
        return self._make_values(self.full)

    @cached_property
    def method_values(self) -> Values:
        """The method's scores."""
        return self._make_values(self.method)

    @cached_property
    def differences(self) -> Values:
        """The differences method − full."""
        return Values((np.asarray(self.method, float) - self.full).tolist(), self.groups, -self.most, self.most)


@dataclass(frozen=True)
class PairedDifference:
    """Two means and their difference (method − full) in points.

    Attributes:
        mean_full: Mean score with the full cache.
        mean_method: Mean score with the method.
        difference: Their difference.
        low: Lower end of the difference's 95 % interval, None as in `kvbench.analysis.intervals.Mean`.
        high: Upper end of it.
        samples: Number of samples.
        groups: Number of groups.
        error: Standard error of the difference.
        lost: Number of samples that score less with the method (from right to wrong).
        gained: Number of samples that score more with the method (from wrong to right).
    """

    mean_full: float
    mean_method: float
    difference: float
    low: float | None
    high: float | None
    samples: int
    groups: int
    error: float | None
    lost: int
    gained: int

    @property
    def same(self) -> int:
        """Number of samples with equal scores."""
        return self.samples - self.lost - self.gained


def compare_subtasks(
    subtasks: Sequence[PairedScores], weights: Sequence[float] | None = None, tail: float = TAIL
) -> PairedDifference:
    """Compare the scores of several subtasks.

    Args:
        subtasks: The scores of each subtask.
        weights: A positive weight for each subtask. None weighs all subtasks the same.
        tail: Quantile of the interval's ends (`kvbench.analysis.intervals.mean`).

    Returns:
        Weighted means and their difference with its interval.

    Raises:
        ValueError: There are no subtasks, or the weights do not fit.
    """
    return compare_averages([(subtasks, weights)], tail)[0]


def compare_averages(
    averages: Sequence[tuple[Sequence[PairedScores], Sequence[float] | None]], tail: float = TAIL
) -> list[PairedDifference]:
    """Compare the scores of several averages at once, which is faster than one call of `compare_subtasks` for each.

    Args:
        averages: The subtasks and the weights of each average, as in `compare_subtasks`.
        tail: As in `compare_subtasks`.

    Returns:
        What `compare_subtasks` returns for each of them.

    Raises:
        ValueError: As in `compare_subtasks`.
    """
    changes = compute_means(
        [([scores.differences for scores in subtasks], weights) for subtasks, weights in averages], tail
    )
    return [_describe_change(change, *average) for change, average in zip(changes, averages, strict=True)]


def _describe_change(
    difference: Mean, subtasks: Sequence[PairedScores], weights: Sequence[float] | None
) -> PairedDifference:
    """Return both means beside their `difference`."""
    shares = normalize_weights(weights, len(subtasks))
    changes = [change for scores in subtasks for change in scores.differences.values]
    return PairedDifference(
        mean_full=weighted_mean(shares, [math.fsum(scores.full) / len(scores.full) for scores in subtasks]),
        mean_method=weighted_mean(shares, [math.fsum(scores.method) / len(scores.method) for scores in subtasks]),
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        samples=difference.samples,
        groups=difference.groups,
        error=difference.error,
        lost=sum(change < -TOLERANCE for change in changes),
        gained=sum(change > TOLERANCE for change in changes),
    )


def pair_records(full: Mapping[str, dict[str, Any]], method: Mapping[str, dict[str, Any]]) -> list[Pair]:
    """Pair the records of the samples that both runs have.

    Args:
        full: The full cache's records by uid.
        method: The method's records by uid.

    Returns:
        (full, method) records, sorted by uid.

    Raises:
        SettingError: Prompts or targets of a pair differ, so the two runs did not answer the same question.
    """
    pairs = [(full[uid], method[uid]) for uid in sorted(full.keys() & method.keys())]
    for one, other in pairs:
        for key in ("prompt_hash", "target_hash"):
            if one[key] != other[key]:
                said = f"{key} is {one[key]} with the full cache, {other[key]} with the method"
                raise SettingError(f"results: {one['uid']}: {said}; kvbench check results")
    return pairs
