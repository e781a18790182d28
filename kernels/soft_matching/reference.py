"""Matching and merging in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from kvbench.kernels.soft_matching.chunks import even_rows

CHUNK = 1 << 21  # similarities that are held at once


def match_reference(keys: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = keys.shape
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # in bfloat16 most similarities would be equal
    chunk = chunk or rows
    chunks = -(-rows // chunk)
    units = pad(normalize(keys, dim=-1), (0, 0, 0, chunks * chunk - rows)).view(batch, heads, chunks, chunk, dim)
    index = torch.arange(chunks * chunk, device=keys.device).view(chunks, chunk)
    even, odd, absent = units[..., 0::2, :], units[..., 1::2, :], (index[:, 1::2] >= rows)[:, None]
    if odd.shape[-2] == 0:  # a single row
        return keys.new_full((batch, heads, rows), -torch.inf), keys.new_zeros(batch, heads, rows, dtype=torch.int64)
    step = max(1, CHUNK // (batch * heads * chunks * odd.shape[-2]))
    matches = [(some @ odd.mT).masked_fill_(absent, -torch.inf).max(-1) for some in even.split(step, dim=-2)]
    best, partner = (torch.cat(parts, -1) for parts in zip(*matches, strict=True))
    partner = partner * 2 + 1 + index[:, :1]
    real = index[:, 0::2].flatten() < rows
    return best.flatten(2)[..., real], partner.flatten(2)[..., real]


class JoinedReference:
    """See `kvbench.kernels.soft_matching.JoinedRows`."""

    def __init__(self, mass: Tensor, chosen: Tensor, partner: Tensor, chunk: int | None, count: int) -> None:
        rows = mass.shape[2]
        itself = torch.arange(rows, device=mass.device).expand_as(mass)
        even = even_rows(rows, chunk, mass.device).expand_as(partner)
        self.mass, self.into = mass, itself.scatter(2, even, torch.where(chosen, partner, even))
        self.index = (self.into == itself).flatten().nonzero()[:, 0]
        self.shape = (*mass.shape[:2], rows - count)
        self.total = torch.zeros_like(mass).scatter_add(2, self.into, mass)

    def centroids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        mass, total = self.mass[..., None], self.total[..., None]
        weighted = (rows.to(mass.dtype) * mass).masked_fill(mass == 0, 0)
        summed = torch.zeros_like(weighted).scatter_add(2, self.into[..., None].expand_as(weighted), weighted)
        means = torch.where(total > mass, (summed / total.clamp(min=1)).to(rows.dtype), rows)
        taken = means.flatten(0, 2)[self.index], total.flatten()[self.index]
        return taken[0].view(*self.shape, rows.shape[3]), taken[1].view(self.shape)
