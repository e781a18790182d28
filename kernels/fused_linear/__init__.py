"""The projections of decoded tokens: x [+] f(norm(x) Wᵀ) for one row or a few, with every weight read once."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.fused_linear.reference import (
    ACTIVATIONS,
    gated_product_reference,
    rms_norm_linear_reference,
    rms_norm_reference,
)


def are_plain(weights: Sequence[Tensor]) -> bool:
    """Return whether kernels can read weights. A subclass of tensors computes its own products (weights in int4)."""
    return all(type(weight) in (Tensor, Parameter) for weight in weights)


@announced
def rms_norm_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    biases: Sequence[Tensor | None] | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    implementation: str | None = None,
) -> list[Tensor]:
    """Return norm(x) Wᵀ + bias [+ residual] for each of one to three weights.

    Results are rounded to x's dtype after the norm (see `rms_norm`), the product and the sum, like in the modules of
    transformers.

    Args:
        x: (B, K)
        weights: (N, K) each. Products with a subclass of tensors are its own (`torch.nn.functional.linear`).
        biases: (N,) or None for each weight; None for no biases.
        norm: The weight (K,) and ε of an RMS norm (`rms_norm`); None for no norm.
        residual: (B, N), added to the product with a single weight.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, N) for each weight.

    Raises:
        ValueError: Shapes do not fit.
    """
    if not 1 <= len(weights) <= 3 or any(weight.shape[1] != x.shape[1] for weight in weights):
        raise ValueError(f"rms_norm_linear: x {tuple(x.shape)}, weights {[tuple(weight.shape) for weight in weights]}")
    if residual is not None and (len(weights) > 1 or residual.shape != (len(x), len(weights[0]))):
        raise ValueError(f"rms_norm_linear: residual {tuple(residual.shape)} for {len(weights)} weights")
    biases = [None] * len(weights) if biases is None else biases
    if len(x) == 1 and are_plain(weights) and choose_implementation("rms_norm_linear", implementation, x) == "triton":
        from kvbench.kernels.fused_linear.triton import rms_norm_linear_triton

        return rms_norm_linear_triton(x, weights, biases, norm, residual)
    if norm is not None:
        x = rms_norm(x, *norm, implementation=implementation)
    return rms_norm_linear_reference(x, weights, biases, residual)


@announced
def rms_norm_glu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    norm: tuple[Tensor, float] | None,
    *,
    activation: str = "silu",
    implementation: str | None = None,
) -> Tensor:
    """Return f(norm(x) gateᵀ)·(norm(x) upᵀ), rounded like `rms_norm_linear`.

    Args:
        x: (B, K)
        gate: (N, K)
        up: (N, K)
        norm: The weight (K,) and ε of an RMS norm (`rms_norm`); None for no norm.
        activation: The function f: "silu", or "gelu_tanh" for GELU by its tanh formula.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, N)

    Raises:
        ValueError: Shapes do not fit, or there is no such activation.
    """
    if gate.shape != up.shape or gate.shape[1] != x.shape[1]:
        raise ValueError(f"rms_norm_glu: x {tuple(x.shape)}, gate {tuple(gate.shape)}, up {tuple(up.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"rms_norm_glu: activation {activation!r}")
    chosen = choose_implementation("rms_norm_glu", implementation, x)
    if chosen == "triton" and len(x) == 1 and are_plain((gate, up)):
        from kvbench.kernels.fused_linear.triton import rms_norm_glu_triton

        return rms_norm_glu_triton(x, gate, up, norm, activation)
    if norm is not None:
        x = rms_norm(x, *norm, implementation=chosen)
    one, two = rms_norm_linear_reference(x, (gate, up), (None, None), None)
    if chosen == "reference":
        return gated_product_reference(one, two, activation)
    from kvbench.kernels.fused_linear.triton import gated_product_triton

    return gated_product_triton(one, two, activation)


@announced
def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, *, residual: Tensor | None = None, implementation: str | None = None
) -> Tensor:
    """Return the RMS norm of x over its last dimension, times weight [+ residual].

    The normed row is rounded to the weight's dtype before the product, and the product to x's dtype. So Llama's norm
    has a weight in x's dtype, and Gemma's norm has 1 + weight in float32.

    Args:
        x: (B, K)
        weight: (K,)
        epsilon: Added to the mean square.
        residual: (B, K), added to the rounded product.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, K)
    """
    if choose_implementation("rms_norm", implementation, x) == "reference":
        normed = rms_norm_reference(x, weight, epsilon)
        return normed if residual is None else residual + normed
    from kvbench.kernels.fused_linear.triton import rms_norm_triton

    return rms_norm_triton(x, weight, epsilon, residual)
