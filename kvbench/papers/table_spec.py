"""Read the specifications of papers' tables from conf/papers/ and conf/efficiency/tables.yaml.

A specification describes rows, columns and cells with these keys:

    each        a list of lists of rows or columns; stands for all combinations of their entries
    published   columns of results/published/*.csv (`file`) and the values that identify the cell's line
    run, of     settings of run.py, and what is averaged over that run's records (kvbench.papers.cell_values)
    measured    columns of results/efficiency/<gpu>.csv and the values that identify a measurement; `column` names the
                column with its number: value, the median, by default, or mean, or p99
    minus       the same for the measurement to subtract
    over        the same for the measurement to divide by, after `minus`
    line        columns of a study's file and the values that identify a line (kvbench.papers.exhibits)
    scale       factor for measured values
    digits      decimal places of measured values
    averages    averages that contradict the paper's own cells (kvbench.papers.printed_averages)
    preset      the sweep that fills the table (kvbench.papers.paper_runs); by default the one named after the table
    no_preset   why the table has no preset
    plan        the list of conf/efficiency/plan.yaml that measures a table of cost; by default `full`
    checks      statements in the notes about published values, which a test recomputes

A figure of scores or costs is a table with these keys besides (kvbench.report.paper_charts draws it):

    chart       curves, grid, bars or sized
    axes        x, y, value -> titles; log -> axes with a logarithmic scale; free -> y if each plot has its own scale;
                range -> the ends of the scale of colours
    files       the files in results/published/ of the tables with its published values
    panel       true: the label of this part of a row is the title of a plot
    x           the place of a column on the horizontal axis; by default the number that its label is
    area        true: the row states the areas of the marks of the row above it
    spread      true: low and high of a cost are the quartiles of its repeats
    stacked     true: the rows of a column are one bar
    sum         true: other rows add up to this one, or it says more of that sum; it is not drawn

In `published`, a list of values stands for the mean of their lines, and a mapping for the sum of their lines with these
weights. A published value of the full cache has no budget.

The specifications of table, row and column are merged in this order, and null removes a key. The key `exhibits` of a
paper is its list of tables and figures (kvbench.papers.listing).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from itertools import product
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.paths import CONF, PUBLISHED
from kvbench.papers.experiment_key import merge_settings
from kvbench.validation import require_choice

TABLES = CONF / "efficiency" / "tables.yaml"
PAPERS = CONF / "papers"
LISTED = "exhibits"
REMOVABLE_KEYS = ("published", "measured", "run", "minus", "over", "of", "line")  # keys that null removes

Lines = Sequence[Mapping[str, str]]
Select = Mapping[str, Any]


def load_specs(paper: str | None = None) -> dict[str, Select]:
    """Load the specifications of tables.

    Args:
        paper: Load only the tables of this paper.

    Returns:
        Name of a table -> its specification.

    Raises:
        SettingError: There is no such paper.
    """
    if paper is not None:
        require_choice("PAPER", paper, list_papers())
    specs = dict(read_tables(TABLES))
    for path in sorted(PAPERS.glob("*.yaml")):
        specs |= {f"{path.stem}_{name}": spec for name, spec in read_tables(path).items() if name != LISTED}
    return {name: spec for name, spec in specs.items() if paper is None or name.startswith(f"{paper}_")}


def list_papers() -> list[str]:
    """Return the names of all papers in conf/papers/."""
    return sorted(path.stem for path in PAPERS.glob("*.yaml"))


def read_tables(path: Path) -> dict[str, Select]:
    """Read a file of tables. Keys that begin with x- hold parts that several tables share; they are not tables."""
    return {name: spec for name, spec in read_yaml(path).items() if not name.startswith("x-")}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of tables, including keys that begin with x-."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def find_preset(name: str, spec: Select) -> str | None:
    """Return the preset that fills `<paper>_table<NN>` or `<paper>_figure<NN>`; None if no run fills it."""
    usual = re.sub(r"(_table|_figure)0*", r"\1", name)
    return None if "no_preset" in spec else spec.get("preset", usual)


def is_cost_table(spec: Select) -> bool:
    """Return whether a table shows costs, which are measured on one machine."""
    return "measured" in spec


def read_published(results: Path, file: str | None) -> Lines:
    """Read published values from `results`/published/, or from the project's if `results` has no such file."""
    if file is None:
        return ()
    path = results / "published" / file
    with (path if path.exists() else PUBLISHED / file).open(newline="", encoding="utf-8") as text:
        return list(DictReader(text))


