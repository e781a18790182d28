"""What planned samples can tell apart: against simulated studies, and the commands that print it."""

from pathlib import Path

import numpy as np
import pytest

from kvbench.analysis.paired import PairedScores, compare_averages
from kvbench.analysis.power import Power, compute_power, estimate_deviation
from kvbench.cli.measured import main as measured
from kvbench.cli.plan import main as plan
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
    protocols, unknown = list_protocols([*cells, [*given, "method=full"], ["task=ledger", "method=snapkv"]])
    assert [(own.label, list(own.samples), own.cells) for own in protocols] == [
        (f"reference, ruler 2048, question {question}", [10] * 13, 2) for question in ("visible", "hidden")
    ]
    assert unknown == ["the settings of task=ledger do not say how many samples each subtask has"]


def test_one_sample_shows_nothing():
    task = {"name": "ruler", "_target_": "kvbench.tasks.ruler.task.Ruler", "samples": 1, "subtasks": ["ruler_vt"]}
    with pytest.raises(SettingError, match="1 sample a subtask"):
        count_samples(task)
    assert count_samples(task | {"samples": 3, "limit": None}) == [3]


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
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text(
        f"tiny:\n  title: A small tier\n  sweeps: [{' '.join(sweep[:4])}]\n".replace("snapkv,tova", "tova")
    )
    assert measured(["tiny", "--file", str(tiers), "--power", "--deviation", "20", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "tier tiny: A small tier" in out and "20.0 (given)" in out and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("main", "given", "said"),
    [
        (plan, ["task=ruler", "--deviation", "3"], "--deviation: only with --power"),
        (plan, ["task=ruler", "--power", "--deviation", "nan"], "--deviation=nan: choose points above 0"),
        (plan, ["task=ledger", "--power"], "--power: the settings of task=ledger do not say"),
        (plan, ["task=ruler", "method=full", "--power"], "--power: no cell compares a method with the full cache"),
        (measured, ["a", "--power", "--workers", "2"], "--workers: not with --power"),
        (measured, ["--page", "--power"], "--page: measures no tier"),
        (measured, ["--power"], "name a tier of conf/measured.yaml"),
    ],
)
def test_what_cannot_be_used_is_one_line(main, given, said, capsys):
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvbench: ") and said in err and err.count("\n") == 1


def test_a_single_cell_has_no_pairs():
    assert compute_power(40.0, [10, 10], 1) == Power(*[compute_power(40.0, [10, 10], 1).pair] * 3)
