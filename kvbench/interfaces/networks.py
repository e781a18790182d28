"""Small networks that a method or a codec reads from a safetensors file made for a model.

A network is one of

    mlp_swiglu  w3(silu(x1) · x2), where (x1, x2) are the halves of w12(x)
    mlp_gelu    W2(gelu(W1 x))
    linear      W x

Each matrix may have a bias. In a file, a matrix is named by the network's own name, followed by .w12 and .w3
(mlp_swiglu), .0 and .2 (mlp_gelu) or nothing (linear), then .weight or .bias. Pickled weights are never opened, because
they can run code.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from kvbench.interfaces.tensor_files import is_pickled
from kvbench.validation import SettingError

NAMES = {"mlp_swiglu": (".w12", ".w3"), "mlp_gelu": (".0", ".2"), "linear": ("",)}  # kind -> names of its matrices
KINDS = tuple(NAMES)
IDENTITY = "model"  # key of a file's metadata: the identity of the model that the networks were trained for
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a number, by its dtype in a safetensors file
Shape = tuple[int, ...]


class Weights(Protocol):
    """Weights of a layer, such as a `Network`."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""


Own = TypeVar("Own", bound=Weights)


class LayerWeights(Generic[Own]):
    """The weights of every layer, and their copies on the devices and in the dtypes that were asked for."""

    def __init__(self, read: Mapping[int, Own]) -> None:
        self.read = read
        self.copies: dict[tuple[int, torch.device, torch.dtype], Own] = {}

    def like(self, layer: int, tensor: Tensor) -> Own:
        """Return a layer's weights with a tensor's device and dtype. They are copied once."""
        key = layer, tensor.device, tensor.dtype
        if key not in self.copies:
            self.copies[key] = self.read[layer].to(tensor.device, tensor.dtype)
        return self.copies[key]


@dataclass(frozen=True, eq=False)
class Network:
    """A network of one or two matrices."""

    kind: str
    """One of `KINDS`."""
    weights: tuple[Tensor, ...]
    """The matrices, (outputs, inputs) each, in the order of `NAMES`."""
    biases: tuple[Tensor | None, ...]
    """The bias of each matrix, (outputs,), or None."""

    @property
    def outputs(self) -> int:
        """Width of the results."""
        return len(self.weights[-1])

    @property
    def inputs(self) -> int:
        """Width of the arguments."""
        return self.weights[0].shape[1]

    def apply(self, x: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs)."""
        inner = linear(x, self.weights[0], self.biases[0])
        if self.kind == "linear":
            return inner
        if self.kind == "mlp_gelu":
            inner = gelu(inner)
        else:
            gate, value = inner.chunk(2, -1)
            inner = silu(gate) * value
        return linear(inner, self.weights[1], self.biases[1])

    def tensors(self) -> list[Tensor]:
        """Return the matrices and the biases."""
        return [*self.weights, *(bias for bias in self.biases if bias is not None)]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""
        biases = (None if bias is None else bias.to(device, dtype) for bias in self.biases)
        return replace(self, weights=tuple(own.to(device, dtype) for own in self.weights), biases=tuple(biases))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the matrices and the biases by their names in a file, where the network's own name is `prefix`."""
        found = {}
        for matrix, weight, bias in zip(NAMES[self.kind], self.weights, self.biases, strict=True):
            found[f"{prefix}{matrix}.weight"] = weight
            if bias is not None:
                found[f"{prefix}{matrix}.bias"] = bias
        return found


def take_network(kind: str, prefix: str, weights: Mapping[str, Tensor]) -> Network:
    """Return the network with the name `prefix` among the weights of a file."""
    names = [f"{prefix}{matrix}" for matrix in NAMES[kind]]
    own = tuple(weights[f"{name}.weight"] for name in names)
    return Network(kind, own, tuple(weights.get(f"{name}.bias") for name in names))


