"""Print how far the cells of a sweep are.

Examples:
  kvbench sweep-status
  kvbench sweep-status results results/sweeps/2026-01-31_12-00-00
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("sweep-status", __doc__)
    parser.add_results()
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the sweep (default: the newest)")
    return parser


def print_status(arguments: Sequence[str]) -> None:
    """Print the state of every cell."""
    given = make_parser().parse_args(arguments)
    from kvbench.sweeps.status import find_newest, print_states

    print_states(given.results, given.folder or find_newest(given.results))


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_status(arguments))
