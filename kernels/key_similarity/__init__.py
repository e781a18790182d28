"""Compare keys with one vector of their head: the mean key as an anchor, similarities to an anchor, and norms."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.key_similarity.reference import anchor_reference, norms_reference, similarity_reference

METRICS = ("cosine", "dot", "euclidean")


@announced
def anchor(keys: Tensor, mass: Tensor, normalised: bool, *, implementation: str | None = None) -> Tensor:
    """Return the mean of each head's keys, weighted by mass.

    Args:
        keys: (B, H, n, d)
        mass: (B, H, n), at least 0.
        normalised: Whether k/‖k‖ is averaged instead of k.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, d) in the dtype of the mass.

    Raises:
        ValueError: Shapes do not fit.
    """
    if mass.shape != keys.shape[:3]:
        raise ValueError(f"anchor: keys {tuple(keys.shape)}, mass {tuple(mass.shape)}")
    if choose_implementation("anchor", implementation, keys) == "triton":
        from kvbench.kernels.key_similarity.triton import anchor_triton

        return anchor_triton(keys, mass, normalised)
    return anchor_reference(keys, mass, normalised)


@announced
def similarity(keys: Tensor, anchor: Tensor, metric: str, *, implementation: str | None = None) -> Tensor:
    """Return the similarity of every key to its head's anchor.

    The result for an absent row depends on whatever the row holds.

    Args:
        keys: (B, H, n, d)
        anchor: (B, H, d) float32, or float64 for float64 keys.
        metric: "cosine" is k·a/(‖k‖·‖a‖), as in torch's cosine_similarity; "dot" is k·a; "euclidean" is -‖k - a‖.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in the anchor's dtype.

    Raises:
        ValueError: Shapes do not fit, or there is no such metric.
    """
    if anchor.shape != (*keys.shape[:2], keys.shape[3]):
        raise ValueError(f"similarity: keys {tuple(keys.shape)}, anchor {tuple(anchor.shape)}")
    if metric not in METRICS:
        raise ValueError(f"similarity: metric {metric!r}; one of {', '.join(METRICS)}")
    if choose_implementation("similarity", implementation, keys) == "triton":
        from kvbench.kernels.key_similarity.triton import similarity_triton

        return similarity_triton(keys, anchor, metric)
    return similarity_reference(keys, anchor, metric)


@announced
def norms(rows: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return ‖x‖₂ of every row.

    Args:
        rows: (B, H, n, d)
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n) in float32, or in float64 for float64 rows.

    Raises:
        ValueError: The rows have another number of dimensions.
    """
    if rows.dim() != 4:
        raise ValueError(f"norms: rows {tuple(rows.shape)}")
    if choose_implementation("norms", implementation, rows) == "triton":
        from kvbench.kernels.key_similarity.triton import norms_triton

        return norms_triton(rows)
    return norms_reference(rows)
