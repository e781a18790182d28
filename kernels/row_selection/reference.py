"""Choose rows by a stable sort and gather them by indexing, in PyTorch."""

import torch
from torch import Tensor


def top_k_mask_reference(scores: Tensor, quotas: Tensor | int) -> Tensor:
    order = scores.argsort(dim=-1, descending=True, stable=True)
    most = quotas if isinstance(quotas, int) else quotas[..., None]
    chosen = (torch.arange(scores.shape[-1], device=scores.device) < most).expand_as(scores)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, chosen)


def kept_indices_reference(kept: Tensor, total: int | None) -> Tensor:
    index = kept.flatten().nonzero()[:, 0]
    if total is not None and not kept.is_cuda and len(index) != total:
        raise ValueError(f"kept_indices: {total} rows of {kept.sum(-1).tolist()}")
    return index


def gather_rows_reference(
    index: Tensor, keys: Tensor, values: Tensor, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    def some(rows: Tensor) -> Tensor:
        if rows.is_contiguous():
            return rows.flatten(0, 2).index_select(0, index)
        return rows[torch.unravel_index(index, rows.shape[:3])]

    gathered = some(keys), some(values)
    if into is None:
        return gathered
    for part, rows in zip(into, gathered, strict=True):
        part.copy_(rows.view(part.shape))
    return into
