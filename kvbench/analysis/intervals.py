"""The mean of clustered samples with its standard error and 95 % interval: the one formula of all tables.

The unit is a sample; samples that share a context are one group, and groups are what was drawn. x_i are the scores of
one run or the differences method_i − full_i of two (kvbench.analysis.paired), in points. Subtask h has the mean
x̄_h of its n_h samples in G_h groups; a mean of several subtasks is Σ_h w_h x̄_h with Σ_h w_h = 1 (w_h = 1/k where no
weights are given: each weighing the same). With

    u_hg = √(G_h / (G_h − 1)) · Σ_{i∈g} (x_i − x̄_h) / n_h,    v_h = Σ_g u_hg²,    error² = Σ_g (Σ_h w_h u_hg)²

this is the cluster-robust variance CR1 of a mean (Cameron & Miller 2015, "A Practitioner's Guide to Cluster-Robust
Inference"; for evaluations Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640) and, with no group in two
subtasks, the stratified Σ_h w_h² v_h. The interval is the mean ± t · error, cut to what is possible, with G − 1 degrees
of freedom for one subtask and Welch–Satterthwaite's (Σ w_h² v_h)² / Σ(w_h⁴ v_h² / (G_h − 1)) for several (the least
G_h − 1 if they share groups).

Right-or-wrong scores. Where 5 of 5 or 200 of 200 samples score the same, error is 0, and "0 ± 0" would be a lie: five
samples say little about the rest (Bowyer et al. 2025, "Don't Use the CLT in LLM Evals With Fewer Than a Few Hundred
Datapoints", arXiv 2503.01747). So where every sample scores 0 or lies at an end of the range (differences of -100, 0 or
100), more than half the groups have one and the same mean c (difference 0, mostly) and fewer than six another, the
interval comes from exact binomial bounds. Of b among G groups that show something, U(b, G) bounds the share of all
groups that do: the upper Clopper–Pearson bound at 97.5 % (Clopper & Pearson 1934; for b = 0 it is 1 − 0.025^(1/G), the
two-sided "rule of three", Hanley & Lippman-Hand 1983). With no group beyond `most`,

    high = c + U(#x > c, G) (c⁺ − c) + U(#x > c⁺, G) (most − c⁺)    with c⁺ = max(c, 0); low is its mirror image

and for differences at c = 0 these are 100 · U(groups that gained) and −100 · U(groups that lost). Five samples without
any difference give ±52 points, 50 give ±7.1, 500 give ±0.7. Six is the fewest differing pairs with which the exact sign
test can reject at 5 % (2 · 2⁻⁶ = 0.031). For several subtasks groups weigh c_g = Σ_{h∋g} w_h / G_h, so what shows in b
of all G groups moves the mean by at most U(b, G) · G · max_g c_g: a sum of binomials with unequal shares spreads less
than the pooled one (Hoeffding 1956). The bounds are exact for groups of one size.

Partial scores (F1, ROUGE, two of four needles: some sample lies between those values). The t interval knows only the
spread that was seen. If 5 % of the samples collapse, 36 % of all draws of 20 samples contain no collapse, and their t
interval misses the mean. So the interval also covers Gaffke's bound, which adds one unseen group that scores as high
(for the lower end, as low) as is possible (Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis
on the mean of a nonnegative variable"; Learned-Miller & Thomas 2020, "A New Confidence Interval for the Mean of a
Bounded Random Variable", arXiv 1905.06208). For samples x_1 … x_n of one subtask, a group each, the upper end is the
97.5 % point of D_0 · most + Σ_i D_i x_i over weights D from a flat Dirichlet distribution. In general it is the mean
plus the t that solves

    P( E_0 max_g (r_g − t s_g) + Σ_g E_g (Σ_h w_h u_hg − t s_g) > 0 ) = 0.025
    s_g = Σ_h w_h n_hg / n_h,    r_g = Σ_h w_h (most_h − x̄_h) n_hg / n_h

with independent standard exponentials E and n_hg samples of subtask h in group g: the unseen group is like one of those
that were seen, whichever moves the mean most. This is computed, not simulated, so nothing is random and the order of
samples does not matter. For two-valued scores the bound is Clopper and Pearson's; five differences near 0 therefore
give ±52 like five zeros. For one subtask with groups of one size it holds for every distribution and every n (Vlassis &
Thomas 2026, "An Exact Distribution-Free Test for Means of Nonnegative Random Variables", arXiv 2607.08415, prove
Gaffke's conjecture; √(G_h / (G_h − 1)) in u only widens it). For several subtasks and groups of unequal size the tests
simulate it. Betting intervals (Waudby-Smith & Ramdas 2024) have the same guarantee, but Markov's inequality makes them
1.4 times as wide for many samples. Half the width of a difference's interval, in points, for normal differences of mean
-5 and standard deviation s, and what the t interval alone would be:

    s     n = 5        10           20           50          100         200         500
    0.3   52.2 (0.4)   30.9 (0.2)   16.8 (0.1)   7.1 (0.1)   3.6 (0.1)   1.8 (0.0)   0.7 (0.0)
    5     52.2 (6.1)   30.9 (3.5)   16.9 (2.3)   7.2 (1.4)   3.7 (1.0)   2.0 (0.7)   0.9 (0.4)
    15    52.7 (18.2)  31.6 (10.6)  17.8 (7.0)   8.2 (4.3)   4.7 (3.0)   2.9 (2.1)   1.6 (1.3)
    30    54.4 (36.5)  34.2 (21.2)  20.8 (14.0)  11.1 (8.5)  7.2 (5.9)   4.8 (4.2)   2.9 (2.6)

The price is coverage near 100 % for smooth scores. Values without an end (tokens) have the t interval alone, and none
where fewer than six groups differ.

Coverage, asserted in tests/test_statistics.py: for partial scores at least 95 % at n = 5 to 500 where 2 to 10 % of
samples or contexts lose (or gain) 30 to 100 points and the others differ little or not at all, for one subtask and for
averages. The t interval alone: 93 to 97 % from 20 groups on for smooth scores, single or clustered, of one run or of
two, weighted or not. For right-or-wrong scores 93 to 97 % at n = 100, 200 and 500 where 20 to 80 % of right answers are
lost (or right), and at least 96 % at n = 5 to 100 where at most 10 % are. Elsewhere the counts are coarse: nowhere
below 91 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, stdtrit

FEW = 6  # groups that differ, below which the exact bounds are used
BOUND = 100.0  # scores are in [0, BOUND], differences in [-BOUND, BOUND]
TAIL = 0.975  # a 95 % interval, two-sided
TOLERANCE = 1e-9  # points: rounding of means
NODES = 0.1 * np.arange(48)  # of the integral in _chance_above_zero
PLACES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])  # where its line may lie
STEPS, CLOSE = 40, 1e-4  # points


@dataclass(frozen=True)
class Values:
    """One subtask's samples: a number each, in [least, most] (infinite: not bounded), and their groups."""

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


