"""Find the largest attention that any query of a block paid to each row."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.max_attention.reference import max_attention_reference


@announced
def max_attention(queries: Tensor, keys: Tensor, scaling: float, *, implementation: str | None = None) -> Tensor:
    """Return the maximum of softmax(q_t·k·scaling)_j over queries t and the group's query heads.

    Args:
        queries: (B, H·G, T, d). The last query belongs to the last row; query t sees rows up to n - T + t.
        keys: (B, H, n, d)
        scaling: The factor of the logits.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in at least float32.

    Raises:
        ValueError: Shapes do not fit.
    """
    if queries.shape[1] % keys.shape[1] or queries.shape[2] > keys.shape[2]:
        raise ValueError(f"max_attention: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}")
    if choose_implementation("max_attention", implementation, queries) == "triton":
        from kvbench.kernels.max_attention.triton import max_attention_triton

        return max_attention_triton(queries, keys, scaling)
    return max_attention_reference(queries, keys, scaling)
