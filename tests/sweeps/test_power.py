"""What planned samples can tell apart: against simulated studies, and the commands that print it."""

from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis.paired import PairedScores, compare_averages
from kvbench.analysis.power import Power, compute_power, compute_reach, estimate_deviation
from kvbench.cli.measured import main as measured
from kvbench.cli.plan import main as plan
from kvbench.config.compose import compose_config
from kvbench.config.planned_pairs import ProtocolCell, count_pairs
from kvbench.sweeps.power_table import count_samples, list_protocols
from kvbench.validation import SettingError


def test_the_issue_of_the_study_is_computed():
    """13 tasks of 36 and 108 samples, and a deviation of 40 points."""
    assert [round(compute_power(40.0, [count] * 13, 2).pair, 1) for count in (36, 108)] == [5.2, 3.0]
    few, many = (compute_power(40.0, [36] * 13, cells) for cells in (2, 30))
    assert few.pair == few.ranks == many.pair < few.full < many.full < many.ranks


def test_the_page_states_what_is_computed():
    text = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text()
    rows = text.split("| samples a task |")[1].split("\n\n")[0].splitlines()[2:]
    for row in rows:
        count, *stated = (float(cell) for cell in row.strip("| ").split("|"))
        power = compute_power(40.0, [int(count)] * 13, 20)
        assert stated == [round(points, 1) for points in (power.pair, power.full, power.ranks)]
    assert len(rows) == 4


def test_cells_that_keep_all_rows_are_a_column_of_their_own():
    common = ["model=reference", "task=ruler", "task.samples=4", "budget=0.05"]
    cells = [[*common, f"method={name}"] for name in ("snapkv", "tova")] + [[*common, "method=full", "codec=int4"]]
    [protocol], _ = list_protocols(cells)
    assert (len(protocol.cells), protocol.column) == (3, 2)


def test_unequal_subtasks_weigh_the_same():
    alike, unlike = (compute_power(40.0, samples, 2).pair for samples in ([50, 50], [10, 90]))
    assert unlike / alike == pytest.approx(((1 / 10 + 1 / 90) / (2 / 50)) ** 0.5)


def test_a_simulated_study_shows_the_difference_in_four_of_five_cases():
    draw, studies, count, subtasks = np.random.default_rng(0), 400, 36, 4
    # a share of 0.08 + d is lost and 0.08 gained: the standard deviation of a difference follows from both
    lost, gained = 0.19, 0.08
    deviation = 100 * (lost + gained - (lost - gained) ** 2) ** 0.5
    power = compute_power(deviation, [count] * subtasks, 2).pair
    assert power == pytest.approx(100 * (lost - gained), abs=1.1)  # so about 80 % of studies must show it
    averages = []
    for _ in range(studies):
        chances = draw.random((subtasks, count))
        changes = np.where(chances < lost, -100.0, np.where(chances > 1 - gained, 100.0, 0.0))
        names = [str(at) for at in range(count)]
        scores = [
            PairedScores(np.where(row < 0, 100.0, 0.0).tolist(), np.where(row > 0, 100.0, 0.0).tolist(), groups)
            for task, row in enumerate(changes)
            for groups in [[f"{task}/{name}" for name in names]]
        ]
        averages.append((scores, None))
    shown = sum(change.high < 0 for change in compare_averages(averages)) / studies
    assert 0.72 < shown < 0.86


def test_the_deviation_is_that_of_measured_intervals():
    draw = np.random.default_rng(1)
    changes = draw.choice([-100.0, 0.0, 100.0], 400, p=[0.2, 0.7, 0.1])
    scores = PairedScores(
        np.where(changes < 0, 100.0, 0.0).tolist(),
        np.where(changes > 0, 100.0, 0.0).tolist(),
        list(map(str, range(400))),
    )
    [change] = compare_averages([([scores], None)])
    line = {"low": change.low, "high": change.high, "lost": change.lost, "gained": change.gained, "n": 400}
    assert estimate_deviation([line]) == pytest.approx(changes.std(ddof=1))
    assert estimate_deviation([line | {"lost": 3, "gained": 2}, line | {"low": None}]) is None


def test_protocols_and_their_largest_columns():
    given = ["model=reference", "task=ruler", "task.samples=12", "limit=10"]
    cells = [
        [*given, f"method={method}", f"budget={budget}", f"question={question}"]
        for question in ("visible", "hidden")
        for method, budget in (("snapkv", 0.5), ("tova", 0.5), ("snapkv", 0.2))
    ]
    protocols, unknown = list_protocols([*cells, [*given, "method=full"], ["task=niah", "method=snapkv"]])
    assert [(planned.label, list(planned.samples), planned.column, planned.answers) for planned in protocols] == [
        (f"reference, ruler 2048, question {question}", [10] * 13, 2, 4 * 130) for question in ("visible", "hidden")
    ]
    assert unknown == ["the settings of task=niah do not say how many samples each subtask has"]


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        (["task=ruler", "task.samples=3", "task.subtasks=[ruler_vt]"], [3]),
        (["task=ruler", "task.samples=3", "limit=2"], [2] * 13),
        (["task=ledger", "task.samples=9", "task.steps=[20,30]"], [9, 9]),
        (["task=scbench", "task.subtasks=scbench_kv", "task.rows=6", "task.max_turns=2"], [6, 6]),
    ],
)
def test_a_task_says_how_many_samples_it_has(given, counts):
    assert count_samples(compose_config(given)) == counts


