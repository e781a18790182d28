"""Find the codes of keys (product quantisation), score rows by them, and choose those with the largest scores."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.product_quantization.centroids import (
    COUNTABLE,
    HELD,
    MOST_NUMBERS,
    count_pairs,
    find_width,
    round_up,
)
from kvbench.kernels.product_quantization.reference import (
    choose_by_codes_reference,
    code_scores_reference,
    encode_reference,
    find_centroids_reference,
)
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = ["choose_by_codes", "code_scores", "count_pairs", "encode", "find_centroids"]


@announced
def find_centroids(keys: Tensor, centroids: Tensor, iterations: int, *, implementation: str | None = None) -> Tensor:
    """Run k-means (Lloyd) on the sub-vectors of keys, with a fixed number of iterations.

    A centroid without rows moves to the sub-vector that is farthest from its own centroid, a second one to the second
    farthest, and so on. Equal inputs give equal outputs, and the other samples of a batch change none.

    Args:
        keys: (B, H, n, d)
        centroids: The first centroids, (B, H, m, K, d/m), K at most 256 and at most n.
        iterations: Number of iterations.
        implementation: "reference" or "triton"; None chooses. Triton takes K and d/m, each rounded up to a power of
            two, if their product is at most 8192; for others None takes the reference.

    Returns:
        The centroids, in float32, or in float64 for float64 keys.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_centroids("find_centroids", keys, centroids)
    if centroids.shape[3] > keys.shape[2] or iterations < 0:
        raise ValueError(
            f"find_centroids: {centroids.shape[3]} centroids of {keys.shape[2]} rows, {iterations} iterations"
        )
    if choose_to_cluster("find_centroids", implementation, keys, centroids) == "reference":
        return find_centroids_reference(keys, centroids, iterations)
    from kvbench.kernels.product_quantization.clusters import find_centroids_triton

    return find_centroids_triton(keys, centroids, iterations)


