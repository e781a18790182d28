"""One reader of the store: damage means the same to every command, and each run's is one line."""

import json
import os
import random
from pathlib import Path

import pytest
import yaml

import kvbench
from kvbench.atomic import replace_file
from kvbench.papers.cell_values import RunIndex
from kvbench.store import audit
from kvbench.store.record import VERSION
from kvbench.store.run_folder import DamagedRun, RunFolder, format_line
from kvbench.store.runs import NAMED_GROUPS, FoundRuns, find_finished, find_runs, flatten, load_runs, parse_filters
from kvbench.sweeps.status import SampleTimes
from kvbench.validation import SettingError
from tests.support.made_up_runs import write_run
from tests.support.repository import ROOT
from tests.support.selection import only_in_full


def records(count: int = 3) -> dict[str, dict]:
    found = {}
    for index in range(count):
        uid = f"a/{index}"
        found[uid] = {"uid": uid, "score": 1.0, "meta": {"depth": index}, "prompt_hash": "p", "target_hash": "t"}
        found[uid]["error"] = None
    return found


@pytest.fixture
def store(tmp_path) -> dict[str, Path]:
    """One run of each kind: what it is -> its folder."""
    found = {
        name: write_run(tmp_path, records(), name not in ("begun", "killed"), budget=0.1 * (1 + place)).folder.path
        for place, name in enumerate(("good", "begun", "killed", "lost", "zeros", "yaml", "twice"))
    }
    found["empty"] = tmp_path / "runs" / "empty"
    found["empty"].mkdir()
    files = {name: next(path.glob("records*.jsonl"), None) for name, path in found.items()}
    files["killed"].write_bytes(files["killed"].read_bytes()[:-9])
    files["lost"].write_bytes(files["lost"].read_bytes()[:-9])
    files["zeros"].write_bytes(b"\0\0\n" + files["zeros"].read_bytes())
    (found["yaml"] / "run.yaml").write_text("format: [")
    files["twice"].with_name("records-a.jsonl").write_bytes(files["twice"].read_bytes())
    return found


def names(found: dict[str, Path], *kinds: str) -> set[str]:
    return {found[kind].name for kind in kinds}


def test_every_run_is_put_where_it_belongs(store, tmp_path):
    found = find_finished(tmp_path)
    assert {run.hash for run in found.runs} == names(store, "good", "twice")
    assert {run.hash for run in found.unfinished} == names(store, "begun", "killed")
    assert found.damaged.keys() == names(store, "lost", "zeros", "yaml", "empty")
    assert found.passed_over.keys() == names(store, "twice")
    lost, zeros = found.damaged[store["lost"].name], found.damaged[store["zeros"].name]
    assert "line 3 is torn" in lost and lost.endswith("done does not fit the 2 records in the folder")
    assert "has another checksum than done says; " in zeros and zeros.endswith("line 1 is no JSON")
    assert found.passed_over[store["twice"].name].endswith("sample a/0, a/1, a/2 in another line too")
    assert found.damaged["empty"] == "run.yaml cannot be read (FileNotFoundError)"
    assert all(len(run.records) == 3 for run in found.runs)
    assert {len(run.records) for run in found.unfinished} == {2, 3}
    assert find_finished(tmp_path / "nowhere") == FoundRuns() and SampleTimes(tmp_path / "nowhere").samples == {}


def test_every_command_says_the_same_of_a_run(store, tmp_path, capsys):
    found = find_finished(tmp_path)
    found.print_damage()
    told = set(capsys.readouterr().err.splitlines())
    assert len(told) == 5 and all(line.startswith("kvbench: run ") for line in told)
    load_runs(tmp_path)
    assert set(capsys.readouterr().err.splitlines()) == told
    loaded = kvbench.load(tmp_path)
    assert loaded.damaged.keys() == names(store, "yaml", "empty")  # nothing else is known before records are read
    said = capsys.readouterr().err.splitlines()
    assert len(loaded.records()) == 3 + 3 + 2 + 3
    said += capsys.readouterr().err.splitlines()
    reasons = {line.split(": ", 2)[2] for line in told}
    assert len(said) == 5 and {line.split(": ", 2)[2] for line in said} == reasons
    wrong = {name: "; ".join(own) for name, _, own in audit.audit_runs(tmp_path) if own}
    assert wrong == found.damaged | found.passed_over


