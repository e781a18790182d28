"""Norms of the values after the output projection, by which CriticalKV weights attention."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.projected_norms.reference import projected_norms_reference


@announced
def projected_norms(values: Tensor, weight: Tensor, query_heads: int, *, implementation: str | None = None) -> Tensor:
    """Return the mean over the group's query heads h of ‖W_o^h v_j‖₁.

    Args:
        values: (B, H, n, d)
        weight: The layer's W_o, (hidden, query_heads·d).
        query_heads: Number of query heads.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in at least float32.

    Raises:
        ValueError: Shapes do not fit.
    """
    heads, dim = values.shape[1], values.shape[3]
    if query_heads % heads or weight.dim() != 2 or weight.shape[1] != query_heads * dim:
        raise ValueError(
            f"projected_norms: values {tuple(values.shape)}, weight {tuple(weight.shape)} of {query_heads} heads"
        )
    if choose_implementation("projected_norms", implementation, values) == "reference":
        return projected_norms_reference(values, weight, query_heads)
    from kvbench.kernels.projected_norms.triton import projected_norms_triton

    return projected_norms_triton(values, weight, query_heads)
