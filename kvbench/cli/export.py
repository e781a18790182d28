"""Write a store as two Parquet files.

python -m kvbench export results results/export      # runs.parquet, records.parquet (`make export`)
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.store.dataframes import export_parquet


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: export_store(arguments))


def export_store(arguments: Sequence[str]) -> None:
    """Export, and print the files."""
    parser = CommandParser("kvbench export", __doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path, help="folder of the Parquet files")
    given = parser.parse_args(arguments)
    print(*export_parquet(given.results, given.out), sep="\n")
