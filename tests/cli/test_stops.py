"""What was stopped or found a full disk says so in one line, has the exit code for it, and loses nothing."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

import pytest

from kvbench.cli import run as command
from kvbench.cli.command import run_command
from kvbench.integrations.wandb_logger import WandbLogger, load_settings
from kvbench.runs import group_watch
from kvbench.runs.responder import Responder
from kvbench.stops import Terminated, check_stop, stop_at_safe_points, waiting
from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import load_runs
from kvbench.sweeps.status import read_state
from kvbench.validation import describe_write_error, name_file_in_errors
from tests.support.command_line import run_cli
from tests.support.full_disk import full_beyond
from tests.support.report_store import make_records, write_run
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

RECORDS = r"runs/\w+/records-[^ ]*\.jsonl"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def quick(checkpoint) -> tuple[str, ...]:
    """Settings of a run of three samples."""
    task = ("task.subtasks=[niah_single_1]", "task.length=512", "task.samples=3")
    return ("model=hf", f"model.path={checkpoint}", "device=cpu", *task)


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """Ctrl-C interrupts, as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int) -> None:
    """Send this process a signal. Python has called its handler when this returns."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", CODES)
def test_a_command_that_is_stopped_says_so(number, capsys):
    """At its next safe point, and at its end if none comes before."""
    before = [signal.getsignal(own) for own in (*CODES, signal.SIGALRM)]
    done: list[str] = []

    def work() -> None:
        try:
            send(number)
            done.append("half")
            done.append("whole")
        except KeyboardInterrupt:  # as a library does that turns each error into its own
            done.append("swallowed")
        if number == signal.SIGTERM:
            check_stop()
            done.append("not stopped")

    assert run_command(work) == CODES[number]
    assert capsys.readouterr() == ("", "kvbench: stopped\n")
    assert done == ["half", "whole"]
    assert [signal.getsignal(own) for own in (*CODES, signal.SIGALRM)] == before


def test_a_stop_is_raised_soon_without_a_safe_point(monkeypatch):
    """And again at the next safe point, should a library swallow it."""
    monkeypatch.setattr("kvbench.stops.GRACE", 0.05)
    begin = time.monotonic()
    with pytest.raises(Terminated), stop_at_safe_points():
        with pytest.raises(Terminated):
            send(signal.SIGTERM)
            time.sleep(60)
        check_stop()
        pytest.fail("not stopped")
    assert time.monotonic() - begin < 30


def test_a_wait_ends_with_the_signal():
    """Whether it arrives before the wait or in it."""
    for early in (True, False):
        with stop_at_safe_points(), pytest.raises(Terminated):
            if early:
                send(signal.SIGTERM)
            with waiting():
                send(signal.SIGTERM)
                pytest.fail("not stopped")


def test_a_second_ctrl_c_ends_the_process():
    """A second SIGTERM does not, and a Ctrl-C that was ignored stays ignored."""
    if (child := os.fork()) == 0:
        with stop_at_safe_points():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                send(number)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `listening` restores it
    with stop_at_safe_points():
        send(signal.SIGINT)
        check_stop()


def test_a_limit_of_time_of_another_is_left_alone():
    """The import of a method's file has one."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        with pytest.raises(Terminated), stop_at_safe_points():
            send(signal.SIGTERM)
            assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def stopping(monkeypatch) -> Callable[[int, int], None]:
    """Sends a signal before the answer after so many begins, which stops at a safe point of the engine."""

    def stop(number: int, after: int) -> None:
        left, own = iter(range(after)), Responder.attempt

        def attempt(*given: object) -> object:
            if next(left, None) is None:
                send(number)
            return own(*given)

        monkeypatch.setattr(Responder, "attempt", attempt)
        monkeypatch.setattr(group_watch, "ALONE", sys.maxsize)  # what is read again alone would count too

    return stop


