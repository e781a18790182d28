"""The run folder: killed, shared between processes, torn, hostile; and what its hash stands for."""

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbench.store import run_folder
from kvbench.store.run_folder import DamagedRun, RunFolder, parse_line, run_hash
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

VALUE = {"method": "snapkv", "budget": 0.05}
WORKER = """
import os, sys, time
from pathlib import Path
from kvbench.store.run_folder import RunFolder, claim_samples
root, count, size, pause, log = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
uids = [f"niah/{index}" for index in range(count)]
log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
folder = RunFolder(root, {"method": "snapkv", "budget": 0.05})
with folder.open({"cpu": "one"}):
    print("open", flush=True)
    sys.stdin.readline()
    for uid, _ in claim_samples([folder], uids, pause=0.01):
        os.write(log, f"{uid} {os.getpid()}\\n".encode())
        time.sleep(pause / 1000)
        folder.append({"uid": uid, "output": uid * size})
    print(folder.finish(uids), flush=True)
"""


def work(root: Path, count: int, size: int = 1, pause: int = 0) -> subprocess.Popen:
    """A process that does `count` samples of the run, `pause` ms each, and logs each that it begins."""
    process = opened(root, count, size, pause)
    begin(process)
    return process


def opened(root: Path, count: int, size: int, pause: int) -> subprocess.Popen:
    """The same, waiting for `begin` with the run open."""
    arguments = [sys.executable, "-c", WORKER, root, count, size, pause, root / "begun"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, arguments)), env=environment, **pipes)
    assert process.stdout.readline() == "open\n"
    return process


