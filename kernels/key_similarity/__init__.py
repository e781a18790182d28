"""Keys compared with one vector of their head: the mean key as an anchor, similarities to it, norms."""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.key_similarity.reference import anchor_reference, norms_reference, similarity_reference

METRICS = ("cosine", "dot", "euclidean")


def anchor(keys: Tensor, mass: Tensor, normalised: bool, *, implementation: str | None = None) -> Tensor:
    """Mean over rows, weighed by mass, of the keys or, if `normalised`, of k/‖k‖: (B, H, d) in the dtype of the mass.

    keys (B, H, n, d); mass (B, H, n) >= 0. implementation: "reference" | "triton"; None chooses. ValueError for shapes
    that do not fit.
    """
    if mass.shape != keys.shape[:3]:
        raise ValueError(f"anchor: keys {tuple(keys.shape)}, mass {tuple(mass.shape)}")
    if choose_implementation("anchor", implementation, keys) == "triton":
        from kvbench.kernels.key_similarity.triton import anchor_triton

        return anchor_triton(keys, mass, normalised)
    return anchor_reference(keys, mass, normalised)


def similarity(keys: Tensor, anchor: Tensor, metric: str, *, implementation: str | None = None) -> Tensor:
    """(B, H, n) of every key to its head's anchor, in the anchor's dtype: "cosine" k·a/(‖k‖·‖a‖), as torch's
    cosine_similarity; "dot" k·a; "euclidean" -‖k - a‖. Absent rows have one too, of whatever they hold.

    keys (B, H, n, d); anchor (B, H, d) float32 (float64 for float64 keys). implementation: "reference" | "triton"; None
    chooses. ValueError for shapes that do not fit and for another metric.
    """
    if anchor.shape != (*keys.shape[:2], keys.shape[3]):
        raise ValueError(f"similarity: keys {tuple(keys.shape)}, anchor {tuple(anchor.shape)}")
    if metric not in METRICS:
        raise ValueError(f"similarity: metric {metric!r}; one of {', '.join(METRICS)}")
    if choose_implementation("similarity", implementation, keys) == "triton":
        from kvbench.kernels.key_similarity.triton import similarity_triton

        return similarity_triton(keys, anchor, metric)
    return similarity_reference(keys, anchor, metric)


def norms(rows: Tensor, *, implementation: str | None = None) -> Tensor:
    """‖x‖₂ of every row of `rows` (B, H, n, d): (B, H, n) in float32, in float64 for float64 rows.

    implementation: "reference" | "triton"; None chooses. ValueError for another number of dimensions.
    """
    if rows.dim() != 4:
        raise ValueError(f"norms: rows {tuple(rows.shape)}")
    if choose_implementation("norms", implementation, rows) == "triton":
        from kvbench.kernels.key_similarity.triton import norms_triton

        return norms_triton(rows)
    return norms_reference(rows)
