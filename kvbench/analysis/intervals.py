"""Compute the mean of clustered samples with its standard error and 95 % interval. All tables use this formula.

Samples that share a context form one group, and groups are the independent draws. x_i are the scores of one run, or the
differences method_i − full_i between two runs (kvbench.analysis.paired), in points. Subtask h has the mean x̄_h of its
n_h samples in G_h groups. A mean over several subtasks is Σ_h w_h x̄_h with Σ_h w_h = 1; without weights, each subtask
weighs the same (w_h = 1/k). With

    u_hg = √(G_h / (G_h − 1)) · Σ_{i∈g} (x_i − x̄_h) / n_h,    v_h = Σ_g u_hg²,    error² = Σ_g (Σ_h w_h u_hg)²

error² is the cluster-robust variance CR1 of a mean (Cameron & Miller 2015, "A Practitioner's Guide to Cluster-Robust
Inference"; for evaluations Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640). If no group belongs to two
subtasks, it equals the stratified variance Σ_h w_h² v_h. The interval is the mean ± t · error, clipped to the range of
possible values. t has G − 1 degrees of freedom for one subtask, Welch–Satterthwaite's
(Σ w_h² v_h)² / Σ(w_h⁴ v_h² / (G_h − 1)) for several, and the smallest G_h − 1 if subtasks share groups.

Right-or-wrong scores. If 5 of 5 or 200 of 200 samples score the same, error is 0, and "0 ± 0" would be misleading: five
samples say little about all others (Bowyer et al. 2025, "Don't Use the CLT in LLM Evals With Fewer Than a Few Hundred
Datapoints", arXiv 2503.01747). The interval therefore comes from exact binomial bounds under three conditions: every
sample scores 0 or an end of the range (differences of -100, 0 or 100), more than half of the groups have the same mean
c (for differences mostly 0), and fewer than six groups have another mean. If b of G groups show an event, U(b, G)
bounds the share of all groups that show it: the upper Clopper–Pearson bound at 97.5 % (Clopper & Pearson 1934). For
b = 0 it is 1 − 0.025^(1/G), the two-sided "rule of three" (Hanley & Lippman-Hand 1983). With no group above `most`,

    high = c + U(#x > c, G) (c⁺ − c) + U(#x > c⁺, G) (most − c⁺)    with c⁺ = max(c, 0)

and low is its mirror image. For differences with c = 0 the ends are 100 · U(groups that gained) and
−100 · U(groups that lost). Five samples without any difference give ±52 points, 50 give ±7.1, and 500 give ±0.7. Six is
the smallest number of differing pairs for which the exact sign test can reject at 5 % (2 · 2⁻⁶ = 0.031). For several
subtasks a group has the weight c_g = Σ_{h∋g} w_h / G_h. An event in b of all G groups then moves the mean by at most
U(b, G) · G · max_g c_g, because a sum of binomials with unequal shares spreads less than the pooled one (Hoeffding
1956). The bounds are exact for groups of equal size.

Partial scores (F1, ROUGE, two of four needles: some sample lies between those values). The t interval only knows the
spread that was observed. If 5 % of the samples collapse, 36 % of all draws of 20 samples contain no collapse, and their
t intervals miss the mean. The interval therefore also covers Gaffke's bound, which adds one unseen group with the
highest possible score (for the lower end, the lowest). Sources: Gaffke 2005, "Three test statistics for a nonparametric
one-sided hypothesis on the mean of a nonnegative variable"; Learned-Miller & Thomas 2020, "A New Confidence Interval
for the Mean of a Bounded Random Variable", arXiv 1905.06208. For samples x_1 … x_n of one subtask, each its own group,
the upper end is the 97.5 % point of D_0 · most + Σ_i D_i x_i with weights D from a flat Dirichlet distribution. In
general it is the mean plus the t that solves

    P( E_0 max_g (r_g − t s_g) + Σ_g E_g (Σ_h w_h u_hg − t s_g) > 0 ) = 0.025
    s_g = Σ_h w_h n_hg / n_h,    r_g = Σ_h w_h (most_h − x̄_h) n_hg / n_h

with independent standard exponentials E and n_hg samples of subtask h in group g. The unseen group resembles the
observed group that moves the mean most. The solution is computed, not simulated, so nothing is random and the order of
samples does not matter. For two-valued scores the bound equals Clopper and Pearson's, so five differences near 0 give
±52 like five zeros. For one subtask with groups of equal size the bound holds for every distribution and every n:
Vlassis & Thomas 2026, "An Exact Distribution-Free Test for Means of Nonnegative Random Variables", arXiv 2607.08415,
prove Gaffke's conjecture, and √(G_h / (G_h − 1)) in u only widens the interval. For several subtasks and groups of
unequal size the tests simulate the coverage. Betting intervals (Waudby-Smith & Ramdas 2024) have the same guarantee,
but Markov's inequality makes them 1.4 times as wide for many samples. The table shows half the width of a difference's
interval in points, for normal differences with mean -5 and standard deviation s, and in brackets the t interval alone:

    s     n = 5        10           20           50          100         200         500
    0.3   52.2 (0.4)   30.9 (0.2)   16.8 (0.1)   7.1 (0.1)   3.6 (0.1)   1.8 (0.0)   0.7 (0.0)
    5     52.2 (6.1)   30.9 (3.5)   16.9 (2.3)   7.2 (1.4)   3.7 (1.0)   2.0 (0.7)   0.9 (0.4)
    15    52.7 (18.2)  31.6 (10.6)  17.8 (7.0)   8.2 (4.3)   4.7 (3.0)   2.9 (2.1)   1.6 (1.3)
    30    54.4 (36.5)  34.2 (21.2)  20.8 (14.0)  11.1 (8.5)  7.2 (5.9)   4.8 (4.2)   2.9 (2.6)

The price is a coverage near 100 % for smooth scores. Unbounded values (numbers of tokens) have only the t interval, and
no interval if fewer than six groups differ.

tests/analysis/test_intervals.py asserts this coverage. Partial scores: at least 95 % for n = 5 to 500 if 2 to 10 % of
samples or contexts lose (or gain) 30 to 100 points and the others differ little or not at all, for one subtask and for
averages. The t interval alone: 93 to 97 % from 20 groups on for smooth scores, single or clustered, of one run or of
two, weighted or not. Right-or-wrong scores: 93 to 97 % for n = 100, 200 and 500 if 20 to 80 % of right answers are lost
(or right), and at least 96 % for n = 5 to 100 if at most 10 % are. Elsewhere the counts are coarse, but the coverage is
never below 91 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import betaincinv, stdtrit

FEW = 6  # with fewer differing groups than this, exact bounds are used
BOUND = 100.0  # scores are in [0, BOUND], differences in [-BOUND, BOUND]
TAIL = 0.975  # quantile of a two-sided 95 % interval
TOLERANCE = 1e-9  # points; means that differ by less are equal up to rounding
NODES = 0.1 * np.arange(48)  # nodes of the integral in compute_chance_above_zero
PLACES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])  # candidates for its c
STEPS, CLOSE = 40, 1e-4  # the search for a reach ends after STEPS steps or after one shorter than CLOSE points
AT_ONCE = 50_000  # groups of all means that are searched for together, which limits memory


@dataclass(frozen=True)
class Values:
    """The samples of one subtask.

    Args:
        values: A number for each sample.
        groups: The group (context) of each sample.
        least: Smallest possible value; -inf if unbounded.
        most: Largest possible value; inf if unbounded.

    Raises:
        ValueError: There are no samples, the lengths differ, or a value is not finite or outside [least, most].
    """

    values: Sequence[float]
    groups: Sequence[str]
    least: float = 0.0
    most: float = BOUND

    def __post_init__(self) -> None:
        if not len(self.values) == len(self.groups) > 0:
            raise ValueError(f"{len(self.values)} scores, {len(self.groups)} groups")
        for value in self.values:
            if not (self.least <= value <= self.most and math.isfinite(value)):
                raise ValueError(f"score {value} is not in [{self.least:g}, {self.most:g}]")

    @cached_property
    def spread(self) -> "_Spread":
        """The part of an interval that comes from these samples."""
        return _measure_spread(self)


@dataclass(frozen=True)
class Mean:
    """A mean with its CR1 standard error and 95 % interval, in the unit of the values.

    Attributes:
        value: The mean.
        low: Lower end of the interval. None if some subtask has only one group, because one context says nothing about
            others, and if values are unbounded and too few groups differ.
        high: Upper end of the interval, None like `low`.
        error: Standard error. None if some subtask has only one group.
        samples: Number of samples.
        groups: Number of groups.
    """

    value: float
    low: float | None
    high: float | None
    error: float | None
    samples: int
    groups: int


def mean(subtasks: Sequence[Values], weights: Sequence[float] | None = None, tail: float = TAIL) -> Mean:
    """Compute the weighted mean over subtasks and its interval, as this module's docstring defines them.

    The result does not depend on the order of samples, not even in the last bit.

    Args:
        subtasks: The samples of each subtask.
        weights: A positive weight for each subtask. None weighs all subtasks the same.
        tail: Quantile of the interval's ends. 0.975 is a two-sided 95 % interval; simultaneous comparisons take more.

    Raises:
        ValueError: There are no subtasks, or the weights do not fit.
    """
    return compute_means([(subtasks, weights)], tail)[0]


def compute_means(
    averages: Sequence[tuple[Sequence[Values], Sequence[float] | None]], tail: float = TAIL
) -> list[Mean]:
    """Compute several means at once, which is much faster than one call of `mean` for each.

    Args:
        averages: The subtasks and the weights of each mean, as in `mean`.
        tail: As in `mean`.

    Returns:
        What `mean` returns for each of them.

    Raises:
        ValueError: As in `mean`.
    """
    drafts = [_Draft.of(subtasks, weights, tail) for subtasks, weights in averages]
    partial = [draft for draft in drafts if draft.partial]
    down, up = ([draft.extend(sign) for draft in partial] for sign in (-1, 1))
    reaches = _find_gaffke_reaches([*down, *up], tail)
    for place, draft in enumerate(partial):
        draft.low = min(draft.low, draft.value - reaches[place])
        draft.high = max(draft.high, draft.value + reaches[len(partial) + place])
    return [draft.finish() for draft in drafts]


@dataclass
class _Draft:
    """A mean before Gaffke's bound.

    Attributes:
        parts: Its subtasks.
        shares: Their weights, which sum to 1.
        value: The mean.
        error: Its standard error; None if some subtask has only one group.
        pulls: Group -> its contribution to the error; empty if some subtask has only one group.
        low: Lower end of the interval so far.
        high: Upper end of the interval so far.
        partial: Whether the interval must cover Gaffke's bound, too.
        groups: Number of groups.
    """

    parts: Sequence["_Spread"]
    shares: Sequence[float]
    value: float
    error: float | None
    pulls: Mapping[str, float]
    low: float
    high: float
    partial: bool
    groups: int

    @classmethod
    def of(cls, subtasks: Sequence[Values], weights: Sequence[float] | None, tail: float) -> "_Draft":
        """Compute the mean and its t interval, or its exact bounds."""
        shares = normalize_weights(weights, len(subtasks))
        parts = [subtask.spread for subtask in subtasks]
        value = weighted_mean(shares, [part.mean for part in parts])
        leverage: dict[str, float] = {}
        for share, part in zip(shares, parts, strict=True):
            for name in part.pull:
                leverage[name] = leverage.get(name, 0.0) + share / len(part.pull)
        fewest = min(len(part.pull) for part in parts)
        if fewest < 2:
            return cls(parts, shares, value, None, {}, value, value, False, len(leverage))
        shared = sum(len(part.pull) for part in parts) > len(leverage)
        if shared:
            pulls = {
                name: weighted_mean(shares, [part.pull.get(name, 0.0) for part in parts]) for name in sorted(leverage)
            }
        else:
            pulls = dict(
                sorted((name, s * u) for s, part in zip(shares, parts, strict=True) for name, u in part.pull.items())
            )
        error = math.sqrt(math.fsum(pull**2 for pull in pulls.values()))
        partial = any(part.partial for part in parts) and all(math.isfinite(part.most) for part in parts)
        if _needs_exact_bounds(parts) and not partial:
            low = -_exact_upper_bound(parts, shares, leverage, -1, tail)
            high = _exact_upper_bound(parts, shares, leverage, 1, tail)
        else:
            freedom = fewest - 1 if shared else _degrees_of_freedom(parts, shares) if error else 1
            reach = float(stdtrit(freedom, tail)) * error
            low, high = value - reach, value + reach
        return cls(parts, shares, value, error, pulls, low, high, partial, len(leverage))

    def extend(self, sign: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what Gaffke's bound needs of each group: its contribution to the error, its size and its room.

        With `sign` -1 all are those of the negative mean.
        """
        place = {name: at for at, name in enumerate(self.pulls)}
        pulls = sign * np.array(list(self.pulls.values()))
        sizes, room = np.zeros(len(place)), np.zeros(len(place))
        for share, part in zip(self.shares, self.parts, strict=True):
            at = [place[name] for name in part.share]
            size = share * np.array(list(part.share.values()))
            sizes[at] += size
            room[at] += size * (part.most - part.mean if sign > 0 else part.mean - part.least)
        return pulls, sizes, room

    def finish(self) -> Mean:
        """Return the mean, with an interval that contains it and lies in the range of possible values."""
        low: float | None = None
        high: float | None = None
        if self.error is not None:
            low = max(min(self.low, self.value), weighted_mean(self.shares, [part.least for part in self.parts]))
            high = min(max(self.high, self.value), weighted_mean(self.shares, [part.most for part in self.parts]))
            if not (math.isfinite(low) and math.isfinite(high)):
                low = high = None
        return Mean(self.value, low, high, self.error, sum(part.samples for part in self.parts), self.groups)


