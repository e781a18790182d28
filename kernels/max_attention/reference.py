"""The equation in PyTorch, in chunks of queries."""

import torch
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras, cap_logits, weigh_logits

CHUNK = 1 << 20  # logits that are held at once; they fit the cache of a core


def max_attention_reference(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    weight: Tensor | None = None,
    together: bool = True,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped, keys = queries.reshape(batch, heads, -1, tokens, dim).to(dtype), keys.to(dtype)
    largest = torch.zeros(batch, heads, grouped.shape[2], rows, dtype=dtype, device=keys.device)
    step = max(1, CHUNK // (batch * query_heads * rows))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        past, end = rows - tokens + start, rows - tokens + stop  # every query of the chunk sees the rows before `past`
        logits = cap_logits(grouped[..., start:stop, :] @ keys[:, :, None, :end].mT * scaling, extras)
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., past:].masked_fill_(later, -torch.inf)
        p = weigh_logits(logits, extras)
        if weight is not None:
            p *= weight[:, None, None, start:stop, None]
        largest[..., :end] = torch.maximum(largest[..., :end], p.amax(3))
    return largest.amax(2) if together else largest
