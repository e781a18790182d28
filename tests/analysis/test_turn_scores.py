"""Differences from the full cache at each question of a context, against plain means over contexts."""

import numpy as np
import pytest

from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.score_matrix import build_blocks
from kvbench.analysis.turn_scores import compare_turns
from kvbench.store.runs import load_runs
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records

NAMES, TURNS, CONTEXTS = ("kv", "vt"), (1, 2, 3), 20


def draw_scores(seed: int, chances: dict[int, float]) -> dict[tuple[str, int, int], float]:
    """The score of each subtask, turn and context."""
    draw = np.random.default_rng(seed)
    return {
        (name, turn, context): 100.0 * (draw.random() < chances[turn])
        for name in NAMES
        for turn in TURNS
        for context in range(CONTEXTS)
    }


def make_run(scores: dict[tuple[str, int, int], float], turns: tuple[int, ...] = TURNS) -> dict[str, dict]:
    [sample, *_] = make_records(0.2, 50, count=1).values()
    return {
        f"{name}/{context}/turn{turn}": sample
        | {"uid": f"{name}/{context}/turn{turn}", "subtask": f"{name}/turn{turn}", "score": score}
        | {"group": f"{name}/{context}"}
        for (name, turn, context), score in scores.items()
        if turn in turns or name == "kv"
    }


def write(folder, scores, turns=TURNS):
    write_run(folder, make_run(scores["full"], turns), method={"name": "full"}, budget=1.0)
    for name in ("snapkv", "kvzip"):
        write_run(folder, make_run(scores[name], turns), method={"name": name}, budget=0.2)
    runs = load_runs(folder)
    return build_blocks(runs, runs)[0]


@pytest.fixture(scope="module")
def scores():
    chances = {"full": (0.9, 0.9, 0.9), "snapkv": (0.9, 0.5, 0.1), "kvzip": (0.8, 0.8, 0.8)}
    return {
        name: draw_scores(seed, dict(zip(TURNS, own, strict=True))) for seed, (name, own) in enumerate(chances.items())
    }


def test_losses_and_their_change_are_means_over_contexts(scores, tmp_path):
    blocks = write(tmp_path, scores)
    names = {
        cell.run.hash: cell.run.value["method"]["name"] for row in blocks[0].rows.values() for cell in row.values()
    }
    found = {names[each.run]: each for each in compare_turns(blocks)}
    assert {name: each.sign for name, each in found.items()} == {"snapkv": -1, "kvzip": 0}
    for name, each in found.items():
        loss = {key: scores[name][key] - scores["full"][key] for key in scores["full"]}
        for turn, (value, low, high) in zip(TURNS, each.losses, strict=True):
            assert value == pytest.approx(np.mean([own for key, own in loss.items() if key[1] == turn]))
            assert low < value < high
        values = []
        for subtask in NAMES:
            change = [loss[subtask, 3, context] - loss[subtask, 1, context] for context in range(CONTEXTS)]
            values.append(Values(change, [f"{subtask}/{context}" for context in range(CONTEXTS)], -200.0, 200.0))
        expected = mean(values)
        assert each.change == pytest.approx((expected.value, expected.low, expected.high))


def test_a_task_without_turns_or_with_missing_ones_has_none(scores, tmp_path):
    assert compare_turns(write(tmp_path / "missing", scores, (1, 2))) == []
    for name in ("full", "snapkv"):
        own = make_records(1.0 if name == "full" else 0.2, 90)
        write_run(tmp_path / "plain", own, method={"name": name}, budget=1.0 if name == "full" else 0.2)
    runs = load_runs(tmp_path / "plain")
    assert compare_turns(build_blocks(runs, runs)[0]) == []
