"""Find the published scores of a stored run, for figures that show both.

A score of a table (kvbench.papers.table_spec) belongs to a run if the run answers the table's question on the same
subtasks, and if the table's average over the run's records is the score that the figure draws. Runs on data that
kvbench made have no published scores.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from kvbench.papers.build import get_format
from kvbench.papers.cell_values import RunIndex, is_synthetic, weigh_subtasks
from kvbench.papers.experiment_key import ExperimentKey, drop_unused
from kvbench.papers.table_spec import (
    IndexedLines,
    expand_each,
    is_cost_table,
    load_specs,
    merge_parts,
    read_printed,
    to_number,
)
from kvbench.store.runs import FoundRuns, StoredRun
from kvbench.validation import SettingError

NAMES = ("model", "task", "method")


@dataclass(frozen=True)
class PublishedCell:
    """A cell of a table.

    Attributes:
        table: Name of the table, such as "dropkv_table5".
        score: The published score in points, or the published difference from the full cache.
    """

    table: str
    score: float


def find_published(
    run: StoredRun,
    subtasks: Collection[str],
    score: float,
    results: Path,
    where: Mapping[str, Any] | None = None,
    full: StoredRun | None = None,
) -> list[PublishedCell]:
    """Return the cells with published scores of a run. Of several cells with one score, only the first is returned.

    Args:
        run: The run.
        subtasks: The subtasks that the figure averages.
        score: Their average in points.
        results: The folder of results, whose published/ comes before the project's.
        where: Values in `meta` of the records that it averages; None for all records.
        full: The full cache's run, if `score` is the difference from it.
    """
    wanted = index_cells().get(tuple(run.value[name]["name"] for name in NAMES), [])
    if not wanted or is_synthetic(run.records):
        return []
    try:
        key = ExperimentKey.of(run.value)
        values = RunIndex({ExperimentKey.of(full.value): [full]} if full else {}, FoundRuns())
    except (LookupError, TypeError):  # the run lacks a setting, so no table is known to ask its question
        return []
    by_score: dict[float, PublishedCell] = {}
    for table, cell in wanted:
        of = cell["of"]
        if bool(of.get("difference")) != bool(full) or of.get("where", {}) != (where or {}):
            continue
        try:
            same = set(weigh_subtasks(of["subtasks"], sorted(subtasks))) == set(subtasks)
            same = same and ExperimentKey.from_settings(drop_unused(cell["run"])) == key
            if not same or not isclose(values.value(run, of).value, score, abs_tol=1e-6):
                continue
        except SettingError:  # the run lacks subtasks of the table
            continue
        number = to_number(read_table(results, table).find_published(cell["published"]))
        if number is not None:
            own = number / get_format(cell)[0]
            by_score.setdefault(own, PublishedCell(table, own))
    return list(by_score.values())


@cache
def read_table(results: Path, table: str) -> IndexedLines:
    """Read the published values of a table."""
    return IndexedLines(read_printed(results, load_specs()[table]))


@cache
def index_cells() -> dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]]:
    """Return the cells of all tables of scores that select a published number, by model, task and method.

    Each cell comes with the name of its table. Cells that select long answers are left out, because they do not show
    the score of a run.
    """
    cells: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for name, spec in load_specs().items():
        if is_cost_table(spec):
            continue
        columns = list(expand_each(spec["columns"]))
        for row in expand_each(spec["rows"]):
            for cell in (merge_parts(spec, row, column) for column in columns):
                if cell.get("run") is None or cell.get("published") is None or not cell.get("of"):
                    continue
                if "longer" not in cell["of"]:
                    cells.setdefault(tuple(cell["run"].get(key, "") for key in NAMES), []).append((name, cell))
    return cells
