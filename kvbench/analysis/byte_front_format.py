"""Format scores over bytes (kvbench.analysis.byte_front) as text for a terminal, Markdown or CSV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.analysis.byte_front import EQUAL, ByteCell, EqualBytes, choose_at, compare_at_equal_bytes, order_by_bytes
from kvbench.analysis.run_labels import format_budget
from kvbench.analysis.score_matrix import ScoreBlock
from kvbench.analysis.score_matrix_format import describe_samples
from kvbench.analysis.text_table import (
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
from kvbench.store.runs import CACHE_GROUPS
from kvbench.validation import escape

NAMED = 6  # ties that the sentence names
LABEL = 60  # letters of a cell's name that text shows at least
COUNTED = {  # --by -> what a share counts
    "bytes": "bytes: those of the rows held, over those of the full cache.",
    "bytes_with_files": "bytes: those of the rows held and of the files that the method and codec need, over those of "
    "the full cache's rows.",
    "bytes_in_all": "bytes: those of the rows held, of the files that the method and codec need, and of all that is "
    "kept beside the rows, over those of the full cache's rows.",
}
LEGEND = (
    "front: place on the front, from the fewest bytes; no other cell holds at most as many bytes and scores more. "
    "ties: places on the front of cells that hold at least as many bytes and cannot be told from this one. A cell on "
    "the front and its ties contain the truly best cell of so many bytes with 95 % confidence (simultaneous paired "
    "comparisons, Bonferroni); so do the cells that are named for a share."
)
EQUAL_LEGEND = (
    "At equal bytes: codec - raw rows in points, paired on the same samples, with 95 % intervals. Both cells have the "
    f"same method and settings, and their bytes differ by at most {100 * EQUAL:g} %. A line of several methods is "
    "their mean in each sample."
)


@dataclass(frozen=True)
class ByteTable:
    """What is shown of a block.

    Attributes:
        block: The block.
        cells: Its cells, the fewest bytes first.
        equal: Codecs against raw rows at equal bytes.
        chosen: What to use at the share (`choose_at`).
        size: Which bytes count, a key of COUNTED.
        share: The share of bytes for which a cell is chosen.
    """

    block: ScoreBlock
    cells: Sequence[ByteCell]
    equal: Sequence[EqualBytes]
    chosen: Sequence[ByteCell]
    size: str
    share: float

    @classmethod
    def of(cls, block: ScoreBlock, size: str, share: float) -> "ByteTable":
        """Order the cells of a block and compare its codecs."""
        cells = order_by_bytes(block, size)
        return cls(block, cells, compare_at_equal_bytes(block), choose_at(block, cells, share), size, share)

    @property
    def choice(self) -> str:
        """The sentence that says what to use at the share, and what cannot be told from it."""
        begin = f"At {100 * self.share:g} % of the bytes:"
        if not self.chosen:
            least = f"; the smallest is {describe_cell(self.cells[0])}" if self.cells else ""
            return f"{begin} no cell holds so few{least}."
        best, *ties = map(describe_cell, self.chosen)
        more = f" and {len(ties) - NAMED} more, which --format csv lists" if len(ties) > NAMED else ""
        return f"{begin} use {best}. Ties: {', '.join(ties[:NAMED]) or 'none'}{more}."


def describe_cell(one: ByteCell) -> str:
    """Return a cell's name with its score and bytes."""
    return f"{one.name} ({format_number(one.cell.score.value)} points, {format_percent(one.share)})"


def format_by_bytes(blocks: Sequence[ScoreBlock], size: str, share: float, form: str, width: int) -> str:
    """Return blocks as scores over bytes.

    Args:
        blocks: The blocks.
        size: Which bytes count, a key of COUNTED.
        share: The share of bytes for which a cell is chosen.
        form: "text" or a key of FORMATS.
        width: Characters of a line of text.
    """
    tables = [ByteTable.of(block, size, share) for block in blocks]
    return format_text(tables, width) if form == "text" else FORMATS[form](tables)


