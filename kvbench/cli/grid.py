"""Print scores of needles by length and depth as CSV.

python -m kvbench grid results > grid.csv
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.analysis.needle_grid import grid
from kvbench.cli.command import Arguments, answered


def main(arguments: Sequence[str]) -> int:
    return answered(lambda: show(arguments))


def show(arguments: Sequence[str]) -> None:
    """Print the CSV."""
    parser = Arguments("kvbench grid", __doc__)
    parser.add_argument("results", type=Path)
    print(grid(parser.parse_args(arguments).results), end="")
