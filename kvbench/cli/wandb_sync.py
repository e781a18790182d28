"""Log the runs of a store to Weights & Biases again.

python run.py method=snapkv budget=0.1 logger=wandb                  # logger.mode=online logger.project=mine python -m
kvbench.integrations.wandb_logger results method=snapkv logger.mode=online # `make wandb-sync`: all of a store again
"""

import sys
from collections.abc import Sequence

from kvbench.cli.command import run_command
from kvbench.integrations.wandb_logger import WandbLogger, load_settings
from kvbench.integrations.wandb_run import LoggedRun
from kvbench.validation import SettingError, escape


def main(arguments: Sequence[str]) -> int:
    """`results`, filters and settings of the logger; one line a run. Exit code 1 if any could not be logged."""
    return run_command(lambda: sync(arguments))


def sync(arguments: Sequence[str]) -> int:
    """Log a store again; 1 if a run could not be."""
    from kvbench.store.runs import filter_runs, find_baseline, load_runs, parse_selection

    results, given = parse_selection(arguments)
    log = WandbLogger.of(
        load_settings({name[7:]: own for name, own in given.items() if name.startswith("logger.")}), results
    )
    runs = load_runs(results)
    found = filter_runs(runs, {name: own for name, own in given.items() if not name.startswith("logger.")})
    subjects, whole = [], [own for own in runs if own.finished]
    for run in found:
        full = None
        if not run.full:
            try:
                full = find_baseline(run, whole).value
            except SettingError as error:
                print(f"kvbench: run {run.hash} is left out: {error}", file=sys.stderr)
                continue
        subjects.append(LoggedRun(log.results, run.value, full))
    count = 0
    for subject, wrong in zip(subjects, log.send(subjects, again=True), strict=False):
        print(f"{subject.folder.hash}  {escape(wrong) if wrong else subject.state['state']}", flush=True)
        count += wrong is None
    print(f"{count} of {len(found)} runs logged: {log.where}")
    return 0 if count == len(found) else 1
