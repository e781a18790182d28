"""The training of DeltaKV's compressors: losses against an oracle in float64, resumption, files, what is refused."""

import copy
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from io import StringIO
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from kvbench.cli import calibrate
from kvbench.config.catalogue import SHAPES, build, load_settings
from kvbench.interfaces.networks import Network
from kvbench.methods.codecs.delta_compressors import Compressor, check_fit, peek_compressors, read_compressors
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.configuration import load_layout
from kvbench.models.embedded import REFERENCE
from kvbench.models.transformers_port import find_text_decoder, read_layout
from kvbench.training import delta_training, interrupted_training, token_sequences
from kvbench.training.delta_losses import (
    KINDS,
    LOSSES,
    DeltaRecipe,
    average_references,
    check_layout,
    choose_recipe,
    collect_rows,
    compute_losses,
    draw_compressors,
    list_centres,
    rebuild,
    replace_rows,
)
from kvbench.training.delta_training import DeltaTraining, count_held_out, count_needed, order_sequences
from kvbench.training.recipe import Recipe
from kvbench.training.token_sequences import (
    PackedText,
    find_packages,
    pack_texts,
    read_dataset,
    read_docstrings,
    read_text_files,
    write_essays,
    write_samples,
)
from kvbench.training.training_data import SampleMaker, load_tokenizer
from kvbench.validation import SettingError
from tests.support.checkpoints import write_checkpoint
from tests.support.full_disk import full_beyond
from tests.support.selection import only_in_full
from tests.support.tiny_models import ids, make_double, make_fresh, tiny

ALL = ["llama", "mistral", "windowed", "qwen2", "qwen3", "phi3"]
SMALL = DeltaRecipe(code=6, inner=8, steps=3, length=40, rate=1e-2, sinks=5, stride=3, neighbours=4)


def linear(down: Tensor, up: Tensor) -> Compressor:
    return Compressor((Network("linear", (down,), (None,)),), (Network("linear", (up,), (None,)),))


def width_of(name: str) -> int:
    layout = read_layout(tiny(name))
    return 2 * layout.heads * layout.dim


# Losses.


def average(kv: np.ndarray, sinks: int, stride: int, neighbours: int) -> np.ndarray:
    """The references of one sample in loops, (T, 2·d_k); the sinks' own rows for the sinks."""
    found = kv.copy()
    for token in range(sinks, len(kv)):
        centres = [c for c in range(token + 1) if c < sinks or (c - sinks) % stride == 0]
        nearest = sorted(centres, key=lambda c: np.linalg.norm(kv[token] - kv[c]))[:neighbours]
        found[token] = np.mean([kv[c] for c in nearest], 0)
    return found


@pytest.mark.parametrize(
    "tokens, sinks, stride, neighbours", [(47, 16, 10, 4), (30, 5, 3, 4), (9, 1, 4, 4), (16, 16, 10, 4), (3, 5, 2, 1)]
)
def test_references_are_the_nearest_centres(tokens, sinks, stride, neighbours):
    kv = torch.randn(2, tokens, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    found = average_references(kv, sinks, stride, neighbours)
    assert found.shape == (2, max(tokens - sinks, 0), 10)
    for own, expected in zip(found, kv.numpy(), strict=True):
        np.testing.assert_allclose(own.numpy(), average(expected, sinks, stride, neighbours)[sinks:], atol=1e-12)


def test_centres():
    assert list_centres(60, 16, 10).tolist() == [*range(16), 16, 26, 36, 46, 56]
    assert list_centres(4, 16, 10).tolist() == [0, 1, 2, 3]


def test_a_code_of_zero_leaves_the_mean_of_the_references():
    kv = torch.randn(1, 40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nothing = linear(torch.zeros(3, 12).double(), torch.ones(12, 3).double())
    expected = average(kv[0].numpy(), SMALL.sinks, SMALL.stride, SMALL.neighbours)
    np.testing.assert_allclose(rebuild(nothing, kv, SMALL)[0].numpy(), expected, atol=1e-12)


def test_without_references_a_code_holds_the_whole_row():
    kv = torch.randn(2, 40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    down, up = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 12), (12, 3)))
    rebuilt = rebuild(linear(down, up), kv, replace(SMALL, remove="reference"))
    assert torch.equal(rebuilt[:, : SMALL.sinks], kv[:, : SMALL.sinks])
    torch.testing.assert_close(rebuilt[:, SMALL.sinks :], kv[:, SMALL.sinks :] @ down.T @ up.T)


