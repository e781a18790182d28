"""A model that computes numbers that are not finite ends the run with a line that names dtype and layer."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.engine import graph_decoding
from kvbench.models.loading import load_weights
from kvbench.models.transformers_port import list_decoder_layers
from kvbench.store.runs import load_runs
from tests.support.selection import only_in_full

CHECKPOINT = {"layers": 3, "stops": False}
TASK = ("task=niah", "task.lengths=[256]", "task.depths=[50]", "task.new_tokens=24")
LAYER = 1


@pytest.fixture
def overflow(monkeypatch):
    """Lets layer 1 return infinity, as float16 does above 65504, for what `when(ids, count)` chooses.

    `ids` are the tokens that a forward pass reads, (B, T); `count` is the number of passes that read one token. It
    chooses rows of the batch, (B,) bool.
    """

    def install(when) -> None:
        def load(*given):
            model, state = load_weights(*given), {"ids": None, "count": 0}

            def see(module, args, kwargs):
                ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                state["count"] = state["count"] + 1 if ids.shape[1] == 1 else 0
                state["ids"] = ids

            def change(module, args, output):
                rows = when(state["ids"], state["count"])
                hidden = output[0] if isinstance(output, tuple) else output
                hidden = hidden.masked_fill(rows[:, None, None], torch.inf)
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            model.register_forward_pre_hook(see, with_kwargs=True)
            list_decoder_layers(model)[LAYER].register_forward_hook(change)
            return model

        monkeypatch.setattr("kvbench.models.loading.load_weights", load)

    return install


@pytest.fixture
def copy_with(checkpoint, tmp_path):
    """Copies the checkpoint with changed weights and gives its folder."""

    def make(change):
        folder = shutil.copytree(checkpoint, tmp_path / "copy")
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def every(ids, count):
    return torch.ones(len(ids), dtype=torch.bool)


def at_prompt(ids, count):
    return every(ids, count) & (ids.shape[1] > 64)  # not where kernels are warmed up


def at_token(number):
    return lambda ids, count: every(ids, count) & (count == number)


@pytest.mark.cover
@pytest.mark.parametrize("method", ["full", "snapkv", "h2o", only_in_full("kvzip"), only_in_full("quest")])
@pytest.mark.parametrize(
    "when", [every, at_prompt, at_token(1), at_token(20)], ids=["warm-up", "prompt", "second token", "21st"]
)
def test_the_model_is_blamed_and_not_the_method(kvbench, overflow, tmp_path, method, when):
    overflow(when)
    code, out, errors = kvbench(*TASK, f"method={method}", "budget=0.3", "dtype=float32")
    assert (code, out) == (1, "")
    assert errors.splitlines()[-1].endswith(": layer 1 computes numbers that are not finite in float32"), errors
    assert not [record for run in load_runs(tmp_path / "results") for record in run.records]


def test_float16_that_overflows_names_the_dtypes_that_do_not(kvbench, checkpoint, copy_with):
    def grow(weights):
        for name in ("up_proj", "down_proj"):
            own = weights[f"model.layers.2.mlp.{name}.weight"]
            own *= 6e4 / own.abs().max()

    settings = (f"model.path={copy_with(grow)}", *TASK, "method=snapkv")
    code, _, errors = kvbench(*settings, "dtype=float16")
    assert code == 1 and errors.endswith("float16 overflows in layer 2; use dtype=bfloat16 or dtype=float32\n"), errors
    assert kvbench(*settings, "dtype=float32")[0] == 0


def test_the_other_samples_of_a_batch_have_records(kvbench, overflow, monkeypatch, tmp_path):
    monkeypatch.setattr("kvbench.runs.runner.find_batch_size", lambda runs: 4)  # as on a GPU
    prompts = []

    def in_one_row(ids, count):
        if ids.shape[1] > 64 and not prompts and len(ids) > 1:
            prompts.append(ids[1].clone())
        same = bool(prompts) and ids.shape[1] == len(prompts[0])
        return (ids == prompts[0]).all(1) if same else ~every(ids, count)

    overflow(in_one_row)
    code, _, errors = kvbench(*TASK[:2], "task.depths=[20,40,60,80,100]", *TASK[3:], "method=full")
    assert code == 1 and "layer 1 computes numbers" in errors.splitlines()[-1]
    [run] = load_runs(tmp_path / "results")
    assert len(run.records) == 1 and not run.finished


@pytest.mark.parametrize("step", [0, 18])
def test_a_graph_notes_it(kvbench, monkeypatch, tmp_path, step):
    """Here a graph computes it and the modules do not, so that no layer is named."""
    monkeypatch.setattr("kvbench.engine.context.can_capture", lambda model: True)
    read = graph_decoding.read_token

    def spoil(weights, rows, *more):
        return read(weights, rows, *more).where(rows.kinds[0].step != step, torch.nan)

    monkeypatch.setattr(graph_decoding, "read_token", spoil)
    code, _, errors = kvbench(*TASK, "method=snapkv", "budget=0.3", "dtype=float32")
    assert code == 1 and "its logits are not finite in float32" in errors.splitlines()[-1], errors
    assert not [record for run in load_runs(tmp_path / "results") for record in run.records]


def test_the_likelihood_of_a_right_answer_is_checked_too(kvbench, overflow, tmp_path):
    overflow(lambda ids, count: every(ids, count) & (1 < ids.shape[1] < 40))
    code, _, errors = kvbench(*TASK, "method=full", "fidelity=true", "dtype=float32")
    assert code == 1 and "layer 1 computes numbers" in errors.splitlines()[-1], errors
