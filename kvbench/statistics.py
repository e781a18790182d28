"""The paired interval: how far a method's score lies from the full cache's on the same samples. One for all tables.

The difference of a subtask is d̄ = Σ_i d_i / n with d_i = method_i − full_i in points of [0, 100]; the average row is
the mean of its k subtasks' differences, each weighing the same. Samples that share a context are one group, and
groups are what was drawn, so with G_h groups in subtask h

    u_hg = √(G_h / (G_h − 1)) · Σ_{i∈g} (d_i − d̄_h) / n_h,    v_h = Σ_g u_hg²,    error² = Σ_g (Σ_h u_hg)² / k²

This is the cluster-robust variance CR1 of a mean (Cameron & Miller 2015, "A Practitioner's Guide to Cluster-Robust
Inference"; for evaluations Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640) and, with no group in two
subtasks, the stratified Σ_h v_h / k². The interval is d̄ ± t · error, cut to ±100, with G − 1 degrees of freedom for
one subtask and Welch–Satterthwaite's (Σ v_h)² / Σ(v_h² / (G_h − 1)) for several (the least G_h − 1 if they share
groups).

Few groups that differ. Where 5 of 5 or 200 of 200 samples score the same, error is 0, and "0 ± 0" would be a lie: five
samples say little about the rest (Bowyer et al. 2025, "Don't Use the CLT in LLM Evals With Fewer Than a Few Hundred
Datapoints", arXiv 2503.01747). So where more than half the groups have one and the same difference c (0, mostly) and
fewer than six another, the interval comes from exact binomial bounds. Of b among G groups that show something, U(b, G)
bounds the share of all groups that do: the upper Clopper–Pearson bound at 97.5 % (Clopper & Pearson 1934; for b = 0
it is 1 − 0.025^(1/G), the two-sided "rule of three", Hanley & Lippman-Hand 1983). No group lies beyond ±100, so

    high = c + U(#d > c, G) (c⁺ − c) + U(#d > c⁺, G) (100 − c⁺)    with c⁺ = max(c, 0); low is its mirror image

and at c = 0 these are 100 · U(groups that gained) and −100 · U(groups that lost). Five samples without any difference
give ±52 points, 50 give ±7.1, 500 give ±0.7. Six is the fewest differing pairs with which the exact sign test can
reject at 5 % (2 · 2⁻⁶ = 0.031). For an average the counts are pooled over k · min G_h trials: a sum of binomials with
unequal shares spreads less than the pooled one (Hoeffding 1956). The bounds are exact for groups of one size.

Coverage, asserted in tests/test_statistics.py: for partial scores 93 to 97 % from 20 groups on, single or clustered.
For right-or-wrong scores 93 to 97 % at n = 100, 200 and 500 where 20 to 80 % of right answers are lost, and at least
96 % at n = 5 to 100 where at most 10 % are. Elsewhere the counts are coarse: nowhere below 91 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, stdtrit

FEW = 6  # groups that differ, below which the exact bounds are used
BOUND = 100.0  # scores are in [0, BOUND], differences in [-BOUND, BOUND]
TAIL = 0.975  # a 95 % interval, two-sided
SAME = 1e-9  # points: rounding of means


@dataclass(frozen=True)
class Interval:
    """Means and their difference (method − full) in points, with its 95 % interval.

    `low`, `high` and `error` (the CR1 standard error) are None where some subtask has one group only: one context
    says nothing about others.
    """

    mean_full: float
    mean_method: float
    difference: float
    low: float | None
    high: float | None
    samples: int
    groups: int
    error: float | None


@dataclass(frozen=True)
class Scores:
    """One subtask: the scores of the same samples with the full cache and with the method, and their groups."""

    full: Sequence[float]
    method: Sequence[float]
    groups: Sequence[str]

    def __post_init__(self) -> None:
        if not len(self.full) == len(self.method) == len(self.groups) > 0:
            raise ValueError(f"{len(self.full)} full, {len(self.method)} method scores, {len(self.groups)} groups")
        for score in (*self.full, *self.method):
            if not 0 <= score <= BOUND:
                raise ValueError(f"score {score} is not in [0, {BOUND:g}]")


def paired(full: Sequence[float], method: Sequence[float], groups: Sequence[str]) -> Interval:
    """The interval of one subtask; the three sequences are aligned, one entry a sample."""
    return average([Scores(full, method, groups)])


def average(subtasks: Sequence[Scores]) -> Interval:
    """The interval of the mean over subtasks, each weighing the same."""
    parts = [_spread(scores) for scores in subtasks]
    k = len(parts)
    names = set().union(*(part.pull for part in parts))
    difference = math.fsum(part.difference for part in parts) / k
    fewest = min(len(part.pull) for part in parts)
    low = high = error = None
    if fewest > 1:
        shared = sum(len(part.pull) for part in parts) > len(names)
        pulls = [math.fsum(part.pull.get(name, 0.0) for part in parts) / k for name in names]
        error = math.sqrt(math.fsum(pull**2 for pull in pulls))
        if all(part.alike for part in parts) and len(set().union(*(part.others for part in parts))) < FEW:
            trials = fewest * (1 if shared else k)
            low, high = -_highest(parts, trials, -1), _highest(parts, trials, 1)
        else:
            reach = stdtrit(fewest - 1 if shared else _freedom(parts), TAIL) * error
            low, high = difference - reach, difference + reach
        low, high = max(min(low, difference), -BOUND), min(max(high, difference), BOUND)
    return Interval(
        mean_full=math.fsum(np.mean(scores.full) for scores in subtasks) / k,
        mean_method=math.fsum(np.mean(scores.method) for scores in subtasks) / k,
        difference=difference,
        low=low,
        high=high,
        samples=sum(len(scores.full) for scores in subtasks),
        groups=len(names),
        error=error,
    )


def pair(full: Mapping[str, dict], method: Mapping[str, dict]) -> list[tuple[dict, dict]]:
    """(full, method) records of the samples that both runs have, by uid.

    Raises ValueError where prompts or targets differ: then the two did not answer the same question.
    """
    pairs = [(full[uid], method[uid]) for uid in sorted(full.keys() & method.keys())]
    for one, other in pairs:
        for key in ("prompt_hash", "target_hash"):
            if one[key] != other[key]:
                raise ValueError(f"{one['uid']}: {key} is {one[key]} with the full cache, {other[key]} with the method")
    return pairs


@dataclass(frozen=True)
class _Spread:
    """What a subtask adds to an interval."""

    difference: float
    pull: dict[str, float]  # group -> u_hg
    means: dict[str, float]  # group -> its mean difference
    common: float  # the median of these

    @property
    def others(self) -> set[str]:
        """The groups whose difference is not the common one."""
        return {name for name, mean in self.means.items() if abs(mean - self.common) > SAME}

    @property
    def alike(self) -> bool:
        """Whether more than half the groups have the common difference."""
        return 2 * len(self.others) < len(self.means)


def _spread(scores: Scores) -> _Spread:
    differences = np.asarray(scores.method, float) - np.asarray(scores.full, float)
    names, places = np.unique(np.asarray(scores.groups, str), return_inverse=True)
    names, sizes, sums = names.tolist(), np.bincount(places), np.bincount(places, differences)
    mean = differences.mean()
    pull = math.sqrt(len(names) / max(len(names) - 1, 1)) * (sums - sizes * mean) / len(differences)
    return _Spread(
        difference=float(mean),
        pull=dict(zip(names, pull.tolist(), strict=True)),
        means=dict(zip(names, (sums / sizes).tolist(), strict=True)),
        common=float(np.median(sums / sizes)),
    )


def _highest(parts: Sequence[_Spread], trials: int, sign: int) -> float:
    """The exact upper bound of the mean difference, or with sign -1 of its negative."""
    commons = [sign * part.common for part in parts]
    above = {name for part in parts for name, mean in part.means.items() if sign * (mean - part.common) > SAME}
    gained = {name for name in above if any(sign * part.means.get(name, 0) > SAME for part in parts)}
    high = math.fsum(commons) / len(commons)
    high += _most(len(above), trials) * max(max(common, 0) - common for common in commons)
    return high + _most(len(gained), trials) * max(BOUND - max(common, 0) for common in commons)


def _most(count: int, trials: int) -> float:
    """Upper Clopper–Pearson bound, 97.5 %, of a share of which `count` of `trials` were seen."""
    return 1.0 if count >= trials else float(betaincinv(count + 1, trials - count, TAIL))


def _freedom(parts: Sequence[_Spread]) -> float:
    """Welch–Satterthwaite's degrees of freedom."""
    variances = [(math.fsum(pull**2 for pull in part.pull.values()), len(part.pull) - 1) for part in parts]
    total = math.fsum(variance for variance, _ in variances)
    return total**2 / math.fsum(variance**2 / freedom for variance, freedom in variances)
