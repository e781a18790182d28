"""The tables of the papers, published and measured side by side, as Markdown, CSV and LaTeX.

A table is data (kvbench.papers.table_spec). Beside what a paper printed stands what the store's run that answers the
same question says (kvbench.papers.cell_values), or what task=efficiency measured of cost on one machine, the newest
line of it; never a time of a record, whose prompt may have been read for several cells of a sweep at once. Rows for
what else the store holds of the same protocol follow. Where a cell is empty a note has the command that fills it. No
torch is needed.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.papers.cell_values import CellValue, RunIndex
from kvbench.papers.experiment_key import ExperimentKey, drop_unused
from kvbench.papers.extra_rows import find_extra_rows
from kvbench.papers.paper_table import PaperTable, TableCell
from kvbench.papers.printed_averages import describe_contradictions
from kvbench.papers.table_spec import (
    Lines,
    PublishedValues,
    Select,
    expand_each,
    find_preset,
    is_cost_table,
    is_number,
    matches,
    merge_parts,
    read_published,
)
from kvbench.store.efficiency_csv import find_measurements, read_lines
from kvbench.validation import name_file_in_errors

DEFAULTS = {
    "allocator": "uniform", "codec": "raw", "budget_of": "prompt", "block_size": "", "changed": "", "baseline": "none",
    "compile": "", "implementation": "",
}  # fmt: skip  # what a cell says nothing about
SETTING_OF_COLUMN = {
    "measure": "task.measure", "baseline": "task.baseline", "method": "method", "preset": "method.preset",
    "budget": "budget", "block_size": "block_size", "length": "task.length", "batch": "task.batch", "rows": "task.rows",
    "implementation": "task.implementation", "device": "device", "dtype": "dtype",
}  # fmt: skip  # column of a measurement -> setting of run.py
FAILURES = {"out_of_memory": "OOM", "failed": "failed"}


def build_table(spec: Select, lines: Lines, printed: Lines, runs: RunIndex | None = None) -> PaperTable:
    """A table over the published values, the measurements of one machine, and the runs of a store."""
    rows, failed, published = [], 0, PublishedValues(printed)
    columns = list(expand_each(spec["columns"]))
    for row in expand_each(spec["rows"]):
        made = [fill_cell(merge_parts(spec, row, column), lines, published, runs) for column in columns]
        rows.append((row["label"], tuple(own for own, _ in made)))
        failed += sum(count for _, count in made)
    for label, found in find_extra_rows(spec, runs) if runs else ():
        made = [
            format_cell(own, "", *get_format(merge_parts(spec, column))) if own else TableCell("", "")
            for own, column in found
        ]
        rows.append((f"{label} (not in the paper)", tuple(made)))
        failed += sum(own.failed for own, _ in found if own)
    notes = [*describe_origin(spec, lines), *describe_contradictions(spec)]
    if failed:
        notes.append(f"{failed} samples failed and are left out of their cells.")
    notes += [" ".join(note.split()) for note in spec.get("notes", ())]
    return PaperTable(spec["title"], tuple(column["label"] for column in columns), tuple(rows), tuple(notes))


def describe_origin(spec: Select, lines: Lines) -> Iterator[str]:
    """What was published and what was measured."""
    if "hardware" in spec:
        yield f"{'Published' if spec.get('file') else 'In the paper'}: {spec['hardware']}."
    if lines:
        last = lines[-1]
        yield (
            f"Measured: {last['gpu']}, torch {last['torch']}, transformers {last['transformers']}, triton "
            f"{last['triton']}, until {last['date'][:10]}; random weights in the model's shape; medians; "
            "every prompt read for one cell alone."
        )


def fill_cell(own: Select, lines: Lines, printed: PublishedValues, runs: RunIndex | None) -> tuple[TableCell, int]:
    """A cell, and how many of its samples failed."""
    published = printed.value(own["published"]) if own.get("published") is not None else ""
    if own.get("run") is not None and runs is not None:
        return fill_from_runs(own, published, runs)
    return fill_from_measurements(own, published, lines), 0


def fill_from_runs(own: Select, published: str, runs: RunIndex) -> tuple[TableCell, int]:
    """Of a store's runs."""
    settings = drop_unused(own["run"])
    found = runs.find_value(ExperimentKey.from_settings(settings), own["of"])
    if found is None:
        return TableCell(published, "", settings), 0
    return format_cell(found, published, *get_format(own)), found.failed


