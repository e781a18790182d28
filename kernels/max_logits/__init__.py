"""Find the largest logit that any query head gives to each row."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.max_logits.reference import max_logits_reference


@announced
def max_logits(queries: Tensor, keys: Tensor, scaling: float, *, implementation: str | None = None) -> Tensor:
    """Return max over all query heads h of q_h·k_j·scaling, where k_j is the key of h's KV head.

    Args:
        queries: (B, H·G, d)
        keys: (B, H, n, d)
        scaling: The factor of the logits, positive.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, n) in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: Shapes do not fit.
    """
    fits = queries.dim() == 3 and queries.shape[0] == keys.shape[0] and queries.shape[2] == keys.shape[3]
    if not fits or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"max_logits: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}")
    if choose_implementation("max_logits", implementation, queries) == "triton":
        from kvbench.kernels.max_logits.triton import max_logits_triton

        return max_logits_triton(queries, keys, scaling)
    return max_logits_reference(queries, keys, scaling)
