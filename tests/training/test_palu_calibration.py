"""Palu's calibration: gradients, ranks, and the command."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch.nn import Linear

from kvbench.cli.calibrate import calibrate, main, parse_arguments
from kvbench.config.catalogue import SHAPES
from kvbench.interfaces.layout import Layout
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.configuration import load_layout
from kvbench.models.transformers_port import read_layout
from kvbench.training import palu_calibration
from kvbench.training.palu_calibration import choose_ranks, choose_recipe, choose_unit, compute_fisher, compute_moments
from tests.support.palu_files import TEXT, build_palu
from tests.support.tiny_models import make_double, tiny

SHORT = ["--length=64", "--sequences=4", "--fisher-length=32", "--fisher-sequences=2"]


def name_projections(layer: torch.nn.Module) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What gives a layer's keys and values, as functions of what enters them, without bias."""
    own = layer.self_attn
    if not hasattr(own, "qkv_proj"):
        return {"k": own.k_proj.weight, "v": own.v_proj.weight}
    size = own.config.num_key_value_heads * own.head_dim
    return {"k": own.qkv_proj.weight[-2 * size : -size], "v": own.qkv_proj.weight[-size:]}


@pytest.mark.parametrize("model", ["llama3", "qwen2", "phi3"])
def test_f_is_the_root_of_the_mean_square_of_the_next_tokens_gradients(model):
    """By transformers' own loss, which shifts the labels once."""
    own = make_double(model)
    shape = read_layout(own)
    found = compute_fisher(own, [1], shape.heads * shape.dim, 1 if shape.heads == 1 else 2, [*TEXT[:3]])
    own.requires_grad_(True)
    squares: dict[str, torch.Tensor] = {}
    for ids in TEXT[:3]:
        own.zero_grad()
        own(input_ids=ids[None].long(), labels=ids[None].long()).loss.backward()
        modules = own.model.layers[1].self_attn
        fused = getattr(modules, "qkv_proj", None)
        size = shape.heads * shape.dim
        for side, start in (("k", -2 * size), ("v", -size)):
            linear: Linear = fused or getattr(modules, f"{side}_proj")
            gradient = linear.weight.grad if fused is None else linear.weight.grad[start : start + size or None]
            squares[side] = squares.get(side, 0) + gradient.square()
    own.requires_grad_(False).zero_grad()
    assert found.keys() == {(1, "k"), (1, "v")}
    for (_, side), groups in found.items():
        expected = [part.div(3).sqrt().mean().item() for part in squares[side].chunk(len(groups))]
        assert groups == pytest.approx(expected, rel=1e-5) and min(groups) > 0


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_moments_are_those_of_weights_and_inputs(model):
    """W_g (mean of x xᵀ) W_gᵀ, in which the bias has no part."""
    own, entered = make_double(model), []
    handle = own.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _m, args, _o: entered.append(args[0][0]))
    found = compute_moments(own, [1], 1, [*TEXT[:4]])
    handle.remove()
    x = torch.cat(entered)[: 4 * 64]
    x = x if len(entered) == 4 else torch.cat(entered[::2])
    for side, weight in name_projections(own.model.layers[1]).items():
        expected = weight @ (x.T @ x / len(x)) @ weight.T
        torch.testing.assert_close(found[1, side][0], expected.detach(), rtol=1e-9, atol=1e-9)


def rank_in_loops(fisher: dict, most: int, kept: float) -> dict:
    """rank_search.py's shares before rounding, for whole targets."""
    target = round(most * len(fisher) * kept)
    exact = {name: target * own / sum(fisher.values()) for name, own in fisher.items()}
    ranks = {name: min(most, int(own)) for name, own in exact.items()}
    order = sorted(fisher, key=lambda name: exact[name] - ranks[name])
    left = target - sum(ranks.values())
    while left > 0:
        for name in order:
            if ranks[name] == most:
                continue
            ranks[name] += 1
            left -= 1
            if left == 0:
                break
    return ranks


