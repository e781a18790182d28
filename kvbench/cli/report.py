"""Write the report page of a store."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command
from kvbench.report.page import write_report


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: make_report(arguments))


def make_report(arguments: Sequence[str]) -> None:
    """Make the page; print where it is and what it weighs."""
    parser = CommandParser("kvbench report", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    path = write_report(parser.parse_args(arguments).results, datetime.now(UTC))
    print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
