"""Studies that train DeltaKV's compressors: what they compare, and that no training is repeated or lost."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvbench.cli import study as command
from kvbench.models.checkpoint import Checkpoint
from kvbench.papers.exhibits import load_exhibits
from kvbench.studies import training_study
from kvbench.studies.delta_objectives import POINTS, DeltaObjectives
from kvbench.studies.delta_sizes import DeltaSizes
from kvbench.studies.training_study import Training
from kvbench.training.delta_losses import DeltaRecipe
from kvbench.training.delta_training import DeltaTraining, HeldOut

CHECKPOINT = {"layers": 1}


@pytest.fixture
def study(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the command on a tiny checkpoint and a text; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)

    def call(*words: str) -> tuple[int, str, str]:
        code = command.main([*words, "model=hf", f"model.path={checkpoint}"])
        return code, *capsys.readouterr()

    return call


def test_a_stopped_study_goes_on_and_an_ended_one_trains_nothing(checkpoint, tmp_path, monkeypatch):
    begun = []

    def run(self):
        begun.append((self.recipe.loss, self.step))
        if len(begun) == 2:
            self.take_step([0])
            self.save()
            raise KeyboardInterrupt
        whole(self)

    whole = DeltaTraining.run
    monkeypatch.setattr(DeltaTraining, "run", run)
    monkeypatch.setattr(training_study, "LENGTH", 24)
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    own = Checkpoint("own", str(checkpoint))
    made = SimpleNamespace(
        run=SimpleNamespace(checkpoint=own), model=own.weights(torch.float32, "cpu"), tokenizer=own.tokenizer()
    )
    study = DeltaObjectives(steps=2).prepare(own, None)
    with pytest.raises(KeyboardInterrupt):
        study.compute(made, tmp_path / "book.txt", tmp_path / "made")
    lines = list(study.compute(made, tmp_path / "book.txt", tmp_path / "made"))
    assert begun == [("both", 0), ("mse", 0), ("mse", 1), ("ntp", 0)]
    assert list(study.compute(made, tmp_path / "book.txt", tmp_path / "made")) == lines and len(begun) == 4
    assert sorted(path.suffix for path in (tmp_path / "made").iterdir()) == [".json"] * 3
    first = [own.value for own in lines if (own.quantity, own.x) == ("ce", 1.0) and own.series != "MSE only"]
    assert len(first) == 2 and first[0] == first[1]  # all begin with the same weights and the same sequence


def test_trainings_must_be_asked_for_by_name(study, monkeypatch):
    assert study("deltakv", "figure02b", "steps=3")[2].startswith("kvbench: steps=3: none of these exhibits trains")
    assert study("deltakv", "figure06", "steps=0")[2].startswith("kvbench: steps=0: a whole number of at least 1")
    few = {name: spec for name, spec in load_exhibits("deltakv").items() if name.endswith(("figure06", "table08"))}
    monkeypatch.setattr("kvbench.papers.exhibits.load_exhibits", lambda *_: few)
    code, out, err = study("deltakv", "text=book.txt", "tokens=128", "prompts=1", "device=cpu")
    assert code == 0 and err.count("deltakv_figure06 is left out: it trains compressors for minutes") == 1, err
    assert "deltakv_table08" in out


RECIPE = DeltaRecipe(code=8, inner=12, steps=70, length=24, rate=1e-2)


def test_points_of_a_curve_are_means_of_steps():
    losses = [{"ce": float(step), "mse": step / 2} for step in range(1, 71)]
    held_out = HeldOut(24, 1.0, 2.0, [3.0, 5.0])
    settings = DeltaObjectives().list_settings(RECIPE)
    trainings = [Training(replace(RECIPE, **own), losses, held_out) for own in settings]
    lines = list(DeltaObjectives().compare(RECIPE, trainings))
    curve = [own for own in lines if (own.quantity, own.series) == ("ce", "MSE only")]
    assert len(curve) <= POINTS and sum(own.n for own in curve) == 70
    assert all(own.value == own.x for own in curve)  # the mean of some numbers in turn is their middle
    assert [own.value for own in lines if own.quantity == "held_out_mse"] == [4.0] * 3


def test_each_size_is_varied_alone():
    settings = list(DeltaSizes().list_settings(RECIPE))
    assert all(len(own) == 1 for own in settings) and len(settings) == 16
    after = [HeldOut(24, 1.0, float(at), []) for at in range(16)]
    trainings = [Training(replace(RECIPE, **own), [], held_out) for own, held_out in zip(settings, after, strict=True)]
    lines = list(DeltaSizes().compare(RECIPE, trainings))
    compressed = [(own.quantity, own.x, own.value) for own in lines if own.series == "compressed"]
    assert compressed[4:8] == [("nearest", float(size), float(at)) for at, size in enumerate((1, 2, 4, 8), 4)]
    assert [x for quantity, x, _ in compressed if quantity == "code"] == [2, 4, 8, 12]
    for quantity in ("code", "nearest", "inner", "stride"):
        assert [own.value for own in lines if (own.quantity, own.series) == (quantity, "untouched")] == [1.0] * 4
