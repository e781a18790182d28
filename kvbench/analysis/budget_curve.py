"""Summarise score against kept share: the area under the curve, and the smallest share that keeps most of the score.

A curve has budgets b = 1 … B, measured on the same samples as the full cache. Each budget has a kept share x_b (the
measured mean, not the requested budget) and a score y_b. Both are weighted means over subtasks. Between two budgets the
curve is a straight line.

    area     = 1/(β − α) ∫_α^β y dx: the mean score in points over kept shares from α to β (trapezoid rule)
    smallest = the share from which on y ≥ 0.95 · y_full, at all larger measured shares too; −∞ if all measured budgets
               reach this score, ∞ if the largest budget does not

Neither has a closed form for the interval, because kept shares vary between samples. Intervals therefore come from a
seeded cluster bootstrap. It draws groups (contexts) with replacement, for all budgets and the full cache together;
subtasks that share groups are drawn together. It draws G − 1 of G groups, which makes the variance of a mean unbiased
(Rao & Wu 1988, "Resampling Inference With Complex Survey Data"). The percentiles are Φ(∓ t_{0.975, Σ(G−1)}), with
Student's t, because plain percentile intervals of few groups are too narrow (Hesterberg 2015, "What Teachers Should
Know About the Bootstrap"). A replicate whose smallest share lies outside the measured range counts as −∞ or ∞, so the
interval of the smallest share is censored.

If fewer than six groups differ, or there are fewer than 20 groups, a bootstrap underestimates the spread. The interval
then also covers a bound from kvbench.analysis.intervals. For the area at fixed shares, this is the interval of a mean
over samples of Σ_b ω_b y_ib. For the smallest share, it is where the bounds of y_b − y_full cross −0.05 · y_full.

tests/analysis/test_budget_curve.py asserts a coverage of 93 to 97 % from 20 groups on, for clustered partial scores.
The coverage is lower for scores that hardly differ except for rare collapses, because a bootstrap only redraws what was
observed. If 5 % of the samples lose 90 points, the area's difference from the full cache has a coverage of about 59 %
with 20 groups, 89 % with 50 and 94 % with 200. The intervals of the scores themselves (kvbench.analysis.intervals)
allow for unseen collapses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr, stdtrit

from kvbench.analysis.intervals import BOUND, TAIL, TOLERANCE, Values, compute_means, needs_exact_bounds

REPLICATES = 4000  # of the bootstrap
SEED = 0  # of the bootstrap
KEEP = 0.95  # share of the full cache's score that counts as kept
BEYOND = 0.005  # a range may exceed the measured shares by this much, because a budget of 0.3 keeps 0.2995
ENOUGH = 20  # number of groups from which on the bootstrap's coverage was tested
AT_ONCE = 4_000_000  # counts drawn at a time, which limits memory


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval.

    Attributes:
        value: The number; infinite if it lies outside the measured range.
        low: Lower end; None if a subtask has only one group.
        high: Upper end; None if a subtask has only one group.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """The scores and kept shares of N samples at B budgets and with the full cache.

    The order of samples does not matter.

    Args:
        scores: Scores in points of [0, 100], shape (N, B).
        shares: Kept share of the full cache, 1 for all of it, shape (N, B).
        full: Scores with the full cache, shape (N,).
        subtasks: Subtask of each sample.
        groups: Group (context) of each sample.
        weights: Positive weight of each subtask, for exactly the subtasks of the samples.
        times: Number of bootstrap replicates.

    Raises:
        ValueError: Shapes, scores, shares or weights do not fit this description.
    """

    scores: np.ndarray
    shares: np.ndarray
    full: np.ndarray
    subtasks: Sequence[str]
    groups: Sequence[str]
    weights: Mapping[str, float]
    times: int = REPLICATES

    def __post_init__(self) -> None:
        count, budgets = np.shape(self.scores) if np.ndim(self.scores) == 2 else (0, 0)
        if not (count and budgets and np.shape(self.shares) == (count, budgets) and np.shape(self.full) == (count,)):
            raise ValueError(
                "scores and shares need the shape (samples, budgets), the full cache's scores the shape (samples,)"
            )
        if not len(self.subtasks) == len(self.groups) == count:
            raise ValueError(f"{count} samples, {len(self.subtasks)} subtasks, {len(self.groups)} groups")
        scores = np.column_stack([self.scores, self.full])
        if not ((scores >= 0) & (scores <= BOUND)).all():
            raise ValueError(f"a score is not in [0, {BOUND:g}]")
        if not (np.isfinite(self.shares).all() and np.min(self.shares) >= 0):
            raise ValueError("a kept share is not a number of 0 or more")
        if set(self.weights) != set(self.subtasks):
            raise ValueError(f"weights are for {sorted(self.weights)}, subtasks are {sorted(set(self.subtasks))}")
        if not all(np.isfinite(weight) and weight > 0 for weight in self.weights.values()):
            raise ValueError("a weight is not a number above 0")

    @cached_property
    def points(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean kept shares (B,), mean scores (B,) and the full cache's mean score."""
        shares, scores, full = self._average_draws([np.ones((1, len(counts))) for _, counts in self._clusters])
        return shares[0], scores[0], float(full[0])

    def area(self, low: float, high: float) -> Estimate:
        """Return the mean score in points over kept shares from `low` to `high`.

        Raises:
            ValueError: The range is empty or was not measured.
        """
        values = self._values(self._weigh_scores(low, high), 0.0)
        return self._estimate(lambda x, y, full: compute_area(x, y, low, high), self._exact_bounds([values]))

    def area_change(self, low: float, high: float) -> Estimate:
        """Return the area minus the full cache's score, in points.

        Raises:
            ValueError: The range is empty or was not measured.
        """
        values = self._values(self._weigh_scores(low, high) - self.full, -BOUND)
        return self._estimate(lambda x, y, full: compute_area(x, y, low, high) - full, self._exact_bounds([values]))

    def smallest(self, keep: float = KEEP, tail: float = TAIL) -> Estimate:
        """Return the smallest kept share that still reaches `keep` times the full cache's score.

        Args:
            keep: Share of the full cache's score that counts as kept.
            tail: Quantile of the interval's ends (`kvbench.analysis.intervals.mean`). Beyond 1 − 1 / `times`, they are
                the least and the greatest replicate, which is too narrow for such a level.

        Raises:
            ValueError: The full cache scores 0.
        """
        shares, _, full = self.points
        if full <= TOLERANCE:
            raise ValueError("the full cache scores 0: there is nothing to keep")
        columns = [self._values(scores - self.full, -BOUND) for scores in np.transpose(self.scores)]
        bounds = self._exact_bounds(columns, tail)
        if bounds is not None:  # the upper bounds of the scores give the lower bound of the share
            bounds = [find_smallest_share(shares, edge, (keep - 1) * full) for edge in (bounds[1], bounds[0])]
        return self._estimate(lambda x, y, full: find_smallest_share(x, y, keep * full), bounds, tail)

    @cached_property
    def _names(self) -> list[str]:
        return sorted(set(self.subtasks))

    @cached_property
    def _weights(self) -> np.ndarray:
        weights = np.array([self.weights[name] for name in self._names])
        shares: np.ndarray = weights / weights.sum()
        return shares

    @cached_property
    def _clusters(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Sums (G, H, 2B + 1) and counts (G, H) of G groups and H subtasks, for each set of groups with own subtasks.

        Two sets have no subtask in common, so the bootstrap can draw them independently.
        """
        columns = np.column_stack([self.shares, self.scores, self.full])
        order = np.lexsort((*columns.T, self.groups, self.subtasks))  # rounding then ignores the order of samples
        subtasks = np.unique(np.asarray(self.subtasks, str), return_inverse=True)[1][order]
        names, groups = np.unique(np.asarray(self.groups, str)[order], return_inverse=True)
        sums = np.zeros((len(names), len(self._names), columns.shape[1]))
        counts = np.zeros(sums.shape[:2])
        np.add.at(sums, (groups, subtasks), columns[order])
        np.add.at(counts, (groups, subtasks), 1)
        clusters, left = [], np.ones(len(names), bool)
        while left.any():
            inside: np.ndarray = np.zeros(len(names), bool)
            inside[np.argmax(left)] = True
            while (more := np.any(counts[:, np.any(counts[inside], 0)], 1)).sum() > inside.sum():
                inside = more
            clusters.append((sums[inside], counts[inside]))
            left &= ~inside
        return clusters

    def _average_draws(self, drawn: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean shares (R, B), mean scores (R, B) and the full cache's mean score (R,) of R draws.

        `drawn` holds an array (R, G) for each of `_clusters`: how often each group counts.
        """
        budgets = np.shape(self.scores)[1]
        total = np.zeros((len(drawn[0]), 2 * budgets + 1))
        for (sums, counts), often in zip(self._clusters, drawn, strict=True):
            subtasks = counts.any(0)
            means = np.tensordot(often, sums[:, subtasks], 1) / (often @ counts[:, subtasks])[..., None]
            total += np.tensordot(self._weights[subtasks], means, (0, 1))
        return total[:, :budgets], total[:, budgets:-1], total[:, -1]

    @cached_property
    def _replicates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        if any((counts > 0).sum(0)[counts.any(0)].min() < 2 for _, counts in self._clusters):
            return None
        draw = np.random.default_rng(SEED)
        step = max(1, AT_ONCE // sum(len(counts) for _, counts in self._clusters))
        parts = []
        for start in range(0, self.times, step):
            count = min(step, self.times - start)
            parts.append(self._average_draws([_draw_groups(draw, counts, count) for _, counts in self._clusters]))
        shares, scores, full = map(np.concatenate, zip(*parts, strict=True))
        return shares, scores, full

    def _estimate(
        self, of: Callable[..., np.ndarray], bounds: Sequence[np.ndarray] | None, tail: float = TAIL
    ) -> Estimate:
        shares, scores, full = self.points
        value = float(of(shares, scores, full))
        if self._replicates is None:
            return Estimate(value, None, None)
        resampled = of(*self._replicates)
        cut = ndtr(-stdtrit(sum(len(counts) - 1 for _, counts in self._clusters), tail))
        low, high = np.quantile(resampled, cut, method="lower"), np.quantile(resampled, 1 - cut, method="higher")
        if bounds is not None:
            low, high = min(low, *np.ravel(bounds[0])), max(high, *np.ravel(bounds[1]))
        low, high = min(low, value), max(high, value)
        return Estimate(value, float(low), float(high))

    def _weigh_scores(self, low: float, high: float) -> np.ndarray:
        """Return Σ_b ω_b y_ib (N,), each sample's part of the area at fixed shares."""
        shares, _, _ = self.points
        if not (np.isfinite([low, high]).all() and low < high):
            raise ValueError(f"the range from {low:g} to {high:g} is empty or not finite")
        if len(shares) < 2 or shares.min() > low + BEYOND or shares.max() < high - BEYOND:
            raise ValueError(f"measured from {shares.min():.4f} to {shares.max():.4f}, not from {low:g} to {high:g}")
        unit = np.eye(len(shares))
        parts: np.ndarray = np.asarray(self.scores) @ compute_area(np.broadcast_to(shares, unit.shape), unit, low, high)
        return parts

    def _values(self, values: np.ndarray, least: float) -> list[Values]:
        """Return the values of each subtask, in the order of `_names`."""
        values, subtasks, groups = np.clip(values, least, BOUND), np.asarray(self.subtasks), np.asarray(self.groups)
        masks = [subtasks == name for name in self._names]
        return [Values(values[one].tolist(), groups[one].tolist(), least, BOUND) for one in masks]

    def _exact_bounds(self, columns: Sequence[Sequence[Values]], tail: float = TAIL) -> list[np.ndarray] | None:
        """Return lower and upper bounds of the columns' means if a bootstrap would be too narrow, otherwise None."""
        enough = sum(len(counts) for _, counts in self._clusters) >= ENOUGH
        if self._replicates is None or enough and not any(map(needs_exact_bounds, columns)):
            return None
        means = compute_means([(column, self._weights.tolist()) for column in columns], tail)
        return [np.array([mean.low for mean in means]), np.array([mean.high for mean in means])]


def compute_area(shares: np.ndarray, scores: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the mean height of a piecewise linear curve between two shares.

    The curve is constant outside its points.

    Args:
        shares: Abscissas of the points, shape (..., B), in any order.
        scores: Heights of the points, shape (..., B).
        low: Left end.
        high: Right end.

    Returns:
        Mean heights, shape (...).
    """
    order = np.argsort(shares, axis=-1, kind="stable")
    x, y = np.take_along_axis(shares, order, -1), np.take_along_axis(scores, order, -1)
    left, right = np.clip(x[..., :-1], low, high), np.clip(x[..., 1:], low, high)
    run = np.diff(x, axis=-1)
    slope = np.divide(np.diff(y, axis=-1), run, out=np.zeros_like(run), where=run > 0)
    middle = y[..., :-1] + slope * ((left + right) / 2 - x[..., :-1])
    inside = ((right - left) * middle).sum(-1)
    before, after = np.clip(x[..., 0], low, high) - low, high - np.clip(x[..., -1], low, high)
    area: np.ndarray = (inside + before * y[..., 0] + after * y[..., -1]) / (high - low)
    return area


def find_smallest_share(shares: np.ndarray, scores: np.ndarray, needed: np.ndarray | float) -> np.ndarray:
    """Return the share from which on a piecewise linear curve stays at or above a height.

    Args:
        shares: Abscissas of the points, shape (..., B), in any order.
        scores: Heights of the points, shape (..., B).
        needed: The height, shape (...).

    Returns:
        Shares, shape (...): −∞ if all points are high enough, ∞ if the last point is not.
    """
    order = np.argsort(shares, axis=-1, kind="stable")
    x, y = np.take_along_axis(shares, order, -1), np.take_along_axis(scores, order, -1)
    short = y < np.expand_dims(needed, -1) - TOLERANCE
    count = short.shape[-1]
    last = count - 1 - np.argmax(short[..., ::-1], axis=-1)  # the last budget that falls short, if any does
    both = [np.minimum(last + step, count - 1)[..., None] for step in (0, 1)]
    (x0, x1), (y0, y1) = ([np.take_along_axis(values, at, -1)[..., 0] for at in both] for values in (x, y))
    rise = y1 - y0
    crossing = x0 + (x1 - x0) * np.divide(needed - y0, rise, out=np.ones_like(rise), where=rise > 0)
    smallest = np.where(last == count - 1, np.inf, np.minimum(crossing, x1))
    return np.where(short.any(-1), smallest, -np.inf)


def _draw_groups(draw: np.random.Generator, counts: np.ndarray, times: int) -> np.ndarray:
    """Draw G − 1 of G groups with replacement, `times` times, and return how often each was drawn (times, G).

    A draw that leaves out a subtask is repeated.
    """
    groups = len(counts)
    often = draw.multinomial(groups - 1, np.full(groups, 1 / groups), size=times).astype(float)
    has_samples = (counts[:, counts.any(0)] > 0).astype(float)
    while (empty := ((often @ has_samples) == 0).any(1)).any():
        often[empty] = draw.multinomial(groups - 1, np.full(groups, 1 / groups), size=int(empty.sum()))
    return often
