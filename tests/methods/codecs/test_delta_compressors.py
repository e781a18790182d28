"""The compressors of DeltaKV and their file: against numpy's formulas, in the authors' shapes, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvbench.config.compose import compose_config
from kvbench.methods.codecs.delta_compressors import (
    Compressor,
    check_fit,
    name_weights,
    peek_compressors,
    read_compressors,
)
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_run
from kvbench.runs.spec import RunSpec
from kvbench.validation import SettingError
from tests.docs.pages import iterate_commands
from tests.support.delta_files import draw_compressor, write_compressors
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

CHECKPOINT = dict(layers=3)  # the first two of which are not compressed
SHAPES = {
    "mlp_swiglu": lambda width, inner, out: {".w12": (2 * inner, width), ".w3": (out, inner)},
    "mlp_gelu": lambda width, inner, out: {".0": (inner, width), ".2": (out, inner)},
    "linear": lambda width, inner, out: {"": (out, width)},
}


def make_weights(
    layers: int = 2, width: int = 12, inner: int = 7, code: int = 3, down: str = "mlp_swiglu", up: str = "linear",
    bias: bool = False, split: bool = False, dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Weights by the names of the authors' files; with `split` the widths are those of K and of V."""
    generator, named = torch.Generator().manual_seed(3), {}
    for layer in range(layers):
        for part in ("k_", "v_") if split else ("",):
            for side, kind, ends in (("down", down, (width, code)), ("up", up, (code, width))):
                for matrix, shape in SHAPES[kind](ends[0], inner, ends[1]).items():
                    name = f"model.layers.{layer}.self_attn.{part}compress_{side}{matrix}"
                    named[f"{name}.weight"] = torch.randn(shape, generator=generator).to(dtype)
                    if bias:
                        named[f"{name}.bias"] = torch.randn(shape[0], generator=generator).to(dtype)
    return named


def write(path: Path, weights: dict[str, torch.Tensor], **metadata: str) -> str:
    save_file(weights, str(path), {"format": "pt"} | metadata)
    return str(path)


def apply_numpy(x: np.ndarray, kind: str, prefix: str, weights: dict[str, torch.Tensor]) -> np.ndarray:
    def layer(x: np.ndarray, name: str) -> np.ndarray:
        bias = weights.get(f"{prefix}{name}.bias", torch.zeros(()))
        return x @ weights[f"{prefix}{name}.weight"].double().numpy().T + bias.double().numpy()

    if kind == "linear":
        return layer(x, "")
    if kind == "mlp_gelu":
        inner = layer(x, ".0")
        return layer(inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))), ".2")
    first, second = np.split(layer(x, ".w12"), 2, -1)
    return layer(first / (1 + np.exp(-first)) * second, ".w3")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("down, up", [("mlp_swiglu", "linear"), ("mlp_gelu", "mlp_swiglu"), ("linear", "mlp_gelu")])
def test_the_networks_follow_their_formulas(tmp_path, down, up, bias, split):
    weights = make_weights(down=down, up=up, bias=bias, split=split)
    path, parts = write(tmp_path / "file", weights), ("k_", "v_") if split else ("",)
    width, code = 12 * len(parts), 3 * len(parts)
    described = peek_compressors(path)
    assert (described.down, described.up, described.width, described.code) == (down, up, width, code)
    read = read_compressors(path, 2, width)
    assert list(read) == [0, 1] and described.bytes == sum(own.bytes for own in read.values())
    generator = np.random.default_rng(0)
    for layer, own in read.items():
        exact = own.to("cpu", torch.float64)
        assert (own.width, own.code) == (width, code) and exact.bytes == 2 * own.bytes
        for side, kind, apply, size in (("down", down, exact.compress, width), ("up", up, exact.expand, code)):
            x = generator.normal(size=(5, size))
            pieces = [
                apply_numpy(piece, kind, f"model.layers.{layer}.self_attn.{part}compress_{side}", weights)
                for part, piece in zip(parts, np.split(x, len(parts), -1), strict=True)
            ]
            np.testing.assert_allclose(apply(torch.from_numpy(x)).numpy(), np.concatenate(pieces, -1), atol=1e-10)
    named = name_weights(read.values())
    assert named.keys() == weights.keys() and all(torch.equal(named[key], weights[key]) for key in weights)


