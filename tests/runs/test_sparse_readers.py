"""What a run's record says of methods that hold every row and look at few, and of rows that found no room."""

import sys

import pytest
import torch

from kvbench.cli import run as command
from kvbench.models.configuration import load_layout
from tests.support.delta_files import draw_compressor, write_compressors
from tests.support.recorded_runs import read_runs
from tests.support.selection import only_in_full

CHECKPOINT = dict(layers=4, stops=False)
TASK = ("task=niah", "task.depths=[50]", "task.lengths=[600]", "task.new_tokens=12")
OMNIKV = ("method=omnikv", "method.filters=[1]", "method.depth=null", "method.wait=1")


@pytest.mark.cover
@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize(
    "settings, dense",
    [(("method=quest",), 2), (OMNIKV, 3), (("method=pqcache",), 0)],
    ids=["quest", "omnikv", "pqcache"],
)
def test_everything_is_resident_and_few_rows_attended(checkpoint, tmp_path, monkeypatch, settings, dense, question):
    monkeypatch.chdir(tmp_path)
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", f"question={question}", "budget=0.25"]
    monkeypatch.setattr(sys, "argv", ["run.py", *settings, *where, *TASK])
    assert command.main() == 0
    name = settings[0].removeprefix("method=")
    for record in read_runs(tmp_path / "results")[name][1]:
        assert record["resident_bytes"] == record["full_bytes"] and record["rows_held"] == record["rows_seen"]
        budget = int(0.25 * record["tokens_in" if question == "visible" else "tokens_context"])
        seen = record["rows_seen_decoding"]
        if name == "quest":  # whole pages; the newest may be partial
            least, most = budget // 16 * 16 - 15, budget // 16 * 16
        elif name == "pqcache":  # the sinks, the budget of the rows behind them, and the token; one row for rounding
            budget = (record["tokens_in" if question == "visible" else "tokens_context"] - 32) // 4
            least, most = 32 + budget, 32 + budget + 1
        else:  # the budget of the prompt's rows, and what came after them
            least = budget + 1
            most = budget + record["tokens_in"] - record["tokens_context"] + record["tokens_out"]
        sparse = (record["rows_attended"] * 4 - dense * seen) / (4 - dense)
        assert least <= sparse <= most < 0.7 * seen
        assert (record["state_bytes"] > 0) == (name in ("quest", "pqcache"))


def test_deltakv_holds_few_bytes_and_reads_few_rows(checkpoint, tmp_path, monkeypatch):
    """The system of the paper: layer 0 is full, 1 to 3 hold codes and read a fifth of them."""
    monkeypatch.chdir(tmp_path)
    shape = load_layout(str(checkpoint))
    width = 2 * shape.heads * shape.dim
    made = [draw_compressor(width, width // 8, layer).to("cpu", torch.float32) for layer in range(shape.layers)]
    path = write_compressors(tmp_path / "compressors", made)
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", *TASK]
    full = [f"{group}.{own}" for group in ("method", "codec") for own in ("full_layers=[0]", "depth=null", "recent=32")]
    settings = ["method=deltakv", "codec=delta", f"codec.path={path}", *full, "budget=0.2"]
    monkeypatch.setattr(sys, "argv", ["run.py", *where, *settings])
    assert command.main() == 0
    found = read_runs(tmp_path / "results")
    [record], [baseline] = found["deltakv"][1], found["full"][1]
    assert record["weights_bytes"] == 3 * made[0].bytes and baseline["weights_bytes"] == 0
    assert record["rows_held"] == record["rows_seen"] and record["decoding"] == "modules"
    compressed = (record["tokens_in"] - 8 - 32) // 32 * 32
    read = record["tokens_in"] - compressed + compressed // 5
    sparse = (record["rows_attended"] * 4 - record["rows_seen_decoding"]) / 3
    assert read <= sparse <= read + record["tokens_out"] < 0.5 * record["tokens_in"]
    assert 0.25 < record["resident_bytes"] / record["full_bytes"] < 0.25 + 0.75 * 0.4


@pytest.mark.parametrize(
    "settings, protected, sinks, recents",
    [(("method=sink", "budget=3"), 2, 2, 0), (("method=snapkv", "budget=20"), 19, 0, 13)]
    + [
        only_in_full(*own)
        for own in ((("method=snapkv", "budget=40"), 32, 0, 0), (("method=centroidkv", "budget=40"), 39, 0, 41))
    ],
    ids=str,
)
def test_a_record_says_what_was_given_up(checkpoint, tmp_path, monkeypatch, settings, protected, sinks, recents):
    monkeypatch.chdir(tmp_path)
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["run.py", *settings, *where, *TASK, "task.lengths=[200]", "task.new_tokens=2"])
    assert command.main() == 0
    found = read_runs(tmp_path / "results")
    [record] = found[settings[0].removeprefix("method=")][1]
    assert record["protected"] == protected and record["given_up"] == {"sinks": sinks, "recents": recents}
    [baseline] = found["full"][1]
    assert baseline["protected"] == 0 and baseline["given_up"] == {"sinks": 0, "recents": 0}
