"""Chunked soft matching: each even row of a chunk proposes to join its most similar odd row."""

from typing import Protocol

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.soft_matching.chunks import edge_count, even_count, even_rows
from kvbench.kernels.soft_matching.reference import JoinedReference, match_reference

__all__ = ["JoinedRows", "edge_count", "even_rows", "join", "match"]


class JoinedRows(Protocol):
    """Rows after some of them joined others."""

    index: Tensor  # (R,) int64, ascending: rows that stay, counted in the order (sample, head, row)

    def centroids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows (B, H, m, d), means of those that are one now, weighted by mass, (B, H, m - count, d), and their
        masses added up, (B, H, m - count). What nothing joined stays as it was; rows of mass 0 add nothing.
        """


def match(keys: Tensor, chunk: int | None, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Edges (B, H, E) from even rows to the odd row of the same chunk with the largest cosine of keys, ties to the
    lower one.

    keys (B, H, m, d); chunk: rows of a chunk, None for one chunk. Returns the similarity in float32 (float64 for
    float64 keys; -inf where a row found no partner) and the partner's row index; edge e belongs to the e-th even row
    (`even_rows`), E = number of even rows. ValueError for chunk < 2 or no rows.
    """
    if keys.dim() != 4 or keys.shape[2] == 0 or (chunk is not None and chunk < 2):
        raise ValueError(f"match: keys {tuple(keys.shape)}, chunk {chunk}")
    if choose_implementation("match", implementation, keys) == "reference":
        return match_reference(keys, chunk)
    from kvbench.kernels.soft_matching.triton import match_triton

    return match_triton(keys, chunk)


def join(
    mass: Tensor, chosen: Tensor, partner: Tensor, chunk: int | None, count: int, *, implementation: str | None = None
) -> JoinedRows:
    """Even rows whose edge is `chosen` (B, H, E) bool join their `partner` (B, H, E), `count` of each head's.

    mass (B, H, m): tokens that each row stands for. On a GPU nothing waits, nor is the count checked. ValueError for
    shapes that do not fit.
    """
    edges = even_count(mass.shape[-1], chunk)
    if mass.dim() != 3 or chosen.shape != partner.shape or chosen.shape != (*mass.shape[:2], edges):
        shapes = ", ".join(str(tuple(x.shape)) for x in (mass, chosen, partner))
        raise ValueError(f"join: mass, chosen, partner {shapes}, chunk {chunk}")
    if choose_implementation("join", implementation, mass) == "reference":
        return JoinedReference(mass, chosen, partner, chunk, count)
    from kvbench.kernels.soft_matching.triton import JoinedTriton

    return JoinedTriton(mass, chosen, partner, chunk, count)
