"""`kvbench dev measured`: a part from its sweeps to the page, and what it refuses in one line."""

import hashlib
from pathlib import Path

import pytest

from kvbench.analysis.bundle import verify_bundle
from kvbench.analysis.result_lines import read_lines
from kvbench.cli import run
from kvbench.cli.measured import keep_full_cache, main, make_files, write_rows
from kvbench.config.provenance import content_hash
from kvbench.config.study_parts import StudyPart
from kvbench.models.checkpoint import Checkpoint
from kvbench.store.checksums import read_checksums
from kvbench.store.published_file import read_published
from kvbench.store.runs import find_runs
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.report_store import make_records

STUDY = """\
tiny:
  title: A small part
  common: model=hf model.path={} task=niah task.lengths=[256] task.depths=[50] task.new_tokens=16 budget=0.5
  sweeps:
    - {}
"""


@pytest.fixture
def write_parts(checkpoint, tmp_path):
    """Writes a file with a part of these sweeps."""

    def write(*sweeps: str) -> Path:
        path = tmp_path / "parts.yaml"
        path.write_text(STUDY.format(checkpoint, "\n    - ".join(sweeps)))
        return path

    return write


def test_a_tier_becomes_a_file_and_a_page(write_parts, tmp_path, capsys):
    results = tmp_path / "results"
    parts = write_parts('{question=visible: [method=random, "method=sink,random"]}')
    given = ["tiny", "--file", str(parts), "--results", str(results)]
    assert main(given) == 0
    path = results / "measured" / "cpu" / "tiny.parquet"
    out = capsys.readouterr().out
    assert f"{path}: 3 cells, 3 of 3 runs are finished" in out and out.count("part tiny, sweep 1 of 1: ") == 2
    rows = path.read_bytes()
    assert main(["--lines", str(path)]) == 0
    text = capsys.readouterr().out
    assert {line.split(",")[-1] for line in text.splitlines()[1:]} == {run.hash for run in find_runs(results).runs}
    assert main([*given, "--workers", "3"]) == 0  # nothing is left to run
    assert path.read_bytes() == rows and " workers=3\n" in capsys.readouterr().out
    assert main(["--page", "--results", str(results), "--out", str(tmp_path / "docs")]) == 0
    page = (tmp_path / "docs" / "results-equal-bytes.md").read_text()
    assert "| random |" in page and "| sink |" in page


def test_a_machine_without_pyarrow_measures_and_another_one_collects(write_parts, tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    given = ["tiny", "--file", str(write_parts("method=random,sink")), "--results", str(results)]
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.store.published_runs.find_spec", lambda name: None)
        assert main(given) == 0
        out, errors = capsys.readouterr()
        said = (
            "part tiny: no pyarrow here, so no file of rows; copy RESULTS and run kvbench dev measured tiny --collect"
        )
        assert said in errors and said in out and "3 cells, 3 of 3 runs are finished" in out
        assert not (results / "measured").exists()
        for more in (["--collect", *given], ["--lines", "x.parquet"]):
            assert main(more) == 2 and "needs pyarrow, which is not installed" in capsys.readouterr().err
    moved, gpu = tmp_path / "moved", {"type": "cuda", "gpu": "NVIDIA H200", "dtype": "bfloat16"}
    for stored in find_runs(results).runs:  # as if a GPU had made them
        finish = stored.value["method"]["name"] != "sink"
        write_run(moved, stored.records, finish, **stored.value | {"device": gpu})
    assert main([*given[:-1], str(moved), "--collect", "--draw", "2"]) == 1
    path = moved / "measured" / "nvidia-h200" / "tiny.parquet"
    out = capsys.readouterr().out
    assert [line["machine"] for line in read_lines(path)] == ["NVIDIA H200"] * 2
    bundle = path.with_suffix(".zip")
    assert out == f"{bundle}: 2 drawn answers\n{path}: 2 cells, 2 of 3 runs are finished\n"
    listed = read_checksums(path.parent)
    assert listed == {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in (path, bundle)}
    verified = verify_bundle(bundle)
    assert (verified.records, verified.drawn["runs"]) == (2, 2)


def test_a_file_of_rows_names_the_files_of_its_tier(tmp_path):
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "latents.safetensors"
    file.write_text("latents")
    runs = [
        write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}),
        write_run(tmp_path, make_records(0.5, 50), codec={"name": "palu", "path": content_hash(file)}),
    ]
    write_rows(StudyPart("x", "x", ["codec.path=FILES/latents.safetensors"]), [], runs, tmp_path)
    assert read_published(tmp_path / "measured" / "cpu" / "x.parquet")[1] == {content_hash(file): "latents"}