@announced
def encode(keys: Tensor, codebook: Tensor, *, implementation: str | None = None) -> Tensor:
    """Return the number of the nearest centroid of each sub-vector; of equally near ones the first counts.

    Args:
        keys: (B, H, n, d)
        codebook: Centroids, (B, H, m, K, d/m) in the keys' dtype, K at most 256.
        implementation: As of `find_centroids`.

    Returns:
        (B, H, m, n) uint8

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_centroids("encode", keys, codebook)
    if choose_to_cluster("encode", implementation, keys, codebook) == "reference" or not keys.shape[2]:
        return encode_reference(keys, codebook)
    from kvbench.kernels.product_quantization.clusters import encode_triton

    return encode_triton(keys, codebook)


@announced
def code_scores(
    queries: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    *,
    extras: SoftmaxExtras | None = None,
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
        extras: The cap of the logits; None for none. Sinks are no candidates.
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
        return code_scores_reference(queries, codes, codebook, scaling, first, stop, extras)
    from kvbench.kernels.product_quantization.triton import code_scores_triton

    return code_scores_triton(queries, codes, codebook, scaling, first, stop, extras=extras)


@announced
def choose_by_codes(
    queries: Tensor,
    keys: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    last: Tensor,
    rows: Tensor,
    *,
    counted: tuple[Tensor, int] | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> None:
    """Compute the codes of the newest row, in place, and list the candidates with the largest scores.

    Args:
        queries: See `code_scores`.
        keys: (B, H, N, d)
        codes: See `code_scores`. Those of the newest row are written.
        codebook: See `code_scores`.
        scaling: See `code_scores`.
        first: See `code_scores`.
        stop: See `code_scores`. At most `last`.
        last: The newest row, a whole number without dimensions, from `first` to first + n - 1.
        rows: Gets the rows, ascending, (B, H, k) int64; of equal scores the lower row comes first. The lists of all
            heads lie at equal distances. With fewer than k candidates, rows that are none follow.
        counted: `count_pairs` of the codes of the rows from `first` on and before a number, which is at most `stop` and
            at least first + k, and that number. The kernel is faster with them.
        extras: See `code_scores`.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    check_codebook("choose_by_codes", queries[:, :, None], codes, codebook)
    check_codebook("choose_by_codes", keys, codes, codebook)
    fits = keys.shape[1] == codes.shape[1] and queries.shape[1] % codes.shape[1] == 0 and first >= 0
    lists = rows.dtype == torch.int64 and rows.shape[:2] == codes.shape[:2] and rows.shape[2] <= first + codes.shape[3]
    lists = lists and rows.stride(2) == 1 and rows.stride(0) == rows.shape[1] * rows.stride(1)
    if counted is not None:
        wide = find_width(codebook.shape[3])
        lists = lists and counted[1] >= first + rows.shape[2] and codes.shape[2] == 2
        lists = lists and counted[0].shape == (*codes.shape[:2], wide * wide) and counted[0].dtype == torch.int32
        lists = lists and counted[0].is_contiguous() and codes.shape[3] < 2 * COUNTABLE
        lists = lists and wide * wide * round_up(queries.shape[1] // codes.shape[1]) <= HELD
    if not fits or not lists or codes.stride(3) != 1:
        raise ValueError(
            f"choose_by_codes: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, codes {tuple(codes.shape)} "
            f"of the rows from {first} on, lists {tuple(rows.shape)} {rows.dtype}"
        )
    given = queries, keys, codes, codebook, scaling, first, stop, last, rows
    if choose_implementation("choose_by_codes", implementation, queries) == "reference":
        choose_by_codes_reference(*given, extras)
        return
    from kvbench.kernels.product_quantization.triton import choose_by_codes_triton

    choose_by_codes_triton(*given, counted, extras)


def choose_to_cluster(op: str, asked: str | None, keys: Tensor, centroids: Tensor) -> str:
    """Return the implementation as `choose_implementation` does; "reference" if a program cannot hold the centroids.

    Raises:
        ValueError: The caller asks for "triton", and a program cannot hold the centroids.
    """
    chosen = choose_implementation(op, asked, keys)
    numbers = round_up(centroids.shape[3]) * round_up(centroids.shape[4])
    if chosen == "reference" or numbers <= MOST_NUMBERS:
        return chosen
    if asked == "triton":
        raise ValueError(f"{op}: implementation triton takes at most {MOST_NUMBERS} numbers of a part, not {numbers}")
    return "reference"


def check_centroids(op: str, keys: Tensor, centroids: Tensor) -> None:
    """Raise a ValueError if keys (B, H, n, d) and centroids (B, H, m, K, d/m) do not fit each other."""
    fits = keys.dim() == 4 and centroids.dim() == 5 and centroids.shape[:2] == keys.shape[:2]
    fits = fits and centroids.shape[2] * centroids.shape[4] == keys.shape[3] and centroids.dtype == keys.dtype
    if not fits or not 1 <= centroids.shape[3] <= 256:
        raise ValueError(
            f"{op}: keys {tuple(keys.shape)} {keys.dtype}, centroids {tuple(centroids.shape)} {centroids.dtype}"
        )


def check_codebook(op: str, vectors: Tensor, codes: Tensor, codebook: Tensor) -> None:
    """Raise a ValueError if vectors (B, …, …, d), codes and a codebook do not fit each other."""
    fits = vectors.dim() == codes.dim() == 4 and codebook.shape[:3] == codes.shape[:3] and codebook.dim() == 5
    fits = fits and vectors.shape[0] == codes.shape[0] and codebook.shape[2] * codebook.shape[4] == vectors.shape[3]
    if not fits or codes.dtype != torch.uint8 or codebook.dtype != vectors.dtype or not 1 <= codebook.shape[3] <= 256:
        raise ValueError(
            f"{op}: vectors {tuple(vectors.shape)} {vectors.dtype}, codes {tuple(codes.shape)} {codes.dtype}, codebook "
            f"{tuple(codebook.shape)} {codebook.dtype}"
        )
