"""fp8 with calibrated scales, against its formula in float64; and the command that makes their file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvbench
from kvbench.cli.calibrate import main
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.codec import join_angles
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.transformers_port import read_layout
from kvbench.training.row_scales import compute_row_scales
from kvbench.validation import SettingError
from tests.support.tiny_models import ids, make_double, tiny

NUMBERS = np.array(sorted({(1 + m / 8) * 2.0**e for m in range(8) for e in range(-6, 9)} | {m / 512 for m in range(8)}))
NUMBERS = NUMBERS[NUMBERS <= 448]  # of e4m3, from 0 on


def round_rows(rows: torch.Tensor, scale: float) -> np.ndarray:
    """The nearest number of e4m3 times the scale; of two, the one with an even mantissa."""
    sizes = np.minimum(np.abs(rows.double().numpy()) / scale, 448)
    distance = np.abs(sizes[..., None] - NUMBERS)
    even = np.arange(len(NUMBERS)) % 2 * 1e-12  # the numbers stand in the order of their codes
    return np.sign(rows.double().numpy()) * NUMBERS[(distance + even).argmin(-1)] * scale


def write(path: Path, name: str, **changes: object) -> str:
    """A file of scales for a tiny model that differ in each layer and head, so that some numbers are too large."""
    layout = read_layout(tiny(name))
    scales = 2e-4 * torch.arange(1, 1 + layout.layers * layout.heads).view(layout.layers, layout.heads)
    save_file({"k_scale": scales, "v_scale": 3 * scales} | changes, str(path), {"model": "mine"})
    return str(path)


def build_codec(path: str | None, **args: object):
    return build("codec", load_settings("codec", "fp8", {"path": path} | args))


@pytest.mark.parametrize("scope", ["tensor", "head"])
def test_rows_are_rounded_by_the_scales_of_their_layer_and_head(tmp_path, scope):
    """Those of the prompt after eviction to uneven heads, and those of two tokens behind."""
    codec = build_codec(write(tmp_path / "file", "llama"), scope=scope, rounding="cut")
    setup = dict(method="snapkv", budget=0.4, allocator="ada", method_args={"window": 4})
    raw, held = (kvbench.prefill(make_double("llama"), ids(40), **setup, codec=own) for own in ("raw", codec))
    for each in (raw, held):
        each.extend(ids(2, seed=1))
    scales = 2e-4 * torch.arange(1, 7).view(3, 2).double()
    one, other = (each.contexts[0].layers[0].rows for each in (raw, held))  # the first layer's rows are exact
    lengths = [len(one.head_places(0, head)) for head in range(2)]
    assert lengths[0] != lengths[1] and [len(other.head_places(0, head)) for head in range(2)] == lengths
    clamped = 0
    for number, (plain, rows) in enumerate(zip(one.attention_view()[:2], other.attention_view()[:2], strict=True)):
        for head in range(2):
            scale = float(scales[0, head] if scope == "head" else scales[0].max()) * (1, 3)[number]
            expected = round_rows(plain[:, head], float(np.float32(scale)))
            np.testing.assert_allclose(rows[:, head], expected, rtol=1e-6, atol=1e-12)
            clamped += (plain[:, head].abs() > 448 * scale).sum()  # absent rows of a shorter head are 0
    assert clamped > 0


@pytest.mark.parametrize("scope", ["tensor", "head"])
@pytest.mark.parametrize("rounding", ["written", "cut"])
def test_a_graphs_memory_rounds_by_the_same_scales(tmp_path, scope, rounding):
    """As `extend` does, for heads of several lengths and two samples."""
    codec = build_codec(write(tmp_path / "file", "llama"), scope=scope, rounding=rounding).of_layer(1, 3)
    lengths, draw = torch.tensor([[3, 5], [1, 4]]), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 13, 16, generator=draw)
    packed = codec.pack(keys, values, lengths)
    new = torch.randn(2, 2, 2, 16, generator=draw)
    memory = packed.growing(2, 1, 5, torch.zeros(13, dtype=torch.int32), None)
    angles = join_angles(torch.ones(2, 16), torch.zeros(2, 16))
    step, queries = torch.tensor(0, dtype=torch.int32), torch.randn(2, 2 * 16, generator=draw)
    output = memory.attend(queries, *(side.flatten(1) for side in new), angles, step, 0.5, None, "reference")
    grown, extended = memory.finish(1, lengths + 1), packed.extend(*new.reshape(2, 4, 16), lengths + 1)
    assert all(torch.equal(*pair) for pair in zip(grown.tensors(), extended.tensors(), strict=True))
    rows = [part.split((lengths + 1).flatten().tolist()) for part in extended.read()]
    for index, (k, v) in enumerate(zip(*rows, strict=True)):
        sample, head = divmod(index, 2)
        if rounding == "cut":
            k, v = (torch.cat([part[:-1], side[sample, head][None]]) for part, side in ((k, new[0]), (v, new[1])))
        weights = (queries.view(2, 2, 16)[sample, head] @ k.T * 0.5).softmax(-1)
        torch.testing.assert_close(output[sample, head, 0], weights @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_scales_are_the_largest_sizes_of_cached_rows(name):
    model, texts = make_double(name), [ids(30, seed)[0] for seed in (1, 2)]
    found, layout = compute_row_scales(model, texts), read_layout(model)
    caches = [kvbench.prefill(model, text[None]).contexts[0].layers for text in texts]
    for layer in range(layout.layers):
        for number, scales in enumerate((found["k_scale"], found["v_scale"])):
            expected = torch.ones(layout.heads).double()
            if layer in layout.held:
                rows = [cache[layer].rows.attention_view()[number][0] for cache in caches]
                expected = torch.stack([own.abs().amax((1, 2)) for own in rows]).amax(0) / 448
            torch.testing.assert_close(scales[layer].double(), expected, rtol=1e-6, atol=0)


def test_the_command_writes_a_file_for_the_model(tmp_path, capsys):
    out = tmp_path / "file"
    assert main(["fp8", "--model", "reference", "--out", str(out), "--sequences=2", "--length=32", "--device=cpu"]) == 0
    assert "k_scale (6, 2), v_scale (6, 2) from 2 sequences of 32 tokens, essays of kvbench" in capsys.readouterr().out
    with safe_open(str(out), "pt") as file:
        assert file.metadata()["sequences"] == "2 of 32 tokens"
    checkpoint = Checkpoint("reference", find_model("reference"))
    codec = build_codec(str(out), preset="head")
    codec.check(checkpoint.layout())
    codec.check_identity(checkpoint.identity)
    assert codec.weights_bytes == 2 * 6 * 2 * 4
    with pytest.raises(SettingError, match=r"^codec.path=\S+: the file was made for the model \S+, this one is other$"):
        codec.check_identity(lambda: "other")


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(scope="row"), r"^codec.path=\S+: with codec.scope=row each row has its own scale; use path=null$"),
        (dict(key_scale=2.0), r"^codec.key_scale=2: codec.path=\S+ has the scales; use 1$"),
        (dict(format="e5m2"), "^codec.format=e5m2: calibrated scales are those of e4m3$"),
        (
            dict(path=None, scope="head"),
            "^codec.path=null: give a safetensors file of scales; .* kvbench calibrate fp8",
        ),
    ],
)
def test_settings_that_do_not_fit_a_file_are_refused(tmp_path, args, message):
    with pytest.raises(SettingError, match=message):
        build_codec(**{"path": write(tmp_path / "file", "llama")} | args)


@pytest.mark.parametrize(
    "scales, message",
    [
        (torch.ones(3), r"v_scale must be a finite tensor \(layers, KV heads\)$"),
        (torch.full((3, 2), math.nan), r"v_scale must be a finite tensor \(layers, KV heads\)$"),
        (torch.ones(3, 4), r"v_scale has \(layers, KV heads\) \(3, 4\), the model \(3, 2\)$"),
        (
            torch.tensor([[1.0, 1], [1, 0], [1, 1]]),
            r"each number of v_scale must be a number in \[1.18e-38, 5.19e\+33\]$",
        ),
        (torch.full((3, 2), 1e-50).double(), "each number of v_scale must be a number in "),  # 0 in float32
        (torch.full((3, 2), 1e36), "each number of v_scale must be a number in "),
    ],
)
def test_wrong_files_are_refused(tmp_path, scales, message):
    with pytest.raises(SettingError, match=rf"^codec.path=\S+: {message}"):
        build_codec(write(tmp_path / "file", "llama", v_scale=scales)).check(read_layout(tiny("llama")))