@pytest.mark.parametrize("removed", [0.0, 0.3, 0.5, 0.9])
def test_ranks_are_those_of_the_source(removed):
    """8 layers of two groups of 512 numbers, one of them of great weight."""
    layout = make_layout(heads=8, dim=128)
    places = [(layer, side) for layer in range(8) for side in "kv"]
    drawn = torch.rand(len(places), 2, generator=torch.Generator().manual_seed(3)).double() + 0.1
    drawn[5] *= 9
    fisher = {place: own.tolist() for place, own in zip(places, drawn, strict=True)}
    found = {}
    for search in palu_calibration.SEARCHES:
        recipe = choose_recipe(layout, dict(removed=removed, search=search))
        found[search] = choose_ranks(places, 512, 2, recipe, None if search == "uniform" else fisher)
    each = rank_in_loops({(p, g): fisher[p][g] for p in places for g in range(2)}, 512, 1 - removed)
    both = rank_in_loops({p: sum(fisher[p]) / 2 for p in places}, 1024, 1 - removed)

    def snap(rank: float) -> int:
        return max(1, round(rank / 32)) * 32

    assert found["fisher"] == {p: [snap(each[p, g]) for g in range(2)] for p in places}
    assert found["fisher_uniform"] == {p: [snap(both[p] // 2)] * 2 for p in places}
    assert found["uniform"] == {p: [snap(512 * (1 - removed))] * 2 for p in places}
    if 0 < removed < 0.9:
        assert max(found["fisher"][places[5]]) == 512 and found["fisher"] != found["fisher_uniform"]


def make_layout(heads: int, dim: int) -> Layout:
    """The layout of a tiny model with other numbers."""
    return replace(read_layout(tiny("llama")), heads=heads, dim=dim, longest=8192)


def test_the_recipe_is_the_authors_and_smaller_for_small_models():
    recipe = choose_recipe(make_layout(8, 128), {})
    assert (recipe.group, recipe.sequences, recipe.length) == (4, 256, 2048)
    assert (recipe.fisher_sequences, recipe.fisher_length, recipe.search) == (2048, 1024, "fisher_uniform")
    small = choose_recipe(make_layout(2, 64), {})
    assert (small.group, small.sequences, small.length, small.fisher_sequences, small.fisher_length) == (
        2, 64, 512, 512, 256,
    )  # fmt: skip
    assert [choose_recipe(make_layout(heads, 64), {}).group for heads in (1, 3, 4, 6, 16)] == [1, 3, 4, 3, 4]
    assert [choose_unit(width) for width in (32, 128, 192, 256, 512, 1024)] == [8, 8, 8, 16, 32, 32]


def test_the_command_writes_a_file_for_the_model(tmp_path, capsys):
    out = tmp_path / "new" / "file"
    assert main(["palu", "--model", "reference", "--out", str(out), "--removed=0.3", *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "essays of kvbench: " in printed and "groups of 2 KV heads, 128 numbers to " in printed
    with safe_open(str(out), "pt") as file:
        metadata = file.metadata()
        values = file.get_tensor("model.layers.0.self_attn.v_proj.eigenvalues")
        up = file.get_tensor("model.layers.0.self_attn.v_proj.U.0.weight").double()
    codec = build_palu(str(out))
    checkpoint = Checkpoint("reference", find_model("reference"))
    assert metadata["model"] == checkpoint.identity() and json.loads(metadata["recipe"])["removed"] == 0.3
    ranks = {f"model.layers.{layer}.self_attn.{side}_proj": [*own] for (layer, side), own in codec.file.ranks.items()}
    assert json.loads(metadata["head_wise_ranks"]) == ranks
    codec.check_identity(checkpoint.identity)
    assert abs(sum(sum(own) for own in ranks.values()) / (12 * 128) - 0.7) < 0.04
    torch.testing.assert_close(up.T @ up, values[0, : up.shape[1]].double().sqrt().diag(), rtol=1e-4, atol=1e-5)
    assert (values[0].diff() <= 0).all() and [*tmp_path.glob("**/*")] == [out.parent, out]
    assert main(["palu", "--model", "reference", "--out", str(out)]) == 2
    assert "there is a file; delete it or give another name" in capsys.readouterr().err


def test_untrained_projections_need_a_shape_only(tmp_path, capsys):
    """They are orthonormal, of equal ranks, and belong to no model."""
    shape, out = tmp_path / "shape.json", tmp_path / "new" / "file"
    shape.write_text(json.dumps(json.loads((SHAPES / "llama31_8b.json").read_text()) | {"num_hidden_layers": 2}))
    options = ["palu", "--untrained", "--model", str(shape), "--device", "cpu"]
    assert main([*options, "--out", str(out)]) == 0
    assert "untrained projections of groups of 4 KV heads, 512 numbers to 256–256; 50.0% of" in capsys.readouterr().out
    codec, layout = build_palu(str(out)), load_layout(str(shape))
    assert set(codec.file.ranks.values()) == {(256, 256)} and len(codec.file.ranks) == 2 * layout.layers
    assert (codec.file.identity, codec.file.metadata["source"]) == (None, "untrained")
    codec.check(layout)
    with safe_open(str(out), "pt") as file:
        ups = [file.get_tensor(f"model.layers.{layer}.self_attn.k_proj.U.1.weight").double() for layer in (0, 1)]
    for up in ups:
        torch.testing.assert_close(up.T @ up, torch.eye(256).double(), rtol=0, atol=1e-5)
    assert not torch.equal(*ups)
    assert main([*options, "--out", str(tmp_path / "other"), "--removed", "0.3"]) == 0
    assert build_palu(str(tmp_path / "other")).file.ranks[0, "v"] == (352, 352)
    for more in (["--ranks", "uniform"], ["--fisher-length", "64"], ["--text", str(out)], ["--dtype", "float32"]):
        assert main([*options, "--out", str(tmp_path / "third"), *more]) == 2
        line = f"--untrained: reads nothing, and ranks are equal; leave out {more[0]}"
        assert capsys.readouterr().err.strip().endswith(line)
    assert not (tmp_path / "third").exists()


def test_a_command_that_is_stopped_leaves_no_file(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(palu_calibration, "choose_ranks", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(parse_arguments(["palu", "--model", "reference", "--out", str(tmp_path / "file"), *SHORT]))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--removed=1"], r"--removed=1.0: a share in \[0, 1\)"),
        (["--ranks=all"], "--ranks=all: choose one of fisher_uniform, fisher, uniform"),
        (["--group=4"], "--group=4: the model has 2 KV heads; a divisor of this number"),
        (["--length=99999"], "--length=99999: the model takes 16384 tokens"),
        (["--length=64", "--fisher-length=65"], "--fisher-length=65: at most --length=64"),
        (["--fisher-sequences=0"], "--fisher-sequences=0: a whole number of at least 1"),
        (["--dtype=float16"], "--dtype=float16: did you mean bfloat16[?] Choose one of float32, bfloat16"),
        (["--text=SHORT"], "training text too short: 6 tokens, at least 1024"),
    ],
    ids=lambda own: own if isinstance(own, str) else " ".join(own),
)
def test_wrong_options_are_refused_before_the_model_loads(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(Checkpoint, "weights", lambda *_: pytest.fail("loads the model"))
    (tmp_path / "short.txt").write_text("one two three four")
    given = [own.replace("SHORT", str(tmp_path / "short.txt")) for own in options]
    assert main(["palu", "--model", "reference", "--out", str(tmp_path / "file"), *given]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and re.search(message, error)
