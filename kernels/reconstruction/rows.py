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
    """The rows that references are numbers of, (B, b, w)."""
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
        shapes = [own.shape for own in (self.bases, self.more_bases, self.raw)]
        if any((own[0], own[2]) != (shapes[0][0], shapes[0][2]) for own in shapes):
            raise ValueError(f"referenced rows: bases, more bases and raw rows {[tuple(own) for own in shapes]}")
        if (self.references is None) != (self.more_references is None) or self.block < 1:
            raise ValueError(f"referenced rows: blocks of {self.block} rows, references of some rows only")
        own = self.references
        if own is not None and (own.shape[:2] != (shapes[0][0], self.compressed) or own.is_floating_point()):
            raise ValueError(f"referenced rows: references {tuple(own.shape)} of {self.compressed} rows")


@dataclass(frozen=True)
class Expansion:
    """The last product of f_d, [K ‖ V] = inner·Wᵀ + bias, which is added to the mean of a row's references.

    K and V have a matrix each. The one of K is multiplied with the first numbers of `inner`, as many as it has inputs,
    and the one of V with the last ones. With one f_d for both, both take all numbers.
    """

    inner: Tensor
    """What the matrices are multiplied with: of the rows that were compressed when step was 0, (B, C, i), or, if there
    is no `more`, of the listed rows, (B, n, i).
    """
    more: Tensor | None
    """Memory for that of further compressed rows, (B, room, i)."""
    weights: tuple[Tensor, Tensor]
    """(w/2, i_K) and (w/2, i_V)."""
    biases: tuple[Tensor | None, Tensor | None]
    """(w/2,) or None each."""

    def __post_init__(self) -> None:
        inner, more = self.inner, self.more
        fits = inner.dim() == 3 and max(own.shape[1] for own in self.weights) <= inner.shape[2]
        fits = fits and (more is None or (more.shape[::2] == inner.shape[::2] and more.dtype == inner.dtype))
        if not fits or len(self.weights[0]) != len(self.weights[1]):
            shapes = [tuple(own.shape) for own in (inner, *self.weights)]
            raise ValueError(f"expansion: numbers and matrices {shapes}, more {None if more is None else more.shape}")
