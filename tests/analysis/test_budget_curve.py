"""Area and smallest share: worked examples, what they refuse, and how often their intervals hold the truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.analysis.budget_curve import Curve, compute_area, find_smallest_share
from tests.support.selection import only_in_full

X = np.array([0.05, 0.1, 0.2, 0.4])


def curve(scores, full=100.0, shares=X, groups=None, subtasks=None, weights=None, times=300) -> Curve:
    """Rows of scores by sample; one subtask and a group each where nothing else is said."""
    scores = np.asarray(scores, float)
    count = len(scores)
    return Curve(
        scores=scores,
        shares=np.broadcast_to(shares, scores.shape),
        full=np.broadcast_to(full, count).astype(float),
        subtasks=subtasks or ["vt"] * count,
        groups=groups or [str(place) for place in range(count)],
        weights=weights or {"vt": 1.0},
        times=times,
    )


def test_the_area_is_the_mean_height_of_the_lines():
    # from 0.05 to 0.4: 0.05 · 30 + 0.1 · 60 + 0.2 · 85 = 24.5 over 0.35
    y = np.array([20.0, 40, 80, 90])
    assert compute_area(X, y, 0.05, 0.4) == pytest.approx(24.5 / 0.35)
    # from 0.075 (30) to 0.3 (85): 0.025 · 35 + 0.1 · 60 + 0.1 · 82.5
    assert compute_area(X, y, 0.075, 0.3) == pytest.approx((0.875 + 6 + 8.25) / 0.225)
    assert compute_area(X[::-1], y[::-1], 0.075, 0.3) == pytest.approx(compute_area(X, y, 0.075, 0.3))
    assert compute_area(X, y, 0.12, 0.15) == pytest.approx(40 + 0.035 / 0.1 * 40)  # inside one line
    assert compute_area(X, np.full(4, 7.0), 0.06, 0.3) == pytest.approx(7)
    assert compute_area(X, y, 0.04, 0.05) == pytest.approx(20)  # level beyond the last point
    # two at one share
    assert compute_area(np.array([0.1, 0.1, 0.3]), np.array([10.0, 30, 50]), 0.1, 0.3) == pytest.approx(40)
    both = compute_area(np.stack([X, X]), np.stack([y, y / 2]), 0.075, 0.3)
    assert both == pytest.approx(compute_area(X, y, 0.075, 0.3) * np.array([1, 0.5]))


def test_the_smallest_share_is_where_the_lines_cross():
    y = np.array([20.0, 40, 80, 90])
    assert find_smallest_share(X, y, 60) == pytest.approx(0.15)
    assert find_smallest_share(X, y, 80) == pytest.approx(0.2)
    assert find_smallest_share(X, y, 90) == pytest.approx(0.4)
    assert find_smallest_share(X, y, 91) == math.inf and find_smallest_share(X, y, 20) == -math.inf
    assert find_smallest_share(X[::-1], y[::-1], 60) == pytest.approx(0.15)
    dip = np.array([70.0, 40, 80, 90])  # what is kept at 0.05 is lost again at 0.1
    assert find_smallest_share(X, dip, 60) == pytest.approx(0.15)
    fall = np.array([70.0, 80, 80, 50])
    assert find_smallest_share(X, fall, 60) == math.inf
    assert find_smallest_share(np.stack([X, X]), np.stack([y, y]), np.array([60, 91])).tolist() == [
        pytest.approx(0.15),
        math.inf,
    ]


def test_points_and_estimates_of_a_curve():
    draw = np.random.default_rng(0)
    y = np.clip(np.array([20.0, 40, 80, 95]) + draw.normal(0, 5, (40, 4)), 0, 100)
    own = curve(y)
    shares, scores, full = own.points
    assert shares == pytest.approx(X) and scores == pytest.approx(y.mean(0)) and full == 100
    whole, change, least = own.area(0.05, 0.4), own.area_change(0.05, 0.4), own.smallest(0.6)
    assert whole.value == pytest.approx(float(compute_area(X, y.mean(0), 0.05, 0.4)))
    assert change.value == pytest.approx(whole.value - 100) and change.low == pytest.approx(whole.low - 100)
    assert whole.low < whole.value < whole.high
    assert (
        least.value == pytest.approx(float(find_smallest_share(X, y.mean(0), 60)))
        and least.low < least.value < least.high
    )
    again = curve(y).area(0.05, 0.4)
    assert again == whole  # seeded


def test_the_interval_is_censored_where_nothing_was_measured():
    draw = np.random.default_rng(1)
    noise = draw.normal(0, 12, (20, 4))
    near = curve(np.clip(np.array([40.0, 60, 80, 94]) + noise, 0, 100), 95.0, times=2000).smallest()
    assert 0.2 < near.low < 0.4 and near.high == math.inf
    above = curve(np.clip(np.array([90.0, 91, 92, 93]) + noise / 2, 0, 100), 90.0, times=2000).smallest()
    assert above.value == above.low == -math.inf


def test_few_that_differ_are_no_proof():
    """Five samples that lose nothing: the bounds say that half of all may be lost."""
    alike = curve(np.full((5, 4), 100.0))
    assert (alike.area(0.05, 0.4).value, alike.area(0.05, 0.4).high) == (pytest.approx(100), pytest.approx(100))
    assert alike.area(0.05, 0.4).low == pytest.approx(100 * 0.025 ** (1 / 5))
    assert alike.area_change(0.05, 0.4).low == pytest.approx(-100 * (1 - 0.025 ** (1 / 5)))
    assert (alike.smallest().value, alike.smallest().low, alike.smallest().high) == (-math.inf, -math.inf, math.inf)
    many = curve(np.full((500, 4), 100.0))
    assert many.smallest().high == -math.inf  # at most 0.7 points are lost
    one = curve(np.full((5, 1), 100.0), shares=np.array([0.1]))
    assert one.smallest().high == math.inf


def test_two_samples_say_little():
    """A bootstrap of two contexts knows two values; Student's t with one degree of freedom knows better."""
    two = curve([[0, 0, 0, 0], [0, 100, 100, 100]]).area_change(0.05, 0.4)
    assert (two.low, two.high) == (-100, 100)


