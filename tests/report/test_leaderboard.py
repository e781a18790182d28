"""A site from bundles alone: its numbers are those of their records, and a bundle that does not verify is named."""

import json
import re
from html.parser import HTMLParser

import pytest

from kvbench.analysis.bundle import MANIFEST, TABLE, write_bundle
from kvbench.analysis.run_labels import format_budget
from kvbench.analysis.score_matrix import build_blocks, list_cells
from kvbench.analysis.text_table import format_number
from kvbench.cli import leaderboard
from kvbench.store.runs import load_runs
from tests.support import made_up_runs
from tests.support.bundles import signed, unpacked
from tests.support.report_store import MACHINE, make_records

FULL = {"method": {"name": "full"}}
SETTINGS = {name: {"name": "tiny", "path": None} for name in ("model", "method", "allocator", "codec", "task")}
STATED = MACHINE | {"code": f"git {40 * 'a'}", "settings": SETTINGS | {"budget": 0.1}}


def write_run(folder, records, **changed):
    return made_up_runs.write_run(folder, records, machine=STATED, **changed)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Two authors: both ran the full cache, each one method."""
    found = {}
    for name, chance in (("snapkv", 80), ("knorm", 40)):
        folder = tmp_path_factory.mktemp(name)
        write_run(folder, make_records(1.0, 100), **FULL)
        for budget in (0.1, 0.2):
            write_run(folder, make_records(budget, chance), method={"name": name}, budget=budget)
        found[name] = folder / f"{name} <b>.zip"
        write_bundle(folder, {}, found[name])
    return found


class TableReader(HTMLParser):
    """The texts of all cells of the page's tables, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def read_rows(path) -> list[list[str]]:
    reader = TableReader()
    reader.feed(path.read_text())
    return reader.rows


def test_the_site_shows_all_runs_of_all_bundles(bundles, tmp_path, capsys):
    site = tmp_path / "site"
    assert leaderboard.main([*map(str, bundles.values()), "--out", str(site)]) == 0
    assert capsys.readouterr().out == f"{site / 'index.html'}\n"
    rows = read_rows(site / "index.html")
    scores = [row for row in rows if row[0] in ("snapkv", "knorm", "full cache")]
    assert [row[0] for row in scores] == [*2 * ["snapkv", "knorm"], *2 * ["full cache"]]  # by budget, the best first
    for name, own in bundles.items():
        runs = load_runs(own.parent)
        for _, label, cell in list_cells(build_blocks(runs, runs)[0]):
            shown = next(row for row in scores if row[0] == label and row[2].startswith(name) and (
                label == "full cache" or row[1] == format_budget(cell.run)))  # fmt: skip
            assert shown[3].rstrip("*†") == format_number(cell.score.value)
            assert cell.difference is None or shown[5] == format_number(cell.difference.difference, sign="+")
        row = next(row for row in rows if row[0] == f"{name} <b>.zip")
        assert row[2:4] == ["3", str(3 * 24)]
        digest = row[5][:16]
        assert (site / "bundles" / f"{digest}.zip").read_bytes() == own.read_bytes()
        report = (site / "reports" / digest / "report.html").read_text()
        assert name in report and ("knorm" in report) == (name == "knorm")  # each report shows one submission
        assert f"reports/{digest}/report.html" in (site / "index.html").read_text()
    text = (site / "index.html").read_text()
    assert "<b>" not in text and "x86_64" in text and "torch 2.13.0" in text and f"git {40 * 'a'}" in text
    assert "python run.py model=tiny method=tiny allocator=tiny codec=tiny task=tiny budget=0.1" in text
    dates = re.findall(r'"date":"([0-9-]+)"', report)
    assert dates and all(date.startswith("20") for date in dates)


def test_a_site_is_written_again_and_nothing_else_is_touched(bundles, tmp_path, capsys):
    one, both = [str(bundles["snapkv"])], [*map(str, bundles.values())]
    own = tmp_path / "reports" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("mine")
    for given in (both, one):
        assert leaderboard.main([*given, "--out", str(tmp_path)]) == 0
    assert "knorm" not in (tmp_path / "index.html").read_text()
    assert own.read_text() == "mine" and not list(tmp_path.rglob("prompts-*"))
    capsys.readouterr()
    results = bundles["knorm"].parent  # its runs would be mixed with the site
    assert leaderboard.main([str(bundles["snapkv"]), "--out", str(results)]) == 2
    assert capsys.readouterr().err.startswith(f"kvbench: --out={results}: is a folder of results")


