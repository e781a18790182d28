"""What a run is known by can be read, and stores of kvbench 0.1 stay readable."""

import json
import shutil
from pathlib import Path

import pytest

import kvbench as package
from kvbench.cli import curves as curves_command
from kvbench.cli import explain, export, papers
from kvbench.cli import figures as figures_command
from kvbench.cli.command import run_command
from kvbench.cli.report import main as report
from kvbench.config import provenance
from kvbench.config.imports import hash_text
from kvbench.store import audit
from kvbench.store import runs as stored
from kvbench.validation import SettingError
from tests.support.made_up_runs import VALUE, write_run
from tests.support.recorded_runs import read_runs
from tests.support.repository import ROOT

OLD = ROOT / "tests" / "stores" / "0.1"
HASHES = {"3124cf41d3371cd4": "full", "4c18e06028f4ddaf": "snapkv"}


@pytest.fixture
def old(tmp_path) -> Path:
    """A copy of a store that kvbench 0.1 wrote: RULER, two subtasks, two samples each, the embedded model."""
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def explained(capsys, *arguments: str) -> tuple[int, list[str], str]:
    code = run_command(lambda: explain.main(arguments))
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_a_run_is_explained(kvbench, tmp_path, monkeypatch, capsys):
    settings = ("task.subtasks=[niah_single_1]", "task.length=512", "task.samples=1", "method=knorm", "budget=0.5")
    assert kvbench(*settings, f"results={tmp_path / 'r'}")[0] == 0
    name = read_runs(tmp_path / "r")["knorm"][0].name
    code, lines, _ = explained(capsys, name[:6], "--results", str(tmp_path / "r"))
    assert code == 0 and lines[0] == name
    text = "\n".join(lines)
    assert '"name": "knorm"' in text and "├─ budget " in text and "├─ identity " in text and "└─ sources " in text
    modules = {line.split()[1] for line in lines if line.startswith("   ")}
    assert {
        "kvbench.engine.context",
        "kvbench.methods.knorm",
        "kvbench.tasks.ruler.task",
        "kvbench.kernels.attention",
    } <= modules
    assert not modules & provenance.UNCOUNTED.keys() and "kvbench.methods.snapkv" not in modules
    assert "today" not in text and "then)" not in text
    now = provenance.source_hashes

    def changed(asked):
        found = now(asked) | {"kvbench.engine.context": "0" * 16, "kvbench.newer": "1" * 16}
        found.pop("kvbench.runs.prompt")
        return found

    monkeypatch.setattr(explain, "source_hashes", changed)
    _, lines, _ = explained(capsys, name, "--results", str(tmp_path / "r"))
    notes = [line.split(maxsplit=1)[1] for line in lines if line.endswith(("today)", "then)"))]
    assert notes == [
        "kvbench.engine.context  (does something else today)",
        "kvbench.runs.prompt  (not hashed today)",
        "kvbench.newer  (not hashed then)",
    ]


def test_two_runs_that_differ_in_one_setting_differ_in_one_line(tmp_path, capsys):
    found = []
    for window in (32, 64):
        own = write_run(tmp_path, {}, method={"name": "snapkv", "window": window})
        found.append(explained(capsys, own.hash, "--results", str(tmp_path))[1][1:])
    assert [one.split()[1] for one, other in zip(*found, strict=True) if one != other] == ["method"]


def test_a_run_of_before_is_explained(capsys):
    """Its runs were named by fewer modules, each hashed as today."""
    _, lines, _ = explained(capsys, "794c", "--results", str(ROOT / "tests" / "stores" / "0.2"))
    assert "   a9cbd9e2  kvbench.store" in lines  # an `__init__.py` that only says something
    assert [line for line in lines if line.endswith("  kvbench.runs.workers  (not hashed then)")]


def test_what_cannot_be_explained_is_one_line(tmp_path, capsys):
    for window in range(20):
        write_run(tmp_path, {}, method={"name": "snapkv", "window": window})
    for name, line in (("zz", f"run=zz: no run of {tmp_path} begins so"), ("", "run=: 20 runs begin so")):
        code, out, err = explained(capsys, name, "--results", str(tmp_path))
        assert (code, out) == (2, []) and err.startswith(f"kvbench: {line}") and err.count("\n") == 1


def test_a_store_of_0_1_is_loaded_exported_and_explained(old, tmp_path, capsys):
    loaded = package.load(str(old))
    assert dict(loaded.runs["method"]) == HASHES and not loaded.damaged
    assert len(loaded.records(["uid", "score"])) == 8
    assert {state for _, state, _ in audit.audit_runs(old)} == {"4 records, finished"}
    assert export.main(["--results", str(old), str(tmp_path / "export")]) == 0
    assert curves_command.main(["--results", str(old)]) == 0 and "snapkv" in capsys.readouterr().out
    code, lines, _ = explained(capsys, "4c18", "--results", str(old))
    assert code == 0 and "   (kvbench 0.1 did not write down which modules these are)" in "\n".join(lines)


def test_figures_are_drawn_of_a_store_of_0_1(old):
    assert figures_command.main(["--results", str(old), "--kind", "tasks"]) == 0
    assert list((old / "figures").glob("*.csv"))


def test_a_papers_table_shows_a_store_of_0_1(old, capsys):
    assert papers.main(["--results", str(old), "dropkv", "1"]) == 0 and "SnapKV" in capsys.readouterr().out


def test_the_page_shows_a_store_of_0_1(old, monkeypatch):
    """Without the charting library and the texts of prompts, which take 10 s and come from no record."""
    monkeypatch.setattr("kvbench.report.page.load_scripts", lambda: ("", ""))
    monkeypatch.setattr("kvbench.report.page.build_charts", dict)
    monkeypatch.setattr("kvbench.report.excerpts.COMMAND", ["true"])
    assert report(["--results", str(old)]) == 0
    page = (old / "report.html").read_text()
    assert "snapkv" in page and all(name in page for name in HASHES)


def test_a_run_of_0_1_is_never_paired_with_a_new_one(old):
    runs = stored.load_runs(old)
    full, method = sorted(runs, key=lambda run: not run.full)
    assert stored.find_baseline(method, runs).hash == full.hash
    new = write_run(old, method.records, **method.value | {"identity": 2})
    with pytest.raises(SettingError, match="no finished run of the full cache on the same samples"):
        stored.find_baseline(new, stored.load_runs(old))


def test_runs_say_how_they_are_named(kvbench, tmp_path):
    settings = ("task.subtasks=[niah_single_1]", "task.length=512", "task.samples=1", "method=full")
    assert kvbench(*settings, f"results={tmp_path / 'r'}")[0] == 0
    folder = read_runs(tmp_path / "r")["full"][0]
    assert stored.load_runs(tmp_path / "r")[0].value["identity"] == 2
    machine = json.loads(next(folder.glob("machine*.json")).read_text())
    assert (
        hash_text("".join(f"{name} {own}\n" for name, own in machine["sources"].items()))
        == (stored.load_runs(tmp_path / "r")[0].value["sources"])
    )
    assert "identity" not in VALUE
