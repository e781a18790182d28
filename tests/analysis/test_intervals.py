"""Means and paired differences: worked examples, what they refuse, and how often their intervals hold the truth."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import binom, ndtri

import kvbench.analysis.intervals
from kvbench.analysis.intervals import Mean, Values, compute_means, mean, needs_exact_bounds
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_subtasks, pair_records
from kvbench.analysis.solvable_subtasks import is_solvable
from tests.support.selection import only_in_full
from tests.support.single_tables import compare_scores


def names(count: int) -> list[str]:
    return [str(place) for place in range(count)]


def lost(count: int, wrong: int) -> PairedDifference:
    """All right with the full cache, `wrong` of `count` lost with the method."""
    return compare_scores([100.0] * count, [0.0] * wrong + [100.0] * (count - wrong), names(count))


def free(full: list[float], method: list[float], groups: list[str]) -> PairedScores:
    """Scores without an end, whose interval is the t interval alone."""
    return PairedScores(full, method, groups, math.inf)


def test_one_sample_a_group_is_the_paired_t_interval():
    # d = -30, 10, -10, 20, 0, -50: mean -10; squares of residuals 400, 400, 0, 900, 100, 1600: s² = 3400 / 5 = 680;
    # error = √(680 / 6) = 10.6458; t(0.975, 5) = 2.570582, so ± 27.3659
    interval = compare_subtasks([free([80, 40, 60, 0, 70, 100], [50, 50, 50, 20, 70, 50], names(6))])
    assert (interval.mean_full, interval.mean_method) == (pytest.approx(350 / 6), pytest.approx(290 / 6))
    assert (interval.difference, interval.error) == (pytest.approx(-10), pytest.approx(10.645813))
    assert (interval.low, interval.high) == (pytest.approx(-37.365934, abs=1e-5), pytest.approx(17.365934, abs=1e-5))
    assert (interval.samples, interval.groups) == (6, 6)


def test_groups_are_clusters():
    # d = -10, -20 | -30 | 0, 20, 10 : mean -5; sums of residuals by group: -20 | -25 | 45; squares 400 + 625 + 2025
    # = 3050; CR1: 3/2 · 3050 / 36 = 127.0833; error 11.27313; t(0.975, 2) = 4.302653
    interval = compare_subtasks([free([50] * 6, [40, 30, 20, 50, 70, 60], ["a", "a", "b", "c", "c", "c"])])
    assert (interval.difference, interval.error) == (pytest.approx(-5), pytest.approx(11.273124))
    assert interval.high == pytest.approx(-5 + 4.302653 * 11.273124, abs=1e-4)
    assert (interval.samples, interval.groups) == (6, 3)


def test_the_average_weighs_subtasks_alike():
    # variances of the means 680 / 6 (5 degrees) and 127.0833 (2 degrees); error² = (113.3333 + 127.0833) / 4 = 60.104
    # freedom = 240.4167² / (113.3333² / 5 + 127.0833² / 2) = 57800.17 / 10643.98 = 5.4303
    one = free([80, 40, 60, 0, 70, 100], [50, 50, 50, 20, 70, 50], [f"a{place}" for place in range(6)])
    two = free([50] * 6, [40, 30, 20, 50, 70, 60], ["a", "a", "b", "c", "c", "c"])
    interval = compare_subtasks([one, two])
    assert (interval.difference, interval.error) == (pytest.approx(-7.5), pytest.approx(math.sqrt(60.104167)))
    assert interval.mean_full == pytest.approx((350 / 6 + 50) / 2)
    t = (interval.high - interval.difference) / interval.error
    assert 2.446912 < t < 2.570582  # t(0.975, 6) and t(0.975, 5)
    assert t == pytest.approx(2.5105, abs=5e-4)
    assert interval.low == pytest.approx(-7.5 - t * interval.error)
    assert (interval.samples, interval.groups) == (12, 9)


def test_the_average_takes_weights():
    # as above with weights 3/4 and 1/4: -10 · 3/4 - 5/4; error² = 9/16 · 113.3333 + 1/16 · 127.0833 = 71.6927
    # freedom = 71.6927² / (63.75² / 5 + 7.942708² / 2) = 5139.84 / 844.356 = 6.08728
    one = free([80, 40, 60, 0, 70, 100], [50, 50, 50, 20, 70, 50], [f"a{place}" for place in range(6)])
    two = free([50] * 6, [40, 30, 20, 50, 70, 60], ["a", "a", "b", "c", "c", "c"])
    interval = compare_subtasks([one, two], [3, 1])
    assert (interval.difference, interval.error) == (pytest.approx(-8.75), pytest.approx(math.sqrt(71.692708)))
    assert interval.mean_full == pytest.approx(0.75 * 350 / 6 + 0.25 * 50)
    t = (interval.high - interval.difference) / interval.error
    assert t == pytest.approx(2.4384, abs=5e-4) and 2.364624 < t < 2.446912  # t(0.975, 7) and t(0.975, 6)
    assert compare_subtasks([one, two], [0.75, 0.25]) == interval and compare_subtasks(
        [one, two], [1, 1]
    ) == compare_subtasks([one, two])
    near = compare_subtasks([one, two], [1, 1e-9])
    assert (near.low, near.error) == (
        pytest.approx(compare_subtasks([one]).low, abs=1e-5),
        pytest.approx(compare_subtasks([one]).error),
    )
    # nothing differs in 20 and 5 samples: those of the second weigh 1/2 · 1/5 each, as if there were 10 in all
    same = [PairedScores([100] * count, [100] * count, [f"{count}/{n}" for n in range(count)]) for count in (20, 5)]
    assert compare_subtasks(same).high == pytest.approx(100 * 25 / 10 * (1 - 0.025 ** (1 / 25)))
    for wrong in ([1], [1, 0], [1, -1], [1, math.nan], [1, math.inf], [1, 1, 1]):
        with pytest.raises(ValueError, match="weight"):
            compare_subtasks([one, two], wrong)
    with pytest.raises(ValueError, match="0 weights for 0 subtasks"):
        compare_subtasks([])


def test_contexts_shared_by_subtasks_do_not_count_twice():
    full, method = [80, 40, 60, 0, 70, 100], [50, 50, 50, 20, 70, 50]
    single = compare_scores(full, method, names(6))
    same = compare_subtasks([PairedScores(full, method, names(6))] * 4)
    assert (same.error, same.low, same.groups) == (pytest.approx(single.error), pytest.approx(single.low), 6)
    apart = compare_subtasks([PairedScores(full, method, [f"{part}/{name}" for name in names(6)]) for part in "abcd"])
    assert apart.error == pytest.approx(single.error / 2) and apart.groups == 24


def test_no_difference_in_few_samples_is_no_proof():
    for count, bound in ((5, 52.1824), (50, 7.1121), (500, 0.7351)):
        interval = lost(count, 0)
        assert bound == pytest.approx(100 * (1 - 0.025 ** (1 / count)), abs=1e-3)
        assert (interval.low, interval.high) == (pytest.approx(-bound, abs=1e-3), pytest.approx(bound, abs=1e-3))
        assert (interval.difference, interval.error) == (0, 0)
    # 5 of 5 lost is no more than the sign test can say (p = 0.0625), 6 of 6 is
    assert lost(5, 5).low == -100 and lost(5, 5).high == pytest.approx(-100 + 2 * 52.1824, abs=1e-3)
    assert lost(5, 5).high > 0 > lost(6, 6).high


def test_the_bound_grows_with_what_was_lost():
    # Clopper-Pearson for 1 of 20: the p with (1 - p)^20 + 20 p (1 - p)^19 = 0.025
    p = -lost(20, 1).low / 100
    assert (1 - p) ** 20 + 20 * p * (1 - p) ** 19 == pytest.approx(0.025)
    assert lost(20, 1).high == lost(20, 0).high
    lows = [lost(500, wrong).low for wrong in range(6)]
    assert lows == sorted(lows, reverse=True)
    assert lost(20, 5).high > 0 > lost(20, 6).high  # the sign test's p: 0.0625 and 0.031
    both = compare_scores([100, 0] + [50] * 18, [0, 100] + [50] * 18, names(20))
    assert both.low == lost(20, 1).low == -both.high
    alike = compare_scores([100] * 20, [90] * 20, names(20))  # every sample lost 10 points: nothing spreads
    assert alike.low == pytest.approx(-10 - 90 * (1 - 0.025 ** (1 / 20)))
    assert alike.high == pytest.approx(-10 + 110 * (1 - 0.025 ** (1 / 20)))
    # 8 of 10 lost, 2 kept, none gained: -100 + 100 U(2, 10) + 100 U(0, 10)
    assert (lost(10, 8).low, lost(10, 8).high) == (-100, pytest.approx(-100 + 55.610 + 30.850, abs=1e-2))
    mirrored = compare_scores([0] * 10, [100] * 8 + [0] * 2, names(10))
    assert (mirrored.low, mirrored.high) == (-lost(10, 8).high, 100)


def test_the_bounds_of_an_average_pool_its_subtasks():
    def parts(*wrong: int) -> list[PairedScores]:
        scores = ([0] * count + [100] * (5 - count) for count in wrong)
        return [PairedScores([100] * 5, method, [f"{k}/{n}" for n in range(5)]) for k, method in enumerate(scores)]

    assert compare_subtasks(parts(0, 0, 0, 0)).low == pytest.approx(-100 * (1 - 0.025 ** (1 / 20)))
    assert compare_subtasks(parts(1, 0, 0, 0)).low == pytest.approx(lost(20, 1).low)
    assert compare_subtasks(parts(5, 0)).low == pytest.approx(-50 - 100 * (1 - 0.025 ** (1 / 10)))
    assert compare_subtasks(parts(2, 2, 2, 0)).error == pytest.approx(math.sqrt(3 * 600 / 16))  # six differ: t
    assert compare_subtasks(parts(2, 2, 2, 0)).low == pytest.approx(-30 - 2.178813 * math.sqrt(3 * 600 / 16), abs=1e-4)
    shared = [PairedScores([100] * 5, [0] + [100] * 4, names(5))] * 3  # the same context lost three times
    assert compare_subtasks(shared).low == pytest.approx(lost(5, 1).low)


def test_a_large_group_lies_within_its_interval():
    interval = compare_scores([100] * 19, [0] * 10 + [100] * 9, ["a"] * 10 + names(9))
    assert interval.low <= interval.difference == pytest.approx(-1000 / 19)


def test_one_group_has_no_interval():
    interval = compare_scores([100, 50], [50, 50], ["a", "a"])
    assert interval == PairedDifference(75, 50, -25, None, None, 2, 1, None, lost=1, gained=0)
    assert compare_subtasks([PairedScores([1, 2], [2, 3], ["a", "b"]), PairedScores([1], [1], ["c"])]).low is None


def test_lost_and_gained_are_scores_that_moved():
    interval = compare_scores([100, 0, 50, 50, 33.3, 1 / 3], [0, 100, 50, 49.9, 40, 1 / 3 + 1e-12], names(6))
    assert (interval.lost, interval.gained, interval.same) == (2, 2, 2)
    both = compare_subtasks([PairedScores([100, 100], [0, 100], ["a", "b"]), PairedScores([0, 0], [50, 0], ["c", "d"])])
    assert (both.lost, both.gained, both.same) == (1, 1, 2)


def test_a_mean_by_itself():
    # 30, 50, 40, 20, 60, 10: mean 35, s² = 350, error √(350 / 6) = 7.637626, t(0.975, 5) = 2.570582
    one = mean([Values([30, 50, 40, 20, 60, 10], names(6), -math.inf, math.inf)])
    assert (one.value, one.error, one.samples, one.groups) == (35, pytest.approx(7.637626), 6, 6)
    assert (one.low, one.high) == (pytest.approx(35 - 19.633143, abs=1e-4), pytest.approx(35 + 19.633143, abs=1e-4))
    # groups of the means' residuals: -10, 20 | 0 | 10, -20 ... sums 10, 5, -15: CR1 3/2 · 350 / 36
    three = mean([Values([25, 55, 40, 20, 60, 10], ["a", "a", "b", "c", "b", "c"])])
    sums = np.array([25 + 55, 40 + 60, 20 + 10]) - 2 * 35
    assert three.error == pytest.approx(math.sqrt(1.5 * (sums**2).sum() / 36))
    # all right: the lower bound is the rule of three's, the upper one what is possible
    for value, low, high in ((100, 100 * 0.025 ** (1 / 20), 100), (0, 0, 100 - 100 * 0.025 ** (1 / 20))):
        own = mean([Values([value] * 20, names(20))])
        assert (own.value, own.low, own.high, own.error) == (value, pytest.approx(low), pytest.approx(high), 0)
    # 2 of 20 wrong: Clopper and Pearson's bounds of a share
    own = mean([Values([0] * 2 + [100] * 18, names(20))])
    wrong = 1 - own.low / 100
    assert sum(binom(20, k) * wrong**k * (1 - wrong) ** (20 - k) for k in range(3)) == pytest.approx(0.025)
    assert own.high == 100 and needs_exact_bounds([Values([0] * 2 + [100] * 18, names(20))])
    assert mean([Values([1, 2], ["a", "a"])]) == Mean(1.5, None, None, None, 2, 1)


Part = tuple[int, ...]  # samples, lost, gained and, where samples share them, contexts


def part(name: str, count: int, wrong: int, right: int, contexts: int | None = None) -> PairedScores:
    groups = [f"{name}/{place % (contexts or count)}" for place in range(count)]
    full = [100.0] * wrong + [0.0] * right + [100.0] * (count - wrong - right)
    return PairedScores(full, [0.0] * wrong + [100.0] * (count - wrong), groups)


@pytest.mark.parametrize(
    "parts, change, alone",  # low and high of the difference and of the method's mean, before partial scores had theirs
    [
        ([(5, 0, 0)], (-52.18237501049814, 52.18237501049814), (47.81762498950186, 100.0)),
        ([(5, 2, 0)], (-85.33672003653268, 52.18237501049814), (14.663279963467318, 100.0)),
        ([(20, 1, 0)], (-24.873276277202777, 16.84334709830853), (75.12672372279722, 100.0)),
        ([(20, 3, 2)], (-37.8926826545314, 31.698271401908233), (62.1073173454686, 100.0)),
        ([(20, 6, 0)], (-52.00427512755881, -7.995724872441183), (47.99572487244119, 92.00427512755881)),
        ([(50, 12, 5)], (-30.24996703187893, 2.2499670318789313), (63.73920453704385, 88.26079546295615)),
        ([(200, 40, 3)], (-24.443468798376365, -12.556531201623635), (74.40846827474697, 85.59153172525303)),
        ([(500, 2, 0)], (-1.437407856220031, 0.7350610051907784), (98.56259214377997, 100.0)),
        ([(24, 3, 1, 8)], (-28.03853542993987, 11.371868763273204), (24.486321636655163, 100.0)),
        ([(24, 9, 4, 8)], (-41.56731568780165, -0.09935097886501154), (31.5660219416529, 78.98055491842732)),
        ([(60, 2, 2, 12)], (-48.413774868596704, 48.413774868596704), (51.586225131403296, 100.0)),
        ([(5, 0, 0), (5, 2, 0), (5, 5, 0)], (-100.0, 15.405808273160204), (0.0, 82.70290413658009)),
        ([(20, 3, 0), (30, 9, 2), (50, 1, 1)], (-18.285228143055825, -2.270327412499727),
         (79.86186405546718, 93.13813594453282)),
        ([(12, 1, 0, 4), (12, 5, 2, 6)], (-82.77956855868837, 47.00709424244625),
         (17.22043144131161, 91.38978427934418)),
    ],
)  # fmt: skip
def test_intervals_of_right_or_wrong_scores_stay(parts, change, alone):
    own = [part(f"{place}", *one) for place, one in enumerate(parts)]
    weights = range(1, len(own) + 1)
    found = compare_subtasks(own, weights), mean([one.method_values for one in own], weights)
    assert [(one.low, one.high) for one in found] == [pytest.approx(ends, rel=1e-12) for ends in (change, alone)]


def test_nothing_jumps_where_zeros_become_small_numbers():
    zero = lost(5, 0)
    for full, size in ((100, 0.3), (50, 0.3), (50, 1e-7)):
        method = [full - size, full - size / 2, full - size / 3, full - size / 4, full]
        tiny = compare_scores([full] * 5, method, names(5))
        assert (tiny.low, tiny.high) == (
            pytest.approx(zero.low, abs=2 * size + 0.01),
            pytest.approx(zero.high, abs=0.4),
        )


@pytest.mark.parametrize("count", [2, 3, 5, 20, 100, 500, 5000])
def test_the_bound_of_partial_scores_is_the_rule_of_three_where_nothing_was_seen(count):
    found = compare_scores([50.0] * count, [50.0 + 1e-6] + [50.0] * (count - 1), names(count))
    bound = 100 * (1 - 0.025 ** (1 / count))
    assert (found.low, found.high) == (pytest.approx(-bound, abs=1e-3), pytest.approx(bound, abs=1e-3))


def test_the_bound_of_partial_scores_is_the_quantile_of_what_it_says():
    values = np.array([-90, -40, -35.5, -10, 0, 0, 0, 2, 5, 30])
    count, draw = len(values), np.random.default_rng(0)
    found = mean([Values(values.tolist(), names(count), -100, 100)])
    wide = values.mean() + np.sqrt(count / (count - 1)) * (values - values.mean())
    drawn = draw.dirichlet(np.ones(count + 1), 400_000)
    for end, unseen, share in ((found.low, -100, 0.025), (found.high, 100, 0.975)):
        # Σ E (x - mean - t) > 0 is Σ E x / Σ E > mean + t: shares of exponentials are flat Dirichlet weights
        assert end == pytest.approx(np.quantile(drawn @ np.append(wide, unseen), share), abs=0.2)


def test_partial_scores_are_never_surer_than_the_t_interval():
    draw = np.random.default_rng(4)
    for count in (3, 10, 40):
        full, method = draw.uniform(0, 100, (2, count))
        groups = [f"{place // 2}" for place in range(count)]
        bounded, alone = compare_scores(full, method, groups), compare_subtasks([free(full, method, groups)])
        assert bounded.low <= max(alone.low, -100) and bounded.high >= min(alone.high, 100)
        assert (bounded.difference, bounded.error) == (alone.difference, alone.error)


def test_what_the_docstring_says_of_widths():
    said = re.findall(r"^    ([\d.]+) ((?: +[\d.]+ \([\d.]+\)){7})$", kvbench.analysis.intervals.__doc__, re.M)
    assert [spread for spread, _ in said] == ["0.3", "5", "15", "30"]
    for spread, line in said:
        for count, told in zip((5, 10, 20, 50, 100, 200, 500), re.findall(r"[\d.]+ \([\d.]+\)", line), strict=True):
            values = (-5 + float(spread) * ndtri((np.arange(count) + 0.5) / count)).tolist()
            own, alone = (mean([Values(values, names(count), -end, end)]) for end in (100, math.inf))
            assert told == f"{(own.high - own.low) / 2:.1f} ({(alone.high - alone.low) / 2:.1f})"


def test_what_has_no_bounds_has_none_where_few_differ():
    counted = PairedScores([500, 700, 800], [500, 700, 900], names(3), math.inf)
    assert compare_subtasks([counted]).low is None and compare_subtasks([counted]).error > 0
    moved = PairedScores([500, 700, 800], [600, 750, 1000], names(3), math.inf)
    assert compare_subtasks([moved]).high > 200 and compare_subtasks([moved]).difference == pytest.approx(350 / 3)
    with pytest.raises(ValueError, match="not in"):
        PairedScores([math.inf], [1], ["a"], math.inf)


scores = st.one_of(st.sampled_from([0.0, 100.0]), st.floats(0, 100))
samples = st.lists(st.tuples(scores, scores, st.sampled_from("abcdefgh")), min_size=1, max_size=30)


@given(st.lists(samples, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_nothing(subtasks, random):
    def interval(parts: list) -> PairedDifference:
        return compare_subtasks([PairedScores(*zip(*part, strict=True)) for part in parts], range(1, len(parts) + 1))

    found = interval(subtasks)
    assert interval([random.sample(part, len(part)) for part in subtasks]) == found
    assert found.low is None or -100 <= found.low <= found.difference <= found.high <= 100
    assert found.lost + found.gained + found.same == found.samples == sum(map(len, subtasks))
    assert found.difference == pytest.approx(found.mean_method - found.mean_full, abs=1e-9)


def test_scores_must_be_scores():
    for full, method, groups in (([], [], []), ([1], [1, 2], ["a"]), ([1], [1], [])):
        with pytest.raises(ValueError, match="full"):
            compare_scores(full, method, groups)
    for wrong in (float("nan"), -0.1, 100.1):
        with pytest.raises(ValueError, match="not in"):
            compare_scores([50, 50], [50, wrong], names(2))


def test_pairs_are_of_the_same_question():
    def records(**changed: str) -> dict[str, dict]:
        kept = {"prompt_hash": "p", "target_hash": "t"}
        return {uid: {"uid": uid, **kept} | (changed if uid == "b" else {}) for uid in "cba"}

    assert [(full["uid"], method["uid"]) for full, method in pair_records(records(), records())] == [
        (u, u) for u in "abc"
    ]
    assert pair_records(records(), {}) == []
    for key in ("prompt_hash", "target_hash"):
        with pytest.raises(ValueError, match=f"^results: b: {key} is"):
            pair_records(records(), records(**{key: "other"}))


def share(share_lost: float, bounds: np.ndarray) -> float:
    """Exact coverage: over all binomial outcomes, where each right answer is lost with the same chance."""
    count = len(bounds) - 1
    wrong = np.arange(count + 1)
    chance = binom(count, wrong) * share_lost**wrong * (1 - share_lost) ** (count - wrong)
    truth = -100 * share_lost
    return float(chance[(bounds[:, 0] <= truth + 1e-9) & (truth - 1e-9 <= bounds[:, 1])].sum())


@pytest.mark.parametrize("count", [5, 10, 20, 50, 100, 200, only_in_full(500)])
def test_coverage_of_right_or_wrong_scores(count):
    bounds = np.array([(interval.low, interval.high) for interval in (lost(count, w) for w in range(count + 1))])
    percent = np.arange(1, 100)
    coverage = np.array([share(p / 100, bounds) for p in percent])
    if count <= 100:
        assert coverage[percent <= 10].min() >= 0.96
    if count >= 100:
        middle = coverage[(percent >= 20) & (percent <= 80)]
        assert 0.93 <= middle.min() and middle.max() <= 0.97
    assert coverage.min() >= 0.91


@pytest.mark.parametrize("count", [5, 10, 20, 50, 100, 200, only_in_full(500)])
def test_coverage_of_a_mean_of_right_or_wrong(count):
    found = [mean([Values([100.0] * right + [0.0] * (count - right), names(count))]) for right in range(count + 1)]
    bounds = np.array([(own.low - 100, own.high - 100) for own in found])[::-1]  # by the number of wrong ones
    percent = np.arange(1, 100)
    coverage = np.array([share(p / 100, bounds) for p in percent])
    assert coverage.min() >= 0.91
    if count >= 100:
        middle = coverage[(percent >= 20) & (percent <= 80)]
        assert 0.93 <= middle.min() and middle.max() <= 0.97


def covered(draw: Callable[[], PairedDifference | Mean], truth: float, times: int) -> float:
    return sum(interval.low <= truth <= interval.high for interval in (draw() for _ in range(times))) / times


@pytest.mark.parametrize(
    ("groups", "size"), [(40, 3), *(only_in_full(*own) for own in ((20, 1), (50, 1), (200, 1), (20, 4)))]
)
def test_coverage_of_the_t_interval(groups, size):
    draw = np.random.default_rng(0)
    of = np.repeat(np.arange(groups), size)

    def interval() -> PairedDifference:
        full = draw.uniform(40, 60, groups * size)
        loss = np.repeat(draw.normal(5, 6, groups), size) + draw.exponential(6, groups * size) - 6  # skewed, correlated
        return compare_subtasks([free(full, np.clip(full - loss, 0, 100), of.astype(str))])

    assert 0.93 <= covered(interval, -5, 1500) <= 0.97


Draw = Callable[[np.random.Generator], list[Values]]


def collapse(rate: float, size: float, count: int, noise: float = 1.0, each: tuple[int, ...] = (1,)) -> Draw:
    """`count` contexts, each of as many samples as drawn from `each`: `rate` of them move by `size` points."""

    def draw(random: np.random.Generator) -> list[Values]:
        sizes = random.choice(each, count)
        moved = np.repeat(size * (random.random(count) < rate), sizes)
        values = (moved + noise * random.normal(0, 1, len(moved))).clip(-100, 100)
        return [Values(values.tolist(), np.repeat(names(count), sizes).tolist(), -100, 100)]

    return draw


def ties(count: int) -> Draw:
    """Nine of ten alike, the others anywhere below."""

    def draw(random: np.random.Generator) -> list[Values]:
        values = np.where(random.random(count) < 0.1, -random.uniform(0, 100, count), 0)
        return [Values(values.tolist(), names(count), -100, 100)]

    return draw


def subtasks(rates: tuple[float, ...], size: float, count: int, shared: bool = False) -> Draw:
    """A subtask for each rate, of `count` samples each; `shared`: a context has one sample in each."""

    def draw(random: np.random.Generator) -> list[Values]:
        chances = random.random((1 if shared else len(rates), count))
        moved = size * (chances < np.array(rates)[:, None]) + random.normal(0, 1, (len(rates), count))
        groups = [names(count) if shared else [f"{place}/{own}" for own in names(count)] for place in range(len(rates))]
        return [
            Values(own.tolist(), group, -100, 100) for own, group in zip(moved.clip(-100, 100), groups, strict=True)
        ]

    return draw


def lower(size: float) -> float:
    """The mean of `size` points lost with noise of 1, which 100 points cut off."""
    return -size + (1 / math.sqrt(2 * math.pi) if size == 100 else 0)


SHORT = {  # what is drawn, and its mean
    "100 points lost by 5 % of 20": (collapse(0.05, -100, 20), 0.05 * lower(100)),
    "50 points lost by 5 % of 20": (collapse(0.05, -50, 20), -0.05 * 50),
    "30 points lost by 5 % of 50": (collapse(0.05, -30, 50), -0.05 * 30),
    "90 points gained by 2 % of 20": (collapse(0.02, 90, 20), 0.02 * 90),
    "ties of 50": (ties(50), -5),
    "20 contexts of 4": (collapse(0.05, -90, 20, each=(4,)), -0.05 * 90),
    "20 contexts of 1 to 8": (collapse(0.05, -90, 20, each=(1, 2, 3, 8)), -0.05 * 90),
    "13 subtasks of 5": (subtasks((0.05,) * 13, -90, 5), -0.05 * 90),
    "one subtask of four collapses": (subtasks((0.2, 0, 0, 0), -90, 10), -0.2 * 90 / 4),
    "subtasks of the same contexts": (subtasks((0.05,) * 4, -90, 20, shared=True), -0.05 * 90),
}
LONG = SHORT | {
    **{
        f"{size} points lost by {rate:.0%} of {count}": (collapse(rate, -size, count), rate * lower(size))
        for size in (100, 50, 30)
        for rate in (0.02, 0.05, 0.1)
        for count in (5, 10, 20, 50, 100, 200, 500)
    },
    **{f"90 points gained by 5 % of {count}": (collapse(0.05, 90, count), 4.5) for count in (10, 50, 200)},
    **{f"ties of {count}": (ties(count), -5) for count in (10, 20, 100)},
    **{f"{count} contexts of 1 to 8": (collapse(0.05, -90, count, each=(1, 2, 3, 8)), -4.5) for count in (10, 50)},
    "13 subtasks of 10": (subtasks((0.05,) * 13, -90, 10), -4.5),
    "subtasks far apart": (subtasks((0.9, 0.1, 0, 0), -60, 10), -60 / 4),
}


def held(name: str, times: int) -> float:
    draw, truth = LONG[name]
    random = np.random.default_rng(6)
    return covered(lambda: mean(draw(random)), truth, times)


@pytest.mark.parametrize("name", SHORT)
def test_coverage_of_skewed_mixtures(name):
    assert held(name, 150) >= 0.95


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
def test_coverage_of_skewed_mixtures_in_full(name):
    assert held(name, 1000) >= 0.95


@pytest.mark.parametrize(
    ("count", "scale", "most"),
    [only_in_full(*own) for own in ((20, 1, 0.97), (50, 1, 0.97), (10, 0.2, 1), (50, 0.02, 1))],
)
def test_coverage_of_the_average(count, scale, most):
    draw = np.random.default_rng(1)
    losses = scale * np.array([0, 0, 0, 0.02, 0.02, 0.05, 0.05, 0.1, 0.1, 0.2, 0.3, 0.5, 0.8])

    def interval() -> PairedDifference:
        wrong = draw.random((13, count)) < losses[:, None]
        groups = [[f"{part}/{name}" for name in names(count)] for part in range(13)]
        return compare_subtasks(
            [PairedScores([100.0] * count, 100.0 * ~row, group) for row, group in zip(wrong, groups, strict=True)]
        )

    assert 0.93 <= covered(interval, -100 * losses.mean(), 500) <= most


CHANCES = np.linspace(0.35, 0.65, 13)  # of the full cache to solve a sample of each subtask: near what a card asks for


def listed(random: np.random.Generator, count: int, kept: float, by: str) -> tuple[Mean, PairedDifference, float]:
    """The full cache's mean over the subtasks of a list, the difference of a method that keeps a share of what is
    right, and the true mean. `by`: samples that choose the list. Others than the evaluated ones, as for a card; the
    same, which kvbench never does; or none, and the list is every second subtask.
    """
    full = random.random((13, count)) < CHANCES[:, None]
    asked = full if by == "same" else random.random((13, 20)) < CHANCES[:, None]
    method = full & (random.random(full.shape) < kept)
    chosen = [place for place in range(13) if (place % 2 if by == "none" else is_solvable(100.0 * asked[place]))]
    groups = {place: [f"{place}/{own}" for own in names(count)] for place in chosen}
    scores = [PairedScores(100.0 * full[place], 100.0 * method[place], groups[place]) for place in chosen]
    return mean([own.full_values for own in scores]), compare_subtasks(scores), 100 * CHANCES[chosen].mean()


def coverage_of_listed(count: int, kept: float, times: int, by: str) -> tuple[float, float, float]:
    """How often both intervals hold the truth, and how far the full cache's mean is above it on average, in points."""
    random = np.random.default_rng(7)
    drawn = [listed(random, count, kept, by) for _ in range(times)]
    alone = sum(own.low <= truth <= own.high for own, _, truth in drawn) / times
    paired = sum(change.low <= (kept - 1) * truth <= change.high for _, change, truth in drawn) / times
    return alone, paired, sum(own.value - truth for own, _, truth in drawn) / times


