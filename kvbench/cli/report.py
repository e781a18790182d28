"""Write the report page of a store."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvbench.cli.command import Arguments, answered
from kvbench.report.page import report


def main(arguments: Sequence[str]) -> int:
    return answered(lambda: show(arguments))


def show(arguments: Sequence[str]) -> None:
    """Make the page; print where it is and what it weighs."""
    parser = Arguments("kvbench report", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    path = report(parser.parse_args(arguments).results, datetime.now(UTC))
    print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
