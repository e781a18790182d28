"""Print the scores of needles by length and depth as CSV.

Examples:
  kvbench grid results > grid.csv
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("grid", __doc__)
    parser.add_argument("results", type=Path, help="folder of results")
    return parser


def print_grid(arguments: Sequence[str]) -> None:
    """Print the CSV."""
    given = make_parser().parse_args(arguments)
    from kvbench.analysis.needle_grid import format_grid

    print(format_grid(given.results), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_grid(arguments))