@dataclass(frozen=True)
class Mean:
    """A mean with its CR1 standard error and 95 % interval.

    These are None where some subtask has one group only: one context says nothing about others. `low` and `high` also
    where too few groups differ and values are not bounded.
    """

    value: float
    low: float | None
    high: float | None
    error: float | None
    samples: int
    groups: int


def mean(subtasks: Sequence[Values], weights: Sequence[float] | None = None) -> Mean:
    """The weighted mean over subtasks, whatever the order of samples, to the bit; None: each weighing the same."""
    parts, shares = list(map(_measure_spread, subtasks)), normalize_weights(weights, len(subtasks))
    value = weighted_mean(shares, [part.mean for part in parts])
    leverage: dict[str, float] = {}
    for share, part in zip(shares, parts, strict=True):
        for name in part.pull:
            leverage[name] = leverage.get(name, 0.0) + share / len(part.pull)
    low = high = error = None
    fewest = min(len(part.pull) for part in parts)
    if fewest > 1:
        pulls = [weighted_mean(shares, [part.pull.get(name, 0.0) for part in parts]) for name in sorted(leverage)]
        error = math.sqrt(math.fsum(pull**2 for pull in pulls))
        partial = any(part.partial for part in parts) and all(math.isfinite(part.most) for part in parts)
        if _needs_exact_bounds(parts) and not partial:
            low, high = -_exact_upper_bound(parts, shares, leverage, -1), _exact_upper_bound(parts, shares, leverage, 1)
        else:
            shared = sum(len(part.pull) for part in parts) > len(leverage)
            reach = (
                stdtrit(fewest - 1 if shared else _degrees_of_freedom(parts, shares), TAIL) * error if error else 0.0
            )
            low, high = value - reach, value + reach
            if partial:
                names = sorted(leverage)
                low = min(low, value - _gaffke_reach(parts, shares, dict(zip(names, pulls, strict=True)), -1))
                high = max(high, value + _gaffke_reach(parts, shares, dict(zip(names, pulls, strict=True)), 1))
        low = max(min(low, value), weighted_mean(shares, [own.least for own in subtasks]))
        high = min(max(high, value), weighted_mean(shares, [own.most for own in subtasks]))
        if not (math.isfinite(low) and math.isfinite(high)):
            low = high = None
    return Mean(value, low, high, error, sum(len(own.values) for own in subtasks), len(leverage))


