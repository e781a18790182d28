"""`check results --replay N`: records executed again, and what of them is damaged, differs elsewhere, or is gone."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvbench.analysis.bundle import write_bundle, write_drawn_bundle
from kvbench.cli import audit as audit_command
from kvbench.cli import replay as replay_command
from kvbench.cli import verify as verify_command
from kvbench.config.catalogue import list_choices
from kvbench.runs import isolation
from kvbench.runs.replay import ReplayCounts
from kvbench.store import audit
from kvbench.store.run_folder import format_line, parse_line, run_hash
from tests.support.command_line import run_cli
from tests.support.recorded_runs import read_records, seal
from tests.support.selection import only_in_full

QUICK = ("task.subtasks=[niah_single_1]", "task.length=512", "task.samples=1")
SEVERAL = ("-m", "method=knorm,snapkv", "budget=0.25", *QUICK)


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory) -> Path:
    """An honest store: two methods and the full cache on one prefill, and a question that is hidden."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        capture = type("Capture", (), {"readouterr": staticmethod(lambda: ("", ""))})
        base = ["model=hf", f"model.path={checkpoint}", "device=cpu"]
        assert run_cli([*base, *SEVERAL], patch, capture)[0] == 0
        hidden = ("method=keydiff", "budget=64", "block_size=256", "question=hidden", *QUICK)
        assert run_cli([*base, *hidden], patch, capture)[0] == 0
    return folder / "results"


@pytest.fixture
def copied(store, tmp_path) -> Path:
    return shutil.copytree(store, tmp_path / "results")


@pytest.fixture
def call(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, list[str]]]:
    """Executes records of a store again, in this process: exit code and lines."""
    monkeypatch.chdir(tmp_path)

    def replayed(results: Path, count: int, seed: int = 0) -> tuple[int, list[str]]:
        code = replay_command.main(["--results", str(results), "--records", str(count), "--seed", str(seed)])
        out, err = capsys.readouterr()
        assert f"{count}/{count}" in err  # the bar
        return code, out.splitlines()

    return replayed


def count(results: Path) -> int:
    return sum(len(read_records(path)) for path in (results / "runs").iterdir())


def change(results: Path, method: str, name: str, make: Callable) -> dict:
    """Change a field of the last record of a run, and return the record as it was."""
    for path in (results / "runs").glob("*/records*.jsonl"):
        *others, last = path.read_bytes().splitlines(keepends=True)
        if yaml.safe_load((path.parent / "run.yaml").read_text())["value"]["method"]["name"] == method:
            record = parse_line(last)
            path.write_bytes(b"".join([*others, format_line(record | {name: make(record[name])})]))
            seal(path.parent)
            return record
    raise AssertionError(method)


def files(results: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in results.rglob("*") if path.is_file()}


def test_an_honest_store_replays_clean_from_a_disk_that_is_only_read(store, call):
    before, folders = files(store), {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_dir()}
    for path in (*before, *folders, store):
        path.chmod(0o444 if path in before else 0o555)
    try:
        code, said = call(store, count(store))
    finally:
        for path in (*before, *folders, store):
            path.chmod(0o644 if path in before else 0o755)
    assert (code, said) == (0, [f"replay: {count(store)} agree, 0 damaged, executed as they were then"])
    assert files(store) == before
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_dir()} == folders


CHANGES = {
    "full": ("output", lambda text: text[:-1] + chr(ord(text[-1]) + 1)),
    "snapkv": ("score", lambda score: score + 0.5),
    "knorm": ("rows_held", lambda rows: rows + 1),
    "keydiff": ("survived", lambda bins: bins[:-2] + ("01" if bins[-2:] == "00" else "00")),
}


def test_each_changed_field_is_damage(copied, call):
    changed = {method: change(copied, method, *own)["uid"] for method, own in CHANGES.items()}
    code, said = call(copied, count(copied))
    assert code == 1 and said.pop() == f"replay: {count(copied) - 4} agree, 4 damaged, executed as they were then"
    for method, (name, _) in CHANGES.items():
        [line] = [line for line in said if f": {name} is " in line]
        said.remove(line)
        assert f"  {changed[method]}: " in line and "when it is executed again" in line and len(line) < 200
    assert said == []


def test_another_version_turns_damage_into_a_share(copied, call):
    change(copied, "snapkv", "score", lambda score: score + 0.5)
    for path in (copied / "runs").glob("*/machine.json"):
        machine = json.loads(path.read_text())
        machine["versions"]["torch"] = "1.0"
        path.write_text(json.dumps(machine))
        seal(path.parent)
    code, said = call(copied, count(copied))
    agree, whole = count(copied) - 1, count(copied)
    record, share, fields = said
    assert code == 0 and record.endswith(": score not the same here")
    assert share.startswith(
        f"replay: {agree} of {whole} agree ({agree / whole:.0%}), where this differs: torch 1.0 then"
    )
    assert fields == (
        f"replay: of these {whole} agree output in {whole}, score in {agree}, rows_held in {whole}, "
        f"rows_held_end in {whole}, survived in {whole}"
    )


