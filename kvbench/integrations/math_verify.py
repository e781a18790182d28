"""A second opinion on the answers of finished runs, given off-line: math-verify's beside the score of each record.

A task asks for it in its records (`meta.verify`); after a run `run.py` does the same. Verdicts are lines of
`verdicts.jsonl` in the run's folder, only ever appended; records are not touched, and what has a verdict of the same
version is not graded again, but for what ran out of a shorter time. Every answer is graded in a process that is killed
at the time limit (kvbench.integrations.math_verify_process). The notes say how often the two differ.
"""

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbench.config.paths import make_environment
from kvbench.store.run_folder import RunFolder, read_run_value
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError, name_file_in_errors

GRADER = "math_verify"
SECONDS = 10.0  # for one answer
START = 300.0  # for the grader's process to be ready: it imports sympy
FILE = "verdicts.jsonl"


class Verifier:
    """A process of kvbench.integrations.math_verify_process, started when it is first needed and again after it was
    killed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.process = seconds, None

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()

    def verdict(self, output: str, reference: str) -> bool | str:
        """True, False, "timeout" or "error"."""
        if self.process is None:
            command = [sys.executable, "-P", "-m", "kvbench.integrations.math_verify_process"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, env=make_environment(), **pipes)
            if self._line(START) != "ready":
                self._kill()
                raise SettingError(
                    "grade: math-verify does not start; python -m kvbench.integrations.math_verify_process says why"
                )
        request = json.dumps({"output": output, "reference": reference}).encode() + b"\n"
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            found = self._line(self.seconds)
        except BrokenPipeError:
            found = "error"
        if found in ("timeout", "died"):
            self._kill()
        return "error" if found == "died" else found

    def _line(self, seconds: float) -> bool | str:
        """The process's next answer; "died" if it ended, "timeout" if it is not there in time."""
        end, text, pipe = time.monotonic() + seconds, b"", self.process.stdout.fileno()
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                return "timeout"
            part = os.read(pipe, 4096)
            if not part:
                return "died"
            text += part
        return json.loads(text)["verdict"]

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError):
                self.process.communicate()
            self.process = None


def grade(folder: Path, seconds: float = SECONDS) -> None:
    """Give every record of the run that asks for it a verdict, unless it has one. SettingError without math-verify."""
    try:
        its = version("math-verify")
    except PackageNotFoundError:
        raise SettingError("grade: math-verify is not installed; make setup") from None
    asked = {uid: own for uid, own in read_records(folder).items() if own["meta"].get("verify") == GRADER}
    if not asked:
        return
    with name_file_in_errors(folder / FILE), open(folder / FILE, "a+b") as file, Verifier(seconds) as verifier:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process at a time; the next one finds all done
        file.seek(0)
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)  # the torn line of one that was killed
        done = read_verdicts(folder)
        for uid, record in asked.items():
            before = done.get(uid)
            if before and before["version"] == its and (before["verdict"] != "timeout" or before["seconds"] >= seconds):
                continue
            verdict = "error" if record["error"] else verifier.verdict(record["output"], record["target"][0])
            line = {"uid": uid, "grader": GRADER, "version": its, "verdict": verdict, "seconds": seconds}
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()


def read_verdicts(folder: Path) -> dict[str, dict]:
    """uid -> its last verdict."""
    path = folder / FILE
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = (json.loads(line) for line in whole.split(b"\n") if line)
    return {line["uid"]: line for line in lines}


def read_records(folder: Path) -> dict[str, dict]:
    """uid -> record of a run's folder."""
    return RunFolder(folder.parent, read_run_value(folder)).records()


def describe_verdicts(name: str, folder: Path) -> list[str]:
    """How often the second opinion on a run's answers differs, nothing if none asked for one."""
    answered = [own for own in read_records(folder).values() if own["meta"].get("verify") and own["score"] is not None]
    if not answered:
        return []
    if any(own["meta"].get("data") == "miniature" for own in answered):
        name = f"{name} (miniature, not the benchmark)"
    return [f"{name}: {own}." for own in _describe_differences(answered, read_verdicts(folder))]


def _describe_differences(answered: Sequence[Mapping[str, Any]], given: Mapping[str, dict]) -> Iterable[str]:
    both = [(own["score"] == 100, given[own["uid"]]["verdict"]) for own in answered if own["uid"] in given]
    if not both:
        return
    counts = Counter(both)
    timeouts, errors = (sum(verdict == kind for _, verdict in both) for kind in ("timeout", "error"))
    yield (
        f"math-verify {given[answered[0]['uid']]['version']} differs on {counts[False, True] + counts[True, False]} of "
        f"{len(both)} ({counts[False, True]} right only by it, {counts[True, False]} only by the score), "
        f"{timeouts} timeouts, {errors} errors"
    )


def grade_all(results: Path, seconds: float) -> None:
    """Grade every run of a results folder and print its notes."""
    for run in load_runs(results):
        grade(run.folder.path, seconds)
        named = (run.hash, run.settings["task.name"], run.settings["method.name"], run.settings["budget"])
        for note in describe_verdicts(" ".join(map(str, named)), run.folder.path):
            print(note)
