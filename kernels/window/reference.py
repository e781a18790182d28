"""softmax(q·k·scaling + log mass), causal within the window, in PyTorch."""

import torch
from torch import Tensor


def window_reference(queries: Tensor, keys: Tensor, mass: Tensor, scaling: float) -> Tensor:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    grouped = queries.view(batch, heads, query_heads // heads, tokens, dim).to(mass.dtype)
    logits = grouped @ keys[:, :, None].to(mass.dtype).mT * scaling + mass.log()[:, :, None, None]
    last = torch.arange(rows - tokens, rows, device=keys.device)[:, None]
    logits = logits.masked_fill(torch.arange(rows, device=keys.device) > last, -torch.inf)
    return logits.softmax(-1)
