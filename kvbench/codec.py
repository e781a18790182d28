"""How the rows that stay are written: raw, or smaller.

A codec sees the cut part of a layer only, packed (R, d) in the order (sample, head, place); what was read since the
last cut stays raw in the tail until the next cut.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Stored(Protocol):
    """Keys and values as a codec keeps them."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values (R, d)."""

    def tensors(self) -> list[Tensor]:
        """All tensors held, so that their storage can be counted."""


@dataclass(frozen=True)
class Codec:
    """What conf/codec/<name>.yaml constructs."""

    name: str

    def write(self, keys: Tensor, values: Tensor, lengths: Tensor) -> Stored:
        """Store keys and values (R, d); `lengths` (B, H) says how many rows belong to each head."""
        raise NotImplementedError