@pytest.mark.full
def test_coverage_of_the_average_that_a_card_lists():
    alone, paired, above = coverage_of_listed(20, 0.7, 300, by="others")
    assert min(alone, paired) >= 0.93 and abs(above) < 0.5
    alone, _, above = coverage_of_listed(20, 0.7, 100, by="same")
    assert alone < 0.85 and above > 4  # which is why other samples choose


@pytest.mark.full
@pytest.mark.parametrize("count", [5, 20, 100])
@pytest.mark.parametrize("kept", [0.95, 0.5])
def test_coverage_of_the_average_that_a_card_lists_in_full(count, kept):
    """Where few answers are lost, intervals hold the truth of any average less often: a card's is no worse."""
    alone, paired, above = coverage_of_listed(count, kept, 1500, by="others")
    plain = coverage_of_listed(count, kept, 1500, by="none")
    assert alone >= 0.94 and paired >= min(0.94, plain[1] - 0.015) and abs(above) < 0.5
    alone, _, above = coverage_of_listed(count, kept, 500, by="same")
    assert alone < 0.92 and above > 1


@pytest.mark.full
@pytest.mark.parametrize(("groups", "size"), [(20, 1), (40, 3)])
def test_coverage_of_the_t_interval_of_a_mean(groups, size):
    draw = np.random.default_rng(2)
    of = np.repeat(np.arange(groups), size).astype(str).tolist()

    def one() -> Mean:
        context = np.repeat(draw.normal(45, 8, groups), size)
        values = (context + draw.exponential(5, groups * size)).clip(0, 100).tolist()
        return mean([Values(values, of, -math.inf, math.inf)])

    assert 0.93 <= covered(one, 50, 1500) <= 0.97


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True])
def test_coverage_of_the_t_interval_of_a_weighted_average(shared):
    draw = np.random.default_rng(3)
    weights, sizes, losses = [5, 1, 2], [30, 60, 30] if not shared else [40] * 3, [5, 20, 10]

    def interval() -> PairedDifference:
        context = draw.normal(0, 6, 60)
        parts = []
        for place, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
            own = context[:size] if shared else draw.normal(0, 6, size)
            full = draw.uniform(50, 70, size)
            groups = [f"{n}" if shared else f"{place}/{n}" for n in range(size)]
            method = full - loss + own + draw.exponential(4, size) - 4
            parts.append(free(full, method.clip(0, 100), groups))
        return compare_subtasks(parts, weights)

    assert 0.93 <= covered(interval, -(5 * 5 + 20 + 2 * 10) / 8, 800) <= 0.97


