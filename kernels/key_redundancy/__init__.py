"""Measure how much the key of each row repeats the keys of the other rows of its head, as R-KV does."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.key_redundancy.reference import key_redundancy_reference


@announced
def key_redundancy(keys: Tensor, present: Tensor, similar: float, *, implementation: str | None = None) -> Tensor:
    """Return R, a softmax over the rows j of their mean cosine with the rows i of the head.

    c_{i,j} = cos(k_i, k_j) counts as 0 for i = j, and for the newest (last) j with c_{i,j} > `similar`. No tensor has
    the cosines of all pairs.

    Args:
        keys: (B, H, n, d)
        present: The rows that exist, (B, H, n) bool. The keys of other rows may be anything.
        similar: The cosine above which two keys repeat each other, at least 0.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in float32, or in float64 for float64 keys; 0 for rows that do not exist.

    Raises:
        ValueError: Shapes do not fit, or `similar` is negative.
    """
    if keys.dim() != 4 or present.shape != keys.shape[:3]:
        raise ValueError(f"key_redundancy: keys {tuple(keys.shape)}, present {tuple(present.shape)}")
    if similar < 0:
        raise ValueError(f"key_redundancy: similar {similar}; at least 0")
    if choose_implementation("key_redundancy", implementation, keys) == "triton":
        from kvbench.kernels.key_redundancy.triton import key_redundancy_triton

        return key_redundancy_triton(keys, present, similar)
    return key_redundancy_reference(keys, present, similar)
