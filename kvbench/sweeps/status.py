"""A sweep before it runs and while it runs: its cells, what of them is done, and how long the rest will take.

`cells.json` in the sweep's folder has its cells: what they are, the hashes of their run and its baseline, and what
those that read prompts together have in common.
All else is read from the runs' folders and from `refused` and `failed`, which a cell leaves in its own.
"""

import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.atomic import replace_file
from kvbench.store.audit import comparison_key
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import RunRecords, find_runs
from kvbench.validation import SettingError

TIMED_RECORDS = 50  # records of a run that its time is taken from
CELLS = "cells.json"
STATES = ("done", "running", "stopped", "failed", "refused", "missing")


@dataclass(frozen=True)
class SweepCell:
    """One cell: what it does not share with the others, and the values of its run and of its full cache."""

    label: str
    run: Mapping[str, Any] | None = None
    baseline: Mapping[str, Any] | None = None
    refused: str | None = None
    overrides: Sequence[str] = ()  # all of them
    readings: Sequence[str | None] = ()  # `Run.reading` of its run and of its full cache, where they may be shared

    @property
    def names(self) -> list[str]:
        """The hashes of both."""
        return [run_hash(value) for value in (self.run, self.baseline) if value is not None]


@dataclass(frozen=True)
class RunState:
    """How far a run is; `total`: samples, None where nobody has drawn them yet."""

    name: str  # of STATES
    records: int = 0
    total: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        count = f" {self.records} of {self.total or '?'} samples" if self.name in ("running", "stopped") else ""
        return self.name + count + (f": {self.reason}" if self.reason else "")


def count_records(path: Path) -> tuple[int, int]:
    """Whole records of a run, and how many of them say that the sample failed."""
    errors = [record.get("error") is not None for record in RunRecords(path)]
    return len(errors), sum(errors)


@dataclass(frozen=True)
class RecordCounter:
    """`count_records` for who looks again and again: read only where the files have changed."""

    known: dict[Path, tuple[list, tuple[int, int]]] = field(default_factory=dict)

    def __call__(self, path: Path) -> tuple[int, int]:
        files = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.glob("records*.jsonl")]
        if path not in self.known or self.known[path][0] != files:
            self.known[path] = files, count_records(path)
        return self.known[path][1]


def read_state(results: Path, name: str, counts: Callable[[Path], tuple[int, int]] = count_records) -> RunState:
    """How far the run of this hash is."""
    path = results / "runs" / name
    if not (path / "run.yaml").is_file():
        return RunState("missing")
    (count, errors), total = counts(path), read_total(path)
    reason = f"{errors} samples failed" if errors else ""
    if (path / "done").is_file():
        return RunState("done", count, total, reason)
    return RunState("running" if is_busy(path / "claims.lock") else "stopped", count, total, reason)


def read_cell_state(
    results: Path, names: Sequence[str], counts: Callable[[Path], tuple[int, int]] = count_records
) -> RunState:
    """How far a cell is, of these hashes its run's and its full cache's: the run, or the full cache where that is what
    it waits for.
    """
    state, *baseline = (read_state(results, name, counts) for name in names)
    for full in baseline:
        if (state.name == "done" and full.name != "done") or (state.name == "missing" and full.name == "running"):
            return full
    return state


def read_total(path: Path) -> int | None:
    """How many samples a run has, as its first writer knew."""
    try:
        return int((path / "samples").read_text())
    except (OSError, ValueError):
        return None