def test_one_sample_shows_nothing():
    with pytest.raises(SettingError, match="1 sample a subtask"):
        count_samples(compose_config(["task=ruler", "task.samples=1"]))


CELLS = [
    ProtocolCell(question, tuple(f"{settings} budget={budget}".split()), budget)
    for question in ("visible", "hidden")
    for budget in ("0.1", "0.2")
    for settings in ("method=snapkv", "method=snapkv codec=int4", "method=tova")
]


@pytest.mark.parametrize(
    ("pair", "count"),
    [
        (("method=snapkv", "method=tova"), 2),  # at the same budget: 0.1 and 0.2
        (("method=snapkv budget=0.1", "method=snapkv codec=int4 budget=0.2"), 1),
        (("method=tova", "method=tova budget=0.1"), 2),
    ],
)
def test_a_pair_is_compared_in_each_protocol_that_has_both(pair, count):
    assert count_pairs([pair], CELLS) == {"visible": count, "hidden": count}


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("method=snapkv", "method=keydiff"), "no sweep has both 'method=snapkv' and 'method=keydiff' to compare"),
        (("method=snapkv budget=0.1", "method=tova budget=0.3"), "no sweep has both"),
    ],
)
def test_a_pair_without_cells_is_refused(pair, said):
    with pytest.raises(SettingError, match=said):
        count_pairs([pair], CELLS)


def test_a_pair_that_means_several_cells_of_a_budget_is_refused():
    twice = [*CELLS, ProtocolCell("visible", ("method=tova", "method.preset=kvpress", "budget=0.1"), "0.1")]
    with pytest.raises(SettingError, match="mean several cells of one budget; name more settings"):
        count_pairs([("method=snapkv", "method=tova")], twice)


def test_the_commands_print_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # a narrower table is written in two parts
    sweep = ["model=reference", "task=ruler", "task.samples=36", "method=snapkv,tova", f"results={tmp_path}"]
    assert plan([*sweep, "--power"]) == 0
    out = capsys.readouterr().out
    assert (
        out.split()[0] == "protocol"
        and out[0] == "p"
        and "40.0 (assumed)" in out
        and " 468 " in out
        and out.split("(assumed)")[1].split()[:3] == ["5.2", "5.7", "5.2"]
    )
    parts = tmp_path / "parts.yaml"
    parts.write_text(
        f"tiny:\n  title: A small part\n  rate: 100\n  pairs: [[method=snapkv, method=tova]]\n  sweeps:\n"
        f"    - {{budget=0.2: [{' '.join(sweep[:3])} method=tova, {' '.join(sweep[:3])} method=snapkv]}}\n"
    )
    asked = ["tiny", "--file", str(parts), "--power", "--deviation", "20", "--results", str(tmp_path)]
    assert measured(asked) == 0
    out = capsys.readouterr().out
    assert "part tiny: A small part" in out and "20.0 (given)" in out and not (tmp_path / "runs").exists()
    assert "1,404 answers, about 14 minutes at 100 a minute" in out and " 2.6      2.6   2.9 " in out
    assert "1 planned comparisons: method=snapkv against method=tova." in out
    assert measured([*asked, "--rate", "50"]) == 0 and "about 28 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "given", "said"),
    [
        (plan, ["task=ruler", "--deviation", "3"], "--deviation: only with --power"),
        (plan, ["task=ruler", "--power", "--deviation", "nan"], "--deviation=nan: choose points above 0"),
        (plan, ["task=ruler", "--rate", "3"], "--rate: only with --power"),
        (plan, ["task=ruler", "--power", "--rate", "0"], "--rate=0: choose answers a minute above 0"),
        (plan, ["task=niah", "--power"], "--power: the settings of task=niah do not say"),
        (plan, ["task=ruler", "method=full", "--power"], "--power: no cell compares a method with the full cache"),
        (measured, ["a", "--power", "--workers", "2"], "--workers: not with --power"),
        (measured, ["--page", "--power"], "--page: measures no part"),
        (measured, ["--power"], "name a part of conf/measured.yaml"),
    ],
)
def test_what_cannot_be_used_is_one_line(main, given, said, capsys):
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvbench: ") and said in err and err.count("\n") == 1


def test_more_comparisons_need_larger_differences():
    reach = [compute_reach(40.0, [108] * 13, comparisons) for comparisons in (1, 10, 68)]
    assert [round(points, 1) for points in reach] == [3.0, 3.9, 4.5]
    assert reach[0] == compute_power(40.0, [108] * 13, 9).pair and compute_power(40.0, [108] * 13, 5).ranks == reach[1]


def test_a_single_cell_has_no_pairs():
    assert compute_power(40.0, [10, 10], 1) == Power(*[compute_power(40.0, [10, 10], 1).pair] * 3)
