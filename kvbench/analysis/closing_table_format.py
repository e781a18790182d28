"""Format the closing table as plain text, Markdown and CSV. This module defines its rows, columns and legend."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvbench.analysis.intervals import Mean
from kvbench.analysis.paired import PairedDifference
from kvbench.analysis.text_table import (
    NOT_AVAILABLE,
    Column,
    escape_markdown,
    format_interval,
    format_markdown,
    format_number,
    format_percent,
    format_table,
    wrap_texts,
)
from kvbench.store.csv_rows import format_rows
from kvbench.validation import escape

PAIRED_LEGEND = (
    "diff: method - full in points, with its 95 % interval, paired and clustered by context. Right-or-wrong scores "
    "have exact binomial bounds if fewer than 6 contexts differ. Intervals of partial scores allow for one more "
    "context with the most extreme score. lost/gained/same: samples that score less, more or the same with the method."
)
SINGLE_LEGEND = (
    "95 % interval: of the mean score, clustered by context. Right-or-wrong scores have exact binomial bounds if fewer "
    "than 6 contexts differ. Intervals of partial scores allow for one more context with the most extreme score."
)
COSTS_LEGEND = (
    "bytes held, rows attended: shares of the full cache's bytes, without files beside the model, and of its rows per "
    "decoded token. TTFT: time to first token. TPOT: time per output token after the first. Both times are medians "
    "over samples; those of the full cache may come from an earlier run."
)
ALSO_LEGEND = "answers: means over the subtasks that have the metric, each with the same weight."
TIME_NAMES = ("ttft_full", "ttft", "tpot_full", "tpot")
COST_NAMES = ("held", "attended", *TIME_NAMES)
MEANS = (
    "mean_full",
    "mean_method",
    "difference",
    "low",
    "high",
    "error",
    "samples",
    "groups",
    "lost",
    "gained",
    "same",
)


@dataclass(frozen=True)
class TableRow:
    """A subtask, an average of subtasks, or a further metric. A field is None if there are no samples to compute it.

    Attributes:
        subtask: Name of the row.
        kind: "subtask", "average", "solvable" (the average over the subtasks that a model's card lists) or "also" (a
            further metric).
        interval: Both means and their difference, in points. None if no sample was answered by both runs.
        full: The full cache's mean over the same samples.
        method: The method's mean over the same samples.
        failed: Number of pairs that are left out because one side failed.
        held: Share of the full cache's bytes that are held, in [0, 1].
        held_low: Lower end of the 95 % interval of `held`. None like `kvbench.analysis.intervals.Mean.low`: if the
            samples of all contexts, or of all but five, hold the same share.
        held_high: Upper end of that interval.
        attended: Share of the full cache's rows that a decoded token attends to, in [0, 1].
        ttft_full: Time to first token with the full cache, ms.
        ttft: Time to first token with the method, ms.
        tpot_full: Time per output token with the full cache, ms.
        tpot: Time per output token with the method, ms.
        ttft_full_error: Standard error of `ttft_full`, ms. None for fewer than two samples.
        ttft_error: Standard error of `ttft`, ms.
        tpot_full_error: Standard error of `tpot_full`, ms.
        tpot_error: Standard error of `tpot`, ms.
        digits: Decimal places of scores and their differences.
    """

    subtask: str
    kind: str
    interval: PairedDifference | None
    full: Mean | None
    method: Mean | None
    failed: int
    held: float | None = None
    held_low: float | None = None
    held_high: float | None = None
    attended: float | None = None
    ttft_full: float | None = None
    ttft: float | None = None
    tpot_full: float | None = None
    tpot: float | None = None
    ttft_full_error: float | None = None
    ttft_error: float | None = None
    tpot_full_error: float | None = None
    tpot_error: float | None = None
    digits: int = 1


@dataclass(frozen=True)
class ClosingTable:
    """A closing table.

    Attributes:
        heading: Lines above the table.
        rows: Subtasks, then averages.
        also: Further metrics.
        notes: Sentences below the table.
        paired: Whether the table compares a method with the full cache. False for the full cache alone.
    """

    heading: Mapping[str, str]
    rows: tuple[TableRow, ...]
    also: tuple[TableRow, ...]
    notes: tuple[str, ...]
    paired: bool

    @property
    def legend(self) -> tuple[str, ...]:
        """Sentences that explain the columns."""
        return (PAIRED_LEGEND if self.paired else SINGLE_LEGEND, COSTS_LEGEND, *([ALSO_LEGEND] if self.also else []))

    @property
    def columns(self) -> list[Column]:
        """The columns of the first block."""
        failures = any(row.failed for row in self.rows)
        columns = [SUBTASK, *(PAIRED if self.paired else ALONE), COUNT, *([FAILED] if failures else [])]
        return columns + [column for column in COSTS_COLUMNS if self.paired or column not in PAIRED_COSTS]

    @property
    def also_columns(self) -> list[Column]:
        """The columns of the second block, with further metrics."""
        plain = [replace(column, top="") if column.top == "score" else column for column in (*PAIRED, COUNT)]
        return [ANSWERS, *(plain if self.paired else (replace(FULL, top=""), ALONE[1], COUNT))]

    def describe_average(self) -> str:
        """Return the first average in one line: the score, its difference from the full cache, and the samples."""
        row = next(row for row in self.rows if row.kind == "average")
        if row.interval is None:
            return NOT_AVAILABLE
        interval = row.interval
        score = f"score {format_number(interval.mean_method)}"
        change = (
            f"{format_number(interval.difference, sign='+')} {_format_bounds(row, interval, '+')}, "
            if self.paired
            else ""
        )
        return f"{score}, {change}n = {interval.samples}"

    def to_text(self, width: int = 100) -> str:
        """Return plain aligned text without terminal codes. Columns that do not fit `width` go into a further block."""
        lines = wrap_texts((f"{key}: {value}" for key, value in self.heading.items()), width)
        lines += format_table(self.columns, self.rows, sum(row.kind != "subtask" for row in self.rows), width)
        if self.also:
            lines += format_table(self.also_columns, self.also, 0, width)
        lines += ["", *wrap_texts((*self.notes, *self.legend), width)]
        return "\n".join(lines) + "\n"

    def to_markdown(self) -> str:
        """Return GitHub tables, with the heading above and the notes below as lists."""
        lines = [f"* {escape_markdown(key)}: {escape_markdown(value)}" for key, value in self.heading.items()]
        lines += ["", *format_markdown(self.columns, self.rows)]
        if self.also:
            lines += ["", *format_markdown(self.also_columns, self.also)]
        lines += ["", *(f"* {escape_markdown(note)}" for note in (*self.notes, *self.legend))]
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """Return CSV with unrounded numbers. Every line repeats heading and notes, so that it is complete by itself."""
        alone = [(side, edge) for side in ("full", "method") for edge in ("low", "high", "error")]
        titles = [f"{side}_{edge}" for side, edge in alone]
        rows: list[list[object]] = [["subtask", "kind", *MEANS, *titles, "failed", *COST_NAMES, *self.heading, "notes"]]
        for row in (*self.rows, *self.also):
            values = [escape(row.subtask), row.kind, *(getattr(row.interval, name, None) for name in MEANS)]
            values += [getattr(getattr(row, side), edge, None) for side, edge in alone]
            values += [row.failed, *(getattr(row, name) for name in COST_NAMES)]
            rows.append([*values, *self.heading.values(), " ".join(self.notes)])
        return format_rows(rows)


def _get_number(row: TableRow, name: str) -> float | None:
    return getattr(row.interval, name, None)


def _format_bounds(row: TableRow, interval: PairedDifference | Mean | None, sign: str = "") -> str:
    return format_interval(getattr(interval, "low", None), getattr(interval, "high", None), sign, row.digits)


def _format_counts(row: TableRow) -> str:
    return NOT_AVAILABLE if row.interval is None else f"{row.interval.lost}/{row.interval.gained}/{row.interval.same}"


SUBTASK = Column("", "subtask", lambda row: row.subtask)
ANSWERS = Column("", "answers", lambda row: row.subtask)
FULL = Column("score", "full", lambda row: format_number(_get_number(row, "mean_full"), row.digits))
ALONE = (
    FULL,
    Column("95 %", "interval", lambda row: _format_bounds(row, row.full)),
)
PAIRED = (
    FULL,
    Column("score", "method", lambda row: format_number(_get_number(row, "mean_method"), row.digits)),
    Column("", "diff", lambda row: format_number(_get_number(row, "difference"), row.digits, "+")),
    Column("95 %", "interval", lambda row: _format_bounds(row, row.interval, "+")),
    Column("lost/gained", "/same", _format_counts),
)
COUNT = Column("", "n", lambda row: str(_get_number(row, "samples") or 0))
FAILED = Column("", "failed", lambda row: str(row.failed))
PAIRED_COSTS = (
    Column("TTFT ms", "method", lambda row: format_number(row.ttft)),
    Column("TPOT ms", "method", lambda row: format_number(row.tpot)),
)
COSTS_COLUMNS = (
    Column("bytes", "held", lambda row: format_percent(row.held), leads=True),
    Column("rows", "attended", lambda row: format_percent(row.attended)),
    Column("TTFT ms", "full", lambda row: format_number(row.ttft_full)),
    PAIRED_COSTS[0],
    Column("TPOT ms", "full", lambda row: format_number(row.tpot_full)),
    PAIRED_COSTS[1],
)
