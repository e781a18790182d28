"""Print how far the cells of a sweep are.

Examples:
  kvbench status
  kvbench status results/sweeps/2026-01-31_12-00-00
  kvbench status --results /data/results
"""

from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, move_results, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("status", __doc__)
    parser.add_results(old=False)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the sweep (default: the newest)")
    parser.add_argument("old_folder", nargs="?", type=Path, help=SUPPRESS)
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options. 0.1 took the folder of results in front of the sweep's, or alone."""
    options = make_parser().parse(arguments)
    if options.old_folder is not None or (options.folder is not None and (options.folder / "runs").is_dir()):
        move_results(options, str(options.folder))
        options.folder = options.old_folder
    return options


def print_status(arguments: Sequence[str]) -> None:
    """Print the state of every cell."""
    options = parse_arguments(arguments)
    from kvbench.sweeps.status import find_newest, print_states

    print_states(options.results, options.folder or find_newest(options.results))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_status(arguments))
