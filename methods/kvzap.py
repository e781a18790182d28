"""kvzap: keep the rows that a small network expects to be needed when the text is repeated (KVzap).

Source: the KVzap paper (arXiv 2601.07891); NVIDIA/kvpress, presses/kvzap_press.py and kvzap/data.py. Symbols: h_j the
hidden state of token j behind the layer's norm, which the projections of queries, keys and values read; f_ℓ the
surrogate of layer ℓ, a linear map or Linear·GELU·Linear, with one number for each KV head.

    s_j = f_ℓ(h_j)

The surrogates are trained to return the logarithm of the row's KVzip+ score (kvbench/training/kvzap_training.py). A
score is computed once, when the token is read, and needs no queries. So it serves prefill and decoding alike, and
`method=dms_threshold method.preset=kvzap` evicts what scores below a threshold, as the paper does.

kvpress cuts to a budget without protecting any row (`recent=0`). Its wrapper for thresholds protects the newest 128.

The file has the names of the authors' (HF nvidia/KVzap-…): layers.{i}.weight and .bias (linear), or layers.{i}.0 and
layers.{i}.2 (mlp). Files of `python -m kvbench calibrate kvzap` also have the identity of the model in their metadata.

kvbench's own choice: the surrogate computes in float32. The source computes in the model's dtype, and in bfloat16 the
scores of many rows are equal.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.networks import LayerWeights, Network, describe_network, take_network
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import ModelFile, Shape, find_weights, read_header, read_weights, require_finite
from kvbench.validation import SettingError

ENTRY = re.compile(r"layers\.(?P<layer>\d+)(?P<matrix>\.[02])?\.(?P<what>weight|bias)")
SCORE = "kvzap"


@dataclass(frozen=True)
class KVzap(Method):
    """Score rows by a network that reads the hidden state of their token."""

    path: str | None = setting()
    """The file of the surrogates, or a folder that has it as model.safetensors."""
    recent: int = setting(minimum=0)
    """Number of newest rows that always stay."""

    wants = ("normed_hidden",)
    weighs_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.file  # refuse an unusable file at once

    @cached_property
    def file(self) -> "SurrogateFile":
        """What the file says about itself."""
        return peek_surrogates(self.path)

    @cached_property
    def surrogates(self) -> LayerWeights[Network]:
        """The networks, which all methods with this file share."""
        about = find_file(self.path).stat()
        return load_once(str(self.path), about.st_mtime_ns, about.st_size)

    def check(self, layout: Layout) -> None:
        if self.file.fits != (needed := (layout.layers, layout.hidden, layout.heads)):
            raise SettingError(
                f"method.path={self.path}: the surrogates have (layers, hidden states, KV heads) {self.file.fits}, "
                f"the model {needed}"
            )
        require_finite(find_file(self.path), f"method.path={self.path}", "surrogates")

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Score the rows of the block."""
        if observation.decoding and not self.decoding:
            return rows.columns
        hidden, like = observation.normed_hidden, rows.mass
        assert hidden is not None  # the method wants it
        scores = self.surrogates.like(observation.layer, like).apply(hidden.to(like.dtype)).mT  # (B, H, T)
        old = rows.columns.get(SCORE, torch.zeros_like(like))[..., : -scores.shape[2]]
        return {SCORE: torch.cat([old, scores], -1)}

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return rows.columns[SCORE]


@dataclass(frozen=True)
class SurrogateFile(ModelFile):
    """What a file of surrogates says about itself, without its weights."""

    kind: str = field(kw_only=True)
    """linear or mlp_gelu."""
    fits: tuple[int, int, int] = field(kw_only=True)
    """Layers, width of the hidden states, and KV heads of the model that it fits."""


def find_file(path: object) -> Path:
    """Return the file of a path, which may be a folder with model.safetensors; SettingError if it is no path."""
    return find_weights(path, "method.path", "KVzap's surrogates", "kvzap")


def peek_surrogates(path: object) -> SurrogateFile:
    """Read the shapes and the metadata of a file of surrogates, but no weights.

    Args:
        path: A safetensors file, or a folder with model.safetensors.

    Raises:
        SettingError: The file is missing, truncated or pickled, or it does not hold surrogates of equal shapes for the
            layers 0, 1, …
    """
    where = f"method.path={path}"
    header = read_header(find_file(path), where, "surrogates")
    surrogates: dict[int, dict[tuple[str, str], Shape]] = {}
    for key, shape in header.shapes.items():
        entry = ENTRY.fullmatch(key)
        if entry is None:
            raise SettingError(f"{where}: {key} is no weight of a surrogate")
        surrogates.setdefault(int(entry["layer"]), {})[entry["matrix"] or "", entry["what"]] = shape
    if not surrogates:
        raise SettingError(f"{where}: the file holds no surrogates")
    for layer in range(max(surrogates) + 1):
        if layer not in surrogates:
            raise SettingError(f"{where}: the surrogate of layer {layer} is missing")
        if surrogates[layer] != surrogates[0]:
            raise SettingError(f"{where}: the surrogate of layer {layer} has other shapes than that of layer 0")
    kind, hidden, heads = describe_network(f"{where}: layer 0", surrogates[0])
    fits = len(surrogates), hidden, heads
    return SurrogateFile(str(path), header.bytes, header.identity, kind=kind, fits=fits)


def read_surrogates(path: object) -> dict[int, Network]:
    """Read the network of each layer, on the CPU and in the file's dtype.

    Raises:
        SettingError: `peek_surrogates` refuses the file, or a number in it is not finite.
    """
    described = peek_surrogates(path)
    weights = read_weights(find_file(path), f"method.path={path}", "surrogates")
    layers = range(described.fits[0])
    return {layer: take_network(described.kind, name_surrogate(layer), weights) for layer in layers}


@lru_cache(maxsize=1)
def load_once(path: str, changed: int, size: int) -> LayerWeights[Network]:
    """Load a file of surrogates, unless it was loaded last and has the same time of change and size."""
    return LayerWeights(read_surrogates(path))


def name_surrogate(layer: int) -> str:
    """Return the name of a layer's network in a file."""
    return f"layers.{layer}"
