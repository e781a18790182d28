"""The equation in PyTorch, a few rows with all others at a time."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

CHUNK = 64  # rows whose cosines with all others are held at once


def key_redundancy_reference(keys: Tensor, present: Tensor, similar: float) -> Tensor:
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    n = present.shape[2]
    # absent rows have cosine 0, which is never above `similar`
    units = normalize(keys, dim=-1).masked_fill(~present[..., None], 0)
    total = ((units.sum(2, keepdim=True) - units) * units).sum(-1)  # Σ_i c_{i,j} over i ≠ j
    number = torch.arange(1, n + 1, device=keys.device, dtype=torch.int32)
    for start in range(0, n, CHUNK):
        some = units[:, :, start : start + CHUNK] @ units.mT  # (B, H, CHUNK, n)
        some.diagonal(start, -2, -1).fill_(-1)
        newest = ((some > similar) * number).amax(-1)  # its number from 1 on, 0 for none
        index = (newest - 1).clamp(min=0).long()
        again = some.gather(-1, index[..., None]).squeeze(-1).masked_fill(newest == 0, 0)
        total = total.scatter_add(-1, index, -again)
    mean = total / present.sum(-1, keepdim=True)
    return mean.masked_fill(~present, -torch.inf).softmax(-1)
