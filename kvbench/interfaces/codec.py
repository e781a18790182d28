"""How the rows that stay are written: raw, or smaller.

Rows come flat, (R, d) in the order (sample, head, place); `lengths` (B, H) says how many belong to each head. While the
prompt is read, rows are raw: attention and every cut are exact. A codec that packs does so when the last cut is done,
and what is packed is never written again, so that rounding happens once.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """Keys and values as they are kept. Immutable, so that marks of an earlier time stay what they were."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values (R, d)."""

    def tensors(self) -> list[Tensor]:
        """All tensors held, so that their storage can be counted."""


class Packed(Stored, Protocol):
    """What a codec that packs makes of them."""

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "Packed":
        """The same rows and, behind those of each head, further ones (R', d); `lengths` (B, H) counts them all."""


@dataclass(frozen=True)
class Plain:
    """Keys and values (R, d), untouched."""

    keys: Tensor
    values: Tensor

    def read(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class Codec:
    """Raw: rows stay as the model wrote them. What conf/codec/<name>.yaml constructs."""

    name: str

    packs = False  # packs when the prefill ends; serves no method that cuts after that
    token_by_token = False  # whatever follows the prefill is read one token at a time

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> Packed:
        """Write keys and values (R, d) when the last cut is done. Asked only of codecs that pack."""
        raise NotImplementedError(f"{self.name} does not pack")


def join(rows: Tensor, counts: Tensor, more: Tensor, more_counts: Tensor) -> Tensor:
    """Flat rows (R, …) of which each head has `counts` (B, H), and behind them in each head `more`."""
    counts, more_counts = counts.flatten(), more_counts.flatten()
    out = rows.new_empty(len(rows) + len(more), *rows.shape[1:])
    before = more_counts.cumsum(0) - more_counts  # rows that come in front of a head's own
    out[torch.arange(len(rows), device=rows.device) + before.repeat_interleave(counts)] = rows
    out[torch.arange(len(more), device=rows.device) + counts.cumsum(0).repeat_interleave(more_counts)] = more
    return out


def split(rows: Tensor, counts: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The `first` (B, H) of each head's `counts` flat rows, and the rest; copies."""
    counts, first = counts.flatten(), first.flatten()
    start = (counts.cumsum(0) - counts).repeat_interleave(counts)
    front = torch.arange(len(rows), device=rows.device) - start < first.repeat_interleave(counts)
    return rows[front], rows[~front]