@pytest.mark.parametrize("model, layers, width", [only_in_full("Llama-3.1-8B", 32, 2048), ("Qwen2.5-7B-1M", 28, 1024)])
def test_files_in_the_authors_layout(tmp_path, model, layers, width):
    """All layers are described, and two of the real shapes are read. A folder of the hub has model.safetensors."""
    inner, code = 3072, 512
    two = make_weights(2, width, inner, code, dtype=torch.bfloat16)
    assert two["model.layers.1.self_attn.compress_down.w12.weight"].shape == (2 * inner, width)
    assert two["model.layers.1.self_attn.compress_down.w3.weight"].shape == (code, inner)
    assert two["model.layers.1.self_attn.compress_up.weight"].shape == (width, code)
    write(tmp_path / "model.safetensors", two)
    read = read_compressors(tmp_path, 2, width, identity="any")
    assert isinstance(read[1], Compressor) and read[1].compress(torch.ones(3, width).bfloat16()).shape == (3, code)
    assert peek_compressors(tmp_path).identity is None
    many = {}
    for layer in range(layers):  # the names and shapes of all layers, with a small inner width
        own = make_weights(1, width, 2, code, dtype=torch.bfloat16)
        many |= {key.replace("layers.0", f"layers.{layer}"): value for key, value in own.items()}
    path = write(tmp_path / "all", many)
    described = check_fit(path, layers, width)
    assert (described.layers, described.width, described.code, described.down) == (layers, width, code, "mlp_swiglu")
    with pytest.raises(SettingError, match=rf"\({layers}, {width}\), the model \({layers}, {width // 2}\)"):
        check_fit(path, layers, width // 2)


def test_a_file_for_another_model_is_refused(tmp_path):
    path = write(tmp_path / "file", make_weights(), model="this one", recipe="{}")
    assert read_compressors(path, 2, 12, "this one").keys() == read_compressors(path, 2, 12).keys() == {0, 1}
    assert peek_compressors(path).metadata["recipe"] == "{}" and peek_compressors(path).identity == "this one"
    with pytest.raises(SettingError, match="trained for the model this one, this one is another$"):
        read_compressors(path, 2, 12, "another")


def drop(part: str) -> Callable[[dict], dict]:
    return lambda weights: {key: value for key, value in weights.items() if part not in key}


def change(part: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], dict]:
    return lambda weights: {key: value(own).contiguous() if part in key else own for key, own in weights.items()}


