"""The page of the embedded model says what the scores beside its weights say."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kvbench.training.embedded_card import PAGE, SCORES, make_card
from kvbench.validation import SettingError
from tests.support.repository import ROOT

ABOUT = {"weights": "0a1b", "seed": 20_000, "dtype": "float32", "device": "cpu"}


def write_files(root: Path, scores: list[dict[str, object]]) -> None:
    """Write what the page is made from."""
    for path in (PAGE, SCORES):
        (root / path).parent.mkdir(parents=True)
    shutil.copy(ROOT / PAGE, root / PAGE)
    (root / SCORES).write_text(json.dumps(ABOUT | {"scores": scores}))


def test_the_tables_say_what_the_file_says(tmp_path):
    scores = [
        {"task": "easy", "length": 1024, "samples": 6, "score": 100.0},
        {"task": "hard", "length": 1024, "samples": 6, "score": 25.5},
        {"task": "easy", "length": 512, "samples": 2, "score": 50.0},
        {"task": "ledger", "steps": 60, "samples": 10, "score": 90.0},
    ]
    write_files(tmp_path, scores)
    lines = [line for line in make_card(tmp_path)[PAGE].splitlines() if line.startswith("|")]
    expected = [
        "| subtask | 512 | 1024 |",
        "|---|--:|--:|",
        "| easy | 50.0 | 100.0 |",
        "| hard |  | 25.5 |",
        "| **average** | **50.0** | **62.8** |",
        "| subtasks with 70 or more | 0 of 1 | 1 of 2 |",
        "| lines of a ledger | samples | score |",
        "|--:|--:|--:|",
        "| 60 | 10 | 90.0 |",
    ]
    begin = lines.index(expected[0])
    assert lines[begin : begin + len(expected)] == expected
    for row in (
        "| `reference` | `0a1b` | `ruler` | 2 of 512 tokens, 6 of 1024 tokens | 20000 | float32 | cpu |",
        "| `reference` | `0a1b` | `ledger` | 10 | 20000 | float32 | cpu |",
    ):
        assert row in lines


def test_the_page_is_what_its_file_says():
    assert (ROOT / PAGE).read_text() == make_card(ROOT)[PAGE], "python -m kvbench dev docs-tables --card writes it"


def test_a_file_that_is_missing_or_damaged_is_named_in_one_line(tmp_path):
    write_files(tmp_path, [{"task": "easy", "length": 1024}])
    for _ in range(2):
        with pytest.raises(SettingError, match=re.escape(f"{tmp_path / SCORES}: no scores of the embedded model")):
            make_card(tmp_path)
        (tmp_path / SCORES).unlink(missing_ok=True)
