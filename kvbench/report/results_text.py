"""Write numbers, lists and paragraphs of the pages of results."""

import re
import textwrap
from collections.abc import Sequence

from kvbench.analysis.result_lines import Line
from kvbench.analysis.text_table import format_interval, format_number, format_percent, format_range
from kvbench.report.results_cells import is_full, is_kept

COMMENT = "<!-- Written by `python -m kvbench dev measured --page`. Edit kvbench/report/{module}.py instead. -->"
# spaces in "95 %" and "3.0 [-1.0, +2.0]" end no line
UNBROKEN = re.compile(r" (?=%)|(?<=\d,) (?=[+-]?\d[^\[\]]*\])|(?<=\d) (?=\[[+-]?\d)")
MARKED = ("#", "|", "<!--", "![")  # begin a paragraph that is not wrapped
KEPT = "✓"  # beside the score of a cell that is shown to lose at most the margin


def format_budget(budget: float | int | str) -> str:
    """Return a budget as a percentage or a number of rows, or the setting that decides in its place as it is."""
    if isinstance(budget, str):
        return budget
    return f"{budget} rows" if isinstance(budget, int) and budget > 1 else f"{100 * budget:g} %"


def format_share(share: float | None) -> str:
    """Return a share as a percentage; nothing if older runs do not say it."""
    return "" if share is None else format_percent(share)


def format_score(line: Line, full: Line, margin: float) -> str:
    """Return the score of a cell, with a mark if it is shown to lose at most the margin."""
    score = format_number(line["score"])
    return f"{score} {KEPT}" if not is_full(line) and is_kept(line, full, margin) else score


def format_score_interval(line: Line) -> str:
    """Return the score of a cell with its 95 % interval."""
    return f"{format_number(line['score'])} {format_interval(line['score_low'], line['score_high'])}"


def format_ranks(line: Line) -> str:
    """Return the ranks that a cell may have in its class of bytes; nothing if it is alone."""
    if line["rank_first"] is None or line["rank_of"] == 1:
        return ""
    return f"{format_range((line['rank_first'], line['rank_last']))} of {line['rank_of']}"


def format_change(line: Line, name: str) -> str:
    """Return a gain of a cell, or its "difference" from the full cache, with the interval; nothing if it has none."""
    if line[name] is None:
        return ""
    low, high = ("low", "high") if name == "difference" else (f"{name}_low", f"{name}_high")
    return format_difference(line[name], line[low], line[high])


def format_difference(value: float, low: float | None, high: float | None) -> str:
    """Return a difference with its interval."""
    return f"{format_number(value, sign='+')} {format_interval(low, high, sign='+')}"


def format_divergence(line: Line) -> str:
    """Return the divergence from the full cache; nothing for a cell that has none."""
    return "" if line["kl"] is None or is_full(line) else format_number(line["kl"], 3)


def name_cell(line: Line) -> str:
    """Return the label of a cell as code."""
    return f"`{line['label']}`"


def label_with_budget(line: Line) -> str:
    """Return the label of a cell and its budget."""
    return f"{line['label']}, {format_budget(line['budget'])}"


def say_percent(share: float) -> str:
    """Return a share as a percentage in a sentence."""
    return f"{round(100 * share, 1):g} %"


def wrap(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most 120 characters, those after the first indented."""
    joined = UNBROKEN.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.fill(joined, 120, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def wrap_paragraphs(text: str) -> str:
    """Return a text with each of its paragraphs wrapped. Headings, tables, pictures and comments stay as they are."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith(MARKED) else wrap(part) for part in paragraphs) + "\n"


def join_words(words: Sequence[str], last: str) -> str:
    """Return words as an English list."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def say_lose(count: int, of: str = "") -> str:
    """Return a number of cells, which cells they are of, with a space before it, and the verb."""
    return f"{count}{of} {'loses' if count == 1 else 'lose'}"


def describe_losses(count: int, kept: int, less: int, bound: float, which: str = "") -> str:
    """Return a sentence about how many cells lose at most so many points, and about the others.

    Args:
        count: Number of cells.
        kept: How many are shown to lose at most `bound` points.
        less: How many of the others are shown to score less.
        bound: The points.
        which: What follows the number of cells, with a space before it.
    """
    if bound == 0:
        return "The full cache scores 0, so no cell can lose anything."
    undecided = count - kept - less
    counts = {"shown to score less": less, "undecided": undecided}
    others = [f"{some} {'is' if some == 1 else 'are'} {what}" for what, some in counts.items() if some]
    text = f"{kept or 'None'} of {count} cells{which} {'is' if kept < 2 else 'are'} shown to lose at most "
    text += f"{bound:.1f} points"
    return f"{text}{'; of the others, ' if kept else ': '}{' and '.join(others)}." if others else f"{text}."
