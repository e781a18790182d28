"""Print scores of needles by length and depth as CSV.

python -m kvbench grid results > grid.csv
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.needle_grid import format_grid
from kvbench.cli.command import CommandParser, run_command


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_grid(arguments))


def print_grid(arguments: Sequence[str]) -> None:
    """Print the CSV."""
    parser = CommandParser("kvbench grid", __doc__)
    parser.add_argument("results", type=Path)
    print(format_grid(parser.parse_args(arguments).results), end="")
