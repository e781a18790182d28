"""Print docs/records.md: the fields of a record, with their types, units and meanings.

python -m kvbench record-schema > docs/records.md
"""

from collections.abc import Sequence

from kvbench.cli.command import CommandParser, run_command
from kvbench.store.record import format_schema


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: print_schema(arguments))


def print_schema(arguments: Sequence[str]) -> None:
    """Print the page."""
    CommandParser("kvbench record-schema", __doc__).parse_args(arguments)
    print(format_schema(), end="")
