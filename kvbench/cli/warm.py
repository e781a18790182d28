"""Compile the GPU kernels that a sweep needs, before it begins.

Examples:
  kvbench warm method=snapkv,knorm budget=0.05,0.1 task=ruler
  kvbench warm preset=dropkv_table5 model=llama31_8b

A sweep compiles what is missing by itself, before its first sample. This command does it where a GPU need not wait for
others, such as in the prologue of a SLURM job. It loads the model, reads a few prompts of the task with every method,
and writes no records. Kernels stay in Triton's cache (TRITON_CACHE_DIR, default ~/.triton/cache).

The exit code is 2 if a cell is refused, and 1 if a method fails.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.command import CommandParser, run_command
from kvbench.cli.plan import make_sweep_parser, plan_sweep


def make_parser() -> CommandParser:
    return make_sweep_parser("warm", __doc__)


def warm(arguments: Sequence[str]) -> int:
    """Compile, and print for how many runs. Return the exit code."""
    sweep = plan_sweep(make_parser().parse(arguments))
    refused = [planned.cell for planned in sweep.cells if planned.cell.refused]
    for cell in refused:
        print(f"{cell.label}: refused: {cell.refused}")
    runs = [planned.run for planned in sweep.cells if planned.run is not None]
    if any(run.device == "cpu" for run in runs):
        print("There is nothing to compile on a CPU.")
        return 2 if refused else 0
    left, ready = group_runs(runs, sweep.results), 0
    for group in left:
        ready += warm_group(group, sweep.results)
    total = sum(map(len, left))
    print(f"{ready} of {total} runs have all their kernels." if total else "No run needs kernels: all are done.")
    return 1 if ready < total else 2 if refused else 0


def group_runs(runs: Iterable[Any], results: Path) -> list[list[Any]]:
    """Group runs that read their prompts together, with the full caches that they are compared with.

    Runs whose records are all in the store are left out. So are runs that measure cost, which warm up by themselves.
    """
    from kvbench.store.run_folder import RunFolder

    groups: dict[str, dict[str, Any]] = {}
    for run in (needed for cell in runs if not cell.measures for needed in (cell.baseline(), cell)):
        folder = RunFolder(results / "runs", run.value)
        if not folder.finished:
            groups.setdefault(run.reading or folder.hash, {})[folder.hash] = run
    return [list(some.values()) for some in groups.values()]


def warm_group(runs: Sequence[Any], results: Path) -> int:
    """Compile the kernels of runs that read their prompts together. Return how many did not fail."""
    from kvbench.runs.resources import Resources
    from kvbench.runs.warming import make_warm_group
    from kvbench.store.run_folder import RunFolder

    group = make_warm_group({RunFolder(results / "runs", run.value): run for run in runs}, Resources(runs[0]))
    return len(group.readers)


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: warm(arguments))
