"""Drawn answers of the embedded model are executed again: those of a small store, and those that are committed."""

import pytest

from kvbench.cli import bundle, verify
from tests.support.command_line import run_cli
from tests.support.published_bundles import MEASURED, is_embedded, list_bundles

pytestmark = pytest.mark.full


def test_committed_answers_of_the_embedded_model_are_given_again(capfd):
    """What a GPU answered in bfloat16 may round differently here, so half of the answers must agree."""
    for path in list_bundles(MEASURED):
        if is_embedded(path):
            assert verify.main([str(path), "--replay", "4", "--seed", "0", "--agree", "50%", "device=cpu"]) == 0
            assert "agree" in capfd.readouterr().out


def test_drawn_answers_of_the_embedded_model_are_given_again(tmp_path, monkeypatch, capfd):
    task = ("task=ruler", "task.length=512", "task.samples=2", "task.subtasks=[niah_single_1,niah_multivalue]")
    given = ["-m", f"results={tmp_path}", "device=cpu", *task, "method=snapkv,knorm", "budget=0.25"]
    assert run_cli(given, monkeypatch, capfd)[0] == 0
    path = tmp_path / "published" / "drawn.zip"
    assert bundle.main(["--results", str(tmp_path), "--draw", "3", "--out", str(path)]) == 0
    assert verify.main([str(path), "--replay", "3"]) == 0
    out = capfd.readouterr().out
    assert "3 answers of 3 runs, drawn with --draw 3 --seed 0 from 12 answers of 3 runs" in out
    assert "replay: 3 agree, 0 damaged" in out