@pytest.mark.full
def test_other_sources_turn_damage_into_a_share(copied, call, monkeypatch):
    change(copied, "snapkv", "score", lambda score: score + 0.5)
    monkeypatch.setattr("kvbench.runs.spec.source_hash", lambda names: "other")
    code, said = call(copied, count(copied))
    assert code == 0 and said[1].endswith(f"where this differs: sources ({count(copied)})")


@pytest.mark.parametrize("gone", ["settings", "model", "method", "data", only_in_full("machine"), "answer", "sample"])
def test_what_cannot_be_had_any_more_is_named(copied, call, gone):
    reasons = {
        "settings": "the run was written before kvbench kept its settings",
        "machine": "the run was written before kvbench kept its settings",
        "model": "model.path=/nowhere/model: no such folder",
        "method": "method=knorm: kvbench.methods.nowhere cannot be imported (ModuleNotFoundError",
        "data": "task.samples: not what it was then",
        "answer": "it holds no answer (out_of_memory)",
        "sample": "its task has no such sample",
    }
    for path in (copied / "runs").glob("*/machine.json"):
        machine = json.loads(path.read_text())
        if gone == "settings":
            del machine["settings"]
        elif gone == "model":
            machine["settings"]["model"]["path"] = "/nowhere/model"
        elif gone == "method" and machine["settings"]["method"]["name"] == "knorm":
            machine["settings"]["method"]["_target_"] = "kvbench.methods.nowhere.Nowhere"
        elif gone == "data":
            machine["settings"]["task"]["samples"] = 3
        path.write_text("torn" if gone == "machine" else json.dumps(machine))
        seal(path.parent)
    if gone in ("answer", "sample"):
        own = {"answer": ("error", "out_of_memory"), "sample": ("uid", "nothing")}[gone]
        change(copied, "knorm", own[0], lambda _: own[1])
    code, said = call(copied, count(copied))
    named = [line for line in said if "cannot be replayed: " in line]
    assert code == 0 and named and all(reasons[gone] in line for line in named), said
    assert said[-1].endswith("cannot be replayed") and not any("Traceback" in line for line in said)
    if gone in ("answer", "sample"):
        assert len(named) == 1 and said[-1] == "replay: 1 cannot be replayed"
    if gone == "method":  # the full cache's run, which the same cell made, needs no knorm
        assert said[-1] == "replay: 1 cannot be replayed"


def test_the_weights_are_loaded_once(store, call, monkeypatch):
    from kvbench.models.checkpoint import Checkpoint

    loads, weights = [], Checkpoint.weights
    monkeypatch.setattr(Checkpoint, "weights", lambda *given: loads.append(given) or weights(*given))
    call(store, count(store))
    assert len(loads) == 1


def test_a_conversation_is_executed_as_a_whole(kvbench, tmp_path, call):
    task = ("task=scbench", "task.max_turns=2", "limit=1", "task.subtasks=[scbench_kv]", "task.length=1024")
    assert kvbench(*task, "method=knorm", "budget=0.1")[0] == 0
    results = tmp_path / "results"
    assert count(results) == 4
    assert call(results, 2, seed=1) == (0, ["replay: 2 agree, 0 damaged, executed as they were then"])


def replay_here(command: Sequence[str], env: Mapping[str, str]) -> SimpleNamespace:
    """Do in this process what the command starts another one for."""
    assert command[:5] == [sys.executable, "-m", "kvbench", "dev", "replay"] and "PYTHONPATH" in env
    return SimpleNamespace(returncode=replay_command.main(command[5:]))


@pytest.mark.parametrize("run", [replay_here, only_in_full(subprocess.run)], ids=["here", "in another process"])
def test_the_command_checks_and_then_executes(copied, monkeypatch, capfd, run):
    monkeypatch.setattr(audit_command.subprocess, "run", run)
    change(copied, "snapkv", "score", lambda score: score + 0.5)
    whole = count(copied)
    assert audit_command.main(["--results", str(copied), "--replay", str(whole), "--seed", "7"]) == 1
    out, err = capfd.readouterr()
    assert f"\n0 damaged\nreplay: {whole} of {whole} records, drawn with --seed 7\n" in out
    assert f"replay: {whole - 1} agree, 1 damaged" in out and "replay: 100%" in err