def test_subtasks_weigh_as_they_are_told_and_share_their_draws():
    draw = np.random.default_rng(2)
    y = draw.uniform(20, 80, (30, 4))
    names = ["a"] * 20 + ["b"] * 10
    apart = curve(y, subtasks=names, weights={"a": 3, "b": 1})
    assert apart.points[1] == pytest.approx(0.75 * y[:20].mean(0) + 0.25 * y[20:].mean(0))
    # the same contexts in both subtasks: as one subtask of their means
    half, groups = draw.uniform(20, 80, (20, 4)), [str(place) for place in range(20)]
    twice = curve(
        np.vstack([half, half]), subtasks=["a"] * 20 + ["b"] * 20, groups=groups * 2, weights={"a": 1, "b": 1}
    )
    assert twice.area(0.05, 0.4).low == pytest.approx(curve(half).area(0.05, 0.4).low)
    other = [f"other {name}" for name in groups]
    split = curve(
        np.vstack([half, half]), subtasks=["a"] * 20 + ["b"] * 20, groups=groups + other, weights={"a": 1, "b": 1}
    )
    width = [own.area(0.05, 0.4).high - own.area(0.05, 0.4).low for own in (twice, split)]
    assert width[1] == pytest.approx(width[0] / math.sqrt(2), rel=0.2)


def test_a_subtask_with_few_contexts_is_in_every_replicate():
    draw = np.random.default_rng(3)
    names, groups = ["a"] * 30 + ["b"] * 2, [str(place) for place in [*range(30), 0, 1]]
    own = curve(draw.uniform(20, 80, (32, 4)), subtasks=names, groups=groups, weights={"a": 1, "b": 1})
    assert own.area(0.05, 0.4).low > 0 and all(np.isfinite(part).all() for part in own._replicates)
    single = curve(draw.uniform(20, 80, (31, 4)), subtasks=names[:31], groups=groups[:31], weights={"a": 1, "b": 1})
    assert (single.area(0.05, 0.4).low, single.smallest().high) == (None, None)
    assert single.area(0.05, 0.4).value > 0


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_the_order_of_samples_changes_nothing(random, count):
    draw = np.random.default_rng(count)
    y, groups = draw.uniform(0, 100, (count, 3)), [str(place % 5) for place in range(count)]
    shares, full = draw.uniform(0.05, 0.4, (count, 3)), draw.uniform(50, 100, count)
    order = random.sample(range(count), count)
    names = ["a" if place % 2 else "b" for place in range(count)]
    weights = dict.fromkeys(names, 1.0)
    one = Curve(y, shares, full, names, groups, weights, 50)
    other = Curve(
        y[order], shares[order], full[order], [names[at] for at in order], [groups[at] for at in order], weights, 50
    )
    low, high = one.points[0].min(), one.points[0].max()
    assert other.smallest() == one.smallest() and other.area(low, high) == one.area(low, high)


