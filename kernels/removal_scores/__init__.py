"""Score rows by what they add to the outputs of the block's last queries, as in DropKV and AnDPro.

Symbols: the last w queries t of the G query heads of a KV head, p_{t,j} their attention probabilities
(kernels/window_attention), a_t their attention outputs, v_j values.
"""

from torch import Tensor

from kvbench.kernels.attention import widen
from kvbench.kernels.dispatch import announced
from kvbench.kernels.removal_scores.reference import andpro_reference, dropkv_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention import check_shapes, choose_window_implementation


@announced
def dropkv(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    epsilon: float,
    rounded: bool,
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return DropKV's scores, 1/G·Σ_t (p/(1 - p + ε))²·‖a_t - v_j‖².

    Args:
        queries: (B, H·G, w, d). The last query belongs to the last row.
        keys: (B, H, n, d)
        values: (B, H, n, e). If e is not d, the narrower ones are copied to one width.
        outputs: The queries' attention outputs, (B, H·G, w, e).
        mass: Tokens that each row stands for, (B, H, n), at least 0; None for one each.
        scaling: The factor of the logits.
        epsilon: ε
        rounded: Whether p is rounded to bfloat16 first.
        extras: Sinks and cap of the softmax, which the outputs include; None for the plain one.
        implementation: "reference", or "triton" for up to 64 queries; None chooses.

    Returns:
        (B, H, n) in float32, or in float64 for float64 inputs; 0 for rows of mass 0.

    Raises:
        ValueError: Shapes do not fit, or the implementation does not support the arguments.
    """
    queries, keys, values, outputs = widen(queries, keys, values, outputs)
    check_value_shapes("dropkv", queries, keys, values, outputs, mass)
    if choose_window_implementation("dropkv", implementation, queries, keys, values, outputs) == "reference":
        return dropkv_reference(queries, keys, values, outputs, mass, scaling, epsilon, rounded, extras)
    from kvbench.kernels.removal_scores.triton import score_triton

    return score_triton(queries, keys, values, outputs, mass, scaling, epsilon, rounded, extras)


@announced
def andpro(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return AnDPro's scores, 1/G·Σ_t p·⟨a_t, v_j⟩, (B, H, n). Arguments and errors are those of `dropkv`."""
    queries, keys, values, outputs = widen(queries, keys, values, outputs)
    check_value_shapes("andpro", queries, keys, values, outputs, mass)
    if choose_window_implementation("andpro", implementation, queries, keys, values, outputs) == "reference":
        return andpro_reference(queries, keys, values, outputs, mass, scaling, extras)
    from kvbench.kernels.removal_scores.triton import score_triton

    return score_triton(queries, keys, values, outputs, mass, scaling, extras=extras)


def check_value_shapes(
    op: str, queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, mass: Tensor | None
) -> None:
    """Raise a ValueError unless values have the shape of keys, and outputs that of queries."""
    check_shapes(op, queries, keys, mass)
    if values.shape != keys.shape or outputs.shape != queries.shape:
        raise ValueError(
            f"{op}: keys {tuple(keys.shape)}, values {tuple(values.shape)}, queries {tuple(queries.shape)}, "
            f"outputs {tuple(outputs.shape)}"
        )