def is_busy(locks: Path) -> bool:
    """Whether any process has the run open; only looks."""
    try:
        descriptor = os.open(locks, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock: from 0 to the end
        return struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def write_cells(folder: Path, cells: Sequence[SweepCell]) -> None:
    """cells.json, for whoever asks for the sweep's state."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "cell": cell.label, "refused": cell.refused, "overrides": list(cell.overrides),
            "readings": list(cell.readings), "value": cell.run, "runs": cell.names,
        }
        for cell in cells
    ]  # fmt: skip
    with replace_file(folder / CELLS) as draft:
        draft.write_text(json.dumps(lines, indent=1) + "\n")


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """What `write_cells` wrote."""
    try:
        return json.loads((folder / CELLS).read_text())
    except (OSError, ValueError):
        raise SettingError(f"sweep={folder}: no cells.json there") from None


def read_states(
    results: Path, folder: Path, counts: Callable[[Path], tuple[int, int]] = count_records
) -> Iterator[tuple[str, RunState]]:
    """Every cell of a sweep (its overrides as one text) and how far it is."""
    for index, cell in enumerate(read_cells(folder)):
        label = cell["cell"]
        if cell["refused"]:
            yield label, RunState("refused", reason=cell["refused"])
            continue
        state = read_cell_state(results, cell["runs"], counts)
        for name in ("failed", "refused"):
            reason = folder / str(index) / name
            if state.name in ("stopped", "missing") and reason.is_file():
                state = RunState(name, state.records, state.total, reason.read_text(encoding="utf-8").strip())
        yield label, state


def list_sweeps(results: Path) -> list[Path]:
    """The folders of all sweeps, the newest first."""
    return sorted((path.parent for path in (results / "sweeps").glob(f"*/{CELLS}")), reverse=True)


def find_newest(results: Path) -> Path:
    """The folder of the last sweep; SettingError if there is none."""
    if found := list_sweeps(results):
        return found[0]
    raise SettingError(f"results={results}: no sweep was begun there")


def describe_plan(results: Path, cells: Sequence[SweepCell]) -> str:
    """What a sweep is about to do, as text."""
    states = [
        RunState("refused", reason=cell.refused or "") if cell.run is None else read_cell_state(results, cell.names)
        for cell in cells
    ]
    spent = estimate_left(
        SampleTimes(results), [(cell.run, cell.readings, own) for cell, own in zip(cells, states, strict=True)]
    )
    lines = [
        f"  {cell.label:<60} {state}" + (f", about {own / 60:.1f} min" if own else "")
        for cell, state, own in zip(cells, states, spent, strict=True)
    ]
    said = count_states(states)
    total, unknown = sum(own or 0.0 for own in spent), spent.count(None)
    hours = f"about {total / 3600:.2f} hours are left on one worker" if total else ""
    if unknown:
        hours += f"{'; ' if hours else ''}{unknown} cells have no measured time to go by"
    return "\n".join([f"{len(cells)} cells: {said}" + (f"; {hours}" if hours else ""), *lines])


def count_states(states: Sequence[RunState]) -> str:
    """ "3 done, 1 refused"."""
    return ", ".join(f"{count} {name}" for name in STATES if (count := sum(own.name == name for own in states)))


def estimate_left(
    times: "SampleTimes", cells: Iterable[tuple[Mapping[str, Any] | None, Sequence[str | None], RunState]]
) -> list[float | None]:
    """Seconds that each cell (its run's value, its readings, its state) takes until it is done, on one worker: 0 where
    nothing is left to do, None where nothing is known. What a cell before reads is read for all.
    """
    found: list[float | None] = []
    begun: set[str] = set()
    for value, readings, state in cells:
        own = {name for name in readings[:1] if name is not None}
        if state.name in ("done", "failed", "refused"):
            found.append(0.0)
            continue
        found.append(None if value is None else times.estimate_left(value, state, prefilled=bool(begun & own)))
        begun |= own
    return found


class SampleTimes:
    """Seconds a sample, as records of the store say."""

    def __init__(self, results: Path) -> None:
        self.seconds: dict[tuple[str, ...], list[tuple[float, float]]] = {}  # of a sample, and without its prefill
        self.samples: dict[str, int] = {}  # protocol -> samples
        for run in find_runs(results).runs:  # what is damaged is told by those who show its numbers
            try:
                alike, same = list_timing_keys(run.value), comparison_key(run.value)
                known = [
                    (record["seconds"], max(0.0, record["seconds"] - record.get("prefill_ms", 0.0) / 1000))
                    for record in islice(RunRecords(run.folder.path), TIMED_RECORDS)
                    if record.get("seconds") is not None
                ]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            for key in alike:
                self.seconds.setdefault(key, []).extend(known)
            if (total := read_total(run.folder.path)) is not None:
                self.samples[same] = total

    def estimate_left(self, value: Mapping[str, Any], state: RunState, prefilled: bool) -> float | None:
        """Seconds that a run still takes, by runs of its method, else by others; None if nothing is known.
        `prefilled`: another run's prefill serves it.
        """
        total = state.total or self.samples.get(comparison_key(value))
        known = next((self.seconds[key] for key in list_timing_keys(value) if self.seconds.get(key)), None)
        if total is None or known is None:
            return None
        return median(times[prefilled] for times in known) * (total - state.records)


def list_timing_keys(value: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Runs that take about as long as that of `value`, the nearest first."""
    task = {key: item for key, item in value["task"].items() if key not in ("limit", "samples", "seed", "subtasks")}
    about = (value["model"]["name"], json.dumps(task, sort_keys=True), value["device"]["type"])
    method = value["method"]["name"]
    return (*about, method, str(value["block_size"]), str(value["budget"])), (*about, method), about


def print_states(results: Path, folder: Path, with_done: bool = True) -> None:
    """Print how far the cells of the sweep in `folder` are.

    Args:
        results: The folder of results.
        folder: The sweep's folder.
        with_done: Print a line for cells that are done too.
    """
    found = list(read_states(results, folder))
    print(folder)
    for label, state in found:
        if with_done or str(state) != "done":
            print(f"  {label:<60} {state}")
    print(count_states([own for _, own in found]))
