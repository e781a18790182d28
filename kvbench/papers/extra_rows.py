"""What a store holds beyond a paper's table: runs of other models and methods with the protocol of its cells.

A run fits a column if budget, block, question, seed, sampling and task are those of a cell of that column. Runs of one
model and one cache stand in one row as far as they fit different columns.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace

from kvbench.papers.cell_values import Found, Runs
from kvbench.papers.experiment_key import ExperimentKey, group, text
from kvbench.papers.table_spec import Select, expanded, joined
from kvbench.store.runs import Stored
from kvbench.validation import SettingError

Line = list[tuple[Found | None, Select]]  # what a row says in each column


def rows_beyond(spec: Select, runs: Runs) -> Iterator[tuple[str, Line]]:
    """Label and cells of each further row."""
    if not runs.by_protocol:
        return
    columns = list(expanded(spec["columns"]))
    wanted = [_wanted(spec, column) for column in columns]
    claimed = set().union(*wanted)
    frames = [{_frame(protocol) for protocol in own} for own in wanted]
    rows: list[tuple[Stored, dict[int, Found]]] = []
    for protocol in sorted(set(runs.by_protocol) - claimed, key=astuple):
        cells, run = {}, None
        for place, column in enumerate(columns):
            of = joined(spec, column).get("of")
            if _frame(protocol) in frames[place] and of and (found := runs.found(protocol, of)):
                cells[place], run = found, runs.fitting(protocol)[0]
        if run is None:
            continue
        for other, held in rows:
            alike = (other.value["model"]["name"], other.cache) == (run.value["model"]["name"], run.cache)
            if alike and not held.keys() & cells.keys():
                held |= cells
                break
        else:
            rows.append((run, cells))
    budgets = {protocol.budget for own in wanted for protocol in own}
    for run, cells in rows:
        label = named(run) + (f", budget {run.value['budget']}" if len(budgets) > 1 and not _swept(spec) else "")
        yield label, [(cells.get(place), column) for place, column in enumerate(columns)]


def _wanted(spec: Select, column: Select) -> set[ExperimentKey]:
    """What the cells of a column want."""
    cells = (joined(spec, row, column) for row in expanded(spec["rows"]))
    return {ExperimentKey.wanted(own["run"]) for own in cells if own.get("run") is not None}


def _frame(protocol: ExperimentKey) -> ExperimentKey:
    """Without model and cache."""
    return replace(protocol, model="", cache="")


def _swept(spec: Select) -> bool:
    """Whether columns say the budget."""
    return any("budget" in (column.get("run") or {}) for column in expanded(spec["columns"]))


def named(run: Stored) -> str:
    """Model, method, allocator and codec, with settings that are not the defaults."""
    names = [run.value["model"]["name"], _told(run, "method")]
    names += [
        _told(run, name) for name, plain in (("allocator", "uniform"), ("codec", "raw")) if _of(run, name) != plain
    ]
    return ", ".join(map(str, names))


def _of(run: Stored, name: str) -> str:
    return run.value[name]["name"]


def _told(run: Stored, name: str) -> str:
    own = run.value[name]
    try:
        usual = group(name, text({name: own["name"]}))
    except SettingError:  # a method that is gone
        usual = own
    changed = [f"{key}={value}" for key, value in own.items() if value != usual.get(key)]
    return " ".join([own["name"], *changed])
