"""A packed CSV file is read as the file that it stands for, and unpacked before lines are appended."""

import gzip
from pathlib import Path

import pytest

from kvbench.store.csv_rows import format_rows
from kvbench.store.efficiency_csv import (
    COLUMNS_OF_MEDIANS,
    LAST_QUANTITY,
    append_lines,
    find_measurements,
    find_whole_cells,
    read_lines,
)
from kvbench.store.packed_csv import find_csv, name_packed, read_csv_text, unpack_csv
from kvbench.store.study_lines import read_study
from kvbench.validation import SettingError
from tests.support.study_folders import list_heads, write_study


def pack(path: Path) -> None:
    """Replace a CSV file by its packed form, as `make pack` does."""
    name_packed(path).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


def test_packed_studies_are_the_same_studies(tmp_path):
    folder = write_study(tmp_path, [*list_heads(), *list_heads("activations")])
    plain = read_study(folder).lines
    pack(folder / "key_geometry.csv")
    assert [path.name for path in find_csv(folder)] == ["activations.csv", "key_geometry.csv"]
    assert read_study(folder).lines == plain and len(plain) == 26
    (folder / "key_geometry.csv").write_text((folder / "activations.csv").read_text().replace("0.5,", "0.25,"))
    [claim] = [line for line in read_study(folder).by_study["key_geometry"] if line.series == "holds"]
    assert claim.value == 0.25  # the file that a command wrote is newer than the packed one


def test_measurements_are_appended_to_the_unpacked_file(tmp_path, monkeypatch):
    path = tmp_path / "gpu.csv"
    append_lines(path, [{"quantity": "ä", "cell": "1"}, {"quantity": LAST_QUANTITY, "cell": "1"}])
    plain = read_lines(path)
    pack(path)
    packed = name_packed(path).read_bytes()
    assert list(find_measurements(tmp_path)) == [path] and read_lines(path) == plain
    assert find_whole_cells(path) == {"1"} and not path.exists()
    append_lines(path, [{"quantity": "b", "cell": "2"}])
    assert read_lines(path)[:2] == plain and read_lines(path)[2]["quantity"] == "b"
    assert list(find_measurements(tmp_path)) == [path] and name_packed(path).read_bytes() == packed
    text = path.read_text()
    path.unlink()
    # another process unpacks the file and appends to it while this one waits for the lock
    monkeypatch.setattr("kvbench.store.packed_csv.lock_file", lambda file: path.write_text(text))
    unpack_csv(path)
    assert path.read_text() == text


def test_an_old_file_that_is_packed_gets_the_new_columns(tmp_path):
    path = tmp_path / "gpu.csv"
    path.write_text(format_rows([COLUMNS_OF_MEDIANS, ["old"] * len(COLUMNS_OF_MEDIANS)]))
    pack(path)
    append_lines(path, [{"quantity": "new", "p99": 3.0}])
    assert [(row["quantity"], row["p99"]) for row in read_lines(path)] == [("old", ""), ("new", "3.0")]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"x" + data, lambda data: data[:12] + b"\xff" * 30]
)
def test_a_damaged_file_is_named(tmp_path, damage):
    folder = write_study(tmp_path, list_heads())
    path = folder / "key_geometry.csv"
    pack(path)
    name_packed(path).write_bytes(damage(name_packed(path).read_bytes()))
    for read in (read_csv_text, read_lines):
        with pytest.raises(SettingError, match=r"key_geometry\.csv\.gz: is damaged"):
            read(path)
    with pytest.raises(SettingError, match=r"key_geometry\.csv\.gz: is damaged"):
        read_study(folder)
