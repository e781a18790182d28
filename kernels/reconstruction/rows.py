"""The rows of a layer of which the old ones are stored as codes and references, at fixed addresses."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ReferencedRows:
    """The rows of B samples, all KV heads together, at fixed addresses. A row has w = 2·H·d numbers: K, then V.

    A sample has n = seen + step rows, and the token that is read is one more. Rows before `sinks` and the newest ones
    are as they were projected. The others are compressed: those that were compressed when `step` was 0, and one block
    of `block` rows more whenever 2·block rows have come since. Who appends a block writes its bases and references, and
    the codes, to the memory for more.
    """

    sinks: int
    """First rows, which are never compressed."""
    block: int
    """Rows that are compressed together."""
    seen: int
    """Rows when step was 0."""
    compressed: int
    """Compressed rows when step was 0, C."""
    raw_from: int
    """The first row in `raw`. Rows before it that are not compressed are among `bases`, under their own numbers."""
    bases: Tensor
    """The rows that references are numbers of, (B, b, w), all of them finite."""
    more_bases: Tensor
    """Memory for further ones, numbered from b on, (B, room, w)."""
    references: Tensor | None
    """Numbers of the k references of each compressed row, (B, C, k) whole numbers; None if rows have none."""
    more_references: Tensor | None
    """Memory for those of further rows, (B, room, k) whole numbers."""
    raw: Tensor
    """Rows as projected, from `raw_from` on, (B, room, w)."""

    def count_compressed(self, step: int) -> int:
        """Return how many rows are compressed when token `step` is read."""
        waiting = self.seen - self.sinks - self.compressed + step
        return self.compressed + self.block * max(0, waiting // self.block - 1)

    def __post_init__(self) -> None:
        shapes = [tensor.shape for tensor in (self.bases, self.more_bases, self.raw)]
        if any((shape[0], shape[2]) != (shapes[0][0], shapes[0][2]) for shape in shapes):
            raise ValueError(f"referenced rows: bases, more bases and raw rows {[tuple(shape) for shape in shapes]}")
        if (self.references is None) != (self.more_references is None) or self.block < 1:
            raise ValueError(f"referenced rows: blocks of {self.block} rows, references of some rows only")
        references = self.references
        if references is not None and (
            references.shape[:2] != (shapes[0][0], self.compressed) or references.is_floating_point()
        ):
            raise ValueError(f"referenced rows: references {tuple(references.shape)} of {self.compressed} rows")


@dataclass(frozen=True)
class Expansion:
    """What f_d gives for listed rows, and is added to the mean of their references.

    `keys` is what f_d gives for keys. For values it gives inner·weightᵀ, which is not computed row by row.
    """

    keys: Tensor
    """(B, n, w/2)"""
    inner: Tensor
    """(B, n, i). Finite also for rows that are not compressed."""
    weight: Tensor
    """(w/2, i)"""

    def __post_init__(self) -> None:
        fits = self.keys.shape[:2] == self.inner.shape[:2] and self.keys.dim() == self.inner.dim() == 3
        if not fits or self.weight.shape != (self.keys.shape[2], self.inner.shape[2]):
            shapes = [tuple(tensor.shape) for tensor in (self.keys, self.inner, self.weight)]
            raise ValueError(f"expansion: keys, numbers and matrix {shapes}")
