"""What a cache occupies and what its layers count for the record."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


class MemoryMeter:
    """Bytes that the layers of a cache occupy, and the most they ever did together."""

    def __init__(self, layers: int) -> None:
        self.held = [0] * layers  # bytes of each layer
        self.total = 0
        self.peak = 0

    def update(self, layer: int, held: int) -> None:
        """The storage of a layer changed; it occupies `held` bytes now."""
        self.total += held - self.held[layer]
        self.held[layer] = held
        self.peak = max(self.peak, self.total)

    def snapshot(self) -> tuple[list[int], int]:
        """What `restore` needs."""
        return list(self.held), self.peak

    def restore(self, snapshot: tuple[list[int], int]) -> None:
        """Return to a snapshot."""
        held, self.peak = snapshot
        self.held, self.total = list(held), sum(held)


def no_rows() -> dict[str, Tensor]:
    return {"sinks": torch.tensor(0), "recents": torch.tensor(0)}


@dataclass(frozen=True)
class LayerTally:
    """What a layer counts for the record, as one value."""

    evicted: Tensor | None = None  # (B, H) tokens whose rows are gone
    protected: Tensor = field(default_factory=lambda: torch.tensor(0))  # most rows a head protected at the last cut
    # most rows of a kind that a head could not protect at any cut, because its quota had no room for them
    given_up: dict[str, Tensor] = field(default_factory=no_rows)
    peak_rows: int = 0  # most rows a head held after a cut, or after a block of a prompt that is not cut
    peak_attended: int = 0  # most rows a head ever attended over
