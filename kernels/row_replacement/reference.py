"""The choice in PyTorch, over the rows in the order of their positions."""

import torch
from torch import Tensor


def replace_row_reference(
    scores: Tensor, sinks: Tensor | None, recents: Tensor | None, places: Tensor, ranks: Tensor, order: Tensor,
    free: Tensor, position: Tensor, invalid: Tensor,
) -> None:  # fmt: skip
    rows = scores.shape[-1]
    invalid |= scores.isnan().any()

    def by_rank(own: Tensor) -> Tensor:
        return own.expand_as(scores).gather(-1, order)

    known = by_rank(scores).nan_to_num(torch.finfo(scores.dtype).min)  # infinite scores become finite
    room = max(1, rows - 2)
    left = torch.full((*scores.shape[:2], 1), room, device=scores.device)
    stays = torch.zeros_like(known, dtype=torch.bool)
    if sinks is not None:
        first = by_rank(sinks)
        stays = first & (first.cumsum(-1) <= room)
        left = left - stays.sum(-1, keepdim=True)
    if recents is not None:
        newest = by_rank(recents) & ~stays
        stays = stays | (newest & (newest.flip(-1).cumsum(-1).flip(-1) <= left))
    known = known.masked_fill(stays, torch.inf)
    rank = torch.arange(rows, device=scores.device)
    leaves = (known == known.amin(-1, keepdim=True)) & ~stays
    victim = rank.masked_fill(~leaves, -1).amax(-1, keepdim=True)
    slot = order.gather(-1, victim)
    free.copy_(slot[..., 0])
    places.scatter_(-1, slot, (position + 1).to(places.dtype).expand_as(slot))
    ranks.sub_((ranks > victim).long())
    ranks.scatter_(-1, slot, rows - 1)
    order.scatter_(-1, ranks, rank.expand_as(order))