@pytest.fixture
def damaged(bundles, tmp_path):
    """Bundles that cannot be used: path -> a part of the line that says why."""
    files = unpacked(bundles["knorm"])
    records = next(own for own in files if own.endswith("records.jsonl"))
    machine = next(own for own in files if "machine" in own)
    hostile = {  # what a stranger may write
        "short.zip": {records: b""},
        "deep.zip": {records: b'{"uid": ' + b"[" * 200_000 + b"\n"},
        "wide.zip": {TABLE: b'"' + b"a" * 200_000 + b'"\n'},
        "list.zip": {machine: b"[]"},
        "half.zip": {machine: b"{"},
        "undated.zip": {MANIFEST: json.dumps(json.loads(files[MANIFEST]) | {"finished": {"0" * 16: 1}}).encode()},
    }
    for name, changed in hostile.items():
        (tmp_path / name).write_bytes(signed(files | changed))
    return [tmp_path / "none.zip", *(tmp_path / name for name in hostile)]


def test_a_bundle_that_cannot_be_used_is_named_and_the_others_are_shown(bundles, damaged, tmp_path, capsys):
    site = tmp_path / "site"
    assert leaderboard.main([*map(str, damaged), str(bundles["snapkv"]), "--out", str(site)]) == 1
    lines = capsys.readouterr().err.splitlines()
    page = (site / "index.html").read_text()
    assert len(lines) == len(damaged)
    for path, line in zip(damaged, lines, strict=True):
        assert line.startswith(f"kvbench: bundle={path}: ")
        assert f"<li>{path.name}: " in page and str(tmp_path) not in page
    assert any(row[0] == "snapkv" for row in read_rows(site / "index.html"))


def test_nothing_is_written_if_no_bundle_can_be_used(damaged, tmp_path, capsys):
    site = tmp_path / "site"
    assert leaderboard.main([str(damaged[0]), "--out", str(site)]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["kvbench: none of the 1 bundles can be used"]
    assert not site.exists()


def check(capsys, *paths):
    """Exit code of --check, and verdict by point of the last bundle."""
    code = leaderboard.main(["--check", *map(str, paths)])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return code, {point: verdict for verdict, point, *_ in lines}


def test_the_checklist_says_what_readers_will_ask(bundles, damaged, tmp_path, capsys):
    code, good = check(capsys, bundles["snapkv"])
    assert code == 0
    assert good == dict.fromkeys(
        ("verifies", "scored", "full-cache", "samples", "failed", "limit", "hardware", "software", "code", "commands"),
        "pass",
    ) | {"data": "warn", "fidelity": "warn"}
    assert check(capsys, bundles["snapkv"], damaged[0]) == (2, good | {"verifies": "fail"})
    full = make_records(1.0, 100)
    uid = next(iter(full))
    task = {"name": "ruler", "limit": 8, "samples": 9, "subtasks": [*{own["subtask"] for own in full.values()}]}
    changed = {"machine": {"code": f"git {40 * 'a'} dirty"}, "task": task}
    made_up_runs.write_run(tmp_path, full | {uid: full[uid] | {"score": None, "error": "oom"}}, **changed, **FULL)
    records = dict([*make_records(0.1, 80).items()][:-1])
    made_up_runs.write_run(tmp_path, records, **changed, budget=0.1)
    write_bundle(tmp_path, {}, tmp_path / "own.zip")
    verdicts = dict.fromkeys(("full-cache", "samples", "hardware", "software", "commands"), "fail")
    assert check(capsys, tmp_path / "own.zip") == (2, good | verdicts | {"limit": "warn", "code": "warn"})
    assert leaderboard.main(["--check", "x.zip", "--out", "y"]) == 2


@pytest.mark.parametrize("name", ["", "=1+1", "\u202e\n<b>"])
def test_an_odd_name_of_a_method_is_shown(tmp_path, name):
    write_run(tmp_path / "own", make_records(1.0, 100, count=2), **FULL)
    write_run(tmp_path / "own", make_records(0.1, 80, count=2), method={"name": name}, budget=0.1)
    write_bundle(tmp_path / "own", {}, tmp_path / "own.zip")
    assert leaderboard.main([str(tmp_path / "own.zip"), "--out", str(tmp_path / "site")]) == 0
    shown = {"": "(no name)", "=1+1": "=1+1"}.get(name, "\\u202e\\n<b>")
    assert any(row[0] == shown for row in read_rows(tmp_path / "site" / "index.html"))
