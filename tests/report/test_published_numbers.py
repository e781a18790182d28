"""The numbers of the page follow from the published files: from their rows, by plain means, and from nothing else."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from kvbench.analysis.result_lines import ROWS, list_part_files, read_lines
from kvbench.report.results_page import choose_files, write_results_page
from kvbench.store.published_file import write_published
from kvbench.store.published_runs import publish
from kvbench.store.runs import load_runs
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records
from tests.support.repository import ROOT

MEASURED = ROOT / "results" / "measured"
PUBLISHED = [path for path in list_part_files(MEASURED) if path.suffix == ROWS]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A file with two questions, three methods and two budgets. One answer of a cell failed."""
    folder = tmp_path_factory.mktemp("store")
    for question in ("visible", "hidden"):
        exact = make_records(1.0, 100, count=20, fidelity={"nll": 0.5, "kl": 0.0})
        write_run(folder, exact, method={"name": "full"}, question=question)
        for salt, (name, chance) in enumerate({"snapkv": 90, "knorm": 40, "random": 5}.items()):
            for budget in (0.5, 0.2):
                records = make_records(budget, chance, salt, count=20, fidelity={"nll": 1.0, "kl": chance / 300})
                if (name, budget) == ("random", 0.2):
                    records["vt/3"] |= {"error": "out_of_memory", "score": None, "stop": "error"}
                write_run(folder, records, method={"name": name}, budget=budget, question=question)
    path = folder / "measured" / "nvidia-h200" / f"a{ROWS}"
    path.parent.mkdir(parents=True)
    write_published([publish(run) for run in load_runs(folder)], {}, path)
    return path


def average_rows(rows: pandas.DataFrame, values: pandas.Series) -> float:
    """Return the mean over subtasks, weighted as the first average of a run says, or all the same."""
    averages = json.loads(rows.settings.iloc[0])["averages"]
    means = values.groupby(rows.subtask).mean()
    weights = averages[0][1] if averages else dict.fromkeys(means.index, 1.0)
    return float(np.average([means[name] for name in weights], weights=list(weights.values())))


def check_lines(path: Path) -> int:
    """Compare the lines of a file with means over its rows, and return the number of cells."""
    frame = pandas.read_parquet(path)
    lines = read_lines(path)
    assert {line["hash"] for line in lines} == set(frame.run)
    shared = ["model", "task", "question", "protocol"]
    for _, cells in pandas.DataFrame(lines).groupby([*shared], dropna=False):
        rows = frame[frame.run.isin(cells.hash)]
        answered = rows.groupby("uid").score.apply(lambda scores: scores.notna().all())
        rows = rows[rows.uid.map(answered)].set_index("uid").sort_index()
        [full] = cells.hash[cells.label == "full cache"]
        right = rows[rows.run == full].score
        for cell in cells.to_dict("records"):
            own = rows[rows.run == cell["hash"]]
            change = own.score - right
            counts = {"n": len(own), "lost": (change < -1e-9).sum(), "gained": (change > 1e-9).sum()}
            numbers = {
                "score": average_rows(own, own.score),
                "bytes_held": average_rows(own, own.resident_bytes / own.full_bytes),
                "rows_attended": average_rows(own, own.rows_attended / own.rows_seen_decoding),
                "at_limit": average_rows(own, (own.stop == "length").astype(float)),
            }
            if cell["hash"] != full:
                assert {name: cell[name] for name in counts} == counts
                numbers["difference"] = average_rows(own, change)
            if rows.kl.notna().all():
                numbers["kl"] = average_rows(own, own.kl)
            assert {name: cell[name] for name in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-9)
    return len(lines)


def test_the_lines_of_a_file_are_means_over_its_rows(made):
    assert check_lines(made) == 14


@pytest.mark.full
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_lines_of_a_published_file_are_means_over_its_rows(path):
    assert check_lines(path) > 0


def test_published_files_are_small():
    assert sum(path.stat().st_size for path in PUBLISHED) <= 5e6


def test_the_page_has_the_numbers_of_a_file(made, tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench.report.results_page.draw_pictures", lambda parts: {})
    paths = write_results_page(choose_files(made.parents[1]), tmp_path / "docs")
    text = "\n".join(path.read_text() for path in paths)
    cells = [line for line in read_lines(made) if line["method"] != "full"]
    assert len(cells) == 12
    for line in cells:
        assert f"{line['score']:.1f}" in text and f"{line['difference']:+.1f}" in text
