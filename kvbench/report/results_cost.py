"""Describe what methods cost in time, for docs/results-cost.md and docs/which-method.md.

Tables come from `kvbench efficiency` (results/efficiency/<machine>), and ratios of prefills from `kvbench dev
bench-methods`. Only rows that ran are shown: a ratio of a row that failed would say nothing.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kvbench.analysis.text_table import Column, format_markdown
from kvbench.report.results_text import join_words

TABLES = {  # name of a table's file -> its title, and its columns that the page shows
    "decoding_methods": (
        "A token, Llama-3.1-8B shape",
        ("32k ms", "32k mean ms", "32k p99 ms", "32k over full", "128k ms", "128k over full"),
    ),
    "prefill_full": (
        "The first token, Llama-3.1-8B shape",
        ("32k s", "32k over full", "128k s", "128k over full"),
    ),
    "decoding_codes": (
        "A token over rows in a codec, Llama-3.1-8B shape",
        ("128k full mean ms", "128k full p99 ms", "128k full mean over raw", "32k SnapKV 20 % mean over raw"),
    ),
}
RATIO = "128k over full"  # the column by which tokens are compared
SLOW = 2.0  # a prefill that takes so many times as long as the full cache's is named
Row = dict[str, str]


@dataclass(frozen=True)
class CostTable:
    """A table of times of one machine.

    Attributes:
        machine: Name of the folder.
        name: Key of TABLES.
        rows: Rows that ran, each with its name under "" and numbers by column; those that did not run are empty.
    """

    machine: str
    name: str
    rows: Sequence[Row]


def read_cost_tables(folder: Path) -> list[CostTable]:
    """Return the tables of all machines in a folder such as results/efficiency, as far as there are any."""
    tables = []
    for name, (_, columns) in TABLES.items():
        for path in sorted(folder.glob(f"*/{name}.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                rows = [read_row(line, columns) for line in csv.DictReader(file)]
            ran = [row for row in rows if any(row[column] for column in columns)]
            if ran:
                tables.append(CostTable(path.parent.name, name, ran))
    return tables


def read_prefill_ratios(folder: Path) -> dict[str, float]:
    """Return method -> the time of its prefill over the full cache's, from prefill-1.csv of `bench-methods` if any."""
    path = folder / "prefill-1.csv"
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["preset"], line["codec"]) == ("", "raw")]
    return {line["method"]: float(line["ratio"]) for line in lines if line["allocator"] == "uniform" and line["ratio"]}


def read_row(line: Row, columns: Sequence[str]) -> Row:
    """Return the name of a row and its measured numbers; empty texts in the place of what is none."""
    values = {column: line.get(f"{column} measured") or "" for column in columns}
    return {"": line.get("") or ""} | {column: text if is_number(text) else "" for column, text in values.items()}


def is_number(text: str) -> bool:
    """Return whether a text spells a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_costs(tables: Sequence[CostTable]) -> list[str]:
    """Return the tables as sections of the page."""
    text: list[str] = []
    for table in tables:
        title, columns = TABLES[table.name]
        shown = [column for column in columns if any(row[column] for row in table.rows)]
        listed = [Column("cell", "", itemgetter(""))]
        listed += [Column(name, "", itemgetter(name)) for name in shown]
        text += [f"## {title}, {table.machine}", "", *format_markdown(listed, table.rows), ""]
    return text


def describe_slow(prefill: Mapping[str, float], tables: Sequence[CostTable] = ()) -> str:
    """Return sentences about the methods whose prefill takes SLOW times the full cache's or more, if there are any.

    Args:
        prefill: Method -> the time of its prefill over the full cache's, on a CPU.
        tables: Tables of times, which may have these methods on a GPU.
    """
    names = [name for name, ratio in sorted(prefill.items()) if ratio >= SLOW]
    slow = [f"{prefill[name]:.1f} times as long as the full cache's with {name}" for name in names]
    if not slow:
        return ""
    cells = [row[""].lower() for table in tables if table.name == "prefill_full" for row in table.rows]
    untimed = [name for name in names if not any(cell.startswith(name) for cell in cells)]
    gpu = f" On a GPU, the first token of {join_words(untimed, 'and')} was not timed yet." if untimed else ""
    return (
        f" On one thread of a CPU, a prefill of 4,096 tokens takes {join_words(slow, 'and')} "
        f"([On a CPU](gpu-and-efficiency.md#on-a-cpu)).{gpu}"
    )


def find_fastest(tables: Sequence[CostTable], reach: float = 0.02) -> tuple[CostTable, list[Row]] | None:
    """Return the table of decoding in which most rows ran, and its rows whose RATIO is within `reach` of the least."""
    decoding = {
        table.machine: (table, [row for row in table.rows if row.get(RATIO)])
        for table in tables
        if table.name == "decoding_methods"
    }
    table, ran = max(decoding.values(), key=lambda entry: len(entry[1]), default=(None, []))
    if table is None or not ran:
        return None
    most = min(float(row[RATIO]) for row in ran) + reach
    fastest = [row for row in ran if float(row[RATIO]) <= most]
    return table, sorted(fastest, key=lambda row: (float(row[RATIO]), row[""]))
