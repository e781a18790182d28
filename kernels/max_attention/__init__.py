"""Find the largest attention that any query of a block paid to each row."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.max_attention.reference import max_attention_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


@announced
def max_attention(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    *,
    weight: Tensor | None = None,
    together: bool = True,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Return the maximum of weight_t·softmax(q_t·k·scaling)_j over queries t and the group's query heads.

    Args:
        queries: (B, H·G, T, d). The last query belongs to the last row; query t sees rows up to n - T + t.
        keys: (B, H, n, d)
        scaling: The factor of the logits.
        weight: A positive factor of each query's probabilities, (B, T); None for 1.
        together: Whether the query heads of a group share one maximum.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in at least float32, or (B, H, G, n) if not `together`.

    Raises:
        ValueError: Shapes do not fit.
    """
    batch, query_heads, tokens, _ = queries.shape
    fits = weight is None or weight.shape == (batch, tokens)
    if query_heads % keys.shape[1] or tokens > keys.shape[2] or not fits:
        shapes = f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}"
        raise ValueError(f"max_attention: {shapes}, weight {None if weight is None else tuple(weight.shape)}")
    if choose_implementation("max_attention", implementation, queries) == "triton":
        from kvbench.kernels.max_attention.triton import max_attention_triton

        return max_attention_triton(queries, keys, scaling, weight, together, extras)
    return max_attention_reference(queries, keys, scaling, weight, together, extras)
