"""The last queries of a layer at a fixed address, for methods that remember them while a CUDA graph decodes.

`Captured.capture_state` makes a ring of the queries that the method knows, `update` appends those of a token, `score`
reads as many as a cut uses, and `release_state` takes what the method remembers outside of the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation, State, StateCapture

T = TypeVar("T")


@dataclass(frozen=True)
class QueryRing:
    """The last queries of a layer. Token t has the slot t modulo the number of slots."""

    slots: Tensor
    """(B, H·G, slots, d)"""
    count: int
    """Number of queries that a cut uses."""

    def append(self, observation: Observation, state: State) -> None:
        """Write the query of the token that the layer just read."""
        first, slots = observation.first, self.slots.shape[2]
        slot = share_among_layers("slot", observation, state, lambda: torch.as_tensor(first % slots)[None])
        self.slots.index_copy_(2, slot, observation.queries)

    def last(self, tokens: int | Tensor, count: int) -> Tensor:
        """Return the last `count` of the queries of `tokens` tokens, (B, H·G, count, d)."""
        places = torch.arange(-count, 0, device=self.slots.device) + tokens
        return self.slots.index_select(2, places % self.slots.shape[2])


def make_ring(known: Tensor, count: int, capture: StateCapture) -> QueryRing:
    """Return a ring with the last queries of the text.

    Args:
        known: The last queries that the method remembers, (B, H·G, at most `count`, d).
        count: Number of queries that a cut uses. So many are still there after tokens are undone.
        capture: How far the layer has read.
    """
    none = capture.queries
    slots = none.new_zeros(*none.shape[:2], count + capture.undone, none.shape[3])
    places = torch.arange(capture.seen - known.shape[2], capture.seen, device=none.device)
    return QueryRing(slots.index_copy_(2, places % slots.shape[2], known), count)


def share_among_layers(name: str, observation: Observation, state: State, make: Callable[[], T]) -> T:
    """Compute a value that depends on positions and the rotation alone once for a block's layers that rotate alike.

    The first of these layers computes it, and the block's last layer drops it. Inside a CUDA graph, layers of another
    kind of rows have a position of their own, which cannot be compared there. They compute the value again.
    """
    first, about = observation.first, (observation.queries.shape[2], observation.queries.device)
    position, before, shared = state.shared.pop(name, (None, None, None))
    known = position is first or (isinstance(position, int) and isinstance(first, int) and position == first)
    every: dict[object, T] = shared if known and before == about else {}
    if (rotation := observation.rotation) not in every:
        every = {**every, rotation: make()}
    if not observation.is_last_layer:
        state.shared[name] = first, about, every
    return every[rotation]
