"""Write a store as two Parquet files.

python -m kvbench export results results/export      # runs.parquet, records.parquet (`make export`)
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import Arguments, answered
from kvbench.store.dataframes import export


def main(arguments: Sequence[str]) -> int:
    return answered(lambda: show(arguments))


def show(arguments: Sequence[str]) -> None:
    """Export, and print the files."""
    parser = Arguments("kvbench export", __doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path, help="folder of the Parquet files")
    given = parser.parse_args(arguments)
    print(*export(given.results, given.out), sep="\n")
