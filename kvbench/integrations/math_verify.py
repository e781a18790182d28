"""Ask math-verify for a second opinion on the answers of finished runs.

A task asks for it in its records (`meta.verify`), and `run.py` gives it after a run. Verdicts are lines of
`verdicts.jsonl` in the run's folder; records are not touched. A line says whether its verdict differs from the record's
score. A record that has a verdict of the same version is not judged again, unless it ran out of a shorter time.
math-verify may take for ever or take all memory, so it runs in a process that is limited in both. Notes say how often
verdict and score differ, and name the first such answers.
"""

import json
import resource
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbench.atomic import lock_file
from kvbench.integrations.worker import Worker
from kvbench.store.run_folder import RunFolder, read_run_value
from kvbench.store.runs import load_runs
from kvbench.validation import SettingError, name_file_in_errors, summarize

GRADER = "math_verify"
SECONDS = 10.0  # time limit for one answer
START = 300.0  # seconds for the process to be ready: it imports sympy
MEMORY = 4 << 30  # bytes of address space of the process: towers of powers would take all there is
FILE = "verdicts.jsonl"
NAMED = 3  # answers that a note names


class Verifier:
    """Judge answers by math-verify in a process of its own.

    The process is started when it is first needed, and again after it was killed.

    Args:
        seconds: Time limit for one answer, after which the process is killed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.worker: Worker | None = None

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()

    def verdict(self, output: str, reference: str) -> bool | str:
        """Judge one answer.

        Args:
            output: What the model wrote. The last box counts if there is one, else what math-verify takes for the
                answer.
            reference: The right answer, without a box.

        Returns:
            Whether the answer is right; "timeout" if that took too long, "error" if it could not be found out.

        Raises:
            SettingError: math-verify cannot be imported.
        """
        worker = self.worker or self._start()
        try:
            worker.send((output, reference))
            verdict: bool | str = worker.receive(self.seconds)
            return verdict
        except TimeoutError:
            verdict = "timeout"
        except (EOFError, OSError):
            verdict = "error"
        self._kill()
        return verdict

    def _start(self) -> Worker:
        self.worker = Worker(_answer_requests)
        try:
            wrong = self.worker.receive(START)
        except TimeoutError:
            wrong = f"not ready after {START:g} s"
        except EOFError:
            wrong = "its process ended"
        if wrong is not None:
            self._kill()
            raise SettingError(f"grade: math-verify does not start ({wrong}); make setup")
        return self.worker

    def _kill(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def _answer_requests(pipe: Connection) -> None:
    """Judge one pair of output and reference after the other; runs in a process of its own.

    The first message says why math-verify cannot be imported, or None. math-verify's own time limits are off: they are
    signals, which wait for whatever sympy does in C. Whoever asks kills this process instead.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        from math_verify import parse, verify
        from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {summarize(error)}")
        return
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    pipe.send(None)
    while True:
        try:
            output, reference = pipe.recv()
        except EOFError:
            return
        try:
            right = parse(f"\\boxed{{{reference}}}", targets, parsing_timeout=None)
            answer = parse(output, targets, parsing_timeout=None)
            pipe.send(bool(verify(right, answer, timeout_seconds=None)) if right else "error")
        except Exception:
            pipe.send("error")


def grade(folder: Path, seconds: float = SECONDS) -> None:
    """Append a verdict for every record of a run that asks for one and has none.

    Args:
        folder: The run's folder.
        seconds: Time limit for one answer.

    Raises:
        SettingError: math-verify is not installed, or it does not start.
        OSError: The verdicts cannot be written. The error names the file.
    """
    try:
        its = version("math-verify")
    except PackageNotFoundError:
        raise SettingError("grade: math-verify is not installed; make setup") from None
    asked = {uid: record for uid, record in read_records(folder).items() if record["meta"].get("verify") == GRADER}
    if not asked:
        return
    with name_file_in_errors(folder / FILE), open(folder / FILE, "a+b") as file, Verifier(seconds) as verifier:
        lock_file(file)  # one process judges at a time; the next one finds everything done
        file.seek(0)
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)  # drop the torn line of a process that was killed
        done = read_verdicts(folder)
        for uid, record in asked.items():
            before = done.get(uid)
            if before and before["version"] == its and (before["verdict"] != "timeout" or before["seconds"] >= seconds):
                continue
            verdict = "error" if record["error"] else verifier.verdict(record["output"], record["target"][0])
            line = {"uid": uid, "grader": GRADER, "version": its, "verdict": verdict, "seconds": seconds}
            line["differs"] = _differs(record, verdict)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()


def _differs(record: Mapping[str, Any], verdict: bool | str) -> bool:
    """Return whether math-verify judges otherwise than the score. A verdict such as "timeout" never does."""
    return isinstance(verdict, bool) and verdict != (record["score"] == 100)


def read_verdicts(folder: Path) -> dict[str, dict]:
    """Return the last verdict of each uid."""
    path = folder / FILE
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    lines = (json.loads(line) for line in whole.split(b"\n") if line)
    return {line["uid"]: line for line in lines}


def read_records(folder: Path) -> dict[str, dict]:
    """Return the records of a run's folder by uid."""
    return RunFolder(folder.parent, read_run_value(folder)).records()


def describe_verdicts(name: str, folder: Path) -> list[str]:
    """Return a line on how often verdict and score differ; no line if no record asks for a verdict or has one."""
    answered = [
        record
        for record in read_records(folder).values()
        if record["meta"].get("verify") and record["score"] is not None
    ]
    if not answered:
        return []
    if any(record["meta"].get("data") == "miniature" for record in answered):
        name = f"{name} (miniature, not the benchmark)"
    return [f"{name}: {text}." for text in _describe_differences(answered, read_verdicts(folder))]


def _describe_differences(answered: Sequence[Mapping[str, Any]], given: Mapping[str, dict]) -> Iterable[str]:
    judged = [record for record in answered if record["uid"] in given]
    if not judged:
        return
    verdicts = [given[record["uid"]]["verdict"] for record in judged]
    other = [record for record, verdict in zip(judged, verdicts, strict=True) if _differs(record, verdict)]
    by_it = sum(record["score"] != 100 for record in other)
    named = [*(record["uid"] for record in other[:NAMED]), *(["…"] if len(other) > NAMED else [])]
    which = f": {', '.join(named)}" if named else ""
    yield (
        f"math-verify {given[judged[0]['uid']]['version']} differs on {len(other)} of {len(judged)} "
        f"({by_it} right only by it, {len(other) - by_it} only by the score{which}), "
        f"{verdicts.count('timeout')} timeouts, {verdicts.count('error')} errors"
    )


def grade_all(results: Path, seconds: float) -> None:
    """Judge the answers of every run of a results folder and print the notes."""
    for run in load_runs(results):
        grade(run.folder.path, seconds)
        named = (run.hash, run.settings["task.name"], run.settings["method.name"], run.budget_name)
        for note in describe_verdicts(" ".join(map(str, named)), run.folder.path):
            print(note)
