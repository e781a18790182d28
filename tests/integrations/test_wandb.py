"""logger=wandb: what is logged is what the store holds, and whatever W&B does, the run goes on."""

import json
import socket
import struct
import sys
import time
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvbench.cli.wandb_sync import main
from kvbench.integrations import worker
from kvbench.integrations.wandb_logger import WandbLogger, load_settings
from kvbench.store.runs import StoredRun
from kvbench.validation import SettingError
from tests.support import made_up_runs
from tests.support.command_line import assert_refused, run_cli
from tests.support.single_tables import build_closing_table

CUT = {"budget": 0.1, "averages": [["all", {"vt": 1.0, "niah": 2.0}]]}
FULL = {"method": {"name": "full"}, "budget": 1.0, "sources": "s1"}
OUT_OF_MEMORY = "\x1b out_of_memory\ud800"
FAKE = """
import json, os, sys, time
if os.environ["FAKE"] == "import":
    raise RuntimeError("broken\\n\\x1b[31mat import")
def Settings(**own):
    return own
def Table(columns, data, **own):
    return {"columns": columns, "rows": data}
class Run:
    def __init__(self, own):
        self.own, self.summary = own, {}
    def finish(self, exit_code):
        if os.environ["FAKE"] == "finish":
            time.sleep(100)
        own = {name: self.own[name] for name in ("config", "id", "project", "tags")}
        own |= {"code": exit_code, "summary": self.summary}
        with open(os.environ["TOLD"], "a") as file:
            file.write(json.dumps(own) + "\\n")
def init(**own):
    print("chatter")
    if os.environ["FAKE"] == "init":
        raise ValueError("no account\\n\\x1b[31msecond line")
    if os.environ["FAKE"] == "exit":
        os._exit(3)
    return Run(own)
"""
QUICK = ("method=keydiff", "task.subtasks=[niah_single_1]", "task.length=512", "task.samples=1")


def records(full: bool) -> dict[str, dict]:
    """Two subtasks of eight samples; the method forgets some, runs out of memory once."""
    found = {}
    for subtask in ("vt", "niah"):
        for index in range(8):
            uid, failed = f"{subtask}/{index}", not full and (subtask, index) == ("vt", 7)
            found[uid] = {
                "uid": uid, "index": len(found), "subtask": subtask, "group": uid, "prompt_hash": f"p{uid}",
                "target_hash": "t", "meta": {}, "also": {}, "output": "x", "stop": "eos", "tokens_out": 5,
                "score": None if failed else 100.0 if full or index % 3 else 0.0,
                "error": OUT_OF_MEMORY if failed else None,
                "resident_bytes": 1000 if full else 100 + index, "full_bytes": 1000, "peak_bytes": 2000 + index,
                "rows_attended": 200 if full else 20, "rows_seen_decoding": 200,
                "ttft_ms": 90.0 + index, "decode_ms": 8.0,
            }  # fmt: skip
    return found


def write(results: Path, own: dict[str, dict], finish: bool = True, **changed: object) -> StoredRun:
    """A run on the disk."""
    return made_up_runs.write_run(results, own, finish, **CUT | changed)


@pytest.fixture
def forks(monkeypatch):
    """The process that logs is a copy of this one, which has imported everything. A new one takes 2 s of CPU for it."""
    monkeypatch.setattr(worker, "get_context", lambda _: get_context("fork"))


@pytest.fixture(scope="module")
def imported():
    """W&B with what it imports when a run begins."""
    import_module("wandb.sdk.launch")


@pytest.fixture
def runs(tmp_path) -> list[StoredRun]:
    """The full cache's run and a method's."""
    return [write(tmp_path, records(True), **FULL), write(tmp_path, records(False))]


