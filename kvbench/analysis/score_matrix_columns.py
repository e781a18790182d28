"""The columns that the matrix of scores can show (`kvbench results scores --columns`).

A column shows one quantity of each run. COLUMNS lists them in the order of the CSV, where a column may have several
numbers, such as both ends of an interval.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvbench.analysis.score_matrix import MatrixCell
from kvbench.analysis.text_table import format_interval, format_number, format_percent
from kvbench.validation import SettingError, require_choice

BEST, TIED = "*", "†"
Read = Callable[[MatrixCell], Any]


@dataclass(frozen=True)
class MatrixColumn:
    """A quantity of the matrix.

    Attributes:
        name: Its name on the command line.
        head: Its short title above the numbers.
        meaning: What it is, for the legend.
        numbers: Name of a number in the CSV -> function that returns it, or None for a cell that has none.
        write: Function that returns the text of a cell, "" for a cell that has none.
        layout: Alignment and width of that text, as `format` reads them.
        latex: Type of its column in LaTeX.
        marked: Whether it shows which methods are the best.
        cost: Whether it says what a cache costs. Scores and costs are shown apart.
        less: Whether less is better, so that sorting begins with the lowest number.
    """

    name: str
    head: str
    meaning: str
    numbers: Mapping[str, Read]
    write: Callable[[MatrixCell], str]
    layout: str
    latex: str = "r"
    marked: bool = False
    cost: bool = False
    less: bool = False

    @property
    def size(self) -> int:
        """Letters of its text, with the mark."""
        return int(self.layout[1:]) + self.marked

    @property
    def title(self) -> str:
        """The head, aligned like the numbers below it."""
        return f"{self.head:{self.layout}}{' ' * self.marked}"

    def format(self, cell: MatrixCell) -> str:
        """Return the aligned text of a cell, with its mark."""
        mark = BEST if cell.best else TIED if cell.tied else " "
        return f"{self.write(cell):{self.layout}}{mark if self.marked else ''}"


def _read_difference(name: str) -> Read:
    return lambda cell: getattr(cell.difference, name, None)


def _write_interval(read_interval: Read, sign: str = "") -> Callable[[MatrixCell], str]:
    def write(cell: MatrixCell) -> str:
        interval = read_interval(cell)
        return "" if interval is None else format_interval(interval.low, interval.high, sign)

    return write


def _write_change(cell: MatrixCell) -> str:
    return "" if cell.difference is None else format_number(cell.difference.difference, sign="+")


def _make_count(name: str, meaning: str, read: Read, less: bool = False) -> MatrixColumn:
    """Return the column of a number of samples."""

    def write(cell: MatrixCell) -> str:
        return "" if (count := read(cell)) is None else str(count)

    return MatrixColumn(name, name, meaning, {name: read}, write, ">6", less=less)


def _make_share(name: str, head: str, meaning: str, read: Read) -> MatrixColumn:
    """Return the column of a share in [0, 1], which is shown in per cent."""
    return MatrixColumn(
        name, head, meaning, {name: read}, lambda cell: format_percent(read(cell)), ">6", cost=True, less=True
    )


COLUMNS = {
    column.name: column
    for column in (
        MatrixColumn(
            "score",
            "score",
            "mean score in points",
            {"score": lambda cell: cell.score.value},
            lambda cell: format_number(cell.score.value),
            ">5",
            latex="S[table-format=3.1, table-space-text-post={\\textsuperscript{\\dag}}]",
            marked=True,
        ),
        MatrixColumn(
            "score_interval",
            "[score 95 %]",
            "the mean score's 95 % interval",
            {"score_low": lambda cell: cell.score.low, "score_high": lambda cell: cell.score.high},
            _write_interval(lambda cell: cell.score),
            "<16",
        ),
        MatrixColumn(
            "difference",
            "diff",
            "method - full cache in points, paired on the same samples",
            {"difference": _read_difference("difference")},
            _write_change,
            ">6",
            latex="S[table-format=+3.1]",
        ),
        MatrixColumn(
            "interval",
            "[diff 95 %]",
            "the paired difference's 95 % interval",
            {name: _read_difference(name) for name in ("low", "high")},
            _write_interval(lambda cell: cell.difference, "+"),
            "<16",
        ),
        _make_count("lost", "samples that score less than with the full cache", _read_difference("lost"), less=True),
        _make_count("gained", "samples that score more than with the full cache", _read_difference("gained")),
        _make_count("n", "samples", lambda cell: cell.score.samples),
        _make_share("bytes_held", "bytes", "share of the full cache's bytes that are held", lambda cell: cell.held),
        _make_share(
            "bytes_with_files",
            "files",
            "share of the full cache's bytes that are held, with the weights that method and codec read from files",
            lambda cell: cell.loaded,
        ),
        _make_share(
            "bytes_in_all",
            "in all",
            "these bytes with what a method keeps beside the rows, such as positions, codes and bounds",
            lambda cell: cell.whole,
        ),
        _make_share("rows_kept", "kept", "share of the rows read that are kept for the answer", lambda cell: cell.kept),
        _make_share(
            "rows_attended",
            "rows",
            "share of the full cache's rows that a decoded token attends to",
            lambda cell: cell.attended,
        ),
        _make_share("at_limit", "limit", "answers that ended at the length limit", lambda cell: cell.at_limit),
    )
}


def choose_columns(names: Iterable[str]) -> tuple[MatrixColumn, ...]:
    """Return the columns of these names.

    Raises:
        SettingError: There is no such column, or a name is given twice.
    """
    names = list(names)
    for name in names:
        require_choice("--columns", name, COLUMNS)
    if len(set(names)) < len(names):
        raise SettingError(f"--columns={','.join(names)}: give each column once")
    return tuple(COLUMNS[name] for name in names)


DEFAULT = choose_columns(("score", "difference", "interval", "bytes_held", "rows_attended", "at_limit"))
IN_CSV = choose_columns(  # bundles hold this table since format 1
    name for name in COLUMNS if name not in ("bytes_with_files", "bytes_in_all", "rows_kept")
)
IN_LATEX = choose_columns(("score", "difference"))


def split_columns(
    columns: Sequence[MatrixColumn], most: float, measure: Callable[[MatrixColumn], float]
) -> list[list[MatrixColumn]]:
    """Cut columns into pieces whose columns are shown beside each other below each budget.

    Scores and costs are never in one piece.

    Args:
        columns: The columns.
        most: Width of a piece. A single column may be wider.
        measure: Function that returns the width of a column.
    """
    pieces: list[list[MatrixColumn]] = []
    for _, alike in groupby(columns, lambda column: column.cost):
        pieces.append([])
        for column in alike:
            if pieces[-1] and sum(map(measure, [*pieces[-1], column])) > most:
                pieces.append([])
            pieces[-1].append(column)
    return pieces


def explain(columns: Iterable[MatrixColumn]) -> str:
    """Return what the columns show, for a legend."""
    return " ".join(f"{column.head}: {column.meaning}." for column in columns)
