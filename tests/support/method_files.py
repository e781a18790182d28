"""Settings that a method cannot do without: files, made for a model by the project's own calibration; token ids where
there is no tokenizer; and numbers for prompts that are shorter than those of a method's source.
"""

import atexit
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench.config.catalogue import build, load_settings
from kvbench.models.transformers_port import read_layout
from kvbench.training.query_filters import compute_query_filters
from kvbench.training.query_statistics import compute_query_statistics
from tests.support.tiny_models import ids, tiny

FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)


def write_filters(model: torch.nn.Module, sequences: Sequence[torch.Tensor], path: Path) -> None:
    """Query filters."""
    save_file({"q_filters": compute_query_filters(model, sequences, count=200)}, str(path))


def write_pattern(model: torch.nn.Module, sequences: Sequence[torch.Tensor], path: Path) -> None:
    """A folder of head gates as published, drawn here: they are trained, which is no part of the project."""
    shape = read_layout(model)
    generator = torch.Generator().manual_seed(5)
    gates = torch.rand(shape.layers, shape.heads, generator=generator)
    gates[[layer for layer in range(shape.layers) if layer not in shape.held]] = torch.nan
    path.mkdir()
    (path / "full_attention_heads.tsv").write_text("\n".join("\t".join(map(str, own)) for own in gates.tolist()))
    (path / "config.json").write_text(json.dumps({"sink_size": 3, "recent_size": 6}))


def write_surrogates(model: torch.nn.Module, sequences: Sequence[torch.Tensor], path: Path) -> None:
    """KVzap's networks, drawn here, with scores around -4 that differ by some units."""
    shape = read_layout(model)
    generator = torch.Generator().manual_seed(7)

    def draw(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * (2 / inputs) ** 0.5

    weights = {}
    for layer in range(shape.layers):
        weights |= {f"layers.{layer}.0.weight": draw(24, shape.hidden), f"layers.{layer}.0.bias": draw(24, 1)[:, 0]}
        weights |= {f"layers.{layer}.2.weight": draw(shape.heads, 24)}
        weights |= {f"layers.{layer}.2.bias": draw(shape.heads, 1)[:, 0] - 4}
    save_file(weights, str(path))


def write_statistics(model: torch.nn.Module, sequences: Sequence[torch.Tensor], path: Path) -> None:
    """Statistics of queries."""
    save_file(compute_query_statistics(model, sequences), str(path))


MAKE = {
    "qfilters": write_filters, "triattention": write_statistics, "duo_attention": write_pattern,
    "kvzap": write_surrogates,
}  # fmt: skip
SHORT = {  # settings for short prompts and small models
    "attention_matching": {"first": [5, 6, 7], "later": [9, 8], "chunk": 50},
    "kvgrad": {"first": [5, 6, 7], "later": [9, 8], "chunk": 50},
    "kvzip": {"first": [5, 6, 7], "later": [9, 8], "chunk": 50},
    "pqcache": {"sinks": 4, "bits": 4, "least": 8},
    "rkv": {"window": 4},
    "dms_threshold": {"window": 5, "threshold": -0.1},
}
NOTHING_GOES = {"dms_threshold": {"threshold": -1e9}}  # of methods that decide themselves how many rows stay


def make_method_args(method: str, name: str, model: torch.nn.Module, sequences: Sequence[torch.Tensor]) -> dict:
    """`method_args` for a method on a model of this name, its file made once from `sequences` (tokens,)."""
    if method not in MAKE:
        return SHORT.get(method, {})
    path = Path(FOLDER.name) / f"{method}-{name}"
    if not path.exists():
        MAKE[method](model, sequences, path)
    return {"path": str(path)}


def budget_for(method: str, budget: float) -> float | None:
    """The budget, or None if the method decides itself how many rows stay."""
    return None if load_defaults("method", method).get("budget_setting") else budget


def hold_all(method: str) -> dict:
    """Settings with which a method that decides itself how many rows stay evicts none; none for any other method.

    A new method's are known to its author alone, so a test that needs them is skipped.
    """
    if load_defaults("method", method).get("budget_setting") and method not in NOTHING_GOES:
        pytest.skip(f"NOTHING_GOES does not say when {method} evicts nothing")
    return NOTHING_GOES.get(method, {})


def make_tiny_method_args(method: str, name: str) -> dict:
    """The same for a model of tests/support/tiny_models.py."""
    return make_method_args(method, name, tiny(name), [ids(100, seed)[0] for seed in range(4)])


@cache
def load_defaults(group: str, name: str) -> dict:
    """The settings of a method, an allocator or a codec, read once."""
    return load_settings(group, name)


@cache
def load_tiny_settings(method: str, name: str) -> dict:
    """The settings of a method for a tiny model, read once."""
    args = make_tiny_method_args(method, name)
    return load_settings("method", method, args) if args else load_defaults("method", method)


def build_policy(method: str, allocator: str, name: str, codec: str = "raw", **more: object) -> list:
    """Method, with `more` settings, allocator and codec as a user of a tiny model gets them."""
    settings = load_tiny_settings(method, name)
    if more:
        settings = load_settings("method", method, make_tiny_method_args(method, name) | more)
    others = [build(group, load_defaults(group, own)) for group, own in (("allocator", allocator), ("codec", codec))]
    return [build("method", settings), *others]