def lines(results: Path) -> list[str]:
    return sorted(line for file in results.glob("runs/*/records*.jsonl") for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("many", "number", "after", "where"),
    [
        (("method=snapkv",), signal.SIGINT, 4, "at 4 of 6"),
        only_in_full(("method=snapkv",), signal.SIGTERM, 0, "at 0 of 6"),
        only_in_full(
            ("-m", "method=snapkv,knorm", "sweep.share_prefill=false"),
            signal.SIGINT,
            7,
            "at 1 of 2 cells, with 7 answers",
        ),
        (("-m", "method=snapkv,knorm"), signal.SIGTERM, 4, "at 0 of 2 cells, with 4 answers"),
    ],
)
def test_a_run_that_is_stopped_goes_on(many, number, after, where, quick, tmp_path, stopping, monkeypatch, capsys):
    given = [*many, "budget=0.3", f"results={tmp_path}", *quick]
    monkeypatch.setattr(sys, "argv", ["run.py", *given])
    with monkeypatch.context():
        stopping(number, after)
        assert run_command(command.main) == CODES[number]
        out, err = capsys.readouterr()
        said = [
            line
            for line in err.replace("\r", "\n").splitlines()
            if line and "it/s]" not in line and "s/it]" not in line
        ]
        assert said == [f"kvbench: stopped {where}; the same command goes on"]
        before = lines(tmp_path)
        assert len(before) == after and all(json.loads(line)["error"] is None for line in before)
        monkeypatch.undo()
    code, out, err = run_cli(given, monkeypatch, capsys)
    assert code == 0 and "average" in out.lower() and set(before) <= set(lines(tmp_path))


def at_work(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if int(own) == group and state != "Z" else []
    return found


@pytest.mark.full
def test_workers_end_with_a_run_that_is_stopped(quick, tmp_path):
    """Ctrl-C in a terminal reaches all processes of the group."""
    arguments = [str(ROOT / "run.py"), "method=snapkv", "workers=2", f"results={tmp_path}", *quick]
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "task.samples=400"], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as group:  # fmt: skip
        try:
            end = time.monotonic() + 120
            while len(list(tmp_path.glob("runs/*/records*.jsonl"))) < 2 and time.monotonic() < end:  # of each worker
                time.sleep(0.05)
            os.killpg(group.pid, signal.SIGINT)
            out, err = group.communicate(timeout=60)
        finally:
            group.kill()
    said = [line for line in err.replace("\r", "\n").splitlines() if line and "/400 [" not in line]
    assert (group.returncode, out, len(said)) == (130, "", 1), err
    done = int(re.fullmatch(r"kvbench: stopped at (\d+) of 800; the same command goes on", said[0])[1])
    assert done == len(lines(tmp_path)) >= 2 and all(json.loads(line)["uid"] for line in lines(tmp_path))
    end = time.monotonic() + 30
    while at_work(group.pid):
        assert time.monotonic() < end, "a process of the group is left"
        time.sleep(0.05)


def test_a_logger_that_hangs_does_not_hold_what_is_stopped(tmp_path, monkeypatch):
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}, sampling={"temperature": 0.0, "top_p": 1.0})
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "wandb.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "slow")

    def stop_when_it_hangs() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    begin, timer = time.monotonic(), Thread(target=stop_when_it_hangs, daemon=True)
    with stop_at_safe_points(), pytest.raises(Terminated):
        timer.start()
        WandbLogger.of(load_settings({"seconds": "60"}), tmp_path).finished(load_runs(tmp_path))
    assert time.monotonic() - begin < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("many", "size", "where"),
    [
        only_in_full(("method=snapkv",), 14000, RECORDS),
        (("-m", "method=snapkv,knorm"), 14000, RECORDS),
        only_in_full(("method=snapkv", "workers=2"), 14000, RECORDS),
    ],
)
def test_a_full_disk_ends_a_run_in_one_line(many, size, where, quick, tmp_path, monkeypatch, capsys):
    """A sweep too: the next cell would find no more room."""
    # what cells.json holds is longer
    monkeypatch.setattr("kvbench.sweeps.status.write_cells", lambda folder, cells: None)
    monkeypatch.setattr("kvbench.sweeps.plan.Sweep.print_states", lambda own: None)
    samples = 36 if "workers=2" in many else 11  # more than two workers and the process that waits for them can write
    base = [f"results={tmp_path}", *quick, f"task.samples={samples}"]
    given = [*many, "budget=0.3", *base]
    assert run_cli(["method=full", *base], monkeypatch, capsys)[0] == 0
    with full_beyond(size):
        code, _, err = run_cli(given, monkeypatch, capsys)
    said = [line for line in err.replace("\r", "\n").splitlines() if line and not re.search(r"/(11|22|36) \[", line)]
    assert code == 1 and len(said) == 1 and re.fullmatch(rf"kvbench: {tmp_path}/{where}: .*", said[0]), err
    assert lines(tmp_path) and all(json.loads(line)["error"] is None for line in lines(tmp_path))


