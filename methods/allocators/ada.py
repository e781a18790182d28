"""ada: the heads of a layer share its rows by where the layer's largest scores are (AdaKV).

Source: FFY0/AdaKV, adaptive_snapkv/monkeypatch/snapkv_utils.py (interpolate); NVIDIA/kvpress, adakv_press.py
(safeguard). Protected rows belong to their head and do not compete.

The source's `normalize` does not exist here; heads compete by the scores as they are. (It multiplies a head's scores by
the share of their sum that the head's own b largest scores have. It is off in the source's scripts and on in
KVCache-Factory.)

Symbols: b = quota minus protected rows, c_h = number of rows of head h among the layer's H·b largest scores, α = floor.

- interpolate: head h keeps c_h·(1-α) + b·α rows.
- safeguard: the ⌊α·quota⌋ largest rows of every head are safe. The others compete over the whole layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion
from kvbench.interfaces.settings import setting
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import exact_share


@dataclass(frozen=True)
class Ada(Allocator):
    """Give each head rows in proportion to its number of large scores."""

    mode: str = setting(choices=("interpolate", "safeguard"))
    """How a head's smallest share is guaranteed."""
    alpha: float = setting(minimum=0, maximum=1)
    """The guaranteed share of the quota, α. 1 gives every head the same number of rows."""

    even = False
    capturable = True

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        counts = [self._sample(s, p, quota) for s, p in zip(scores, protected, strict=True)]
        return torch.tensor(counts).to(scores.device, non_blocking=True)

    def safe(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        if self.mode == "interpolate":
            return protected
        return torch.stack([self._safe(s, quota, p) for s, p in zip(scores, protected, strict=True)])

    def _safe(self, scores: Tensor, quota: int, protected: Tensor) -> Tensor:
        """Return the ⌊α·quota⌋ largest rows of every head, at least one, protected rows first, (H, n) bool."""
        least = protected.sum(-1).clamp(min=1).clamp(min=exact_share(self.alpha, quota))
        return top_k_mask(scores[None], least[None])[0] & (scores > -torch.inf)

    def _sample(self, scores: Tensor, protected: Tensor, quota: int) -> list[int]:
        heads, interpolates = scores.shape[0], self.mode == "interpolate"
        safe = protected if interpolates else self._safe(scores, quota, protected)
        winners = count_winners(scores.masked_fill(safe, -torch.inf), heads * quota - safe.sum())
        counts = torch.stack([winners, safe.sum(-1), (scores > -torch.inf).sum(-1)])
        won, reserved, available = counts.tolist()  # all at once, because the host waits for the device
        targets = [float(c + low) for c, low in zip(won, reserved, strict=True)]
        if interpolates:
            share = quota - sum(reserved) / heads
            targets = [c * (1 - self.alpha) + share * self.alpha + p for c, p in zip(won, reserved, strict=True)]
        return apportion(targets, [max(1, rows) for rows in reserved], available, heads * quota)


def count_winners(scores: Tensor, total: Tensor) -> Tensor:
    """Return how many of the `total` largest scores (H, n) each head has, (H,). `total` has no dimensions.

    Ties go to the lower head, then to the lower position.
    """
    won = top_k_mask(scores.flatten()[None, None], total.view(1, 1)).view_as(scores) & (scores > -torch.inf)
    return won.sum(-1)
