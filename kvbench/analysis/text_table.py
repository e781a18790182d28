"""Format tables as aligned text for a terminal or as Markdown.

Control characters in cells are escaped, so that no cell can control the terminal or break a line.
"""

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from kvbench.validation import escape

NOT_AVAILABLE = "n/a"
CELL_END, ESCAPED = re.compile(r"(?<!\\)\|"), re.compile(r"\\([\\|`*_\[\]<>#])")
NUMBER = re.compile(r"[-+−±~<>≤≥]? ?\d+([.,]\d+)*(e[-+]?\d+)?( ?[%×])?($|[ ,/])")  # at the beginning of a cell
DIGITS = 12  # of a number in a name, as far as names are sorted by it
LATEX = {  # character -> how LaTeX writes it
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "×": r"$\times$",
    "−": "$-$", "≤": r"$\leq$", "<": r"$<$", ">": r"$>$", "|": r"$|$", "·": r"$\cdot$", "\u202f": r"\,",
    "→": r"$\rightarrow$", "…": r"\dots{}", "“": "``", "”": "''", "‘": "`", "’": "'", "—": "---", "†": r"\dag{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}  # fmt: skip
PRINTED = {*map(chr, range(32, 127)), *map(chr, range(0xC0, 0x100))} - {*"ÐÞðþ÷"}  # what pdflatex can print by itself


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        top: First line of its title.
        bottom: Second line of its title.
        cell: Function that returns the text for a row.
        leads: Whether this column and all after it stay together, in a further block if they do not fit.
    """

    top: str
    bottom: str
    cell: Callable[[Any], str]
    leads: bool = False

    @property
    def title(self) -> str:
        """The title in one line."""
        return f"{self.top} {self.bottom}".strip()


def format_table(columns: Sequence[Column], rows: Sequence[Any], last: int, width: int, longest: int = 24) -> list[str]:
    """Format a table as lines of plain text.

    Columns that do not fit go into a further block, which repeats the first column.

    Args:
        columns: The columns. The first one labels the rows.
        rows: The rows, which are passed to `Column.cell`.
        last: Number of rows at the end that get a rule above them.
        width: Width in characters.
        longest: Letters of a row's label that are shown at least.
    """
    label = max(longest, width - 70)
    texts = []
    for column in columns:
        cells = [column.top, column.bottom, *(escape(column.cell(row)) for row in rows)]
        if column is columns[0]:
            cells = [cell if len(cell) <= label else cell[: label - 3] + "..." for cell in cells]
        size = max(map(len, cells))
        texts.append([cell.ljust(size) if column is columns[0] else cell.rjust(size) for cell in cells])
    first, *rest = texts
    blocks = [[first]]
    for place, cells in enumerate(rest):
        together = rest[place:] if columns[place + 1].leads else [cells]
        if (
            sum(len(column_cells[0]) + 2 for column_cells in [*blocks[-1], *together]) - 2 > width
            and len(blocks[-1]) > 1
        ):
            blocks.append([first])
        blocks[-1].append(cells)
    lines = []
    for block in blocks:
        above, titles, *body = ["  ".join(cells).rstrip() for cells in zip(*block, strict=True)]
        rule = "-" * (sum(len(cells[0]) + 2 for cells in block) - 2)
        lines += ["", above, titles, rule, *body]
        if last:
            lines[-last:-last] = [rule]
    return lines


def format_markdown(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Format a table as lines of a GitHub table."""

    def write(texts: Iterable[str]) -> str:
        return "| " + " | ".join(map(escape_markdown, texts)) + " |"

    body = [[escape(column.cell(row)) for column in columns] for row in rows]
    sides = ["--:" if all(map(is_aligned_right, cells)) else "---" for cells in list(zip(*body, strict=True))[1:]]
    sides = sides or ["--:"] * (len(columns) - 1)
    return [
        write(column.title for column in columns),
        f"|---{''.join(f'|{side}' for side in sides)}|",
        *map(write, body),
    ]


def is_aligned_right(cell: str) -> bool:
    """Return whether a cell of a table is a number, or begins with one, or is empty."""
    return cell in ("", NOT_AVAILABLE) or bool(NUMBER.match(cell))


def fit_markdown(text: str, width: int) -> list[str]:
    """Format a Markdown page as lines of plain text: its tables in blocks as wide as `width`, other lines wrapped."""
    lines: list[str] = []
    for is_table, group in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            lines += [part for line in group for part in wrap_texts([remove_markup(line)], width) or [""]]
            continue
        titles, _, *rows = [[remove_markup(cell.strip()) for cell in CELL_END.split(line)[1:-1]] for line in group]
        columns = [Column(title, "", itemgetter(at)) for at, title in enumerate(titles)]
        lines += format_table(columns, rows, 0, width, width // 2)
    return [line for before, line in pairwise(["", *lines]) if before or line]


def remove_markup(text: str) -> str:
    """Return a text of a Markdown page without escapes, headings and marks of code."""
    plain = ESCAPED.sub(r"\1", re.sub(r"^#+ |(?<!\\)`", "", text))
    return plain.replace("&amp;", "&")


def wrap_texts(texts: Iterable[str], width: int) -> list[str]:
    """Wrap each text into lines of at most `width` characters. Lines after a text's first are indented."""
    return [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def escape_markdown(text: str) -> str:
    """Escape a text for a Markdown cell, so that none of its characters is markup."""
    return "".join(f"\\{char}" if char in "\\|`*_[]<>#" else char for char in text)


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX, so that none of its characters is markup.

    A character that pdflatex does not know without further packages, such as a Chinese one, becomes its number: U+4E2D.
    """
    escaped = "".join(LATEX.get(char) or (char if char in PRINTED else f"U+{ord(char):04X}") for char in escape(text))
    return (
        f"{{}}{escaped}" if escaped[:1] in ("[", "*") else escaped
    )  # after a row's end, LaTeX would read them as its options


def pad_numbers(name: str) -> str:
    """Return a name as it is sorted: with zeros in front of its numbers, so that part_478 precedes part_1233."""
    return re.sub(r"\d+", lambda match: match[0].zfill(DIGITS), name)


def format_number(value: float | None, digits: int = 1, sign: str = "") -> str:
    """Return a rounded number, or NOT_AVAILABLE for None. `sign="+"` also marks positive numbers; -0 becomes 0."""
    return NOT_AVAILABLE if value is None else f"{round(value, digits) + 0.0:{sign}.{digits}f}"


def format_percent(share: float | None) -> str:
    """Return a share in [0, 1] as a percentage, or NOT_AVAILABLE for None."""
    return NOT_AVAILABLE if share is None else f"{100 * share:.1f}%"


def format_range(values: Collection[Any], write: Callable[[Any], str] = str) -> str:
    """Return the smallest and the largest of some values as texts, or one text if both read the same."""
    return " to ".join(dict.fromkeys(write(end) for end in (min(values), max(values))))


def format_interval(low: float | None, high: float | None, sign: str = "", digits: int = 1) -> str:
    """Return "[low, high]" with rounded numbers, or NOT_AVAILABLE if an end is None."""
    return (
        NOT_AVAILABLE
        if low is None or high is None
        else f"[{format_number(low, digits, sign)}, {format_number(high, digits, sign)}]"
    )
