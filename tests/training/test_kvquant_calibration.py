"""KVQuant's calibration: what is read, ranges, code books, Q-Norm, and the command."""

import json
import re
from itertools import combinations

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvbench.cli.calibrate import main
from kvbench.config.catalogue import build, load_settings
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.transformers_port import read_layout
from kvbench.training.kvquant_calibration import (
    KVQuantRecipe,
    LayerNumbers,
    calibrate_layer,
    calibrate_model,
    collect_numbers,
    find_quantiles,
    fit_levels,
    fit_norm,
)
from tests.support.kvquant_files import TEXT
from tests.support.tiny_models import make_double

SHORT = ["--sequences=2", "--length=32", "--device=cpu"]


@pytest.mark.parametrize("name", ["llama3", "phi3"])
def test_weights_are_the_squares_of_the_gradients_of_the_next_tokens_loss(name):
    """By transformers' own loss, of what the projections give, through all later layers too."""
    model, width = make_double(name), read_layout(make_double(name)).heads * read_layout(make_double(name)).dim
    found = collect_numbers(model, [0, 1], TEXT, KVQuantRecipe(sinks=2, length=40))
    model.requires_grad_(True)
    given: dict[tuple[int, str], torch.Tensor] = {}
    handles = []

    def keep(place: tuple[int, str], out: torch.Tensor) -> None:
        out.retain_grad()
        given[place] = out

    for layer in (0, 1):
        attention = model.model.layers[layer].self_attn
        for side in ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("k_proj", "v_proj"):
            hook = lambda _m, _a, out, place=(layer, side): keep(place, out)  # noqa: E731
            handles.append(getattr(attention, side).register_forward_hook(hook))
    for number, ids in enumerate(TEXT):
        model(input_ids=ids[None].long(), labels=ids[None].long()).loss.backward()
        for layer, numbers in found.items():
            outputs = [out for place, out in given.items() if place[0] == layer]
            rows = torch.cat(outputs, -1)[0, 2:, -2 * width :]
            gradients = torch.cat([out.grad for out in outputs], -1)[0, 2:, -2 * width :]
            tokens = slice(number * 38, number * 38 + 38)
            torch.testing.assert_close(numbers.rows[tokens], rows.detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(numbers.weights[tokens].double(), gradients.square(), rtol=1e-4, atol=1e-12)
        assert gradients.abs().max() > 0
    model.requires_grad_(False)
    for handle in handles:
        handle.remove()
    assert len(found[1].rows) == len(TEXT) * 38
    plain = collect_numbers(model, [1], TEXT, KVQuantRecipe(sinks=2, weighed=False, length=40))
    assert torch.equal(plain[1].rows, found[1].rows) and plain[1].weights is None
    books = [calibrate_layer(numbers, 1, 0.01)["key_levels_2"] for numbers in (found[1], plain[1])]
    assert not torch.allclose(*books)


def test_ranges_are_quantiles_and_outliers_have_no_part():
    """Against numpy; one channel has far numbers that would pull the code book."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 2 * 2 * 8, generator=draw)
    rows[7, 3], rows[9, 16 + 5] = 1e4, -1e4  # a key and a value
    made = calibrate_layer(LayerNumbers(rows, None), 2, 0.05)
    keys = rows[:, :16].numpy()
    for name, share in (("key_low", 0.025), ("key_high", 0.975)):
        expected = np.quantile(keys.astype(np.float64), share, axis=0).reshape(2, 8)
        np.testing.assert_allclose(made[name], expected, rtol=1e-5)
        np.testing.assert_allclose(find_quantiles(rows[:, :16].sort(0).values, share), expected.ravel(), rtol=1e-5)
    for side in ("key", "value"):
        for bits in (2, 3, 4):
            levels = made[f"{side}_levels_{bits}"]
            assert levels.shape == (2**bits,) and levels.abs().max() <= 1.001 and (levels.diff() > 0).all()
    z = (keys - (made["key_high"] + made["key_low"]).numpy().ravel() / 2) / (
        (made["key_high"] - made["key_low"]).numpy().ravel() / 2
    )
    inside = np.sort(z[np.abs(z) <= 1 + 1e-6])
    nearest = np.abs(inside[:, None] - made["key_levels_2"].numpy()).argmin(1)
    means = [inside[nearest == code].mean() for code in range(4)]
    np.testing.assert_allclose(made["key_levels_2"], means, atol=1e-3)  # k-means has come to rest


def test_a_code_book_minimises_the_weighed_squared_distance():
    """Against all ways to cut twelve numbers into three groups."""
    draw = torch.Generator().manual_seed(3)
    numbers = torch.cat([torch.randn(4, generator=draw) / 4 + shift for shift in (-3, 0, 4)]).sort().values.double()
    weights = torch.rand(12, generator=draw).double() + 0.1

    def measure(levels: torch.Tensor) -> float:
        return float((weights * (numbers[:, None] - levels).square().amin(1)).sum())

    def find_means(cuts: tuple[int, ...]) -> torch.Tensor:
        groups = [slice(a, b) for a, b in zip((0, *cuts), (*cuts, 12), strict=True)]
        return torch.stack([(weights[own] * numbers[own]).sum() / weights[own].sum() for own in groups])

    best = min((find_means(cuts) for cuts in combinations(range(1, 12), 2)), key=measure)
    torch.testing.assert_close(fit_levels(numbers, weights, 3), best)
    assert not torch.allclose(fit_levels(numbers, torch.ones(12).double(), 3), best)
    torch.testing.assert_close(  # without any weight all numbers count alike
        fit_levels(numbers, torch.zeros(12).double(), 3), fit_levels(numbers, torch.ones(12).double(), 3)
    )


def test_more_codes_than_numbers():
    levels = fit_levels(torch.tensor([0.0, 1.0]), torch.ones(2).double(), 4)
    assert set(levels.tolist()) == {0.0, 1.0} and (levels.diff() >= 0).all()


def test_q_norm_restores_mean_and_deviation():
    numbers = torch.randn(500, generator=torch.Generator().manual_seed(0)).sort().values
    levels = torch.tensor([-1.0, -0.2, 0.3, 1.5]).double()
    factor, shift = fit_norm(numbers, levels)
    read = levels[(numbers[:, None].double() - levels).abs().argmin(1)] * factor + shift
    torch.testing.assert_close(read.mean(), numbers.double().mean())
    torch.testing.assert_close(read.std(correction=0), numbers.double().std(correction=0))
    assert fit_norm(torch.ones(3), levels).isfinite().all()


def test_layers_that_hold_no_rows_have_zeros():
    model = make_double("gemma3")
    layout = read_layout(model)
    made = calibrate_model(model, layout, KVQuantRecipe(weighed=False, length=40), TEXT)
    assert layout.sliding and not any(
        part[list(layout.sliding)].any() for name, part in made.items() if name != "outliers"
    )
    assert (made["key_high"][list(layout.held)] > made["key_low"][list(layout.held)]).all()


def test_the_command_writes_a_file_for_the_model(tmp_path, capsys):
    out = tmp_path / "file"
    assert main(["kvquant", "--model", "reference", "--out", str(out), *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "ranges and code books for 1.0% outliers from 2 sequences of 32 tokens, essays of kvbench" in printed
    checkpoint = Checkpoint("reference", find_model("reference"))
    for preset in ("nuq2", "nuq3", "nuq4"):
        codec = build("codec", load_settings("codec", "kvquant", {"path": str(out), "preset": preset}))
        codec.check(checkpoint.layout())
        codec.check_identity(checkpoint.identity)
    with safe_open(str(out), "pt") as file:
        recipe = json.loads(file.metadata()["recipe"])
    assert recipe == dict(outliers=0.01, sinks=1, weighed=True, sequences=2, length=32)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--outliers=1"], r"--outliers=1.0: a share in \[0, 1\)"),
        (["--outliers=0.99"], "--outliers=0.99: leaves none of 64 channels"),
        (["--length=99999"], "--length=99999: the model takes 16384 tokens"),
        (["--length=2"], "--length=2: a whole number of at least 3"),
        (["--sequences=0"], "--sequences=0: a whole number of at least 1"),
        (["--dtype=float16"], "--dtype=float16: did you mean bfloat16[?] Choose one of float32, bfloat16"),
    ],
    ids=lambda own: own if isinstance(own, str) else " ".join(own),
)
def test_wrong_options_are_refused_before_the_model_loads(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(Checkpoint, "weights", lambda *_: pytest.fail("loads the model"))
    assert main(["kvquant", "--model", "reference", "--out", str(tmp_path / "file"), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and re.search(message, error)