def test_who_reads_some_runs_only_tells_of_those(store, tmp_path, capsys):
    runs = RunIndex(find_runs(tmp_path).runs, FoundRuns())
    [good, lost] = [next(run for run in runs.by_protocol if run.hash == store[name].name) for name in ("good", "lost")]
    assert runs.finished([good]) == [good] and runs.store == FoundRuns()
    assert runs.finished([good, lost]) == [good] and runs.store.damaged.keys() == {lost.hash}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({name: None}, f"lacks a setting ({name}") for name in (*NAMED_GROUPS, "budget")),
        ({"method": {"name": 5}}, "lacks a setting (method.name)"),
        ({"budget": -1}, "budget is -1, expected a number above 0 or null"),
        ({"budget": "0.1"}, "budget is '0.1', expected a number above 0 or null"),
        ({"question": "asked"}, "question is 'asked', expected visible or hidden"),
        ({"block_size": True}, "block_size is True, expected a whole number above 0 or null"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p is 2, expected a share in (0, 1]"),
        ({"device": {"type": 7}}, "device.type is 7, expected a text"),
    ],
)
def test_a_run_with_settings_that_no_run_has_is_left_out(tmp_path, changed, said):
    run = write_run(tmp_path, records())
    other = write_run(tmp_path, records(), **changed)
    found = find_runs(tmp_path)
    assert [own.hash for own in found.runs] == [run.hash]
    assert said in found.damaged[other.hash]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 2, "rows_held": "many"}, "line 2, a/1: rows_held is 'many', expected float"),
        ({"score": 300}, "line 2, a/1: score is 300, expected float or null, from 0 to 100"),
        ({"resident_bytes": -5}, "line 2, a/1: resident_bytes is -5, expected int, from 0"),
        ({"prompt_hash": None}, "line 2, a/1: prompt_hash is None, expected str"),
    ],
)
def test_a_run_with_a_record_that_breaks_a_rule_is_left_out(tmp_path, changed, said, capsys):
    own = records(2)
    own["a/1"] |= changed
    run = write_run(tmp_path, own)
    good = write_run(tmp_path, records(2), budget=0.5)
    assert said in find_finished(tmp_path).damaged[run.hash]
    assert [own.hash for own in load_runs(tmp_path)] == [good.hash]
    assert len(kvbench.load(tmp_path).records()) == 2
    audited = {name: (state, wrong) for name, state, wrong in audit.audit_runs(tmp_path)}
    assert audited[run.hash][0] == "damaged" and said in audited[run.hash][1][0] and not audited[good.hash][1]
    assert capsys.readouterr().err.count(said) == 2


def harm(content: bytes, draw: random.Random) -> bytes:
    """Change one bit or one character."""
    place, harmed = draw.randrange(len(content)), bytearray(content)
    harmed[place] = (
        harmed[place] ^ 1 << draw.randrange(8) if draw.random() < 0.5 else draw.choice(b"0123456789abc {}\n")
    )
    return bytes(harmed)


