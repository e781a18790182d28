"""How far a method's scores lie from the full cache's on the same samples, with 95 % intervals. One for all tables.

Samples are paired by uid, and only if prompt and target are the same. A subtask's difference is the mean of
method_i − full_i in points, that of several subtasks their weighted mean; kvbench.analysis.intervals has the interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.analysis.intervals import BOUND, TOLERANCE, Values, mean, normalize_weights, weighted_mean
from kvbench.validation import SettingError

Pair = tuple[dict[str, Any], dict[str, Any]]  # records of one sample, with the full cache and with the method


@dataclass(frozen=True)
class PairedScores:
    """One subtask: the scores of the same samples with the full cache and with the method, and their groups."""

    full: Sequence[float]
    method: Sequence[float]
    groups: Sequence[str]
    most: float = BOUND  # infinite: not bounded, such as a number of tokens

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.method) == len(self.groups) > 0:
            raise ValueError(f"{len(self.full)} full, {len(self.method)} method scores, {len(self.groups)} groups")
        for scores in (self.full, self.method):
            self._make_values(scores)

    def _make_values(self, scores: Sequence[float]) -> Values:
        return Values(scores, self.groups, 0.0 if math.isfinite(self.most) else -self.most, self.most)

    @property
    def full_values(self) -> Values:
        return self._make_values(self.full)

    @property
    def method_values(self) -> Values:
        return self._make_values(self.method)

    @property
    def differences(self) -> Values:
        """Method − full."""
        return Values((np.asarray(self.method, float) - self.full).tolist(), self.groups, -self.most, self.most)


@dataclass(frozen=True)
class PairedDifference:
    """Means and their difference (method − full) in points, with the difference's error and interval as in Mean.

    `lost` and `gained` are the samples that score less and more with the method (right to wrong, wrong to right).
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
        """The samples that score alike."""
        return self.samples - self.lost - self.gained


def compare_scores(full: Sequence[float], method: Sequence[float], groups: Sequence[str]) -> PairedDifference:
    """The interval of one subtask; the three sequences are aligned, one entry a sample."""
    return compare_subtasks([PairedScores(full, method, groups)])


def compare_subtasks(subtasks: Sequence[PairedScores], weights: Sequence[float] | None = None) -> PairedDifference:
    """The interval of a weighted mean over subtasks; None: each weighing the same."""
    changes = [scores.differences for scores in subtasks]
    found = mean(changes, weights)
    shares = normalize_weights(weights, len(subtasks))
    return PairedDifference(
        mean_full=weighted_mean(shares, [math.fsum(scores.full) / len(scores.full) for scores in subtasks]),
        mean_method=weighted_mean(shares, [math.fsum(scores.method) / len(scores.method) for scores in subtasks]),
        difference=found.value,
        low=found.low,
        high=found.high,
        samples=found.samples,
        groups=found.groups,
        error=found.error,
        lost=sum(change < -TOLERANCE for own in changes for change in own.values),
        gained=sum(change > TOLERANCE for own in changes for change in own.values),
    )


def pair_records(full: Mapping[str, dict[str, Any]], method: Mapping[str, dict[str, Any]]) -> list[Pair]:
    """(full, method) records of the samples that both runs have, by uid.

    SettingError where prompts or targets differ: then the two did not answer the same question.
    """
    pairs = [(full[uid], method[uid]) for uid in sorted(full.keys() & method.keys())]
    for one, other in pairs:
        for key in ("prompt_hash", "target_hash"):
            if one[key] != other[key]:
                said = f"{key} is {one[key]} with the full cache, {other[key]} with the method"
                raise SettingError(f"results: {one['uid']}: {said}; make check-results")
    return pairs
