"""The projections in PyTorch, rounded like the Llama-like modules of transformers."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def rms_norm_linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], residual: Tensor | None
) -> list[Tensor]:
    products = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return products if residual is None else [residual + products[0]]


def gated_product_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](gate) * up
