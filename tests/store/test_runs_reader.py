"""One reader of the store: damage means the same to every command, and each run's is one line."""

from pathlib import Path

import pytest

import kvbench
from kvbench.atomic import replace_file
from kvbench.papers.cell_values import RunIndex
from kvbench.store import audit
from kvbench.store.runs import FoundRuns, RunRecords, find_finished, find_runs, flatten, load_runs, parse_selection
from kvbench.sweeps.status import SampleTimes
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run


def records(count: int = 3) -> dict[str, dict]:
    found = {}
    for index in range(count):
        uid = f"a/{index}"
        found[uid] = {"uid": uid, "score": 1.0, "meta": {"depth": index}, "prompt_hash": "p", "target_hash": "t"}
    return found


@pytest.fixture
def store(tmp_path) -> dict[str, Path]:
    """One run of each kind: what it is -> its folder."""
    found = {
        name: write_run(tmp_path, records(), finish, budget=0.1 * (1 + place)).folder.path
        for place, (name, finish) in enumerate(
            {"good": True, "begun": False, "killed": False, "lost": True, "zeros": True, "yaml": True}.items()
        )
    }
    found["empty"] = tmp_path / "runs" / "empty"
    found["empty"].mkdir()
    files = {name: next(path.glob("records*.jsonl"), None) for name, path in found.items()}
    files["killed"].write_bytes(files["killed"].read_bytes()[:-9])
    files["lost"].write_bytes(files["lost"].read_bytes()[:-9])
    files["zeros"].write_bytes(b"\0\0\n" + files["zeros"].read_bytes() * 2)
    (found["yaml"] / "run.yaml").write_text("format: [")
    return found


def names(found: dict[str, Path], *kinds: str) -> set[str]:
    return {found[kind].name for kind in kinds}


def test_every_run_is_put_where_it_belongs(store, tmp_path):
    found = find_finished(tmp_path)
    assert {run.hash for run in found.runs} == names(store, "good", "zeros")
    assert {run.hash for run in found.unfinished} == names(store, "begun", "killed")
    assert found.damaged.keys() == names(store, "lost", "yaml", "empty")
    assert found.passed_over.keys() == names(store, "zeros")
    lost, zeros = found.damaged[store["lost"].name], found.passed_over[store["zeros"].name]
    assert "line 3 is torn" in lost and lost.endswith("done does not fit the 2 records in the folder")
    assert "line 1 cannot be read; " in zeros and zeros.endswith("sample a/0, a/1, a/2 in another line too")
    assert found.damaged["empty"] == "run.yaml cannot be read (FileNotFoundError)"
    assert all(len(run.records) == 3 for run in found.runs)
    assert {len(run.records) for run in found.unfinished} == {2, 3}
    assert find_finished(tmp_path / "nowhere") == FoundRuns() and SampleTimes(tmp_path / "nowhere").samples == {}


def test_every_command_says_the_same_of_a_run(store, tmp_path, capsys):
    found = find_finished(tmp_path)
    found.print_damage()
    told = set(capsys.readouterr().err.splitlines())
    assert len(told) == 4 and all(line.startswith("kvbench: run ") for line in told)
    load_runs(tmp_path)
    assert set(capsys.readouterr().err.splitlines()) == told
    loaded = kvbench.load(tmp_path)
    assert loaded.damaged.keys() == names(store, "yaml", "empty")  # nothing else is known before records are read
    said = capsys.readouterr().err.splitlines()
    assert len(loaded.records()) == 3 + 3 + 2 + 2 + 3
    said += capsys.readouterr().err.splitlines()
    reasons = {line.split(": ", 2)[2] for line in told}
    assert len(said) == 4 and {line.split(": ", 2)[2] for line in said} == reasons
    wrong = {name: "; ".join(own) for name, _, own in audit.audit_runs(tmp_path) if own}
    assert wrong == found.damaged | found.passed_over


def test_who_reads_some_runs_only_tells_of_those(store, tmp_path, capsys):
    runs = RunIndex(find_runs(tmp_path).runs, FoundRuns())
    [good, lost] = [next(run for run in runs.by_protocol if run.hash == store[name].name) for name in ("good", "lost")]
    assert runs.finished([good]) == [good] and runs.store == FoundRuns()
    assert runs.finished([good, lost]) == [good] and runs.store.damaged.keys() == {lost.hash}


@pytest.mark.parametrize("lacks", ["model", "task", "method", "allocator", "codec", "budget"])
def test_a_run_that_lacks_a_setting_is_left_out(tmp_path, lacks):
    run = write_run(tmp_path, records())
    other = write_run(tmp_path, records(), **{lacks: None})
    found = find_runs(tmp_path)
    assert [own.hash for own in found.runs] == [run.hash]
    assert found.damaged[other.hash].startswith("run.yaml lacks a setting (")


def test_the_audit_holds_records_to_their_version(tmp_path):
    own = records(2)
    own["a/1"] |= {"version": 2, "rows_held": "many"}
    run = write_run(tmp_path, own)
    [(name, state, wrong)] = audit.audit_runs(tmp_path)
    assert (name, state) == (run.hash, "damaged") and "a/1: rows_held is 'many', expected float, a/1: index" in wrong[0]
    assert RunRecords(run.folder.path).problems == [] and list(RunRecords(run.folder.path)) == list(own.values())


def test_nested_mappings_are_flattened():
    value = {"task": {"length": 5, "of": {"a": [1], "none": {}}}, "seed": 0}
    assert flatten(value) == {"task.length": 5, "task.of.a": [1], "seed": 0}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    for text in ("old", "new"):
        with replace_file(path) as draft:
            draft.write_text(text)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == text
    with pytest.raises(RuntimeError), replace_file(path) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_with_an_equals_sign_is_never_taken_for_a_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_selection(["a=b,c"]) == (Path("results"), {"a": "b,c"})
    assert parse_selection(["./a=b,c", "d=e/f"]) == (Path("a=b,c"), {"d": "e/f"})
    (tmp_path / "a=b,c").mkdir()
    with pytest.raises(SettingError, match=r"^a=b,c: a folder has this name; \./a=b,c reads it$"):
        parse_selection(["a=b,c"])
