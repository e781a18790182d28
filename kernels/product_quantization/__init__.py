"""Score rows by the codes of their keys (product quantisation), and encode the newest key."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.product_quantization.centroids import cut_keys, encode, find_nearest, split_points
from kvbench.kernels.product_quantization.reference import code_scores_reference, update_codes_reference

__all__ = ["code_scores", "cut_keys", "encode", "find_nearest", "split_points", "update_codes"]


@announced
def code_scores(
    queries: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the sum over a group of the softmax of the logits, with centroids in place of keys.

    The candidates are the rows from `first` to `stop`. Each query head's softmax goes over them.

    Args:
        queries: (B, H·G, d)
        codes: Codes of the rows from `first` on, (B, H, m, n) uint8. Those of rows from `stop` on may be anything.
        codebook: Centroids, (B, H, m, K, d/m) in the queries' dtype. All codes of candidates are below K.
        scaling: The factor of the logits.
        first: The first candidate.
        stop: The row after the last candidate, a whole number without dimensions, at most first + n.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        A score for each row, (B, H, first + n) in float32, or in float64 for float64 inputs; -inf for rows that are no
        candidates.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_codebook("code_scores", queries[:, :, None], codes, codebook)
    if queries.shape[1] % codes.shape[1] or first < 0:
        raise ValueError(
            f"code_scores: queries {tuple(queries.shape)}, codes {tuple(codes.shape)} of the rows from {first} on"
        )
    if choose_implementation("code_scores", implementation, queries) == "reference":
        return code_scores_reference(queries, codes, codebook, scaling, first, stop)
    from kvbench.kernels.product_quantization.triton import code_scores_triton

    return code_scores_triton(queries, codes, codebook, scaling, first, stop)


@announced
def update_codes(
    keys: Tensor, codes: Tensor, codebook: Tensor, first: int, last: Tensor, *, implementation: str | None = None
) -> None:
    """Compute the codes of the newest row, in place.

    Args:
        keys: (B, H, N, d)
        codes: Codes of the rows from `first` on, (B, H, m, n) uint8. The newest row's are written.
        codebook: Centroids, (B, H, m, K, d/m) in the keys' dtype.
        first: The first row that has codes.
        last: The newest row, a whole number without dimensions, from `first` to first + n - 1.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_codebook("update_codes", keys, codes, codebook)
    if keys.shape[1] != codes.shape[1] or first < 0:
        raise ValueError(f"update_codes: keys {tuple(keys.shape)}, codes {tuple(codes.shape)} from row {first} on")
    if choose_implementation("update_codes", implementation, keys) == "reference":
        update_codes_reference(keys, codes, codebook, first, last)
        return
    from kvbench.kernels.product_quantization.triton import update_codes_triton

    update_codes_triton(keys, codes, codebook, first, last)


def check_codebook(op: str, vectors: Tensor, codes: Tensor, codebook: Tensor) -> None:
    """Raise a ValueError if vectors (B, …, …, d), codes and a codebook do not fit each other."""
    fits = vectors.dim() == codes.dim() == 4 and codebook.shape[:3] == codes.shape[:3] and codebook.dim() == 5
    fits = fits and vectors.shape[0] == codes.shape[0] and codebook.shape[2] * codebook.shape[4] == vectors.shape[3]
    if not fits or codes.dtype != torch.uint8 or codebook.dtype != vectors.dtype or not 1 <= codebook.shape[3] <= 256:
        raise ValueError(
            f"{op}: vectors {tuple(vectors.shape)} {vectors.dtype}, codes {tuple(codes.shape)} {codes.dtype}, codebook "
            f"{tuple(codebook.shape)} {codebook.dtype}"
        )
