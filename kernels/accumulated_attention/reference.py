"""The equation in PyTorch, in chunks of queries."""

import torch
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits

CHUNK = 1 << 20  # logits that are held at once; they fit the cache of a core


def accumulated_attention_reference(
    queries: Tensor, keys: Tensor, mass: Tensor, lse: Tensor, scaling: float, extras: SoftmaxExtras | None = None
) -> Tensor:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    grouped, keys = queries.reshape(batch, heads, -1, tokens, dim).to(mass.dtype), keys.to(mass.dtype)
    logsums = lse.view(batch, heads, -1, tokens, 1).to(mass.dtype)
    bias = mass.log()[:, :, None, None]
    sums = mass.new_zeros(batch, heads, query_heads // heads, rows)
    step = max(1, CHUNK // (batch * query_heads * rows))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        past, end = rows - tokens + start, rows - tokens + stop  # every query of the chunk sees the rows before `past`
        logits = grouped[..., start:stop, :] @ keys[:, :, None, :end].mT * scaling
        logits = cap_logits(logits, extras) + bias[..., :end]
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., past:].masked_fill_(later, -torch.inf)
        sums[..., :end] += (logits - logsums[..., start:stop, :]).exp_().sum(-2)
    return sums