def format_cell(found: CellValue, published: str, scale: float, digits: int) -> TableCell:
    low, high = ("" if end is None else f"{end * scale:.{digits}f}" for end in (found.low, found.high))
    value, difference = found.value * scale, ""
    if is_number(published):
        difference = f"{round(value - float(published), digits) + 0.0:+.{digits}f}"
    return TableCell(published, f"{value:.{digits}f}", None, low, high, difference)


def get_format(own: Select) -> tuple[float, int]:
    return own.get("scale", 1.0), own.get("digits", 2)


def fill_from_measurements(own: Select, published: str, lines: Lines) -> TableCell:
    """Of measurements of cost."""
    scale, digits = get_format(own)
    select = own.get("measured")
    if select is None:
        return TableCell(published, "")
    found = find_newest_value(lines, select)
    if isinstance(found, float) and own.get("over") is not None:
        select = {**select, **own["over"]}
        other = find_newest_value(lines, select)
        found = found / other if isinstance(other, float) else other
    if found is None:
        return TableCell(published, "", make_run_settings(select))
    return TableCell(published, found if isinstance(found, str) else f"{found * scale:.{digits}f}")


def make_run_settings(select: Select) -> dict[str, Any]:
    """Settings of the run that makes a measurement."""
    own = {"task": "efficiency", "model": "random", "model.like": select["model"]}
    own |= {
        SETTING_OF_COLUMN[key]: value
        for key, value in select.items()
        if key in SETTING_OF_COLUMN and value not in ("", None)
    }
    name, _, rest = str(select["quantity"]).partition("_")
    if name in ("e2e", "answer"):
        own["task.new_tokens"] = rest.removesuffix("_ms")
    return own


def find_newest_value(lines: Lines, select: Select) -> float | str | None:
    """The newest measurement that fits: its median, what went wrong, or None if there is none."""
    where = {**DEFAULTS, **{key: value for key, value in select.items() if key != "quantity"}}
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


def write_tables(results: Path, wanted: Mapping[str, Select]) -> list[Path]:
    """Write the tables of the store's runs as <results>/papers/<table>, and those of cost, for every machine that was
    measured on, as <results>/papers/<gpu>/<table>. Returns the paths.
    """
    written, runs = write_cost_tables(results, wanted, results / "papers"), RunIndex.read(results)
    for name, spec in wanted.items():
        if is_cost_table(spec):
            continue
        if preset := find_preset(name, spec):
            spec = {**spec, "notes": [*spec.get("notes", ()), f"All its runs: python run.py -m preset={preset}"]}
        made = build_table(spec, (), read_published(results, spec.get("file")), runs)
        written += write_table(results / "papers" / name, made)
    runs.store.print_damage()
    return written


def write_cost_tables(results: Path, wanted: Mapping[str, Select], folder: Path) -> list[Path]:
    """Write the tables of cost as <folder>/<gpu>/<table>, for every machine that was measured on. Returns the paths."""
    written = []
    for path in find_measurements(results / "efficiency"):
        lines, device = read_lines(path), "cpu" if path.stem == "cpu" else "gpu"
        for name, spec in wanted.items():
            if is_cost_table(spec) and spec.get("device", "gpu") == device:
                made = build_table(spec, lines, read_published(results, spec.get("file")))
                written += write_table(folder / path.stem / name, made)
    return written


def write_table(path: Path, made: PaperTable) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    forms: dict[str, Callable[[], str]] = {".md": made.to_markdown, ".csv": made.to_csv, ".tex": made.to_latex}
    for suffix, form in forms.items():
        with name_file_in_errors(path.with_suffix(suffix)):
            path.with_suffix(suffix).write_text(form(), encoding="utf-8")
    return [path.with_suffix(suffix) for suffix in forms]
