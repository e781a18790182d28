"""Run cells: make the records of a cell and of its full cache, and print their closing table.

This module imports torch, so `kvbench.cli.run` imports it once it is clear that something must be run.
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from kvbench.cli.command import find_width
from kvbench.config.compose import Composition
from kvbench.efficiency import measure
from kvbench.engine.spending import spend
from kvbench.integrations.loggers import Logger
from kvbench.runs.executor import Executor
from kvbench.runs.spec import RunSpec
from kvbench.runs.workers import count_workers
from kvbench.stops import check_stop
from kvbench.store.run_folder import run_hash
from kvbench.sweeps.plan import PlannedCell, Sweep, sharing_groups
from kvbench.sweeps.status import read_state
from kvbench.validation import ContractError, SettingError, describe_write_error


def run_cells(sweep: Sweep, verbose: bool, executor: Executor | None = None) -> None:
    """Run the cells of a sweep one after the other, and print a line or a table for each (`run_sweep`)."""
    cells = [
        (planned.cell.names, planned.cell.readings, lambda planned=planned: planned.run)
        for planned in sweep.cells
        if planned.run
    ]
    many = len(sweep.cells)
    with Executor(sweep.results) if executor is None else nullcontext(executor) as executor:
        for number, planned in enumerate(sweep.cells):
            groups = (
                sharing_groups(cells, [planned.run.baseline(), planned.run], sweep.results)
                if planned.run and sweep.counted
                else []
            )
            heading = None if verbose or many == 1 else f"[{number + 1} of {many}] {planned.cell.label}"
            run_sweep_cell(sweep.folder / str(number), planned, sweep.launcher, executor, groups, heading)


def run_sweep_cell(
    folder: Path,
    planned: PlannedCell,
    launcher: str,
    executor: Executor,
    groups: Sequence[Sequence[RunSpec]],
    heading: str | None = None,
) -> None:
    """Run a cell of a sweep. If it is refused or fails, its folder says why, and the sweep continues.

    Args:
        folder: The cell's folder.
        planned: The cell.
        launcher: How the sweep is launched.
        executor: Makes its records.
        groups: Runs of the sweep that read prompts together with this cell's.
        heading: Begins the one line about the cell; None prints its table.
    """
    check_stop()
    write_reason(folder, "failed", None)
    write_reason(folder, "refused", None)
    reason: dict[str, str] = {}
    try:
        if planned.run is None:
            raise SettingError(planned.cell.refused)
        planned.run.check()  # the plan does not check a run whose records are complete
        execute_cell(planned.run, planned.composition, planned.log, executor, groups, heading)
    except (SettingError, ContractError) as error:
        print_refusal(f"{' '.join(planned.cell.overrides)}: {error}")
        reason["failed" if isinstance(error, ContractError) else "refused"] = str(error)
    except Exception as error:
        line = describe_write_error(error) if isinstance(error, OSError) else None
        if line is None or launcher == "slurm":  # without SLURM the next cell writes to the same disk
            reason["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        for name, text in reason.items():
            write_reason(folder, name, text)


def execute_cell(
    run: RunSpec,
    composition: Composition,
    log: Logger | None,
    executor: Executor,
    groups: Sequence[Sequence[RunSpec]] = (),
    heading: str | None = None,
) -> None:
    """Make the records of a run and of the full cache on the same samples, where they are not in the store yet, and
    print the table of both, or its first average in one line.

    Args:
        run: The run.
        composition: The settings that it was made of.
        log: The logger, or None.
        executor: Makes the records.
        groups: Runs of the sweep that read prompts together with these.
        heading: Begins the line; None prints the table.
    """
    results = Path(composition.config.results)
    if run.measures:
        executor.close()  # processes that earlier cells left would use the GPU too
        print(measure.summarize_lines(*measure.measure_once(run, results)))
        return
    base = run.baseline()
    runs = [base] if run.value == base.value else [base, run]
    try:
        workers = count_workers(composition.workers, run.device)
        records = executor.execute(runs, groups, workers)
        with spend("tables"):
            print_table(runs, records, results, heading)
        if log is not None:
            log.finished(runs)
    except SettingError:
        raise
    except Exception as error:
        if log is not None:
            log.failed(runs, error)
        raise


def print_table(
    runs: Sequence[RunSpec], records: Sequence[Mapping[str, Any]], results: Path, heading: str | None = None
) -> None:
    """Print the closing table of a run, whose full cache's run stands before it, or its first average in one line.
    Answers are graded where the task leaves that to math-verify.
    """
    from kvbench.analysis.closing_table import build_run_table
    from kvbench.integrations import math_verify

    width = find_width()
    full, *method = records
    table = build_run_table(runs[-1].value, full, method[0] if method else None)
    print(table.to_text(width) if heading is None else f"{heading}: {table.describe_average()}", flush=True)
    for run, run_records in zip(runs, records, strict=True):
        if not any(record["meta"].get("verify") for record in run_records.values()):
            continue
        folder = results / "runs" / run_hash(run.value)
        try:
            math_verify.grade(folder)
        except SettingError as error:  # the answers are in the store and can be graded later
            print_refusal(f"{error}, then python -m kvbench results grade --results {results}")
        if heading is None:
            for note in math_verify.describe_verdicts(run.groups["method"]["name"], folder):
                print("\n".join(textwrap.wrap(note, width, subsequent_indent="  ")))


def write_reason(folder: Path, name: str, reason: str | None) -> None:
    """Write why a cell of a sweep has no records into its folder, if the disk takes it; None removes the file."""
    with suppress(OSError):
        if reason is None:
            (folder / name).unlink(missing_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{reason}\n", encoding="utf-8", errors="backslashreplace")


def describe_progress(run: RunSpec, results: Path) -> str:
    """Return how many samples of a run and its full cache are done, and that the same command does the others."""
    values = {run_hash(needed.value): needed for needed in (run.baseline(), run)} if not run.measures else {}
    states = [read_state(results, name) for name in values]
    total = next((state.total for state in states if state.total), None)
    where = f" at {sum(state.records for state in states)} of {total * len(states)}" if total else ""
    return f"{where}; the same command goes on"


def print_refusal(line: str) -> None:
    """Print one line about what cannot be used."""
    print(f"kvbench: {line}", file=sys.stderr)
