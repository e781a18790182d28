"""Build papers' tables with published and measured values side by side, and write them as Markdown, CSV and LaTeX.

kvbench.papers.table_spec describes the tables. A measured score comes from the store's run that answers the same
question (kvbench.papers.cell_values), and a number of a study from the line of its file that the cell selects. A
measured cost comes from the newest matching measurement of task=efficiency on one machine. Times in records are never
used, because several cells of a sweep may have shared the prefill of a prompt. Rows for other runs with the same
protocol follow. If a cell is empty, a note gives the command that fills it. This module does not import torch.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import sub, truediv
from pathlib import Path
from typing import Any

from kvbench.analysis.text_table import format_number
from kvbench.papers.cell_values import CellValue, RunIndex
from kvbench.papers.exhibits import select_lines
from kvbench.papers.experiment_key import ExperimentKey, drop_unused
from kvbench.papers.extra_rows import find_extra_rows
from kvbench.papers.paper_table import PaperTable, TableCell
from kvbench.papers.printed_averages import describe_contradictions
from kvbench.papers.table_spec import (
    IndexedLines,
    Lines,
    Select,
    expand_each,
    find_preset,
    is_cost_table,
    is_number,
    merge_parts,
    read_printed,
)
from kvbench.store.efficiency_csv import INTERVALS, find_measurements, read_lines
from kvbench.store.runs import count_things
from kvbench.store.study_lines import Line as StudyLine
from kvbench.validation import name_file_in_errors

DEFAULTS = {
    "allocator": "uniform", "codec": "raw", "budget_of": "prompt", "block_size": "", "changed": "", "baseline": "none",
    "compile": "", "implementation": "",
}  # fmt: skip  # values of columns that a cell does not mention
SETTING_OF_COLUMN = {
    "measure": "task.measure", "baseline": "task.baseline", "method": "method", "preset": "method.preset",
    "allocator": "allocator", "codec": "codec",
    "budget": "budget", "block_size": "block_size", "length": "task.length", "batch": "task.batch", "rows": "task.rows",
    "implementation": "task.implementation", "device": "device", "dtype": "dtype",
}  # fmt: skip  # column of a measurement -> setting of run.py
Draw = Callable[[Path, Select, PaperTable], bool]  # draws a figure at a path without suffix; returns whether it did

FAILURES = {"out_of_memory": "OOM", "failed": "failed"}
OVER_INTERVALS = ("mean", "p99")  # columns whose numbers count only if enough tokens were timed
FEW_TOKENS = (
    f"A mean or 99th percentile is missing (–) where an answer covers fewer than {INTERVALS} intervals of 128 tokens, "
    "or of what the method or codec does more rarely, or where the measurement does not say how many."
)
RATE_OF_MEDIAN = "Tokens in a second are the median over steps in measurements made before whole answers were counted."
NOT_MEASURED = "A ratio is missing (–) where the measurement beside it lacks the number to divide by."


def build_table(
    spec: Select,
    lines: Lines | IndexedLines,
    printed: Lines,
    runs: RunIndex | None = None,
    study: Sequence[StudyLine] = (),
) -> PaperTable:
    """Build a table.

    Args:
        spec: The table's specification (kvbench.papers.table_spec).
        lines: Measurements of one machine.
        printed: The published values.
        runs: Runs of a store.
        study: Lines of the table's study.
    """
    rows, failed, published = [], 0, IndexedLines(printed)
    measured = lines if isinstance(lines, IndexedLines) else IndexedLines(lines)
    columns = list(expand_each(spec["columns"]))
    for row in expand_each(spec["rows"]):
        made = [fill_cell(merge_parts(spec, row, column), measured, published, runs, study) for column in columns]
        rows.append((row["label"], tuple(cell for cell, _ in made)))
        failed += sum(count for _, count in made)
    for label, extra_cells in find_extra_rows(spec, runs) if runs else ():
        cells = tuple(
            format_cell(cell_value, "", *get_format(merge_parts(spec, column))) if cell_value else TableCell("", "")
            for cell_value, column in extra_cells
        )
        rows.append((f"{label} (not in the paper)", cells))
        failed += sum(cell_value.failed for cell_value, _ in extra_cells if cell_value)
    notes = [*describe_origin(spec, measured.lines), *describe_contradictions(spec)]
    if failed:
        cells_leave = "its cell leaves it" if failed == 1 else "their cells leave them"
        notes.append(f"{count_things(failed, 'sample')} failed; {cells_leave} out.")
    notes += dict.fromkeys(f"{label}: {cell.reason}" for label, cells in rows for cell in cells if cell.reason)
    notes += dict.fromkeys(cell.remark for _, cells in rows for cell in cells if cell.remark)
    notes += [" ".join(note.split()) for note in spec.get("notes", ())]
    return PaperTable(spec["title"], tuple(column["label"] for column in columns), tuple(rows), tuple(notes))


def describe_origin(spec: Select, lines: Lines) -> Iterator[str]:
    """Yield notes about the hardware and versions behind published and measured values."""
    if "hardware" in spec:
        yield f"{'Published' if {'file', 'files'} & spec.keys() else 'In the paper'}: {spec['hardware']}."
    if lines:
        last, quartiles = lines[-1], ", in brackets the quartiles of repeats" if is_spread(spec) else ""
        yield (
            f"Measured: {last['gpu']}, torch {last['torch']}, transformers {last['transformers']}, triton "
            f"{last['triton']}, until {last['date'][:10]}. Models have random weights in the original shape. Values "
            f"are medians unless the title or a column says mean or p99{quartiles}. No two cells share a prefill."
        )


def is_spread(spec: Select) -> bool:
    """Return whether any row of a table states the quartiles of repeats."""
    return bool(spec.get("spread")) or any(row.get("spread") for row in expand_each(spec["rows"]))


def fill_cell(
    cell: Select, lines: IndexedLines, printed: IndexedLines, runs: RunIndex | None, study: Sequence[StudyLine] = ()
) -> tuple[TableCell, int]:
    """Return a cell and the number of its samples that failed."""
    published = (
        printed.find_published(cell["published"], get_format(cell)[1]) if cell.get("published") is not None else ""
    )
    if cell.get("run") is not None and runs is not None:
        return fill_from_runs(cell, published, runs)
    if cell.get("line") is not None:
        return fill_from_study(cell, published, study), 0
    return fill_from_measurements(cell, published, lines), 0


def fill_from_runs(cell: Select, published: str, runs: RunIndex) -> tuple[TableCell, int]:
    """Return a cell whose value comes from a store's runs, and the number of its samples that failed."""
    settings = drop_unused(cell["run"])
    value = runs.find_value(ExperimentKey.from_settings(settings), cell["of"])
    if value is None:
        return TableCell(published, "", settings), 0
    return format_cell(value, published, *get_format(cell)), value.failed


