"""Log the runs of a store to Weights & Biases again.

Examples:
  kvbench results wandb-sync
  kvbench results wandb-sync method=snapkv logger.mode=online logger.project=mine

A run is logged once it is finished if it was started with logger=wandb. This command logs it whether or not it was. The
exit code is 1 if a run could not be logged.
"""

import sys
from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError, escape


def make_parser() -> CommandParser:
    parser = CommandParser("results wandb-sync", __doc__)
    parser.add_selection("log; logger.KEY=VALUE")
    return parser


def sync(arguments: Sequence[str]) -> int:
    """Log the chosen runs and print one line for each. Return 1 if one could not be logged."""
    options = make_parser().parse(arguments)
    from kvbench.integrations.wandb_logger import WandbLogger, load_settings
    from kvbench.integrations.wandb_run import LoggedRun
    from kvbench.store.runs import filter_runs, find_baseline, load_runs, parse_filters

    given = parse_filters(options.filters)
    log = WandbLogger.of(
        load_settings({name[7:]: value for name, value in given.items() if name.startswith("logger.")}), options.results
    )
    runs = load_runs(options.results)
    chosen = filter_runs(runs, {name: value for name, value in given.items() if not name.startswith("logger.")})
    subjects, whole = [], [run for run in runs if run.finished]
    for run in chosen:
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
    print(f"{count} of {len(chosen)} runs logged: {log.where}")
    return 0 if count == len(chosen) else 1


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: sync(arguments))