def test_what_is_no_curve_is_refused():
    good = dict(scores=np.full((3, 2), 50.0), shares=np.full((3, 2), 0.5), full=np.full(3, 50.0))
    good |= dict(subtasks=["a"] * 3, groups=["1", "2", "3"], weights={"a": 1.0})
    assert Curve(**good).points[2] == 50
    bad = {
        "scores and shares need": [
            {"scores": np.zeros((0, 2))},
            {"scores": np.zeros(3)},
            {"shares": np.zeros((3, 1))},
            {"full": []},
        ],
        "3 samples": [{"groups": ["1"]}, {"subtasks": ["a"] * 2}],
        "score is not": [
            {"scores": np.full((3, 2), math.nan)},
            {"scores": np.full((3, 2), 101.0)},
            {"full": np.full(3, -1)},
        ],
        "share is not": [{"shares": np.full((3, 2), math.nan)}, {"shares": np.full((3, 2), -0.1)}],
        "weights are for": [{"weights": {"a": 1, "b": 1}}, {"weights": {}}],
        "not a number above 0": [{"weights": {"a": 0}}, {"weights": {"a": math.nan}}],
    }
    for message, changes in bad.items():
        for change in changes:
            with pytest.raises(ValueError, match=message):
                Curve(**{**good, **change})
    own = curve(np.full((5, 4), 50.0))
    for low, high in ((0.04, 0.4), (0.05, 0.41), (0.01, 0.02)):
        with pytest.raises(ValueError, match="measured from 0.0500 to 0.4000"):
            own.area(low, high)
    for low, high in ((0.2, 0.2), (0.3, 0.2), (math.nan, 0.2)):
        with pytest.raises(ValueError, match="empty or not finite"):
            own.area(low, high)
    assert own.area(0.047, 0.403).value == pytest.approx(50)  # budgets are floored to whole rows
    with pytest.raises(ValueError, match="nothing to keep"):
        curve(np.zeros((5, 4)), 0.0).smallest()


@pytest.mark.parametrize(
    ("groups", "size", "times"), [(20, 3, 200), *(only_in_full(*own, 500) for own in ((20, 1), (20, 3), (40, 2)))]
)
def test_coverage(groups, size, times):
    """Contexts that share their luck at all budgets, skewed scores, measured shares that vary."""
    draw, of = np.random.default_rng(0), [str(place) for place in np.repeat(np.arange(groups), size)]
    truth, count, held = 80 - 20 * np.exp(-X / 0.1), groups * size, np.zeros(3)
    truths = [
        compute_area(X, truth, 0.06, 0.38),
        compute_area(X, truth, 0.06, 0.38) - 80,
        find_smallest_share(X, truth, 0.95 * 80),
    ]
    for _ in range(times):
        luck = np.repeat(draw.normal(0, 5, groups), size)
        own = np.repeat(draw.normal(0, 4, groups), size)[:, None] * (1 - X)
        scores = truth + luck[:, None] + own + draw.exponential(3, (count, 4)) - 3
        shares = X + draw.normal(0, 0.003, (count, 4))
        full = 80 + luck + draw.normal(0, 2, count)
        found = curve(scores.clip(0, 100), full.clip(0, 100), shares, of, times=500)
        estimates = found.area(0.06, 0.38), found.area_change(0.06, 0.38), found.smallest()
        held += [own.low <= value <= own.high for own, value in zip(estimates, truths, strict=True)]
    assert (held / times).min() >= 0.93 and (held / times).max() <= 0.97
