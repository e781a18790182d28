"""Show a sweep before and while it runs: its cells, their states, and how long the rest will take.

`cells.json` in the sweep's folder lists the cells: their overrides, the hashes of their runs and baselines, and the
readings that runs can share. Everything else is read from the folders of the runs, and from the files `refused` and
`failed` that a cell without records leaves in its own folder.
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
from kvbench.store.run_folder import read_total, run_hash
from kvbench.store.runs import RunRecords, count_things, find_runs, name_budget
from kvbench.validation import SettingError

TIMED_RECORDS = 50  # records of a run from which the time of a sample is estimated
CELLS = "cells.json"
STATES = ("done", "running", "stopped", "failed", "refused", "missing")


@dataclass(frozen=True)
class SweepCell:
    """One cell of a sweep.

    Attributes:
        label: The overrides in which it differs from other cells.
        run: The value of its run. None if the cell is refused.
        baseline: The value of its full cache's run, None likewise.
        refused: Why it is refused, or None.
        overrides: All overrides of the cell.
        readings: `RunSpec.reading` of its run and of its full cache, if they may share prompts with other runs.
    """

    label: str
    run: Mapping[str, Any] | None = None
    baseline: Mapping[str, Any] | None = None
    refused: str | None = None
    overrides: Sequence[str] = ()
    readings: Sequence[str | None] = ()

    @property
    def names(self) -> list[str]:
        """The hashes of its run and of its full cache. Empty if the cell is refused."""
        return [run_hash(value) for value in (self.run, self.baseline) if value is not None]


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        name: One of STATES.
        records: Number of records.
        total: Number of samples, None if nobody has drawn them yet.
        reason: Why it is refused or failed.
    """

    name: str
    records: int = 0
    total: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        count = f" {self.records} of {self.total or '?'} samples" if self.name in ("running", "stopped") else ""
        return self.name + count + (f": {self.reason}" if self.reason else "")


def count_records(path: Path) -> tuple[int, int, str]:
    """Return the number of whole records of a run, of those whose sample failed, and what is damaged, or ""."""
    records = RunRecords(path)
    errors = [record.get("error") is not None for record in records]
    return len(errors), sum(errors), "; ".join(records.damage)


@dataclass(frozen=True)
class RecordCounter:
    """`count_records` for callers that ask again and again. It reads only files that have changed."""

    known: dict[Path, tuple[list, tuple[int, int, str]]] = field(default_factory=dict)

    def __call__(self, path: Path) -> tuple[int, int, str]:
        files = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.glob("records*.jsonl")]
        if path not in self.known or self.known[path][0] != files:
            self.known[path] = files, count_records(path)
        return self.known[path][1]


def read_state(results: Path, name: str, counts: Callable[[Path], tuple[int, int, str]] = count_records) -> RunState:
    """Return the state of the run with this hash. A run is done if `done` fits it, and failed if it is damaged."""
    path = results / "runs" / name
    if not (path / "run.yaml").is_file():
        return RunState("missing")
    (count, errors, damage), total = counts(path), read_total(path)
    if damage:
        return RunState("failed", count, total, f"damaged: {damage}")
    reason = f"{count_things(errors, 'sample')} failed" if errors else ""
    if (path / "done").exists():
        return RunState("done", count, total, reason)
    return RunState("running" if is_busy(path / "claims.lock") else "stopped", count, total, reason)


def read_cell_state(
    results: Path, names: Sequence[str], counts: Callable[[Path], tuple[int, int, str]] = count_records
) -> RunState:
    """Return the state of a cell: that of its run, or that of its full cache if the cell waits for it.

    Args:
        results: The folder of results.
        names: The hashes of the run and of its full cache.
        counts: How records are counted.
    """
    state, *baseline = (read_state(results, name, counts) for name in names)
    for full in baseline:
        if (state.name == "done" and full.name != "done") or (state.name == "missing" and full.name == "running"):
            return full
    return state


def is_busy(locks: Path) -> bool:
    """Return whether any process has the run open. This takes no lock. False where the file system does not say."""
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock: from 0 to the end
    try:
        with locks.open("rb", buffering=0) as file:
            return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
    except OSError:
        return False


