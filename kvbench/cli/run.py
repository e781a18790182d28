"""Run one cell or a sweep: a model, a method, a budget and a benchmark.

python run.py method=dropkv budget=0.05 task=ruler
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, find_width, is_styled
from kvbench.cli.run_help import format_run_help
from kvbench.store.runs import count_things, name_some
from kvbench.validation import SettingError, name_file_in_errors

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # kvbench says once that the hub is out of reach


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
            return run_sweep([options.overrides], options.verbose)
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
    from kvbench.cli.sweep_cells import describe_progress, execute_cell
    from kvbench.runs.executor import Executor

    try:
        with Executor(Path(composition.config.results)) as executor:
            execute_cell(run, composition, log, executor)
    except KeyboardInterrupt as stop:
        stop.args = (describe_progress(run, Path(composition.config.results)),)
        raise
    return 0


def run_sweep(lines: Sequence[Sequence[str]], verbose: bool = False, executor: Any = None) -> int:
    """Run the cells of a sweep and print their scores; return the exit code.

    Args:
        lines: What stands on the command line; or several such lines, whose cells run together.
        verbose: Print the table of every cell too.
        executor: A `kvbench.runs.executor.Executor` that keeps its processes and what it has loaded for further sweeps.
            None makes one for this sweep.
    """
    from kvbench.engine.spending import spend, start_counting
    from kvbench.sweeps.plan import Sweep

    say_spending = start_counting()
    with spend("starting"):
        sweep = Sweep.plan_lines(lines, executes=True)
        sweep.announce(find_width(), is_styled())
    if sweep.finished:
        return sweep.exit_code
    failed: list[str] = []
    try:
        with name_file_in_errors(sweep.folder):
            if sweep.launcher == "slurm":
                failed = launch_on_slurm(sweep)
            else:
                with spend("starting"):
                    from kvbench.cli.sweep_cells import run_cells
                run_cells(sweep, verbose, executor)
                say_spending()
    except KeyboardInterrupt as stop:
        stop.args = (sweep.progress_note,)
        raise
    except BaseException:
        sweep.print_states()
        raise
    sweep.print_end(find_width(), is_styled())
    if failed:
        count = f"{count_things(len(failed), 'job')} of {len(sweep.cells)}"
        logs = f"their logs lie in {sweep.folder / '.submitit'}; the same command goes on"
        print(f"kvbench: {count} failed or did not end: {name_some(failed)}; {logs}", file=sys.stderr)
        return 1
    return sweep.exit_code


def launch_on_slurm(sweep: Any) -> list[str]:
    """Run the cells of a sweep as SLURM jobs and wait for them. Return the ids of jobs that failed."""
    from kvbench.config.compose import folders
    from kvbench.sweeps.slurm import CellJob, launch_jobs

    more = tuple(map(str, folders()[1:]))
    jobs = [
        CellJob(run_job, sweep.folder.absolute(), number, tuple(planned.cell.overrides), more)
        for number, planned in enumerate(sweep.cells)
    ]
    return launch_jobs(sweep.composition.hydra.launcher, jobs)


def run_job(folder: Path, number: int, overrides: Sequence[str], more: Sequence[str]) -> None:
    """Run a cell in a SLURM job. `more` are folders of configuration files besides conf/."""
    from kvbench.config import compose
    from kvbench.engine.spending import spend, start_counting
    from kvbench.sweeps import status

    say_spending = start_counting()
    for path in more:
        if Path(path) not in compose.folders():
            compose.add_folder(Path(path))
    with spend("starting"):
        from kvbench.cli.sweep_cells import run_sweep_cell
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