def draw_subtasks(draw: np.random.Generator) -> tuple[list[Values], list[float] | None]:
    """One to three subtasks of any kind of differences, whose groups they share or not."""
    subtasks = []
    apart = draw.random() < 0.5
    for place in range(draw.integers(1, 4)):
        count = int(draw.integers(1, 30))
        kinds = (
            draw.uniform(-100, 100, count),
            draw.choice([-100.0, 0.0, 100.0], count, p=[0.1, 0.8, 0.1]),
            np.zeros(count),
            np.where(draw.random(count) < 0.1, -80.0, draw.normal(0, 1, count)),
        )
        groups = [f"{place if apart else ''}g{index // 2}" for index in range(count)]
        subtasks.append(Values(kinds[draw.integers(len(kinds))].tolist(), groups, -100.0, 100.0))
    return subtasks, None if draw.random() < 0.5 else draw.uniform(0.5, 2, len(subtasks)).tolist()


def test_many_means_at_once_are_those_of_single_calls() -> None:
    draw = np.random.default_rng(5)
    averages = [draw_subtasks(draw) for _ in range(120)]
    for found, (subtasks, weights) in zip(compute_means(averages, 0.99), averages, strict=True):
        alone = mean([Values(own.values, own.groups, own.least, own.most) for own in subtasks], weights, 0.99)
        for name in ("value", "low", "high", "error", "samples", "groups"):
            one, other = getattr(found, name), getattr(alone, name)
            assert (one is None) == (other is None) and (one is None or abs(one - other) < 1e-10)
