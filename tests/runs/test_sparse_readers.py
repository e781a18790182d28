"""What a run's record says of methods that hold every row and look at few, and of rows that found no room."""

import sys

import pytest

from kvbench.cli import run as command
from tests.support.recorded_runs import read_runs

CHECKPOINT = dict(layers=4, stops=False)
OMNIKV = ("method=omnikv", "method.filters=[1]", "method.depth=null", "method.wait=1")


@pytest.mark.cover
@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize("settings, dense", [(("method=quest",), 2), (OMNIKV, 3)], ids=["quest", "omnikv"])
def test_everything_is_resident_and_few_rows_attended(checkpoint, tmp_path, monkeypatch, settings, dense, question):
    monkeypatch.chdir(tmp_path)
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", f"question={question}", "budget=0.25"]
    task = ["task.subtasks=ruler_vt", "task.length=900", "task.samples=1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *settings, *where, *task])
    assert command.main() == 0
    name = settings[0].removeprefix("method=")
    for record in read_runs(tmp_path / "results")[name][1]:
        assert record["resident_bytes"] == record["full_bytes"] and record["rows_held"] == record["rows_seen"]
        budget = int(0.25 * record["tokens_in" if question == "visible" else "tokens_context"])
        seen = record["rows_seen_decoding"]
        if name == "quest":  # whole pages; the newest may be partial
            least, most = budget // 16 * 16 - 15, budget // 16 * 16
        else:  # the budget of the prompt's rows, and what came after them
            least = budget + 1
            most = budget + record["tokens_in"] - record["tokens_context"] + record["tokens_out"]
        sparse = (record["rows_attended"] * 4 - dense * seen) / (4 - dense)
        assert least <= sparse <= most < 0.7 * seen
        assert (record["state_bytes"] > 0) == (name == "quest")


@pytest.mark.parametrize(
    "settings, protected, sinks, recents",
    [(("method=sink", "budget=3"), 2, 2, 0), (("method=snapkv", "budget=20"), 19, 0, 13)]
    + [(("method=snapkv", "budget=40"), 32, 0, 0), (("method=centroidkv", "budget=40"), 39, 0, 41)],
    ids=str,
)
def test_a_record_says_what_was_given_up(checkpoint, tmp_path, monkeypatch, settings, protected, sinks, recents):
    monkeypatch.chdir(tmp_path)
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", "task.subtasks=ruler_vt", "task.length=900"]
    monkeypatch.setattr(sys, "argv", ["run.py", *settings, *where, "task.samples=1"])
    assert command.main() == 0
    found = read_runs(tmp_path / "results")
    [record] = found[settings[0].removeprefix("method=")][1]
    assert record["protected"] == protected and record["given_up"] == {"sinks": sinks, "recents": recents}
    [baseline] = found["full"][1]
    assert baseline["protected"] == 0 and baseline["given_up"] == {"sinks": 0, "recents": 0}
