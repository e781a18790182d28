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

from kvbench.papers.cell_values import Found, Runs
from kvbench.papers.experiment_key import ExperimentKey, needed
from kvbench.papers.extra_rows import rows_beyond
from kvbench.papers.paper_table import Cell, PaperTable
from kvbench.papers.printed_averages import contradictions
from kvbench.papers.table_spec import (
    Lines,
    Printed,
    Select,
    expanded,
    is_number,
    joined,
    matches,
    preset_of,
    published_values,
    timed_only,
)
from kvbench.store.efficiency_csv import measured, read
from kvbench.validation import writing

PLAIN = {
    "allocator": "uniform", "codec": "raw", "budget_of": "prompt", "block_size": "", "changed": "", "baseline": "none",
    "compile": "", "implementation": "",
}  # fmt: skip  # what a cell says nothing about
SETTING = {
    "measure": "task.measure", "baseline": "task.baseline", "method": "method", "preset": "method.preset",
    "budget": "budget", "block_size": "block_size", "length": "task.length", "batch": "task.batch", "rows": "task.rows",
    "implementation": "task.implementation", "device": "device", "dtype": "dtype",
}  # fmt: skip  # column of a measurement -> setting of run.py
FAILURES = {"out_of_memory": "OOM", "failed": "failed"}


def table(spec: Select, lines: Lines, printed: Lines, runs: Runs | None = None) -> PaperTable:
    """A table over the published values, the measurements of one machine, and the runs of a store."""
    rows, failed, published = [], 0, Printed(printed)
    columns = list(expanded(spec["columns"]))
    for row in expanded(spec["rows"]):
        made = [cell(joined(spec, row, column), lines, published, runs) for column in columns]
        rows.append((row["label"], tuple(own for own, _ in made)))
        failed += sum(count for _, count in made)
    for label, found in rows_beyond(spec, runs) if runs else ():
        made = [shown(own, "", *style(joined(spec, column))) if own else Cell("", "") for own, column in found]
        rows.append((f"{label} (not in the paper)", tuple(made)))
        failed += sum(own.failed for own, _ in found if own)
    notes = [*about(spec, lines), *contradictions(spec)]
    if failed:
        notes.append(f"{failed} samples failed and are left out of their cells.")
    notes += [" ".join(note.split()) for note in spec.get("notes", ())]
    return PaperTable(spec["title"], tuple(column["label"] for column in columns), tuple(rows), tuple(notes))


def about(spec: Select, lines: Lines) -> Iterator[str]:
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


def cell(own: Select, lines: Lines, printed: Printed, runs: Runs | None) -> tuple[Cell, int]:
    """A cell, and how many of its samples failed."""
    published = printed.value(own["published"]) if own.get("published") is not None else ""
    if own.get("run") is not None and runs is not None:
        return scored(own, published, runs)
    return timed(own, published, lines), 0


def scored(own: Select, published: str, runs: Runs) -> tuple[Cell, int]:
    """Of a store's runs."""
    settings = needed(own["run"])
    found = runs.found(ExperimentKey.wanted(settings), own["of"])
    if found is None:
        return Cell(published, "", settings), 0
    return shown(found, published, *style(own)), found.failed


def shown(found: Found, published: str, scale: float, digits: int) -> Cell:
    low, high = ("" if end is None else f"{end * scale:.{digits}f}" for end in (found.low, found.high))
    value, difference = found.value * scale, ""
    if is_number(published):
        difference = f"{round(value - float(published), digits) + 0.0:+.{digits}f}"
    return Cell(published, f"{value:.{digits}f}", None, low, high, difference)


def style(own: Select) -> tuple[float, int]:
    return own.get("scale", 1.0), own.get("digits", 2)


def timed(own: Select, published: str, lines: Lines) -> Cell:
    """Of measurements of cost."""
    scale, digits = style(own)
    select = own.get("measured")
    if select is None:
        return Cell(published, "")
    found = newest(lines, select)
    if isinstance(found, float) and own.get("over") is not None:
        select = {**select, **own["over"]}
        other = newest(lines, select)
        found = found / other if isinstance(other, float) else other
    if found is None:
        return Cell(published, "", measuring(select))
    return Cell(published, found if isinstance(found, str) else f"{found * scale:.{digits}f}")


def measuring(select: Select) -> dict[str, Any]:
    """Settings of the run that makes a measurement."""
    own = {"task": "efficiency", "model": "random", "model.like": select["model"]}
    own |= {SETTING[key]: value for key, value in select.items() if key in SETTING and value not in ("", None)}
    name, _, rest = str(select["quantity"]).partition("_")
    if name in ("e2e", "answer"):
        own["task.new_tokens"] = rest.removesuffix("_ms")
    return own


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


def emit(results: Path, wanted: Mapping[str, Select]) -> list[Path]:
    """Write the tables of the store's runs as <results>/papers/<table>, and those of cost, for every machine that was
    measured on, as <results>/papers/<gpu>/<table>. Returns the paths.
    """
    written, runs = emit_costs(results, wanted, results / "papers"), Runs.read(results)
    for name, spec in wanted.items():
        if timed_only(spec):
            continue
        if preset := preset_of(name, spec):
            spec = {**spec, "notes": [*spec.get("notes", ()), f"All its runs: python run.py -m preset={preset}"]}
        made = table(spec, (), published_values(results, spec.get("file")), runs)
        written += write(results / "papers" / name, made)
    runs.store.tell()
    return written


def emit_costs(results: Path, wanted: Mapping[str, Select], folder: Path) -> list[Path]:
    """Write the tables of cost as <folder>/<gpu>/<table>, for every machine that was measured on. Returns the paths."""
    written = []
    for path in measured(results / "efficiency"):
        lines, device = read(path), "cpu" if path.stem == "cpu" else "gpu"
        for name, spec in wanted.items():
            if timed_only(spec) and spec.get("device", "gpu") == device:
                made = table(spec, lines, published_values(results, spec.get("file")))
                written += write(folder / path.stem / name, made)
    return written


def write(path: Path, made: PaperTable) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    forms: dict[str, Callable[[], str]] = {".md": made.to_markdown, ".csv": made.to_csv, ".tex": made.to_latex}
    for suffix, form in forms.items():
        with writing(path.with_suffix(suffix)):
            path.with_suffix(suffix).write_text(form(), encoding="utf-8")
    return [path.with_suffix(suffix) for suffix in forms]