WRONG = [
    (lambda weights: {}, "holds no compressors"),
    (lambda weights: weights | {"lm_head.weight": torch.zeros(2, 2)}, "lm_head.weight is no weight of a compressor"),
    (drop("layers.1"), r"\(1, 12\), the model \(2, 12\)"),
    (drop("layers.0"), "layer 0 are missing"),
    (drop("0.self_attn.compress_up"), "layer 0, compress_up is missing"),
    (drop("1.self_attn.compress_down.w3"), "layer 1, compress_down must have the matrices of one of mlp_swiglu"),
    (change("w12", lambda own: own[:-1]), r"do not fit together: \.?w12.weight \(13, 12\), w3.weight \(3, 7\)"),
    (change("compress_up", lambda own: own[:, :-1]), "compress_up maps 2 numbers to 12, but compress_down 12 to 3"),
    (change("1.self_attn.compress_up", lambda own: own[:-1]), "layer 1: compress_up maps 3 numbers to 11"),
    (change("w3", lambda own: own.flatten()), "do not fit together"),
    (change("w3", lambda own: own.long()), "has dtype I64, allowed are F64, F32, F16, BF16"),
    (
        change("1.self_attn.compress_down.w3", lambda own: own.log()),
        "1.self_attn.compress_down.w3.weight is not finite",
    ),
    (lambda weights: make_weights(width=14), r"\(2, 14\), the model \(2, 12\)"),
    (
        lambda weights: weights | drop("layers.0")(make_weights(inner=9, code=4)),
        "compressors of layer 1 have other shapes than those of layer 0",
    ),
    (
        lambda weights: weights | {"model.layers.0.self_attn.k_compress_down.weight": torch.zeros(2, 6)},
        "must have compress_down and compress_up, or both of",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_files_with_wrong_contents(tmp_path, number):
    spoil, reason = WRONG[number]
    path = write(tmp_path / "file", spoil(make_weights()))
    with pytest.raises(SettingError, match=rf"^codec\.path={path}: .*{reason}") as error:
        read_compressors(path, 2, 12)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    def refused(path: object, reason: str) -> None:
        with pytest.raises(SettingError, match=rf"^method\.path={path}: .*{reason}") as error:
            peek_compressors(path, "method.path")
        assert "\n" not in str(error.value)

    with pytest.raises(SettingError, match=r"^codec\.path=null: .*kvbench calibrate deltakv"):
        peek_compressors(None)
    refused(3, "a path")
    refused(tmp_path / "missing", "No such file")
    refused(tmp_path, "No such file")
    whole = Path(write(tmp_path / "whole", make_weights()))
    for name, data in (("empty", b""), ("cut", whole.read_bytes()[:-8]), ("text", b"nothing at all")):
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, "cannot read the compressors")
    for name, new in (("weights.bin", True), ("weights.pt", False)):
        torch.save(make_weights(), tmp_path / name, _use_new_zipfile_serialization=new)
        refused(tmp_path / name, "pickled weights are not read; give a safetensors file")


@pytest.mark.parametrize("length, samples, share", [(448, 1, 0.87), only_in_full(1024, 4, 0.7)])
@pytest.mark.parametrize("remove", ["null", only_in_full("residual")])
def test_those_of_the_embedded_model(tmp_path, remove, length, samples, share):
    """With them it finds keys in compressed rows. The means of references alone do not tell it where they are."""
    path = ROOT / "kvbench/models/embedded_v2_deltakv.safetensors"
    settings = ["device=cpu", "task=ruler", "task.subtasks=[niah_multikey_1]", f"task.length={length}"]
    settings += [f"limit={samples}", "method=full", "seed=1"]
    settings += ["codec=delta", "codec.preset=reference", f"codec.path='{path}'", f"codec.remove={remove}"]
    run = RunSpec.from_config(compose_config(settings))
    records = list(execute_run(run, tmp_path, Resources(run)).values())
    assert len(records) == samples
    assert all(record["resident_bytes"] < share * record["full_bytes"] for record in records)
    assert (sum(record["score"] for record in records) == 100 * samples) == (remove == "null")


def test_the_documented_setting_of_full_layers(checkpoint, tmp_path):
    """The source's KIVI in them."""
    [words] = [words for _, words in iterate_commands() if {"method=deltakv", "codec.base=kivi"} <= {*words}]
    path = write_compressors(tmp_path / "file", [draw_compressor(128, 12, layer) for layer in range(3)])
    small = ["device=cpu", "task=phonebook", "task.sizes=[20]", "limit=1"]
    small += ["method.preset=reference", "codec.preset=reference", f"codec.path={path}"]
    small += ["model=hf", f"model.path={checkpoint}"]
    held = []
    for more in ([], ["codec.base=raw", "codec.base_args=null"]):
        run = RunSpec.from_config(compose_config([*words[2:], *small, *more]))
        [record] = execute_run(run, tmp_path, Resources(run)).values()
        held.append(record["resident_bytes"] / record["full_bytes"])
    assert run.choice().codec.base.name == "raw" and held[0] < held[1] - 0.2
