"""The store as frames, as Parquet, and its audit: what a killed, copied or damaged run looks like."""

import json
import subprocess
import sys

import pandas
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench.cli import audit as audit_command
from kvbench.store import audit, dataframes
from kvbench.store.run_folder import FORMAT, RunFolder, run_hash
from kvbench.validation import SettingError
from tests.support.repository import ROOT
from tests.support.selection import only_in_full


def value(method="snapkv", **own):
    groups = {"allocator": {"name": "uniform"}, "codec": {"name": "raw"}, "method": {"name": method, "window": 32}}
    common = {
        "model": {"name": "reference", "identity": "ab"},
        "task": {"name": "ruler", "length": 2048},
        "budget": 0.1,
    }
    return groups | common | {"question": "visible", "block_size": None, "sources": method} | own


def record(index, **own):
    base = {"uid": f"niah/{index}", "score": 50.0 + index, "prompt_hash": f"p{index}", "target_hash": f"t{index}"}
    return base | {"output": "x", "error": None, "meta": {"units": index}, "also": {}} | own


def write(root, own=None, found=None, finish=True):
    """A run made as the runner makes it; its folder."""
    found = [record(index) for index in range(3)] if found is None else found
    with RunFolder(root / "runs", own or value()).open({}) as folder:
        for line in found:
            assert folder.claim(line["uid"])
            folder.append(line)
        if finish:
            folder.finish([line["uid"] for line in found])
    return folder.path


def test_runs_and_records(tmp_path):
    write(tmp_path)
    write(tmp_path, value("full", budget=1.0), finish=False)
    loaded = kvbench.load(tmp_path)
    assert set(loaded.runs.method) == {"snapkv", "full"} and not loaded.damaged
    assert dict(zip(loaded.runs.method, loaded.runs.finished, strict=True)) == {"snapkv": True, "full": False}
    assert list(loaded.runs["method.window"]) == [32, 32] and list(loaded.runs["task.length"]) == [2048, 2048]
    found = loaded.records()
    assert len(found) == 6 and set(found.run) == set(loaded.runs.index)
    assert found.groupby("method", observed=True).score.mean().to_dict() == {"full": 51.0, "snapkv": 51.0}
    assert list(kvbench.load(tmp_path, method="full").records(["uid", "meta.units"])["meta.units"]) == [0, 1, 2]


def test_a_lone_surrogate_is_written_out(tmp_path):
    write(tmp_path, found=[record(0, output="a \ud800", target=["\ud800"]), record(1, output="é \\", target=["b"])])
    found = kvbench.load(tmp_path).records()
    assert list(found.output) == ["a \\ud800", "é \\"] and list(found.target) == ['["\\ud800"]', '["b"]']
    dataframes.export_parquet(tmp_path, tmp_path / "export")


def test_filters_take_values_and_lists_and_refuse_what_is_not_there(tmp_path):
    for budget in (0.05, 0.1, 0.3):
        write(tmp_path, value(budget=budget))
    assert len(kvbench.load(tmp_path, budget=[0.05, 0.3]).runs) == 2
    assert len(kvbench.load(tmp_path, budget=0.1, model="reference").records()) == 3
    assert len(kvbench.load(tmp_path, method="keydiff").records()) == 0
    with pytest.raises(SettingError, match="^load=methods: did you mean method[?]$"):
        kvbench.load(tmp_path, methods="snapkv")
    with pytest.raises(SettingError, match="^columns=points: choose one of "):
        kvbench.load(tmp_path).records(["points"])
    with pytest.raises(SettingError, match="the folder contains no runs$"):
        kvbench.load(tmp_path / "nowhere")


@given(
    st.lists(
        st.lists(
            st.none()
            | st.integers(-5, 5)
            | st.floats(-5, 5)
            | st.text(max_size=3)
            | st.booleans()
            | st.lists(st.integers(0, 3), max_size=2),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_values_of_any_kinds_make_one_column(parts):
    chunks = [
        dataframes.records_to_table([record(i, answer=answer) for i, answer in enumerate(own)], {"run": "a"}, None)
        for own in parts
    ]
    found = dataframes.concat_tables(chunks)["answer"].to_pylist()
    for answer, own in zip([answer for part in parts for answer in part], found, strict=True):
        same = own == answer or own == json.dumps(answer)
        assert same or (isinstance(own, str) and json.loads(own) == answer)


def test_what_is_damaged_is_named_and_the_rest_is_shown(tmp_path, capsys):
    good = write(tmp_path)
    old, strange, torn = (write(tmp_path, value(budget=budget)) for budget in (0.2, 0.3, 0.4))
    (old / "run.yaml").write_text(yaml.safe_dump({"format": 0, "hash": old.name, "value": {}}))
    text = (strange / "run.yaml").read_text().replace("window: 32", "window: 64")
    (strange / "run.yaml").write_text(text)
    (torn / "run.yaml").write_text("format: [")
    loaded = kvbench.load(tmp_path)
    assert list(loaded.runs.index) == [good.name] and set(loaded.damaged) == {old.name, strange.name, torn.name}
    assert (
        "format 0, and this kvbench reads 1" in loaded.damaged[old.name]
        and "move the folder" in loaded.damaged[old.name]
    )
    assert capsys.readouterr().err.count("is left out") == 3
    assert len(loaded.records()) == 3


def test_a_run_of_an_older_format_is_refused_in_one_line(tmp_path):
    folder = write(tmp_path, finish=False)
    (folder / "run.yaml").write_text(yaml.safe_dump({"format": FORMAT - 1, "hash": folder.name, "value": value()}))
    with pytest.raises(SettingError, match="move the folder away and run it again"):
        write(tmp_path)


def audited(root):
    return {name: (state, wrong) for name, state, wrong in audit.audit_runs(root)}


def test_the_audit_passes_whole_runs(tmp_path):
    first, second = write(tmp_path), write(tmp_path, value("full"), finish=False)
    assert audited(tmp_path) == {
        first.name: ("3 records, finished", []),
        second.name: ("3 records, unfinished", []),
    }
    assert (
        audit_command.main(["--results", str(tmp_path)]) == 0
        and audit_command.main(["--results", str(tmp_path / "nowhere")]) == 2
    )


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "line 3 is torn"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b'"niah/1"', b'"niah/1')), "line 2 is no JSON"),
        (lambda file: file.write_bytes(b"\0" * 9 + b"\n" + file.read_bytes()), "line 1 is no JSON"),
        (lambda file: file.with_name("records-b.jsonl").write_bytes(file.read_bytes()), "niah/0, niah/1, niah/2 in"),
        (lambda file: file.write_bytes(b"".join(file.read_bytes().splitlines(True)[:2])), "the 2 records"),
        (lambda file: (file.parent / "done").write_text("{"), "done is no JSON"),
        (lambda file: file.parent.joinpath("run.yaml").unlink(), "run.yaml cannot be read"),
    ],
)
def test_the_audit_names_what_is_damaged(tmp_path, harm, said):
    good, bad = write(tmp_path, value("full")), write(tmp_path)
    harm(next(file for file in bad.glob("records-*.jsonl")))
    found = audited(tmp_path)
    assert found[good.name] == ("3 records, finished", [])
    state, wrong = found[bad.name]
    assert state == "damaged" and any(said in line for line in wrong), wrong
    assert audit_command.main(["--results", str(tmp_path)]) == 1