def fill_from_study(cell: Select, published: str, study: Sequence[StudyLine]) -> TableCell:
    """Return a cell whose value is a line of a study; a cell without a value if the study has no such line.

    Raises:
        ValueError: Several lines fit, so that the table's specification does not say which one is meant.
    """
    fitting = select_lines(study, cell["line"])
    if len(fitting) > 1:
        raise ValueError(f"{len(fitting)} lines fit {cell['line']}; one is needed")
    return format_cell(fitting[0], published, *get_format(cell)) if fitting else TableCell(published, "")


def format_cell(measured: CellValue | StudyLine, published: str, scale: float, digits: int) -> TableCell:
    """Return a cell with a measured value, multiplied by `scale` and rounded to `digits` places."""
    low, high = ("" if end is None else format_number(end * scale, digits) for end in (measured.low, measured.high))
    value = measured.value * scale
    difference = format_number(value - float(published), digits, "+") if is_number(published) else ""
    return TableCell(published, format_number(value, digits), None, low, high, difference)


def get_format(cell: Select) -> tuple[float, int]:
    """Return the scale and the number of decimal places of a cell."""
    return cell.get("scale", 1.0), cell.get("digits", 2)


def fill_from_measurements(cell: Select, published: str, lines: IndexedLines) -> TableCell:
    """Return a cell whose value comes from measurements of cost."""
    scale, digits = get_format(cell)
    select = cell.get("measured")
    if select is None:
        return TableCell(published, "")
    if select.get("baseline", "none") != "none":  # transformers' own caches read a prompt as one block
        select = {**select, "block_size": ""}
    number, line = find_measurement(lines, select)
    ends = read_quartiles(line) if cell.get("spread") else []
    for name, join in (("minus", sub), ("over", truediv)):
        if not isinstance(number, float) or cell.get(name) is None:
            continue
        select, ends = {**select, **cell[name]}, []
        other, of_other = find_measurement(lines, select, near=line["date"])
        if other is None and cell[name].keys() <= {"quantity", "column"}:
            # the run that was measured has no such number
            return TableCell(published, "", remark=NOT_MEASURED)
        if isinstance(other, str):
            return TableCell(published, "", reason=f"nothing to compare with: {describe_failure(of_other)}")
        number, line = (join(number, other), line) if other is not None else (None, of_other)
    if number is None and line:
        return TableCell(published, "", remark=FEW_TOKENS)
    if number is None:
        return TableCell(published, "", make_run_settings(select))
    if isinstance(number, str):
        compared = cell.get("minus") is not None or cell.get("over") is not None
        return TableCell(published, "" if compared else number, reason=describe_failure(line))
    low, high = [format_number(end * scale, digits) for end in ends] or ["", ""]
    remark = RATE_OF_MEDIAN if is_rate_of_median(line) else ""
    return TableCell(published, format_number(number * scale, digits), None, low, high, remark=remark)


