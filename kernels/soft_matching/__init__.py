"""Chunked soft matching: each even row of a chunk proposes to join its most similar odd row."""

from typing import Protocol

from torch import Tensor

from kvbench.kernels.dispatch import announced, announced_with, choose_implementation
from kvbench.kernels.soft_matching.chunks import edge_count, even_count, even_rows
from kvbench.kernels.soft_matching.reference import JoinedReference, match_reference

__all__ = ["JoinedRows", "edge_count", "even_rows", "join", "match"]


class JoinedRows(Protocol):
    """Rows after some of them joined others."""

    index: Tensor
    """Rows that stay, counted in the order (sample, head, row), (R,) int64, ascending."""

    def centroids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Average the rows that were joined, weighted by mass.

        A row that no other joined does not change. Rows of mass 0 add nothing.

        Args:
            rows: (B, H, m, d)

        Returns:
            The rows that stay, (B, H, m - count, d), and the sums of their masses, (B, H, m - count).
        """


@announced
def match(keys: Tensor, chunk: int | None, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Find the partner of every even row: the odd row of its chunk with the largest cosine of the keys.

    Of equal cosines the lower row is the partner.

    Args:
        keys: (B, H, m, d)
        chunk: Number of rows of a chunk; None for one chunk.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        For each of the E even rows (`even_rows`), the similarity, (B, H, E) in float32 or float64, and the partner's
        index, (B, H, E). A row without a partner has similarity -inf.

    Raises:
        ValueError: `chunk` is below 2, or there are no rows.
    """
    if keys.dim() != 4 or keys.shape[2] == 0 or (chunk is not None and chunk < 2):
        raise ValueError(f"match: keys {tuple(keys.shape)}, chunk {chunk}")
    if choose_implementation("match", implementation, keys) == "reference":
        return match_reference(keys, chunk)
    from kvbench.kernels.soft_matching.triton import match_triton

    return match_triton(keys, chunk)


class AnnouncedRows:
    """Rows by announced launches (`announce_launches`), and those of the reference, whose values are right."""

    def __init__(self, launched: JoinedRows, exact: JoinedRows) -> None:
        self.launched, self.exact, self.index = launched, exact, exact.index

    def centroids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.launched.centroids(rows)
        return self.exact.centroids(rows)


def announce_rows(launched: JoinedRows, exact: JoinedRows) -> JoinedRows:
    return AnnouncedRows(launched, exact)


@announced_with(announce_rows)
def join(
    mass: Tensor, chosen: Tensor, partner: Tensor, chunk: int | None, count: int, *, implementation: str | None = None
) -> JoinedRows:
    """Join even rows with their partners.

    On a GPU the host does not wait, so the count is not checked.

    Args:
        mass: Tokens that each row stands for, (B, H, m).
        chosen: Which even rows join their partner, (B, H, E) bool.
        partner: What `match` returned, (B, H, E).
        chunk: Number of rows of a chunk; None for one chunk.
        count: Number of rows that join in each head.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes do not fit.
    """
    edges = even_count(mass.shape[-1], chunk)
    if mass.dim() != 3 or chosen.shape != partner.shape or chosen.shape != (*mass.shape[:2], edges):
        shapes = ", ".join(str(tuple(x.shape)) for x in (mass, chosen, partner))
        raise ValueError(f"join: mass, chosen, partner {shapes}, chunk {chunk}")
    if choose_implementation("join", implementation, mass) == "reference":
        return JoinedReference(mass, chosen, partner, chunk, count)
    from kvbench.kernels.soft_matching.triton import JoinedTriton

    return JoinedTriton(mass, chosen, partner, chunk, count)
