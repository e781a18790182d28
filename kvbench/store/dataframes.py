"""Load a store as pandas frames: `kvbench.load("results", method="snapkv", budget=[0.05, 0.1])`.

    loaded.runs          one line per run, by its hash: model, task, method, …, and every setting as `method.window`
    loaded.records()     one line per sample: `run` is the hash, `meta.depth` and `also.rouge1` are what the task wrote
    loaded.damaged       hash -> what is wrong, for runs that are left out (kvbench.store.runs)

Records are read when they are needed. They are parsed in chunks into Arrow columns, so that a million records are never
a million dicts. This module does not import torch.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from kvbench.atomic import replace_file
from kvbench.store.runs import NAMED_GROUPS, FoundRuns, RunRecords, StoredRun, check_folder, find_runs
from kvbench.validation import pause_garbage_collection, require_choice, require_writable

CHUNK = 20_000  # records parsed at a time
RUN_COLUMNS = ("model", "task", "method", "allocator", "codec", "question")  # settings of its run that a record gets
NESTED = ("meta", "also", "fidelity")  # fields whose keys become columns


@dataclass(frozen=True)
class LoadedRuns:
    """Runs of a results folder. Their records are read when they are needed.

    Attributes:
        folder: The results folder.
        runs: One line per run: its settings, and whether it is `finished`. The index is the run's hash.
        damaged: Hash -> what is wrong, for runs that are left out.
    """

    folder: Path
    runs: pandas.DataFrame
    damaged: Mapping[str, str]

    def records(self, columns: Iterable[str] | None = None) -> pandas.DataFrame:
        """Return all intact records of the runs.

        Args:
            columns: Columns to return. None returns all of them.

        Raises:
            SettingError: No record has one of the columns.
        """

        def kind(data_type: pyarrow.DataType) -> Any:
            return pandas.ArrowDtype(data_type) if pyarrow.types.is_nested(data_type) else None

        frame: pandas.DataFrame = self.table(columns).to_pandas(
            types_mapper=kind, split_blocks=True, self_destruct=True
        )
        return frame

    def table(self, columns: Iterable[str] | None = None) -> pyarrow.Table:
        """Return the same records as `records` as an Arrow table."""
        wanted = None if columns is None else list(dict.fromkeys(columns))
        parts = [pyarrow.table({"run": pyarrow.nulls(0), "uid": pyarrow.nulls(0)})]
        damage = FoundRuns()
        with pause_garbage_collection():
            for run in self.runs.index:
                about = {"run": run, **{key: self.runs[key][run] for key in RUN_COLUMNS}}
                records, tables = RunRecords(self.folder / "runs" / run), []
                lines = iter(records)
                while chunk := list(islice(lines, CHUNK)):
                    tables.append(records_to_table(chunk, about, wanted))
                damage.note(run, records)
                parts += [] if records.damage else tables
        damage.print_damage()
        table = concat_tables(parts)
        if wanted is not None and (missing := [name for name in wanted if name not in table.column_names]):
            require_choice("columns", missing[0], sorted(self.table().column_names))
        return table if wanted is None else table.select(wanted)


def load(results: str | Path = "results", **filters: object) -> LoadedRuns:
    """Load the runs of a results folder.

    Runs that are damaged or have another format are left out. `damaged` and a line on stderr name them.

    Args:
        results: The results folder.
        filters: Columns of `runs`, each with an allowed value or a list of allowed values.

    Returns:
        The runs, and access to their records.

    Raises:
        SettingError: The folder contains no runs, or no run has a column of `filters`.

    Example:
        >>> kvbench.load("results", method="snapkv", budget=[0.05, 0.1]).records()["score"].mean()
    """
    check_folder(Path(results))
    store = find_runs(Path(results))
    store.print_damage()
    lines = {run.hash: describe(run) for run in store.runs}
    runs = pandas.DataFrame(list(lines.values()), index=pandas.Index(lines, name="run"), dtype=object)
    for name, value in filters.items():
        if len(runs):
            require_choice("load", name, runs.columns)
            allowed = value if isinstance(value, list | tuple | set) else [value]
            runs = runs[[cell in allowed for cell in runs[name]]]
    return LoadedRuns(Path(results), runs.infer_objects(), store.damaged)


def export_parquet(results: Path, out: Path) -> list[Path]:
    """Write runs.parquet and records.parquet. Each file is written completely or not at all.

    Args:
        results: The results folder.
        out: Folder for the two files.

    Returns:
        Paths of the two files.

    Raises:
        SettingError: `results` contains no runs, or `out` cannot be written.
    """
    require_writable("out", out)
    loaded = load(results)
    runs = pyarrow.Table.from_pydict(
        {"run": list(loaded.runs.index), **{name: to_array(list(loaded.runs[name])) for name in loaded.runs}}
    )
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in (("runs", runs), ("records", loaded.table())):
        written.append(out / f"{name}.parquet")
        with replace_file(written[-1]) as draft:
            parquet.write_table(table, draft)
    return written


def describe(run: StoredRun) -> dict[str, Any]:
    """Return the settings in run.yaml as one flat dict, with `finished` for whether `done` exists."""
    groups = {group: run.value[group]["name"] for group in NAMED_GROUPS}
    settings = {name: item for name, item in run.settings.items() if not name.endswith(".name")}
    return groups | settings | {"finished": (run.folder.path / "done").is_file()}


def records_to_table(chunk: list[dict[str, Any]], about: Mapping[str, str], wanted: list[str] | None) -> pyarrow.Table:
    """Return some records of one run as a table.

    Values are collected column by column, because this takes half as long as going through them record by record.

    Args:
        chunk: The records.
        about: Columns that have one value for the whole run.
        wanted: Columns to return, None for all.
    """
    one = pyarrow.array([0] * len(chunk), "int32")
    columns: dict[str, Any] = {key: pyarrow.DictionaryArray.from_arrays(one, [value]) for key, value in about.items()}
    for name in dict.fromkeys(chain.from_iterable(chunk)):
        values = [record.get(name) for record in chunk]
        if name not in NESTED:
            columns[name] = values
            continue
        inner = [value if isinstance(value, Mapping) else {} for value in values]
        columns |= {
            f"{name}.{key}": [mapping.get(key) for mapping in inner]
            for key in dict.fromkeys(chain.from_iterable(inner))
        }
        if any(value is not None and not isinstance(value, Mapping) for value in values):
            columns[name] = [None if isinstance(value, Mapping) else value for value in values]
    kept = {name: column for name, column in columns.items() if wanted is None or name in wanted}
    return pyarrow.table(
        {name: to_array(column) if isinstance(column, list) else column for name, column in kept.items()}
    )


def to_array(values: list[Any]) -> pyarrow.Array:
    """Return values as an array. Values of different types become JSON; a lone surrogate in a text is escaped."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, UnicodeEncodeError):
        return to_json_array(values)


def to_json_array(values: list[Any]) -> pyarrow.Array:
    """Return values as an array of texts. Values other than text and None become JSON."""
    texts = (value if value is None or isinstance(value, str) else json.dumps(value) for value in values)
    return pyarrow.array([text and text.encode("utf-8", "backslashreplace").decode() for text in texts])


def concat_tables(parts: list[pyarrow.Table]) -> pyarrow.Table:
    """Concatenate tables. A column that has different types in its parts becomes JSON."""
    try:
        return pyarrow.concat_tables(parts, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        pass
    kinds: dict[str, set[pyarrow.DataType]] = {}
    for part in parts:
        for field in part.schema:
            kinds.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, types in kinds.items() if not can_unify(types)}
    texts = []
    for part in parts:
        for index, name in enumerate(part.column_names):
            if name in mixed:
                part = part.set_column(index, name, to_json_array(part[name].to_pylist()))
        texts.append(part)
    return pyarrow.concat_tables(texts, promote_options="permissive")


def can_unify(kinds: set[pyarrow.DataType]) -> bool:
    """Return whether columns of these types can become one column."""
    try:
        fields = [pyarrow.schema([("column", kind)]) for kind in kinds]
        pyarrow.unify_schemas(fields, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return False
    return True
