"""Mixtures of experts in a decoder layer, computed by their weights instead of by the model's modules."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.experts import Routing, gated_experts, route, sum_experts
from kvbench.models.decoder_parts import Linear, Mlp, Norm, apply_layer_norm, project


@dataclass(frozen=True)
class Experts:
    """The weights of all experts of a layer (`kernels.experts`). They are the modules' tensors, maybe transposed."""

    gate_up: Linear
    """(E, 2·I, hidden), and biases (E, 2·I)."""
    down: Linear
    """(E, hidden, I), and biases (E, hidden)."""
    activation: str
    interleaved: bool
    """Whether rows of gate and up alternate."""


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that reads all tokens."""

    mlp: Mlp
    gate: Linear | None = None
    """Its result is multiplied by the sigmoid of this projection to one number (Qwen2-MoE)."""

    def add(self, x: Tensor, residual: Tensor | None, implementation: str | None) -> Tensor:
        """Return what it computes of normed hidden states x (B·T, hidden) [+ residual]."""
        if self.gate is None:
            return self.mlp(x, None, residual, implementation)
        (logits,) = project(x, (self.gate,), None, implementation)
        added = self.mlp(x, None, None, implementation) * logits.sigmoid()
        return added if residual is None else residual + added


@dataclass(frozen=True)
class Mixture:
    """A router and its experts."""

    router: Linear
    """(E, hidden)"""
    routing: Routing
    experts: Experts
    correction: Tensor | None = None
    """What is added to the scores that experts are chosen by, (E,) in float32."""
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None, implementation: str | None) -> Tensor:
        x, norm = apply_layer_norm(x, norm, implementation)
        normed, chosen, shares = route(
            x,
            self.router.weight,
            self.routing,
            norm=None if norm is None else (norm.weight, norm.epsilon),
            bias=self.router.bias,
            correction=self.correction,
            implementation=implementation,
        )
        if self.shared is not None:
            residual = self.shared.add(normed, residual, implementation)
        inner = gated_experts(
            normed,
            self.experts.gate_up.weight,
            chosen,
            bias=self.experts.gate_up.bias,
            activation=self.experts.activation,
            interleaved=self.experts.interleaved,
            implementation=implementation,
        )
        return sum_experts(
            inner,
            self.experts.down.weight,
            chosen,
            shares,
            bias=self.experts.down.bias,
            residual=residual,
            implementation=implementation,
        )
