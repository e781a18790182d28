"""results/efficiency/<gpu>.csv: one line a measured quantity, with all that it was measured with. Lines are appended.

A cell is one set of settings on one machine with one state of the sources; its lines are written at once and the last
one is ENDED, so that a cell is whole or is measured again. A line that a killed writer left torn is passed over.
"""

import csv
import errno
import fcntl
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.validation import SettingError, name_file_in_errors

LAST_QUANTITY = "measuring_s"  # the last quantity of every cell: how long it took
SETTINGS = (
    "gpu", "measure", "model", "weights", "method", "preset", "changed", "allocator", "codec", "budget", "budget_of",
    "block_size", "baseline", "compile", "implementation", "length", "batch", "rows", "fill", "new_tokens", "repeats",
    "device", "dtype",
)  # fmt: skip
VALUES = (
    "quantity", "unit", "status", "value", "mean", "least", "quartile_1", "quartile_3", "most", "count", "note",
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
COLUMNS_0_1 = tuple(column for column in COLUMNS if column != "replay")  # of kvbench 0.1: read, and never written to


Line = dict[str, Any]


def make_line(quantity: str, unit: str, value: float | Mapping[str, float], note: str = "") -> Line:
    """A measured quantity: one number, or a spread (kvbench.engine.timing), whose median is the value."""
    spread = {"value": value} if not isinstance(value, Mapping) else {"value": value["median"], **value}
    return {"quantity": quantity, "unit": unit, "note": note, **spread}


def make_out_of_memory_line(quantity: str) -> Line:
    """There was no memory to measure it."""
    return {"quantity": quantity, "status": "out_of_memory"}


def append_lines(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str] = COLUMNS) -> None:
    """Write whole lines behind what is there, in one write, and wait until they are on the disk."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([" ".join(str(row.get(column, "")).split()) for column in columns])  # one physical line each
    path.parent.mkdir(parents=True, exist_ok=True)
    with name_file_in_errors(path), open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        before = ",".join(columns) + "\n" if end == 0 else ""
        if end:
            check_columns(path, columns)
            file.seek(end - 1)
            before = "" if file.read(1) == b"\n" else "\n"  # a torn line stays as it is, ours starts on its own
        data = (before + text.getvalue()).encode()
        if os.write(file.fileno(), data) != len(data):
            raise OSError(errno.ENOSPC, "the lines could not be written; is the disk full?")
        os.fsync(file.fileno())


def check_columns(path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """SettingError if the file's columns are not the ones that would be appended."""
    with path.open(newline="", encoding="utf-8") as file:
        if next(csv.reader(file), []) != list(columns):
            raise SettingError(f"{path}: has other columns than this version writes; move it away")


def read_lines(path: Path) -> list[dict[str, str]]:
    """All whole lines, in the order in which they were measured; none if there is no such file."""
    if not path.exists():
        return []
    # line by line: a quote that a torn line leaves open must not take in the ones behind it
    first, *lines = (next(csv.reader([line]), []) for line in path.read_text(encoding="utf-8").split("\n"))
    columns = COLUMNS_0_1 if tuple(first) == COLUMNS_0_1 else COLUMNS
    check_columns(path, columns)
    absent = dict.fromkeys(set(COLUMNS) - set(columns), "")
    return [dict(zip(columns, line, strict=True)) | absent for line in lines if len(line) == len(columns)]


def find_whole_cells(path: Path) -> set[str]:
    """The cells that are whole."""
    return {row["cell"] for row in read_lines(path) if row["quantity"] == LAST_QUANTITY}


def find_measurements(folder: Path) -> Iterable[Path]:
    """The files of measurements among a folder's CSV files."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            if tuple(next(csv.reader(file), ())) in (COLUMNS, COLUMNS_0_1):
                yield path
