"""Run one cell or a sweep: a model, a method, a budget and a benchmark.

python run.py method=dropkv budget=0.05 task=ruler
"""

import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, is_styled
from kvbench.cli.run_help import format_run_help
from kvbench.stops import check_stop
from kvbench.validation import ContractError, SettingError, describe_write_error, name_file_in_errors

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # `print_refusal` says once that the hub is out of reach


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for, by default those of the process; return the exit code.

    The code is 2, with one line on stderr, for a setting that cannot be used.
    """
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    if options.help:
        print(format_run_help())
        return 0
    from kvbench.config import catalogue, compose

    with catalogue.translate_errors():
        if options.config_dir is not None:
            compose.add_folder(Path(options.config_dir))
        if options.cfg is not None:
            print_settings(options)
            return 0
        if options.multirun:
            return run_sweep(options.overrides, options.verbose)
        return run_single(options.overrides)


def make_parser() -> CommandParser:
    parser = CommandParser("run", __doc__, help_option=False)
    parser.add_settings("overrides", "SETTING=VALUE", "settings of conf/config.yaml")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir")
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    return make_parser().parse(arguments)


def print_settings(options: Namespace) -> None:
    """Print the composed settings as YAML."""
    from omegaconf import OmegaConf

    from kvbench.config.compose import compose
    from kvbench.sweeps.plan import resolve_rows

    composed = compose(resolve_rows(options.overrides))
    parts: dict[str, Any] = {
        "job": composed.config,
        "hydra": {"hydra": composed.hydra},
        "all": {"hydra": composed.hydra} | dict(composed.config),
    }
    shown = OmegaConf.create(parts[options.cfg])
    if options.package is not None and (shown := OmegaConf.select(shown, options.package)) is None:
        raise SettingError(f"--package={options.package}: no such part of the settings")
    print(OmegaConf.to_yaml(shown, resolve=True) if OmegaConf.is_config(shown) else shown)


def run_single(overrides: Sequence[str]) -> int:
    """Run one cell and print its table; return the exit code."""
    from kvbench.config.compose import compose
    from kvbench.sweeps.plan import make_run, resolve_rows

    composition = compose(resolve_rows(overrides))
    launcher = composition.launcher
    if launcher == "slurm":
        raise SettingError("hydra/launcher=slurm: needs -m, which makes each cell a job; or hydra/launcher=local")
    run, log = make_run(composition)
    from kvbench.runs.executor import Executor

    try:
        with Executor(Path(composition.config.results)) as executor:
            execute_cell(run, composition, log, executor)
    except KeyboardInterrupt as stop:
        stop.args = (describe_progress(run, Path(composition.config.results)),)
        raise
    return 0


def run_sweep(overrides: Sequence[str], verbose: bool = False, executor: Any = None) -> int:
    """Run the cells of a sweep and print their scores; return the exit code.

    Args:
        overrides: What stands on the command line.
        verbose: Print the table of every cell too.
        executor: A `kvbench.runs.executor.Executor` that keeps its processes and what it has loaded for further sweeps.
            None makes one for this sweep.
    """
    from kvbench.engine.spending import spend, start_counting
    from kvbench.sweeps.plan import Sweep

    say_spending = start_counting()
    with spend("starting"):
        sweep = Sweep.plan(overrides, executes=True)
        sweep.announce(find_width(), is_styled())
    if sweep.finished:
        return sweep.exit_code
    try:
        with name_file_in_errors(sweep.folder):
            if sweep.launcher == "slurm":
                launch_on_slurm(sweep)
            else:
                run_here(sweep, verbose, executor)
                say_spending()
    except KeyboardInterrupt as stop:
        stop.args = (sweep.progress_note,)
        raise
    except BaseException:
        sweep.print_states()
        raise
    sweep.print_end(find_width(), is_styled())
    return sweep.exit_code


def run_here(sweep: Any, verbose: bool, executor: Any = None) -> None:
    """Run the cells of a sweep one after the other, and print a line or a table for each (`run_sweep`)."""
    from kvbench.engine.spending import spend

    with spend("starting"):
        from kvbench.runs.executor import Executor
        from kvbench.sweeps.plan import sharing_groups

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
    planned: Any,
    launcher: str,
    executor: Any,
    groups: Sequence[Sequence[Any]],
    heading: str | None = None,
) -> None:
    """Run a cell of a sweep. If it is refused or fails, its folder says why, and the sweep continues.

    Args:
        folder: The cell's folder.
        planned: A `kvbench.sweeps.plan.PlannedCell`.
        launcher: How the sweep is launched.
        executor: A `kvbench.runs.executor.Executor`.
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
        planned.run.check()  # the plan takes the records' word for a run that is done
        execute_cell(planned.run, planned.composition, planned.log, executor, groups, heading)
    except (SettingError, ContractError) as error:
        print_refusal(f"{' '.join(planned.cell.overrides)}: {error}")
        reason["failed" if isinstance(error, ContractError) else "refused"] = str(error)
    except Exception as error:
        line = describe_write_error(error) if isinstance(error, OSError) else None
        if line is None or launcher == "slurm":  # on this machine the next cell would not find a better disk
            reason["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        for name, text in reason.items():
            write_reason(folder, name, text)


def launch_on_slurm(sweep: Any) -> None:
    """Run the cells of a sweep as SLURM jobs and wait for them."""
    from kvbench.config.compose import folders
    from kvbench.sweeps.slurm import CellJob, launch_jobs

    more = tuple(map(str, folders()[1:]))
    jobs = [
        CellJob(run_job, sweep.folder.absolute(), number, tuple(planned.cell.overrides), more)
        for number, planned in enumerate(sweep.cells)
    ]
    launch_jobs(sweep.composition.hydra.launcher, jobs)


def run_job(folder: Path, number: int, overrides: Sequence[str], more: Sequence[str]) -> None:
    """What a SLURM job does for a cell. `more`: folders of configuration files beside conf/."""
    from kvbench.config import compose
    from kvbench.engine.spending import spend, start_counting
    from kvbench.sweeps import status

    say_spending = start_counting()
    for path in more:
        if Path(path) not in compose.folders():
            compose.add_folder(Path(path))
    with spend("starting"):
        from kvbench.runs.executor import Executor
        from kvbench.sweeps.plan import plan_cell, sharing_groups

        planned = plan_cell(overrides, executes=True)
    groups = []
    if planned.run is not None and not planned.run.measures:
        known = status.read_cells(folder)
        cells = [(cell["runs"], cell["readings"], lambda cell=cell: plan_cell(cell["overrides"]).run) for cell in known]
        groups = sharing_groups(cells, [planned.run.baseline(), planned.run], Path(planned.composition.config.results))
    with Executor(Path(planned.composition.config.results)) as executor:
        run_sweep_cell(folder / str(number), planned, "slurm", executor, groups)
    say_spending()


def execute_cell(
    run: Any,
    composition: Any,
    log: Any,
    executor: Any,
    groups: Sequence[Sequence[Any]] = (),
    heading: str | None = None,
) -> None:
    """Make the records of a run and of the full cache on the same samples, where they are not in the store yet, and
    print the table of both, or its first average in one line.

    Args:
        run: The `kvbench.runs.spec.RunSpec`.
        composition: The `kvbench.config.compose.Composition` that it was made of.
        log: The logger, or None.
        executor: A `kvbench.runs.executor.Executor`.
        groups: Runs of the sweep that read prompts together with these.
        heading: Begins the line; None prints the table.
    """
    from kvbench.engine.spending import spend

    with spend("starting"):
        from kvbench.efficiency import measure
        from kvbench.runs.workers import count_workers

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
    runs: Sequence[Any], records: Sequence[Mapping[str, Any]], results: Path, heading: str | None = None
) -> None:
    """Print the closing table of a run, whose full cache's run stands before it, or its first average in one line.
    Answers are graded where the task leaves that to math-verify.
    """
    from kvbench.analysis.closing_table import build_run_table
    from kvbench.integrations import math_verify
    from kvbench.store.run_folder import run_hash

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


def describe_progress(run: Any, results: Path) -> str:
    """Say how many samples of a run and its full cache are done, and that the others can follow."""
    from kvbench.store.run_folder import run_hash
    from kvbench.sweeps.status import read_state

    values = {run_hash(needed.value): needed for needed in (run.baseline(), run)} if not run.measures else {}
    states = [read_state(results, name) for name in values]
    total = next((state.total for state in states if state.total), None)
    where = f" at {sum(state.records for state in states)} of {total * len(states)}" if total else ""
    return f"{where}; the same command goes on"


def print_refusal(line: str) -> int:
    """Say in one line what cannot be used; return the exit code for it."""
    print(f"kvbench: {line}", file=sys.stderr)
    return 2
