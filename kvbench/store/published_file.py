"""Write published runs (kvbench.store.published_runs) into a Parquet file with one row a sample, and read them back.

    run                            hash of the run, which `settings` give
    model, task, question, method, allocator, codec, budget, machine
                                   names of its settings; `budget` is the setting in its place if the method decides
    code, replay                   revision of the code, and hash of tests/replay
    settings                       all settings of the run, as JSON
    uid, subtask, …, kl, nll, data the sample: fields of its record (docs/records.md), `nll` and `kl` of `fidelity`,
                                   `data`, `haystack` and `qa` of `meta`

The metadata of the schema has the key "kvbench": the number of the format, and the names of files by `content_hash`,
because settings hold hashes of files.

A study has hundreds of runs of the same samples. Rows are sorted by run and sample, and all runs are one row group.
Columns with few values are dictionary-encoded. Their indices repeat from run to run, so zstd leaves little of them. The
columns of MEASURES differ in nearly every row and are split into streams of bytes; the last bytes of `nll` and `kl`,
which are rounded, are zeros. Pages have checksums, which `read_published` checks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import compute, parquet

from kvbench.atomic import replace_file
from kvbench.store.audit import comparison_key
from kvbench.store.published_runs import FIELDS, MAPPINGS, ORIGIN, PublishedRun
from kvbench.store.run_folder import RunFolder
from kvbench.store.runs import NAMED_GROUPS
from kvbench.validation import SettingError

FORMAT = 1
KEY = b"kvbench"  # of the schema's metadata
LEVEL = 19  # of zstd: the file is written once and read often
PAGE = 1 << 30  # most bytes of a page, so that a column has one
KEYS = {key: kind for keys in MAPPINGS.values() for key, kind in keys.items()}
TYPES = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
REQUIRED = ("uid", "subtask")
RANGES = {"score": (0, 100), "full_bytes": (1, inf), "resident_bytes": (0, inf)}  # of numbers, where a row has them
MEASURES = ("nll", "kl", "rows_attended")  # columns in which few values are equal


def write_published(runs: Sequence[PublishedRun], files: Mapping[str, str], path: Path) -> None:
    """Write runs into a file, which is replaced as a whole.

    Args:
        runs: The runs.
        files: `content_hash` of a file that settings name -> its name.
        path: The file.
    """
    ordered = sorted(runs, key=sort_key)
    about = {"format": FORMAT, "files": dict(sorted(files.items()))}
    table = make_table(ordered).replace_schema_metadata({KEY: json.dumps(about).encode()})
    plain = [name for name in table.column_names if name not in MEASURES]
    with replace_file(path) as draft:
        parquet.write_table(
            table,
            draft,
            row_group_size=max(len(table), 1),
            compression="zstd",
            compression_level=LEVEL,
            use_dictionary=plain,
            column_encoding=dict.fromkeys(MEASURES, "BYTE_STREAM_SPLIT"),
            data_page_size=PAGE,
            write_statistics=False,
            write_page_checksum=True,
        )


def sort_key(run: PublishedRun) -> tuple[str, ...]:
    """Return a key that puts runs of the same samples, and of these the runs of a budget, one behind the other."""
    value = run.value
    names = [value[group]["name"] for group in ("model", "task")]
    cache = [value[group]["name"] for group in ("codec", "allocator", "method")]
    return (*names, value["question"], comparison_key(value), run.budget_name, *cache, run.hash)


def describe_cell(run: PublishedRun) -> dict[str, str]:
    """Return the columns that have one value for a run."""
    names = {group: run.value[group]["name"] for group in NAMED_GROUPS}
    device = run.value["device"]
    cell = {"run": run.hash, **names, "question": run.value["question"], "budget": run.budget_name}
    cell |= {"machine": device.get("gpu") or device["type"], **run.origin}
    return cell | {"settings": json.dumps(run.value, sort_keys=True)}


CELL = ("run", *NAMED_GROUPS, "question", "budget", "machine", *ORIGIN, "settings")  # keys of `describe_cell`
SCHEMA = pyarrow.schema(
    {name: pyarrow.dictionary(pyarrow.int32(), TYPES[str]) if name == "settings" else TYPES[str] for name in CELL}
    | {name: TYPES[kind] for name, kind in (FIELDS | KEYS).items()}
)


def make_table(runs: Sequence[PublishedRun]) -> pyarrow.Table:
    """Return the rows of runs, in the order of the runs and by uid."""
    cells = [describe_cell(run) for run in runs]
    samples = [[run.samples[uid] for uid in sorted(run.samples)] for run in runs]
    places = [place for place, some in enumerate(samples) for _ in some]
    indices = pyarrow.array(places, "int32")
    columns = {
        name: pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([cell[name] for cell in cells], TYPES[str]))
        for name in CELL
    }
    records = [record for some in samples for record in some]
    fields = {name: [record[name] for record in records] for name in FIELDS}
    fields |= {key: [record[name][key] for record in records] for name, keys in MAPPINGS.items() for key in keys}
    return pyarrow.table(
        {name: column if name == "settings" else column.dictionary_decode() for name, column in columns.items()}
        | {name: pyarrow.array(values, SCHEMA.field(name).type) for name, values in fields.items()},
        schema=SCHEMA,
    )


def read_published(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """Read the runs of a file, sorted by hash, and the names of files by `content_hash`.

    Raises:
        SettingError: The file cannot be read, is damaged, has another format, or holds rows that no run can have.
    """
    try:
        with open(path, "rb") as file:
            table = parquet.ParquetFile(file, page_checksum_verification=True).read()
        about = json.loads((table.schema.metadata or {}).get(KEY, b"{}"))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SettingError(f"{path}: cannot be read as published runs ({reason})") from None
    if about.get("format") != FORMAT or not table.schema.equals(SCHEMA):
        raise SettingError(
            f"{path}: holds no published runs of format {FORMAT}; kvbench dev measured writes such files"
        )
    check_rows(table, path)
    return list(restore_runs(table, path)), about["files"]


def check_rows(table: pyarrow.Table, path: Path) -> None:
    """Raise a SettingError if a table has no rows, a row lacks what every row has, or a number is out of its range."""
    if not len(table):
        raise SettingError(f"{path}: has no rows")
    for name in (*CELL, *REQUIRED):
        if table[name].null_count:
            raise SettingError(f"{path}: {name} is missing in some row")
    for name, (least, most) in RANGES.items():
        column = table[name]
        known = compute.min_max(column).as_py()
        outside = known["min"] is not None and not least <= known["min"] <= known["max"] <= most
        if outside or compute.any(compute.is_nan(column)).as_py():
            raise SettingError(f"{path}: {name} is not between {least:g} and {most:g} in some row")


def restore_runs(table: pyarrow.Table, path: Path) -> Iterator[PublishedRun]:
    """Yield the runs of a table that `make_table` made.

    Args:
        table: The table.
        path: The file that it comes from.

    Raises:
        SettingError: The settings of a run do not give its hash.
    """
    columns = {name: table[name].to_pylist() for name in (*FIELDS, *KEYS)}
    places: dict[str, list[int]] = {}
    for place, run in enumerate(table["run"].to_pylist()):
        places.setdefault(run, []).append(place)
    for name, rows in sorted(places.items()):
        first = {column: table[column][rows[0]].as_py() for column in (*ORIGIN, "settings")}
        value = json.loads(first.pop("settings"))
        folder = RunFolder(path, value)
        if folder.hash != name:
            raise SettingError(f"{path}: run {name} has settings that give the hash {folder.hash}")
        samples = {columns["uid"][row]: restore_record(columns, row) for row in rows}
        yield PublishedRun(name, value, folder, samples, first)


def restore_record(columns: Mapping[str, Sequence[Any]], row: int) -> dict[str, Any]:
    """Return what `kvbench.store.published_runs.reduce_record` returned for a row."""
    record = {name: columns[name][row] for name in FIELDS}
    return record | {name: {key: columns[key][row] for key in keys} for name, keys in MAPPINGS.items()}
