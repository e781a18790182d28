"""The choice in one launch, with a program for each head that goes through its rows three times.

It counts the protected rows, finds the row that leaves, and renumbers the ranks. Only if more rows are protected than
can stay, it searches for the last position that is still protected, by bisection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels import cut_order
from kvbench.kernels.cut_order import NEWEST, RECENTS, SINKS

TILE = 2048  # rows that a program reads together


@triton.jit
def _count(mask, other, places, rows, low, high, OTHER: tl.constexpr, TILE: tl.constexpr):
    """Count the marked rows with positions from `low` to `high`, without those that `other` marks (OTHER)."""
    count = tl.zeros((), tl.int32)
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        place = tl.load(places + row, mask=row < rows, other=-1).to(tl.int32)  # (TILE,)
        marked = tl.load(mask + row, mask=row < rows, other=0).to(tl.int32)  # (TILE,)
        if OTHER:
            marked &= 1 - tl.load(other + row, mask=row < rows, other=0).to(tl.int32)  # (TILE,)
        count += tl.sum(tl.where((place >= low) & (place <= high), marked, 0))
    return count


@triton.jit
def _protect(mask, other, places, rows, now, room, most, NEWEST: tl.constexpr, OTHER: tl.constexpr, TILE: tl.constexpr):
    """Let the rows of a kind claim `room` rows: the newest of them, or the first.

    The largest number of rows that found no room is kept at `most`. Returns the first and the last position from which
    marked rows stay, and how many stay.
    """
    count = _count(mask, other, places, rows, 0, now, OTHER, TILE)
    begin, end = tl.zeros((), tl.int32), now
    if count > room:
        low, high = tl.full((), -1, tl.int32), now + 1
        while low + 1 < high:
            middle = (low + high) // 2
            if NEWEST:  # from `high` on they fit, from `low` on they do not
                fits = _count(mask, other, places, rows, middle, now, OTHER, TILE) <= room
                low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
            else:  # up to `low` they fit, up to `high` they do not
                fits = _count(mask, other, places, rows, 0, middle, OTHER, TILE) <= room
                low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
        if NEWEST:
            begin = high
        else:
            end = low
        tl.store(most, tl.maximum(tl.load(most), count - room))
    return begin, end, tl.minimum(count, room)


@triton.jit(do_not_specialize=["rows", "heads", "never", "s_b", "s_h", "q_b", "q_h", "p_b"])
def _replace(
    scores,
    first_kind,
    second_kind,
    places,
    ranks,
    order,
    free,
    position,
    invalid,
    tally,
    first_most,
    second_most,
    lengths,
    quotas,
    mass,
    rows,
    heads,
    never,
    s_b,
    s_h,
    s_n,
    q_b,
    q_h,
    p_b,
    FIRST_KIND: tl.constexpr,
    SECOND_KIND: tl.constexpr,
    FIRST_NEWEST: tl.constexpr,
    SECOND_NEWEST: tl.constexpr,
    SCORED: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLIEST: tl.constexpr,
    GROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    scores += head // heads * s_b + head % heads * s_h
    first_kind += head * rows
    second_kind += head * rows
    places += head * rows
    ranks += head * rows
    order += head * rows
    used, quota = rows, rows - 1
    looked = used  # rows to go through: none if the head is not cut
    if GROWS:
        used = tl.load(lengths + head).to(tl.int32)
        quota = tl.load(quotas + head // heads * q_b + head % heads * q_h).to(tl.int32)
        looked = tl.where(quota < never, used, 0)
    now = tl.load(position + head // heads * p_b).to(tl.int32)
    left = tl.where(quota > SCORED, quota - SCORED, quota)
    protected = tl.zeros((), tl.int32)
    if FIRST_KIND:
        first_begin, first_end, stay = _protect(
            first_kind, first_kind, places, looked, now, left, first_most + head, FIRST_NEWEST, False, TILE
        )
        protected += stay
        left -= stay
    if SECOND_KIND:
        second_begin, second_end, stay = _protect(
            second_kind, first_kind, places, looked, now, left, second_most + head, SECOND_NEWEST, FIRST_KIND, TILE
        )
        protected += stay
    tl.store(tally + head, protected.to(tl.int64), mask=looked > 0)
    least = tl.full((), float("inf"), tl.float32)
    victim, slot, rank = tl.full((), -1, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    wrong = tl.zeros((), tl.int32)
    for first in range(0, looked, TILE):
        row = first + tl.arange(0, TILE)
        here = row < looked
        score = tl.load(scores + row.to(tl.int64) * s_n, mask=here, other=0.0).to(tl.float32)  # (TILE,)
        number = tl.load(ranks + row, mask=here, other=0).to(tl.int32)  # (TILE,)
        place = tl.load(places + row, mask=here, other=-1).to(tl.int32)  # (TILE,)
        wrong += tl.sum((score != score).to(tl.int32))
        may = here
        if FIRST_KIND:
            one = tl.load(first_kind + row, mask=here, other=0) != 0  # (TILE,)
            may &= ~one | (place < first_begin) | (place > first_end)
        if SECOND_KIND:
            two = tl.load(second_kind + row, mask=here, other=0) != 0  # (TILE,)
            if FIRST_KIND:
                two &= ~one
            may &= ~two | (place < second_begin) | (place > second_end)
        score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
        if not LARGEST:
            score = -score
        score = tl.where(may, score, float("inf"))
        best = tl.min(score, 0)
        lateness = place if EARLIEST else now - place  # of equal scores, the row with the largest one leaves
        latest = tl.max(tl.where(may & (score == best), lateness, -1), 0)
        leaving = may & (lateness == latest)
        better = (best < least) | ((best == least) & (latest > victim))
        slot = tl.where(better, tl.max(tl.where(leaving, row, 0), 0), slot)
        rank = tl.where(better, tl.max(tl.where(leaving, number, 0), 0), rank)
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
        number = tl.load(ranks + row, mask=row < renamed, other=0).to(tl.int32)  # (TILE,)
        number = tl.where(row == slot, renamed - 1, tl.where(number > rank, number - 1, number))
        tl.store(ranks + row, number.to(tl.int64), mask=row < renamed)
        tl.store(order + number, row.to(tl.int64), mask=row < renamed)


def replace_row_triton(
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
    rules, given = cut_order.ORDER, {SINKS: (sinks, tally[1]), RECENTS: (recents, tally[2])}
    (first, first_most), (second, second_most) = (given[kind] for kind, _ in rules.protected)
    masks = [
        ranks if mask is None else mask.expand_as(scores).contiguous().view(torch.uint8) for mask in (first, second)
    ]
    newest = [stays == NEWEST for _, stays in rules.protected]
    lengths, quotas, mass = growth or (free, free, places)
    quotas, position = quotas.expand_as(free), position.expand(len(scores), 1, 1)
    _replace[scores.shape[0] * scores.shape[1],](
        scores,
        *masks,
        places,
        ranks,
        order,
        free,
        position,
        invalid.view(torch.uint8),
        tally[0],
        first_most,
        second_most,
        lengths,
        quotas,
        mass,
        scores.shape[-1],
        scores.shape[1],
        never,
        *scores.stride(),
        *quotas.stride(),
        position.stride(0),
        FIRST_KIND=first is not None,
        SECOND_KIND=second is not None,
        FIRST_NEWEST=newest[0],
        SECOND_NEWEST=newest[1],
        SCORED=rules.scored,
        LARGEST=rules.largest,
        EARLIEST=rules.earliest,
        GROWS=growth is not None,
        TILE=TILE,
        num_warps=8,
    )
