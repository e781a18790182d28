"""Write a store as two Parquet files, runs.parquet and records.parquet.

Examples:
  kvbench results export results/export
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results export", __doc__)
    parser.add_results()
    parser.add_argument("out", type=Path, help="folder of the Parquet files")
    return parser


def export_store(arguments: Sequence[str]) -> None:
    """Write the files and print their paths."""
    given = make_parser().parse(arguments)
    from kvbench.store.dataframes import export_parquet

    print(*export_parquet(given.results, given.out), sep="\n")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: export_store(arguments))
