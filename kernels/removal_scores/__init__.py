"""What rows add to the outputs of the block's last queries: DropKV's and AnDPro's scores.

Symbols: the last w queries t of the G query heads of a KV head, p_{t,j} their attention probabilities
(kernels/window_attention), a_t their attention outputs, v_j values.
"""

from torch import Tensor

from kvbench.kernels.removal_scores.reference import andpro_reference, dropkv_reference
from kvbench.kernels.window_attention import check_shapes, choose_window_implementation


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
    implementation: str | None = None,
) -> Tensor:
    """1/G·Σ_t (p/(1 - p + ε))²·‖a_t - v_j‖², (B, H, n) in float32 (float64 for float64 inputs); 0 for mass 0.

    queries, outputs (B, H·G, w, d), the last of which belongs to the last row; keys, values (B, H, n, d); mass
    (B, H, n) >= 0, None for all ones. `rounded`: p is rounded to bfloat16 first. `implementation`: "reference" |
    "triton", up to 64 queries; None chooses. ValueError for what does not fit.
    """
    check_value_shapes("dropkv", queries, keys, values, outputs, mass)
    if choose_window_implementation("dropkv", implementation, queries, keys, values, outputs) == "reference":
        return dropkv_reference(queries, keys, values, outputs, mass, scaling, epsilon, rounded)
    from kvbench.kernels.removal_scores.triton import score_triton

    return score_triton(queries, keys, values, outputs, mass, scaling, epsilon, rounded)


def andpro(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    *,
    implementation: str | None = None,
) -> Tensor:
    """1/G·Σ_t p·⟨a_t, v_j⟩, (B, H, n); arguments and errors as `dropkv`."""
    check_value_shapes("andpro", queries, keys, values, outputs, mass)
    if choose_window_implementation("andpro", implementation, queries, keys, values, outputs) == "reference":
        return andpro_reference(queries, keys, values, outputs, mass, scaling)
    from kvbench.kernels.removal_scores.triton import score_triton

    return score_triton(queries, keys, values, outputs, mass, scaling)


def check_value_shapes(
    op: str, queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, mass: Tensor | None
) -> None:
    """ValueError unless values are as keys and outputs as queries."""
    check_shapes(op, queries, keys, mass)
    if values.shape != keys.shape or outputs.shape != queries.shape:
        raise ValueError(
            f"{op}: keys {tuple(keys.shape)}, values {tuple(values.shape)}, queries {tuple(queries.shape)}, "
            f"outputs {tuple(outputs.shape)}"
        )