def describe_network(where: str, shapes: Mapping[tuple[str, str], Shape]) -> tuple[str, int, int]:
    """Check the shapes of a network and return its kind and the widths of its arguments and results."""
    names = {matrix for matrix, _ in shapes}
    kind = next((kind for kind, own in NAMES.items() if set(own) == names), None)
    if kind is None or any((matrix, "weight") not in shapes for matrix in names):
        raise SettingError(f"{where} must have the matrices of one of {', '.join(KINDS)}")
    weights = [shapes[matrix, "weight"] for matrix in NAMES[kind]]
    halves = 2 if kind == "mlp_swiglu" else 1
    fits = all(len(own) == 2 and min(own) > 0 for own in weights)
    fits = fits and (len(weights) == 1 or weights[0][0] == halves * weights[1][1])
    biases = [(own, shapes.get((matrix, "bias"))) for matrix, own in zip(NAMES[kind], weights, strict=True)]
    if not fits or any(bias not in (None, own[:1]) for own, bias in biases):
        listed = ", ".join(f"{matrix}.{what}".lstrip(".") + f" {shape}" for (matrix, what), shape in shapes.items())
        raise SettingError(f"{where} ({kind}) has shapes that do not fit together: {listed}")
    return kind, weights[0][1], weights[-1][0]


def find_weights(path: object, setting: str, what: str, method: str) -> Path:
    """Return the safetensors file of a path, which may be a folder that has one as model.safetensors.

    Args:
        path: The value of the setting.
        setting: Name of the setting, for messages.
        what: What the file holds, for messages.
        method: The name with which `kvbench calibrate` makes such a file.

    Raises:
        SettingError: The path is no path.
    """
    if path is None:
        raise SettingError(
            f"{setting}=null: give a safetensors file of {what}; make one with "
            f"python -m kvbench calibrate {method} --model MODEL --out FILE"
        )
    if not isinstance(path, str | Path):
        raise SettingError(f"{setting}={path}: a path")
    file = Path(path).expanduser()
    return file / "model.safetensors" if file.is_dir() else file


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself."""

    shapes: Mapping[str, Shape]
    """Shape of each tensor by its name."""
    bytes: int
    """Size of all tensors, as stored."""
    metadata: Mapping[str, str]
    """The file's metadata."""

    @property
    def identity(self) -> str | None:
        """Identity of the model that the networks were trained for, or None if the file does not say it."""
        return self.metadata.get(IDENTITY)


def read_header(file: Path, where: str, what: str) -> Header:
    """Read the shapes and the metadata of a file, but no weights.

    Args:
        file: The file.
        where: The setting and its value, with which messages begin.
        what: What the file holds, for messages.

    Raises:
        SettingError: The file is missing, truncated or pickled, or a tensor is of no floating-point type.
    """
    shapes, size = {}, 0
    with open_weights(file, where, what) as opened:
        metadata = dict(opened.metadata() or {})
        for key in opened.keys():  # noqa: SIM118  (no mapping)
            own = opened.get_slice(key)
            if own.get_dtype() not in BYTES:
                raise SettingError(f"{where}: {key} has dtype {own.get_dtype()}, allowed are {', '.join(BYTES)}")
            shapes[key] = tuple(own.get_shape())
            size += BYTES[own.get_dtype()] * torch.Size(shapes[key]).numel()
    return Header(shapes, size, metadata)


def read_weights(file: Path, where: str, what: str) -> dict[str, Tensor]:
    """Read all tensors of a file. Arguments are those of `read_header`.

    Raises:
        SettingError: The file cannot be read, or a number in it is not finite.
    """
    with open_weights(file, where, what) as opened:
        weights = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    for key, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise SettingError(f"{where}: {key} is not finite")
    return weights


@contextmanager
def open_weights(file: Path, where: str, what: str) -> Iterator[Any]:
    """Open a safetensors file, and raise a SettingError of one line if it cannot be read."""
    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        if is_pickled(file):
            raise SettingError(f"{where}: pickled weights are not read; give a safetensors file") from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(f"{where}: cannot read the {what} ({reason})") from None
