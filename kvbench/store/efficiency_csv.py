"""Read and append measurements of cost: results/efficiency/<gpu>.csv.

A line is one measured quantity, with all settings and versions that it was measured with. A cell is one set of settings
on one machine with one state of the sources. Its lines are written together, and the last one is LAST_QUANTITY: a cell
without it is incomplete and is measured again. Readers skip a line that a killed writer left torn. A file of an earlier
version lacks columns. Readers leave them empty, and the first line that is appended adds them to the file.
A packed file (kvbench.store.packed_csv) is read like any other, and unpacked before a line is appended.
"""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.atomic import append_whole, lock_file
from kvbench.store.csv_rows import format_rows, write_rows
from kvbench.store.packed_csv import find_csv, read_csv_text, unpack_csv
from kvbench.validation import SettingError, name_file_in_errors

INTERVALS = 4  # periods of work that an answer must cover for the mean and the 99th percentile of a token's time
LAST_QUANTITY = "measuring_s"  # the last quantity of every cell: the time that measuring it took, in seconds
SETTINGS = (
    "gpu", "measure", "model", "weights", "method", "preset", "changed", "allocator", "codec", "budget", "budget_of",
    "block_size", "baseline", "compile", "implementation", "length", "batch", "rows", "fill", "new_tokens", "repeats",
    "device", "dtype",
)  # fmt: skip
VALUES = (
    "quantity", "unit", "status", "value", "mean", "p99", "least", "quartile_1", "quartile_3", "most", "count",
    "intervals", "note",
)  # fmt: skip
VERSIONS = (
    "date",
    "commit",
    "sources",
    "replay",
    "torch",
    "transformers",
    "triton",
    "cuda",
    "driver",
    "python",
    "cell",
)
COLUMNS = (*SETTINGS, *VALUES, *VERSIONS)
COLUMNS_OF_MEDIANS = tuple(column for column in COLUMNS if column not in ("p99", "intervals"))  # of earlier versions
COLUMNS_0_1 = tuple(column for column in COLUMNS_OF_MEDIANS if column != "replay")  # of 0.1, which are only read
FORMATS = (COLUMNS, COLUMNS_OF_MEDIANS, COLUMNS_0_1)

Line = dict[str, Any]


def make_line(quantity: str, unit: str, value: float | Mapping[str, float], note: str = "") -> Line:
    """Return the line of a measured quantity.

    Args:
        quantity: Its name.
        unit: Its unit.
        value: One number, or a spread (kvbench.engine.timing), whose median becomes the value.
        note: A remark.
    """
    spread = {"value": value} if not isinstance(value, Mapping) else {"value": value["median"], **value}
    return {"quantity": quantity, "unit": unit, "note": note, **spread}


def make_out_of_memory_line(quantity: str, shortage: str) -> Line:
    """Return the line of a quantity that could not be measured because memory ran out; `shortage` says for what."""
    return {"quantity": quantity, "status": "out_of_memory", "note": shortage}


def append_lines(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
    """Append lines and wait until they are on disk.

    Args:
        path: The file. It is created if it does not exist.
        rows: The lines by column. Missing columns stay empty.
        columns: The columns of the file.

    Raises:
        SettingError: The file has other columns, or is packed and damaged.
        OSError: The lines could not be written completely. The file is left as it was.
    """
    # one physical line each
    text = format_rows([" ".join(str(row.get(column, "")).split()) for column in columns] for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    unpack_csv(path)
    if tuple(columns) == COLUMNS and read_header(path) == COLUMNS_OF_MEDIANS:
        add_columns(path)
    with name_file_in_errors(path), open(path, "a+b") as file:
        lock_file(file)
        end = file.seek(0, os.SEEK_END)
        before = ",".join(columns) + "\n" if end == 0 else ""
        if end:
            check_columns(path, columns)
            file.seek(end - 1)
            before = "" if file.read(1) == b"\n" else "\n"  # a torn line stays, and the new lines start below it
        append_whole(file.fileno(), (before + text).encode(), end)


def add_columns(path: Path) -> None:
    """Write a file with `COLUMNS_OF_MEDIANS` again with `COLUMNS`. Its lines leave the new ones empty."""
    with path.open("rb") as file:
        lock_file(file)
        write_rows(path, [COLUMNS, *([row[column] for column in COLUMNS] for row in read_lines(path))])


def read_header(path: Path) -> tuple[str, ...]:
    """Return the columns of a file; none if it does not exist."""
    try:
        return tuple(next(csv.reader([read_csv_text(path).partition("\n")[0]]), ()))
    except FileNotFoundError:
        return ()


def check_columns(path: Path, *allowed: Sequence[str]) -> None:
    """Raise a SettingError if the file has none of these sequences of columns."""
    if read_header(path) not in map(tuple, allowed):
        raise SettingError(f"{path}: has other columns than this version writes; move it away")


def read_lines(path: Path) -> list[dict[str, str]]:
    """Return all complete lines by column, in the order of measurement; an empty list if the file does not exist.

    Raises:
        SettingError: The file has other columns, or is packed and damaged.
    """
    try:
        text = read_csv_text(path)
    except FileNotFoundError:
        return []
    # each line is parsed on its own, so that an open quote in a torn line does not swallow the lines after it
    columns, *lines = (next(csv.reader([line]), []) for line in text.split("\n"))
    check_columns(path, *FORMATS)
    absent = dict.fromkeys(set(COLUMNS) - set(columns), "")
    return [dict(zip(columns, line, strict=True)) | absent for line in lines if len(line) == len(columns)]


def find_whole_cells(path: Path) -> set[str]:
    """Return the names of all complete cells."""
    return {row["cell"] for row in read_lines(path) if row["quantity"] == LAST_QUANTITY}


def find_measurements(folder: Path) -> Iterable[Path]:
    """Yield the CSV files of a folder that hold measurements, packed ones by the name that they stand for."""
    for path in find_csv(folder):
        if read_header(path) in FORMATS:
            yield path
