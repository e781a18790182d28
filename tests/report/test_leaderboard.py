"""A site from bundles alone: its numbers are those of their records, and what does not verify is not shown."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from kvbench.analysis.bundle import MANIFEST, TABLE, write_bundle
from kvbench.analysis.score_matrix import build_blocks, list_cells
from kvbench.analysis.text_table import format_number
from kvbench.cli import leaderboard
from kvbench.store.runs import load_runs
from tests.support.bundles import signed, unpacked
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records

FULL = {"method": {"name": "full"}}


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
    assert leaderboard.main([*map(str, bundles.values()), "--out", str(site), "--sort", "0.1"]) == 0
    assert capsys.readouterr().out == f"{site / 'index.html'}\n"
    for own in bundles.values():
        (tmp_path / "both" / "runs").mkdir(parents=True, exist_ok=True)
        shutil.copytree(own.parent / "runs", tmp_path / "both" / "runs", dirs_exist_ok=True)
    runs = load_runs(tmp_path / "both")
    rows = read_rows(site / "index.html")
    scores = [row for row in rows if row[0] in ("snapkv", "knorm", "full cache")]
    assert [row[0] for row in scores[:3]] == ["snapkv", "knorm", "full cache"]  # the best at 10 % first
    for _, label, cell in list_cells(build_blocks(runs, runs)[0]):
        score = format_number(cell.score.value)
        assert any(row[0] == label and any(text.startswith(score) for text in row[1:]) for row in scores)
    assert "<b>" not in (site / "index.html").read_text().replace("&lt;b&gt;", "")
    for name, own in bundles.items():
        row = next(row for row in rows if row[0] == f"{name} <b>.zip")
        assert row[1:3] == ["3", str(3 * 24)]
        assert (site / "bundles" / f"{row[4][:16]}.zip").read_bytes() == own.read_bytes()
    assert (site / "report.html").is_file() and any((site / "report").glob("samples-*.js"))
    dates = re.findall(r'"date":"([0-9-]+)"', (site / "report.html").read_text())
    assert dates and all(date.startswith("20") for date in dates)


def test_a_site_is_written_again(bundles, tmp_path):
    one, both = [str(bundles["snapkv"])], [*map(str, bundles.values())]
    for given in (one, both, one):
        assert leaderboard.main([*given, "--out", str(tmp_path)]) == 0
    assert "knorm" not in (tmp_path / "index.html").read_text()


def test_nothing_else_in_the_folder_is_touched(bundles, tmp_path, capsys):
    own = tmp_path / "report" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("mine")
    assert leaderboard.main([str(bundles["snapkv"]), "--out", str(tmp_path)]) == 0
    assert own.read_text() == "mine" and not list(own.parent.glob("prompts-*"))
    results = bundles["knorm"].parent  # its own report would be replaced
    assert leaderboard.main([str(bundles["snapkv"]), "--out", str(results)]) == 2
    assert capsys.readouterr().err.startswith(f"kvbench: --out={results}: is a folder of results")


def test_nothing_is_written_if_a_bundle_does_not_verify(bundles, tmp_path, capsys):
    files = unpacked(bundles["knorm"])
    other = tmp_path / "other.zip"
    full = next(own for own in files if own.endswith("run.yaml") and b"name: full" in files[own])
    records = full.replace("run.yaml", "records.jsonl")
    changed = [json.loads(line) for line in files[records].splitlines()]
    for record in changed:
        record["output"] += "!"
    text = "".join(json.dumps(record) + "\n" for record in changed).encode()
    other.write_bytes(signed(files | {records: text}))  # a forgery that verifies by itself
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(signed({name: own for name, own in files.items() if name != records}))
    late = json.loads(files[MANIFEST])
    late["finished"] = {"0" * 16: 1}
    undated = tmp_path / "undated.zip"
    undated.write_bytes(signed(files | {MANIFEST: json.dumps(late).encode()}))
    cases = {other: "has another answer in an earlier bundle", damaged: "does not fit the 0 records"}
    cases |= {undated: "does not say when each run was finished", tmp_path / "none.zip": "cannot be read"}
    machine = next(own for own in files if "machine" in own)
    hostile = {  # what a stranger may write
        "deep.zip": {records: b'{"uid": ' + b"[" * 200_000 + b"\n"},
        "wide.zip": {TABLE: b'"' + b"a" * 200_000 + b'"\n'},
        "list.zip": {machine: b"[]"},
        "half.zip": {machine: b"{"},
    }
    for name, changed_files in hostile.items():
        (tmp_path / name).write_bytes(signed(files | changed_files))
        cases[tmp_path / name] = "bundle="
    for path, line in cases.items():
        site = tmp_path / "site"
        assert leaderboard.main([str(bundles["snapkv"]), str(path), "--out", str(site)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and line in err, err
        assert not any(site.rglob("*.html"))
