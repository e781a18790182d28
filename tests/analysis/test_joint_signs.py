"""Signs that hold together, margins of non-inferiority and ranks: definitions, and the coverage in docs/statistics.md.

The simulations draw right-or-wrong answers. All methods of a draw share their full cache's answers, so their
differences depend on each other, as in a sweep.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.joint_signs import (
    bound_ranks,
    find_margin,
    is_no_worse,
    sign_changes,
    sign_interval,
)
from kvbench.analysis.paired import PairedScores, compare_averages
from kvbench.analysis.score_matrix import MatrixCell, Samples
from tests.support.selection import only_in_full

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
RIGHT = 0.8  # chance that the full cache is right


def draw_scores(draw: np.random.Generator, lost: list[float], count: int, gained: float = 0.0) -> np.ndarray:
    """Draw scores of shape (1 + methods, samples). Row 0 is the full cache's.

    A method loses each right answer with its chance in `lost`, and gains each wrong one with the chance `gained`.
    """
    full = draw.random(count) < RIGHT
    chances = draw.random((len(lost), count))
    methods = np.where(full, chances >= np.array(lost)[:, None], chances < gained)
    return 100.0 * np.vstack([full, methods])


def pair_scores(full: np.ndarray, method: np.ndarray) -> tuple[list[PairedScores], None]:
    """Return two rows of scores as one subtask, each sample its own group."""
    return [PairedScores(full.tolist(), method.tolist(), [str(at) for at in range(len(full))])], None


def rank(scores: np.ndarray) -> list[tuple[int, int]]:
    """Return the bounds of the rank of each row."""
    uids = [str(at) for at in range(scores.shape[1])]

    class Run:
        def __init__(self, row: np.ndarray, name: str) -> None:
            self.hash = name
            self.records = {uid: {"score": float(one), "group": uid} for uid, one in zip(uids, row, strict=True)}

    runs = [Run(row, str(at)) for at, row in enumerate(scores)]
    cells = [MatrixCell(run, mean([Values([0.0], ["a"])]), None, 0, 0, 0, 0, 0, 0) for run in runs]
    return bound_ranks(Samples(runs[0], uids, {"one": uids}, {"one": 1.0}).find_better(cells))


def test_signs_follow_holm_from_the_intervals():
    draw = np.random.default_rng(3)
    scores = draw_scores(draw, [0.0, 0.02, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5], 80, gained=0.1)
    averages = [pair_scores(scores[0], row) for row in scores[1:]]
    signs = [0] * len(averages)
    for _ in averages:  # one more sign a step: the definition, without batches
        left = signs.count(0)
        ends = [(own.low, own.high) for own in compare_averages(averages, 1 - 0.025 / left)]
        new = [at for at, own in enumerate(ends) if sign_interval(*own) and not signs[at]]
        if not new:
            break
        signs[new[0]] = sign_interval(*ends[new[0]])
    assert sign_changes(averages) == signs
    first = [sign_interval(own.low, own.high) for own in compare_averages(averages, 1 - 0.025 / len(averages))]
    assert first.count(-1) < signs.count(-1)  # some have a sign only because others have one
    alone = [sign_interval(own.low, own.high) for own in compare_averages(averages)]
    assert set(signs) == {-1, 0} and alone.count(-1) >= signs.count(-1)


def test_signs_of_gains_are_positive():
    scores = draw_scores(np.random.default_rng(0), [0.5], 60)
    assert sign_changes([pair_scores(scores[1], scores[0])]) == [1]
    assert sign_changes([]) == []


def test_a_wide_interval_is_not_no_worse():
    assert find_margin(88.0) == 3.0 and find_margin(20.4) == pytest.approx(2.04) and find_margin(50.0, 8.0) == 5.0
    assert is_no_worse(-2.9, 3.0) and not is_no_worse(-3.0, 3.0) and not is_no_worse(None, 3.0)
    assert not is_no_worse(-23.0, find_margin(20.4))  # 8.9 against 20.4: the interval contains 0, and says nothing
    assert not is_no_worse(0.0, find_margin(0.0))  # a full cache without a right answer shows nothing


def simulate_margin(count: int, truth: float, draws: int) -> float:
    """Return how often a method whose true difference is `truth` is no worse by 3 points."""
    draw, gained = np.random.default_rng(count), 0.1
    lost = (gained * (1 - RIGHT) - truth / 100) / RIGHT
    shown = 0
    for _ in range(draws):
        full, method = draw_scores(draw, [lost], count, gained)
        [change] = compare_averages([pair_scores(full, method)])
        shown += is_no_worse(change.low, 3.0)
    return shown / draws


def simulate_signs(count: int, draws: int) -> tuple[float, float]:
    """Return how often 38 changes have any wrong sign, jointly and with an interval for each. 20 are truly 0."""
    draw, wrong = np.random.default_rng(count), np.zeros(2)
    lost = [0.025] * 20 + np.linspace(0.05, 0.6, 18).tolist()  # 0.025 · 0.8 of all are lost, and 0.1 · 0.2 gained
    for _ in range(draws):
        scores = draw_scores(draw, lost, count, 0.1)
        averages = [pair_scores(scores[0], row) for row in scores[1:]]
        alone = [sign_interval(own.low, own.high) for own in compare_averages(averages)]
        wrong += [any(signs[:20]) or 1 in signs for signs in (sign_changes(averages), alone)]
    return tuple((wrong / draws).tolist())


def simulate_ranks(methods: int, count: int, draws: int) -> tuple[float, float]:
    """Return how often all ranks are within their bounds, and the mean number of ranks between two bounds.

    Pairs of methods are equal, and each pair scores 4 points less than the one before it.
    """
    draw, held, widths = np.random.default_rng(count + methods), 0, []
    lost = [0.05 * (at // 2) for at in range(methods)]
    for _ in range(draws):
        bounds = rank(draw_scores(draw, lost, count, 0.1)[1:])
        # the true ranks of a tie are all of its places, and bounds must contain them all
        held += all(
            first <= 1 + sum(own < lost[at] for own in lost) and last >= methods - sum(own > lost[at] for own in lost)
            for at, (first, last) in enumerate(bounds)
        )
        widths += [last - first + 1 for first, last in bounds]
    return held / draws, float(np.mean(widths))


def read_table(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table in statistics.md that begins with a heading."""
    rows = PAGE.read_text(encoding="utf-8").split(f"| {heading} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [re.findall(r"[^|]+", row.replace(" ", "").replace("%", "").replace("\u202f", "")) for row in rows]


@pytest.mark.parametrize("draws", [60, only_in_full(2000)])
def test_margins_hold_in_simulation(draws):
    for samples, equal, worse in read_table("samples"):
        shown = [100 * simulate_margin(int(samples), truth, draws) for truth in (0.0, -3.0)]
        assert shown[1] <= 2.5 + 100 * 3 * (0.025 / draws) ** 0.5
        if draws == 2000:
            assert [f"{own:.1f}" for own in shown] == [equal, worse]


@pytest.mark.parametrize("draws", [10, only_in_full(500)])
def test_joint_signs_hold_in_simulation(draws):
    for samples, joint, alone in read_table("samples a cell"):
        wrong = [100 * own for own in simulate_signs(int(samples), draws)]
        assert wrong[0] <= 5 + 100 * 3 * (0.05 / draws) ** 0.5
        if draws == 500:
            assert [f"{own:.1f}" for own in wrong] == [joint, alone]


@pytest.mark.parametrize("draws", [3, only_in_full(300)])
def test_ranks_hold_in_simulation(draws):
    for methods, samples, held, width in read_table("methods"):
        shown = simulate_ranks(int(methods), int(samples), draws)
        assert shown[0] >= 0.95 - 3 * (0.05 / draws) ** 0.5
        if draws == 300:
            assert [f"{100 * shown[0]:.1f}", f"{shown[1]:.1f}"] == [held, width]
