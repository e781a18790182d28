"""Write what README.md and docs/ lack about methods, allocators, codecs and tasks.

Example:
  kvbench dev docs-tables             after a file was added to conf/method, or a preset to such a file
  kvbench dev docs-tables --types     after kvbench reads other types of models, in half a minute: docs/models.md
  kvbench dev docs-tables --card      after a model was tuned or scored anew: its page in docs/

Rows and sections that people wrote stay as they are.
"""

from collections.abc import Sequence

from kvbench.atomic import replace_file
from kvbench.cli.command import CommandParser, run_command
from kvbench.validation import SettingError

TYPES, TYPES_OPTION = "docs/models.md", "--types"


def make_parser() -> CommandParser:
    parser = CommandParser("dev docs-tables", __doc__)
    parser.add_argument(
        TYPES_OPTION, action="store_true", help="try every type of transformers, too, and write its tables"
    )
    parser.add_argument("--card", action="store_true", help="write the tables of the models' pages, too")
    return parser


def complete_types(text: str) -> str:
    """Return docs/models.md with the tables of what kvbench does with each type of model."""
    from kvbench.models.type_tables import list_tables
    from kvbench.report.doc_tables import replace_table

    for label, rows in list_tables().items():
        text = replace_table(text, label, rows, TYPES_OPTION)
    return text


def write_tables(arguments: Sequence[str]) -> None:
    """Write the pages that are not as they should be, and print their names."""
    options = make_parser().parse(arguments)
    from kvbench.config.paths import FILES, IS_CHECKOUT
    from kvbench.report.doc_tables import complete_pages

    if not IS_CHECKOUT:
        raise SettingError(f"{FILES}: no checkout, so there are no README.md and no docs/ to write")
    pages = complete_pages()
    if options.types:
        before = (FILES / TYPES).read_text(encoding="utf-8")
        pages[TYPES] = before, complete_types(before)
    if options.card:
        from kvbench.training import embedded_card, tuning_card

        for page, after in (tuning_card.make_card(FILES) | embedded_card.make_card(FILES)).items():
            before = (FILES / page).read_text(encoding="utf-8") if (FILES / page).exists() else ""
            pages[page] = before, after
    for page, (before, after) in pages.items():
        if before != after:
            with replace_file(FILES / page) as draft:
                draft.write_text(after, encoding="utf-8")
        print(f"{page}  {'as it was' if before == after else 'written'}")


def main(arguments: Sequence[str]) -> int:
    return run_command(lambda: write_tables(arguments))
