"""The compressors of DeltaKV: the two networks f_c and f_d of each layer, and the file that holds them.

Source: the DeltaKV paper; CURRENTF/Sparse-vLLM before 3652478, src/deltakv/modeling/compressor.py. Symbols: d_k the
width of the keys of all KV heads of a layer together; kv = [K ‖ V] of a token, 2·d_k numbers, with K before RoPE and
before the norm of keys; ref the mean of the token's references; z its code, d_c numbers; I the inner width.

    z = f_c(kv) - f_c(ref),    kv ≈ f_d(z) + ref

The file is a safetensors file in which the networks (kvbench.interfaces.networks) have the names of the authors'
checkpoints: model.layers.{i}.self_attn.compress_down and .compress_up. A checkpoint with k_compress_down,
v_compress_down, … compresses keys and values apart. Files of `python -m kvbench calibrate deltakv` also have the
identity of the model in their metadata. The authors' files do not.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvbench.interfaces.networks import Network, describe_network, take_network
from kvbench.interfaces.tensor_files import Shape, find_weights, read_header, read_weights
from kvbench.validation import SettingError

ENTRY = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?P<part>[kv]_)?compress_(?P<side>down|up)(?P<matrix>\.(?:w12|w3|0|2))?"
    r"\.(?P<what>weight|bias)"
)


@dataclass(frozen=True, eq=False)
class Compressor:
    """The compressor f_c and the decompressor f_d of a layer.

    Each has one network, or two if the file compresses keys and values apart. The code is then [code of K ‖ code of V].
    """

    down: tuple[Network, ...]
    """f_c."""
    up: tuple[Network, ...]
    """f_d."""

    @property
    def width(self) -> int:
        """Width of [K ‖ V], 2·d_k."""
        return sum(network.inputs for network in self.down)

    @property
    def code(self) -> int:
        """Width of a code, d_c."""
        return sum(network.outputs for network in self.down)

    @property
    def bytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(weight.numel() * weight.element_size() for weight in self.parameters())

    def compress(self, kv: Tensor) -> Tensor:
        """Return f_c(kv), (..., d_c), of [K ‖ V] (..., 2·d_k) in the weights' dtype."""
        return join_parts(self.down, kv, Network.apply)

    def expand(self, z: Tensor) -> Tensor:
        """Return f_d(z), (..., 2·d_k), of codes (..., d_c) in the weights' dtype."""
        return join_parts(self.up, z, Network.apply)

    def find_inner(self, z: Tensor) -> Tensor:
        """Return what the last matrix of f_d is multiplied with, of codes (..., d_c). A linear f_d takes the codes."""
        return join_parts(self.up, z, Network.find_inner)

    def split_last(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Return the last matrix of f_d, (d_k, …), and its bias, (d_k,) or None: those of K, and those of V."""
        first, last = self.up[0], self.up[-1]
        if len(self.up) == 2:
            return (first.weights[-1], first.biases[-1]), (last.weights[-1], last.biases[-1])
        keys, values = first.weights[-1].chunk(2)
        bias = first.biases[-1]
        key_bias, value_bias = (None, None) if bias is None else bias.chunk(2)
        return (keys, key_bias), (values, value_bias)

    def parameters(self) -> list[Tensor]:
        """Return all weights."""
        return [tensor for network in (*self.down, *self.up) for tensor in network.tensors()]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""
        down, up = (tuple(network.to(device, dtype) for network in side) for side in (self.down, self.up))
        return replace(self, down=down, up=up)


def join_parts(side: tuple[Network, ...], x: Tensor, work: Callable[[Network, Tensor], Tensor]) -> Tensor:
    """Call `work` with each network and its part of the last dimension of x, and join the results."""
    if len(side) == 1:
        return work(side[0], x)
    parts = x.split([network.inputs for network in side], -1)
    return torch.cat([work(network, part) for network, part in zip(side, parts, strict=True)], -1)


@dataclass(frozen=True)
class CompressorFile:
    """What a file of compressors says about itself, without its weights."""

    layers: int
    """Number of layers; they are 0, 1, …"""
    width: int
    """Width of [K ‖ V], 2·d_k."""
    code: int
    """Width of a code, d_c."""
    down: str
    """Kind of f_c."""
    up: str
    """Kind of f_d."""
    parts: tuple[str, ...]
    """Prefixes of the networks' names: ("",), or ("k_", "v_") if keys and values are compressed apart."""
    bytes: int
    """Size of all weights in bytes, as stored."""
    identity: str | None
    """Identity of the model that they were trained for. None if the file does not say it, as the authors' do not."""
    metadata: Mapping[str, str]
    """The file's metadata: of a file of `kvbench calibrate deltakv` also the recipe and its losses."""


# (layer, part, side) -> (matrix, what) -> shape
NetworkShapes = dict[tuple[int, str, str], dict[tuple[str, str], Shape]]


def find_file(path: object, setting: str = "codec.path") -> Path:
    """Return the safetensors file of a path, which may be a folder that has one as model.safetensors.

    Raises:
        SettingError: The path is no path.
    """
    return find_weights(path, setting, "DeltaKV's compressors", "deltakv")


def peek_compressors(path: object, setting: str = "codec.path") -> CompressorFile:
    """Read the shapes and the metadata of a file of compressors, but no weights.

    Args:
        path: A safetensors file, or a folder with model.safetensors.
        setting: Name of the setting that holds the path, for messages.

    Raises:
        SettingError: The file is missing, truncated or pickled, or it does not hold compressors of equal shapes for the
            layers 0, 1, …
    """
    where = f"{setting}={path}"
    networks: NetworkShapes = {}
    header = read_header(find_file(path, setting), where, "compressors")
    for key, shape in header.shapes.items():
        entry = ENTRY.fullmatch(key)
        if entry is None:
            raise SettingError(f"{where}: {key} is no weight of a compressor")
        network = networks.setdefault((int(entry["layer"]), entry["part"] or "", entry["side"]), {})
        network[entry["matrix"] or "", entry["what"]] = shape
    if not networks:
        raise SettingError(f"{where}: the file holds no compressors")
    numbers = sorted({layer for layer, _, _ in networks})
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - set(numbers))
        raise SettingError(f"{where}: the compressors of layer {missing} are missing")
    layers = [describe_layer(where, layer, networks) for layer in numbers]
    for layer, description in enumerate(layers):
        if description != layers[0]:
            raise SettingError(f"{where}: the compressors of layer {layer} have other shapes than those of layer 0")
    parts, down, up, width, code = layers[0]
    return CompressorFile(len(layers), width, code, down, up, parts, header.bytes, header.identity, header.metadata)