def test_a_seed_draws_the_same_records(store):
    (one, whole), (other, _) = audit.draw_records(store, 4, 3), audit.draw_records(store, 4, 3)
    assert one == other != audit.draw_records(store, 4, 4)[0]
    assert len(set(one)) == 4 and whole == count(store)


@pytest.mark.parametrize(
    "given, line",
    [
        (["--replay=0"], "--replay=0: a whole number of at least 1"),
        (["--replay=-3"], "--replay=-3: a whole number of at least 1"),
        (["--replay=some"], "--replay=some: a whole number of at least 1"),
        (["--replay=1.5"], "--replay=1.5: a whole number of at least 1"),
        (["--replay=500"], "--replay=500: the store has {} records"),
        (["--replay=2", "--seed=x"], "--seed=x: a whole number of at least 0"),
        (["--seed=1"], "--seed=1: draws the records of --replay N"),
    ],
)
def test_bad_input_is_one_line(given, line, store, capsys):
    assert audit_command.main(["--results", str(store), *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"kvbench: {line.format(count(store))}")


def test_a_folder_without_runs_is_one_line(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert audit_command.main(["--results", str(folder), "--replay", "1"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err == f"kvbench: {folder / 'runs'}: no run there\n"


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("method", "allocator", "codec") for name in list_choices(group)]
)
def test_settings_of_every_choice_make_the_same_run_again(group, name):
    from omegaconf import OmegaConf

    from kvbench.config import catalogue
    from kvbench.config.compose import compose_config
    from kvbench.runs.checks import keep_settings
    from kvbench.store.run_folder import to_json_value

    config = compose_config([f"{group}={name}"])
    again = OmegaConf.create(to_json_value(keep_settings(config)))
    for own in ("method", "allocator", "codec", "task"):
        assert catalogue.resolve(own, config[own]) == catalogue.resolve(own, again[own])


@pytest.fixture
def verify_bundle(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Executes `verify` and the command that it starts, in this process: exit code, output and error."""

    def run(command: Sequence[str], env: Mapping[str, str]) -> SimpleNamespace:
        assert command[:6] == [sys.executable, "-P", "-m", "kvbench", "dev", "replay"] and "--stranger" in command
        return SimpleNamespace(returncode=replay_command.main(command[6:]))

    def verify(*given: object) -> tuple[int, str, str]:
        code = verify_command.main([str(own) for own in given])
        return code, *capsys.readouterr()

    monkeypatch.setattr(verify_command.subprocess, "run", run)
    monkeypatch.setattr(isolation, "close_network", lambda: "without network")
    monkeypatch.setattr(isolation, "limit_memory", lambda on_cpu: "on a CPU" if on_cpu else "on a GPU")
    return verify


def test_a_bundle_executes_its_records_again(copied, checkpoint, tmp_path, verify_bundle):
    """The settings are those of the runs' identities and of conf/; what was changed in a bundle is found."""
    path, damaged = tmp_path / "own.zip", tmp_path / "damaged.zip"
    write_bundle(copied, {}, path)
    whole, own = count(copied), f"model.path={checkpoint}"
    code, out, err = verify_bundle(path, "--replay", "100%", "--seed", "1")
    assert f"replay: {whole} of {whole} records, drawn with --seed 1" in out and "model.path=null" in out
    assert code == 2 and f"none of {whole} drawn records could be executed again; the lines above" in err
    code, out, err = verify_bundle(path, "--replay", "100%", own)
    assert code == 0 and f"replay: {whole} agree, 0 damaged" in out
    assert "replay: without network, on a CPU; files of this user can be read\n" in out
    change(copied, "snapkv", "output", lambda output: output + "!")
    write_bundle(copied, {}, damaged)
    code, out, err = verify_bundle(damaged, "--replay", "100%", own)
    assert code == 2 and "1 records give something else when executed again" in err


@pytest.mark.parametrize("share, expected", [(None, 2), only_in_full("0%", 0)])
def test_another_machine_excuses_no_run_that_does_not_agree(
    copied, checkpoint, tmp_path, verify_bundle, share, expected
):
    """Whoever forges answers can claim any machine. The share that must agree holds for each run."""
    change(copied, "snapkv", "output", lambda output: output + "!")
    for path in copied.glob("runs/*/machine*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "2.7"}))
        seal(path.parent)
    write_bundle(copied, {}, tmp_path / "own.zip")
    agree = [] if share is None else ["--agree", share]
    given = (tmp_path / "own.zip", "--replay", "100%", *agree, f"model.path={checkpoint}")
    code, out, err = verify_bundle(*given)
    assert code == expected and f"replay: {count(copied) - 1} of {count(copied)} agree" in out
    assert err.endswith("0 of 1 records agree, less than --agree=90%\n") == (expected == 2)


def test_a_record_without_an_answer_counts_neither_way():
    found = ReplayCounts(drawn=Counter(a=10, b=3), agreeing=Counter(a=9))
    assert found.find_weak(0.9) == ["run b: 0 of 3 records agree"] and found.find_weak(0.0) == []
    assert found.find_weak(0.7, together=True) == ["all runs: 9 of 13 records agree"]
    assert found.find_weak(0.69, together=True) == []


def claim_gpu(results: Path) -> None:
    """Let the runs of a store be those of a GPU."""
    for path in [*(results / "runs").iterdir()]:
        settings = yaml.safe_load((path / "run.yaml").read_text())
        settings["value"]["device"] |= {"type": "cuda"}
        settings["hash"] = run_hash(settings["value"])
        (path / "run.yaml").write_text(yaml.safe_dump(settings))
        for file in path.glob("machine*.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"gpu": "NVIDIA H200"}))
        seal(path)
        path.rename(path.with_name(settings["hash"]))


def test_drawn_answers_of_a_gpu_are_executed_on_a_cpu(copied, checkpoint, tmp_path, verify_bundle, monkeypatch):
    """The share is that of all answers, and each compared field has its own."""
    monkeypatch.setattr("kvbench.runs.devices.has_gpu", lambda: False)
    change(copied, "snapkv", "output", lambda output: output + "!")
    claim_gpu(copied)
    write_drawn_bundle(copied, {}, path := tmp_path / "drawn.zip", whole := count(copied), 0)
    given = (path, "--replay", "100%", f"model.path={checkpoint}")
    code, _, err = verify_bundle(*given)
    assert code == 2
    assert err.splitlines() == ["kvbench: device=cuda: there is no CUDA device here; use device=cpu or device=auto"]
    code, out, _ = verify_bundle(*given, "device=cpu", "--agree", "70%")
    agree, lines = whole - 1, out.splitlines()
    assert code == 0  # though none of one run's records agrees
    [share] = [line for line in lines if line.startswith(f"replay: {agree} of {whole} agree")]
    assert f"device.type ({whole})" in share and "gpu NVIDIA H200 then, None now" in share
    assert lines[-1] == (
        f"replay: of these {whole} agree output in {agree}, score in {whole}, rows_held in {whole}, "
        f"rows_held_end in {whole}, survived in {whole}; a CPU and a GPU add up in other orders, so a near tie of two "
        "rows or words may fall otherwise"
    )
    [named] = [line for line in lines if line.endswith(": output not the same here")]
    assert "niah_single_1" in named


def test_machine_settings_of_a_bundle_count_nothing(copied, checkpoint, tmp_path, verify_bundle):
    """Neither a class nor a path of machine.json is used, so that reading a bundle never runs its author's code."""
    mark = tmp_path / "executed"
    hostile = {"name": "snapkv", "_target_": "pathlib.Path.touch", "self": str(mark)}
    for path in copied.glob("runs/*/machine*.json"):
        machine = json.loads(path.read_text())
        machine["settings"]["method"] |= hostile
        machine["settings"]["task"] |= {"haystack_path": "/etc/passwd", "_target_": "os.system"}
        path.write_text(json.dumps(machine))
        seal(path.parent)
    write_bundle(copied, {}, tmp_path / "own.zip")
    code, out, _ = verify_bundle(tmp_path / "own.zip", "--replay", "100%", f"model.path={checkpoint}")
    assert code == 0 and f"{count(copied)} agree" in out and not mark.exists()


@pytest.mark.parametrize(
    "given, line",
    [
        (["--replay", "0"], "--replay=0: a whole number of records from 1 on, or a share such as 1%"),
        (["--replay", "101%"], "--replay=101%: a whole number of records from 1 on, or a share such as 1%"),
        (["--replay", "x"], "--replay=x: a whole number of records from 1 on, or a share such as 1%"),
        (["--replay", "5000"], "--replay=5000: the bundle has {} records"),
        (["--replay", "1%", "nosuch=1"], "nosuch=1: no run of the bundle has this setting"),
        (["--replay", "1%", "task.length=[1"], "task.length=[1: cannot be read"),
        (["seed=1"], "settings, --seed and --agree: only with --replay"),
        (["--seed", "1"], "settings, --seed and --agree: only with --replay"),
        (["--replay", "1%", "--agree", "2"], "--agree=2: a share from 0% to 100%"),
    ],
)
def test_what_verify_cannot_use_is_one_line(given, line, store, tmp_path, capsys):
    write_bundle(store, {}, path := tmp_path / "own.zip")
    assert verify_command.main([str(path), *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"kvbench: {line.format(count(store))}")
