"""Format a paper's table with published and measured values side by side, as Markdown, CSV and LaTeX.

An empty measured cell shows the number of a note with the command that fills it.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from kvbench.analysis.text_table import escape_latex, escape_markdown
from kvbench.store.csv_rows import format_rows
from kvbench.validation import escape, format_value

Settings = Mapping[str, Any]  # of run.py: {"method": "dropkv", "method.window": 8, …}

SIDES = ("published", "measured", "low", "high", "difference")  # of a column in the CSV


@dataclass(frozen=True)
class TableCell:
    """The texts of a cell.

    Attributes:
        published: The published value, or "".
        measured: The measured value, or "".
        filling: Settings of the run that would fill the cell. None if it is filled, or if nothing can be measured.
        low: Lower end of the 95 % interval, or of a cost the first quartile of its repeats, or "".
        high: Upper end of the interval, or the third quartile, or "".
        difference: Measured − published, or "".
        reason: Why a measurement has no number, or "". It becomes a note of the row.
        remark: What else must be known about the number or its absence, or "". Cells with the same remark share a note.
    """

    published: str
    measured: str
    filling: Settings | None = None
    low: str = ""
    high: str = ""
    difference: str = ""
    reason: str = ""
    remark: str = ""

    @property
    def text(self) -> str:
        """The measured value with its interval, and in brackets its difference from the published value."""
        between = f" [{self.low}, {self.high}]" if self.low else ""
        return f"{self.measured}{between}{f' ({self.difference})' if self.difference else ''}"


@dataclass(frozen=True)
class PaperTable:
    """A table: its title, its columns, its rows as (label, cells), and the notes below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[TableCell, ...]], ...]
    notes: tuple[str, ...]

    @cached_property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """The parts of each column: published and measured, or only measured if nothing in it was published."""
        printed = [any(cells[place].published for _, cells in self.rows) for place in range(len(self.columns))]
        return tuple(("published", "measured") if is_printed else ("measured",) for is_printed in printed)

    @property
    def has_published(self) -> bool:
        """Whether anything in the table was published."""
        return any(len(sides) == 2 for sides in self.sides)

    @property
    def is_measured(self) -> bool:
        """Whether any cell has a measured value."""
        return any(cell.text for _, cells in self.rows for cell in cells)

    @cached_property
    def filling(self) -> list[tuple[str, ...]]:
        """The commands that fill the missing cells of each row."""
        return [make_commands([cell.filling for cell in cells if cell.filling]) for _, cells in self.rows]

    @property
    def fillings(self) -> list[tuple[str, ...]]:
        """The different commands of `filling`, in order."""
        return list(dict.fromkeys(filter(None, self.filling)))

    @property
    def titles(self) -> list[str]:
        """The titles of the columns of `cells` behind the labels."""
        named = zip(self.columns, self.sides, strict=True)
        return [f"{name} {side}" if self.has_published else name for name, sides in named for side in sides]

    def cells(self) -> list[list[str]]:
        """Return the texts of the rows. A missing cell has the number of the note with its command."""
        texts, numbers = [], {filling: number for number, filling in enumerate(self.fillings, 1)}
        for (label, cells), filling in zip(self.rows, self.filling, strict=True):
            texts.append([label])
            for cell, sides in zip(cells, self.sides, strict=True):
                filled = cell.text or (f"[{numbers[filling]}]" if cell.filling else "–")
                texts[-1] += [cell.published or "–", filled] if len(sides) == 2 else [filled]
        return texts

    def to_markdown(self, picture: str | None = None) -> str:
        """Return a Markdown page: title, the picture with this file's name if there is one, table and notes."""
        title = escape_all_markdown(self.title)
        lines = [
            f"# {title}",
            "",
            *([f"![{title}]({picture})", ""] if picture else []),
            format_line("", map(escape_all_markdown, self.titles)),
            "|---" + "|--:" * len(self.titles) + "|",
        ]
        lines += [format_line(label, texts) for label, *texts in self.cells()]
        lines += ["", *(f"* {escape_outside_code(note)}" for note in self.notes)]
        for number, filling in enumerate(self.fillings, 1):
            lines.append(f"* [{number}] " + ", ".join(f"`{command}`" for command in filling))
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Return CSV with the same rows. Each part of a cell has its own column; `command` fills the row's gaps."""
        rows: list[list[object]] = [["", *(f"{name} {side}" for name in self.columns for side in SIDES), "command"]]
        for (label, cells), filling in zip(self.rows, self.filling, strict=True):
            parts = [getattr(cell, side) for cell in cells for side in SIDES]
            rows.append([escape(label), *parts, "; ".join(filling)])
        return format_rows(rows)

    def to_latex(self) -> str:
        """Return a LaTeX tabular, with the title and the notes as comments above it."""
        named = zip(self.columns, self.sides, strict=True)
        heads = [f"\\multicolumn{{{len(sides)}}}{{c}}{{{escape_latex(name)}}}" for name, sides in named]
        every = [side for sides in self.sides for side in sides]
        fillings = [f"[{number}] {'; '.join(filling)}" for number, filling in enumerate(self.fillings, 1)]
        lines = [f"% {escape(text)}" for text in (self.title, *self.notes, *fillings)]
        lines += [f"\\begin{{tabular}}{{l{'r' * len(every)}}}", "\\hline"]
        lines.append(" & ".join(["", *heads]) + r" \\")
        if self.has_published:
            lines.append(" & ".join(["", *every]) + r" \\")
        body = [" & ".join(map(escape_latex, texts)) + r" \\" for texts in self.cells()]
        return "\n".join([*lines, "\\hline", *body, "\\hline", "\\end{tabular}"]) + "\n"


def make_commands(wanted: Sequence[Settings]) -> tuple[str, ...]:
    """Return commands that run exactly these settings.

    Settings with the same names become one command if all combinations of their values are wanted; otherwise each of
    them becomes a command.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for settings in wanted:
        texts = {name: format_value(value) for name, value in settings.items()}
        group = groups.setdefault(tuple(sorted(texts)), [])
        if texts not in group:
            group.append(texts)
    made = []
    for group in groups.values():
        axes = {name: list(dict.fromkeys(texts[name] for texts in group)) for name in group[0]}
        crossed = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        exact = len(crossed) == len(group)
        made += (
            [make_command(axes)]
            if exact
            else [make_command({name: [texts[name]] for name in texts}) for texts in group]
        )
    return tuple(made)


def make_command(axes: Mapping[str, Sequence[str]]) -> str:
    """Return the command line that sweeps over these settings, quoted for a shell."""
    swept = any(len(values) > 1 for values in axes.values())
    words = [shlex.quote(f"{name}={','.join(values)}") for name, values in axes.items()]
    return " ".join(["python run.py", *(["-m"] if swept else []), *words])


def format_line(label: str, texts: Iterable[str]) -> str:
    """Return a line of a Markdown table. The texts are already escaped."""
    return "| " + " | ".join([escape_all_markdown(label), *texts]) + " |"


def escape_all_markdown(text: str) -> str:
    """Escape a text for Markdown, including control characters and &."""
    return escape_markdown(escape(text)).replace("&", "&amp;")


def escape_outside_code(text: str) -> str:
    """Escape a text for Markdown. What stands between backticks, such as a command, stays as it is."""
    parts = text.split("`")
    return "`".join(escape_all_markdown(part) if place % 2 == 0 else part for place, part in enumerate(parts))
