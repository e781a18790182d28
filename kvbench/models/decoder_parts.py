"""The parts of a decoder layer, computed by their weights instead of by the model's modules.

Attention and MLP are called alike: with the hidden states x (B·T, hidden), the norm to apply to them first (None if
there is none, or if x is normed already), and what to add the result to (None for nothing). The kernels of matrix
products take the norm and the sum along. Results are rounded like those of transformers' modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kvbench.kernels.fused_linear import rms_norm, rms_norm_glu, rms_norm_linear
from kvbench.kernels.softmax_extras import SoftmaxExtras


@dataclass(frozen=True)
class Linear:
    """A matrix product."""

    weight: Tensor
    """(outputs, inputs), maybe in int4 (`kvbench.models.int4.Int4Weight`)."""
    bias: Tensor | None = None
    """(outputs,)"""


@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm."""

    weight: Tensor
    """As `kernels.fused_linear.rms_norm` takes it: Gemma multiplies by 1 + weight in float32. (hidden,)"""
    epsilon: float

    def apply(self, x: Tensor, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return the norm of x (n, hidden) [+ residual]."""
        return rms_norm(x, self.weight, self.epsilon, residual=residual, implementation=implementation)


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm."""

    weight: Tensor | None
    """(hidden,); None for 1."""
    bias: Tensor | None
    """(hidden,)"""
    epsilon: float

    def apply(self, x: Tensor, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return the norm of x (n, hidden) [+ residual]."""
        normed = layer_norm(x, x.shape[-1:], self.weight, self.bias, self.epsilon)
        return normed if residual is None else residual + normed


Norm = RmsNorm | LayerNorm


def project(x: Tensor, linears: Sequence[Linear], norm: Norm | None, implementation: str | None) -> list[Tensor]:
    """Return norm(x) Wᵀ + bias of one to three matrices, of which all or none have a bias.

    Args:
        x: (n, inputs)
        linears: The matrices.
        norm: The norm of x.
        implementation: Name of the kernels' implementation; None chooses one.

    Returns:
        (n, outputs) for each matrix.
    """
    x, norm = apply_layer_norm(x, norm, implementation)
    return rms_norm_linear(
        x,
        [linear.weight for linear in linears],
        biases=[linear.bias for linear in linears],
        norm=None if norm is None else (norm.weight, norm.epsilon),
        implementation=implementation,
    )


def apply_layer_norm(x: Tensor, norm: Norm | None, implementation: str | None) -> tuple[Tensor, RmsNorm | None]:
    """Return x and its norm for a kernel that takes RMS norms along. A layer norm is applied here."""
    if isinstance(norm, LayerNorm):
        return norm.apply(x, None, implementation), None
    return x, norm


def add_product(inputs: Tensor, linear: Linear, residual: Tensor | None, implementation: str | None) -> Tensor:
    """Return inputs·Wᵀ + bias [+ residual]."""
    (x,) = rms_norm_linear(
        inputs, [linear.weight], biases=[linear.bias], residual=residual, implementation=implementation
    )
    return x


class Mlp(Protocol):
    """What stands behind a layer's attention."""

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return what the MLP computes of norm(x) [+ residual], (B·T, hidden)."""


@dataclass(frozen=True)
class GatedMlp:
    """f(x·gateᵀ)·(x·upᵀ), projected back."""

    gate: Linear
    up: Linear
    down: Linear
    activation: str | Callable[[Tensor], Tensor]
    """f: a name of `kernels.fused_linear.rms_norm_glu` if there are no biases, or a function."""
    norm: Norm | None = None
    """The norm before `down` (BitNet)."""

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None, implementation: str | None) -> Tensor:
        inner = self.gated_product(x, norm, implementation)
        if self.norm is not None:
            inner = self.norm.apply(inner, None, implementation)
        return add_product(inner, self.down, residual, implementation)

    def gated_product(self, x: Tensor, norm: Norm | None, implementation: str | None) -> Tensor:
        """Return f(norm(x)·gateᵀ)·(norm(x)·upᵀ)."""
        if not isinstance(self.activation, str):
            gate, up = project(x, (self.gate, self.up), norm, implementation)
            return self.activation(gate) * up
        x, norm = apply_layer_norm(x, norm, implementation)
        pair = None if norm is None else (norm.weight, norm.epsilon)
        return rms_norm_glu(
            x, self.gate.weight, self.up.weight, pair, activation=self.activation, implementation=implementation
        )


@dataclass(frozen=True)
class PlainMlp:
    """f(x·upᵀ), projected back."""

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None, implementation: str | None) -> Tensor:
        (inner,) = project(x, (self.up,), norm, implementation)
        return add_product(self.activation(inner), self.down, residual, implementation)


HeadNorms = tuple[Tensor, Tensor, float] | None
"""The QK norm: weights of queries and of keys, (d,) each, and ε."""


class ProjectedNorm(Protocol):
    """A norm of projected queries or keys, which is applied before they are rotated."""

    def apply(self, x: Tensor, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return the norm of x, (n, heads·d)."""


@dataclass(frozen=True)
class HeadLayerNorm:
    """A layer norm of each head with weights of its own (Cohere, StableLM)."""

    weight: Tensor
    """(heads, d)"""
    epsilon: float

    def apply(self, x: Tensor, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return the norm of x, (n, heads·d)."""
        wide = x.unflatten(-1, self.weight.shape).to(torch.promote_types(x.dtype, torch.float32))
        normed = layer_norm(wide, wide.shape[-1:], eps=self.epsilon) * self.weight
        return normed.flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Gate:
    """What the outputs of attention are multiplied with."""

    linear: Linear
    """Its projection of the normed hidden states to (heads,) or (heads·d,) numbers."""
    activation: Callable[[Tensor], Tensor]

    def apply(self, outputs: Tensor, x: Tensor, implementation: str | None) -> Tensor:
        """Return the gated outputs (n, heads·d) for normed hidden states x (n, hidden)."""
        (logits,) = project(x, (self.linear,), None, implementation)
        gate = self.activation(logits)
        return (outputs.unflatten(-1, (gate.shape[1], -1)) * gate[..., None]).flatten(-2)


@dataclass(frozen=True)
class Attention:
    """The weights around the attention of a layer."""

    project: tuple[Linear, Linear, Linear]
    """The projections to queries, keys and values."""
    output: Linear
    """The output projection W_o."""
    head_norms: HeadNorms = None
    projected_norms: tuple[ProjectedNorm, ProjectedNorm] | None = None
    """Norms of queries and of keys over other dimensions than those of a head."""
    clip: float | None = None
    """The largest size of projected queries, keys and values (OLMo)."""
    gate: Gate | None = None
    """The gate of the outputs."""
    norm: Norm | None = None
    """The norm of the outputs before W_o (BitNet)."""
    extras: SoftmaxExtras | None = None
    """Sinks (gpt-oss) and cap (Gemma 2) of the softmax."""

    def __call__(
        self,
        attend: Callable[[Sequence[Tensor], HeadNorms], Tensor],
        x: Tensor,
        norm: Norm | None,
        residual: Tensor | None,
        implementation: str | None,
    ) -> Tensor:
        """Return what attention computes of norm(x) [+ residual], (B·T, hidden).

        Args:
            attend: Maps projected queries, keys and values (B·T, heads·d) and the QK norm to outputs (B, Hq, T, d).
            x: (B·T, hidden)
            norm: The norm of x.
            residual: What the result is added to.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        if self.gate is not None and norm is not None:
            x, norm = norm.apply(x, None, implementation), None
        outputs = attend(self.project_heads(x, norm, implementation), self.head_norms)
        outputs = outputs.transpose(1, 2).reshape(len(x), -1)
        if self.gate is not None:
            outputs = self.gate.apply(outputs, x, implementation)
        if self.norm is not None:
            outputs = self.norm.apply(outputs, None, implementation)
        return add_product(outputs, self.output, residual, implementation)

    def project_heads(self, x: Tensor, norm: Norm | None, implementation: str | None) -> Sequence[Tensor]:
        """Return queries, keys and values, (B·T, heads·d) each."""
        three = project(x, self.project, norm, implementation)
        if self.clip is not None:
            three = [part.clamp(-self.clip, self.clip) for part in three]
        if self.projected_norms is not None:
            pairs = zip(self.projected_norms, three[:2], strict=True)
            three = [*(one.apply(part, None, implementation) for one, part in pairs), three[2]]
        return three


@dataclass(frozen=True)
class Around:
    """The norms around attention or around an MLP."""

    before: Norm | None
    """The norm of the hidden states that it reads."""
    after: Norm | None = None
    """The norm of what it adds to them."""


@dataclass(frozen=True)
class Block:
    """One decoder layer."""

    attention: Attention
    mlp: Mlp
    around_attention: Around
    around_mlp: Around
    parallel: bool = False
    """Whether attention and MLP read the same normed hidden states, those of `around_attention`."""
    factor: float | None = None
    """The factor of what attention and MLP add to the hidden states (Granite)."""
