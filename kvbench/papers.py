"""The papers' efficiency tables, published and measured side by side: results/efficiency/<gpu>.csv → Markdown, LaTeX.

    python -m kvbench.papers [results]

A table is data (conf/efficiency/tables.yaml): rows and columns, each with what it selects among the published values
(results/published/*.csv, as printed in the papers) and among the measurements; the newest line counts. A measured cell
may be a ratio (`over`: to what else). Where a cell is empty a note has the command that fills it. No torch is needed.
"""

import sys
from collections.abc import Mapping, Sequence
from csv import DictReader
from pathlib import Path
from typing import Any

import yaml

from kvbench.comparison import Cell, Select, Table
from kvbench.measurements import measured, read

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "conf" / "efficiency" / "tables.yaml"
PLAIN = {
    "allocator": "uniform", "codec": "raw", "budget_of": "prompt", "block_size": "", "changed": "", "baseline": "none",
    "compile": "", "implementation": "",
}  # fmt: skip  # what a cell says nothing about
FAILURES = {"out_of_memory": "OOM", "failed": "failed"}

Lines = Sequence[Mapping[str, str]]


def table(spec: Mapping[str, Any], lines: Lines, printed: Lines) -> Table:
    """A table of conf/efficiency/tables.yaml over the measurements of one machine and the published values."""
    rows = []
    for row in spec["rows"]:
        cells = [cell(merged(spec, row, column), lines, printed) for column in spec["columns"]]
        rows.append((row["label"], tuple(cells)))
    notes = [f"Published: {spec['hardware']}."] if spec.get("file") else [f"In the paper: {spec['hardware']}."]
    if lines:
        last = lines[-1]
        notes.append(
            f"Measured: {last['gpu']}, torch {last['torch']}, transformers {last['transformers']}, triton "
            f"{last['triton']}, until {last['date'][:10]}; random weights in the model's shape; medians."
        )
    notes += [" ".join(note.split()) for note in spec.get("notes", ())]
    return Table(spec["title"], tuple(column["label"] for column in spec["columns"]), tuple(rows), tuple(notes))


def merged(spec: Select, row: Select, column: Select) -> dict[str, Any]:
    """What table, row and column say together of one cell; None says that there is no such cell."""
    own: dict[str, Any] = {"scale": 1.0, "digits": 2, "over": None}
    for part in (spec, row, column):
        own |= {key: part[key] for key in ("scale", "digits") if key in part}
        for key in ("published", "measured", "over"):
            if key in part:
                before = own.get(key, {})
                own[key] = (
                    None if part[key] is None or (before is None and key != "over") else (before or {}) | part[key]
                )
    return own


def cell(own: Mapping[str, Any], lines: Lines, printed: Lines) -> Cell:
    def text(value: float) -> str:
        return f"{value * own['scale']:.{own['digits']}f}"

    published, select = "", own.get("measured")
    if own.get("published") is not None:
        published = first_published(printed, own["published"])
    if select is None:
        return Cell(published, "")
    found = newest(lines, select)
    if isinstance(found, float) and own.get("over") is not None:
        select = {**select, **own["over"]}
        other = newest(lines, select)
        found = found / other if isinstance(other, float) else other
    if found is None:
        return Cell(published, "", select)
    return Cell(published, found if isinstance(found, str) else text(found))


def first_published(printed: Lines, select: Select) -> str:
    """The value as printed, OOM, or nothing."""
    for row in printed:
        if matches(row, select):
            return row["value"] or ("OOM" if "out of memory" in row["note"] else "")
    return ""


def newest(lines: Lines, select: Select) -> float | str | None:
    """The newest measurement that fits: its median, what went wrong, or None if there is none."""
    where = {**PLAIN, **{key: value for key, value in select.items() if key != "quantity"}}
    cells: dict[str, list[Mapping[str, str]]] = {}
    for row in lines:
        if matches(row, where):
            cells.setdefault(row["cell"], []).append(row)
    for own in reversed(cells.values()):
        for row in own:
            if row["quantity"] == select["quantity"] and row["value"]:
                return float(row["value"])
        for row in own:
            if row["status"] in FAILURES:
                return FAILURES[row["status"]]
    return None


def matches(row: Mapping[str, str], select: Select) -> bool:
    return all(same(row[key], value) for key, value in select.items())


def same(text: str, value: object) -> bool:
    try:
        return float(text) == float(value)  # 1 and 1.0, 131072 and "131072"
    except (TypeError, ValueError):
        return text == ("" if value is None else str(value))


def emit(results: Path, tables: Path = TABLES) -> list[Path]:
    """All tables of every machine that was measured on: <results>/efficiency/<gpu>/<table>.md and .tex."""
    specs, written = yaml.safe_load(tables.read_text()), []
    for path in measured(results / "efficiency"):
        lines, device = read(path), "cpu" if path.stem == "cpu" else "gpu"
        folder = path.with_suffix("")
        for name, spec in specs.items():
            if name.startswith("x-") or spec.get("device", "gpu") != device:  # x-: shared by tables
                continue
            folder.mkdir(exist_ok=True)
            made = table(spec, lines, published_values(results, spec.get("file")))
            for suffix, text in ((".md", made.to_markdown()), (".tex", made.to_latex())):
                written.append(folder / f"{name}{suffix}")
                written[-1].write_text(text, encoding="utf-8")
    return written


def published_values(results: Path, file: str | None) -> Lines:
    if file is None:
        return ()
    own = results / "published" / file
    with (own if own.exists() else ROOT / "results" / "published" / file).open(newline="", encoding="utf-8") as text:
        return list(DictReader(text))


def main(argv: Sequence[str] | None = None) -> int:
    folder = Path(([*(sys.argv[1:] if argv is None else argv)] or ["results"])[0])
    written = emit(folder)
    print("\n".join(map(str, written)) or f"no measurements in {folder}/efficiency: `make efficiency` makes them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
