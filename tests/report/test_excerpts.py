"""The prompts beside the report page: from a process of their own, once, or with the reason why not."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvbench.report import excerpts
from kvbench.report.page import write_report
from tests.support.report_store import make_records, write_run

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
ANSWER = """
import json, sys
for line in sys.stdin:
    uids = json.loads(line)["uids"]
    print(json.dumps({"excerpts": {uid: [200, [["</script>\\x1b", 3, False], [uid[-1], 3, True]]] for uid in uids}}))
"""


def list_prompts(results: Path) -> list[dict]:
    """Write the page, and return what it says about the prompts of its panels."""
    text = write_report(results, NOW).read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])["prompts"]


@pytest.fixture
def store(tmp_path):
    """A method and the full cache, whose prompts have real hashes."""
    hashed = {"prompt_hash": "0123456789abcdef", "rows_seen": 200}
    write_run(tmp_path, make_records(1.0, 100, **hashed), method={"name": "full"})
    write_run(tmp_path, make_records(0.1, 50, **hashed), budget=0.1)
    return tmp_path


def test_prompts_are_made_once_and_are_text_only(store, monkeypatch):
    monkeypatch.setattr(excerpts, "COMMAND", [sys.executable, "-c", ANSWER])
    (made,) = list_prompts(store)
    text = (store / "report" / made["name"]).read_text("ascii")
    head = f'kvbenchPrompts("{made["name"]}",'
    assert text.startswith(head) and "<" not in text and (made["samples"], made["of"]) == (24, 24)
    found = json.loads(text[len(head) : -3])
    assert found["vt/1"] == [200, [["</script>\\x1b", 3, False], ["1", 3, True]]]
    monkeypatch.setattr(excerpts, "COMMAND", ["/none"])  # the file is used again
    assert list_prompts(store) == [made]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import json; print(json.dumps({'reason': 'the data is gone'}))", "the data is gone"),
        ("raise SystemExit(1)", "ended early"),
        ("import time; time.sleep(60)", "more than 1 s"),
    ],
    ids=["refused", "failed", "late"],
)
def test_prompts_that_cannot_be_made_have_a_reason(store, monkeypatch, code, reason):
    monkeypatch.setattr(excerpts, "COMMAND", [sys.executable, "-c", code])
    monkeypatch.setattr(excerpts, "SECONDS", 1.0)
    (made,) = list_prompts(store)
    assert reason in made["reason"] and not list((store / "report").glob("prompts-*"))


def test_a_panel_shows_the_samples_that_are_lost_most(store, monkeypatch):
    monkeypatch.setattr(excerpts, "COMMAND", [sys.executable, "-c", ANSWER])
    monkeypatch.setattr(excerpts, "SAMPLES", 5)
    (made,) = list_prompts(store)
    assert (made["samples"], made["of"]) == (5, 24)
    text = (store / "report" / made["name"]).read_text("ascii")
    full, method = make_records(1.0, 100), make_records(0.1, 50)
    lost = {uid for uid in full if method[uid]["score"] < full[uid]["score"]}
    assert set(json.loads(text.partition(",")[2][:-3])) <= lost and len(lost) >= 5