def read_printed(results: Path, spec: Select) -> Lines:
    """Read the published values that a table or figure shows."""
    return [line for file in spec.get("files", [spec.get("file")]) for line in read_published(results, file)]


def expand_each(rows: Iterable[Select]) -> Iterator[Select]:
    """Yield rows or columns one by one, with `each` replaced by the combinations that it stands for."""
    for row in rows:
        if "each" not in row:
            yield row
            continue
        for parts in product(*(list(expand_each(axis)) for axis in row["each"])):
            names = {"label": [part.get("label") for part in parts], "panel": [], "series": []}
            for part in parts:
                names["panel"].append(name_panel(part))
                names["series"].append(name_series(part))
            yield {**merge_parts(*parts), **{key: ", ".join(filter(None, labels)) for key, labels in names.items()}}


def name_panel(row: Select) -> str:
    """Return the title of the plot that shows a row of a figure, or "" if the figure is one plot."""
    return str(row["label"] if row.get("panel") is True else row.get("panel") or "")


def name_series(row: Select) -> str:
    """Return the name of a row of a figure within its plot."""
    return str(row.get("series", "" if row.get("panel") is True else row.get("label", "")))


def merge_parts(*parts: Select) -> dict[str, Any]:
    """Merge the specifications of table, row and column for one cell. A key with null is removed for the cell."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= {key: part[key] for key in ("scale", "digits", "spread", "sum") if key in part}
        for key in REMOVABLE_KEYS:
            if key not in part:
                continue
            if part[key] is None or key in merged and merged[key] is None and key not in ("minus", "over"):
                merged[key] = None
            elif key == "run":
                merged[key] = merge_settings(merged.get(key) or {}, part[key])
            else:
                merged[key] = (merged.get(key) or {}) | part[key]
    return merged


@dataclass(frozen=True)
class IndexedLines:
    """Lines of a CSV file, published values or measurements, indexed by the columns that cells select.

    Attributes:
        lines: The lines.
        by_columns: Names of columns -> values in them -> lines; grows with every new choice of columns.
    """

    lines: Lines
    by_columns: dict[tuple[str, ...], dict[tuple[float | str, ...], list[Mapping[str, str]]]] = field(
        default_factory=dict
    )

    def find_matching(self, select: Select) -> list[Mapping[str, str]]:
        """Return the lines with these values in these columns, in their order."""
        names = tuple(sorted(select))
        if names not in self.by_columns:
            by_values: dict[tuple[float | str, ...], list[Mapping[str, str]]] = {}
            for row in self.lines:
                by_values.setdefault(tuple(normalize(row[name]) for name in names), []).append(row)
            self.by_columns[names] = by_values
        return self.by_columns[names].get(tuple(normalize(select[name]) for name in names), [])

    def find_published(self, select: Select, digits: int = 2) -> str:
        """Return the value as printed, "OOM" if the paper ran out of memory, or "" if there is no value.

        Args:
            select: Columns and the values in them.
            digits: Decimal places of a mean or a sum.
        """
        for name, wanted in select.items():
            if isinstance(wanted, list | dict):
                weights = wanted if isinstance(wanted, dict) else dict.fromkeys(wanted, 1 / len(wanted))
                texts = [self.find_published({**select, name: choice}) for choice in weights]
                if not all(map(is_number, texts)):
                    return ""
                return f"{fsum(float(t) * w for t, w in zip(texts, weights.values(), strict=True)):.{digits}f}"
        if select.get("method") == "full":
            select = {name: value for name, value in select.items() if name != "budget"}
        for row in self.find_matching(select):
            return row["value"] or ("OOM" if "out of memory" in row["note"] else "")
        return ""


def normalize(value: object) -> float | str:
    """Return a number or the text of a number as a float, so that 131072 equals "131072". None becomes ""."""
    number = to_number(value)
    return number if number is not None else "" if value is None else str(value)


def is_number(value: object) -> bool:
    """Return whether a value is a number or the text of one."""
    return to_number(value) is not None


def to_number(value: object) -> float | None:
    """Return the float that a value or text stands for; None if it is not a number."""
    if not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except ValueError:
        return None