@pytest.mark.parametrize("name", ALL)
def test_an_identity_leaves_the_model_as_it_is(name):
    model, eye = make_double(name), torch.eye(width_of(name), dtype=torch.float64)
    tokens = ids(40, seed=1, batch=2)
    layers = read_layout(model).layers
    with torch.no_grad():
        entropy, errors = compute_losses(model, [linear(eye, eye)] * layers, tokens, SMALL)
        logits = model(input_ids=tokens, use_cache=False).logits
        with replace_rows(model, lambda layer, kv: rebuild(linear(eye, eye), kv, SMALL)):
            replaced = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(replaced, logits, rtol=0, atol=1e-9)
    expected = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    assert errors.shape == (layers,) and errors.max() < 1e-12
    assert entropy.item() == pytest.approx(expected.item(), rel=1e-6)


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(own._forward_hooks) for own in model.modules())


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3"])
def test_rows_are_those_before_the_norm_and_the_rotation(name):
    model, tokens = make_double(name), ids(20)
    first = find_text_decoder(model).layers[0]
    with torch.no_grad():
        hidden = first.input_layernorm(model.get_input_embeddings()(tokens))
        width = width_of(name)
        if name == "phi3":
            expected = first.self_attn.qkv_proj(hidden)[..., -width:]
        else:
            expected = torch.cat([first.self_attn.k_proj(hidden), first.self_attn.v_proj(hidden)], -1)
    before = count_hooks(model)  # transformers leaves some after output_hidden_states=True
    found = collect_rows(model, tokens)
    assert len(found) == 2 and count_hooks(model) == before
    torch.testing.assert_close(found[0], expected)
    assert (name != "qwen2") or first.self_attn.k_proj.bias is not None


