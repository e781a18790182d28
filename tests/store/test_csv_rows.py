"""CSV that a spreadsheet only shows, and never executes."""

import csv
import io
import re

import pytest

from kvbench.store.csv_rows import format_rows
from tests.support.modules import MODULE_FILES


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1"])
def test_a_text_that_looks_like_a_formula_begins_with_an_apostrophe(text):
    [row] = csv.reader(io.StringIO(format_rows([[text, f"x{text}"]]), newline=""))
    assert row == [f"'{text}", f"x{text}"]


def test_a_carriage_return_begins_no_row():
    assert format_rows([["a\r=1+1", "b"]]) == "a\\r=1+1,b\n"


def test_numbers_stay_numbers():
    assert format_rows([[-1.5, "-1.5", "+2e3", "-inf", None, True, ""]]) == "-1.5,-1.5,+2e3,-inf,,True,\n"


def test_all_csv_is_written_by_one_function():
    writers = [path.name for path in MODULE_FILES if re.search(r"csv\.(writer|DictWriter)\(", path.read_text())]
    assert writers == ["csv_rows.py"]
