"""Scores and codes in PyTorch. Neither waits for the device."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from kvbench.kernels.product_quantization.centroids import cut_keys, encode
from kvbench.kernels.row_selection import top_k_indices


def code_scores_reference(
    queries: Tensor, codes: Tensor, codebook: Tensor, scaling: float, first: int, stop: Tensor
) -> Tensor:
    batch, heads, parts, count = codebook.shape[:4]
    asking = cut_keys(queries.unflatten(1, (heads, -1)), parts)  # (B, H, m, G, d/m)
    tables = codebook.to(asking.dtype) @ asking.mT * scaling  # (B, H, m, K, G)
    absent = torch.arange(first, first + codes.shape[3], device=codes.device) >= stop
    own = codes.masked_fill(absent, 0)
    starts = torch.arange(0, batch * heads * count, count, device=codes.device).view(batch, heads, 1)
    found = [embedding(own[:, :, part] + starts, tables[:, :, part].flatten(0, 2)) for part in range(parts)]
    logits = sum(found[1:], found[0]).masked_fill(absent[:, None], -torch.inf)  # (B, H, n, G)
    scores = (logits - logits.logsumexp(2, keepdim=True)).exp().sum(-1)
    return pad(scores.masked_fill(absent, -torch.inf), (first, 0), value=-torch.inf)


def choose_by_codes_reference(
    queries: Tensor, keys: Tensor, codes: Tensor, codebook: Tensor, scaling: float, first: int, stop: Tensor,
    last: Tensor, found: Tensor,
) -> None:  # fmt: skip
    at = last.long().view(1)
    codes.index_copy_(3, at - first, encode(keys.index_select(2, at), codebook))
    if found.numel():
        scores = code_scores_reference(queries, codes, codebook, scaling, first, stop)
        found.copy_(top_k_indices(scores, found.shape[2], implementation="reference"))
