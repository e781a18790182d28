"""Find the subtasks that a model solves with the full cache, for its card.

Examples:
  kvbench dev choose-solvable model=smollm2 task=ruler --lengths 1024,2048 --samples 20
  kvbench dev choose-solvable model=smollm2 task=ruler --lengths 4096 --table FILE       the scores with intervals, too

FILE is a CSV, in which scores of other models and lengths stay. The tables of smollm2_long's card are made from
results/tuned/smollm2_long/scores.csv, which has the scores of smollm2, too.
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, require_file, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("dev choose-solvable", __doc__)
    parser.add_settings("settings", "SETTING=VALUE", "of kvbench run: model, task, device, …")
    parser.add_argument("--lengths", help="task.length, several between commas (default: the task's own)")
    parser.add_argument("--samples", help="samples of each subtask (default: 20)")
    parser.add_argument("--table", type=Path, help="CSV to which the scores are written, with 95 %% intervals")
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options, with the lengths and the samples as numbers."""
    options = make_parser().parse(arguments)
    from kvbench.runs.choose_solvable import SAMPLES, parse_numbers

    options.lengths = parse_numbers("--lengths", options.lengths) if options.lengths is not None else None
    samples = str(SAMPLES) if options.samples is None else options.samples
    [options.samples] = parse_numbers("--samples", samples, most=1)
    if options.table is not None:
        require_file("--table", options.table)
    return options


def print_solvable(arguments: Sequence[str]) -> None:
    """Print the lines of YAML for the model's card, and write the scores into a table if one is asked for."""
    options = parse_arguments(arguments)
    from kvbench.analysis.full_scores import read_scores, replace_scores, write_scores
    from kvbench.runs.choose_solvable import compose_configs, describe_source, format_card, score_subtasks

    known = read_scores(options.table) if options.table is not None and options.table.exists() else []
    configs = compose_configs(options)
    from kvbench.runs.spec import RunSpec

    runs = [RunSpec.from_config(config) for config in configs]
    command = shlex.join(["kvbench", "dev", "choose-solvable", *arguments])
    scores = dict(score_subtasks(runs, Path(configs[0].results), configs[0].workers))
    print("\n".join(format_card(runs[0], command, scores)))
    if options.table is not None:
        write_scores(options.table, replace_scores(known, describe_source(runs[0]).list_scores(scores)))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_solvable(arguments))
