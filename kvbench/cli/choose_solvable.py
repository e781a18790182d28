"""Choose the subtasks that a model can solve with the full cache.

python -m kvbench choose-solvable model=smollm2 task=ruler --lengths 1024,2048 --samples 20
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.runs.choose_solvable import SAMPLES, compose_configs, format_card, parse_numbers, score_subtasks


def parse_arguments(given: Sequence[str]) -> Namespace:
    parser = CommandParser("kvbench choose-solvable", __doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of run.py: model, task, device, …")
    parser.add_argument("--lengths", help="task.length, several between commas; default: the task's own")
    parser.add_argument("--samples", default=str(SAMPLES), help=f"of each subtask; default: {SAMPLES}")
    options = parser.parse_intermixed_args(given)
    options.lengths = parse_numbers("--lengths", options.lengths) if options.lengths is not None else None
    [options.samples] = parse_numbers("--samples", options.samples, most=1)
    return options


def print_solvable(given: Sequence[str]) -> None:
    """Print the YAML."""
    options = parse_arguments(given)
    found = compose_configs(options)
    from kvbench.runs.spec import RunSpec

    runs = [RunSpec.from_config(config) for config in found]
    command = shlex.join(["python", "-m", "kvbench", "choose-solvable", *given])
    scores = dict(score_subtasks(runs, Path(found[0].results), found[0].workers))
    print("\n".join(format_card(runs[0], command, scores)))


def main(given: Sequence[str]) -> int:
    return run_command(lambda: print_solvable(given))