def make_sweep_folder(folder: Path) -> Path:
    """Create a folder and return it. If another sweep began in the same second and has it, the name gets -2, -3, …"""
    made, number = folder, 1
    while True:
        try:
            made.mkdir(parents=True)
            return made
        except FileExistsError:
            number += 1
            made = folder.with_name(f"{folder.name}-{number}")


def write_cells(folder: Path, cells: Sequence[SweepCell]) -> None:
    """Write cells.json, from which `kvbench status` and the dashboard read the sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "cell": cell.label,
            "refused": cell.refused,
            "overrides": list(cell.overrides),
            "readings": list(cell.readings),
            "value": cell.run,
            "runs": cell.names,
        }
        for cell in cells
    ]
    with replace_file(folder / CELLS) as draft:
        draft.write_text(json.dumps(lines, indent=1) + "\n")


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """Read the cells that `write_cells` wrote.

    Raises:
        SettingError: There is no cells.json, or it is not JSON.
        OSError: The disk does not give it.
    """
    try:
        return json.loads((folder / CELLS).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise SettingError(f"sweep={folder}: no cells.json there") from None


def read_states(
    results: Path, folder: Path, counts: Callable[[Path], tuple[int, int, str]] = count_records
) -> Iterator[tuple[str, RunState]]:
    """Yield the label and the state of every cell of a sweep."""
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


def count_answers(results: Path, folder: Path) -> int:
    """Return the number of records of a sweep's runs. Those of a full cache that several cells share count once."""
    names = {name for cell in read_cells(folder) if not cell["refused"] for name in cell["runs"]}
    return sum(read_state(results, name).records for name in names)


def list_sweeps(results: Path) -> list[Path]:
    """Return the folders of all sweeps, the newest first."""
    return sorted((path.parent for path in (results / "sweeps").glob(f"*/{CELLS}")), reverse=True)


def find_newest(results: Path) -> Path:
    """Return the folder of the last sweep.

    Raises:
        SettingError: There is no sweep.
    """
    if sweeps := list_sweeps(results):
        return sweeps[0]
    raise SettingError(f"results={results}: no sweep was begun there")


def read_planned_states(results: Path, cells: Sequence[SweepCell]) -> list[RunState]:
    """Return the state of each cell of a sweep that is about to begin."""
    counts = RecordCounter()  # cells share a full cache
    return [
        RunState("refused", reason=cell.refused or "")
        if cell.run is None
        else read_cell_state(results, cell.names, counts)
        for cell in cells
    ]


def describe_plan(results: Path, cells: Sequence[SweepCell], states: Sequence[RunState]) -> str:
    """Return a text that lists the cells with their states and estimates the remaining time."""
    times = SampleTimes(results)
    spent = estimate_left(times, [(cell.run, cell.readings, state) for cell, state in zip(cells, states, strict=True)])
    lines = [
        f"  {cell.label:<60} {state}" + (f", about {seconds / 60:.1f} min" if seconds else "")
        for cell, state, seconds in zip(cells, states, spent, strict=True)
    ]
    if full := estimate_baselines(results, times, cells, states):
        spent += full
        known = sum(seconds or 0.0 for seconds in full)
        named = f"full cache, which these are compared with ({len(full)})"
        lines.append(f"  {named:<60} to do" + (f", about {known / 60:.1f} min" if known else ""))
    said = count_states(states)
    total, unknown = sum(seconds or 0.0 for seconds in spent), spent.count(None)
    hours = f"about {total / 3600:.2f} hours are left on one worker" if total else ""
    if unknown:
        hours += f"{'; ' if hours else ''}{unknown} runs have no measured time to go by"
    return "\n".join([f"{len(cells)} cells: {said}" + (f"; {hours}" if hours else ""), *lines])


def count_states(states: Sequence[RunState]) -> str:
    """Return the number of cells in each state, such as "3 done, 1 refused"."""
    return ", ".join(f"{count} {name}" for name in STATES if (count := sum(state.name == name for state in states)))


