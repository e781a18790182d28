"""How many rows each layer and head may keep; every allocator conserves the total exactly.

Symbols: B samples, H KV heads, n rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvbench.method import Seen
from kvbench.rows import Rows


@dataclass(frozen=True)
class Allocator:
    """Uniform. An allocator overrides the question that is its own."""

    name: str

    even = True  # all heads of a layer keep the same number of rows
    cascades = False  # how much a layer may keep depends on what later ones show: it is cut again, see `earlier`

    def layer(self, quota: int, seen: Seen, rows: Callable[[], Rows], shared: dict[str, Any]) -> int | tuple[int, ...]:
        """Rows per head of the layer that is being cut, one number per sample where they differ; over all layers the
        mean must be `quota`, which is `seen.share` floored to whole rows. `shared` is one dict for all layers of a
        batch, to remember what a layer showed (nothing in it may be changed in place); the record quotes
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

    def earlier(self, quota: int, seen: Seen, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        """Rows per head, one number per sample, that layers before this one are cut to, again or, where `layer` let
        them keep all, for the first time (never refilled). Asked after every layer of allocators that cascade, but
        not while decoding.
        """
        return {}


def frozen(quotas: Sequence[int], before: int, quota: int) -> list[int]:
    """Quotas that layers were given when the mean was `before`, kept in proportion when it is `quota`."""
    targets = [own * quota / before for own in quotas]
    return settle(targets, [1] * len(targets), [quota * len(targets)] * len(targets), quota * len(targets))


def settle(targets: Sequence[float | Fraction], least: list[int], most: list[int], total: int) -> list[int]:
    """Whole numbers near `targets` that sum to `total` (or as near as the bounds allow) within least…most.

    Largest remainder; what the bounds take from one goes to the others by their remaining distance to the target,
    ties to the lower index.
    """
    counts = [min(max(int(t), low), high) for t, low, high in zip(targets, least, most, strict=True)]
    total = min(max(total, sum(least)), sum(most))
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        open_ = [i for i in range(len(counts)) if (counts[i] < most[i] if step > 0 else counts[i] > least[i])]
        open_.sort(key=lambda i: (step * (counts[i] - targets[i]), i))
        # give whole shares at once while much is missing, single rows at the end
        share = max(1, abs(missing) // len(open_))
        for i in open_[: abs(missing) // share]:
            counts[i] += step * min(share, (most[i] - counts[i]) if step > 0 else (counts[i] - least[i]))
    return counts
