"""Merge low-rank factors into the weights of their base, once, as a folder that kvbench loads like any checkpoint.

The sums are computed in float64 and rounded once, to bfloat16, so that every machine gets the same weights.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.models.converted_folders import find_folder, make_folder
from kvbench.models.low_rank import PROJECTIONS, FactorsFile
from kvbench.validation import SettingError, name_file_in_errors, summarize


def find_merged(file: FactorsFile, base: Path) -> Path:
    """Return the folder of a base with its factors. Make it if it is missing.

    Args:
        file: The factors, which were made for this base.
        base: The folder of the base.

    Raises:
        SettingError: The factors have other shapes than the base, or are not finite; or the disk is full.
    """

    def make(known: str, target: Path) -> None:
        factors = load_factors(file)
        weights = load_file(base / "model.safetensors")
        check_fit(file, weights)
        numbers = sum(weight.numel() for weight in weights.values())
        make_folder(
            file.path, known, target, numbers, lambda folder: write_merged(file, factors, weights, base, folder)
        )

    return find_folder(file.path, "model.factors", make)


def load_factors(file: FactorsFile) -> dict[str, Tensor]:
    """Read the factors.

    Raises:
        SettingError: They cannot be read, or a number is not finite.
    """
    try:
        factors = load_file(file.path)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"{file.setting}: cannot read low-rank factors there ({summarize(error)})") from None
    for name, tensor in factors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise SettingError(f"{file.setting}: {name} has a number that is not finite")
    return factors


def list_places(layers: int) -> Iterator[tuple[str, str, int]]:
    """Yield (name of the base's weight, projection, layer) of every weight that factors change."""
    for layer in range(layers):
        for projection, module in PROJECTIONS.items():
            yield f"model.layers.{layer}.{module}.{projection}.weight", projection, layer


def check_fit(file: FactorsFile, weights: Mapping[str, Tensor]) -> None:
    """Raise a SettingError unless factors have the shapes that the base's weights ask for."""
    layers = file.shapes["q_proj.a"][0]
    for name, projection, _ in list_places(layers):
        shape = file.shapes[f"{projection}.b"][1], file.shapes[f"{projection}.a"][2]
        if name not in weights or tuple(weights[name].shape) != shape:
            raise SettingError(f"{file.setting}: its {projection} {list(shape)} does not fit the base's {name}")
    if f"model.layers.{layers}.self_attn.q_proj.weight" in weights:
        raise SettingError(f"{file.setting}: has factors for {layers} layers, and the base has more")


def merge(factors: Mapping[str, Tensor], weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights with the factors added to them, in the dtype that they have.

    Args:
        factors: `<projection>.a`, (layers, rank, inputs), and `<projection>.b`, (layers, outputs, rank).
        weights: The base's weights by their names in transformers.
        scale: alpha / rank.
    """
    merged = dict(weights)
    for name, projection, layer in list_places(len(factors["q_proj.a"])):
        a, b = (factors[f"{projection}.{part}"][layer].double() for part in "ab")
        merged[name] = (weights[name].double() + scale * (b @ a)).to(weights[name].dtype)
    return merged


def write_merged(
    file: FactorsFile, factors: Mapping[str, Tensor], weights: Mapping[str, Tensor], base: Path, folder: Path
) -> None:
    """Write the files of the merged model into a folder: those of the base, with other weights and another RoPE."""
    with name_file_in_errors(folder):
        for path in base.iterdir():
            if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "conversion.json"):
                shutil.copyfile(path, folder / path.name)
        config = json.loads((base / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": file.theta}
        config["max_position_embeddings"] = file.longest
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        merged = merge(factors, weights, file.alpha / file.rank)
        save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