def estimate_left(
    times: "SampleTimes", cells: Iterable[tuple[Mapping[str, Any] | None, Sequence[str | None], RunState]]
) -> list[float | None]:
    """Estimate the seconds that each cell takes until it is done, on one worker.

    Args:
        times: The seconds of samples in the store.
        cells: For each cell the value of its run, its readings and its state. A reading is counted once, for the first
            cell that has it.

    Returns:
        Seconds for each cell: 0 if nothing is left to do, None if nothing is known.
    """
    estimates: list[float | None] = []
    begun: set[str] = set()
    for value, readings, state in cells:
        reading = {name for name in readings[:1] if name is not None}
        if state.name in ("done", "failed", "refused"):
            estimates.append(0.0)
            continue
        estimates.append(None if value is None else times.estimate_left(value, state, prefilled=bool(begun & reading)))
        begun |= reading
    return estimates


def estimate_baselines(
    results: Path, times: "SampleTimes", cells: Sequence[SweepCell], states: Sequence[RunState]
) -> list[float | None]:
    """Estimate the seconds of the full-cache runs that the cells need, and that neither are cells nor are done.

    Returns:
        Seconds for each of these runs, None if nothing is known.
    """
    needed = {
        cell.names[1]: cell
        for cell, state in zip(cells, states, strict=True)
        if cell.baseline is not None and state.name not in ("done", "failed")
    }
    for cell in cells:
        needed.pop(cell.names[0] if cell.names else "", None)
    estimates = []
    for name, cell in needed.items():
        state = read_state(results, name)
        if state.name != "done":
            assert cell.baseline is not None  # these cells were chosen above
            shared = bool(cell.readings) and cell.readings[0] is not None and cell.readings[0] == cell.readings[-1]
            estimates.append(times.estimate_left(cell.baseline, state, prefilled=shared))
    return estimates


class SampleTimes:
    """The seconds that samples took, from the records of a store that were made by one process on a GPU."""

    def __init__(self, results: Path) -> None:
        self.seconds: dict[tuple[str, ...], list[tuple[float, float]]] = {}  # with prefill, and without
        self.samples: dict[str, int] = {}  # protocol -> samples
        for run in find_runs(results).runs:  # the commands that show numbers report damaged runs
            try:
                alike, same = list_timing_keys(run.value), comparison_key(run.value)
                known = [
                    (record["seconds"], max(0.0, record["seconds"] - record.get("prefill_ms", 0.0) / 1000))
                    for record in islice(RunRecords(run.folder.path), TIMED_RECORDS)
                    if record.get("seconds") is not None and record.get("gpu_processes", 1) == 1
                ]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            for key in alike:
                self.seconds.setdefault(key, []).extend(known)
            if (total := read_total(run.folder.path)) is not None:
                self.samples[same] = total

    def estimate_left(self, value: Mapping[str, Any], state: RunState, prefilled: bool) -> float | None:
        """Estimate the seconds that a run still takes, from runs of its method if there are any, otherwise from others.

        Args:
            value: The run's value.
            state: Its state.
            prefilled: Whether it uses the prefill of another run.

        Returns:
            The seconds, or None if nothing is known.
        """
        total = state.total or self.samples.get(comparison_key(value))
        known = next((self.seconds[key] for key in list_timing_keys(value) if self.seconds.get(key)), None)
        if total is None or known is None:
            return None
        return median(times[prefilled] for times in known) * (total - state.records)


def list_timing_keys(value: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return keys of runs that take about as long as that of `value`, the most similar ones first."""
    task = {key: item for key, item in value["task"].items() if key not in ("limit", "samples", "seed", "subtasks")}
    about = (value["model"]["name"], json.dumps(task, sort_keys=True), value["device"]["type"])
    method = value["method"]["name"]
    return (*about, method, str(value["block_size"]), name_budget(value)), (*about, method), about


def print_states(results: Path, folder: Path, with_done: bool = True) -> None:
    """Print the states of the cells of a sweep.

    Args:
        results: The folder of results.
        folder: The sweep's folder.
        with_done: Print a line for cells that are done too.
    """
    states = list(read_states(results, folder))
    print(folder)
    for label, state in states:
        if with_done or str(state) != "done":
            print(f"  {label:<60} {state}")
    print(count_states([state for _, state in states]))
