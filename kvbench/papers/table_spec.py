"""The papers' tables as data: what conf/papers/ and conf/efficiency/tables.yaml say of rows, columns and cells.

    each        a list of lists of rows or columns: every combination of what is in them
    published   columns of results/published/*.csv (`file`) and the values that a cell's line has in them
    run, of     settings of run.py, and what of that run's records is averaged (kvbench.papers.cell_values)
    measured, over   columns of a line of results/efficiency/<gpu>.csv, and what it is divided by
    scale, digits    of what is measured
    averages    averages that the paper's own cells contradict (kvbench.papers.printed_averages)
    preset      the sweep that fills the table (kvbench.papers.paper_runs); without it the one named after the table
    no_preset   why there is none
    checks      what the notes say of published values and a test recomputes

Table, row and column are merged in this order; null takes a side away. `left_out` says why a table is not emitted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from kvbench.config.paths import CONF, PUBLISHED
from kvbench.papers.experiment_key import merge_settings
from kvbench.validation import SettingError, require_choice

TABLES = CONF / "efficiency" / "tables.yaml"
PAPERS = CONF / "papers"
LEFT_OUT = "left_out"
REMOVABLE_KEYS = ("published", "measured", "run", "over", "of")  # what a part may take away, with null

Lines = Sequence[Mapping[str, str]]
Select = Mapping[str, Any]


def load_specs(paper: str | None = None, number: str | None = None) -> dict[str, Select]:
    """Name -> table, of all papers, of one, or one table alone; SettingError for one that there is not."""
    found = dict(read_tables(TABLES))
    for path in sorted(PAPERS.glob("*.yaml")):
        found |= {f"{path.stem}_{name}": own for name, own in read_tables(path).items() if name != LEFT_OUT}
    if paper is None:
        return found
    require_choice("PAPER", paper, list_papers())
    own = {name.removeprefix(f"{paper}_"): name for name in found if name.startswith(f"{paper}_")}
    if number is not None:
        wanted = f"table{int(number):02d}" if number.isdecimal() else number
        if reason := read_tables(PAPERS / f"{paper}.yaml").get(LEFT_OUT, {}).get(wanted):
            raise SettingError(f"TABLE={number}: is not emitted: {reason}")
        numbers = {name.removeprefix("table").lstrip("0"): name for name in own}
        there = sorted(numbers, key=lambda own: (not own.isdecimal(), own.zfill(3)))
        require_choice("TABLE", wanted.removeprefix("table").lstrip("0"), there)
        own = {wanted: own[wanted]}
    return {name: found[name] for name in own.values()}


def list_papers() -> list[str]:
    return sorted(path.stem for path in PAPERS.glob("*.yaml"))


def read_tables(path: Path) -> dict[str, Select]:
    """A file of tables; x-: shared by tables."""
    return {name: spec for name, spec in read_yaml(path).items() if not name.startswith("x-")}


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of conf/papers/ as it is."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def find_preset(name: str, spec: Select) -> str | None:
    """The preset of the table of this name, `<paper>_table<NN>`; None if no run fills it."""
    paper, number = name.rsplit("_table", 1)
    return None if "no_preset" in spec else spec.get("preset", f"{paper}_table{int(number)}")


def is_cost_table(spec: Select) -> bool:
    """Whether a table is of cost, measured on one machine."""
    return "measured" in spec


def read_published(results: Path, file: str | None) -> Lines:
    if file is None:
        return ()
    own = results / "published" / file
    with (own if own.exists() else PUBLISHED / file).open(newline="", encoding="utf-8") as text:
        return list(DictReader(text))


def expand_each(rows: Iterable[Select]) -> Iterator[Select]:
    """Rows or columns one by one: `each` is a list of lists, and stands for every combination of what is in them."""
    for row in rows:
        if "each" not in row:
            yield row
            continue
        for parts in product(*(list(expand_each(axis)) for axis in row["each"])):
            yield {**merge_parts(*parts), "label": ", ".join(part["label"] for part in parts if part.get("label"))}


def merge_parts(*parts: Select) -> dict[str, Any]:
    """What table, row and column say together of one cell; null says that there is no such side."""
    own: dict[str, Any] = {}
    for part in parts:
        own |= {key: part[key] for key in ("scale", "digits") if key in part}
        for key in REMOVABLE_KEYS:
            if key not in part:
                continue
            if part[key] is None or key in own and own[key] is None and key != "over":
                own[key] = None
            elif key == "run":
                own[key] = merge_settings(own.get(key) or {}, part[key])
            else:
                own[key] = (own.get(key) or {}) | part[key]
    return own


@dataclass(frozen=True)
class PublishedValues:
    """The published values of a table, found by what a cell selects."""

    lines: Lines
    found: dict[tuple[str, ...], dict[tuple, list[Mapping[str, str]]]] = field(default_factory=dict)

    def find_matching(self, select: Select) -> list[Mapping[str, str]]:
        """The lines that have these values in these columns."""
        names = tuple(sorted(select))
        if names not in self.found:
            own: dict[tuple, list[Mapping[str, str]]] = {}
            for row in self.lines:
                own.setdefault(tuple(normalize(row[name]) for name in names), []).append(row)
            self.found[names] = own
        return self.found[names].get(tuple(normalize(select[name]) for name in names), [])

    def value(self, select: Select) -> str:
        """The value as printed, OOM, or nothing."""
        for row in self.find_matching(select):
            return row["value"] or ("OOM" if "out of memory" in row["note"] else "")
        return ""


def matches(row: Mapping[str, str], select: Select) -> bool:
    return all(is_same(row[key], value) for key, value in select.items())


def is_same(text: str, value: object) -> bool:
    return normalize(text) == normalize(value)


def normalize(value: object) -> float | str:
    """Numbers as numbers: 1 and 1.0, 131072 and "131072" are the same."""
    return float(value) if is_number(value) else "" if value is None else str(value)


def is_number(value: object) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