def test_the_audit_finds_runs_that_cannot_be_paired(tmp_path):
    full = write(tmp_path, value("full"))
    other = write(tmp_path, found=[record(0), record(1, prompt_hash="another"), record(2)])
    write(tmp_path, value("keydiff", seed=1), [record(0, prompt_hash="of another seed")])
    wrong = {name: wrong for name, (_, wrong) in audited(tmp_path).items() if wrong}
    line = ["1 sample has another prompt or target than in most runs"]
    assert wrong == {full.name: line, other.name: line}  # nobody knows which
    for name in ("snapkv", "dropkv", "tova"):
        write(tmp_path, value(name, budget=0.7))
    assert {name: wrong for name, (_, wrong) in audited(tmp_path).items() if wrong} == {other.name: line}


def test_export_writes_what_load_shows(tmp_path):
    write(tmp_path)
    write(tmp_path, value("full", budget=1.0))
    paths = dataframes.export_parquet(tmp_path, tmp_path / "export")
    assert [path.name for path in paths] == ["runs.parquet", "records.parquet"]
    loaded = kvbench.load(tmp_path)
    found = pandas.read_parquet(paths[1])
    assert list(found.uid) == list(loaded.records().uid) and list(found.score) == list(loaded.records().score)
    assert list(pandas.read_parquet(paths[0])["run"]) == list(loaded.runs.index)
    assert not list((tmp_path / "export").glob("*.draft*"))


LOAD = """
import json, pathlib, sys, time
from kvbench import load
times = [], []
for _ in range(int(sys.argv[2])):  # other processes may disturb one of them
    began = time.process_time()
    for path in pathlib.Path(sys.argv[1]).rglob("*.jsonl"):
        with open(path, "rb") as lines: [json.loads(line) for line in lines]
    times[0].append(time.process_time() - began); began = time.process_time()
    found = load(sys.argv[1]).records(); times[1].append(time.process_time() - began)
ratio = min(times[1]) / min(times[0])
status = pathlib.Path("/proc/self/status").read_text()
most = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
print(len(found), ratio, most, "torch" in sys.modules)
"""


@pytest.mark.parametrize(("runs", "size"), [(2, 1000), *(only_in_full(runs, 5000) for runs in (2, 20, 200))])
def test_records_load_in_time_and_memory(tmp_path, runs, size, monkeypatch, capsys):
    """10,000, 100,000 and 1,000,000 records, in a process of its own; the time as a ratio of reading the JSON alone.

    Of 2,000 records, in this process, only the time counts.
    """
    text = {"output": "word " * 40, "asked": "word " * 40, "survived": "0564" * 32, "evidence": [3, 4]}
    line = json.dumps(record(0) | {f"number{i}": i / 7 for i in range(35)} | text)
    for run in range(runs):
        own = value(seed=run)
        folder = tmp_path / "runs" / run_hash(own)
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(yaml.safe_dump({"format": FORMAT, "hash": folder.name, "value": own}))
        text = "".join(line.replace("niah/0", f"niah/{index}") + "\n" for index in range(size))
        (folder / "records-a.jsonl").write_text(text)
    given = [str(tmp_path), "3" if runs == 2 else "1"]
    if size == 1000:
        monkeypatch.setattr(sys, "argv", ["-c", *given])
        exec(LOAD, {})
        said = capsys.readouterr().out
    else:
        command = [sys.executable, "-c", LOAD, *given]
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    count, ratio, kilobytes, torch = said.split()
    with capsys.disabled():
        print(f"{count} records: {float(ratio):.1f} times the JSON alone, {float(kilobytes) / 1e6:.2f} GB")
    assert int(count) == size * runs and float(ratio) < 3
    assert size == 1000 or float(kilobytes) < 2e6 and torch == "False"
