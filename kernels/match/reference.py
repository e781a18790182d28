"""The matching and the merge in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

CHUNK = 1 << 21  # similarities held at once


def match_reference(keys: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = keys.shape
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # in bfloat16 most edges would tie
    chunk = chunk or rows
    chunks = -(-rows // chunk)
    units = pad(normalize(keys, dim=-1), (0, 0, 0, chunks * chunk - rows)).view(batch, heads, chunks, chunk, dim)
    index = torch.arange(chunks * chunk, device=keys.device).view(chunks, chunk)
    even, odd, absent = units[..., 0::2, :], units[..., 1::2, :], (index[:, 1::2] >= rows)[:, None]
    if odd.shape[-2] == 0:  # a single row
        return keys.new_full((batch, heads, rows), -torch.inf), keys.new_zeros(batch, heads, rows, dtype=torch.int64)
    step = max(1, CHUNK // (batch * heads * chunks * odd.shape[-2]))
    found = [(some @ odd.mT).masked_fill_(absent, -torch.inf).max(-1) for some in even.split(step, dim=-2)]
    best, partner = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
    partner = partner * 2 + 1 + index[:, :1]
    real = index[:, 0::2].flatten() < rows
    return best.flatten(2)[..., real], partner.flatten(2)[..., real]


def merge_reference(
    keys: Tensor, values: Tensor, mass: Tensor, into: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.zeros_like(mass).scatter_add(2, into, mass)
    grew = (total > mass)[..., None]

    def mean(rows: Tensor) -> Tensor:
        weighted = rows.to(mass.dtype) * mass[..., None]
        summed = torch.zeros_like(weighted).scatter_add(2, into[..., None].expand_as(weighted), weighted)
        return torch.where(grew, (summed / total[..., None].clamp(min=1)).to(rows.dtype), rows)

    if index is None:
        return mean(keys), mean(values), total
    return mean(keys).flatten(0, 2)[index], mean(values).flatten(0, 2)[index], total.flatten()[index]