def test_what_a_collecting_machine_lacks_is_named(write_parts, tmp_path, capsys):
    parts = write_parts("method=qfilters method.path=FILES/filters")
    parts.write_text(parts.read_text() + "  files:\n    filters: calibrate qfilters\n")
    given = ["tiny", "--file", str(parts), "--results", str(tmp_path), "--collect"]
    assert main(given) == 2 and "the folder contains no runs" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(given) == 2
    lacking = f"part tiny: {tmp_path}/files/filters is missing; copy it from the machine that measured"
    assert capsys.readouterr().err == f"kvbench: {lacking}\n"
    files = "".join(parts.read_text().partition("  files:")[1:])
    write_parts("method=sink")
    assert main(given[:-1]) == 0
    with_filters = write_parts("method=sink", "method=qfilters method.path=FILES/filters")
    with_filters.write_text(with_filters.read_text() + files)
    capsys.readouterr()
    assert main(given) == 1
    out, err = capsys.readouterr()
    assert out.endswith("2 cells, 2 of 3 runs are finished\n")
    assert err == f"{lacking}. 1 cell needs a missing file and counts as not finished.\n"


def test_a_tier_whose_model_is_missing_is_refused_before_its_files_are_made(tmp_path, capsys):
    line = "model=hf model.path=/nowhere task=ruler method=qfilters method.path=FILES/filters budget=0.5"
    parts = tmp_path / "parts.yaml"
    parts.write_text(f"x: {{title: x, files: {{filters: calibrate nosuch}}, sweeps: ['{line}']}}")
    assert main(["x", "--file", str(parts), "--results", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvbench: model.path=/nowhere: ") and err.count("\n") == 1


def test_the_full_cache_of_a_line_has_none_of_its_cuts():
    line = (
        "model=x budget=0.1,0.2 budget_of=seen method=qfilters method.path=f allocator=ada codec.bits=4 question=hidden"
    )
    assert keep_full_cache(line.split()) == ["model=x", "budget_of=seen", "question=hidden", "method=full"]


def test_a_study_begun_with_other_code_is_refused(write_parts, tmp_path, monkeypatch, capsys):
    given = ["tiny", "--file", str(write_parts("method=sink")), "--results"]
    assert main([*given, str(tmp_path / "results")]) == 0
    before = sorted((tmp_path / "results").rglob("*"))
    monkeypatch.setattr("kvbench.runs.spec.source_hash", lambda modules: "0" * 16)
    capsys.readouterr()
    assert main([*given, str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kvbench: results={tmp_path / 'results'}: 2 runs of part tiny (")
    assert " to go on with them, or give another folder with --results to begin anew" in err and err.count("\n") == 1
    assert sorted((tmp_path / "results").rglob("*")) == before
    assert main([*given, str(tmp_path / "anew")]) == 0


def test_the_sweeps_of_a_tier_share_what_is_loaded(write_parts, tmp_path, monkeypatch):
    loaded, weights = [], Checkpoint.weights

    def load(checkpoint, *given):
        loaded.append(checkpoint.name)
        return weights(checkpoint, *given)

    monkeypatch.setattr(Checkpoint, "weights", load)
    parts = write_parts("method=random", "method=sink")
    assert main(["tiny", "--file", str(parts), "--results", str(tmp_path / "results")]) == 0
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("sweep", "code", "said"),
    [
        (
            "method=random,knorm codec=kivi codec.residual=32",
            1,
            "2 cells, 2 of 2 runs are finished; 1 cells are refused",
        ),
        ("method=full", 2, "part tiny: no run of a method is finished"),
    ],
)
def test_a_tier_that_lacks_cells_says_so(sweep, code, said, write_parts, tmp_path, capsys):
    results = tmp_path / "with, a space"
    assert main(["tiny", "--file", str(write_parts(sweep)), "--results", str(results)]) == code
    assert said in "".join(capsys.readouterr()) and (results / "runs").is_dir()


@pytest.mark.parametrize(("first", "said"), [(0, ""), (1, "tiny.parquet: 2 cells, 2 of 3 runs are finished")])
def test_a_tier_that_is_stopped_has_the_rows_of_what_is_finished_and_goes_on_elsewhere(
    first, said, write_parts, tmp_path, monkeypatch, capsys
):
    begun, run_sweep = [], run.run_sweep

    def stop(lines, **more):
        begun.append(lines)
        if len(begun) > first:
            raise KeyboardInterrupt
        return run_sweep(lines, **more)

    monkeypatch.setattr(run, "run_sweep", stop)
    parts, results = write_parts("method=random", "method=sink"), tmp_path / "results"
    assert main(["tiny", "--file", str(parts), "--results", str(results)]) == 130
    out, errors = capsys.readouterr()
    assert said in out and "kvbench: stopped" in errors
    assert (results / "measured" / "cpu" / "tiny.parquet").exists() == bool(first)
    monkeypatch.undo()
    results.mkdir(exist_ok=True)  # nothing was written if it was stopped before the first sweep
    moved = results.rename(tmp_path / "another machine's folder")
    kept = {path: path.read_bytes() for path in moved.glob("runs/*/records*.jsonl")}
    assert main(["tiny", "--file", str(parts), "--results", str(moved)]) == 0
    out = capsys.readouterr().out
    assert f"part tiny: {first} of 2 cells are done\n" in out
    assert "tiny.parquet: 3 cells, 3 of 3 runs are finished" in out
    assert all(path.read_bytes() == text for path, text in kept.items())
    assert len([*moved.glob("runs/*/records*.jsonl")]) == 3 and len(kept) == 2 * first


def test_a_file_that_could_not_be_made_does_not_get_its_name(tmp_path, monkeypatch):
    path, given = tmp_path / "files" / "pattern", []

    def start(arguments):
        given.append(arguments)
        Path(arguments[-1]).write_text("half")
        Path(f"{arguments[-1]}.log.jsonl").write_text("losses")
        return len(given) == 1

    monkeypatch.setattr("kvbench.__main__.start", start)
    with pytest.raises(SettingError, match="part b: .*pattern could not be made"):
        make_files("b", {path: ["calibrate", "x"]})
    assert sorted(own.name for own in path.parent.iterdir()) == ["draft-pattern", "draft-pattern.log.jsonl"]
    make_files("b", {path: ["calibrate", "x"]})
    assert path.read_text() == "half" and path.with_name("pattern.log.jsonl").read_text() == "losses"
    assert given[1] == ["calibrate", "x", "--out", str(path.with_name("draft-pattern"))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "name a part of conf/measured.yaml, such as screening; or --page"),
        (["nosuch"], "part=nosuch: choose one of screening, confirmation, "),
        (["seeds", "--page"], "--page: measures no part"),
        (["--page", "--workers", "2"], "--page: measures no part"),
        (["seeds", "--lines", "a.parquet"], "--lines: measures no part"),
        (["--lines", "a.parquet", "--page"], "--page: measures no part"),
        (["--lines", "/nowhere.parquet"], "/nowhere.parquet: cannot be read as published runs (No such file"),
        (["--lines", "x.zip"], "--lines=x.zip: a .parquet file of rows"),
        (["--page", "--out", "/dev/null/x"], "--out=/dev/null/x: a folder that can be written"),
        (["seeds", "--collect", "--power"], "--power: not with --collect"),
        (["seeds", "--collect", "--workers", "2"], "--workers: not with --collect, which measures nothing"),
        (["screening", "--draw", "0"], "--draw=0: a whole number of at least 1"),
        (["--page", "--draw", "3"], "--draw: not with --page, which writes no rows"),
        (["seeds", "--workers", "0"], "--workers=0: a whole number of at least 1"),
        (["seeds", "--workers", "-1"], "--workers=-1: a whole number of at least 1"),
        (["seeds", "--workers", "1.5"], "--workers=1.5: a whole number of at least 1"),
        (["seeds", "--workers", "many"], "--workers=many: a whole number of at least 1"),
        (["seeds", "--machine", "x"], "--machine, --out and --margin: only with --page"),
        (["--page", "--margin", "0"], "--margin=0: choose points above 0 and up to 100"),
        (["--page", "--margin", "nan"], "--margin=nan: choose points above 0 and up to 100"),
        (["--page", "--results", "/nowhere"], "/nowhere/measured: no results there; kvbench dev measured screening"),
        (["seeds", "--results", "/dev/null/x"], "--results=/dev/null/x: a folder that can be written"),
        (["seeds", "--file", "/nowhere.yaml"], "--file=/nowhere.yaml: cannot be read as parts (No such file"),
    ],
)
def test_what_cannot_be_used_is_one_line(given, said, capsys):
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvbench: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "parts"),
        ("a: [", "parts"),
        ("a: {title: x}", "a title, and sweeps as a list"),
        ("a: {sweeps: []}", "a title, and sweeps as a list"),
        ("a: {title: x, sweeps: [], colour: red}", "colour: choose keys from title, sweeps, question, common, files,"),
        ("a: {title: x, sweeps: [], common: [1, 2]}", "common: a text"),
        ("a: {title: 3, sweeps: []}", "title: a text"),
        ("a: {title: x, sweeps: abc}", "a title, and sweeps as a list"),
        ("a: {title: x, sweeps: [3]}", "a sweep is a line"),
        ("a: {title: x, sweeps: [{b=1: []}]}", "a sweep is a line"),
        ("a: {title: x, sweeps: [{b=1: [2]}]}", "a sweep is a line"),
        ("a: {title: x, sweeps: [], pairs: [[b]]}", "pairs are lists of two cells"),
        ("a: {title: x, sweeps: [], rate: 0}", "rate=0: answers a minute"),
        ("a: {title: x, sweeps: [], changes: {b: {c: 1}}}", "changes are {cell: {what is changed: cell}}"),
        ("a: {title: x, sweeps: [], changes: {b: {1: c}}}", "changes are {cell: {what is changed: cell}}"),
        ("a: {title: x, sweeps: [], changes: {3: {b: c}}}", "changes are {cell: {what is changed: cell}}"),
        ("a: {title: x, sweeps: [], changes: {b: [c]}}", "changes are {cell: {what is changed: cell}}"),
    ],
)
def test_a_file_that_has_no_tiers_is_refused(text, said, tmp_path, capsys):
    path = tmp_path / "parts.yaml"
    path.write_text(text)
    assert main(["a", "--file", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvbench: --file={path}: ") and said in error and error.count("\n") == 1
    assert "part a: " in error or text in ("- a", "a: [")
