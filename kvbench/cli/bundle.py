"""Pack the runs behind a table into one file, with which others can check every number of it.

Examples:
  kvbench results bundle task=ruler question=hidden --out table3.zip
  kvbench check bundle table3.zip

The file holds settings, records, the machine and a manifest of hashes. Questions, targets, other texts of the data
set and local paths are left out; --texts keeps them. The models' answers stay. The command prints the SHA-256 of the
file. Publish it beside the table, so that readers can tell your file from another one.
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    parser = CommandParser("results bundle", __doc__)
    parser.add_selection("pack")
    parser.add_argument("--out", default="bundle.zip", type=Path, help="the file to write (default: bundle.zip)")
    parser.add_argument("--average", help="one of the task's averages, each or solvable (default: the task's first)")
    parser.add_argument("--texts", action="store_true", help="keep texts of the data set and local paths")
    return parser


def make_bundle(arguments: Sequence[str]) -> None:
    """Write the bundle, and print its size and digest."""
    options = make_parser().parse(arguments)
    from kvbench.analysis.bundle import write_bundle
    from kvbench.store.runs import parse_filters

    filters = parse_filters(options.filters)
    digest = write_bundle(options.results, filters, options.out, options.average, options.texts)
    print(f"{options.out}  {options.out.stat().st_size / 1e6:.2f} MB  sha256 {digest}")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: make_bundle(arguments))
