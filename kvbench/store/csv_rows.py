"""Write CSV. All files and outputs of kvbench in this format come from here."""

import csv
import io
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvbench.atomic import replace_file

FORMULA = ("=", "+", "-", "@", "\t")  # beginnings of cells that a spreadsheet executes


def format_rows(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV, with texts that no spreadsheet executes (`escape_cell`)."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_cell, row) for row in rows)
    return text.getvalue()


def write_rows(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as a CSV file, completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    with replace_file(path) as draft:
        draft.write_text(format_rows(rows), encoding="utf-8")


def escape_cell(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would read as a formula. Numbers stay, also those in texts.

    Source: OWASP, "CSV Injection".
    """
    if not isinstance(value, str):
        return value
    value = value.replace("\r", "\\r")  # csv does not quote it, and spreadsheets read it as the end of a row
    if not value.startswith(FORMULA):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return f"'{value}"
