"""Format the matrix of scores as text for a terminal, Markdown, CSV, LaTeX or HTML."""

import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape as escape_html
from itertools import groupby

from rich.box import HORIZONTALS
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.analysis.score_matrix import FULL, MatrixCell, ScoreBlock, list_cells
from kvbench.analysis.score_matrix_columns import (
    BEST,
    DEFAULT,
    IN_CSV,
    IN_LATEX,
    TIED,
    MatrixColumn,
    explain,
    split_columns,
)
from kvbench.analysis.score_matrix_order import separate_points
from kvbench.analysis.text_table import (
    NOT_AVAILABLE,
    Column,
    escape_latex,
    escape_markdown,
    format_markdown,
    wrap_texts,
)
from kvbench.store.csv_rows import format_rows
from kvbench.store.runs import count_things, name_some
from kvbench.validation import escape

LEAST_LABEL = 24  # letters that labels have in every table of text
MARKS = (
    f"Marks compare the methods of a budget that hold similar bytes, or read similar shares of the rows. {BEST} has "
    f"the highest score of them. {TIED} cannot be told from it: the marked ones contain the truly best one with 95 % "
    "confidence (simultaneous paired comparisons, Bonferroni). A method that no other one is like has no mark."
)
TEXT_WIDTH = 345  # points of a line in LaTeX's article, the narrowest page of its standard classes
LETTER_WIDTH, EDGE_WIDTH, GAP_WIDTH = 5, 12, 13.5  # points of a letter (at most), of both edges, between two columns
WIDE_LETTER = 6  # points of a letter in a word without narrow ones
ABOUT = ("model.name", "task.name", "question")  # settings that the CSV always shows
Columns = Sequence[MatrixColumn]
Unit = tuple[str, Columns]  # a budget, and what a table shows below it
Row = tuple[str, Mapping[str, MatrixCell] | None]  # label and cells by budget, or a heading above rows