@pytest.mark.parametrize("count", [20, only_in_full(300)])
def test_no_changed_character_stays_unseen(tmp_path, count):
    """In any file of a finished run: the audit names it, or everything that is read is what it was."""
    [old] = (run for run in load_runs(ROOT / "tests" / "stores" / "0.2") if not run.full)
    found = {uid: record | {"version": VERSION} for uid, record in old.records.items()}
    run, good = write_run(tmp_path, found, machine=old.machines[0], total=2), write_run(tmp_path, records(), seed=1)
    files, draw, named = [path for path in run.folder.path.iterdir() if path.stat().st_size], random.Random(0), 0
    for _ in range(count):
        file = draw.choice(files)
        whole = file.read_bytes()
        file.write_bytes(harm(whole, draw))
        audited = {name: wrong for name, _, wrong in audit.audit_runs(tmp_path)}
        assert audited[good.hash] == []
        if audited[run.hash]:
            named += 1
            assert file.name in audited[run.hash][0] or file.name == "done"
        else:
            [again] = (own for own in find_finished(tmp_path).runs if own.hash == run.hash)
            assert (again.value, again.records, again.machines) == (run.value, found, old.machines)
        file.write_bytes(whole)
    assert len(files) == 5 and named > 0.8 * count


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["run.yaml", "machine.json", "done", "records-x.jsonl"])
@pytest.mark.parametrize("make", [Path.mkdir, make_pipe, lambda path: path.symlink_to("nowhere")])
def test_a_name_that_no_file_has_damages_its_run_only(tmp_path, make, name):
    run, good = write_run(tmp_path, records()), write_run(tmp_path, records(), budget=0.5)
    (path := run.folder.path / name).unlink(missing_ok=True)
    make(path)
    found = find_finished(tmp_path)
    assert [own.hash for own in found.runs] == [good.hash] and found.unfinished == []
    assert found.damaged == {run.hash: f"{name} is no regular file"}
    with pytest.raises(DamagedRun, match=f"{name} is no regular file"), run.folder.open({}):
        pass


@pytest.mark.parametrize(
    "text",
    ["on: 2020-01-01", "set: !!set {a}", "bytes: !!binary aGk=", "a: &b [1]\nc: *b", "[" * 20_000, "a: .nan", "1: 2"],
)
def test_settings_that_no_run_has_damage_their_run_only(tmp_path, text):
    run, good = write_run(tmp_path, records()), write_run(tmp_path, records(), budget=0.5)
    (run.folder.path / "run.yaml").write_text(f"format: 1\nhash: {run.hash}\nvalue:\n  " + text.replace("\n", "\n  "))
    found = find_finished(tmp_path)
    assert [own.hash for own in found.runs] == [good.hash] and found.damaged[run.hash].startswith("run.yaml ")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}'])
def test_a_machine_that_cannot_be_read_damages_its_run_only(tmp_path, text):
    run, good = write_run(tmp_path, records(), finish=False), write_run(tmp_path, records(), budget=0.5)
    (run.folder.path / "machine.json").write_text(text)
    found = find_finished(tmp_path)
    assert [own.hash for own in found.runs] == [good.hash] and found.damaged[run.hash].startswith("machine.json ")
    with pytest.raises(DamagedRun, match=r"machine\.json"), run.folder.open({}):
        pass


def test_settings_may_be_json(tmp_path):
    run = write_run(tmp_path, records(), finish=False)
    old, new = run.folder.path / "run.yaml", run.folder.path / "run.json"
    new.write_text(json.dumps(yaml.safe_load(old.read_text())))
    assert "both run.yaml and run.json" in find_runs(tmp_path).damaged[run.hash]
    old.unlink()
    assert [own.value for own in find_finished(tmp_path).unfinished] == [run.value]


def test_what_is_added_to_a_sealed_run_counts_behind_what_is_sealed(tmp_path):
    run = write_run(tmp_path, records())
    (run.folder.path / "records-a.jsonl").write_bytes(format_line(records()["a/0"] | {"score": 99.0}))
    found = find_finished(tmp_path)
    assert found.runs[0].records["a/0"]["score"] == 1.0 and found.passed_over.keys() == {run.hash}
    again = RunFolder(tmp_path / "runs", run.value)
    assert again.finished and again.records()["a/0"]["score"] == 1.0 == again.record("a/0")["score"]


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


def test_filters_are_given_once_each():
    assert parse_filters(["a=b,c", "d=e/f=g"]) == {"a": "b,c", "d": "e/f=g"}
    with pytest.raises(SettingError, match="^a=b a=c: give each setting once, with commas between values$"):
        parse_filters(["a=b", "a=c"])
