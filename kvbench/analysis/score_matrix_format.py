"""Format the matrix of scores as text for a terminal, Markdown, CSV, LaTeX or HTML."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape as escape_html
from typing import Any

from kvbench.analysis.score_matrix import FULL, MatrixCell, ScoreBlock, list_cells
from kvbench.analysis.text_table import (
    NOT_AVAILABLE,
    Column,
    escape_latex,
    escape_markdown,
    format_interval,
    format_markdown,
    format_number,
    format_percent,
    format_table,
    wrap_texts,
)
from kvbench.store.runs import name_some
from kvbench.validation import escape

BEST, TIED = "*", "†"
LEGEND = (
    f"{BEST} the highest score of a column. {TIED} cannot be told from the best: in each column, the marked methods "
    "contain the truly best one with 95 % confidence (simultaneous paired comparisons, Bonferroni).",
    "diff: method - full cache in points, with its 95 % interval, paired on the same samples. bytes, rows: shares of "
    "the full cache's bytes held and of its rows attended per decoded token. limit: answers that ended at the length "
    "limit.",
)
TEXT_WIDTH = 345  # points of a line in LaTeX's article, the narrowest page of its standard classes
LETTER_WIDTH, BUDGET_WIDTH, EDGE_WIDTH = (
    5,
    87,
    12,
)  # points of a letter (at most), of a budget's two columns, of the edges
Row = tuple[str, Mapping[str, MatrixCell]]


def format_text(blocks: Sequence[ScoreBlock], width: int) -> str:
    """Return plain aligned text. Budgets that do not fit `width` go into a further block."""
    lines: list[str] = []
    for block in blocks:
        lines += wrap_texts([escape(block.title), describe_samples(block)], width)
        lines += format_table([METHOD, *(make_score_column(own) for own in block.budgets)], list_rows(block), 1, width)
        lines += format_table([METHOD, *(make_cost_column(own) for own in block.budgets)], list_rows(block), 1, width)
        lines.append("")
    return "\n".join([*lines, *(wrap_texts(LEGEND, width) if blocks else [])]) + "\n"


def format_markdown_matrix(blocks: Sequence[ScoreBlock]) -> str:
    """Return GitHub tables."""
    lines: list[str] = []
    for block in blocks:
        title, about = (escape_markdown(own) for own in (escape(block.title), describe_samples(block)))
        lines += [f"**{title}**", "", about, ""]
        columns = [METHOD]
        for budget in block.budgets:
            columns += [make_score_column(budget), make_cost_column(budget)]
        lines += [*format_markdown(columns, list_rows(block)), ""]
    return "\n".join([*lines, *map(escape_markdown, LEGEND)]) + "\n"


def format_csv(blocks: Sequence[ScoreBlock], decimals: int | None = None) -> str:
    """Return CSV with a line for each run. Numbers are rounded only if `decimals` is given."""

    def write(value: object) -> object:
        return value if decimals is None or not isinstance(value, float) else round(value, decimals)

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "task", "question", "protocol", "average", "method", "budget", *NUMBERS, "hash"])
    for block, label, cell in list_cells(blocks):
        about = [block.model, block.task, block.question, ", ".join(block.also), block.average, label]
        numbers = [write(read(cell)) for read in NUMBERS.values()]
        writer.writerow([*map(escape, about), cell.run.value["budget"], *numbers, cell.run.hash])
    return text.getvalue()


def format_latex(blocks: Sequence[ScoreBlock]) -> str:
    """Return tables for LaTeX with booktabs and siunitx.

    A block with more budgets than fit a line of LaTeX's article is split. Long labels are wrapped.
    """
    lines = ["% \\usepackage{booktabs}", "% \\usepackage{siunitx}", "% \\sisetup{detect-weight, mode=text}  % bold"]
    for block in blocks:
        left = TEXT_WIDTH - EDGE_WIDTH - LETTER_WIDTH * max(len(label) for label, _ in list_rows(block))
        beside = max(1, left // BUDGET_WIDTH)
        first = "l" if left >= BUDGET_WIDTH else f"p{{{TEXT_WIDTH - EDGE_WIDTH - BUDGET_WIDTH}pt}}"
        for start in range(0, max(len(block.budgets), 1), beside):
            lines += format_latex_table(block, block.budgets[start : start + beside], first)
    return "\n".join(lines) + "\n"


def format_latex_table(block: ScoreBlock, budgets: Sequence[str], first: str) -> list[str]:
    """Return the lines of one table.

    Args:
        block: The block.
        budgets: Some of its budgets.
        first: Type of the column of labels.
    """
    number = "S[table-format=3.1, table-space-text-post={\\textsuperscript{\\dag}}]"
    caption = escape_latex(
        f"{block.title}. {describe_samples(block)} Each cell: score and difference from the full cache in points."
    )
    note = "Bold: highest score. \\dag: cannot be told from it (95\\,\\%, simultaneous paired comparisons)."
    heads = [f"\\multicolumn{{2}}{{c}}{{{escape_latex(own)}}}" for own in budgets]
    rules = [f"\\cmidrule(lr){{{2 + 2 * at}-{3 + 2 * at}}}" for at in range(len(budgets))]
    lines = [
        "",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{caption} {note}}}",
        f"\\begin{{tabular}}{{{first}{(number + 'S[table-format=+3.1]') * len(budgets)}}}",
        "\\toprule",
        " & ".join(["", *heads]) + " \\\\",
        " ".join(rules),
        " & ".join(["Method", *["{score}", "{diff}"] * len(budgets)]) + " \\\\",
        "\\midrule",
    ]
    for label, cells in list_rows(block):
        parts = [escape_latex(label)]
        for budget in budgets:
            parts += format_latex_cell(cells.get(budget))
        lines += ["\\midrule"] * (label == FULL) + [" & ".join(parts) + " \\\\"]
    return [*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]


def format_latex_cell(cell: MatrixCell | None) -> list[str]:
    """Return the score and the difference of a cell."""
    if cell is None:
        return ["{--}", "{--}"]
    score = format_number(cell.score.value)
    mark = "\\textsuperscript{\\dag}" if cell.tied and not cell.best else ""
    difference = "{--}" if cell.difference is None else format_number(cell.difference.difference, sign="+")
    return [("\\bfseries " if cell.best else "") + score + mark, difference]


def format_html(blocks: Sequence[ScoreBlock]) -> str:
    """Return HTML tables without styles: scores, then costs."""
    lines = []
    for block in blocks:
        about = escape(f"{block.title}. {describe_samples(block)}")
        lines += format_html_table(block, about, "score, diff [95 %]", format_score)
        lines += format_html_table(block, f"{escape(block.title)}. Costs.", "bytes, rows, limit", format_costs)
    return "\n".join([*lines, *(f"<p>{escape_html(own)}</p>" for own in LEGEND)]) + "\n"


def format_html_table(
    block: ScoreBlock, caption: str, shown: str, format_cell: Callable[[MatrixCell | None], str]
) -> list[str]:
    """Return the lines of one table.

    Args:
        block: The block.
        caption: The table's caption.
        shown: What its cells show.
        format_cell: Function that returns the text of a cell.
    """
    heads = "".join(f"<th scope='col'>{escape_html(own)}</th>" for own in block.budgets)
    lines = [
        f"<table><caption>{escape_html(caption)}</caption>",
        f"<thead><tr><th scope='col'>method ({escape_html(shown)})</th>{heads}</tr></thead><tbody>",
    ]
    for label, cells in list_rows(block):
        texts = [" ".join(format_cell(cells.get(own)).split()) for own in block.budgets]
        row = "".join(f"<td>{escape_html(own)}</td>" for own in texts)
        lines.append(f"<tr><th scope='row'>{escape_html(escape(label))}</th>{row}</tr>")
    return [*lines, "</tbody></table>"]


FORMATS: dict[str, Callable[[Sequence[ScoreBlock]], str]] = {
    "markdown": format_markdown_matrix,
    "csv": format_csv,
    "latex": format_latex,
    "html": format_html,
}


def list_rows(block: ScoreBlock) -> list[Row]:
    """Return the rows of a block. The full cache comes last, with the same numbers under every budget."""
    return [*block.rows.items(), (FULL, dict.fromkeys(block.budgets, block.full))]


def describe_samples(block: ScoreBlock) -> str:
    """Say which average a block shows, on how many samples, and what limits its meaning."""
    count = f"{block.samples}" if block.samples == block.total else f"{block.samples} of {block.total}"
    text = f"{block.average[:1].upper()}{block.average[1:]}; n = {count}."
    if block.failed:
        text += f" {block.failed} samples failed in some run and are left out of all."
    if block.unfinished:
        text += f" Not finished (samples): {name_some(block.unfinished)}; the numbers come from what all runs answered."
    if block.left_out:
        text += f" Left out: {'; '.join(block.left_out)}."
    return escape(" ".join([text, *block.warnings]))


def format_score(cell: MatrixCell | None) -> str:
    """Return score, mark, difference and interval of a cell, always of the same width."""
    if cell is None:
        return NOT_AVAILABLE
    mark = BEST if cell.best else TIED if cell.tied else " "
    own = cell.difference
    change = "" if own is None else format_number(own.difference, sign="+")
    ends = "" if own is None else format_interval(own.low, own.high, "+")
    return f"{format_number(cell.score.value):>5}{mark} {change:>6} {ends:<16}"


def format_costs(cell: MatrixCell | None) -> str:
    """Return the shares of bytes, rows and answers at the length limit of a cell."""
    if cell is None:
        return NOT_AVAILABLE
    return "  ".join(f"{format_percent(own):>6}" for own in (cell.held, cell.attended, cell.at_limit))


def make_score_column(budget: str) -> Column:
    """Return the column of a budget's scores."""
    head = f"{'score':>5}  {'diff':>6} {'[95 %]':<16}"
    return Column(f"{budget:<{len(head)}}", head, lambda row: format_score(row[1].get(budget)))


def make_cost_column(budget: str) -> Column:
    """Return the column of a budget's costs."""
    head = "  ".join(f"{name:>6}" for name in ("bytes", "rows", "limit"))
    return Column(f"{budget:<{len(head)}}", head, lambda row: format_costs(row[1].get(budget)))


def _read_end(name: str) -> Callable[[MatrixCell], Any]:
    return lambda cell: getattr(cell.difference, name, None)


METHOD = Column("", "method", lambda row: row[0])
NUMBERS: dict[str, Callable[[MatrixCell], Any]] = {  # column of the CSV -> its number
    "score": lambda cell: cell.score.value,
    "score_low": lambda cell: cell.score.low,
    "score_high": lambda cell: cell.score.high,
    **{name: _read_end(name) for name in ("difference", "low", "high", "lost", "gained")},
    "n": lambda cell: cell.score.samples,
    "bytes_held": lambda cell: cell.held,
    "rows_attended": lambda cell: cell.attended,
    "at_limit": lambda cell: cell.at_limit,
    "best": lambda cell: cell.best,
    "tied": lambda cell: cell.tied,
}