def format_text(blocks: Sequence[ScoreBlock], width: int, columns: Columns = DEFAULT, styled: bool = False) -> str:
    """Return tables for a terminal, one for each block where it is wide enough.

    Budgets and columns that do not fit go into a further table, and long labels are folded. No number is ever cut.

    Args:
        blocks: The blocks.
        width: Characters of a line.
        columns: What to show of each run.
        styled: Write headings and the best of each class in bold, which a terminal shows.
    """
    blocks = separate_points(blocks)
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        height=25,  # without it, rich asks the terminal for both
        force_terminal=styled,
        color_system="standard" if styled else None,
        legacy_windows=False,
        _environ={},
    )
    for heading, block in zip(list_headings(blocks), blocks, strict=True):
        above = [*wrap_texts([heading], width), "=" * min(len(heading), width)] if heading else []
        for line in [*above, *wrap_texts([escape(block.title)], width)]:
            console.print(Text(line, "bold"))
        console.print(Text("\n".join(wrap_texts([describe_samples(block)], width))))
        for units in split_tables(block, columns, width):
            console.print()
            console.print(make_table(block, units, find_label_width(block, width)))
        console.print()
    if blocks:
        console.print(Text("\n".join(wrap_texts(describe_columns(columns), width))))
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def find_label_width(block: ScoreBlock, width: int) -> int:
    """Return the width of the labels in the text of a block: the longest one's, at most a third of a wide line."""
    longest = max(len(indent_label(block, row)) + cell_len(escape(row[0])) for row in list_rows(block))
    return min(max(longest, len(METHOD.title)), max(LEAST_LABEL, width // 3))


def indent_label(block: ScoreBlock, row: Row) -> str:
    """Return the spaces before the label of a row: two below the heading of a section."""
    label, cells = row
    return "  " if cells is not None and block.sections.get(label) else ""


def split_tables(block: ScoreBlock, columns: Columns, width: int) -> list[list[Unit]]:
    """Share the columns of a block out among tables that fit a width.

    Scores of all budgets come before costs. Both stand in one table if that is wide enough.
    """
    room = width - find_label_width(block, width)
    tables: list[list[Unit]] = [[]]
    for piece in split_columns(columns, room - 1, lambda column: column.size + 1):
        group = [(budget, piece) for budget in block.budgets]
        if measure_units([*tables[-1], *group]) > room:
            tables.append([])
        for unit in group:
            if tables[-1] and measure_units([*tables[-1], unit]) > room:
                tables.append([])
            tables[-1].append(unit)
    return [units for units in tables if units]


def measure_units(units: Sequence[Unit]) -> int:
    """Return the width of some budgets' columns, with the gap before each."""
    return sum(2 + max(len(budget), len(join_titles(columns))) for budget, columns in units)


def make_table(block: ScoreBlock, units: Sequence[Unit], label_width: int) -> Table:
    """Return one table of a block's text.

    Args:
        block: The block.
        units: Budgets, each with what the table shows below it.
        label_width: Width of the labels.
    """
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(Text(f"\n{METHOD.title}"), overflow="fold", min_width=label_width, max_width=label_width)
    for budget, columns in units:
        table.add_column(Text(f"{budget}\n{join_titles(columns)}"), no_wrap=True)
    for row in list_rows(block):
        label, cells = row
        if label == FULL and cells is not None:
            table.add_section()
        indent = indent_label(block, row)
        folded = textwrap.wrap(escape(label), label_width, initial_indent=indent, subsequent_indent=f"{indent}  ")
        texts = [Text() if cells is None else make_text(cells.get(budget), columns) for budget, columns in units]
        table.add_row(Text("\n".join(folded)), *texts)
    return table


def make_text(cell: MatrixCell | None, columns: Columns) -> Text:
    """Return the numbers of a cell, with the best of the table's column in bold."""
    if cell is None:
        return Text(f"{NOT_AVAILABLE:{columns[0].layout}}")
    return Text(" ").join(
        Text(column.format(cell), "bold" if column.marked and cell.best else "") for column in columns
    )


def join_titles(columns: Columns) -> str:
    """Return the titles of some columns of a budget, aligned like their numbers."""
    return " ".join(column.title for column in columns)


def format_markdown_matrix(blocks: Sequence[ScoreBlock], columns: Columns = DEFAULT) -> str:
    """Return GitHub tables."""
    blocks = separate_points(blocks)
    lines: list[str] = []
    for heading, block in zip(list_headings(blocks), blocks, strict=True):
        lines += [f"## {escape_markdown(heading)}", ""] if heading else []
        title, about = (escape_markdown(text) for text in (escape(block.title), describe_samples(block)))
        lines += [f"**{title}**", "", about, ""]
        pieces = split_columns(columns, math.inf, lambda column: column.size)
        shown = [METHOD, *(make_column(budget, piece) for budget in block.budgets for piece in pieces)]
        lines += [*format_markdown(shown, list_rows(block)), ""]
    return "\n".join([*lines, *map(escape_markdown, describe_columns(columns))]) + "\n"


def format_csv(blocks: Sequence[ScoreBlock], columns: Columns = IN_CSV, decimals: int | None = None) -> str:
    """Return CSV with a line for each run. Numbers are rounded only if `decimals` is given."""

    def write(value: object) -> object:
        return value if decimals is None or not isinstance(value, float) else round(value, decimals)

    numbers = {name: read for column in columns for name, read in column.numbers.items()}
    if any(column.marked for column in columns):
        numbers |= {"alike": lambda cell: cell.alike, "best": lambda cell: cell.best, "tied": lambda cell: cell.tied}
    names = [name for block in blocks[:1] for name in block.grouped_by if name not in ABOUT]
    rows: list[list[object]] = [
        ["model", "task", "question", "protocol", "average", *names, "method", "budget", *numbers, "hash"]
    ]
    for block, label, cell in list_cells(blocks):
        about = [block.model, block.task, block.question, ", ".join(block.also), block.average]
        groups = [write_setting(cell.run.settings.get(name)) for name in names]
        values = [write(read(cell)) for read in numbers.values()]
        rows.append([*map(escape, about), *groups, escape(label), cell.run.budget_name, *values, cell.run.hash])
    return format_rows(rows)


def write_setting(value: object) -> object:
    """Return a setting for the CSV: a number as it is, a list as JSON, nothing for null."""
    if isinstance(value, list):
        return escape(json.dumps(value))
    return escape(value) if isinstance(value, str) else value


def format_latex(blocks: Sequence[ScoreBlock], columns: Columns = IN_LATEX) -> str:
    """Return tables for LaTeX with booktabs and siunitx.

    A block with more columns or budgets than fit a line of LaTeX's article is split. Long labels are wrapped between
    words, and have at least a third of the line.
    """
    blocks = separate_points(blocks)
    lines = ["% \\usepackage{booktabs}", "% \\usepackage{siunitx}", "% \\sisetup{detect-weight, mode=text}  % bold"]
    for heading, block in zip(list_headings(blocks), blocks, strict=True):
        lines += ["", f"% {heading}"] if heading else []
        labels = [label for label, cells in list_rows(block) if cells is not None]
        word = WIDE_LETTER * max(len(part) for label in labels for part in label.split())
        beside_label = TEXT_WIDTH - EDGE_WIDTH - min(max(word, TEXT_WIDTH / 3), TEXT_WIDTH * 2 / 3)
        pieces = split_columns(columns, beside_label, measure_in_latex)
        widest = max(sum(map(measure_in_latex, piece)) for piece in pieces)
        room = TEXT_WIDTH - EDGE_WIDTH - LETTER_WIDTH * max(map(len, labels))
        first = "l" if room >= widest else f"p{{{TEXT_WIDTH - EDGE_WIDTH - widest:g}pt}}"
        for piece in pieces:
            beside = int(max(room, widest) // sum(map(measure_in_latex, piece)))
            for start in range(0, len(block.budgets), beside):
                lines += format_latex_table(block, block.budgets[start : start + beside], piece, first)
    return "\n".join(lines) + "\n"


def measure_in_latex(column: MatrixColumn) -> float:
    """Return the width of a column in points, at most."""
    return GAP_WIDTH + LETTER_WIDTH * max(column.size, len(column.head))


def format_latex_table(block: ScoreBlock, budgets: Sequence[str], columns: Columns, first: str) -> list[str]:
    """Return the lines of one table.

    Args:
        block: The block.
        budgets: Some of its budgets.
        columns: What the table shows below each of them.
        first: Type of the column of labels.
    """
    caption = escape_latex(f"{block.title}. {describe_samples(block)} {explain(columns)}")
    if any(column.marked for column in columns):
        caption += (
            " Bold: highest score of the methods of a budget that hold similar bytes, or read similar shares of the "
            "rows. \\dag: cannot be told from it (95\\,\\%, simultaneous paired comparisons)."
        )
    many = len(columns)
    heads = [f"\\multicolumn{{{many}}}{{c}}{{{escape_latex(budget)}}}" for budget in budgets]
    rules = [f"\\cmidrule(lr){{{2 + many * at}-{1 + many * (at + 1)}}}" for at in range(len(budgets))]
    titles = [f"{{{escape_latex(column.head)}}}" for column in columns]
    lines = [
        "",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{{first}{''.join(column.latex for column in columns) * len(budgets)}}}",
        "\\toprule",
        " & ".join(["", *heads]) + " \\\\",
        " ".join(rules),
        " & ".join(["Method", *titles * len(budgets)]) + " \\\\",
        "\\midrule",
    ]
    for label, cells in list_rows(block):
        if cells is None:
            across = 1 + many * len(budgets)
            line = f"\\multicolumn{{{across}}}{{l}}{{\\emph{{{escape_latex(label)}}}}} \\\\"
            lines += ["\\addlinespace"] * (lines[-1] != "\\midrule") + [line]
            continue
        parts = [escape_latex(label)]
        for budget in budgets:
            parts += [format_latex_cell(cells.get(budget), column) for column in columns]
        lines += ["\\midrule"] * (label == FULL) + [" & ".join(parts) + " \\\\"]
    return [*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]


def format_latex_cell(cell: MatrixCell | None, column: MatrixColumn) -> str:
    """Return what a column shows of a cell."""
    text = "" if cell is None else escape_latex(column.write(cell))
    if cell is None or not text:
        return "{--}"
    if not column.marked:
        return text
    return ("\\bfseries " if cell.best else "") + text + "\\textsuperscript{\\dag}" * (cell.tied and not cell.best)


def format_html(blocks: Sequence[ScoreBlock], columns: Columns = DEFAULT) -> str:
    """Return HTML tables without styles: scores, then costs."""
    blocks = separate_points(blocks)
    lines = []
    for heading, block in zip(list_headings(blocks), blocks, strict=True):
        lines += [f"<h2>{escape_html(heading)}</h2>"] if heading else []
        title = escape(block.title)
        captions = {False: f"{title}. {describe_samples(block)}", True: f"{title}. Costs."}
        for piece in split_columns(columns, math.inf, lambda column: column.size):
            lines += format_html_table(block, captions[piece[0].cost], piece)
    return "\n".join([*lines, *(f"<p>{escape_html(line)}</p>" for line in describe_columns(columns))]) + "\n"


def format_html_table(block: ScoreBlock, caption: str, columns: Columns) -> list[str]:
    """Return the lines of one table.

    Args:
        block: The block.
        caption: The table's caption.
        columns: What its cells show.
    """
    heads = "".join(f"<th scope='col'>{escape_html(budget)}</th>" for budget in block.budgets)
    shown = ", ".join(column.head for column in columns)
    lines = [
        f"<table><caption>{escape_html(caption)}</caption>",
        f"<thead><tr><th scope='col'>method ({escape_html(shown)})</th>{heads}</tr></thead><tbody>",
    ]
    for label, cells in list_rows(block):
        if cells is None:
            across = f"<th scope='rowgroup' colspan='{1 + len(block.budgets)}'>{escape_html(label)}</th>"
            lines.append(f"</tbody><tbody><tr>{across}</tr>")
            continue
        texts = [" ".join(format_cells(cells.get(budget), columns).split()) for budget in block.budgets]
        row = "".join(f"<td>{escape_html(text)}</td>" for text in texts)
        lines += ["</tbody><tbody>"] if label == FULL and any(block.sections.values()) else []
        lines.append(f"<tr><th scope='row'>{escape_html(escape(label))}</th>{row}</tr>")
    return [*lines, "</tbody></table>"]


FORMATS: dict[str, Callable[..., str]] = {  # each takes blocks, and columns if they are not the usual ones
    "markdown": format_markdown_matrix,
    "csv": format_csv,
    "latex": format_latex,
    "html": format_html,
}


def list_rows(block: ScoreBlock) -> list[Row]:
    """Return the rows of a block, with the headings of its sections between them.

    The full cache comes last, with the same numbers under every budget.
    """
    rows: list[Row] = []
    for heading, labels in groupby(block.rows, lambda label: block.sections.get(label, "")):
        rows += [(heading, None)] if heading else []
        rows += [(label, block.rows[label]) for label in labels]
    return [*rows, (FULL, dict.fromkeys(block.budgets, block.full))]


def list_headings(blocks: Sequence[ScoreBlock]) -> list[str]:
    """Return for each block the heading above it, "" if it stands under the same one as the block before it."""
    above = ["", *(block.heading for block in blocks)]
    return ["" if block.heading == last else block.heading for block, last in zip(blocks, above, strict=False)]


def describe_samples(block: ScoreBlock) -> str:
    """Say which average a block shows, on how many samples, and what limits its meaning."""
    text = f"{block.average[:1].upper()}{block.average[1:]}; {count_samples(block)}."
    if block.failed:
        one = block.failed == 1
        text += (
            f" {count_things(block.failed, 'sample')} failed in some run and {'is' if one else 'are'} left out of all."
        )
    if block.unfinished:
        text += f" Not finished (samples): {name_some(block.unfinished)}; the numbers come from what all runs answered."
    if block.left_out:
        text += f" Left out: {'; '.join(block.left_out)}."
    return escape(" ".join([text, *block.warnings]))


def count_samples(block: ScoreBlock) -> str:
    """Say how many samples the numbers come from, and of how many subtasks.

    If that is not all, name their subtasks and how many samples are planned.
    """
    places = [f"{name} ({len(uids)})" for name, uids in block.paired.places.items()]
    subtasks = count_things(len(places), "subtask")
    if block.samples == block.planned:
        return f"n = {block.samples}{f', of {subtasks}' if len(places) > 1 else ''}"
    return f"n = {block.samples} of {block.planned} planned samples, of {subtasks}: {', '.join(places)}"


def describe_columns(columns: Columns) -> list[str]:
    """Return the legend."""
    return [*([MARKS] if any(column.marked for column in columns) else []), explain(columns)]


def format_cells(cell: MatrixCell | None, columns: Columns) -> str:
    """Return the texts of some columns, each always of the same width."""
    return NOT_AVAILABLE if cell is None else " ".join(column.format(cell) for column in columns)


def make_column(budget: str, columns: Columns) -> Column:
    """Return a budget's column of a table, which shows some columns of the matrix."""
    head = join_titles(columns)
    return Column(
        f"{budget:<{len(head)}}", head, lambda row: "" if row[1] is None else format_cells(row[1].get(budget), columns)
    )


METHOD = Column("", "method", lambda row: row[0])
