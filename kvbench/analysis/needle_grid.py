"""Format needle and phone book runs as a grid: one line of CSV for each run, length and depth, from the records alone.

`score` and further metrics of the task (`also_...`) are means over the `n` answered samples. A further metric is a
number of points, or the share of samples for which it is true. `kept` is the mean of resident_bytes / full_bytes.
`place` is the actual position of the needle. `failed` counts samples without a score. Runs whose samples have no
`length` and `depth` are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.store.csv_rows import format_rows
from kvbench.store.runs import StoredRun, load_runs
from kvbench.validation import SettingError

RUN_COLUMNS = (
    "run",
    "finished",
    "model",
    "method",
    "allocator",
    "codec",
    "budget",
    "block_size",
    "question",
    "seed",
    "task",
)
CELL_COLUMNS = ("data", "length", "depth", "n", "failed", "score", "kept", "place")


def format_grid(results: Path) -> str:
    """Return the CSV of all runs under `results`.

    Raises:
        SettingError: There is no run with a grid.
    """
    lines = [line for run in load_runs(results) for line in _list_cells(run)]
    if not lines:
        raise SettingError(f"{results}: no run has samples with a length and a depth")
    also = sorted({key for line in lines for key in line} - {*RUN_COLUMNS, *CELL_COLUMNS})
    names = (*RUN_COLUMNS, *CELL_COLUMNS, *also)
    return format_rows([names, *([line.get(name) for name in names] for line in lines)])


def _list_cells(run: StoredRun) -> Iterator[dict[str, Any]]:
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in run.records.values():
        meta = record["meta"]
        if {"length", "depth"} <= meta.keys():
            depth = -1 if meta["depth"] is None else meta["depth"]  # depths drawn for each sample form one cell
            cells.setdefault((meta["length"], depth, meta.get("data", "")), []).append(record)
    about = {name: run.settings.get(f"{name}.name", run.settings.get(name)) for name in RUN_COLUMNS[2:]}
    about["budget"] = run.budget_name
    for (length, depth, data), records in sorted(cells.items()):
        cell = {"data": data, "length": length, "depth": "" if depth == -1 else depth}
        yield {"run": run.hash, "finished": run.finished, **about, **cell, **_average_records(records)}


def _average_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answered = [record for record in records if record["error"] is None and record["score"] is not None]
    means: dict[str, Any] = {"n": len(answered), "failed": len(records) - len(answered)}
    if not answered:
        return means
    values = {"score": [record["score"] for record in answered]}
    values["kept"] = [record["resident_bytes"] / record["full_bytes"] for record in answered]
    values["place"] = [record["meta"]["place"] for record in answered if "place" in record["meta"]]
    for record in answered:
        for key, metric in record["also"].items():
            values.setdefault(f"also_{key}", []).extend([] if metric is None else [float(metric)])
    return means | {key: fmean(numbers) for key, numbers in values.items() if numbers}
