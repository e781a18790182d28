"""Write the report page of a store: results/report.html, which needs no network.

Examples:
  kvbench results report
  kvbench results report --results /data/results
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from kvbench.cli.command import CommandParser, require_extra, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results report", __doc__)
    parser.add_results()
    return parser


def make_report(arguments: Sequence[str]) -> None:
    """Write the page, and print its path and size."""
    given = make_parser().parse(arguments)
    require_extra("report", "altair", "vl_convert")
    from kvbench.report.page import write_report

    path = write_report(given.results, datetime.now(UTC))
    print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: make_report(arguments))
