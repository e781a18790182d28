"""Count the bytes that a cache occupies and what its layers report to the record."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


class MemoryMeter:
    """The bytes that the layers of a cache occupy, and the peak of their sum."""

    def __init__(self, layers: int) -> None:
        self.held = [0] * layers  # bytes of each layer
        self.total = 0
        self.peak = 0

    def update(self, layer: int, held: int) -> None:
        """Set the bytes that a layer occupies after its storage changed."""
        self.total += held - self.held[layer]
        self.held[layer] = held
        self.peak = max(self.peak, self.total)

    def snapshot(self) -> tuple[list[int], int]:
        """Return what `restore` needs."""
        return list(self.held), self.peak

    def restore(self, snapshot: tuple[list[int], int]) -> None:
        """Return to a snapshot."""
        held, self.peak = snapshot
        self.held, self.total = list(held), sum(held)


ZERO = torch.tensor(0)  # no rows


def find_largest(counts: Iterable[Tensor]) -> int:
    """Return the largest number in some tensors. The host waits for each device only once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for count in counts:
        by_device.setdefault(count.device, []).append(count.flatten())
    return max(int(torch.cat(tensors).max()) for tensors in by_device.values())


@dataclass(frozen=True)
class LayerTally:
    """What a layer counts for the record, as one immutable value."""

    evicted: Tensor | None = None
    """Tokens whose rows were evicted, (B, H)."""
    head_protected: Tensor = ZERO
    """Rows that each head protected at the last cut, in any shape."""
    head_given_up: dict[str, Tensor] = field(default_factory=lambda: {"sinks": ZERO, "recents": ZERO})
    """For "sinks" and "recents", the largest number of rows that each head could not protect at any cut, because they
    did not fit its quota, in shapes that broadcast.
    """
    peak_rows: int = 0
    """The largest number of rows that a head held after a cut, or after a block of a prompt that is not cut."""
    peak_attended: int = 0
    """The largest number of rows that a head attended to."""

    def add_cut(self, evicted: Tensor, protected: Tensor, given_up: Mapping[str, Tensor]) -> "LayerTally":
        """Count a cut.

        Args:
            evicted: Tokens whose rows were evicted, (B, H).
            protected: Rows that each head protected.
            given_up: By kind, the number of rows that each head could not protect.
        """
        gone = evicted if self.evicted is None else self.evicted + evicted
        return replace(self, evicted=gone, head_protected=protected, head_given_up=self.find_most_given_up(given_up))

    def find_most_given_up(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the larger of the counts so far and those of a further cut, by kind."""
        return self.head_given_up | {kind: self.head_given_up[kind].maximum(count) for kind, count in counts.items()}

    @property
    def counted(self) -> list[Tensor]:
        """The tensors that cuts have counted."""
        evicted = [] if self.evicted is None else [self.evicted]
        return [
            tensor for tensor in (*evicted, self.head_protected, *self.head_given_up.values()) if tensor is not ZERO
        ]

    def with_counted(self, counted: Iterable[Tensor]) -> "LayerTally":
        """Return the same tally, with the tensors of `counted` replaced by the next ones of an iterable."""
        others = iter(counted)
        evicted = None if self.evicted is None else next(others)
        protected = ZERO if self.head_protected is ZERO else next(others)
        given_up = {kind: ZERO if count is ZERO else next(others) for kind, count in self.head_given_up.items()}
        return replace(self, evicted=evicted, head_protected=protected, head_given_up=given_up)

    @property
    def protected(self) -> int:
        """The largest number of rows that a head protected at the last cut. The host waits for it."""
        return find_largest([self.head_protected])

    @property
    def given_up(self) -> dict[str, int]:
        """By kind, the largest number of rows that a head could not protect at any cut. The host waits for it."""
        return {kind: find_largest([count]) for kind, count in self.head_given_up.items()}