def needs_exact_bounds(subtasks: Sequence[Values]) -> bool:
    """Whether so few groups differ that the interval of `mean` comes from exact bounds."""
    return _needs_exact_bounds(list(map(_measure_spread, subtasks)))


@dataclass(frozen=True)
class _Spread:
    """What a subtask adds to an interval."""

    mean: float
    pull: dict[str, float]  # group -> u_hg
    share: dict[str, float]  # group -> n_hg / n_h
    means: dict[str, float]  # group -> its mean
    common: float  # the median of these
    least: float
    most: float
    partial: bool  # whether a sample is neither at an end nor 0

    @property
    def others(self) -> set[str]:
        """The groups whose mean is not the common one."""
        return {name for name, mean in self.means.items() if abs(mean - self.common) > TOLERANCE}

    @property
    def alike(self) -> bool:
        """Whether more than half the groups have the common mean."""
        return 2 * len(self.others) < len(self.means)


def _measure_spread(own: Values) -> _Spread:
    values, groups = np.asarray(own.values, float), np.asarray(own.groups, str)
    order = np.lexsort((values, groups))  # so that rounding does not follow the order of samples
    values = values[order]
    names, places = np.unique(groups[order], return_inverse=True)
    names, sizes, sums = names.tolist(), np.bincount(places), np.bincount(places, values)
    mean = math.fsum(values) / len(values)
    pull = math.sqrt(len(names) / max(len(names) - 1, 1)) * (sums - sizes * mean) / len(values)
    return _Spread(
        mean=mean,
        pull=dict(zip(names, pull.tolist(), strict=True)),
        share=dict(zip(names, (sizes / len(values)).tolist(), strict=True)),
        means=dict(zip(names, (sums / sizes).tolist(), strict=True)),
        common=float(np.median(sums / sizes)),
        least=own.least,
        most=own.most,
        partial=bool((~np.isin(values, (own.least, 0, own.most))).any()),
    )