class Fixed(torch.nn.Module):
    """A projection whose results are known."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


def project(model: torch.nn.Module, number: int, tokens: Tensor) -> Tensor:
    """What the projections of a layer give: the reading stops there."""
    found = []
    attention = find_text_decoder(model).layers[number].self_attn
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    handle.remove()
    return torch.cat([attention.k_proj(found[0]), attention.v_proj(found[0])], -1).detach()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_losses_follow_their_formula(name):
    """Layer by layer: the projections of all earlier layers are replaced by what the compressors left."""
    model, tokens = copy.deepcopy(make_double(name)), ids(40, seed=2)
    compressors = [own.to("cpu", torch.float64) for own in draw_compressors(3, width_of(name), SMALL)]
    layers = range(read_layout(model).layers)
    targets = [project(model, layer, tokens)[0].numpy() for layer in layers]
    entropy, errors = compute_losses(make_double(name), compressors, tokens, SMALL)
    for layer in layers:
        kv = project(model, layer, tokens)[0]
        means = torch.from_numpy(average(kv.numpy(), SMALL.sinks, SMALL.stride, SMALL.neighbours))
        own = compressors[layer]
        w12, w3 = own.down[0].weights

        def compress(x: Tensor, w12: Tensor = w12, w3: Tensor = w3) -> Tensor:
            first, second = (x @ w12.T).chunk(2, -1)
            return first / (1 + (-first).exp()) * second @ w3.T

        rebuilt = (compress(kv) - compress(means)) @ own.up[0].weights[0].T + means
        rebuilt[: SMALL.sinks] = kv[: SMALL.sinks]
        expected = np.square(rebuilt.numpy() - targets[layer]).mean()
        assert errors[layer].item() == pytest.approx(expected, rel=1e-5) and expected > 0.01
        attention = find_text_decoder(model).layers[layer].self_attn
        attention.k_proj, attention.v_proj = (Fixed(own[None]) for own in rebuilt.chunk(2, -1))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    assert entropy.item() == pytest.approx(-logits.gather(-1, tokens[0, 1:, None]).mean().item(), rel=1e-5)


def test_gradients_reach_the_compressors_of_earlier_layers():
    compressors = draw_compressors(3, width_of("llama"), SMALL)
    for weight in compressors[0].parameters():
        weight.requires_grad_()
    entropy, errors = compute_losses(tiny("llama"), compressors, ids(40), SMALL)
    for loss in (entropy, *errors):
        for found in torch.autograd.grad(loss, compressors[0].parameters(), retain_graph=True):
            assert found.abs().max() > 0


# Recipes and the order of sequences.


def test_the_recipe_is_the_authors_and_scaled_for_small_models():
    llama, qwen, small = (choose_recipe(width, 131_072, {"steps": None}) for width in (2048, 1024, 256))
    assert (llama.inner, llama.code, llama.length, llama.steps, llama.rate) == (3072, 512, 8192, 20_000, 2e-4)
    assert (qwen.inner, qwen.code, qwen.rate) == (3072, 256, 2e-4)
    assert (small.inner, small.code, small.length, small.steps) == (768, 64, 2048, 1250)
    assert (
        small.rate == 3e-3
        and choose_recipe(512, 8192, {}).rate == pytest.approx(8e-4)
        and llama.count_weights(2048) == 2048 * 6144 + 3072 * 512 + 512 * 2048
    )
    assert choose_recipe(2048, 4096, {}).length == 4096
    assert [choose_recipe(width, 8192, {"kind": "full"}).inner for width in (2048, 256)] == [4096, 1024]
    assert [choose_recipe(width, 8192, {"remove": "reference"}).code for width in (2048, 256)] == [768, 96]
    with pytest.raises(SettingError, match="^--length=8192: the model takes 4096 tokens$"):
        choose_recipe(2048, 4096, {"length": 8192})


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_drawn_as_those_of_linear_layers(kind):
    recipe = replace(SMALL, kind=kind, inner=400)
    for compressor in draw_compressors(2, 24, recipe):
        assert sum(own.numel() for own in compressor.parameters()) == recipe.count_weights(24)
        networks = (*compressor.down, *compressor.up)
        assert [own.kind for own in networks] == (
            ["mlp_gelu"] * 2 if kind == "full" else ["mlp_swiglu", "linear"]
        ) and all((bias is not None) == (kind == "full") for own in networks for bias in own.biases)
        for network in networks:
            for weight, bias in zip(network.weights, network.biases, strict=True):
                bound = weight.shape[1] ** -0.5
                for own in (weight,) if bias is None else (weight, bias):
                    assert bound / 2 < own.abs().max() <= bound


def test_files_name_only_the_ablations_that_are_in_use():
    assert asdict(SMALL).keys() - SMALL.describe().keys() == {"kind", "remove", "loss"}
    full = replace(SMALL, kind="full", loss="mse")
    assert full.describe() == SMALL.describe() | {"kind": "full", "loss": "mse"}
    assert DeltaRecipe(**full.describe()) == full and DeltaRecipe(**SMALL.describe()) == SMALL


def test_the_learning_rate_rises_and_falls():
    rates = [DeltaRecipe(1, 1, 100, 64, 1.0, warmup=0.1).learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)]) and rates[10] == 1.0
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    assert DeltaRecipe(1, 1, 1, 64, 1.0).learning_rate(0) == 1.0


def test_every_pass_reads_every_sequence_once():
    steps = list(islice(order_sequences(7, 2, seed=3, first=0), 9))
    for begin in (0, 3, 6):
        assert len({own for step in steps[begin : begin + 3] for own in step}) == 6
    assert steps[:3] != steps[3:6]
    for first in (1, 3, 5):
        assert list(islice(order_sequences(7, 2, seed=3, first=first), 9 - first)) == steps[first:]
    assert next(order_sequences(7, 2, seed=4, first=0)) != steps[0]


def test_enough_is_left_beside_the_sequences_held_out():
    assert [count_held_out(own) for own in (2, 99, 100, 10**6)] == [1, 1, 2, 16]
    for trained in (1, 48, 49, 97, 98, 147, 149, 5000):
        own = count_needed(trained)
        assert own - count_held_out(own) >= trained > own - 1 - count_held_out(own - 1)


# Training.


@pytest.mark.parametrize("name, dtype", [only_in_full("llama", torch.float32), ("phi3", torch.bfloat16)])
def test_the_losses_fall_and_the_model_stays(tmp_path, name, dtype):
    model = make_fresh(name).to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    recipe = DeltaRecipe(code=96, inner=192, steps=50, length=48, rate=3e-3, sinks=4, stride=5)
    text = PackedText(torch.randint(3, 23, (12, 48), generator=torch.Generator().manual_seed(0)).int(), "", 1)
    training = DeltaTraining(model, width_of(name), recipe, text, tmp_path / "out", {})
    first = training.evaluate()
    training.run()
    last = training.evaluate()
    assert sum(last.errors) < 0.75 * sum(first.errors) and last.compressed < first.compressed
    assert last.untouched == first.untouched
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(own.grad is not None for own in model.parameters())
    assert {own.dtype for one in training.masters for own in one.parameters()} == {torch.float32}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_minimises_the_chosen_loss(tmp_path, loss):
    model, recipe = make_fresh("llama"), replace(SMALL, loss=loss)
    text = PackedText(torch.randint(3, 23, (3, 40), generator=torch.Generator().manual_seed(0)).int(), "", 1)
    training = DeltaTraining(model, width_of("llama"), recipe, text, tmp_path / "out", {})
    losses = training.take_step([0])
    expected = draw_compressors(len(training.masters), width_of("llama"), recipe)
    weights = [own.requires_grad_() for compressor in expected for own in compressor.parameters()]
    entropy, errors = compute_losses(model, expected, text.sequences[:1].long(), recipe)
    {"both": entropy + errors.sum(), "mse": errors.sum(), "ntp": entropy}[loss].backward()
    torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
    torch.optim.AdamW(weights, lr=recipe.learning_rate(0), weight_decay=0.0).step()
    trained = [own for compressor in training.masters for own in compressor.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(trained, weights, strict=True))
    assert losses["ce"] == entropy.item() and losses["mse"] == errors.mean().item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with 2 d_k = 128, and texts."""
    made = tmp_path_factory.mktemp("model")
    write_checkpoint(made)
    (made / "texts" / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.txt", "deep/b.md", "deep/c.rst")):
        (made / "texts" / name).write_text(f"The {number} old man gave a letter to nobody in the house. " * 12)
    (made / "texts" / "d.json").write_text("nothing")
    return made


def command(folder: Path, out: Path, **more: object) -> list[str]:
    options = {"model": folder, "out": out, "steps": 6, "length": 64, "text": folder / "texts", "device": "cpu"} | more
    return ["deltakv", *(part for name, value in options.items() if value for part in (f"--{name}", str(value)))]


def test_untrained_weights_need_a_shape_only(tmp_path, capsys):
    """They are those with which a training begins, and belong to no model."""
    shape, out = SHAPES / "tiny.json", tmp_path / "new" / "file"
    options = ["--model", str(shape), "--out", str(out), "--device", "cpu", "--code", "6"]
    assert calibrate.main(["deltakv", "--untrained", *options]) == 0
    layout = load_layout(str(shape))
    width = 2 * layout.heads * layout.dim
    found = check_fit(out, layout.layers, width)
    assert (found.code, found.identity, found.metadata["source"]) == (6, None, "untrained")
    assert f"{out}: untrained compressors of {layout.layers} layers" in capsys.readouterr().out
    assert calibrate.main(["deltakv", "--untrained", *options, "--steps", "3"]) == 2
    assert f"--out={out}: there is a file; delete it or give another name" in capsys.readouterr().err
    options[3] = str(tmp_path / "other")
    assert calibrate.main(["deltakv", "--untrained", *options, "--steps", "3"]) == 2
    assert "--untrained: trains nothing; leave out --steps" in capsys.readouterr().err
    assert calibrate.main(["deltakv", "--untrained", *options, "--loss", "mse", "--remove", "reference"]) == 2
    assert "--untrained: trains nothing; leave out --remove, --loss" in capsys.readouterr().err
    recipe = choose_recipe(width, layout.longest, {"code": 6, "seed": 42})
    first, read = draw_compressors(layout.layers, width, recipe), read_compressors(out, layout.layers, width)
    assert found.bytes == 2 * layout.layers * recipe.count_weights(width)
    for layer, compressor in enumerate(first):
        for one, other in zip(compressor.parameters(), read[layer].parameters(), strict=True):
            assert torch.equal(one.bfloat16(), other)


def test_untrained_weights_of_the_full_kind(tmp_path):
    shape, out = SHAPES / "tiny.json", tmp_path / "file"
    options = ["--model", str(shape), "--out", str(out), "--device", "cpu", "--kind", "full"]
    assert calibrate.main(["deltakv", "--untrained", *options]) == 0
    layout = load_layout(str(shape))
    width = 2 * layout.heads * layout.dim
    found = check_fit(out, layout.layers, width)
    assert (found.down, found.up, found.code) == ("mlp_gelu", "mlp_gelu", width // 4)
    recipe = choose_recipe(width, layout.longest, {"kind": "full"})
    assert recipe.inner == 4 * width and found.bytes == 2 * layout.layers * recipe.count_weights(width)


ABLATIONS = [
    {"kind": "full"}, {"remove": "reference"}, {"kind": "full", "remove": "reference"},
    {"stride": 3, "nearest": 2}, {"loss": "mse"}, {"loss": "ntp"},
]  # fmt: skip


@pytest.mark.parametrize("chosen", ABLATIONS, ids=str)
def test_the_codec_reads_what_was_trained_for_an_ablation(tmp_path, folder, chosen):
    """It reads the rows of a text as the training rebuilds them."""
    out = tmp_path / "file"
    assert calibrate.main(command(folder, out, steps=2, **chosen)) == 0
    described = check_fit(out, 2, 128)
    recipe = DeltaRecipe(**json.loads(described.metadata["recipe"]))
    named = {"nearest": "neighbours"}
    assert all(getattr(recipe, named.get(name, name)) == value for name, value in chosen.items())
    kinds = ("mlp_gelu", "mlp_gelu") if chosen.get("kind") == "full" else ("mlp_swiglu", "linear")
    assert (described.down, described.up) == kinds and described.code == (48 if "remove" in chosen else 32)

    settings = {"path": str(out), "full_layers": [], "depth": None, "sinks": recipe.sinks, "recent": 16,
                "stride": recipe.stride, "nearest": recipe.neighbours, "remove": chosen.get("remove")}  # fmt: skip
    if "remove" in chosen:
        with pytest.raises(SettingError, match=f"^codec.path={out}: trained without references; needs codec.remove="):
            build("codec", load_settings("codec", "delta", settings | {"remove": None}))
    codec = build("codec", load_settings("codec", "delta", settings))
    kv = torch.randn(1, 80, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys, values = (own.unflatten(-1, (2, 32)).transpose(1, 2).flatten(0, 2) for own in kv.chunk(2, -1))
    packed = codec.of_layer(1, 2).pack(keys, values, torch.tensor([[80, 80]]))
    assert packed.compressed == 48
    found = torch.cat([own.view(1, 2, 80, 32).transpose(1, 2).flatten(2) for own in packed.read()], -1)
    expected = rebuild(read_compressors(out, 2, 128)[1].to("cpu", torch.float64), kv, recipe)
    torch.testing.assert_close(found[:, :64], expected[:, :64])
    assert torch.equal(found[:, 64:], kv[:, 64:])


def interrupt_at(monkeypatch, last: int, saved: int) -> None:
    """Stop a training before the step `last` + 1; only the state of the step `saved` is on the disk."""
    step, save = DeltaTraining.take_step, DeltaTraining.save

    def take_step(self: DeltaTraining, chosen: list[int]) -> dict[str, float]:
        if self.step == last:
            raise KeyboardInterrupt
        return step(self, chosen)

    monkeypatch.setattr(DeltaTraining, "take_step", take_step)
    monkeypatch.setattr(DeltaTraining, "save", lambda self: save(self) if self.step == saved else None)
    monkeypatch.setattr(delta_training, "SAVE_EVERY", -1.0)


def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path, folder, monkeypatch, capsys):
    whole, parts = tmp_path / "whole" / "file", tmp_path / "parts" / "file"
    assert calibrate.main(command(folder, whole)) == 0
    printed = capsys.readouterr().out
    with monkeypatch.context() as patch:
        interrupt_at(patch, last=5, saved=3)
        assert calibrate.main(command(folder, parts)) == 130
    assert "stopped at step 5 of 6; the same command goes on from step 3" in capsys.readouterr().err
    assert len(interrupted_training.name_log(parts).read_text().splitlines()) == 5 and not parts.exists()
    state = interrupted_training.name_state(parts)
    assert calibrate.main(command(folder, parts)) == 0
    assert capsys.readouterr().out.replace("parts", "whole") == printed
    one, other = (load_file(path) for path in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert peek_compressors(whole) == peek_compressors(parts) and whole.read_bytes() == parts.read_bytes()
    assert interrupted_training.name_log(whole).read_bytes() == interrupted_training.name_log(parts).read_bytes()
    assert not state.exists()


def train_slowly(arguments: list[str]) -> None:
    """The command in a fork of this process. From step 6 on a step takes a second; every state is kept."""
    take_step, sys.stdout, sys.stderr = DeltaTraining.take_step, StringIO(), StringIO()

    def wait_and_step(self: DeltaTraining, chosen: list[int]) -> dict[str, float]:
        time.sleep(self.step // 6)
        return take_step(self, chosen)

    DeltaTraining.take_step, delta_training.SAVE_EVERY = wait_and_step, -1.0
    sys.exit(calibrate.main(arguments))


def test_a_training_that_was_killed_ends_as_one_that_was_not(tmp_path, folder):
    """SIGKILL comes at any moment of a step, or while the log or the state is written."""
    whole, parts = tmp_path / "whole" / "file", tmp_path / "parts" / "file"
    log, state, sizes = (
        interrupted_training.name_log(parts),
        interrupted_training.name_state(parts),
        {"steps": 12, "inner": 16},
    )
    assert calibrate.main(command(folder, whole, **sizes)) == 0
    process = get_context("fork").Process(target=train_slowly, args=(command(folder, parts, **sizes),))
    process.start()
    end = time.monotonic() + 100
    while not log.exists() or log.read_bytes().count(b"\n") < 5:
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended before it could be killed"
    assert state.exists() and not parts.exists() and 5 <= log.read_bytes().count(b"\n") < 12
    assert calibrate.main(command(folder, parts, **sizes)) == 0
    assert whole.read_bytes() == parts.read_bytes() and not state.exists()
    assert interrupted_training.name_log(whole).read_bytes() == log.read_bytes()


@pytest.mark.parametrize(
    ("what", "size"), [("log", 400), *(only_in_full("state", size) for size in (2000, 10**6, -50))]
)
def test_a_full_disk_ends_a_training_in_one_line(tmp_path, folder, what, size, monkeypatch, capsys):
    """The last state and the lines before are there, and the same command goes on."""
    whole, parts = tmp_path / "whole" / "file", tmp_path / "parts" / "file"
    log, state = interrupted_training.name_log(parts), interrupted_training.name_state(parts)
    assert calibrate.main(command(folder, whole)) == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, last=3, saved=3)
        assert calibrate.main(command(folder, parts)) == 130
    kept, lines = state.read_bytes(), log.read_text().splitlines()
    capsys.readouterr()
    with monkeypatch.context() as patch, full_beyond(size if size > 0 else len(kept) + size):
        if what == "state":
            patch.setattr(delta_training, "SAVE_EVERY", -1.0)
        assert calibrate.main(command(folder, parts)) == 1
    lines_of_errors = capsys.readouterr().err.replace("\r", "\n").splitlines()
    said = [line for line in lines_of_errors if line and not line.startswith("deltakv: ")]  # the progress
    file = log if what == "log" else f"{state}.draft.{os.getpid()}"
    assert said == [f"kvbench: {file}: File too large"]
    assert state.read_bytes() == kept and sorted(parts.parent.iterdir()) == [log, state]
    assert log.read_text().splitlines()[:3] == lines and log.read_bytes().count(b"\n") == 4
    assert calibrate.main(command(folder, parts)) == 0
    assert whole.read_bytes() == parts.read_bytes()
    assert interrupted_training.name_log(whole).read_bytes() == log.read_bytes()


def test_a_disk_without_space_keeps_no_draft_of_a_state(tmp_path, folder, monkeypatch, capsys):
    """In the first step, of the device that is always full."""
    out = tmp_path / "file"
    state = interrupted_training.name_state(out)
    draft = state.with_name(f"{state.name}.draft.{os.getpid()}")
    draft.symlink_to("/dev/full")
    monkeypatch.setattr(delta_training, "SAVE_EVERY", -1.0)
    assert calibrate.main(command(folder, out)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"kvbench: {draft}: No space left on device"
    assert list(tmp_path.iterdir()) == [interrupted_training.name_log(out)]
    assert json.loads(interrupted_training.name_log(out).read_text())["step"] == 1


def refuse_to_read(*arguments: object, **options: object) -> None:
    raise AssertionError("a text was read")


def test_only_another_text_is_refused_after_it_was_read(tmp_path, folder, monkeypatch, capsys):
    """An output that is there, a damaged state, and other settings than the state's are refused before."""
    out, there = tmp_path / "parts" / "file", tmp_path / "there"
    there.write_text("x")
    with monkeypatch.context() as patch:
        interrupt_at(patch, last=2, saved=1)
        assert calibrate.main(command(folder, out)) == 130
    state = interrupted_training.name_state(out)
    kept = state.read_bytes()
    (folder / "more.txt").write_text("Some other text about the house and the letter. " * 40)
    capsys.readouterr()
    assert calibrate.main(command(folder, out, text=folder / "more.txt")) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvbench: --text: ") and "was begun with" in err and err.count("\n") == 1
    monkeypatch.setattr(token_sequences, "pack_texts", refuse_to_read)
    for name, value in {"kind": "full", "remove": "reference", "stride": 5, "nearest": 2, "loss": "mse", "steps": 7,
                        "length": 50, "lr": 0.5, "seed": 1, "batch": 2, "code": 5, "inner": 5, "dtype": "bfloat16",
                        "model": "reference"}.items():  # fmt: skip
        assert calibrate.main(command(folder, out, **{name: value})) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"kvbench: --{name}: ") or name == "model"
        assert "but the training in file.training was begun with" in err and err.count("\n") == 1
    assert calibrate.main(command(folder, there)) == 2
    assert f"--out={there}: there is a file; delete it or give another name" in capsys.readouterr().err
    for damage in (kept[:1000], b""):
        state.write_bytes(damage)
        assert calibrate.main(command(folder, out)) == 2
        assert "file.training is damaged" in capsys.readouterr().err
    torch.save({"settings": 3}, state)
    assert calibrate.main(command(folder, out)) == 2
    assert "file.training is damaged (TypeError); delete it" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_begins_and_goes_on_where_the_disk_has_room_for_it(kind, tmp_path, folder, monkeypatch, capsys):
    """For two states and the log in the beginning, and for what is missing of them afterwards."""
    out, free = tmp_path / "small" / "file", 10**6
    monkeypatch.setattr(interrupted_training.shutil, "disk_usage", lambda own: type("Usage", (), {"free": free}))
    weights = 2 * choose_recipe(128, 4096, {"kind": kind}).count_weights(128)
    need = 2 * (12 * weights + interrupted_training.HEADERS * 2) + interrupted_training.LINE * 6

    def refuse(missing: int, there: int) -> None:
        nonlocal free
        free = there
        assert calibrate.main(command(folder, out, kind=kind)) == 2
        line = f"--out={out}: the training needs {missing / 1e6:.1f} MB there, {free / 1e6:.1f} MB are free"
        assert capsys.readouterr().err == f"kvbench: {line}\n"

    refuse(need, 10**6)
    refuse(need, need - 1)
    assert not out.parent.exists()
    free = need
    with monkeypatch.context() as patch:
        interrupt_at(patch, last=5, saved=3)
        assert calibrate.main(command(folder, out, kind=kind)) == 130
    written = [name(out).stat().st_size for name in (interrupted_training.name_state, interrupted_training.name_log)]
    assert 12 * weights < written[0] < need // 2 and 5 * 64 < written[1] <= 5 * interrupted_training.LINE
    capsys.readouterr()
    refuse(need - sum(written), need - sum(written) - 1)
    free += 1
    assert calibrate.main(command(folder, out, kind=kind)) == 0 and out.stat().st_size < written[0]


def test_the_file_has_the_official_names_and_says_what_made_it(tmp_path, folder, capsys):
    out = tmp_path / "made" / "file.safetensors"
    assert calibrate.main(command(folder, out, text=None)) == 0
    printed, identity = capsys.readouterr().out, Checkpoint("", str(folder)).identity()
    weights = load_file(out)
    shapes = {"compress_down.w12": (768, 128), "compress_down.w3": (32, 384), "compress_up": (128, 32)}
    expected = {
        f"model.layers.{layer}.self_attn.{name}.weight": own for layer in range(2) for name, own in shapes.items()
    }
    assert {name: tuple(own.shape) for name, own in weights.items()} == expected
    described = check_fit(out, 2, 128, identity)
    assert described.identity == identity and (described.down, described.up) == ("mlp_swiglu", "linear")
    recipe, held_out = (json.loads(described.metadata[name]) for name in ("recipe", "held_out"))
    assert DeltaRecipe(**recipe) == choose_recipe(128, 4096, {"steps": 6, "length": 64, "seed": 42})
    assert described.metadata.keys() == {"format", "model", "text", "source", "recipe", "held_out", "kvbench"}
    assert described.metadata["source"] == "essays of kvbench" and str(tmp_path) not in str(described.metadata)
    text = pack_texts(Checkpoint("", str(folder)).tokenizer(), write_essays(42), 64, 7, 2)
    assert described.metadata["text"] == text.digest
    lines = [json.loads(line) for line in interrupted_training.name_log(out).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[0].keys() == {"step", "ce", "mse", "lr"}
    assert f"{out}: compressors of 2 layers, 128 to 32 numbers" in printed
    assert f"cross-entropy {held_out['untouched']:.4f} untouched, {held_out['compressed']:.4f}" in printed
    model = Checkpoint("", str(folder)).weights(torch.float32, "cpu")
    read = read_compressors(out, 2, 128, identity)
    written = [own.to("cpu", torch.float32) for own in read.values()]
    entropy, errors = compute_losses(model, written, text.sequences[-1:].long(), DeltaRecipe(**recipe))
    assert held_out["tokens"] == 64 and held_out["compressed"] == pytest.approx(entropy.item())
    assert held_out["errors"] == pytest.approx(errors.tolist())


def test_what_the_command_refuses(tmp_path, folder, capsys):
    out, there = tmp_path / "file", tmp_path / "there"
    there.write_text("x")
    (tmp_path / "latin.txt").write_bytes("Jürgen".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"words": "a"}\n')
    for wrong, line in (
        ({"steps": "-1"}, "--steps=-1: a whole number of at least 1"),
        ({"length": 17}, "--length=17: a whole number of at least 18"),
        ({"length": 5000}, "--length=5000: the model takes 4096 tokens"),
        ({"batch": "-2"}, "--batch=-2: a whole number of at least 1"),
        ({"lr": "-1"}, "--lr=-1.0: a number above 0"),
        ({"lr": "nan"}, "--lr=nan: a number above 0"),
        ({"seed": "-1"}, "--seed=-1: a whole number of at least 0"),
        ({"dtype": "float16"}, "--dtype=float16: did you mean bfloat16? Choose one of float32, bfloat16"),
        ({"kind": "mlp"}, "--kind=mlp: choose one of light, full"),
        ({"remove": "residual"}, "--remove=residual: choose one of nothing, reference"),
        ({"loss": "ce"}, "--loss=ce: choose one of both, mse, ntp"),
        ({"stride": "-1"}, "--stride=-1: a whole number of at least 1"),
        ({"nearest": "-1"}, "--nearest=-1: a whole number of at least 1"),
        ({"nearest": 17}, "--nearest=17: at most 16, the first candidates"),
        (
            {"remove": "reference", "nearest": 4, "stride": 10},
            "--remove=reference: there are no references; leave out --stride, --nearest",
        ),
        ({"device": "tpu"}, "--device=tpu: choose one of cpu, cuda"),
        ({"model": "/none"}, "--model=/none: no such folder"),
        ({"model": "Referense"}, "--model=Referense: no such model; did you mean reference?"),
        ({"model": "reference.gguf"}, "--model=reference.gguf: no such file"),
        ({"out": there}, f"--out={there}: there is a file; delete it or give another name"),
        ({"out": tmp_path}, f"--out={tmp_path}: no file can be there"),
        ({"out": there / "file"}, f"--out={there}/file: no file can be there"),
        ({"text": tmp_path / "none"}, f"--text={tmp_path}/none: none cannot be read (No such file or directory)"),
        ({"text": tmp_path / "empty"}, "no file there ends with .txt, .md, .rst"),
        ({"text": tmp_path / "latin.txt"}, "latin.txt is not UTF-8"),
        ({"text": there}, "training text too short: 3 tokens, at least 128"),
        ({"text": None, "dataset": tmp_path / "none.jsonl"}, f"--dataset={tmp_path}/none.jsonl: no such file"),
        ({"text": None, "dataset": tmp_path / "empty"}, "no file there ends with .parquet, .jsonl, .json, .csv"),
        ({"text": None, "dataset": rows}, "--column=text: rows.jsonl line 1 has no text there; its columns are words"),
        ({"dataset": rows}, "not allowed with argument --text"),
    ):
        assert calibrate.main(command(folder, **({"out": out} | wrong))) == 2, wrong
        err = capsys.readouterr().err
        assert line in err and err.startswith("kvbench: ") and err.count("\n") == 1
    with pytest.raises(SettingError, match="^--model: layer 0 has a sliding window; DeltaKV needs full attention"):
        check_layout(read_layout(tiny("gemma3")))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("file")]


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path, folder, capsys):
    assert calibrate.main(command(folder, tmp_path / "file", lr="1e30")) == 2
    assert "kvbench: --lr=1e+30: the loss of step" in capsys.readouterr().err.split("\n")[-2]


# Texts.


def test_texts_are_packed_with_their_marks():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    texts = ["One old man.", "", "Two letters to nobody"]
    tokens = [
        token
        for text in texts
        for token in (tokenizer.bos_token_id, *tokenizer(text).input_ids[1:], tokenizer.eos_token_id)
    ]
    found = pack_texts(tokenizer, iter(texts), 4, 100, 1)
    assert found.sequences.flatten().tolist() == tokens[: len(tokens) // 4 * 4] and found.texts == 3
    fewer = pack_texts(tokenizer, iter(texts), 4, 1, 1)
    assert fewer.sequences.tolist() == [tokens[:4]] and fewer.texts == 1 and fewer.digest != found.digest
    assert pack_texts(tokenizer, iter(texts), 3, 100, 1).digest == found.digest
    assert pack_texts(tokenizer, iter(["One old man.", ""]), 4, 100, 1).digest != found.digest
    with pytest.raises(SettingError, match=rf"^training text too short: {len(tokens)} tokens, at least 400$"):
        pack_texts(tokenizer, iter(texts), 4, 100, 100)


def test_texts_come_from_files_and_data_sets(tmp_path, folder, monkeypatch):
    assert [text[:5] for text in read_text_files(folder / "texts")] == ["The 0", "The 1", "The 2"]
    assert list(read_text_files(folder / "texts" / "d.json")) == ["nothing"]
    pandas.DataFrame({"own": ["p", "q"]}).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"own": "x"}\n{"own": "y"}\n')
    (tmp_path / "README.md").write_text("no rows")
    assert list(read_dataset(str(tmp_path), "own", None, "train", "main")) == ["x", "y", "p", "q"]
    asked = []

    def read(*arguments: object) -> list:
        asked.append(arguments)
        return [("row 0", {"text": "z"})]

    monkeypatch.setattr(token_sequences, "read_hub_rows", read)
    assert list(read_dataset("owner/name", "text", "part", "train", "abc")) == ["z"]
    assert asked == [("--dataset", "owner/name", "abc", "part", "train")]


def test_essays_are_the_same_for_a_seed_and_none_that_an_evaluation_reads():
    one, again, other = (list(islice(write_essays(seed), 3)) for seed in (0, 0, 1))
    assert one == again != other and math.isclose(len(one[0].split()), 900, rel_tol=0.5)


def test_samples_have_the_tokens_of_the_embedded_models_training():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    maker = SampleMaker("calibration/42", load_tokenizer(REFERENCE), Recipe())
    for text in islice(write_samples(REFERENCE, 256, 42), 8):
        ids = maker.sample(256).ids
        assert tokenizer(text).input_ids + [tokenizer.eos_token_id] == ids
    assert next(write_samples(REFERENCE, 256, 43)) != next(write_samples(REFERENCE, 256, 42))


def test_samples_are_for_the_embedded_model(tmp_path, folder, capsys):
    out = tmp_path / "file"
    sizes = ["--steps", "1", "--length", "128", "--inner", "8", "--code", "8", "--device", "cpu"]
    assert calibrate.main(["deltakv", "--model", "reference", "--out", str(out), "--samples", *sizes]) == 0
    assert check_fit(out, 6, 256, None).metadata["source"] == "samples as the embedded model trained on"
    capsys.readouterr()
    assert calibrate.main(["deltakv", "--model", str(folder), "--out", str(tmp_path / "no"), "--samples"]) == 2
    line = f"--samples: for --model=reference|reference_v2, and this is --model={folder}"
    assert capsys.readouterr().err == f"kvbench: {line}\n"


def test_docstrings_come_from_installed_packages(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    (package / "deeper").mkdir(parents=True)
    (package / "__init__.py").write_text('"""One."""\n\n\ndef two():\n    """Two.\n\n    Three.\n    """\n')
    (package / "deeper" / "a.py").write_text('class A:\n    """Four \\d."""\n')
    (package / "b.py").write_text("print 'a file of Python 2'\n")
    (package / "c.py").write_text("silent = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"One.\n\nTwo.\n\nThree.", "Four \\d."}
    assert set(read_docstrings(["own_package"], 0)) == texts and find_packages(["own_package"]) == ["own_package"]
    assert find_packages(["numpy", "own_package"]) == [f"numpy {np.__version__}", "own_package"]
    assert "own_package" not in sys.modules
    orders = {tuple(read_docstrings(["own_package"], seed)) for seed in range(8)}
    assert len(orders) == 2 and list(read_docstrings(["own_package"], 3)) == list(read_docstrings(["own_package"], 3))
    for wrong in ("none", "own_package.b", "", "torch;"):
        with pytest.raises(SettingError, match=f"^--packages=numpy,{wrong}: there is no installed package '{wrong}'"):
            find_packages(["numpy", wrong])
