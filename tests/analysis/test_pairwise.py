"""Pairs of runs that are compared at once have the signs of their intervals."""

from itertools import combinations

import numpy as np
import pytest

from kvbench.analysis.intervals import TOLERANCE, Values, mean
from kvbench.analysis.joint_signs import sign_interval
from kvbench.analysis.pairwise import Columns

LEVELS = {"binary": [0.0, 100.0], "thirds": [0.0, 50.0, 100.0], "smooth": np.linspace(0, 100, 33).tolist()}
WEIGHTS = [1.0, 2.0]
TAIL = 0.999


def draw_scores(levels: list[float], count: int, shared: bool, columns: int = 9):
    """Return the scores of two subtasks, shape (columns, count), and their groups of two samples."""
    draw = np.random.default_rng([len(levels), count, shared])
    groups = [[f"{'' if shared else subtask}g{index // 2}" for index in range(count)] for subtask in range(2)]
    scores = []
    for _ in groups:
        chances = np.linspace(0, 1, columns)[:, None] ** 0.7
        right = draw.random((columns, count)) < chances
        right[1] = right[0]
        right[-1, 0] = False  # nearly all right
        scores.append(np.where(right, max(levels), draw.choice(levels, (columns, count)) * (len(levels) > 2)))
    return scores, groups


def compare(scores, groups, one: int, other: int):
    """Return the interval of other - one."""
    subtasks = [
        Values((values[other] - values[one]).tolist(), names, -100.0, 100.0)
        for values, names in zip(scores, groups, strict=True)
    ]
    return mean(subtasks, WEIGHTS, TAIL)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [2, 12, 40])
@pytest.mark.parametrize("levels", LEVELS)
def test_signs_are_those_of_the_intervals(levels, count, shared):
    scores, groups = draw_scores(LEVELS[levels], count, shared)
    known, signs = 0, set()
    for ones, others, some, sure in Columns(scores, groups, WEIGHTS).sign_pairs(TAIL):
        assert len(ones) == 36 and {*zip(others.tolist(), ones.tolist(), strict=True)} == {*combinations(range(9), 2)}
        for one, other, sign in zip(ones[sure], others[sure], some[sure], strict=True):
            interval = compare(scores, groups, one, other)
            assert sign == sign_interval(interval.low, interval.high)
            signs.add(sign)
        known += sure.sum()
    assert known >= 20
    assert signs == ({0} if count == 2 else signs) and (count < 40 or signs == {0, -1})


def test_a_block_of_pairs_is_no_larger_than_memory_allows(monkeypatch):
    scores, groups = draw_scores(LEVELS["smooth"], 12, False)
    [whole] = Columns(scores, groups, WEIGHTS).sign_pairs(TAIL)
    monkeypatch.setattr("kvbench.analysis.pairwise.AT_ONCE", 12 * 9 * 5)
    blocks = list(Columns(scores, groups, WEIGHTS).sign_pairs(TAIL))
    assert [len(block[0]) for block in blocks] == [5, 5, 5, 5, 5, 5, 5, 1]
    for at, numbers in enumerate(whole):
        assert (np.concatenate([block[at] for block in blocks]) == numbers).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("levels", LEVELS)
def test_the_bound_of_a_reach_is_never_above_the_reach(levels, shared):
    scores, groups = draw_scores(LEVELS[levels], 12, shared)
    bounds = Columns(scores, groups, WEIGHTS).bound_reach(slice(None), slice(None), TAIL)
    for one, other in np.ndindex(9, 9):
        interval = compare(scores, groups, one, other)
        assert interval.value - interval.low >= min(bounds[one, other], interval.value + 100) - 1e-6
    assert (bounds > 0).any() == (levels != "binary")


@pytest.mark.parametrize("side", [2, 512])
def test_rivals_are_those_that_score_more_by_more_than_the_bound(side, monkeypatch):
    monkeypatch.setattr("kvbench.analysis.pairwise.SIDE", side)
    scores, groups = draw_scores(LEVELS["smooth"], 40, False)
    columns = Columns([values[::-1] for values in scores], groups, WEIGHTS)
    reach = columns.bound_reach(slice(None), slice(None), TAIL)
    beyond = columns.values[None, :] - columns.values[:, None]
    expected = [
        np.flatnonzero((row > TOLERANCE) & (row > far)).tolist() for row, far in zip(beyond, reach, strict=True)
    ]
    assert columns.list_rivals(TAIL, 100) == expected and max(map(len, expected)) > 3
    assert columns.list_rivals(TAIL, 3) == [places[:3] for places in expected]
