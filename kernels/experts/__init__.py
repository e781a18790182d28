"""Mixtures of experts: each token is read by a few of a layer's MLPs, which a router chooses on the device."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.experts.reference import gated_experts_reference, route_reference, sum_experts_reference
from kvbench.kernels.experts.routing import MOST_TOKENS, SCORES, Routing
from kvbench.kernels.fused_linear import rms_norm

__all__ = ["MOST_EXPERTS", "MOST_TOKENS", "Routing", "gated_experts", "route", "sum_experts"]
ACTIVATIONS = ("silu", "gelu_tanh", "clamped")
MOST_EXPERTS = 1024


@announced
def route(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed hidden states, and the experts that read each token with their shares.

    Args:
        x: Hidden states, (B, H).
        weight: The router's weight, (E, H).
        routing: How it chooses.
        norm: The weight (H,) and ε of an RMS norm of x (`kernels.fused_linear.rms_norm`); None for no norm.
        bias: Added to the logits, (E,).
        correction: Added to the scores that experts are chosen by, but not to the shares, (E,) in float32.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The normed x (B, H), experts (B, k) in int32, and shares (B, k) in float32 (float64 of float64).

    Raises:
        ValueError: Shapes or settings do not fit.
    """
    experts, columns = weight.shape
    if x.shape[1] != columns or any(part is not None and part.shape != (experts,) for part in (bias, correction)):
        raise ValueError(f"route: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    if routing.scores not in SCORES or not 1 <= routing.count <= experts <= MOST_EXPERTS or experts % routing.groups:
        raise ValueError(f"route: {routing} of {experts} experts")
    if routing.groups > 1 and routing.count > routing.kept_groups * (experts // routing.groups):
        raise ValueError(f"route: {routing} of {experts} experts")
    chosen = choose_implementation("route", implementation, x)
    if chosen == "triton":
        from kvbench.kernels.experts.triton import route_triton

        return route_triton(x, weight, routing, norm, bias, correction)
    x = x if norm is None else rms_norm(x, *norm, implementation=chosen)
    return x, *route_reference(x, weight, routing, bias, correction)


@announced
def gated_experts(
    x: Tensor,
    gate_up: Tensor,
    experts: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Return f(x gateᵀ)·(x upᵀ) for each expert of each token.

    Args:
        x: (B, H)
        gate_up: The weights of gate and up, (E, 2·I, H). Any strides will do if one of the last two is 1.
        experts: The experts of each token, (B, k) in int32, all different.
        bias: Added to the products, (E, 2·I).
        activation: The function f: "silu", "gelu_tanh" for GELU by its tanh formula, or "clamped" for gpt-oss' gate.
        interleaved: Whether rows of gate and up alternate. Otherwise all rows of gate come first.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, k, I)

    Raises:
        ValueError: Shapes do not fit, or there is no such activation.
    """
    shape = gate_up.shape
    if shape[2] != x.shape[1] or shape[1] % 2 or len(experts) != len(x) or 1 not in gate_up.stride()[1:]:
        raise ValueError(f"gated_experts: x {tuple(x.shape)}, gate_up {tuple(shape)}, experts {tuple(experts.shape)}")
    if bias is not None and bias.shape != shape[:2]:
        raise ValueError(f"gated_experts: bias {tuple(bias.shape)} for gate_up {tuple(shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_experts: activation {activation!r}")
    given = x, gate_up, experts, bias, activation, interleaved
    if choose_implementation("gated_experts", implementation, x) == "reference":
        return gated_experts_reference(*given)
    from kvbench.kernels.experts.triton import gated_experts_triton

    return gated_experts_triton(*given)


@announced
def sum_experts(
    inner: Tensor,
    down: Tensor,
    experts: Tensor,
    shares: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the sum of what the experts of each token make of it, weighted by their shares [+ residual].

    Args:
        inner: What `gated_experts` returns, (B, k, I).
        down: The weights, (E, H, I). Any strides will do if one of the last two is 1.
        experts: The experts of each token, (B, k) in int32, all different.
        shares: Their shares, (B, k) in float32.
        bias: Added to the products, (E, H).
        residual: (B, H), added to the sum.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H)

    Raises:
        ValueError: Shapes do not fit.
    """
    shape = down.shape
    if inner.shape[:2] != experts.shape or shape[2] != inner.shape[2] or 1 not in down.stride()[1:]:
        raise ValueError(f"sum_experts: inner {tuple(inner.shape)}, down {tuple(shape)}, {tuple(experts.shape)}")
    if bias is not None and bias.shape != shape[:2]:
        raise ValueError(f"sum_experts: bias {tuple(bias.shape)} for down {tuple(shape)}")
    if shares.shape != experts.shape or (residual is not None and residual.shape != (len(inner), shape[1])):
        raise ValueError(f"sum_experts: inner {tuple(inner.shape)}, shares {tuple(shares.shape)}, or the residual")
    given = inner, down, experts, shares, bias, residual
    if choose_implementation("sum_experts", implementation, inner) == "reference":
        return sum_experts_reference(*given)
    from kvbench.kernels.experts.triton import sum_experts_triton

    return sum_experts_triton(*given)
