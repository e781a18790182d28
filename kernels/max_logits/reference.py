"""The largest logits in PyTorch."""

import torch
from torch import Tensor


def max_logits_reference(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    grouped = queries.to(dtype).unflatten(1, (keys.shape[1], -1))
    return (grouped @ keys.to(dtype).mT * scaling).amax((1, 2))
