"""Find which pairs of many runs differ, without an interval for each pair (kvbench.analysis.intervals).

A class of k cells has k (k - 1) / 2 pairs. An interval takes about 5 ms, and most pairs are clear without it. What
enters an interval is linear in the scores, so the parts of a pair are differences of those of its two columns, and many
pairs are computed at once. With the t interval's reach t · error and a difference of the means d > 0:

    d < t · error                     no sign: no interval but one of exact binomial bounds is narrower than t's
    exact bounds, medians 0           no sign: both ends are then on their side of 0
    d > t · error, and P(d) < 1 - q   a sign, if partial scores ask for Gaffke's bound; otherwise at once
    P(d) > 1 - q                      no sign then

with the quantile q and Gaffke's chance P, which is computed at d alone. It is not computed where Chernoff's bound
min_c Π_g 1 / (1 - c f_g) is small enough, with P's factors f_g. What is left, and what lies within CLOSE of a bound,
gets its interval.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import stdtrit

from kvbench.analysis.intervals import BOUND, FEW, TOLERANCE, compute_chance_above_zero, normalize_weights

CLOSE = 1e-3  # points; a search for Gaffke's bound ends within a tenth of that
PLACES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])  # candidates for c, over its largest value
AT_ONCE = 1_000_000  # numbers of an array, which limits memory
SIDE = 512  # columns and rivals that are compared at once
SAME = 1e-3  # squared points: columns that differ by less at their partial scores count as equal there


class Columns:
    """The scores of several runs on the same samples.

    Args:
        scores: The scores of each subtask, shape (columns, samples).
        groups: The group of each sample, for each subtask.
        weights: The weight of each subtask.

    Raises:
        ValueError: The weights do not fit.
    """

    def __init__(self, scores: Sequence[np.ndarray], groups: Sequence[Sequence[str]], weights: Sequence[float]) -> None:
        shares = np.array(normalize_weights(weights, len(scores)))
        names = {name: at for at, name in enumerate(sorted({name for some in groups for name in some}))}
        self._scores = scores
        self._seen: list[np.ndarray] = []  # of each subtask, the places of its groups among all
        self._sums: list[np.ndarray] = []  # of each subtask, sample x group: 1 / samples of the group
        self._pulls: list[np.ndarray] = []  # of each subtask, column x group: share · u of intervals
        self._sizes = np.zeros((len(scores), len(names)))  # subtask x group: share · n_hg / n_h
        for at, (share, values, some) in enumerate(zip(shares, scores, groups, strict=True)):
            seen, place, sizes = np.unique([names[name] for name in some], return_inverse=True, return_counts=True)
            one_hot = np.zeros((len(some), len(seen)))
            one_hot[np.arange(len(some)), place] = 1
            factor = share * np.sqrt(len(seen) / max(len(seen) - 1, 1)) / len(some)
            self._seen.append(seen)
            self._sums.append(one_hot / sizes)
            self._pulls.append(factor * (values @ one_hot - sizes * values.mean(1)[:, None]))
            self._sizes[at, seen] = share * sizes / len(some)
        self._all_pulls = np.zeros((len(scores[0]), len(names)))
        for seen, pulls in zip(self._seen, self._pulls, strict=True):
            self._all_pulls[:, seen] += pulls
        self._means = np.column_stack([values.mean(1) for values in scores])
        self.values: np.ndarray = self._means @ shares
        counts = [len(seen) for seen in self._seen]
        self._fewest, self._freedom = min(counts), sum(counts) - len(counts)
        self._shared = sum(counts) > len(names)
        self._squares = (self._all_pulls**2).sum(1)
        every = np.hstack(scores)
        partial = ((every != 0) & (every != BOUND)).astype(float)
        # Σ over samples with a partial score of (a - b)², which is 0 where differences are 0 or at an end of the range
        self._partial = (partial, partial * every, (partial * every**2).sum(1), every)

    def bound_reach(self, rows: slice, columns: slice, tail: float) -> np.ndarray:
        """Return a lower bound of the distance from the mean difference of two columns to the ends of its interval.

        It is the t interval's reach with Σ (G_h - 1) degrees of freedom, the most that Welch and Satterthwaite's
        formula can give. It is 0 where the interval may come from exact binomial bounds, which may be narrower.

        Args:
            rows: Some columns.
            columns: The columns that these are compared with.
            tail: Quantile of the interval's ends.

        Returns:
            Bounds, shape (rows, columns).
        """
        squares = self._squares[rows, None] + self._squares[None, columns]
        if self._fewest < 2:
            return np.zeros_like(squares)
        error = squares - 2 * self._all_pulls[rows] @ self._all_pulls[columns].T
        reach: np.ndarray = stdtrit(self._freedom, tail) * np.sqrt(np.maximum(error - 1e-12 * squares, 0))
        return np.where(self._are_exact(rows, columns), 0.0, reach)

    def _are_exact(self, rows: slice, columns: slice) -> np.ndarray:
        """Return whether all differences of two columns may be 0 or at an end of the range, shape (rows, columns)."""

        def measure(one: slice, other: slice) -> np.ndarray:
            partial, scores, squares, every = self._partial
            crossed: np.ndarray = 2 * scores[one] @ every[other].T - partial[one] @ (every[other] ** 2).T
            far: np.ndarray = squares[one, None] - crossed
            return far

        return (measure(rows, columns) < SAME) & (measure(columns, rows).T < SAME)

    def list_rivals(self, tail: float, most: int) -> list[list[int]]:
        """Return the places of the columns that may be above each column, in order, as far as the first `most`.

        A rival has a higher mean. If its interval is not exact, it must also be above by the t interval alone.

        Args:
            tail: Quantile of the interval's ends.
            most: How many rivals of a column are looked for.
        """
        count = len(self.values)
        rivals: list[list[int]] = []
        for start in range(0, count, SIDE):
            rows = slice(start, start + SIDE)
            some: list[list[int]] = [[] for _ in self.values[rows]]
            for begin in range(0, count, SIDE):
                columns = slice(begin, begin + SIDE)
                beyond = self.values[None, columns] - self.values[rows, None]
                above = (beyond > TOLERANCE) & (beyond > self.bound_reach(rows, columns, tail) - TOLERANCE)
                for places, row in zip(some, above, strict=True):
                    places += (begin + np.flatnonzero(row)).tolist()
                if all(len(places) >= most for places in some):
                    break
            rivals += [places[:most] for places in some]
        return rivals

    def sign_pairs(self, tail: float) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield blocks of all pairs: places of the first and of the second columns, signs, and whether these are known.

        Args:
            tail: Quantile of the interval's ends.

        Yields:
            Four arrays (N,). The first column stands behind the second. A sign is -1, 0 or 1 if the interval of second
            minus first is below, around or above 0; it is 0 where it is not known yet.
        """
        first, second = np.tril_indices(len(self.values), -1)
        step = max(1, AT_ONCE // max(self._scores[0].shape[1], self._sizes.shape[1]) // len(PLACES))
        for start in range(0, len(first), step):
            one, other = first[start : start + step], second[start : start + step]
            yield one, other, *self._sign(one, other, tail)

    def _sign(self, one: np.ndarray, other: np.ndarray, tail: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the signs of other - one, and whether they are known."""
        signs, known = np.zeros(len(one), int), np.full(len(one), self._fewest < 2)
        if self._fewest < 2:
            return signs, known
        change = self.values[other] - self.values[one]
        sign, size = np.sign(change).astype(int), np.abs(change)
        reach, exact, none, partial = self._bound(one, other, tail)
        known |= np.where(exact, none, size < reach - CLOSE)
        clear = ~exact & (size > reach + CLOSE)
        asked = np.flatnonzero(clear & partial)
        clear[asked], known[asked] = self._ask_gaffke(one[asked], other[asked], sign[asked], size[asked], tail)
        return np.where(clear, sign, signs), known | clear

    def _bound(self, one: np.ndarray, other: np.ndarray, tail: float) -> tuple[np.ndarray, ...]:
        """Return of each pair (N,): the t interval's reach, and whether its interval comes from exact bounds.

        Beside these: whether exact bounds surely contain 0, and whether a difference is neither 0 nor at an end.
        """
        pulls = self._all_pulls[other] - self._all_pulls[one]
        error = np.sqrt((pulls**2).sum(1))
        total, spread = np.zeros(len(one)), np.zeros(len(one))
        differs = np.zeros(pulls.shape, bool)
        alike, zero, partial = np.ones(len(one), bool), np.ones(len(one), bool), np.zeros(len(one), bool)
        for scores, seen, sums, own_pulls in zip(self._scores, self._seen, self._sums, self._pulls, strict=True):
            variance = ((own_pulls[other] - own_pulls[one]) ** 2).sum(1)
            total += variance
            spread += variance**2 / (len(seen) - 1)
            change = scores[other] - scores[one]
            partial |= ((change != 0) & (np.abs(change) != BOUND)).any(1)
            means = change @ sums
            common = np.median(means, axis=1)
            others = np.abs(means - common[:, None]) > TOLERANCE
            alike &= 2 * others.sum(1) < len(seen)
            zero &= common == 0
            differs[:, seen] |= others
        exact = ~partial & alike & (differs.sum(1) < FEW)
        welch = np.divide(total**2, spread, out=np.ones(len(one)), where=spread > 0)
        freedom = np.full(len(one), self._fewest - 1.0) if self._shared else welch
        return stdtrit(freedom, tail) * error, exact, exact & zero, partial

    def _ask_gaffke(
        self, one: np.ndarray, other: np.ndarray, sign: np.ndarray, size: np.ndarray, tail: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each difference, of this sign and size, is surely beyond Gaffke's bound, or surely within."""
        pulls = -sign[:, None] * (self._all_pulls[other] - self._all_pulls[one])
        sizes = self._sizes.sum(0)
        room = (sign[:, None] * (self._means[other] - self._means[one]) + BOUND) @ self._sizes

        def make_factors(reach: np.ndarray) -> np.ndarray:
            moved = reach[:, None] * sizes
            return np.column_stack([pulls - moved, (room - moved).max(1)])

        factors = make_factors(size - CLOSE)
        most = np.maximum(factors.max(1), 1e-12)[:, None]
        beyond = np.min([-np.log1p(-place * factors / most).sum(1) for place in PLACES], axis=0) < np.log(1 - tail)
        within = np.zeros(len(one), bool)
        left = np.flatnonzero(~beyond)
        if left.size:
            beyond[left] = compute_chance_above_zero(factors[left])[0] < 1 - tail
            within[left] = compute_chance_above_zero(make_factors(size + CLOSE)[left])[0] > 1 - tail
        return beyond, within
