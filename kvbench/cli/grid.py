"""Print the scores of needles by length and depth as CSV.

Examples:
  kvbench results grid > grid.csv
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results grid", __doc__)
    parser.add_results()
    return parser


def print_grid(arguments: Sequence[str]) -> None:
    """Print the CSV."""
    given = make_parser().parse(arguments)
    from kvbench.analysis.needle_grid import format_grid

    print(format_grid(given.results), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_grid(arguments))
