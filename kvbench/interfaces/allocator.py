"""How many rows each layer and head may keep; every allocator conserves the total exactly.

Symbols: B samples, H KV heads, n rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.hooks import Hooks
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows


@dataclass(frozen=True)
class Allocator(Hooks):
    """Uniform. An allocator overrides the question that is its own."""

    name: str

    even = True  # all heads of a layer keep the same number of rows
    cascades = False  # how much a layer may keep depends on what later ones show: it is cut again, see `earlier`

    @property
    def is_uniform(self) -> bool:
        """Whether every layer and head keeps the quota: no hook is overridden."""
        return not self.overrides("layer", "heads", "safe", "earlier")

    def layer(
        self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
    ) -> int | tuple[int, ...]:
        """Rows per head of the layer that is being cut, one number per sample where they differ; over all layers the
        mean must be `quota`, which is `observation.share` floored to whole rows. `shared` is one dict for all layers of
        a batch, to remember what a layer showed (nothing in it may be changed in place); the record quotes
        `shared["allocation"]`, a word on which rule applied.
        """
        return quota

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        """(B, H) int64 rows per head that sum to H·quota (or to what is there), none below 1 nor above what the head
        has. `scores` (B, H, n): -inf where a row is absent, +inf where it is protected.
        """
        available = (scores > -torch.inf).sum(-1)
        return available.clamp(max=quota)

    def safe(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        """(B, H, n) bool: rows that a head keeps whatever others have, `protected` among them; asked as `heads` is."""
        return protected

    def earlier(self, quota: int, observation: Observation, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        """Rows per head, one number per sample, that layers before this one are cut to, again or, where `layer` let
        them keep all, for the first time (never refilled). Asked after every layer of allocators that cascade, but
        not while decoding.
        """
        return {}
