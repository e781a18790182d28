"""Sum the attention that each row got from a block: the column sums of the attention probabilities."""

from torch import Tensor

from kvbench.kernels.accumulated_attention.reference import accumulated_attention_reference
from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.softmax_extras import SoftmaxExtras


@announced
def accumulated_attention(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor,
    lse: Tensor,
    scaling: float,
    *,
    group: str | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return Σ_t exp(q_t·k_j·scaling + log mass_j - lse_t) for each row j.

    Args:
        queries: (B, H·G, T, d). The last query belongs to the last row; query t sees rows up to n - T + t.
        keys: (B, H, n, d)
        mass: Tokens that each row stands for, (B, H, n), at least 0.
        lse: The log-sum-exp of the same logits and sinks, (B, H·G, T).
        scaling: The factor of the logits.
        group: "mean" averages over the G query heads of a KV head; None does not.
        extras: The cap of the logits; None for none.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, G, n), or (B, H, n) with group "mean"; float32, or float64 for float64 masses.

    Raises:
        ValueError: Shapes do not fit.
    """
    if queries.shape[1] % keys.shape[1] or queries.shape[2] > keys.shape[2] or lse.shape != queries.shape[:3]:
        raise ValueError(
            f"accumulated_attention: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, lse {tuple(lse.shape)}"
        )
    if mass.shape != keys.shape[:3]:
        raise ValueError(f"accumulated_attention: keys {tuple(keys.shape)}, mass {tuple(mass.shape)}")
    if group not in (None, "mean"):
        raise ValueError(f"accumulated_attention: group {group!r}; None or mean")
    if choose_implementation("accumulated_attention", implementation, queries) == "triton":
        from kvbench.kernels.accumulated_attention.triton import accumulated_attention_triton

        return accumulated_attention_triton(queries, keys, mass, lse, scaling, group == "mean", extras)
    sums = accumulated_attention_reference(queries, keys, mass, lse, scaling, extras)
    return sums if group is None else sums.mean(2)
