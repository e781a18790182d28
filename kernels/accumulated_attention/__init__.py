"""How much attention each row got from a block: column sums of the attention probabilities."""

from torch import Tensor

from kvbench.kernels.accumulated_attention.reference import accumulated_attention_reference
from kvbench.kernels.dispatch import choose_implementation


def accumulated_attention(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor,
    lse: Tensor,
    scaling: float,
    *,
    group: str | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Σ_t exp(q_t·k_j·scaling + log mass_j - lse_t), in float32 (float64 for float64 masses): (B, H, G, n), or
    (B, H, n) with group "mean", the mean over a KV head's G query heads.

    queries (B, H·G, T, d), whose last belongs to the last row, query t sees rows up to n - T + t; keys (B, H, n, d);
    mass (B, H, n) >= 0; lse (B, H·G, T), the log-sum-exp of the same logits. implementation: "reference" | "triton";
    None chooses. ValueError for shapes that do not fit.
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

        return accumulated_attention_triton(queries, keys, mass, lse, scaling, group == "mean")
    found = accumulated_attention_reference(queries, keys, mass, lse, scaling)
    return found if group is None else found.mean(2)
