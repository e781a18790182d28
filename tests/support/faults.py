"""A small sweep on a disk whose system calls fail (`faults.c`).

`run_faults` compiles the shim and starts one process with it. That process forks one for each case, which sets its
fault, does the work and ends. A second fork does the work again without a fault.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from shutil import which

import pytest

from kvbench.cli.command import run_command
from kvbench.interfaces.task import Sample
from kvbench.store.audit import audit_runs
from kvbench.store.efficiency_csv import append_lines
from kvbench.store.record import Record
from kvbench.store.run_folder import RunFolder, claim_samples
from kvbench.sweeps.status import SweepCell, write_cells
from kvbench.tasks.common.sample_cache import read_or_make
from tests.support.made_up_runs import VALUE
from tests.support.recorded_runs import read_records, strip_circumstances
from tests.support.repository import ROOT

KINDS = ("write", "fsync", "rename", "open", "link", "unlink", "flock", "lock")  # in the order of faults.c
ERRORS = ("ENOSPC", "EIO", "EINTR", "EDQUOT", "ESTALE", "ENOLCK", "EMFILE")
SHORT = "short"  # in place of an error: half of a write is done


def run_faults(folder: Path, count: int, seed: int, *sweep: str) -> list[dict]:
    """Do a small sweep so many times, each time with another fault and then again without one.

    Args:
        folder: An empty folder.
        count: The number of cases.
        seed: Seed of their draw.
        sweep: The command line after `run`. Without one, the sweep writes made-up records and needs no torch.

    Returns:
        A dictionary for each case: `fault`, `code` and `said` of the disturbed sweep, the same with `_again` of the
        second one, whether the records are those of an `undisturbed` sweep, and what the audit finds `wrong`.
    """
    if (compiler := which("cc")) is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    shim = folder / "faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    given = [str(folder), str(count), str(seed), *sweep]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.faults", *given],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]


def assert_unharmed(case: dict) -> None:
    """One line and an exit code that the documentation names, or success; then nothing is missing or damaged.

    An error that stays may fail a cell, which has a line of its own, before it ends the command.
    """
    assert case["code"] in (0, 1, 2), case
    if case["code"]:
        *cells, line = [line for line in case["said"].splitlines() if not line.startswith("time: ")]
        assert line.startswith("kvbench: ") and "/results" in line, case  # the file
        assert all(own.startswith("kvbench: method=") for own in cells) and len(cells) <= 1, case
        assert not cells or case["fault"].endswith("from then on"), case
    assert (case["code_again"], case["undisturbed"], case["wrong"]) == (0, True, []), case


def write_made_up(results: Path) -> None:
    """Write what a sweep of two runs of two samples writes."""
    values = [VALUE | {"budget": budget} for budget in (0.5, 0.25)]
    write_cells(results / "sweeps" / "first", [SweepCell(str(own["budget"]), own, own) for own in values])
    uids = [sample.uid for sample in read_or_make(results / "samples" / "some.jsonl", "a", 2, make_sample)]
    for value in values:
        run = RunFolder(results / "runs", value)
        if run.finished:
            continue
        with run.open({"gpu": None}, len(uids)):
            for uid, [own] in claim_samples([run], uids):
                own.append(make_record(uid, value["budget"]))
            run.finish(uids)
    append_lines(results / "efficiency" / "times.csv", [{"cell": "a", "quantity": "b"}])


def make_sample(index: int) -> Sample:
    return Sample(f"a/{index}", "a", f"a/{index}", "context", "question", ("x",), 1)


def make_record(uid: str, budget: float) -> dict:
    failed = {
        "prompt_hash": "0" * 16,
        "target_hash": "1" * 16,
        "target": ["x"],
        "stop": "error",
        "error": "out_of_memory",
    }
    counts = {"index": 0, "tokens_in": 9, "tokens_context": 7, "turn": 0, "seconds": 1.0}
    none = {"conversation": None, "score": None, "answer": None, "meta": {}, "also": {}, "output": "", "asked": "?"}
    return Record(uid=uid, subtask="a", group=uid, budget=budget, **failed, **counts, **none).to_json()


def fork(work: Callable[[], object], said: Path) -> tuple[int, str]:
    """Run a command in a fork; return its exit code and what it wrote to stderr."""
    if (child := os.fork()) == 0:
        try:
            file = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = run_command(work)
            sys.stderr.flush()
            os._exit(code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(70)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, said.read_text()


def read_store(results: Path) -> dict[str, dict]:
    """The records of all runs, but for their times."""
    return {
        path.name: strip_circumstances({record["uid"]: record for record in read_records(path)})
        for path in (results / "runs").iterdir()
    }


def main(folder: Path, count: int, seed: int, *sweep: str) -> None:
    shim = ctypes.CDLL(str(folder / "faults.so"))

    def work(results: Path) -> int | None:
        if not sweep:
            return write_made_up(results)
        from kvbench.cli import run

        return run.main([*sweep, f"results={results}", f"task.cache={results}/samples"])

    def work_with(results: Path, fault: tuple[int, int, int, bool]) -> int | None:
        shim.faults_set(os.fsencode(results), *fault)
        return work(results)

    def count_calls(results: Path) -> None:
        work_with(results, (-1, 0, 0, False))
        (folder / "calls.json").write_text(json.dumps([shim.faults_seen(kind) for kind in range(len(KINDS))]))

    if sweep:  # imports what the forks then have
        assert run_command(partial(work, folder / "warm" / "results")) == 0
    whole = folder / "whole" / "results"
    code, said = fork(partial(count_calls, whole), folder / "said")
    assert code == 0, said
    calls = json.loads((folder / "calls.json").read_text())
    draw, expected = Random(seed), read_store(whole)
    kinds = [kind for kind, found in enumerate(calls) if found]
    with (folder / "cases.jsonl").open("w") as file:
        for number in range(count):
            kind = kinds[number % len(kinds)]
            call, lasts = draw.randint(1, calls[kind]), draw.random() < 0.5
            name = draw.choice([*ERRORS, SHORT] if KINDS[kind] == "write" else ERRORS)
            lasts = lasts and name not in ("EINTR", SHORT)  # Python repeats these calls
            results = folder / str(number) / "results"
            error = 0 if name == SHORT else getattr(errno, name)
            found = fork(partial(work_with, results, (kind, call, error, lasts)), folder / "said")
            again = fork(partial(work, results), folder / "said")
            wrong = [line for *_, lines in audit_runs(results) for line in lines] if again[0] == 0 else []
            case = {
                "fault": f"{KINDS[kind]} {call} of {calls[kind]} {name}{' from then on' * lasts}",
                "code": found[0], "said": found[1], "code_again": again[0], "said_again": again[1],
                "undisturbed": again[0] == 0 and read_store(results) == expected, "wrong": wrong,
            }  # fmt: skip
            file.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:])
