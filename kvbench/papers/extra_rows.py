"""Add rows to a paper's table for other models and methods that were run with the protocol of its cells.

A run fits a column if its budget, block size, question, seed, sampling and task equal those of a cell in that column.
Runs of one model and one cache share a row if they fit different columns.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace

from kvbench.papers.cell_values import CellValue, RunIndex
from kvbench.papers.experiment_key import ExperimentKey, resolve_group, to_json
from kvbench.papers.table_spec import Select, expand_each, merge_parts
from kvbench.store.runs import StoredRun
from kvbench.validation import SettingError

Line = list[tuple[CellValue | None, Select]]  # the value and the specification of each column


def find_extra_rows(spec: Select, runs: RunIndex) -> Iterator[tuple[str, Line]]:
    """Yield the label and the cells of each additional row.

    Args:
        spec: The table's specification.
        runs: The runs of a store.
    """
    if not runs.by_protocol:
        return
    columns = list(expand_each(spec["columns"]))
    wanted = [_collect_keys(spec, column) for column in columns]
    claimed = set().union(*wanted)
    frames = [{_without_cache(protocol) for protocol in keys} for keys in wanted]
    rows: list[tuple[StoredRun, dict[int, CellValue]]] = []
    for protocol in sorted(set(runs.by_protocol) - claimed, key=astuple):
        cells, run = {}, None
        for place, column in enumerate(columns):
            of = merge_parts(spec, column).get("of")
            if _without_cache(protocol) in frames[place] and of and (value := runs.find_value(protocol, of)):
                cells[place], run = value, runs.find_matching(protocol)[0]
        if run is None:
            continue
        for other, held in rows:
            alike = (other.value["model"]["name"], other.cache) == (run.value["model"]["name"], run.cache)
            if alike and not held.keys() & cells.keys():
                held |= cells
                break
        else:
            rows.append((run, cells))
    budgets = {protocol.budget for keys in wanted for protocol in keys}
    for run, cells in rows:
        label = label_run(run) + (
            f", budget {run.value['budget']}" if len(budgets) > 1 and not _has_budget_columns(spec) else ""
        )
        yield label, [(cells.get(place), column) for place, column in enumerate(columns)]


def _collect_keys(spec: Select, column: Select) -> set[ExperimentKey]:
    """Return the keys of the runs that the cells of a column need."""
    cells = (merge_parts(spec, row, column) for row in expand_each(spec["rows"]))
    return {ExperimentKey.from_settings(cell["run"]) for cell in cells if cell.get("run") is not None}


def _without_cache(protocol: ExperimentKey) -> ExperimentKey:
    """Return a key without its model and cache."""
    return replace(protocol, model="", cache="")


def _has_budget_columns(spec: Select) -> bool:
    """Return whether columns state the budget."""
    return any("budget" in (column.get("run") or {}) for column in expand_each(spec["columns"]))


def label_run(run: StoredRun) -> str:
    """Return model, method, allocator and codec of a run, with the settings that differ from their defaults."""
    names = [run.value["model"]["name"], _format_choice(run, "method")]
    names += [
        _format_choice(run, name)
        for name, plain in (("allocator", "uniform"), ("codec", "raw"))
        if _get_name(run, name) != plain
    ]
    return ", ".join(map(str, names))


def _get_name(run: StoredRun, name: str) -> str:
    return str(run.value[name]["name"])


def _format_choice(run: StoredRun, name: str) -> str:
    choice = run.value[name]
    try:
        usual = resolve_group(name, to_json({name: choice["name"]}))
    except SettingError:  # the method no longer exists
        usual = choice
    changed = [f"{key}={value}" for key, value in choice.items() if value != usual.get(key)]
    return " ".join([choice["name"], *changed])
