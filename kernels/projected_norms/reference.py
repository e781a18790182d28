"""The equation in PyTorch, in chunks of rows."""

import torch
from torch import Tensor

CHUNK = 1 << 22  # projected elements that are held at once


def projected_norms_reference(values: Tensor, weight: Tensor, query_heads: int) -> Tensor:
    batch, heads, rows, dim = values.shape
    dtype = torch.promote_types(values.dtype, torch.float32)
    matrices = weight.view(len(weight), heads, query_heads // heads, dim).permute(1, 2, 3, 0)  # (H, G, d, hidden)
    norms = torch.zeros(batch, heads, rows, dtype=dtype, device=values.device)
    step = max(1, CHUNK // (batch * heads * len(weight)))
    for start in range(0, rows, step):
        some = values[:, :, start : start + step]
        for head in range(matrices.shape[1]):
            norms[..., start : start + step] += (some @ matrices[:, head]).abs().sum(-1, dtype=dtype)
    return norms / matrices.shape[1]