def normalize_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Weights that sum to 1; None: alike. ValueError for what is no weight."""
    weights = [1.0] * count if weights is None else list(weights)
    if len(weights) != count or count == 0:
        raise ValueError(f"{len(weights)} weights for {count} subtasks")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight {weight} is not a number above 0")
    return [weight / math.fsum(weights) for weight in weights]


def weighted_mean(shares: Sequence[float], values: Sequence[float]) -> float:
    """Σ share · value; `shares` sum to 1."""
    if len(values) > 1 and all(value == values[0] for value in values):
        return values[0]  # 13 · (100 / 13) is not 100
    return math.fsum(share * value for share, value in zip(shares, values, strict=True))


def _needs_exact_bounds(parts: Sequence[_Spread]) -> bool:
    return all(part.alike for part in parts) and len(set().union(*(part.others for part in parts))) < FEW


def _exact_upper_bound(
    parts: Sequence[_Spread], shares: Sequence[float], leverage: Mapping[str, float], sign: int
) -> float:
    """The exact upper bound of the mean, or with sign -1 of its negative."""
    commons = [sign * part.common for part in parts]
    mosts = [part.most if sign > 0 else -part.least for part in parts]
    above = {name for part in parts for name, mean in part.means.items() if sign * (mean - part.common) > TOLERANCE}
    gained = {name for name in above if any(sign * part.means.get(name, 0) > TOLERANCE for part in parts)}
    weight = len(leverage) * max(leverage.values())

    def moved(names: set[str]) -> float:
        return min(weight * _clopper_pearson_bound(len(names), len(leverage)), 1.0)

    high = weighted_mean(shares, commons) + moved(above) * max(max(common, 0) - common for common in commons)
    return high + moved(gained) * max(most - max(common, 0) for most, common in zip(mosts, commons, strict=True))


def _clopper_pearson_bound(count: int, trials: int) -> float:
    """Upper Clopper–Pearson bound, 97.5 %, of a share of which `count` of `trials` were seen."""
    return 1.0 if count >= trials else float(betaincinv(count + 1, trials - count, TAIL))


def _gaffke_reach(parts: Sequence[_Spread], shares: Sequence[float], pulls: Mapping[str, float], sign: int) -> float:
    """How far above the mean, or with sign -1 below it, Gaffke's bound lies; `pulls`: what groups add to the error."""
    place = {name: at for at, name in enumerate(pulls)}
    own, sizes, room = sign * np.array(list(pulls.values())), np.zeros(len(pulls)), np.zeros(len(pulls))
    for share, part in zip(shares, parts, strict=True):
        at = [place[name] for name in part.share]
        size = share * np.array(list(part.share.values()))
        sizes[at] += size
        room[at] += size * (part.most - part.mean if sign > 0 else part.mean - part.least)
    most = float((room / sizes).max())
    if most <= 0:
        return 0.0
    reach = max(most * _clopper_pearson_bound(0, len(pulls)), min(2 * math.sqrt((own**2).sum()), most / 2))
    last, moved = None, math.nan
    for _ in range(STEPS):  # of the secant method, on the chance's logarithm; halfway to `most` instead of beyond it
        unseen = int((room - reach * sizes).argmax())
        chance, slopes = _chance_above_zero(np.append(own - reach * sizes, room[unseen] - reach * sizes[unseen]))
        level = math.log(chance / (1 - TAIL))
        slope = -float(slopes @ np.append(sizes, sizes[unseen])) if last is None else (level - last) / moved
        moved = -level / slope if slope < 0 else math.inf
        moved = moved if reach + moved < most else (most - reach) / 2
        reach, last = reach + moved, level
        if abs(moved) < CLOSE:
            break
    return reach


def _chance_above_zero(factors: np.ndarray) -> tuple[float, np.ndarray]:
    """The chance that Σ factor · E is above 0, the E being independent standard exponentials; how its logarithm grows
    with each factor, about.

    It is ∫ M(s) / s ds / 2πi along the line of real part c, with M(s) = Π 1 / (1 - factor · s) and 0 < c < 1 / max
    factor: least along the real axis near c, it falls off fast on both sides of it (a saddle point).
    """
    real = PLACES / factors.max()
    sizes = -np.log1p(-np.outer(real, factors)).sum(1)
    best = int((sizes - np.log(real)).argmin())
    c = real[best]
    bent = factors / (1 - factors * c)
    width = 1 / math.sqrt((bent**2).sum() + 1 / c**2)
    y = width * np.sinh(NODES)
    with np.errstate(over="ignore", invalid="ignore"):  # a product beyond the largest number adds nothing
        product = np.prod(1 - 1j * np.outer(y, bent), axis=1) * (c + 1j * y)
        heights = np.where(np.isfinite(product), (1 / product).real, 0) * np.cosh(NODES)
    chance = width * (NODES[1] - NODES[0]) * (heights.sum() - heights[0] / 2) * math.exp(sizes[best]) / math.pi
    return chance, c / (1 - factors * c)


def _degrees_of_freedom(parts: Sequence[_Spread], shares: Sequence[float]) -> float:
    """Welch–Satterthwaite's degrees of freedom."""
    variances = [
        (share**2 * math.fsum(pull**2 for pull in part.pull.values()), len(part.pull) - 1)
        for part, share in zip(parts, shares, strict=True)
    ]
    total = math.fsum(variance for variance, _ in variances)
    return total**2 / math.fsum(variance**2 / freedom for variance, freedom in variances)
