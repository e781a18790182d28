"""Small networks that a method or a codec reads from a safetensors file made for a model.

A network is one of

    mlp_swiglu  w3(silu(x1) · x2), where (x1, x2) are the halves of w12(x)
    mlp_gelu    W2(gelu(W1 x))
    linear      W x

Each matrix may have a bias. In a file, a matrix is named by the network's own name, followed by .w12 and .w3
(mlp_swiglu), .0 and .2 (mlp_gelu) or nothing (linear), then .weight or .bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from kvbench.interfaces.tensor_files import Shape
from kvbench.validation import SettingError

NAMES = {"mlp_swiglu": (".w12", ".w3"), "mlp_gelu": (".0", ".2"), "linear": ("",)}  # kind -> names of its matrices
KINDS = tuple(NAMES)


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
        return linear(self.find_inner(x), self.weights[-1], self.biases[-1])

    def find_inner(self, x: Tensor) -> Tensor:
        """Return what the last matrix is multiplied with, of x (..., inputs)."""
        if self.kind == "linear":
            return x
        weight, bias = self.weights[0], self.biases[0]
        if self.kind == "mlp_gelu":
            return gelu(linear(x, weight, bias))
        # Two products, because the halves of a single one are not contiguous, and a GPU reads them slowly.
        gate, value = map(linear, (x, x), weight.chunk(2), (None, None) if bias is None else bias.chunk(2))
        return silu(gate) * value

    def tensors(self) -> list[Tensor]:
        """Return the matrices and the biases."""
        return [*self.weights, *(bias for bias in self.biases if bias is not None)]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Return a copy on a device and in a dtype."""
        biases = (None if bias is None else bias.to(device, dtype) for bias in self.biases)
        return replace(self, weights=tuple(weight.to(device, dtype) for weight in self.weights), biases=tuple(biases))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the matrices and the biases by their names in a file, where the network's own name is `prefix`."""
        tensors = {}
        for matrix, weight, bias in zip(NAMES[self.kind], self.weights, self.biases, strict=True):
            tensors[f"{prefix}{matrix}.weight"] = weight
            if bias is not None:
                tensors[f"{prefix}{matrix}.bias"] = bias
        return tensors


def take_network(kind: str, prefix: str, weights: Mapping[str, Tensor]) -> Network:
    """Return the network with the name `prefix` among the weights of a file."""
    names = [f"{prefix}{matrix}" for matrix in NAMES[kind]]
    matrices = tuple(weights[f"{name}.weight"] for name in names)
    return Network(kind, matrices, tuple(weights.get(f"{name}.bias") for name in names))


def describe_network(where: str, shapes: Mapping[tuple[str, str], Shape]) -> tuple[str, int, int]:
    """Check the shapes of a network and return its kind and the widths of its arguments and results."""
    names = {matrix for matrix, _ in shapes}
    kind = next((kind for kind, matrices in NAMES.items() if set(matrices) == names), None)
    if kind is None or any((matrix, "weight") not in shapes for matrix in names):
        raise SettingError(f"{where} must have the matrices of one of {', '.join(KINDS)}")
    weights = [shapes[matrix, "weight"] for matrix in NAMES[kind]]
    halves = 2 if kind == "mlp_swiglu" else 1
    fits = all(len(shape) == 2 and min(shape) > 0 for shape in weights)
    fits = fits and (len(weights) == 1 or weights[0][0] == halves * weights[1][1])
    biases = [(shape, shapes.get((matrix, "bias"))) for matrix, shape in zip(NAMES[kind], weights, strict=True)]
    if not fits or any(bias not in (None, shape[:1]) for shape, bias in biases):
        listed = ", ".join(f"{matrix}.{what}".lstrip(".") + f" {shape}" for (matrix, what), shape in shapes.items())
        raise SettingError(f"{where} ({kind}) has shapes that do not fit together: {listed}")
    return kind, weights[0][1], weights[-1][0]
