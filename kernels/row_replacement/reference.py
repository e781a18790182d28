"""The choice in PyTorch, over the rows in the order of their positions."""

import torch
from torch import Tensor


def replace_row_reference(
    scores: Tensor, sinks: Tensor | None, recents: Tensor | None, places: Tensor, ranks: Tensor, order: Tensor,
    free: Tensor, position: Tensor, invalid: Tensor, tally: Tensor, growth: tuple[Tensor, Tensor, Tensor] | None,
    never: int,
) -> None:  # fmt: skip
    slots, rank = scores.shape[-1], torch.arange(scores.shape[-1], device=scores.device)
    used, quotas = torch.full_like(free, slots)[..., None], torch.full_like(free, slots - 1)[..., None]
    if growth is not None:
        used, quotas = growth[0][..., None].clone(), growth[1].expand_as(free)[..., None]
    cut, leaves, held = quotas < never, used > quotas, rank < used
    invalid |= (scores.isnan() & held & cut).any()

    def by_rank(own: Tensor) -> Tensor:
        return own.expand_as(scores).gather(-1, order)

    known = by_rank(scores).nan_to_num(torch.finfo(scores.dtype).min)  # infinite scores become finite
    left = room = (quotas - 1).clamp(min=1)
    stays = others = torch.zeros_like(held & cut)
    if sinks is not None:
        first = by_rank(sinks) & held
        stays = first & (first.cumsum(-1) <= room)
        left = left - stays.sum(-1, keepdim=True)
        tally[1].copy_(tally[1].maximum(((first & ~stays).sum(-1, keepdim=True) * cut)[..., 0]))
        others = first
    if recents is not None:
        newest = by_rank(recents) & held & ~others
        fit = newest & (newest.flip(-1).cumsum(-1).flip(-1) <= left)
        stays = stays | fit
        tally[2].copy_(tally[2].maximum(((newest & ~fit).sum(-1, keepdim=True) * cut)[..., 0]))
    tally[0].copy_(torch.where(cut, stays.sum(-1, keepdim=True), tally[0][..., None])[..., 0])
    known = known.masked_fill(stays | ~held, torch.inf)
    may = (known == known.amin(-1, keepdim=True)) & held & ~stays
    victim = rank.masked_fill(~may, -1).amax(-1, keepdim=True)
    slot = torch.where(leaves, order.gather(-1, victim.clamp(min=0)), used.clamp(max=slots - 1))
    free.copy_(slot[..., 0])
    places.scatter_(-1, slot, (position + 1).to(places.dtype).expand_as(slot))
    ranks.sub_(((ranks > victim) & (ranks < used) & leaves).long())
    ranks.scatter_(-1, slot, torch.where(leaves, used - 1, slot))
    order.scatter_(-1, ranks, rank.expand_as(order))
    if growth is not None:
        growth[0].add_((~leaves[..., 0]).long())
        growth[2].scatter_(-1, slot, 1)
