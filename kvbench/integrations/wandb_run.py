"""What kvbench tells Weights & Biases about a run: everything comes from the store's records.

W&B's config is the run's value, and its id is the run's hash. Everything else is summary. kvbench writes no history,
because a history grows each time: a run that is logged twice is one run and says what the store said last.

    state, failure, samples, failed_samples      finished, failed (with the reason) or unfinished
    <quantity>/<row>                             for every row of the closing table, subtasks and averages: score, full,
                                                 diff with their intervals (/low, /high), and costs
    resident_bytes, full_bytes, peak_bytes       means over the answered samples; the peak is their maximum
    closing_table, failures                      tables; `notes` and `text` are the closing table's, for people
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.closing_table import build_run_table
from kvbench.analysis.closing_table_format import COST_NAMES, ClosingTable, TableRow
from kvbench.atomic import lock_file
from kvbench.store.run_folder import RunFolder, run_hash
from kvbench.store.runs import name_budget
from kvbench.validation import escape

MARK = "wandb.jsonl"  # file in the run's folder: what was logged, and where
MOST = 1000  # failures that the table lists; all of them are counted
FAILURE = ["uid", "subtask", "reason"]
REASON = "failed"  # file in the run's folder: why the run stopped the last time, for a process that logs it later


@dataclass(frozen=True)
class LoggedRun:
    """A run to be logged.

    Attributes:
        results: The results folder.
        value: The run's value (`RunSpec.value`).
        baseline: The value of the full cache's run beside it. ``None``: this is the full cache's run.
        failure: Why the run has just stopped, if it has.
    """

    results: Path
    value: Mapping[str, Any]
    baseline: Mapping[str, Any] | None = None
    failure: str | None = None

    @cached_property
    def folder(self) -> RunFolder:
        """The run's folder in the store."""
        return RunFolder(self.results / "runs", self.value)

    @cached_property
    def state(self) -> dict[str, Any]:
        """How far the run is when this is first read. A run is logged again only if its state has changed."""
        folder = self.folder
        finished = folder.finished
        reason = None if finished else self.failure or read_reason(folder.path)
        state = "finished" if finished else "failed" if reason else "unfinished"
        full = None if self.baseline is None else run_hash(self.baseline)
        return {"state": state, "failure": reason, "samples": len(folder.records()), "baseline": full}

    def is_logged(self, where: str) -> bool:
        """Whether this state is the last one that was logged there."""
        last = None
        with suppress(OSError):
            for line in (self.folder.path / MARK).read_text().splitlines():
                with suppress(ValueError):  # a torn line of a process that was killed
                    mark = json.loads(line)
                    last = mark["said"] if mark["where"] == where else last
        return last == self.state

    def mark_logged(self, where: str) -> None:
        """Note in the run's folder that this state was logged there."""
        if self.folder.path.is_dir():
            with open(self.folder.path / MARK, "a", encoding="ascii") as file:
                file.write(json.dumps({"where": where, "said": self.state}) + "\n")

    def table(self) -> ClosingTable | None:
        """Build the closing table; None before the first record."""
        records = self.folder.records()
        if not records:
            return None
        full = records if self.baseline is None else RunFolder(self.results / "runs", self.baseline).records()
        return build_run_table(self.value, full, None if self.baseline is None else records)

    def summary(self) -> dict[str, Any]:
        """Return everything but the config as plain values; a table is ``{"columns": […], "rows": [[…]]}``."""
        records = self.folder.records()
        failures = [
            (record["uid"], record["subtask"], why) for record in records.values() if (why := find_failure(record))
        ]
        answered = [record for record in records.values() if record["error"] is None]
        said = self.state | {"failed_samples": len(failures)}
        for name in ("resident_bytes", "full_bytes"):
            held = [record[name] for record in answered if record.get(name) is not None]
            said[name] = sum(held) / len(held) if held else None
        said["peak_bytes"] = max(
            (record["peak_bytes"] for record in answered if record.get("peak_bytes")), default=None
        )
        said["failures"] = {"columns": FAILURE, "rows": [list(map(escape, failure)) for failure in failures[:MOST]]}
        table = self.table()
        if table is not None:
            for row in (*table.rows, *table.also):
                said |= summarize_row(row, table.paired)
            columns, *rows = csv.reader(io.StringIO(table.to_csv()))
            said["closing_table"] = {"columns": columns, "rows": [list(map(parse_cell, row)) for row in rows]}
            said |= {"text": table.to_text(120), "notes": " ".join(table.notes)}
        return said


def summarize_row(row: TableRow, paired: bool) -> dict[str, float | None]:
    """Name a row's scores and differences with their intervals, and its costs: `score/vt`, `score/vt/low`, …"""
    score = row.method if paired else row.full
    sources = {"score": (score, "value"), "n": (row.interval, "samples")}
    if paired:
        sources |= {"full": (row.full, "value"), "diff": (row.interval, "difference")}
    name = escape(row.subtask)
    said = {f"{key}/{name}": getattr(of, number, None) for key, (of, number) in sources.items()}
    for key in sources.keys() - {"n"}:
        said |= {f"{key}/{name}/{edge}": getattr(sources[key][0], edge, None) for edge in ("low", "high")}
    if row.kind != "also":
        said |= {f"{cost}/{name}": getattr(row, cost) for cost in COST_NAMES if paired or not cost.endswith("_full")}
    return said


def parse_cell(text: str) -> float | str | None:
    """Turn a cell of a CSV line into a number, or leave it as text; an empty one is None."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


def read_reason(path: Path) -> str | None:
    """Read why the run of this folder stopped, if that is known."""
    try:
        return (path / REASON).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Let one process at a time log a run; the next one finds it logged."""
    if not path.is_dir():
        yield  # the run failed before its first record
        return
    with open(path / MARK, "a") as file:
        lock_file(file)
        yield


def send_run(subject: LoggedRun, settings: Mapping[str, Any]) -> None:
    """Send one run to W&B. Whatever W&B raises is raised.

    Args:
        subject: The run.
        settings: conf/logger/wandb.yaml's, with a folder as ``dir``.
    """
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
        name=f"{value['model']['name']} {value['task']['name']} {value['method']['name']} {name_budget(value)}",
        job_type=value["method"]["name"],
        config=dict(value),
        resume="allow",
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            init_timeout=settings["seconds"],
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    tables = {name: table for name, table in said.items() if isinstance(table, dict)}
    run.summary.update({name: entry for name, entry in said.items() if name not in tables})
    for name, table in tables.items():
        run.summary[name] = wandb.Table(columns=table["columns"], data=table["rows"], allow_mixed_types=True)
    run.finish(exit_code=int(said["state"] == "failed"))