@pytest.fixture
def fake(tmp_path_factory, monkeypatch, forks):
    """A wandb of our own for the process that logs; `told` reads what it was told."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)  # the other process takes over this path
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("TOLD", str(folder / "told"))
    monkeypatch.setenv("FAKE", "")

    def told() -> list[dict]:
        lines = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
        return [json.loads(line) for line in lines]

    return told


def log(results: Path, **changed: str) -> WandbLogger:
    return WandbLogger.of(load_settings(changed), results)


def stored(path: Path) -> list:
    """The protobuf records of a .wandb file: LevelDB's log format, in blocks of 32 KiB, after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    text, place, part, found = path.read_bytes(), 7, b"", []
    assert text[:4] == b":W&B"
    while place + 7 <= len(text):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", text[place : place + 7])
        part += text[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def read_back(path: Path) -> dict:
    """Config, summary and tables of an offline run's folder."""
    (file,) = path.glob("run-*.wandb")
    found = {"config": {}, "summary": {}, "code": None}
    for record in stored(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project, "tags": list(record.run.tags)}
            found["config"] |= {own.key: json.loads(own.value_json) for own in record.run.config.update}
        elif kind == "summary":
            told = {own.key: json.loads(own.value_json) for own in record.summary.update}  # its own: "", "_runtime"
            found["summary"] |= {key: own for key, own in told.items() if key.lstrip("_") == key != ""}
        elif kind == "exit":
            found["code"] = record.exit.exit_code
        assert kind != "history"  # it would grow every time
    found["config"].pop("_wandb", None)
    for name, own in found["summary"].items():
        if isinstance(own, dict):
            table = json.loads((path / "files" / own["path"]).read_text())
            found["summary"][name] = {"columns": table["columns"], "rows": table["data"]}
    return found


def check_told(found: dict[str, dict], runs: list[StoredRun]) -> None:
    """What W&B was told of these runs is what the store holds."""
    assert found.keys() == {own.hash for own in runs}
    for own in runs:
        assert found[own.hash]["config"] == own.value
        assert (found[own.hash]["project"], found[own.hash]["tags"], found[own.hash]["code"]) == ("mine", ["a"], 0)
    said, (full, method) = found[runs[1].hash]["summary"], (own.records for own in runs)
    table = build_closing_table(full, method, {}, dict(CUT["averages"]))
    for row in table.rows:
        expected = {
            "score": row.method.value, "score/low": row.method.low, "score/high": row.method.high,
            "full": row.full.value, "diff": row.interval.difference, "diff/low": row.interval.low,
            "diff/high": row.interval.high, "n": row.interval.samples, "held": row.held, "ttft": row.ttft,
            "tpot": row.tpot, "ttft_full": row.ttft_full, "attended": row.attended,
        }  # fmt: skip
        for key, number in expected.items():
            name, _, edge = key.partition("/")
            assert said["/".join(filter(None, (name, row.subtask, edge)))] == number
    assert {row.subtask for row in table.rows} == {"vt", "niah", "all"}
    shown = said["closing_table"]
    line = dict(zip(shown["columns"], shown["rows"][0], strict=True))
    assert (line["subtask"], line["difference"]) == ("vt", table.rows[0].interval.difference)
    assert (said["state"], said["samples"], said["failed_samples"], said["failure"]) == ("finished", 16, 1, None)
    assert said["failures"]["rows"] == [["vt/7", "vt", "\\x1b out_of_memory\\ud800"]]
    answered = [own["resident_bytes"] for own in method.values() if not own["error"]]
    assert said["resident_bytes"] == pytest.approx(sum(answered) / 15) and said["peak_bytes"] == 2007


def test_wandb_is_told_what_the_store_holds(runs, tmp_path, capsys, fake):
    log(tmp_path, project="mine", tags="[a]").finished(runs)
    assert capsys.readouterr() == ("", "")
    check_told({own["id"]: own for own in fake()}, runs)


@pytest.mark.full  # W&B takes two seconds to import
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_an_offline_run_says_what_the_store_holds_and_a_replay_the_same(
    imported, how, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(worker, "get_context", lambda _: get_context(how))
    log(tmp_path, project="mine", tags="[a]").finished(runs)
    assert capsys.readouterr() == ("", "")
    found = {own["id"]: own for own in map(read_back, (tmp_path / "wandb").glob("offline-run-*"))}
    check_told(found, runs)
    log(tmp_path, project="mine", tags="[a]").finished(runs)
    for own in runs:
        assert len((own.folder.path / "wandb.jsonl").read_text().splitlines()) == 1
    again = tmp_path / "again"
    assert main(["--results", str(tmp_path), f"logger.dir={again}", "logger.project=mine", "logger.tags=[a]"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [f"{own}  finished" for own in sorted(found)]
    assert {own["id"]: own for own in map(read_back, (again / "wandb").glob("offline-run-*"))} == found


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("import", "RuntimeError: broken \\x1b[31mat import"),
        ("init", "ValueError: no account \\x1b[31msecond line"),
        ("exit", "the process that logs ended"),
    ],
)
def test_what_wandb_raises_is_one_line(runs, tmp_path, capsys, fake, monkeypatch, how, line):
    monkeypatch.setenv("FAKE", how)
    log(tmp_path).finished(runs[:1])
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"kvbench: logger=wandb: {line}; later: kvbench results wandb-sync --results {tmp_path}\n",
    )
    assert (runs[0].folder.path / "wandb.jsonl").read_text() == ""


def test_what_hangs_is_given_up_at_the_limit(runs, tmp_path, capsys, fake, monkeypatch):
    monkeypatch.setenv("FAKE", "finish")
    begin = time.monotonic()
    log(tmp_path, seconds="2").finished(runs)
    assert 2 <= time.monotonic() - begin < 5
    begin = time.monotonic()
    log(tmp_path, seconds="2").finished(runs)  # the second cell of a sweep does not ask
    assert time.monotonic() - begin < 1
    said = capsys.readouterr().err
    assert (
        said.startswith("kvbench: logger=wandb: not done after 2 s (logger.seconds); this ") and said.count("\n") == 1
    )
    assert main(["--results", str(tmp_path), "logger.seconds=0.5"]) == 1
    assert "0 of 2 runs logged" in capsys.readouterr().out


@pytest.mark.full
def test_a_hub_that_never_answers_is_waited_for_once(imported, forks, runs, tmp_path, capsys, monkeypatch):
    """W&B itself against a socket that takes connections and says nothing: the second cell of a sweep does not ask."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        begin = time.monotonic()
        log(tmp_path, mode="online", seconds="3").finished(runs)
        assert 3 <= time.monotonic() - begin < 6
        begin = time.monotonic()
        log(tmp_path, mode="online", seconds="3").finished(runs)
        log(tmp_path, mode="online", seconds="3").failed(runs[1:], OSError("disk"))
        assert time.monotonic() - begin < 1
        deaf.settimeout(1)
        deaf.accept()[0].close()  # it was asked at all
    said = (
        "kvbench: logger=wandb: not done after 3 s (logger.seconds); this process logs no more runs there; later: make "
    )
    assert capsys.readouterr().err == f"{said}wandb-sync RESULTS={tmp_path}\n"
    log(tmp_path).finished(runs[:1])
    assert (tmp_path / "wandb").exists() and capsys.readouterr().err == ""  # another place is none of that hub's


def test_a_run_is_logged_when_it_fails_and_again_when_it_is_done(kvbench, monkeypatch, fake):

    def broken(*_):
        raise OSError("no space\nleft")

    with monkeypatch.context() as patch:
        patch.setattr("kvbench.runs.responder.Responder.answer", broken)
        with pytest.raises(OSError, match="no space"):
            kvbench(*QUICK, "logger=wandb")
    (failed,) = fake()
    assert failed["config"]["method"]["name"] == "full" and failed["code"] == 1
    assert (failed["summary"]["state"], failed["summary"]["failure"]) == ("failed", "OSError: no space left")
    assert main(["--results", "results"]) == 0
    assert fake()[1:] == [failed]

    code, out, _ = kvbench(*QUICK, "logger=wandb")
    assert code == 0 and "average" in out
    _, _, full, method = fake()
    assert full["id"] == failed["id"] and (full["summary"]["state"], full["summary"]["failure"]) == ("finished", None)
    assert method["summary"]["score/niah_single_1"] is not None
    before = sorted(path.name for path in Path("results/runs").iterdir())
    assert before == sorted([full["id"], method["id"]])

    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    for name in ("kvbench.integrations.wandb_logger", "kvbench.integrations.wandb_run"):
        monkeypatch.delitem(sys.modules, name)
    assert kvbench(*QUICK)[0] == 0
    assert (
        "kvbench.integrations.wandb_logger" not in sys.modules and "kvbench.integrations.wandb_run" not in sys.modules
    )
    assert before == sorted(path.name for path in Path("results/runs").iterdir()) and len(fake()) == 4


def test_a_replay_names_what_it_leaves_out_and_shows_the_rest(runs, tmp_path, capsys, fake):
    write(tmp_path, dict(list(records(False).items())[:3]), finish=False, budget=0.3)
    alone = write(tmp_path, records(False), seed=1)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.yaml").write_text("{")
    assert main(["--results", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "3 of 4 runs logged" in out and out.count("unfinished") == 1
    assert "kvbench: run broken is left out: run.yaml cannot be read" in err
    assert f"kvbench: run {alone.hash} is left out: no finished run of the full cache on the same samples" in err
    assert main(["--results", str(tmp_path), "method=full"]) == 0
    assert len(fake()) == 4 and fake()[3]["id"] == runs[0].hash
    assert main(["--results", str(tmp_path), "method=foo"]) == main(["--results", str(tmp_path / "runs")]) == 2
    assert main(["--results", str(tmp_path), "logger.nothing=1"]) == 2
    assert "logger setting=nothing: choose one of mode, project, entity" in capsys.readouterr().err


BAD = {
    "logger=foo": "logger=foo: choose one of none, wandb",
    "logger=null": "logger=null: choose one of none, wandb",
    "logger.mode=shared": "logger.mode=shared: choose one of online, offline",
    "logger.project=a/b": "logger.project=a/b: a text of 1 to 128 characters without any of / \\",
    "logger.project=null": "logger.project=None: a text of 1 to 128",
    "logger.entity=a%b": "logger.entity=a%b: a text",
    "logger.group=''": "logger.group=: a text of 1 to 128 characters",
    "logger.tags=a": "logger.tags=a: a list of texts, such as [a,b]",
    "logger.tags=[1]": "logger.tags=1: a text of 1 to 64 characters",
    "logger.seconds=0": "logger.seconds=0: a number of seconds over 0",
    "logger.dir=5": "logger.dir=5: a folder that can be written",
    "logger.dir=/dev/null/x": "logger.dir=/dev/null/x: a folder that can be written",
    "logger.nothing=1": "logger.nothing: no such setting",
    "task=efficiency": "logger=wandb: task=efficiency keeps no records; logger=none",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_wrong_setting_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    chosen = [setting] if setting.startswith("logger=") else ["logger=wandb", setting]
    assert_refused(run_cli(["device=cpu", *chosen], monkeypatch, capsys), BAD[setting], tmp_path)


def test_a_sweep_is_refused_before_its_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = run_cli(["-m", "budget=0.1,0.2", "logger=wandb", "logger.mode=maybe"], monkeypatch, capsys)
    assert_refused(found, "logger.mode=maybe: choose one of online, offline", tmp_path)


def test_settings_of_a_replay_are_checked_alike(tmp_path):
    with pytest.raises(SettingError, match="logger.mode=maybe: choose one of online, offline"):
        log(tmp_path, mode="maybe")