def is_rate_of_median(row: Mapping[str, str]) -> bool:
    """Return whether a measurement's tokens in a second are a median over the steps of its answers."""
    return row["quantity"].endswith("tokens_s") and int(row["count"] or 1) > int(row["repeats"] or 1)


def covers_intervals(row: Mapping[str, str]) -> bool:
    """Return whether the timed tokens of each answer of a measurement cover enough intervals of periodic work."""
    return int(row["intervals"] or 0) >= INTERVALS


def describe_failure(line: Mapping[str, str]) -> str:
    """Return what a measurement that failed was asked for, and why there is no number."""
    prompts = f"{line['batch']} x {line['length']}" if line["batch"] else f"copies of {line['length']}"
    asked = " ".join([line["method"], *(line[key] for key in ("codec", "baseline") if line[key] != DEFAULTS[key])])
    why = line["note"] or "memory ran out"
    return f"{FAILURES[line['status']]}: {asked} with {prompts} tokens on {line['gpu']}: {why}"


def make_run_settings(select: Select) -> dict[str, Any]:
    """Return the settings of the run that makes a measurement."""
    settings = {"task": "efficiency", "model": "random", "model.like": select["model"]}
    settings |= {
        SETTING_OF_COLUMN[key]: value
        for key, value in select.items()
        if key in SETTING_OF_COLUMN and value not in ("", None)
    }
    for key, value in json.loads(select.get("changed") or "{}").items():
        settings[key if "." in key else f"method.{key}"] = value
    name, _, rest = str(select["quantity"]).partition("_")
    if name in ("e2e", "answer"):
        settings["task.new_tokens"] = rest.removesuffix("_ms")
    return settings


def find_measurement(
    lines: IndexedLines, select: Select, near: str | None = None
) -> tuple[float | str | None, Mapping[str, str]]:
    """Find the newest matching measurement, or, of those that ran, the one made at the time nearest to `near`.

    Where possible, the two measurements of a ratio come from one run of the plan, because machines differ.

    Returns:
        Its number, its failure ("OOM", "failed") or None if there is none, and its line. A mean or a 99th percentile of
        too few tokens does not count as a number: then the line is the one whose tokens are too few.
    """
    column = select.get("column", "value")
    where = {**DEFAULTS, **{key: value for key, value in select.items() if key not in ("quantity", "column")}}
    cells: dict[tuple[str, str], list[Mapping[str, str]]] = {}  # a cell may have been measured again
    for row in lines.find_matching(where):
        cells.setdefault((row["cell"], row["date"]), []).append(row)
    candidates = list(reversed(cells.values()))
    if near is not None:  # those that ran come first
        time = datetime.fromisoformat(near)
        candidates.sort(key=lambda rows: abs(datetime.fromisoformat(rows[0]["date"]) - time))
        candidates.sort(key=lambda rows: any(row["status"] in FAILURES for row in rows))
    short: Mapping[str, str] = {}
    for rows in candidates:
        for row in rows:
            if row["quantity"] != select["quantity"] or not row["value"]:
                continue
            if column in OVER_INTERVALS and not covers_intervals(row):
                short = short or row
            elif row[column]:
                return float(row[column]), row
        # an older failure says nothing about a run that ended
        for row in rows if rows is candidates[0] and not short else ():
            if row["status"] in FAILURES:
                return FAILURES[row["status"]], row
    return None, short