def format_text(tables: Sequence[ByteTable], width: int) -> str:
    """Return tables for a terminal.

    Args:
        tables: The tables.
        width: Characters of a line.
    """
    lines: list[str] = []
    for table in tables:
        lines += wrap_texts([escape(table.block.title), describe_samples(table.block)], width)
        lines += [*format_table(CELLS, table.cells, 0, width, LABEL), ""]
        if table.equal:
            lines += [*format_table(CODECS, table.equal, 0, width, LABEL)[1:], ""]
        lines += [*wrap_texts([escape(table.choice)], width), "", ""]
    return "\n".join([*lines, *wrap_texts(list_notes(tables), width)]) + "\n"


def format_markdown_tables(tables: Sequence[ByteTable]) -> str:
    """Return GitHub tables."""
    lines: list[str] = []
    for table in tables:
        texts = escape(table.block.title), describe_samples(table.block), escape(table.choice)
        title, about, choice = map(escape_markdown, texts)
        lines += [f"**{title}**", "", about, "", *format_markdown(CELLS, table.cells), ""]
        if table.equal:
            lines += [*format_markdown(CODECS, table.equal), ""]
        lines += [choice, ""]
    return "\n".join([*lines, *map(escape_markdown, list_notes(tables))]) + "\n"


def format_csv(tables: Sequence[ByteTable]) -> str:
    """Return CSV with a line for each cell. `choice` is "best" or "tie" for cells to use at the share."""
    numbers: dict[str, Callable[[ByteCell], object]] = {
        "bytes_held": lambda one: one.cell.held,
        "bytes_with_files": lambda one: one.cell.loaded,
        "bytes_in_all": lambda one: one.cell.whole,
        "score": lambda one: one.cell.score.value,
        "score_low": lambda one: one.cell.score.low,
        "score_high": lambda one: one.cell.score.high,
        "n": lambda one: one.cell.score.samples,
        "front": lambda one: one.place,
        "ties": lambda one: " ".join(map(str, one.ties)),
    }
    head = ["model", "task", "question", "protocol", "average", "label", *CACHE_GROUPS, "budget", *numbers]
    rows: list[list[object]] = [[*head, "choice", "hash"]]
    for table in tables:
        block = table.block
        about = [block.model, block.task, block.question, ", ".join(block.also), block.average]
        for one in table.cells:
            run = one.cell.run
            groups = [escape(str(run.value[group]["name"])) for group in CACHE_GROUPS]
            choice = "best" if one in table.chosen[:1] else "tie" if one in table.chosen else ""
            texts = [*map(escape, about), escape(one.label), *groups, run.budget_name]
            rows.append([*texts, *(read(one) for read in numbers.values()), choice, run.hash])
    return format_rows(rows)


def list_notes(tables: Sequence[ByteTable]) -> list[str]:
    """Return the legend."""
    notes = [COUNTED[size] for size in dict.fromkeys(table.size for table in tables)] + [LEGEND]
    return notes + [EQUAL_LEGEND] * any(table.equal for table in tables)


CELLS = (
    Column("", "method", lambda one: one.label),
    Column("", "budget", lambda one: format_budget(one.cell.run)),
    Column("", "bytes", lambda one: format_percent(one.share)),
    Column("", "score", lambda one: format_number(one.cell.score.value)),
    Column("95 %", "interval", lambda one: format_interval(one.cell.score.low, one.cell.score.high)),
    Column("", "front", lambda one: "" if one.place is None else str(one.place)),
    Column("", "ties", lambda one: " ".join(map(str, one.ties))),
)
CODECS = (
    Column("at equal bytes", "methods", lambda one: ", ".join(one.labels)),
    Column("", "codec", lambda one: one.codec),
    Column("raw", "budget", lambda one: one.budget),
    Column("raw", "bytes", lambda one: format_percent(one.raw_share)),
    Column("codec", "budget", lambda one: ", ".join(one.coded_budgets)),
    Column("codec", "bytes", lambda one: format_percent(one.coded_share)),
    Column("codec", "- raw", lambda one: format_number(one.change.difference, sign="+")),
    Column("95 %", "interval", lambda one: format_interval(one.change.low, one.change.high, "+")),
    Column("", "n", lambda one: str(one.change.samples)),
)
FORMATS: dict[str, Callable[[Sequence[ByteTable]], str]] = {"markdown": format_markdown_tables, "csv": format_csv}
