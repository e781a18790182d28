"""What Weights & Biases is told about a run, from the store's records, and the process that tells it.

    python -m kvbench.integrations.wandb_process

It reads a request as JSON on stdin, and writes a line as JSON on stdout for each of the request's runs.

Config is the run's value, W&B's id its hash. Everything else is summary: a summary is written over where a history
would grow, so that a run that is logged twice is one run and says what the store said last.

    state, failure, samples, failed_samples      finished, failed (with its reason) or unfinished
    <quantity>/<row>                             of every row of the closing table, subtasks and averages:
                                                 score, full, diff with their intervals (/low, /high), costs
    resident_bytes, full_bytes, peak_bytes       means over answered samples, the most of any
    closing_table, failures                      tables; `notes` and `text` are the first one's, for people
"""

import csv
import fcntl
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.closing_table import build_run_table
from kvbench.analysis.closing_table_format import COST_NAMES, ClosingTable, TableRow
from kvbench.store.run_folder import RunFolder, run_hash
from kvbench.validation import escape

MARK = "wandb.jsonl"  # in the run's folder: what was logged, and whither
MOST = 1000  # failures in the table; all are counted
FAILURE = ["uid", "subtask", "reason"]
REASON = "failed"  # in the run's folder: why it stopped when it last did, for those who log it later


@dataclass(frozen=True)
class LoggedRun:
    """A run to be logged, by its value and that of the full cache's run beside it (None: it is that itself)."""

    results: Path
    value: Mapping[str, Any]
    baseline: Mapping[str, Any] | None = None
    failure: str | None = None  # why it stopped just now

    @cached_property
    def folder(self) -> RunFolder:
        """What the store has of it."""
        return RunFolder(self.results / "runs", self.value)

    @cached_property
    def state(self) -> dict[str, Any]:
        """How far the run is, at the first look: what decides whether there is anything new to say of it."""
        folder = self.folder
        finished = folder.finished
        reason = None if finished else self.failure or read_reason(folder.path)
        state = "finished" if finished else "failed" if reason else "unfinished"
        full = None if self.baseline is None else run_hash(self.baseline)
        return {"state": state, "failure": reason, "samples": len(folder.records()), "baseline": full}

    def is_logged(self, where: str) -> bool:
        """Whether just this has been logged there already."""
        last = None
        with suppress(OSError):
            for line in (self.folder.path / MARK).read_text().splitlines():
                with suppress(ValueError):  # torn by one that was killed
                    mark = json.loads(line)
                    last = mark["said"] if mark["where"] == where else last
        return last == self.state

    def mark_logged(self, where: str) -> None:
        """Keep that it has been logged there."""
        if self.folder.path.is_dir():
            with open(self.folder.path / MARK, "a", encoding="ascii") as file:
                file.write(json.dumps({"where": where, "said": self.state}) + "\n")

    def table(self) -> ClosingTable | None:
        """The closing table, None before the first record."""
        records = self.folder.records()
        if not records:
            return None
        full = records if self.baseline is None else RunFolder(self.results / "runs", self.baseline).records()
        return build_run_table(self.value, full, None if self.baseline is None else records)

    def summary(self) -> dict[str, Any]:
        """Everything but the config, plainly: a table is {"columns": […], "rows": [[…]]}."""
        records = self.folder.records()
        failures = [(own["uid"], own["subtask"], why) for own in records.values() if (why := find_failure(own))]
        answered = [own for own in records.values() if own["error"] is None]
        said = self.state | {"failed_samples": len(failures)}
        for name in ("resident_bytes", "full_bytes"):
            held = [own[name] for own in answered if own.get(name) is not None]
            said[name] = sum(held) / len(held) if held else None
        said["peak_bytes"] = max((own["peak_bytes"] for own in answered if own.get("peak_bytes")), default=None)
        said["failures"] = {"columns": FAILURE, "rows": [list(map(escape, own)) for own in failures[:MOST]]}
        table = self.table()
        if table is not None:
            for row in (*table.rows, *table.also):
                said |= summarize_row(row, table.paired)
            columns, *rows = csv.reader(io.StringIO(table.to_csv()))
            said["closing_table"] = {"columns": columns, "rows": [list(map(parse_cell, row)) for row in rows]}
            said |= {"text": table.to_text(120), "notes": " ".join(table.notes)}
        return said


def summarize_row(row: TableRow, paired: bool) -> dict[str, float | None]:
    """Scores and differences of a row with their intervals, and costs: `score/vt`, `score/vt/low`, …"""
    score = row.method if paired else row.full
    found = {"score": (score, "value"), "n": (row.interval, "samples")}
    if paired:
        found |= {"full": (row.full, "value"), "diff": (row.interval, "difference")}
    name = escape(row.subtask)
    said = {f"{key}/{name}": getattr(of, number, None) for key, (of, number) in found.items()}
    for key in found.keys() - {"n"}:
        said |= {f"{key}/{name}/{edge}": getattr(found[key][0], edge, None) for edge in ("low", "high")}
    if row.kind != "also":
        said |= {f"{cost}/{name}": getattr(row, cost) for cost in COST_NAMES if paired or not cost.endswith("_full")}
    return said


def parse_cell(text: str) -> float | str | None:
    """A number of a CSV line, or its text; None for an empty one."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


def read_reason(path: Path) -> str | None:
    """Why the run of this folder stopped, if that is known."""
    try:
        return (path / REASON).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """One process at a time logs a run; the next finds it logged."""
    if not path.is_dir():
        yield  # it failed before its first record
        return
    with open(path / MARK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def log_run(subject: LoggedRun, settings: Mapping[str, Any]) -> None:
    """Log one run. Whatever W&B raises is raised."""
    import wandb

    value, said = subject.value, subject.summary()
    kept = Path(settings["dir"])
    kept.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        mode=settings["mode"],
        project=settings["project"],
        entity=settings["entity"],
        group=settings["group"],
        tags=settings["tags"],
        dir=str(kept),
        id=subject.folder.hash,
        name=f"{value['model']['name']} {value['task']['name']} {value['method']['name']} {value['budget']}",
        job_type=value["method"]["name"],
        config=dict(value),
        resume="allow",
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, init_timeout=settings["seconds"],
            x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
        ),
    )  # fmt: skip
    tables = {name: own for name, own in said.items() if isinstance(own, dict)}
    run.summary.update({name: own for name, own in said.items() if name not in tables})
    for name, own in tables.items():
        run.summary[name] = wandb.Table(columns=own["columns"], data=own["rows"], allow_mixed_types=True)
    run.finish(exit_code=int(said["state"] == "failed"))


def main() -> int:
    """Log the runs of a request, one line of answer for each: {"error": null or what went wrong}."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # the descriptor is not inherited: what W&B starts cannot hold it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    request = json.load(sys.stdin)
    for own in request["subjects"]:
        error = None
        try:
            subject = LoggedRun(Path(request["results"]), **own)
            with hold_lock(subject.folder.path):
                if request["again"] or not subject.is_logged(request["where"]):
                    log_run(subject, request["settings"])
                    subject.mark_logged(request["where"])
        except (Exception, SystemExit) as found:
            error = f"{type(found).__name__}: {found}"
        print(json.dumps({"error": error}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
