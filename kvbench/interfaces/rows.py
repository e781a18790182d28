"""The rows of one layer, as a method sees them.

A row is a KV entry: the key and the value of one token or, after a merge, of several. Rows come padded to the longest
head, so that a method works on rectangular tensors although heads may hold different numbers of rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """All rows of a layer, padded to (B, H, n): absent rows have mass 0 and place -1 and stand on the left, so that
    the last T rows of every head are the block's and neighbours in a head are neighbours in place.
    """

    keys: Tensor  # (B, H, n, d), rotated as the model rotated them
    values: Tensor  # (B, H, n, d)
    places: Tensor  # (B, H, n) int64, ascending; -1 where absent
    mass: Tensor  # (B, H, n) float32 (float64 for float64 rows); 0 where absent
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # a method's values per row, (B, H, n)

    @cached_property
    def present(self) -> Tensor:
        """(B, H, n) bool."""
        return self.mass > 0

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    def __len__(self) -> int:
        return self.keys.shape[2]

    def without(self, gone: Tensor) -> "Rows":
        """The same rows with mass 0 where `gone` (B, H, n) is true."""
        return replace(self, mass=self.mass.masked_fill(gone, 0))


def mass_dtype(keys: Tensor) -> torch.dtype:
    """The dtype of masses beside these keys: float32, exact up to 2^24 tokens, or float64."""
    return torch.float64 if keys.dtype == torch.float64 else torch.float32
