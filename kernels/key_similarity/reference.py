"""The equations in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize


def anchor_reference(keys: Tensor, mass: Tensor, normalised: bool) -> Tensor:
    keys = keys.to(mass.dtype)
    units = normalize(keys, dim=-1) if normalised else keys
    mass = mass[..., None]
    return (units * mass).sum(2) / mass.sum(2)


def similarity_reference(keys: Tensor, anchor: Tensor, metric: str) -> Tensor:
    keys = keys.to(anchor.dtype)
    if metric == "cosine":
        return cosine_similarity(anchor[:, :, None], keys, dim=-1)
    if metric == "dot":
        return (keys @ anchor[..., None]).squeeze(-1)
    return -(anchor[:, :, None] - keys).norm(dim=-1)


def norms_reference(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).norm(dim=-1)
