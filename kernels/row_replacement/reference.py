"""The choice in PyTorch, over the rows in the order of their positions."""

import torch
from torch import Tensor

from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import RECENTS, SINKS, fit_protected, rank_scores


def replace_row_reference(
    scores: Tensor,
    sinks: Tensor | None,
    recents: Tensor | None,
    places: Tensor,
    ranks: Tensor,
    order: Tensor,
    free: Tensor,
    position: Tensor,
    invalid: Tensor,
    tally: Tensor,
    growth: tuple[Tensor, Tensor, Tensor] | None,
    never: int,
) -> None:
    slots, rank = scores.shape[-1], torch.arange(scores.shape[-1], device=scores.device)
    used, quotas = torch.full_like(free, slots)[..., None], torch.full_like(free, slots - 1)[..., None]
    if growth is not None:
        used, quotas = growth[0][..., None].clone(), growth[1].expand_as(free)[..., None]
    cut, leaves, held = quotas < never, used > quotas, rank < used
    invalid |= (scores.isnan() & held & cut).any()

    def by_rank(values: Tensor) -> Tensor:
        return values.expand_as(scores).gather(-1, order)

    marks = {kind: None if marked is None else by_rank(marked) for kind, marked in ((SINKS, sinks), (RECENTS, recents))}
    protection = fit_protected(marks, held, quotas)
    for number, kind in enumerate((SINKS, RECENTS), 1):
        if kind in protection.given_up:
            tally[number].copy_(tally[number].maximum((protection.given_up[kind] * cut)[..., 0]))
    stays = protection.kept
    tally[0].copy_(torch.where(cut, stays.sum(-1, keepdim=True), tally[0][..., None])[..., 0])
    known = rank_scores(by_rank(scores).nan_to_num(torch.finfo(scores.dtype).min)).masked_fill(stays | ~held, torch.inf)
    may = (known == known.amin(-1, keepdim=True)) & held & ~stays
    latest = rank if cut_order.ORDER.earliest else slots - 1 - rank
    last = latest.masked_fill(~may, -1).argmax(-1, keepdim=True)
    victim = last.masked_fill(~may.any(-1, keepdim=True), -1)
    slot = torch.where(leaves, order.gather(-1, victim.clamp(min=0)), used.clamp(max=slots - 1))
    free.copy_(slot[..., 0])
    places.scatter_(-1, slot, (position + 1).to(places.dtype).expand_as(slot))
    ranks.sub_(((ranks > victim) & (ranks < used) & leaves).long())
    ranks.scatter_(-1, slot, torch.where(leaves, used - 1, slot))
    order.scatter_(-1, ranks, rank.expand_as(order))
    if growth is not None:
        growth[0].add_((~leaves[..., 0]).long())
        growth[2].scatter_(-1, slot, 1)
