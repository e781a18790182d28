"""What a tuning leaves for a model's card: losses on plain text, and a short learning curve."""

import json
import math
import re

import numpy as np
import pytest
import torch

from kvbench.cli import tune as tune_command
from kvbench.models import checkpoint, local_models
from kvbench.models.tuned_models import find_tuned
from kvbench.training import tuning_call
from kvbench.training.tuning_data import SHARES, TEXT
from kvbench.training.tuning_notes import (
    COUNTS,
    FAMILIES,
    POINTS,
    TextLoss,
    read_curve,
    read_text_losses,
    shorten_curve,
    write_curve,
)
from kvbench.validation import SettingError
from tests.support.tuned_models import write_base, write_factors


def make_line(step: int, **scores: float) -> dict[str, object]:
    """A line of OUT.log.jsonl, without what no card shows."""
    text = None if step % 20 else 2.0 + step
    return {"step": step, "tokens": 8 * step, "seconds": 0.5 * step, "loss": 1 / step, "text": text, "kl": text} | {
        "scores": scores
    }


def test_every_kind_of_samples_is_in_one_family():
    kinds = [kind for family in FAMILIES.values() for kind in family]
    assert sorted(kinds) == sorted(set(SHARES) - {TEXT})


def test_a_point_is_the_mean_of_lines(tmp_path):
    lines = [make_line(10, ruler_vt=0.0, niah_single_1=50.0), make_line(20, niah_single_2=100.0, phonebook=0.0)]
    lines += [make_line(step, ruler_cwe=step / 10) for step in range(30, 4840, 10)]
    log, path = tmp_path / "log.jsonl", tmp_path / "curve.csv"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_curve(log, path)
    points = read_curve(path)
    assert points == shorten_curve(lines) and POINTS / 2 < len(points) <= POINTS
    first, last = points[0], points[-1]
    width = math.ceil(len(lines) / POINTS)
    assert (first["step"], first["tokens"], first["seconds"]) == (10 * width, 80 * width, 5 * width)
    assert first["loss"] == pytest.approx(sum(1 / line["step"] for line in lines[:width]) / width, abs=1e-4)
    assert (first["text"], first["chains"], first["needles"], first["words"]) == (52.0, 0.0, 50.0, 6.0)
    assert last["step"] == 4830 and last["needles"] is None
    assert shorten_curve([]) == []


@pytest.mark.parametrize("text", [None, "step\n1\n", "\0"])
def test_files_that_cannot_be_read_are_one_line(tmp_path, text):
    path = tmp_path / "notes.csv"
    if text is not None:
        path.write_text(text)
    for read in (read_curve, read_text_losses, lambda path: write_curve(path, tmp_path / "out.csv")):
        with pytest.raises(SettingError, match=r"notes.csv: cannot read (losses on plain text|a learning curve) there"):
            read(path)
    assert not (tmp_path / "out.csv").exists()


def test_the_command_prints_and_writes_them(tmp_path, monkeypatch, capsys):
    losses = [TextLoss(2048, 64, 2.5, 2.53125, "CPU"), TextLoss(8192, 16, 2.25002, 2.12504, "CPU")]
    monkeypatch.setattr(tuning_call, "compute_text_losses", lambda *where: losses)
    given = ["--model", "smollm2", "--out", str(tmp_path / "f"), "--evaluate"]
    assert tune_command.main(given) == 0
    assert read_text_losses(tmp_path / "f.text.csv") == losses and len(list(tmp_path.iterdir())) == 1
    assert capsys.readouterr().out.splitlines() == [
        "plain text, sequences of 2048 tokens: 2.5000 nats a token with smollm2, 2.5312 with the factors (+0.0312)",
        "plain text, sequences of 8192 tokens: 2.2500 nats a token with smollm2, 2.1250 with the factors (-0.1250)",
    ]


def test_the_curve_of_a_second_tuning_goes_on_from_the_first(tmp_path, monkeypatch, capsys):
    """It is written only with the file with whose factors the tuning began."""
    monkeypatch.setattr(local_models, "MODELS", tmp_path / "models")
    monkeypatch.setattr(tuning_call, "compute_text_losses", lambda *where: [])
    stages = [{"steps": 20}, {"steps": 10}]
    for name, count in (("first", 1), ("second", 2)):
        write_factors(tmp_path / name, model="abc", tunings=json.dumps(stages[:count]))
        lines = [make_line(step, ruler_vt=5.0) for step in (10, 20)[: 3 - count]]
        (tmp_path / f"{name}.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def evaluate(name: str, *options: str) -> int:
        return tune_command.main(["--model", "smollm2", "--out", str(tmp_path / name), "--evaluate", *options])

    assert evaluate("first") == 0
    refused = {
        "--out=.*: began with the factors of an earlier tuning; name their file with --start": ("second",),
        "--start=.*: second did not begin with these": ("second", "--start", str(tmp_path / "second")),
        "--start=.*: first did not begin with these": ("first", "--start", str(tmp_path / "first")),
    }
    for message, given in refused.items():
        assert evaluate(*given) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "second.curve.csv").exists()
    assert evaluate("second", "--start", str(tmp_path / "first")) == 0
    [first], points = (read_curve(tmp_path / f"{name}.curve.csv") for name in ("first", "second"))
    assert points[0] == first and len(points) == 2
    assert [points[1][name] for name in (*COUNTS, "chains", "loss")] == [30, 240, 15, 5, 0.1]


def test_losses_are_those_of_the_base_and_of_the_merged_model(tmp_path, monkeypatch):
    monkeypatch.setattr(local_models, "MODELS", tmp_path / "models")
    monkeypatch.setitem(checkpoint.KNOWN_MODELS, "smollm2", tmp_path / "models/smollm2")
    monkeypatch.setattr(tuning_call, "TRIAL", {64: 2, 128: 1})
    write_base(tmp_path / "models")
    write_factors(tmp_path / "f")
    tokens = np.arange(300, dtype=np.uint16) % 90
    np.save(tmp_path / "held_out.npy", tokens)
    (tmp_path / "texts.json").write_text('{"train": {"digest": "0a"}}')
    losses = tuning_call.compute_text_losses("smollm2", tmp_path / "f", tmp_path, "cpu")
    assert [(loss.length, loss.sequences, loss.device) for loss in losses] == [(64, 2, "CPU"), (128, 1, "CPU")]
    ids = torch.tensor(tokens[:128].astype("int64"))[None]
    for folder, loss in (
        (tmp_path / "models/smollm2", losses[1].base),
        (find_tuned("smollm2", tmp_path / "f"), losses[1].tuned),
    ):
        model = checkpoint.Checkpoint("", str(folder)).weights(torch.float32, "cpu")
        assert loss == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
