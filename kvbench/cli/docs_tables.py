"""Write what README.md and docs/ lack about methods, allocators, codecs and tasks.

Example:
  kvbench dev docs-tables      after a file was added to conf/method, or a preset to such a file

Rows and sections that people wrote stay as they are.
"""

from collections.abc import Sequence

from kvbench.atomic import replace_file
from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError


def make_parser() -> CommandParser:
    return CommandParser("dev docs-tables", __doc__)


def write_tables(arguments: Sequence[str]) -> None:
    """Write the pages that are not as they should be, and print their names."""
    make_parser().parse(arguments)
    from kvbench.config.paths import FILES, IS_CHECKOUT
    from kvbench.report.doc_tables import complete_pages

    if not IS_CHECKOUT:
        raise SettingError(f"{FILES}: no checkout, so there are no README.md and no docs/ to write")
    for page, (before, after) in complete_pages().items():
        if before != after:
            with replace_file(FILES / page) as draft:
                draft.write_text(after, encoding="utf-8")
        print(f"{page}  {'as it was' if before == after else 'written'}")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: write_tables(arguments))
