"""How much attention each row got from a block: column sums of the attention probabilities."""

from torch import Tensor

from kvbench.kernels.votes.reference import votes_reference


def votes(queries: Tensor, keys: Tensor, mass: Tensor, lse: Tensor, scaling: float) -> Tensor:
    """Σ_t exp(q_t·k_j·scaling + log mass_j - lse_t), (B, H, G, n) in float32 (float64 for float64 masses).

    queries (B, H·G, T, d), whose last belongs to the last row, query t sees rows up to n - T + t; keys (B, H, n, d);
    mass (B, H, n) >= 0; lse (B, H·G, T), the log-sum-exp of the same logits. ValueError for shapes that do not fit.
    """
    if queries.shape[1] % keys.shape[1] or queries.shape[2] > keys.shape[2] or lse.shape != queries.shape[:3]:
        raise ValueError(f"votes: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, lse {tuple(lse.shape)}")
    return votes_reference(queries, keys, mass, lse, scaling)
