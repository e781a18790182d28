"""The choice in one launch, with a program for each head that goes through its rows three times.

It counts the protected rows, finds the row that leaves, and renumbers the ranks. Only if more rows are protected than
can stay, it searches for the last position that is still protected, by bisection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # rows that a program reads together


@triton.jit
def _count(mask, places, rows, low, high, TILE: tl.constexpr):
    """Count the marked rows with positions from `low` to `high`."""
    found = tl.zeros((), tl.int32)
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        place = tl.load(places + row, mask=row < rows, other=-1).to(tl.int32)
        marked = tl.load(mask + row, mask=row < rows, other=0).to(tl.int32)
        found += tl.sum(tl.where((place >= low) & (place <= high), marked, 0))
    return found


@triton.jit(do_not_specialize=["rows", "heads", "never", "s_b", "s_h", "q_b", "q_h", "p_b", "between"])
def _replace(
    scores, sinks, recents, places, ranks, order, free, position, invalid, tally, lengths, quotas, mass,
    rows, heads, never, s_b, s_h, s_n, q_b, q_h, p_b, between,
    SINKS: tl.constexpr, RECENTS: tl.constexpr, GROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    scores += head // heads * s_b + head % heads * s_h
    sinks += head * rows
    recents += head * rows
    places += head * rows
    ranks += head * rows
    order += head * rows
    tally += head
    used, quota = rows, rows - 1
    looked = used  # rows to go through: none if the head is not cut
    if GROWS:
        used = tl.load(lengths + head).to(tl.int32)
        quota = tl.load(quotas + head // heads * q_b + head % heads * q_h).to(tl.int32)
        looked = tl.where(quota < never, used, 0)
    now = tl.load(position + head // heads * p_b).to(tl.int32)
    last_sink, first_recent = now, tl.zeros((), tl.int32)  # protected sinks lie up to here, recent rows from here on
    left = tl.maximum(quota - 1, 1)
    protected = tl.zeros((), tl.int32)
    if SINKS:
        count = _count(sinks, places, looked, 0, now, TILE)
        if count > left:
            low, high = tl.full((), -1, tl.int32), now  # up to `low` they fit, up to `high` they do not
            while low + 1 < high:
                middle = (low + high) // 2
                fits = _count(sinks, places, looked, 0, middle, TILE) <= left
                low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
            last_sink = low
            tl.store(tally + between, tl.maximum(tl.load(tally + between), count - left))
        protected += tl.minimum(count, left)
        left -= protected
    if RECENTS:
        count = tl.zeros((), tl.int32)
        for first in range(0, looked, TILE):
            row = first + tl.arange(0, TILE)
            marked = tl.load(recents + row, mask=row < looked, other=0).to(tl.int32)
            if SINKS:
                marked &= 1 - tl.load(sinks + row, mask=row < looked, other=0).to(tl.int32)
            count += tl.sum(marked)
        if count > left:
            low, high = tl.zeros((), tl.int32), now + 1  # from `high` on they fit, from `low` on they do not
            while low + 1 < high:
                middle = (low + high) // 2
                fitting = tl.zeros((), tl.int32)
                for first in range(0, looked, TILE):
                    row = first + tl.arange(0, TILE)
                    place = tl.load(places + row, mask=row < looked, other=-1).to(tl.int32)
                    marked = tl.load(recents + row, mask=row < looked, other=0).to(tl.int32)
                    if SINKS:
                        marked &= 1 - tl.load(sinks + row, mask=row < looked, other=0).to(tl.int32)
                    fitting += tl.sum(tl.where(place >= middle, marked, 0))
                fits = fitting <= left
                low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
            first_recent = high
            tl.store(tally + 2 * between, tl.maximum(tl.load(tally + 2 * between), count - left))
        protected += tl.minimum(count, left)
    tl.store(tally, protected.to(tl.int64), mask=looked > 0)
    least = tl.full((), float("inf"), tl.float32)
    victim, slot, rank = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    wrong = tl.zeros((), tl.int32)
    for first in range(0, looked, TILE):
        row = first + tl.arange(0, TILE)
        here = row < looked
        score = tl.load(scores + row.to(tl.int64) * s_n, mask=here, other=0.0).to(tl.float32)
        number = tl.load(ranks + row, mask=here, other=0).to(tl.int32)
        place = tl.load(places + row, mask=here, other=-1).to(tl.int32)
        wrong += tl.sum((score != score).to(tl.int32))
        may = here
        if SINKS:
            sink = tl.load(sinks + row, mask=here, other=0) != 0
            may &= ~sink | (place > last_sink)
        if RECENTS:
            recent = tl.load(recents + row, mask=here, other=0) != 0
            if SINKS:
                recent &= ~sink
            may &= ~recent | (place < first_recent)
        score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
        score = tl.where(may, score, float("inf"))
        best = tl.min(score, 0)
        latest = tl.max(tl.where(may & (score == best), place, -1), 0)
        own = may & (place == latest)
        better = (best < least) | ((best == least) & (latest > victim))
        slot = tl.where(better, tl.max(tl.where(own, row, 0), 0), slot)
        rank = tl.where(better, tl.max(tl.where(own, number, 0), 0), rank)
        victim, least = tl.where(better, latest, victim), tl.where(better, best, least)
    if wrong > 0:
        tl.store(invalid, 1)
    renamed = used  # ranks to renumber: none if no row leaves
    if GROWS:
        leaves = used > quota
        slot, renamed = tl.where(leaves, slot, used), tl.where(leaves, used, 0)
        tl.store(lengths + head, (used + tl.where(leaves, 0, 1)).to(tl.int64))
        tl.store(mass + head * rows + slot, 1.0)
    tl.store(free + head, slot.to(tl.int64))
    tl.store(places + slot, (now + 1).to(tl.int64))
    for first in range(0, renamed, TILE):
        row = first + tl.arange(0, TILE)
        number = tl.load(ranks + row, mask=row < renamed, other=0).to(tl.int32)
        number = tl.where(row == slot, renamed - 1, tl.where(number > rank, number - 1, number))
        tl.store(ranks + row, number.to(tl.int64), mask=row < renamed)
        tl.store(order + number, row.to(tl.int64), mask=row < renamed)


def replace_row_triton(
    scores: Tensor, sinks: Tensor | None, recents: Tensor | None, places: Tensor, ranks: Tensor, order: Tensor,
    free: Tensor, position: Tensor, invalid: Tensor, tally: Tensor, growth: tuple[Tensor, Tensor, Tensor] | None,
    never: int,
) -> None:  # fmt: skip
    masks = [
        ranks if mask is None else mask.expand_as(scores).contiguous().view(torch.uint8) for mask in (sinks, recents)
    ]
    lengths, quotas, mass = growth or (free, free, places)
    quotas, position = quotas.expand_as(free), position.expand(len(scores), 1, 1)
    _replace[scores.shape[0] * scores.shape[1],](
        scores, *masks, places, ranks, order, free, position, invalid.view(torch.uint8), tally, lengths, quotas, mass,
        scores.shape[-1], scores.shape[1], never, *scores.stride(), *quotas.stride(),
        position.stride(0), tally.stride(0),
        SINKS=sinks is not None, RECENTS=recents is not None, GROWS=growth is not None, TILE=TILE, num_warps=8,
    )  # fmt: skip
