"""Chunked soft matching: each even row of a chunk proposes to join its most similar odd row."""

from torch import Tensor

from kvbench.kernels.implementation import choose
from kvbench.kernels.match.edges import edge_count, even_rows
from kvbench.kernels.match.reference import match_reference, merge_reference

__all__ = ["edge_count", "even_rows", "match", "merge"]


def match(keys: Tensor, chunk: int | None, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Edges (B, H, E) from even rows to the odd row of the same chunk with the largest cosine of keys, ties to the
    lower one.

    keys (B, H, m, d); chunk: rows of a chunk, None for one chunk. Returns the similarity in float32 (float64 for
    float64 keys; -inf where a row found no partner) and the partner's row index; edge e belongs to the e-th even row
    (`even_rows`), E = number of even rows. ValueError for chunk < 2 or no rows.
    """
    if keys.dim() != 4 or keys.shape[2] == 0 or (chunk is not None and chunk < 2):
        raise ValueError(f"match: keys {tuple(keys.shape)}, chunk {chunk}")
    if choose("match", implementation, keys) == "reference":
        return match_reference(keys, chunk)
    from kvbench.kernels.match.triton import match_triton

    return match_triton(keys, chunk)


def merge(
    keys: Tensor,
    values: Tensor,
    mass: Tensor,
    into: Tensor,
    chunk: int | None = None,
    index: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row j joins row into[j] (j itself to stay), which stays: mass-weighted means of keys and values (B, H, m, d),
    masses added. Rows that nothing joined stay as they were, rows that joined another have mass 0 afterwards.

    mass, into: (B, H, m); chunk: rows join within their chunk of so many, None for one chunk; index (R,): return only
    these rows, which stay, as `compact.find` counts them: (R, d), (R, d), (R,). ValueError for shapes that do not fit.
    """
    if keys.dim() != 4 or keys.shape != values.shape or mass.shape != keys.shape[:3] or into.shape != mass.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (keys, values, mass, into))
        raise ValueError(f"merge: keys, values, mass, into {shapes}")
    if choose("merge", implementation, keys) == "reference":
        return merge_reference(keys, values, mass, into, index)
    from kvbench.kernels.match.triton import merge_triton

    return merge_triton(keys, values, mass, into, chunk, index)
