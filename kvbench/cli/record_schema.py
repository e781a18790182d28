"""Print docs/records.md: the fields of a record with their types, units and meanings.

Examples:
  kvbench dev record-schema > docs/records.md
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command


def make_parser() -> CommandParser:
    return CommandParser("dev record-schema", __doc__)


def print_schema(arguments: Sequence[str]) -> None:
    """Print the page."""
    make_parser().parse(arguments)
    from kvbench.store.record import format_schema

    print(format_schema(), end="")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_schema(arguments))
