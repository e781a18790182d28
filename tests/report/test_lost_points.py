"""The section "Why points were lost": diagnoses meet the scores of the same cells, and every number is drawn."""

import json
from datetime import UTC, datetime
from math import inf

import numpy as np
import pytest
import yaml
from scipy.stats import spearmanr

from kvbench.analysis.diagnoses import correlate_ranks, read_diagnoses, score_cells
from kvbench.report.lost_points import show_lost_points
from kvbench.report.page import write_report
from kvbench.store.runs import find_runs
from kvbench.store.study_lines import Line, read_study
from tests.support.browser import CHROMIUM
from tests.support.made_up_runs import VALUE, write_run
from tests.support.study_folders import write_study

BUDGETS = (0.05, 0.1, 0.2, 0.4)


def make_lines(cell: str, error: float) -> list[Line]:
    """Lines of two layers with two heads, of which the second layer is worse."""
    own = [Line("diagnosis", "local_answer", error, cell, prompts=2)]
    for layer in range(2):
        own.append(Line("diagnosis", "local_answer", error * (layer + 1), cell, layer, prompts=2))
        own += [Line("diagnosis", "local_answer", error * (layer + 1), cell, layer, head, prompts=2) for head in (0, 1)]
        own += [Line("diagnosis", "needles_left", 1 / (block + layer), cell, layer, x=block, y=1) for block in (1, 2)]
        own.append(Line("diagnosis", "needle", inf, cell, layer, 0, x=7, y=1))
    return own


def write_diagnoses(results, budgets=BUDGETS, **changed):
    """Cells of snapkv with errors that fall with the budget."""
    names = {budget: f"snapkv budget={budget}" for budget in budgets}
    folder = write_study(results, [line for own in budgets for line in make_lines(names[own], 1 - own)])
    about = yaml.safe_load((folder / "study.yaml").read_text())
    about["model"], about["device"], about["question"] = VALUE["model"], VALUE["device"], "visible"
    about["prompts"]["task"] = VALUE["task"] | {"limit": 2}
    settings = {name: VALUE[name] for name in ("method", "allocator", "codec", "budget_of", "block_size")}
    about["cells"] = {names[own]: settings | {"budget": own, "files": "f"} | changed for own in budgets}
    (folder / "study.yaml").write_text(json.dumps(about))  # YAML without anchors
    return read_study(folder)


def write_runs(results, budgets=BUDGETS, **changed):
    """Runs whose scores are 100 times their budgets, over two subtasks of different sizes."""
    for budget in budgets:
        records = {
            f"{subtask}/{index}": {"uid": f"{subtask}/{index}", "subtask": subtask, "score": 100 * budget + sign}
            for subtask, sign, count in (("a", 1, 3), ("b", -1, 1))
            for index in range(count)
        }
        write_run(results, records, budget=budget, **changed)


class Finished:
    """A run whose records no rule of the store looks at."""

    finished = True

    def __init__(self, run):
        self.value = run.value
        [path] = run.folder.path.glob("records*")
        self.records = {line["uid"]: line for line in map(json.loads, path.read_text().splitlines())}


def find_made(results):
    return [Finished(run) for run in find_runs(results).runs]


def test_a_cell_meets_the_run_with_the_same_settings_whatever_its_samples(tmp_path):
    write_runs(tmp_path, task=VALUE["task"] | {"limit": None})
    write_runs(tmp_path, question="hidden", budgets=(0.05,))
    study = write_diagnoses(tmp_path)
    found = score_cells(study, find_made(tmp_path))
    assert found == pytest.approx({f"snapkv budget={own}": 100 * own for own in BUDGETS})
    other = write_diagnoses(tmp_path / "other", block_size=64)
    assert score_cells(other, find_made(tmp_path)) == {}


def test_rank_correlations_are_spearmans_with_an_interval():
    draw = np.random.default_rng(0)
    x = draw.normal(size=12)
    y = np.round(-x + draw.normal(size=12), 0)  # with equal numbers
    middle, low, high = correlate_ranks(x, y)
    assert middle == pytest.approx(spearmanr(x, y).statistic)
    again = [spearmanr(x[own], y[own]).statistic for own in draw.integers(12, size=(400, 12))]
    assert (low, high) == pytest.approx(np.quantile(again, (0.025, 0.975)), abs=0.12)
    assert correlate_ranks([1, 2, 3, 4], [5, 5, 5, 5]) is None


def test_entries_draw_every_number_and_say_what_is_missing(tmp_path):
    write_runs(tmp_path)
    study = write_diagnoses(tmp_path)
    assert [own.worst for own in read_diagnoses(study)] == [[1, 0]] * 4
    scores, heads, needles = show_lost_points([study], find_made(tmp_path))
    rows = scores["spec"]["datasets"]["rows"]
    assert [row["cell"] for row in rows] == [f"snapkv budget={own}" for own in BUDGETS]
    points = [(row["value"], row["score"]) for row in rows]
    assert np.array(points) == pytest.approx(np.array([(1 - own, 100 * own) for own in BUDGETS]))
    assert "Spearman's rank correlation is -1.00 [-1.00, -1.00]" in scores["notes"][0]
    assert len(heads["spec"]["datasets"]["rows"]) == 16 and len(needles["spec"]["datasets"]["rows"]) == 16
    options = needles["spec"]["params"][0]["bind"]["options"]
    assert options == [f"snapkv budget={own}: sample 1" for own in BUDGETS]
    few = show_lost_points([write_diagnoses(tmp_path / "few", BUDGETS[:3])], find_made(tmp_path))
    assert "3 cells have a finished run; a rank correlation needs 4" in few[0]["notes"][0]
    assert [own["title"] for own in show_lost_points([study], [])] == ["Where errors are", "Where the answer was lost"]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: make test-browser")
def test_a_list_chooses_what_a_chart_shows(chromium, tmp_path):
    from tests.support.report_store import write_small_store

    store = write_small_store(tmp_path)
    write_diagnoses(store)
    page, said = chromium.new_page(viewport={"width": 1100, "height": 900}), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(write_report(store, datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).as_uri())
    page.wait_for_selector("#leaderboard table")
    for node in page.locator("#lost .study").all():
        node.scroll_into_view_if_needed()
    page.wait_for_selector("#lost .study >> nth=1 >> svg.marks")
    lists = page.locator("#lost select")
    count = page.locator("#lost svg .mark-rect.role-mark path").count()
    lists.first.select_option(index=2)
    assert count == 8 == page.locator("#lost svg .mark-rect.role-mark path").count() and said == []
    page.close()
