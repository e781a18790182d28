"""The rows of one layer, as a method sees them.

A row is a KV entry: the key and the value of one token or, after a merge, of several tokens. Heads may hold different
numbers of rows. `Rows` pads them to the longest head, so that a method can work on rectangular tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """All rows of a layer, padded to (B, H, n).

    Absent rows have mass 0 and place -1 and stand on the left. The last T rows of every head are therefore those of the
    block that was read last, and the rows of a head are in the order of the text. Inside a CUDA graph this may differ
    (`order`, `Captured`).

    Symbols: B samples, H KV heads, n rows of the longest head, d head dimension.
    """

    keys: Tensor
    """(B, H, n, d), rotated as the model rotated them"""
    values: Tensor
    """(B, H, n, d)"""
    places: Tensor
    """Position of each row's token in the text, (B, H, n) int64, ascending; -1 for absent rows."""
    mass: Tensor
    """Number of tokens that each row stands for, (B, H, n), float32 (float64 for float64 rows); 0 for absent rows. If
    the method sets `weighs_rows`, how much each row weighs in attention.
    """
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per row that the method returned from `update`, (B, H, n) by name."""
    order: Tensor | None = None
    """The index here of each row in the order of the text, (B, H, n) int64; None if the rows are in that order. Only a
    method whose `captured` is `order_free` gets another order. Absent rows are then the last ones here and in `order`.
    """

    @cached_property
    def present(self) -> Tensor:
        """Which rows exist, (B, H, n) bool."""
        return self.mass > 0

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.keys.shape[1]

    def __len__(self) -> int:
        """Return n, the number of rows of the longest head."""
        return self.keys.shape[2]

    def list_newest(self, count: int) -> Tensor:
        """Return the indices of each head's last rows in the text, (B, H, count) int64.

        They are the last ones here, except inside a CUDA graph between two cuts (`Captured`).
        """
        return self.places.argmax(-1, keepdim=True) + torch.arange(1 - count, 1, device=self.places.device)

    def without(self, gone: Tensor) -> "Rows":
        """Return the same rows with mass 0 where `gone`, (B, H, n) bool, is true."""
        return replace(self, mass=self.mass.masked_fill(gone, 0))


def mass_dtype(keys: Tensor) -> torch.dtype:
    """Return the dtype of the masses of these keys: float32, which is exact up to 2^24 tokens, or float64."""
    return torch.float64 if keys.dtype == torch.float64 else torch.float32