def describe_layer(where: str, layer: int, networks: NetworkShapes) -> tuple[tuple[str, ...], str, str, int, int]:
    """Check a layer's networks and return their prefixes, the kinds of f_c and f_d, 2·d_k and d_c."""
    parts = tuple(sorted({part for number, part, _ in networks if number == layer}))
    if parts not in (("",), ("k_", "v_")):
        raise SettingError(
            f"{where}: layer {layer} must have compress_down and compress_up, or both of k_compress and v_compress"
        )
    kinds: dict[str, set[str]] = {"down": set(), "up": set()}
    width = code = 0
    for part in parts:
        sizes = {}
        for side in ("down", "up"):
            name = f"layer {layer}, {part}compress_{side}"
            if (layer, part, side) not in networks:
                raise SettingError(f"{where}: {name} is missing")
            kind, inputs, outputs = describe_network(f"{where}: {name}", networks[layer, part, side])
            kinds[side].add(kind)
            sizes[side] = inputs, outputs
        if sizes["up"] != sizes["down"][::-1]:
            raise SettingError(
                f"{where}: layer {layer}: {part}compress_up maps {sizes['up'][0]} numbers to {sizes['up'][1]}, "
                f"but {part}compress_down {sizes['down'][0]} to {sizes['down'][1]}"
            )
        width, code = width + sizes["down"][0], code + sizes["down"][1]
    if any(len(names) > 1 for names in kinds.values()):
        raise SettingError(f"{where}: layer {layer} compresses keys and values by networks of different kinds")
    return parts, kinds["down"].pop(), kinds["up"].pop(), width, code


def check_fit(
    path: object, layers: int, width: int, identity: str | None = None, setting: str = "codec.path"
) -> CompressorFile:
    """Check that a file of compressors fits a model, before any weights load, and describe the file.

    Args:
        path: A safetensors file, or a folder with model.safetensors.
        layers: Number of layers of the model.
        width: 2·d_k of the model: twice its KV heads times its head dimension.
        identity: The model's identity. None does not compare it.
        setting: Name of the setting that holds the path, for messages.

    Returns:
        The description. Its `identity` is None for a file that does not say for which model it was made. Such a file is
        not refused.

    Raises:
        SettingError: `peek_compressors` refuses the file, or it was made for another model.
    """
    described = peek_compressors(path, setting)
    compare_model(described, path, layers, width, identity, setting)
    return described


def compare_model(
    described: CompressorFile,
    path: object,
    layers: int,
    width: int,
    identity: str | None = None,
    setting: str = "codec.path",
) -> None:
    """Raise a SettingError if a described file does not fit a model. The other arguments are those of `check_fit`."""
    if (described.layers, described.width) != (layers, width):
        raise SettingError(
            f"{setting}={path}: the compressors have (layers, 2·d_k) {(described.layers, described.width)}, "
            f"the model {(layers, width)}"
        )
    if identity is not None and described.identity not in (None, identity):
        raise SettingError(
            f"{setting}={path}: the compressors were trained for the model {described.identity}, this one is {identity}"
        )


def read_compressors(
    path: object, layers: int, width: int, identity: str | None = None, setting: str = "codec.path"
) -> dict[int, Compressor]:
    """Read the compressors of a model.

    Args:
        path: A safetensors file, or a folder with model.safetensors.
        layers: Number of layers of the model.
        width: 2·d_k of the model: twice its KV heads times its head dimension.
        identity: The model's identity. None does not compare it.
        setting: Name of the setting that holds the path, for messages.

    Returns:
        The compressor of each layer, on the CPU and in the file's dtype.

    Raises:
        SettingError: `check_fit` refuses the file, or a weight is not finite.
    """
    described = check_fit(path, layers, width, identity, setting)
    weights = read_weights(find_file(path, setting), f"{setting}={path}", "compressors")

    def take(layer: int, side: str, kind: str) -> tuple[Network, ...]:
        return tuple(take_network(kind, name_network(layer, part, side), weights) for part in described.parts)

    return {
        layer: Compressor(take(layer, "down", described.down), take(layer, "up", described.up))
        for layer in range(layers)
    }


def name_network(layer: int, part: str, side: str) -> str:
    """Return the beginning of the names of a network's weights."""
    return f"model.layers.{layer}.self_attn.{part}compress_{side}"


def name_weights(compressors: Iterable[Compressor]) -> dict[str, Tensor]:
    """Return the weights of the compressors of the layers 0, 1, … by their names in a file."""
    named: dict[str, Tensor] = {}
    for layer, compressor in enumerate(compressors):
        parts = ("",) if len(compressor.down) == 1 else ("k_", "v_")
        for side, networks in (("down", compressor.down), ("up", compressor.up)):
            for part, network in zip(parts, networks, strict=True):
                named |= network.named(name_network(layer, part, side))
    return named