def needs_exact_bounds(subtasks: Sequence[Values]) -> bool:
    """Return whether so few groups differ that the interval of `mean` comes from exact bounds."""
    return _needs_exact_bounds([subtask.spread for subtask in subtasks])


@dataclass(frozen=True)
class _Spread:
    """The part of an interval that comes from one subtask."""

    mean: float
    pull: dict[str, float]  # group -> u_hg
    share: dict[str, float]  # group -> n_hg / n_h
    means: dict[str, float]  # group -> its mean
    common: float  # the median of `means`
    least: float
    most: float
    partial: bool  # whether a sample is neither 0 nor at an end of the range
    samples: int

    @property
    def others(self) -> set[str]:
        """The groups whose mean is not the common one."""
        return {name for name, mean in self.means.items() if abs(mean - self.common) > TOLERANCE}

    @property
    def alike(self) -> bool:
        """Whether more than half of the groups have the common mean."""
        return 2 * len(self.others) < len(self.means)


def _measure_spread(subtask: Values) -> _Spread:
    names, places, sizes = _number_groups(tuple(subtask.groups))
    values = np.asarray(subtask.values, float)
    order = np.lexsort((values, places))  # makes rounding independent of the order of samples
    sums = np.bincount(places[order], values[order])
    mean, means = math.fsum(subtask.values) / len(values), sums / sizes
    pull = math.sqrt(len(names) / max(len(names) - 1, 1)) * (sums - sizes * mean) / len(values)
    ordered = np.sort(means).tolist()
    return _Spread(
        mean=mean,
        pull=dict(zip(names, pull.tolist(), strict=True)),
        share=dict(zip(names, (sizes / len(values)).tolist(), strict=True)),
        means=dict(zip(names, means.tolist(), strict=True)),
        common=(ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2,
        least=subtask.least,
        most=subtask.most,
        partial=bool(((values != subtask.least) & (values != 0) & (values != subtask.most)).any()),
        samples=len(values),
    )


@lru_cache(maxsize=256)
def _number_groups(groups: tuple[str, ...]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the sorted names of groups, the number of each sample's group, and the sizes of the groups."""
    names, places = np.unique(np.array(groups, str), return_inverse=True)
    return names.tolist(), places, np.bincount(places)


def normalize_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return weights that sum to 1.

    Args:
        weights: Positive numbers. None stands for equal weights.
        count: Number of weights expected.

    Raises:
        ValueError: The number of weights is wrong, or one is not a number above 0.
    """
    weights = [1.0] * count if weights is None else list(weights)
    if len(weights) != count or count == 0:
        raise ValueError(f"{len(weights)} weights for {count} subtasks")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight} is not a number above 0")
    return [weight / math.fsum(weights) for weight in weights]


def weighted_mean(shares: Sequence[float], values: Sequence[float]) -> float:
    """Return Σ share · value for shares that sum to 1. The mean of equal values is exactly this value."""
    if len(values) > 1 and all(value == values[0] for value in values):
        return values[0]  # in floating point, 13 · (100 / 13) is not 100
    return math.fsum(share * value for share, value in zip(shares, values, strict=True))


def _needs_exact_bounds(parts: Sequence[_Spread]) -> bool:
    return all(part.alike for part in parts) and len(set().union(*(part.others for part in parts))) < FEW


def _exact_upper_bound(
    parts: Sequence[_Spread], shares: Sequence[float], leverage: Mapping[str, float], sign: int, tail: float
) -> float:
    """Return the exact upper bound of the mean, or of its negative if `sign` is -1."""
    commons = [sign * part.common for part in parts]
    mosts = [part.most if sign > 0 else -part.least for part in parts]
    above = {name for part in parts for name, mean in part.means.items() if sign * (mean - part.common) > TOLERANCE}
    gained = {name for name in above if any(sign * part.means.get(name, 0) > TOLERANCE for part in parts)}
    weight = len(leverage) * max(leverage.values())

    def moved(names: set[str]) -> float:
        return min(weight * _clopper_pearson_bound(len(names), len(leverage), tail), 1.0)

    high = weighted_mean(shares, commons) + moved(above) * max(max(common, 0) - common for common in commons)
    return high + moved(gained) * max(most - max(common, 0) for most, common in zip(mosts, commons, strict=True))


def _clopper_pearson_bound(count: int, trials: int, tail: float) -> float:
    """Return the upper Clopper–Pearson bound of a share, of which `count` in `trials` were observed."""
    return 1.0 if count >= trials else float(betaincinv(count + 1, trials - count, tail))


def _find_gaffke_reaches(problems: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], tail: float) -> list[float]:
    """Return the distance from each mean up to Gaffke's bound.

    Args:
        problems: What `_Draft.extend` returns of each mean.
        tail: As in `mean`.
    """
    reaches = [0.0] * len(problems)
    alike: dict[int, list[int]] = {}
    for place, (pulls, _, _) in enumerate(problems):
        alike.setdefault(len(pulls), []).append(place)
    for places in alike.values():
        step = max(1, AT_ONCE // max(1, len(problems[places[0]][0])))
        for start in range(0, len(places), step):
            some = places[start : start + step]
            pulls, sizes, room = (np.array([problems[place][at] for place in some]) for at in range(3))
            for place, reach in zip(some, _search_gaffke_reaches(pulls, sizes, room, tail).tolist(), strict=True):
                reaches[place] = reach
    return reaches


def _search_gaffke_reaches(pulls: np.ndarray, sizes: np.ndarray, room: np.ndarray, tail: float) -> np.ndarray:
    """Return the distances (N,) of N means, each of G groups. All arguments have the shape (N, G)."""
    count, groups = pulls.shape
    most: np.ndarray = (room / sizes).max(1)
    least = most * _clopper_pearson_bound(0, groups, tail)
    reach: np.ndarray = np.maximum(least, np.minimum(2 * np.sqrt((pulls**2).sum(1)), most / 2))
    reach[most <= 0] = 0.0
    last, moved = np.full(count, np.nan), np.full(count, np.nan)
    left = np.flatnonzero(most > 0)
    for step in range(STEPS):  # secant method on the logarithm of the chance; a step beyond `most` goes halfway instead
        if not left.size:
            break
        at, size, free, end = reach[left], sizes[left], room[left], most[left]
        each = np.arange(len(left))
        unseen = (free - at[:, None] * size).argmax(1)
        size = np.column_stack([size, size[each, unseen]])
        factors = np.column_stack([pulls[left], free[each, unseen]]) - at[:, None] * size
        chance, slopes = compute_chance_above_zero(factors)
        level = np.log(chance / (1 - tail))
        slope = -(slopes * size).sum(1) if step == 0 else (level - last[left]) / moved[left]
        go = np.divide(-level, slope, out=np.full(len(left), np.inf), where=slope < 0)
        go = np.where(at + go < end, go, (end - at) / 2)
        reach[left], last[left], moved[left] = at + go, level, go
        left = left[np.abs(go) >= CLOSE]
    return reach


def compute_chance_above_zero(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chance that Σ factor · E > 0 with independent standard exponentials E, and its logarithmic slopes.

    The chance is ∫ M(s) / s ds / 2πi along the line with real part c, where M(s) = Π 1 / (1 - factor · s) and
    0 < c < 1 / max factor. c is chosen near the saddle point, where the integrand is smallest along the real axis and
    falls off fast in both directions along the line. The slopes, by factor, are approximate.

    Args:
        factors: The factors of N sums, shape (N, G).

    Returns:
        Chances (N,) and slopes (N, G).
    """
    real = PLACES / factors.max(1)[:, None]
    sizes = -np.log1p(-real[:, :, None] * factors[:, None, :]).sum(2)
    best = np.arange(len(factors)), (sizes - np.log(real)).argmin(1)
    c = real[best][:, None]
    bent = factors / (1 - factors * c)
    width = 1 / np.sqrt((bent**2).sum(1, keepdims=True) + 1 / c**2)
    y = width * np.sinh(NODES)
    with np.errstate(over="ignore", invalid="ignore"):  # a product that overflows contributes 0
        product = np.prod(1 - 1j * (y[:, :, None] * bent[:, None, :]), axis=2) * (c + 1j * y)
        heights = np.where(np.isfinite(product), (1 / product).real, 0) * np.cosh(NODES)
    total = heights.sum(1) - heights[:, 0] / 2
    return width[:, 0] * (NODES[1] - NODES[0]) * total * np.exp(sizes[best]) / math.pi, c / (1 - factors * c)


def _degrees_of_freedom(parts: Sequence[_Spread], shares: Sequence[float]) -> float:
    """Return Welch–Satterthwaite's degrees of freedom."""
    variances = [
        (share**2 * math.fsum(pull**2 for pull in part.pull.values()), len(part.pull) - 1)
        for part, share in zip(parts, shares, strict=True)
    ]
    total = math.fsum(variance for variance, _ in variances)
    return total**2 / math.fsum(variance**2 / freedom for variance, freedom in variances)
