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


@triton.jit(do_not_specialize=["rows", "room", "heads", "s_b", "s_h"])
def _replace(
    scores, sinks, recents, places, ranks, order, free, position, invalid,
    rows, room, heads, s_b, s_h, s_n,
    SINKS: tl.constexpr, RECENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    scores += head // heads * s_b + head % heads * s_h
    sinks += head * rows
    recents += head * rows
    places += head * rows
    ranks += head * rows
    order += head * rows
    now = tl.load(position).to(tl.int32)
    last_sink, first_recent = now, tl.zeros((), tl.int32)  # protected sinks lie up to here, recent rows from here on
    left = tl.zeros((), tl.int32) + room
    if SINKS:
        count = _count(sinks, places, rows, 0, now, TILE)
        if count > room:
            low, high = tl.full((), -1, tl.int32), now  # up to `low` they fit, up to `high` they do not
            while low + 1 < high:
                middle = (low + high) // 2
                fits = _count(sinks, places, rows, 0, middle, TILE) <= room
                low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
            last_sink = low
            count = _count(sinks, places, rows, 0, low, TILE)
        left -= count
    if RECENTS:
        count = tl.zeros((), tl.int32)
        for first in range(0, rows, TILE):
            row = first + tl.arange(0, TILE)
            marked = tl.load(recents + row, mask=row < rows, other=0).to(tl.int32)
            if SINKS:
                place = tl.load(places + row, mask=row < rows, other=0).to(tl.int32)
                marked &= 1 - (tl.load(sinks + row, mask=row < rows, other=0).to(tl.int32) & (place <= last_sink))
            count += tl.sum(marked)
        if count > left:
            low, high = tl.zeros((), tl.int32), now + 1  # from `high` on they fit, from `low` on they do not
            while low + 1 < high:
                middle = (low + high) // 2
                count = tl.zeros((), tl.int32)
                for first in range(0, rows, TILE):
                    row = first + tl.arange(0, TILE)
                    place = tl.load(places + row, mask=row < rows, other=-1).to(tl.int32)
                    marked = tl.load(recents + row, mask=row < rows, other=0).to(tl.int32)
                    if SINKS:
                        sink = tl.load(sinks + row, mask=row < rows, other=0).to(tl.int32)
                        marked &= 1 - (sink & (place <= last_sink))
                    count += tl.sum(tl.where(place >= middle, marked, 0))
                fits = count <= left
                low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
            first_recent = high
    least = tl.full((), float("inf"), tl.float32)
    victim, slot, rank = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    wrong = tl.zeros((), tl.int32)
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        here = row < rows
        score = tl.load(scores + row.to(tl.int64) * s_n, mask=here, other=0.0).to(tl.float32)
        number = tl.load(ranks + row, mask=here, other=0).to(tl.int32)
        place = tl.load(places + row, mask=here, other=-1).to(tl.int32)
        wrong += tl.sum((score != score).to(tl.int32))
        may = here
        if SINKS:
            may &= (tl.load(sinks + row, mask=here, other=0) == 0) | (place > last_sink)
        if RECENTS:
            may &= (tl.load(recents + row, mask=here, other=0) == 0) | (place < first_recent)
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
    tl.store(free + head, slot.to(tl.int64))
    tl.store(places + slot, (now + 1).to(tl.int64))
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        number = tl.load(ranks + row, mask=row < rows, other=0).to(tl.int32)
        number = tl.where(row == slot, rows - 1, tl.where(number > rank, number - 1, number))
        tl.store(ranks + row, number.to(tl.int64), mask=row < rows)
        tl.store(order + number, row.to(tl.int64), mask=row < rows)


def replace_row_triton(
    scores: Tensor, sinks: Tensor | None, recents: Tensor | None, places: Tensor, ranks: Tensor, order: Tensor,
    free: Tensor, position: Tensor, invalid: Tensor,
) -> None:  # fmt: skip
    rows = scores.shape[-1]
    masks = [
        ranks if mask is None else mask.expand_as(scores).contiguous().view(torch.uint8) for mask in (sinks, recents)
    ]
    _replace[scores.shape[0] * scores.shape[1],](
        scores, *masks, places, ranks, order, free, position, invalid.view(torch.uint8),
        rows, max(1, rows - 2), scores.shape[1], *scores.stride(),
        SINKS=sinks is not None, RECENTS=recents is not None, TILE=TILE, num_warps=8,
    )  # fmt: skip
