"""What the store holds, as pandas frames: `kvbench.load("results", method="snapkv", budget=[0.05, 0.1])`.

    loaded.runs          one line a run, by its hash: model, task, method, …, every setting as `method.window`
    loaded.records()     one line a sample, read when it is asked for; `run` is the hash, `meta.depth`, `also.rouge1`
                         are what the task wrote
    loaded.damaged       hash -> what is wrong, of runs that are left out (kvbench.store.runs)

Lines are parsed a chunk at a time into Arrow columns: a million records never are a million dicts. No torch is needed.
"""

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from kvbench.atomic import replace_file
from kvbench.store.runs import NAMED_GROUPS, FoundRuns, RunRecords, StoredRun, check_folder, find_runs
from kvbench.validation import SettingError, require_choice, require_writable

CHUNK = 20_000  # records parsed at a time
RUN_COLUMNS = ("model", "task", "method", "allocator", "codec", "question")  # of a record's run, beside its hash
NESTED = ("meta", "also", "fidelity")  # their keys become columns of their own


@dataclass(frozen=True)
class LoadedRuns:
    """Runs of a results folder, and their records when they are asked for."""

    folder: Path
    runs: pandas.DataFrame
    damaged: Mapping[str, str]

    def records(self, columns: Iterable[str] | None = None) -> pandas.DataFrame:
        """All whole records of the runs; `columns`: only these, SettingError for one that no record has."""

        def kind(own: pyarrow.DataType) -> Any:
            return pandas.ArrowDtype(own) if pyarrow.types.is_nested(own) else None

        frame: pandas.DataFrame = self.table(columns).to_pandas(
            types_mapper=kind, split_blocks=True, self_destruct=True
        )
        return frame

    def table(self, columns: Iterable[str] | None = None) -> pyarrow.Table:
        """The same as an Arrow table."""
        wanted = None if columns is None else list(dict.fromkeys(columns))
        parts = [pyarrow.table({"run": pyarrow.nulls(0), "uid": pyarrow.nulls(0)})]
        damage = FoundRuns()
        with gc_paused():
            for run in self.runs.index:
                about = {"run": run, **{key: self.runs[key][run] for key in RUN_COLUMNS}}
                found = RunRecords(self.folder / "runs" / run)
                lines = iter(found)
                while chunk := list(islice(lines, CHUNK)):
                    parts.append(records_to_table(chunk, about, wanted))
                if found.problems:
                    damage.passed_over[run] = "; ".join(found.problems)
        damage.print_damage()
        table = concat_tables(parts)
        if wanted is not None and (missing := [name for name in wanted if name not in table.column_names]):
            raise SettingError(f"columns={missing[0]}: choose from {', '.join(sorted(self.table().column_names))}")
        return table if wanted is None else table.select(wanted)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Nobody looks for cycles inside: lines have none, and looking at all of them again and again takes long."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def load(results: str | Path = "results", **filters: Any) -> LoadedRuns:
    """Runs of a results folder; `filters`: a column of `runs` and its value or list of values. SettingError for a
    folder without runs and a column that no run has. Runs that are damaged or of another format are named, on stderr
    and in `damaged`, and left out.
    """
    check_folder(Path(results))
    found = find_runs(Path(results))
    found.print_damage()
    lines = {run.hash: describe(run) for run in found.runs}
    runs = pandas.DataFrame(list(lines.values()), index=pandas.Index(lines, name="run"), dtype=object)
    for name, value in filters.items():
        if len(runs):
            require_choice("load", name, runs.columns)
            allowed = value if isinstance(value, list | tuple | set) else [value]
            runs = runs[[own in allowed for own in runs[name]]]
    return LoadedRuns(Path(results), runs.infer_objects(), found.damaged)


def export_parquet(results: Path, out: Path) -> list[Path]:
    """`out`/runs.parquet and records.parquet, each written whole or not at all; SettingError if it cannot be."""
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
    """What run.yaml says, flat; `finished`: whether `done` is there."""
    own = {group: run.value[group]["name"] for group in NAMED_GROUPS}
    settings = {name: item for name, item in run.settings.items() if not name.endswith(".name")}
    return own | settings | {"finished": (run.folder.path / "done").is_file()}


def records_to_table(chunk: list[dict[str, Any]], about: Mapping[str, str], wanted: list[str] | None) -> pyarrow.Table:
    """Columns of some records of one run. Values are taken a column at a time, which costs half of taking them a record
    at a time.
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
            f"{name}.{key}": [own.get(key) for own in inner] for key in dict.fromkeys(chain.from_iterable(inner))
        }
        if any(value is not None and not isinstance(value, Mapping) for value in values):
            columns[name] = [None if isinstance(value, Mapping) else value for value in values]
    kept = {name: own for name, own in columns.items() if wanted is None or name in wanted}
    return pyarrow.table({name: to_array(own) if isinstance(own, list) else own for name, own in kept.items()})


def to_array(values: list[Any]) -> pyarrow.Array:
    """Values as they are, or as JSON where they are of different kinds; a lone surrogate in a text is written out."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, UnicodeEncodeError):
        return to_json_array(values)


def to_json_array(values: list[Any]) -> pyarrow.Array:
    texts = (value if value is None or isinstance(value, str) else json.dumps(value) for value in values)
    return pyarrow.array([text and text.encode("utf-8", "backslashreplace").decode() for text in texts])


def concat_tables(parts: list[pyarrow.Table]) -> pyarrow.Table:
    """One table; a column that is of different kinds in its parts becomes JSON."""
    try:
        return pyarrow.concat_tables(parts, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        pass
    kinds: dict[str, set[pyarrow.DataType]] = {}
    for part in parts:
        for field in part.schema:
            kinds.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, own in kinds.items() if not unifiable(own)}
    texts = []
    for part in parts:
        for index, name in enumerate(part.column_names):
            if name in mixed:
                part = part.set_column(index, name, to_json_array(part[name].to_pylist()))
        texts.append(part)
    return pyarrow.concat_tables(texts, promote_options="permissive")


def unifiable(kinds: set[pyarrow.DataType]) -> bool:
    """Whether columns of these kinds make one column."""
    try:
        fields = [pyarrow.schema([("column", own)]) for own in kinds]
        pyarrow.unify_schemas(fields, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return False
    return True
