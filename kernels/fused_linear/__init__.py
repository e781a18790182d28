"""The projections of decoded tokens: x [+] f(norm(x) Wᵀ) for one row or a few, with every weight read once."""

from collections.abc import Sequence

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.fused_linear.reference import (
    rms_norm_linear_reference,
    rms_norm_reference,
    rms_norm_swiglu_reference,
)


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

    Results are rounded to x's dtype after the norm, the product and the sum, like in the modules of transformers.

    Args:
        x: (B, K)
        weights: (N, K) each.
        biases: (N,) or None for each weight; None for no biases.
        norm: The weight (K,) and ε of an RMS norm; None for no norm.
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
    if len(x) == 1 and choose_implementation("rms_norm_linear", implementation, x) == "triton":
        from kvbench.kernels.fused_linear.triton import rms_norm_linear_triton

        return rms_norm_linear_triton(x, weights, biases, norm, residual)
    return rms_norm_linear_reference(rms_norm(x, *norm, implementation) if norm else x, weights, biases, residual)


@announced
def rms_norm_swiglu(
    x: Tensor, gate: Tensor, up: Tensor, norm: tuple[Tensor, float], *, implementation: str | None = None
) -> Tensor:
    """Return silu(norm(x) gateᵀ)·(norm(x) upᵀ), rounded like `rms_norm_linear`.

    Args:
        x: (B, K)
        gate: (N, K)
        up: (N, K)
        norm: The weight (K,) and ε of an RMS norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, N)

    Raises:
        ValueError: Shapes do not fit.
    """
    if gate.shape != up.shape or gate.shape[1] != x.shape[1]:
        raise ValueError(f"rms_norm_swiglu: x {tuple(x.shape)}, gate {tuple(gate.shape)}, up {tuple(up.shape)}")
    if choose_implementation("rms_norm_swiglu", implementation, x) == "reference":
        return rms_norm_swiglu_reference(
            *rms_norm_linear_reference(rms_norm_reference(x, *norm), (gate, up), (None, None), None)
        )
    from kvbench.kernels.fused_linear.triton import product_triton, rms_norm_swiglu_triton

    if len(x) == 1:
        return rms_norm_swiglu_triton(x, gate, up, norm)
    return product_triton(
        *rms_norm_linear_reference(rms_norm(x, *norm, implementation), (gate, up), (None, None), None)
    )


@announced
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, implementation: str | None = None) -> Tensor:
    """Return the RMS norm of x (B, K) over its last dimension, times weight (K,)."""
    if choose_implementation("rms_norm", implementation, x) == "reference":
        return rms_norm_reference(x, weight, epsilon)
    from kvbench.kernels.fused_linear.triton import rms_norm_triton

    return rms_norm_triton(x, weight, epsilon)
