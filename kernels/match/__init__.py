"""Chunked soft matching: each even row of a chunk proposes to join its most similar odd row."""

from torch import Tensor

from kvbench.kernels.match.reference import match_reference, merge_reference


def match(keys: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Edges (B, H, E) from even rows to the odd row of the same chunk with the largest cosine of keys.

    keys (B, H, m, d); chunk: rows of a chunk, None for one chunk. Returns the similarity (-inf where a row found no
    partner) and the partner's row index; edge e belongs to the e-th even row, E = number of even rows.
    ValueError for chunk < 2.
    """
    if chunk is not None and chunk < 2:
        raise ValueError(f"match: chunk {chunk}")
    return match_reference(keys, chunk)


def merge(keys: Tensor, values: Tensor, mass: Tensor, into: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row j joins row into[j] (j itself to stay): mass-weighted means of keys and values (B, H, m, d), masses added.

    Rows that joined another have mass 0 afterwards; rows that nothing joined stay as they were. mass, into: (B, H, m).
    """
    return merge_reference(keys, values, mass, into)
