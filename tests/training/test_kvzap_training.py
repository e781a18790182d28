"""The training of KVzap's surrogates: targets in loops and float64, the recipe, files, and what is refused."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kvbench
from kvbench.cli import calibrate
from kvbench.interfaces.observation import PromptEncoder
from kvbench.interfaces.tensor_files import read_header
from kvbench.methods.kvzap import peek_surrogates, read_surrogates
from kvbench.methods.kvzip import KVzip
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.transformers_port import read_layout
from kvbench.training import kvzap_training
from kvbench.training.kvzap_training import (
    KVzapRecipe,
    RepeatedTexts,
    Samples,
    check_memory,
    choose_recipe,
    collect_samples,
    compute_targets,
    divide_texts,
    evaluate,
    train,
    write_surrogates,
)
from kvbench.training.token_sequences import pack_texts, write_essays
from kvbench.validation import SettingError
from tests.support.checkpoints import write_checkpoint
from tests.support.dense_engine import DenseEngine
from tests.support.normed_states import record_normed_states
from tests.support.tiny_models import distinct, ids, make_double, tiny

PREFIX, REQUEST, TURN = [3, 4], [5, 6, 7], [11, 12]
SMALL = KVzapRecipe("mlp", sequences=3, length=30, tokens=12, inner=8, epochs=4)


def repeat(texts: Tensor, prefix: list[int], request: list[int], turn: list[int]) -> RepeatedTexts:
    return RepeatedTexts(texts, texts[:0], prefix, PromptEncoder(lambda text: request, tuple(turn)))


# Targets.


def score_in_loops(model: str, text: list[int]) -> dict[tuple[int, int], np.ndarray]:
    """KVzip+ of every row by layer and head: the text, the request, and the text again in one read."""
    found, number, begin = {}, len(text), len(PREFIX)

    def note(glances):
        for glance in glances:
            weight = make_double(model).model.layers[glance.layer].self_attn.o_proj.weight.detach().numpy()
            groups, dim = len(glance.queries), glance.rows.values.shape[1]
            most = np.zeros(number)
            for g in range(groups):
                head = glance.head * groups + g
                part = weight[:, head * dim : (head + 1) * dim]
                lengths = [np.sqrt(((part @ value) ** 2).sum()) for value in glance.rows.values[begin : begin + number]]
                total = len(glance.rows.keys)
                for t in range(total - number, total):
                    logits = glance.rows.keys[: t + 1] @ glance.queries[g, t] * glance.scaling
                    p = np.exp(logits - logits.max())
                    p = p[begin : begin + number] / p.sum()
                    most = np.maximum(most, p * lengths / np.sqrt((states[glance.layer][t] ** 2).sum()))
            found[glance.layer, glance.head] = most
        return [glance.rows for glance in glances]

    with record_normed_states(make_double(model)) as states:
        DenseEngine(model, note).prefill(torch.tensor([PREFIX + text + REQUEST + TURN + text]), None)
    return found


@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3", "gemma3", "yarn"])
def test_targets_are_logarithms_of_the_scores_in_loops(model):
    text = distinct(40, seed=3)[0]
    found = compute_targets(make_double(model), repeat(text[None], PREFIX, REQUEST, TURN), text)
    expected, worst = score_in_loops(model, text.tolist()), 0.0
    with record_normed_states(make_double(model)) as states, torch.no_grad():
        make_double(model)(input_ids=torch.tensor([PREFIX + text.tolist()]))
    sliding = read_layout(tiny(model)).sliding
    for layer, own in enumerate(found):
        assert (own is None) == (layer in sliding)
        if own is not None:
            hidden, logs = own
            np.testing.assert_allclose(hidden.numpy(), states[layer][len(PREFIX) :], rtol=1e-6, atol=1e-6)
            for head, target in enumerate(logs.mT.numpy()):
                worst = max(worst, np.abs(np.exp(target - np.log(expected[layer, head])) - 1).max())
    assert worst < 1e-9


def test_targets_are_logarithms_of_kvzip_plus(monkeypatch):
    """Of method=kvzip itself, where nothing tells them apart: without a request."""
    model, text, found = make_double("llama"), distinct(40, seed=3), {}
    monkeypatch.setattr(
        KVzip, "score", lambda self, seen, rows, state: found.setdefault(seen.layer, state.layer["scores"])
    )
    args = {"preset": "plus_kvpress", "first": [], "sinks": None, "scope": "head"}
    kvbench.prefill(model, torch.cat([torch.tensor([PREFIX]), text], 1), "kvzip", 9, method_args=args, prefix=2)
    for layer, (_, logs) in enumerate(compute_targets(model, repeat(text, PREFIX, [], []), text[0])):
        torch.testing.assert_close(logs.mT.exp(), found.pop(layer)[0, :, 2:], rtol=1e-9, atol=0)


def test_a_score_of_zero_has_a_finite_logarithm():
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    _, logs = compute_targets(model, repeat(ids(20), PREFIX, REQUEST, TURN), ids(20)[0])[1]
    assert (logs == math.log(torch.finfo(torch.float32).tiny)).all()


def test_samples_are_seeded_and_belong_together():
    texts = torch.cat([distinct(30, seed) for seed in range(3)])
    prompts = repeat(texts, PREFIX, REQUEST, TURN)
    one, again = (collect_samples(tiny("llama"), prompts, texts, SMALL) for _ in range(2))
    assert torch.equal(one.hidden, again.hidden) and torch.equal(one.targets, again.targets)
    assert one.hidden.shape == (3, 36, 48) and one.targets.shape == (3, 36, 2) and one.layers == (0, 1, 2)
    other = collect_samples(tiny("llama"), prompts, texts, KVzapRecipe(**vars(SMALL) | {"seed": 1}))
    assert not torch.equal(one.hidden, other.hidden)
    pairs = [compute_targets(tiny("llama"), prompts, text) for text in texts]
    for layer in range(3):
        for number in range(36):
            hidden, logs = pairs[number // 12][layer]
            [place] = (hidden == one.hidden[layer, number]).all(-1).nonzero()[:, 0]
            assert torch.equal(logs[place], one.targets[layer, number])


def test_layers_with_a_window_get_networks_of_zeros(tmp_path):
    texts, layout = distinct(30)[:1], read_layout(tiny("gemma3"))
    samples = collect_samples(tiny("gemma3"), repeat(texts, PREFIX, REQUEST, TURN), texts, SMALL)
    assert samples.layers == (2, 5)
    networks = train(samples, SMALL, "cpu")
    write_surrogates(tmp_path / "file", networks, samples.layers, layout, {}, SMALL, evaluate(networks, samples))
    weights = load_file(tmp_path / "file")
    assert {int(name.split(".")[1]) for name, own in weights.items() if own.any()} == {2, 5}
    assert peek_surrogates(tmp_path / "file").fits == (6, 48, 2)
    kvbench.prefill(tiny("gemma3"), ids(60), "kvzap", 9, method_args={"path": str(tmp_path / "file")})


# The recipe.


def make_samples(kind: str, count: int = 400, layers: int = 2, width: int = 10, heads: int = 3) -> Samples:
    generator = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(layers, width, heads, generator=generator), torch.randn(heads, generator=generator) - 4
    hidden = torch.randn(layers, count, width, generator=generator) + 1
    targets = torch.bmm(hidden, weight) + bias
    return Samples(hidden, targets if kind == "linear" else targets.sin(), tuple(range(layers)))


def test_a_ridge_regression_recovers_a_linear_target():
    samples = make_samples("linear")
    exact = kvzap_training.solve_ridge(samples, 1e-9, "cpu")
    for own, hidden, targets in zip(exact, samples.hidden, samples.targets, strict=True):
        torch.testing.assert_close(own.apply(hidden.double()), targets.double(), rtol=0, atol=1e-5)
    found = evaluate(train(samples, KVzapRecipe("linear", 1, 30, 12, 1), "cpu"), make_samples("linear", 900))
    assert found.mean_r2 > 0.9999 and found.samples == 900


def test_the_ridge_is_that_of_the_definition():
    """Least squares with a row √α·e_i for each weight and none for the bias, in numpy."""
    samples = make_samples("sin")
    for own, hidden, targets in zip(
        kvzap_training.solve_ridge(samples, 1.0, "cpu"), samples.hidden, samples.targets, strict=True
    ):
        x = np.concatenate([hidden.double().numpy(), np.ones((400, 1))], 1)
        rows = np.concatenate([x, np.eye(11)[:10]])
        solved = np.linalg.lstsq(rows, np.concatenate([targets.double().numpy(), np.zeros((10, 3))]), rcond=None)[0]
        np.testing.assert_allclose(own.weights[0].numpy(), solved[:10].T, atol=1e-10)
        np.testing.assert_allclose(own.biases[0].numpy(), solved[10], atol=1e-10)


def test_an_mlp_learns_a_linear_target():
    recipe = KVzapRecipe("mlp", 1, 30, 12, inner=32, epochs=20, batch=40)
    found = evaluate(train(make_samples("linear", 1000), recipe, "cpu"), make_samples("linear", 900))
    assert found.mean_r2 > 0.99 and found.mean_error < 0.1
    shuffled = make_samples("linear", 900)
    wrong = evaluate(train(shuffled, recipe, "cpu"), Samples(shuffled.hidden, shuffled.targets.flip(1), (0, 1)))
    assert wrong.mean_r2 < 0


def test_the_steps_are_those_of_the_sources_modules():
    """AdamW, MSELoss over all layers, a cosine by epochs and one clip, with torch's own classes; one batch an epoch."""
    samples, epochs = make_samples("sin"), 5
    recipe = KVzapRecipe("mlp", 1, 30, 12, inner=7, epochs=epochs, batch=1000)
    still = train(samples, KVzapRecipe(**vars(recipe) | {"rate": 1e-30}), "cpu")  # the first weights
    modules = nn.ModuleList(nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3)) for _ in still)
    for module, own in zip(modules, still, strict=True):
        module.load_state_dict({name.removeprefix("x."): tensor for name, tensor in own.named("x").items()})
        bounds = [10**-0.5] * 2 + [7**-0.5] * 2
        assert all(0 < own.abs().max() <= most for own, most in zip(module.parameters(), bounds, strict=True))
    optimizer = torch.optim.AdamW(modules.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    norms = []
    for _ in range(epochs):
        predicted = torch.stack([module(x) for module, x in zip(modules, samples.hidden, strict=True)], 1)
        optimizer.zero_grad()
        nn.MSELoss()(predicted, samples.targets.transpose(0, 1)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(modules.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
    for module, own in zip(modules, train(samples, recipe, "cpu"), strict=True):
        for expected, found in zip(module.parameters(), own.named("x").values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            assert found.dtype == torch.float32
    assert len(norms) == epochs


def test_the_scaling_of_the_recipe():
    assert choose_recipe(4096, 131072, {"kind": "mlp"}) == KVzapRecipe("mlp", 2400, 1000, 500, 512)
    assert choose_recipe(5120, 131072, {"kind": "mlp"}).inner == 512
    assert choose_recipe(320, 16384, {"kind": "mlp", "rate": 1.0, "length": 100}) == KVzapRecipe(
        "mlp", 188, 100, 50, 40, rate=1.0
    )
    assert choose_recipe(64, 512, {"kind": "mlp"}).length == 224
    with pytest.raises(SettingError, match=r"^--sequences=2400: their sampled hidden states take .* at most \d+ with"):
        check_memory(choose_recipe(4096, 131072, {"kind": "mlp"}), 10**5, 4096, torch.bfloat16)


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_checkpoint(made)
    return made


def command(folder: Path, out: Path, **more: object) -> list[str]:
    options = {"model": folder, "out": out, "sequences": 4, "length": 64, "tokens": 20, "device": "cpu"} | more
    return ["kvzap", *(part for name, value in options.items() if value for part in (f"--{name}", str(value)))]


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_the_file_has_the_authors_names_and_says_what_made_it(tmp_path, folder, capsys, kind):
    out, again = tmp_path / "made" / "file.safetensors", tmp_path / "again"
    assert calibrate.main(command(folder, out, kind=kind)) == 0
    printed, checkpoint = capsys.readouterr(), Checkpoint("", str(folder))
    shapes = {"weight": (2, 64), "bias": (2,)}
    if kind == "mlp":
        shapes = {"0.weight": (8, 64), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    weights = load_file(out)
    assert {name: tuple(own.shape) for name, own in weights.items()} == {
        f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()
    }
    described = peek_surrogates(out)
    metadata = read_header(out, "out", "surrogates").metadata
    assert described.fits == (2, 64, 2) and described.identity == checkpoint.identity()
    assert metadata.keys() == {"format", "model", "text", "source", "recipe", "held_out", "kvbench"}
    recipe, held_out = KVzapRecipe(**json.loads(metadata["recipe"])), json.loads(metadata["held_out"])
    given = {"kind": kind, "sequences": 4, "length": 64, "tokens": 20, "seed": 42}
    assert recipe == choose_recipe(64, 4096, given) and str(tmp_path) not in str(metadata)
    tokenizer = checkpoint.tokenizer()
    text = pack_texts(tokenizer, write_essays(42), 64, 5, 5, between="\n\n")
    prompts = divide_texts(text.sequences, tokenizer)
    assert metadata["text"] == text.digest and len(prompts.trained) == 4 and prompts.prefix == tokenizer("").input_ids
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(text.sequences.flatten().tolist())
    unseen = collect_samples(checkpoint.weights(torch.float32, "cpu"), prompts, prompts.held_out, recipe)
    found = evaluate(list(read_surrogates(out).values()), unseen)
    assert found.samples == held_out["samples"] == 20 and np.allclose(found.errors, held_out["errors"])
    assert np.allclose(found.r2, held_out["r2"])
    assert f"{out}: {kind} surrogates of 2 layers, 80 samples" in printed.out
    assert f"held out: mean squared error {found.mean_error:.4f}, R² {found.mean_r2:.3f}" in printed.out
    assert "text/s" in printed.err or "s/text" in printed.err
    assert calibrate.main(command(folder, again, kind=kind)) == 0
    twin = load_file(again)
    assert all(torch.equal(own, twin[name]) for name, own in weights.items())
    assert replace(peek_surrogates(again), path=described.path) == described
    assert calibrate.main(command(folder, tmp_path / "other", kind=kind, seed=1)) == 0
    other = load_file(tmp_path / "other")
    assert not any(torch.equal(own, other[name]) for name, own in weights.items())


def test_an_interrupted_training_leaves_nothing(tmp_path, folder, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvzap_training, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(calibrate.parse_arguments(command(folder, tmp_path / "file")))
    assert not list(tmp_path.iterdir())


def test_what_the_command_refuses(tmp_path, folder, capsys):
    there, text = tmp_path / "there", tmp_path / "text"
    there.write_text("x")
    text.write_text("The old man gave a letter to nobody in the house. " * 20)
    out = tmp_path / "file"
    for wrong, line in (
        ({"kind": "tree"}, "--kind=tree: choose one of linear, mlp"),
        (
            {"kind": "linear", "lr": 0.1, "inner": 3},
            "--kind=linear: solves a ridge regression; leave out --inner, --lr",
        ),
        ({"sequences": -1}, "--sequences=-1: a whole number of at least 1"),
        ({"length": 1}, "--length=1: a whole number of at least 2"),
        ({"length": 2020}, "--length=2020: a text is read twice, and the model takes 4096 tokens"),
        ({"tokens": 65}, "--tokens=65: a text has 64"),
        ({"lr": -1}, "--lr=-1.0: a number above 0"),
        ({"lr": "nan"}, "--lr=nan: a number above 0"),
        ({"epochs": -2}, "--epochs=-2: a whole number of at least 1"),
        ({"seed": -1}, "--seed=-1: a whole number of at least 0"),
        ({"device": "tpu"}, "--device=tpu: choose one of cpu, cuda"),
        ({"model": "/none"}, "--model=/none: no such folder"),
        ({"out": there}, f"--out={there}: there is a file; delete it or give another name"),
        ({"out": tmp_path}, f"--out={tmp_path}: no file can be there"),
        ({"text": tmp_path / "none"}, f"--text={tmp_path}/none: none cannot be read (No such file or directory)"),
        ({"text": text}, "training text too short: 242 tokens, at least 320"),
        ({"text": text, "sequences": None}, "training text too short: 242 tokens, at least 256"),
        ({"dataset": text, "text": text}, "not allowed with argument"),
    ):
        assert calibrate.main(command(folder, **({"out": out} | wrong))) == 2, wrong
        err = capsys.readouterr().err
        assert line in err and err.startswith("kvbench: ") and err.count("\n") == 1, err
    assert calibrate.main(command(folder, out, lr="1e30")) == 2
    assert "--lr=1e+30: the loss of epoch" in capsys.readouterr().err.split("\n")[-2]
    assert not out.exists()
