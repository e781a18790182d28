"""ada: heads of a layer share the layer's rows by where the layer's largest scores are (AdaKV).

Source: FFY0/AdaKV, adaptive_snapkv/monkeypatch/snapkv_utils.py (interpolate); NVIDIA/kvpress, adakv_press.py
(safeguard). Protected rows are every head's own and are not competed for.

The source's `normalize`, which is off in its scripts and on in KVCache-Factory (a head's scores are multiplied by the
share of their sum that its own b largest have), is not built: heads compete by the scores as they are.

Symbols: b = quota less protected rows, c_h = rows of head h among the layer's H·b largest scores, α = floor.
interpolate: head h keeps c_h·(1-α) + b·α.
safeguard: the ⌊α·quota⌋ largest of every head are safe, the rest is one competition over the layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.apportion import apportion
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import SettingError, exact_share, is_number, require_choice


@dataclass(frozen=True)
class Ada(Allocator):
    """`mode`: interpolate or safeguard; `alpha` in [0, 1]: 1 is uniform."""

    mode: str
    alpha: float

    even = False

    def __post_init__(self) -> None:
        require_choice("allocator.mode", self.mode, ("interpolate", "safeguard"))
        if not is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise SettingError(f"allocator.alpha={self.alpha}: a number in [0, 1]")

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        counts = [self._sample(s, p, quota) for s, p in zip(scores, protected, strict=True)]
        return torch.tensor(counts, device=scores.device)

    def safe(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        if self.mode == "interpolate":
            return protected
        return torch.stack([self._safe(s, quota, p) for s, p in zip(scores, protected, strict=True)])

    def _safe(self, scores: Tensor, quota: int, protected: Tensor) -> Tensor:
        """(H, n): the ⌊α·quota⌋ largest of every head, protected ones first, at least one."""
        least = protected.sum(-1).clamp(min=max(1, exact_share(self.alpha, quota)))
        return top_k_mask(scores[None], least[None])[0] & (scores > -torch.inf)

    def _sample(self, scores: Tensor, protected: Tensor, quota: int) -> list[int]:
        heads = scores.shape[0]
        available = (scores > -torch.inf).sum(-1).tolist()
        own = protected.sum(-1).tolist()
        least = [max(1, rows) for rows in own]
        if self.mode == "interpolate":
            share = quota - sum(own) / heads
            won = winners(scores.masked_fill(protected, -torch.inf), heads * quota - sum(own))
            targets = [c * (1 - self.alpha) + share * self.alpha + p for c, p in zip(won, own, strict=True)]
        else:
            safe = self._safe(scores, quota, protected)
            least = safe.sum(-1).tolist()
            won = winners(scores.masked_fill(safe, -torch.inf), heads * quota - sum(least))
            targets = [float(c + low) for c, low in zip(won, least, strict=True)]
        return apportion(targets, least, available, heads * quota)


def winners(scores: Tensor, total: int) -> list[int]:
    """How many of the `total` largest scores (H, n) each head has; ties to the lower head, then the lower place."""
    won = top_k_mask(scores.flatten()[None, None], total).view_as(scores) & (scores > -torch.inf)
    return won.sum(-1).tolist()