def begin(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def ended(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=30)
    return output


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    ended(process)


def lines(folder: RunFolder) -> list[dict]:
    """Every line of every file, strictly: a torn one raises."""
    text = b"".join(path.read_bytes() for path in folder.path.glob("records*.jsonl"))
    assert text.endswith(b"\n")
    return [parse_line(line) for line in text.splitlines(True)]


def begun(root: Path) -> Counter:
    return Counter(line.split()[0] for line in (root / "begun").read_text().splitlines())


def write(folder: RunFolder, *uids: str, **fields) -> None:
    for uid in uids:
        assert folder.claim(uid)
        folder.append({"uid": uid, **fields})


@pytest.mark.parametrize(("count", "most"), [(100, 5), only_in_full(400, 12)])
def test_killed_at_random_moments_and_resumed(tmp_path, count, most):
    size, kills = 20_000, 0
    draw = random.Random(0)
    folder = RunFolder(tmp_path, VALUE)
    while kills < most:
        process = work(tmp_path, count, size, pause=8)
        time.sleep(draw.uniform(0, 0.05))
        kill(process)
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
        assert not folder.finished
        kills += 1
    assert ended(work(tmp_path, count, size)) == "True\n"
    found = lines(folder)
    assert sorted(record["uid"] for record in found) == sorted(f"niah/{index}" for index in range(count))
    assert all(record["output"] == record["uid"] * size for record in found)
    assert begun(tmp_path).total() - count <= kills  # at most the sample in flight is repeated
    assert folder.finished and folder.records() == {record["uid"]: record for record in found}
    assert not list(folder.path.glob("*.draft*"))


@pytest.mark.parametrize("workers", [2, only_in_full(4)])
def test_processes_share_a_run(tmp_path, workers):
    processes = [opened(tmp_path, 80, size=3000, pause=4) for _ in range(workers)]
    for process in processes:
        begin(process)
    assert [ended(process) for process in processes] == ["True\n"] * workers
    folder = RunFolder(tmp_path, VALUE)
    assert Counter(record["uid"] for record in lines(folder)) == {f"niah/{index}": 1 for index in range(80)}
    assert set(begun(tmp_path).values()) == {1}  # and none was even begun twice
    assert len(list(folder.path.glob("records-*.jsonl"))) >= 2
    assert folder.finished


def test_a_dead_workers_sample_is_taken_over(tmp_path):
    stuck = work(tmp_path, 1, pause=60_000)
    while not (tmp_path / "begun").exists() or not begun(tmp_path):
        time.sleep(0.01)
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        assert not folder.claim("niah/0")
        other = work(tmp_path, 2)
        while "niah/1" not in folder.records():
            time.sleep(0.01)
        assert other.poll() is None  # waits for the first sample
        kill(stuck)
        assert ended(other) == "True\n"
        assert begun(tmp_path) == {"niah/0": 2, "niah/1": 1}
        assert not folder.claim("niah/0")  # has its record now


def test_a_sample_finished_between_look_and_lock_is_not_done_again(tmp_path):
    first, second = RunFolder(tmp_path, VALUE), RunFolder(tmp_path, VALUE)
    with second.open({}):
        assert second.records() == {}
        assert ended(work(tmp_path, 1)) == "True\n"
        assert not second.claim("niah/0")
        assert second.claim("niah/1")
    assert list(first.records()) == ["niah/0"]


def test_claims_are_one_per_sample_and_can_be_given_back(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        assert folder.claim("a") and not folder.claim("a")
        folder.release("a")
        folder.release("never claimed")
        assert folder.claim("a")
        with pytest.raises(RuntimeError, match="b: not claimed"):
            folder.append({"uid": "b"})
        folder.append({"uid": "a"})
        with pytest.raises(RuntimeError, match="a: not claimed"):
            folder.append({"uid": "a"})
        with pytest.raises(RuntimeError, match="already open"), folder.open({}):
            pass
    for needs_open in (lambda: folder.claim("b"), lambda: folder.finish(["a"])):
        with pytest.raises(RuntimeError, match="open the run"):
            needs_open()
    with folder.open({}):
        write(folder, "b")
    assert len(lines(folder)) == 2


def test_a_sample_is_free_until_it_is_claimed_or_recorded(tmp_path):
    def find_free_elsewhere() -> str:
        """The samples that another process finds free."""
        reading, writing = os.pipe()
        if (process := os.fork()) == 0:
            try:
                other = RunFolder(tmp_path, VALUE)
                with other.open({}):
                    other.refresh()
                    os.write(writing, "".join(filter(other.is_free, "abc")).encode())
            finally:
                os._exit(0)
        os.waitpid(process, 0)
        os.close(writing)
        with os.fdopen(reading) as file:
            return file.read()

    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        assert folder.is_free("a") and find_free_elsewhere() == "abc"
        assert folder.claim("a") and folder.claim("b")
        assert list(filter(folder.is_free, "abc")) == ["c"] and find_free_elsewhere() == "c"
        folder.append({"uid": "a"})
        folder.release("b")
        assert list(filter(folder.is_free, "abc")) == ["b", "c"] and find_free_elsewhere() == "bc"


def test_a_torn_tail_is_passed_over_and_cut_off(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        write(folder, "a", output="x" * 100)
        write(folder, "b", output="y")
    (path,) = folder.path.glob("records-*.jsonl")
    whole = path.read_bytes()
    first = whole[: whole.index(b"\n") + 1]
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        again = RunFolder(tmp_path, VALUE)
        assert list(again.records()) == (["a"] if end >= len(first) else [])
        with again.open({}):
            assert path.read_bytes() == (first if end >= len(first) else b"")
            assert again.claim("b")
    path.write_bytes(whole[:-1])
    with again.open({}):
        assert not again.claim("a")
        write(again, "b", output="z")
    assert [again.records()[uid]["output"][0] for uid in "ab"] == ["x", "z"]
    assert len(lines(again)) == 2


def test_a_living_writers_tail_is_left_alone(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        write(folder, "a")
    path = folder.path / "records-elsewhere-1-00.jsonl"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"uid": "b"')
        file.flush()
        with folder.open({}):
            assert path.read_bytes() == b'{"uid": "b"'
            assert list(folder.records()) == ["a"]
            file.write(b"}\n")
            file.flush()
            assert sorted(folder.records()) == ["a", "b"]
            file.write(b'{"uid": "c"')
            file.flush()
    with folder.open({}):
        assert path.read_bytes() == b'{"uid": "b"}\n'


def test_a_writer_holds_its_own_file(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        write(folder, "a")
        (path,) = folder.path.glob("records-*.jsonl")
        with open(path, "r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lines_that_are_no_records_and_doubles(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        pass
    (folder.path / "records-b.jsonl").write_text('{"uid": "a", "score": 2}\n{"uid": "b", "score": 3}\n')
    (folder.path / "records-a.jsonl").write_text('\n{"uid": "a", "score": 1}\n{"uid": "a"}\n\0\0\0\n')
    assert folder.records() == {"a": {"uid": "a", "score": 1}, "b": {"uid": "b", "score": 3}}
    for line in ("[1]", '{"uid": 7}', "\0", '{"uid": "c", "version": 4}', '{"uid": "c", "check": "0123456789abcdef"}'):
        (folder.path / "records-c.jsonl").write_text(f'{line}\n{{"uid": "d"}}\n')
        with pytest.raises(DamagedRun, match=r"is damaged: records-c\.jsonl: line 1 \w+ .*; move the folder away"):
            RunFolder(tmp_path, VALUE).records()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    """A write that is only cut short is continued."""
    folder = RunFolder(tmp_path, VALUE)
    whole_write = os.write
    parts = iter([5, 3])

    def write_part(descriptor: int, data: bytes) -> int:
        if (size := next(parts, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole_write(descriptor, data[:size])

    with folder.open({}):
        write(folder, "a")
        assert folder.claim("b")
        monkeypatch.setattr(os, "write", write_part)
        with pytest.raises(OSError, match="No space left .*records-"):
            folder.append({"uid": "b"})
        assert lines(folder) == [{"uid": "a"}]
        monkeypatch.setattr(os, "write", lambda descriptor, data: whole_write(descriptor, data[:5]))
        folder.append({"uid": "b"})
    assert lines(folder) == [{"uid": "a"}, {"uid": "b"}]


def test_done_is_last_and_speaks_of_the_records(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    assert not folder.finished
    with folder.open({}):
        write(folder, "a")
        assert not folder.finish(["a", "b"]) and not folder.finished
        write(folder, "b", error="out_of_memory")
        assert not folder.finished  # all there, but not closed
        assert folder.finish(["a", "b"]) and folder.finished
    done = json.loads((folder.path / "done").read_text())
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.path.iterdir()}
    assert done.pop("files") == {name: own for name, own in files.items() if name not in ("done", "claims.lock")}
    assert done == {"format": 1, "records": 2, "uids": hashlib.sha256(b'["a", "b"]').hexdigest()}
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    with RunFolder(tmp_path, VALUE).open({"gpu": "another"}, 3) as again:  # a finished run stays as it is
        assert again.finished and again.finish(["a", "b"])
    (folder.path / "machine-later.json").write_text("")
    (folder.path / "verdicts.jsonl").write_text("")
    assert RunFolder(tmp_path, VALUE).finished
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["run.yaml", "machine.json", "samples", "records-*.jsonl", "done"])
def test_a_damaged_run_is_never_resumed_and_sealed_anew(tmp_path, name):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}, 2):
        write(folder, "a", "b")
        assert folder.finish(["a", "b"])
    [path] = folder.path.glob(name)
    whole = path.read_bytes()
    for harmed in (whole[:-1], whole + b" ", whole.replace(whole[-3:], b"\0" * 3), b"", None):
        path.unlink() if harmed is None else path.write_bytes(harmed)
        if RunFolder(tmp_path, VALUE).finished:
            assert name == "done" and harmed in (whole[:-1], whole + b" ")  # whitespace
            continue
        again = RunFolder(tmp_path, VALUE)
        if name == "done" and harmed is None:
            with again.open({}):
                assert again.finish(["a", "b"])  # nothing else is damaged
        else:
            with (
                pytest.raises(DamagedRun, match="is damaged: .*; move the folder away to run it again"),
                again.open({}),
            ):
                pass
            assert not path.exists() if harmed is None else path.read_bytes() == harmed
        path.write_bytes(whole)
    assert RunFolder(tmp_path, VALUE).finished


def test_nothing_is_written_before_open(tmp_path):
    root = tmp_path / "runs"
    folder = RunFolder(root, VALUE)
    assert folder.records() == {} and not folder.finished
    with pytest.raises(TypeError, match="PosixPath"), folder.open({"disk": Path("/")}):
        pass
    for wrong, error in ((float("nan"), ValueError), (Path("x"), TypeError), ({1: 2}, TypeError), (b"x", TypeError)):
        with pytest.raises(error):
            RunFolder(root, {"budget": wrong})
    assert not root.exists()


def test_run_and_machine_are_described(tmp_path):
    value = {"model": {"name": "réf", "layers": (1, 2)}, "budget": 5e-2, "block_size": None}
    for machine in ({"gpu": "H200"}, {"gpu": "H200"}, {"gpu": "A100", "load": float("inf")}):
        folder = RunFolder(tmp_path, value)
        with folder.open(machine):
            write(folder, *({"a", "b"} - folder.records().keys()))
    described = run_folder.yaml.safe_load((folder.path / "run.yaml").read_text())
    assert described == {"format": 1, "hash": folder.path.name, "value": value | {"model": folder.value["model"]}}
    assert json.loads((folder.path / "machine.json").read_text()) == {"gpu": "H200"}
    (other,) = folder.path.glob("machine-*.json")
    assert json.loads(other.read_text()) == {"gpu": "A100", "load": None}
    (folder.path / "run.yaml").write_text("format: 0\n")
    with pytest.raises(ValueError, match="format 0"), folder.open({}):
        pass


def test_the_hash_is_of_canonical_json():
    assert run_hash({"b": 5e-2, "a": None}) == hashlib.sha256(b'{"a":null,"b":0.05}').hexdigest()[:16]
    assert run_hash({"x": -0.0}) == run_hash({"x": 0.0})
    assert run_hash({"x": (1, 2)}) == run_hash({"x": [1, 2]})
    different = [1, 1.0, True, "1", None, [1], {"1": 1}, "", [], {}, 0, False, 0.1 + 0.2, 0.3, "\ud800", "é", "e\u0301"]
    assert len({run_hash({"x": value}) for value in different}) == len(different)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON))
def test_the_order_of_keys_and_a_round_trip_do_not_change_the_hash(value):
    assert run_hash(dict(reversed(value.items()))) == run_hash(value)
    assert run_hash(json.loads(json.dumps(value))) == run_hash(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_spelling_of_a_number_does_not_change_the_hash(number):
    for spelling in (f"{number!r}", f"{number:.17e}", f"{number:.16e}"):
        assert run_hash({"budget": float(spelling)}) == run_hash({"budget": number})


@given(st.dictionaries(st.text(), JSON), st.text(), JSON, JSON)
def test_any_changed_setting_changes_the_hash(value, key, one, other):
    assume(
        json.dumps(run_folder.to_plain(one), sort_keys=True) != json.dumps(run_folder.to_plain(other), sort_keys=True)
    )
    assert run_hash(value | {key: one}) != run_hash(value | {key: other})


@given(st.lists(st.tuples(st.text(), JSON), min_size=1, max_size=5))
def test_any_text_survives(tmp_path_factory, texts):
    folder = RunFolder(tmp_path_factory.mktemp("runs"), VALUE)
    written = {}
    with folder.open({}):
        for place, (text, meta) in enumerate(texts):
            uid = f"{place}{text}"
            written[uid] = {"uid": uid, "output": text + "\n\r\u2028\0\x1b\ud800\"'", "meta": meta}
            write(folder, uid, **{key: written[uid][key] for key in ("output", "meta")})
    assert RunFolder(folder.path.parent, VALUE).records() == written
    assert len(lines(folder)) == len(texts)


def test_what_is_no_number_becomes_null(tmp_path):
    folder = RunFolder(tmp_path, VALUE)
    with folder.open({}):
        write(folder, "a", score=float("nan"), meta={"peaks": [1.5, float("inf"), -float("inf")]}, output="NaN")
    assert folder.records()["a"] == {"uid": "a", "score": None, "meta": {"peaks": [1.5, None, None]}, "output": "NaN"}
    assert RunFolder(tmp_path, VALUE).records() == folder.records()
