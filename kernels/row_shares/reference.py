"""The shares in PyTorch. The host waits for the device."""

import torch
from torch import Tensor


def share_rows_reference(targets: Tensor, least: Tensor, most: Tensor, total: Tensor) -> Tensor:
    counts = targets.long().maximum(least).minimum(most)
    wanted = total.maximum(least.sum(-1)).minimum(most.sum(-1))
    while (missing := (wanted - counts.sum(-1))[:, None]).any():
        step, left = missing.sign(), missing.abs()
        room = torch.where(missing > 0, most - counts, counts - least)
        closed = room <= 0
        # whole shares at once while much is missing, single rows at the end
        share = (left // (~closed).sum(-1, keepdim=True).clamp(min=1)).clamp(min=1)
        distance = (step * (counts - targets)).masked_fill(closed, torch.inf)
        rank = distance.argsort(dim=-1, stable=True).argsort(-1)
        counts = counts + step * share.minimum(room).masked_fill(closed | (rank >= left // share), 0)
    return counts