def test_each_error_of_a_disk_has_its_line(tmp_path):
    with (
        pytest.raises(OSError, match="No space") as found,
        name_file_in_errors(tmp_path / "x"),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
        file.flush()
    assert describe_write_error(found.value) == f"{tmp_path}/x: No space left on device"
    for name in ("ENOLCK", "ENOTSUP", "ENOSYS", "ESTALE", "EMFILE", "EINVAL", "EXDEV", "EDQUOT", "EROFS", "EINTR"):
        assert describe_write_error(OSError(getattr(errno, name), "why", "x")) == "x: why"
    assert (
        describe_write_error(FileNotFoundError(2, "No such file", "x")) is None
        and describe_write_error(OSError("x")) is None
    )


@pytest.mark.parametrize("name", ["ENOLCK", only_in_full("ESTALE")])
def test_a_report_on_a_network_file_system_names_the_file(name, tmp_path, monkeypatch, capsys):
    """Whether it is locked or renamed."""
    monkeypatch.setattr("kvbench.report.page.build_charts", dict)  # which take a second
    monkeypatch.setattr("kvbench.report.page.load_scripts", lambda: ("", ""))
    write_run(tmp_path, make_records(1.0, 100), method={"name": "full"}, sampling={"temperature": 0.0, "top_p": 1.0})
    number = getattr(errno, name)

    def fail(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    for function, file in (("fcntl.lockf", "report/lock"), ("os.fsync", "report")):
        with monkeypatch.context() as patch:
            patch.setattr(function, fail)
            assert import_module("kvbench.cli.report").main(["--results", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert re.fullmatch(rf"kvbench: {tmp_path}/{file}.*: {re.escape(os.strerror(number))}\n", said)


def test_a_full_disk_names_the_records(tmp_path, capsys):
    """And the line that did not fit is not there."""
    folder = RunFolder(tmp_path / "runs", {"a": 1})

    def work() -> None:
        with folder.open({}, 2):
            for uid in "ab":
                assert folder.claim(uid)
                folder.append({"uid": uid, "text": 900 * uid})

    with full_beyond(1000):
        assert run_command(work) == 1
    [file] = folder.path.glob("records*.jsonl")
    assert re.fullmatch(rf"kvbench: {file}: File too large\n", capsys.readouterr().err)
    assert read_state(tmp_path, folder.hash).records == 1 == file.read_text().count("\n")


@pytest.mark.parametrize(
    ("module", "more", "name"),
    [
        ("report", [], "report"),
        ("figures", ["--kind", "curve"], "figures/"),
        ("export", ["{}/export"], "export/runs.parquet.draft"),
        ("papers", [], "papers/"),
    ],
)
def test_a_full_disk_names_the_file(module, more, name, tmp_path, capsys):
    for budget in (1.0, 0.5):
        method = {"name": "full" if budget == 1 else "snapkv"}
        write_run(
            tmp_path,
            make_records(budget, 90),
            method=method,
            budget=budget,
            sampling={"temperature": 0.0, "top_p": 1.0},
        )
    with full_beyond(200):
        code = import_module(f"kvbench.cli.{module}").main(
            ["--results", str(tmp_path), *(own.format(tmp_path) for own in more)]
        )
    out, err = capsys.readouterr()
    assert code == 1 and re.fullmatch(rf"kvbench: {tmp_path}/{name}.*File too large.*\n", err), err