def read_quartiles(row: Mapping[str, str]) -> list[float]:
    """Return the first and the third quartile of a measurement's repeats; nothing if it was made once."""
    ends = [row.get(f"quartile_{number}") or "" for number in (1, 3)]
    return list(map(float, ends)) if int(row.get("count") or 1) > 1 and all(ends) else []


def write_tables(results: Path, wanted: Mapping[str, Select], draw: Draw | None = None) -> list[Path]:
    """Write tables of scores as <results>/papers/<table> and tables of cost as <results>/papers/<gpu>/<table>.

    A table of cost for which no machine of its kind has measurements becomes <results>/papers/<table>, with the
    published values and the commands that measure.

    Args:
        results: The results folder.
        wanted: Name of a table -> its specification.
        draw: Function that draws figures. Without it, figures are written as tables only.

    Returns:
        The paths of the written tables.
    """
    written = write_cost_tables(results, wanted, results / "papers", draw=draw)
    runs = RunIndex.read(results)
    measured = {path.stem for path in written}
    for name, spec in wanted.items():
        if name in measured:
            continue
        if not is_cost_table(spec) and (preset := find_preset(name, spec)):
            note = f"This command runs all cells, except those that need a file: `python run.py -m preset={preset}`"
            spec = {**spec, "notes": [*spec.get("notes", ()), note]}
        made = build_table(spec, (), read_printed(results, spec), runs)
        written += write_table(results / "papers" / name, made, spec, draw)
    runs.store.print_damage()
    return written


def write_cost_tables(
    results: Path,
    wanted: Mapping[str, Select],
    folder: Path,
    measured_only: bool = False,
    draw: Draw | None = None,
) -> list[Path]:
    """Write tables of cost as <folder>/<gpu>/<table>, for every machine with measurements, and return the paths.

    Args:
        results: Folder of results.
        wanted: Name of a table -> what it shows.
        folder: Where the tables are written.
        measured_only: Whether tables of which nothing was measured on a machine are left out.
        draw: Function that draws figures.
    """
    written = []
    for path in find_measurements(results / "efficiency"):
        lines = IndexedLines(read_lines(path))
        for name, spec in wanted.items():
            if is_cost_table(spec) and shows_machine(spec, path):
                made = build_table(spec, lines, read_printed(results, spec))
                if made.is_measured or not measured_only:
                    written += write_table(folder / path.stem / name, made, spec, draw)
    return written


def shows_machine(spec: Select, path: Path) -> bool:
    """Return whether a table of cost shows measurements of the kind of machine whose file this is, a GPU or a CPU."""
    return bool(spec.get("device", "gpu") == ("cpu" if path.stem == "cpu" else "gpu"))


def write_table(path: Path, made: PaperTable, spec: Select, draw: Draw | None = None) -> list[Path]:
    """Write a table as `path` with the suffixes .md, .csv and .tex, draw it if it is a figure, and return the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictured = draw is not None and "chart" in spec and draw(path, spec, made)
    forms: dict[str, Callable[[], str]] = {
        ".md": lambda: made.to_markdown(f"{path.name}.svg" if pictured else None),
        ".csv": made.to_csv,
        ".tex": made.to_latex,
    }
    for suffix, form in forms.items():
        with name_file_in_errors(path.with_suffix(suffix)):
            path.with_suffix(suffix).write_text(form(), encoding="utf-8")
    return [path.with_suffix(suffix) for suffix in forms]
