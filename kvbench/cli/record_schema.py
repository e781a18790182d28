"""Print docs/records.md: the fields of a record, with their types, units and meanings.

python -m kvbench record-schema > docs/records.md
"""

from collections.abc import Sequence

from kvbench.cli.command import Arguments, answered
from kvbench.store.record import write_schema


def main(arguments: Sequence[str]) -> int:
    return answered(lambda: show(arguments))


def show(arguments: Sequence[str]) -> None:
    """Print the page."""
    Arguments("kvbench record-schema", __doc__).parse_args(arguments)
    print(write_schema(), end="")
