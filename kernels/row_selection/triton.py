"""Choose rows by counting digits of their scores, without sorting, and gather keys and values together.

A float32 score becomes an unsigned whole number with the same order. The quota-th largest number of a head is found
eight bits at a time. In each of the first phases, all programs of a head count the next digit of the scores that begin
with the known digits. In the fourth each program writes down its own counts of the last digit, so that in the fifth all
know the quota-th largest number and how many rows earlier programs list. A kernel that makes scores can count their
first digits along (`count_first_digits`). Only whole numbers are added up, so equal inputs give equal outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting

TILE = 2048  # marks that a program reads together
HEAD, SCORES = 4096, 512  # scores of a head that a program reads together, or half as many; scores of a warp
SPLITS = (1, 8, 32, 64)  # programs of a head; few numbers, because each is compiled
JOINED, HEADS = 1024, 8  # rows and heads whose products are joined at once
SIZES = ((256, 256), (4096, 256), (8192, 512), (16384, 1024))  # scores of a head that one program may hold: powers of
# two, and some more, because a prompt of 2^17 tokens and its answer have more pages. Few sizes, as each is compiled
SINGLE = sum(SIZES[-1])
FEW = 8  # most scores of a head that are taken one after the other
HELD = 1024  # scores of a warp that takes them one after the other
ROWS = 32  # rows that a program copies
PHASES = tl.constexpr(5)
LINE = tl.constexpr(3 * 256 + 8)  # numbers that the programs of a head share: counts of three digits, and of programs
GUESSES = tl.constexpr(24)  # after so many guesses, bisection follows, which ends after 32 more
LEAST, MOST = tl.constexpr(0x007FFFFF), tl.constexpr(0xFF7FFFFF)  # numbers of -inf and of the largest finite score


@triton.jit
def score_to_number(scores):
    """Map scores to unsigned numbers in the same order. 0.0 and -0.0 are equal, and NaN is the largest."""
    x = scores.to(tl.float32)
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    ordered = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)
    return tl.where(x != x, 0xFFFFFFFF, ordered).to(tl.uint32)


@triton.jit
def number_to_score(number):
    """Return the score of a number."""
    bits = number ^ tl.where(number >> 31 == 1, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _count_digits(number, here, shift, counts):
    """Add the digits of numbers (N,) that begin at bit `shift` to `counts` (256,)."""
    tl.debug_barrier()  # Triton 3.6 clears the histogram's memory while other warps may still read from it
    digits = tl.histogram(((number >> shift) & 255).to(tl.int32), 256, mask=here)
    tl.atomic_add(counts + tl.arange(0, 256), digits, mask=digits > 0, sem="relaxed")


@triton.jit
def clear_work(work):
    """Clear the numbers that the programs of a head share."""
    place = tl.arange(0, 1024)
    tl.store(work + place, tl.zeros((1024,), tl.int32), mask=place < LINE)


@triton.jit
def count_first_digits(scores, here, work):
    """Count the first digits of scores (N,) of a head in its `work`, which was cleared."""
    _count_digits(score_to_number(scores), here, 24, work)


@triton.jit
def _load_quota(quotas, each, head):
    """Return how many rows a head keeps: `each`, or fewer if every head has a number of its own that is smaller."""
    if quotas is None:
        return each.to(tl.int64)
    else:
        return tl.minimum(tl.load(quotas + head).to(tl.int64), each)


@triton.jit
def _find_digit(digits, start, room):
    """Return one more of the quota-th largest number's first digits, and how many rows that begin with them still fit.

    Args:
        digits: How many of the numbers that begin with `start` have which digit next, (256,).
        start: The digits known before.
        room: How many rows that begin with them fit.
    """
    bins = tl.arange(0, 256)
    above = tl.sum(digits) - tl.cumsum(digits, 0)
    is_it = (above < room) & (room <= above + digits)
    room -= tl.sum(tl.where(is_it, above, 0))
    return (start << 8) | tl.sum(tl.where(is_it, bins, 0)).to(tl.uint32), room


@triton.jit
def _load_head(scores, first, rows, stride, TILE: tl.constexpr):
    """Return some row numbers of a head (TILE,), which of them there are, and the numbers of their scores."""
    row = first + tl.arange(0, TILE)
    here = row < rows
    return row, here, score_to_number(tl.load(scores + row.to(tl.int64) * stride, mask=here, other=0.0))  # (TILE,)


@triton.jit
def wait_for_programs(arrived, splits):
    """Wait until all programs of a head are here. What they wrote before can be read then."""
    tl.debug_barrier()
    if splits > 1:
        tl.atomic_add(arrived, 1, sem="release")
        while tl.atomic_add(arrived, 0, sem="acquire") < splits:
            pass
        tl.debug_barrier()


@triton.jit(do_not_specialize=["each", "rows", "heads", "per_split", "line", "stride_b", "stride_h"])
def _choose(
    scores,
    quotas,
    each,
    work,
    tallies,
    known,
    chosen,
    rows,
    heads,
    stride_b,
    stride_h,
    stride_n,
    per_split,
    line,
    LIST: tl.constexpr,
    FLAT: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ONE: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
):
    """Choose the rows above the quota-th largest number, and the first rows that equal it, as many as fit the quota.

    They are marked in `chosen` (B·H, n). LIST: their indices are written there, each head's `line` places behind those
    of the head before. FLAT: the rows of all heads are counted together. ONE: a program has at most TILE rows and keeps
    their numbers in registers.

    The programs of a head wait for each other between the phases from BEGIN to END. All of them run at once, because a
    GPU starts programs in the order of their numbers, those of a head follow each other, and earlier heads end on their
    own. Those of a head must fit beside what else waits on the GPU. Where programs run one after the other, each phase
    is a launch, and `known` (B·H, PHASES, 2) carries over what was found.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    quota = _load_quota(quotas, each, head)
    scores += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    work += head * LINE
    known += head * PHASES * 2
    tallies += head.to(tl.int64) * SPLITS * 257
    begin, stop = split * per_split, min((split + 1) * per_split, rows)
    row, here, number = _load_head(scores, begin, rows, stride_n, TILE)  # of the first tile
    bins = tl.arange(0, 256)
    start, room = tl.full((), 0, tl.uint32), tl.minimum(tl.maximum(quota, 0), rows).to(tl.int32)
    if BEGIN > 1:
        start = tl.load(known + 2 * (BEGIN - 1)).to(tl.uint32)
        room = tl.load(known + 2 * (BEGIN - 1) + 1).to(tl.int32)
    for phase in tl.static_range(BEGIN, END):
        if phase > BEGIN:
            wait_for_programs(work + 3 * 256 + phase, SPLITS)
        if phase > 0 and phase < 4:
            digits = tl.load(work + (phase - 1) * 256 + bins, cache_modifier=".cg")  # (256,)
            start, room = _find_digit(digits, start, room)
        if phase < 3:
            for first in range(begin, stop, TILE):
                if not ONE:
                    row, here, number = _load_head(scores, first, rows, stride_n, TILE)
                alike = here
                if phase > 0:
                    alike &= (number >> (32 - 8 * phase)) == start
                _count_digits(number, alike, 24 - 8 * phase, work + phase * 256)
        elif phase == 3:
            last, above = tl.zeros((256,), tl.int32), tl.full((), 0, tl.int32)
            for first in range(begin, stop, TILE):
                if not ONE:
                    row, here, number = _load_head(scores, first, rows, stride_n, TILE)
                tl.debug_barrier()  # see `_count_digits`
                last += tl.histogram((number & 255).to(tl.int32), 256, mask=here & ((number >> 8) == start))
                above += tl.sum((here & ((number >> 8) > start)).to(tl.int32))
            tl.store(tallies + split * 257 + bins, last)
            tl.store(tallies + split * 257 + 256, above)
        else:
            other = tl.arange(0, SPLITS)
            all_tallies = tl.load(tallies + other[:, None] * 257 + bins[None], cache_modifier=".cg")  # (SPLITS, 256)
            start, room = _find_digit(tl.sum(all_tallies, 0), start, room)
            is_it, earlier = bins == (start & 255).to(tl.int32), other < split
            equal = tl.sum(tl.where(earlier, tl.sum(tl.where(is_it[None], all_tallies, 0), 1), 0))
            place, base = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
            if LIST:  # after the rows that earlier splits write
                above = tl.load(tallies + other * 257 + 256, cache_modifier=".cg")  # (SPLITS,)
                above += tl.sum(tl.where((bins > (start & 255).to(tl.int32))[None], all_tallies, 0), 1)
                place += head.to(tl.int64) * line + tl.sum(tl.where(earlier, above, 0)) + tl.minimum(equal, room)
                base += head.to(tl.int64) * rows if FLAT else 0
            marks = chosen + head.to(tl.int64) * rows
            for first in range(begin, stop, TILE):
                if not ONE:
                    row, here, number = _load_head(scores, first, rows, stride_n, TILE)
                equals = (here & (number == start)).to(tl.int32)
                rank = equal + tl.cumsum(equals, 0)
                stays = (number > start) | ((equals == 1) & (rank <= room))
                if LIST:
                    kept = (stays & here & (quota > 0)).to(tl.int32)
                    tl.store(chosen + place + tl.cumsum(kept, 0) - 1, base + row, mask=kept == 1)
                    place += tl.sum(kept)
                else:
                    tl.store(marks + row, (stays & (quota > 0)).to(tl.uint8), mask=here)
                equal += tl.sum(equals)
    if END < PHASES and split == 0:
        tl.store(known + 2 * (END - 1), start.to(tl.int64))
        tl.store(known + 2 * (END - 1) + 1, room.to(tl.int64))


def split_rows(rows: int) -> tuple[int, int]:
    """Return into how many splits the rows of a head are cut, and the rows of a split, a multiple of HEAD."""
    splits = next((some for some in SPLITS if rows <= some * HEAD), SPLITS[-1])
    return splits, triton.cdiv(triton.cdiv(rows, splits), HEAD) * HEAD


def choose_by_digits(
    scores: Tensor,
    quotas: Tensor | int,
    chosen: Tensor,
    line: int = 0,
    counted: Tensor | None = None,
    most: int | None = None,
    **more: bool,
) -> None:
    """Choose the quota-th largest scores of each head.

    Args:
        scores: (B, H, n)
        quotas: (B, H), or one number for all heads.
        chosen: Gets what `_choose` writes.
        line: See `_choose`.
        counted: The work of each head, (B·H, LINE) int32, if the first digits have been counted there already.
        most: The largest number that counts if each head has its own; None for all rows.
        more: Constants of `_choose`.
    """
    batch, heads, rows = scores.shape
    (splits, per_split), lines, device = split_rows(rows), batch * heads, scores.device
    first, work = 1, counted
    if work is None:
        first, work = 0, torch.zeros(lines, LINE.value, dtype=torch.int32, device=device)
    tallies = torch.empty(lines, splits, 257, dtype=torch.int32, device=device)
    known = torch.empty(lines, PHASES.value, 2, dtype=torch.int64, device=device)
    head_quotas, each = (
        (None, quotas) if isinstance(quotas, int) else (quotas.contiguous(), rows if most is None else most)
    )
    given = scores, head_quotas, each, work, tallies, known, chosen, rows, heads, *scores.stride(), per_split, line
    apart, tile = is_interpreting() and splits > 1, HEAD if rows > HEAD // 2 else HEAD // 2
    for begin, end in [(n, n + 1) for n in range(first, PHASES.value)] if apart else [(first, PHASES.value)]:
        _choose[splits, lines](
            *given,
            **more,
            SPLITS=splits,
            TILE=tile,
            ONE=per_split == HEAD,
            BEGIN=begin,
            END=end,
            num_warps=tile // SCORES,
        )


def top_k_mask_triton(scores: Tensor, quotas: Tensor | int) -> Tensor:
    chosen = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if chosen.numel():
        choose_by_digits(scores, quotas, chosen.view(torch.uint8), LIST=False, FLAT=False)
    return chosen


@triton.jit
def _load_numbers(scores, row, rows, stride):
    """Return the numbers of scores, and 0 where there is no score. No score has the number 0."""
    here = row < rows
    # (N,)
    return tl.where(here, score_to_number(tl.load(scores + row.to(tl.int64) * stride, mask=here, other=0.0)), 0)


@triton.jit
def _reach(first, second, number):
    """Count the numbers that are not smaller."""
    return tl.sum((first >= number).to(tl.int32)) + tl.sum((second >= number).to(tl.int32))


@triton.jit
def _write_top(index, numbers, row, low, tied, room, place):
    """Write the indices of the numbers that reach `low`; if `tied`, only `room` of those that equal it.

    Returns:
        The room that is left, and the place after the last index.
    """
    stays = numbers >= low
    if tied:
        equals = (numbers == low).to(tl.int32)
        stays = (numbers > low) | ((equals == 1) & (tl.cumsum(equals, 0) <= room))
        room -= tl.sum(equals)
    kept = stays.to(tl.int32)
    tl.store(index + place + tl.cumsum(kept, 0) - 1, row.to(tl.int64), mask=stays)
    return room, place + tl.sum(kept)


@triton.jit(do_not_specialize=["rows", "k", "heads", "line", "s_b", "s_h"])
def _list_top(
    scores, index, rows, k, heads, line, s_b, s_h, s_n, FLAT: tl.constexpr, TILE: tl.constexpr, MORE: tl.constexpr
):
    """Write the indices of a head's k largest scores: find a number that k scores reach, then list them.

    Each head's indices are `line` places behind those of the head before. FLAT: the rows of all heads are counted
    together.

    Two guesses of three suppose that the logarithm of the number of scores that reach a score falls linearly with it.
    """
    head = tl.program_id(0)
    scores += (head // heads).to(tl.int64) * s_b + (head % heads).to(tl.int64) * s_h
    row, later = tl.arange(0, TILE), TILE + tl.arange(0, MORE)
    first, second = _load_numbers(scores, row, rows, s_n), _load_numbers(scores, later, rows, s_n)
    none = 0xFFFFFFFF
    least = tl.min(tl.where(first > LEAST, first, none), 0)  # of the scores that are not -inf
    low = tl.minimum(least, tl.min(tl.where(second > LEAST, second, none), 0))
    reached = _reach(first, second, low)
    enough = reached >= k
    low, reached = tl.where(enough, low, LEAST), tl.where(enough, reached, rows)
    high = tl.maximum(tl.max(first, 0), tl.max(second, 0))  # k scores reach `low`, and fewer reach `high` + 1
    beyond, guesses = tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
    while (low < high) & (reached != k):
        share = tl.log(reached.to(tl.float32) / k) / tl.log(reached.to(tl.float32) / beyond)
        share = tl.where(guesses % 3 == 2, 0.5, tl.minimum(tl.maximum(share, 0.03), 0.97))
        below, above = (
            number_to_score(tl.minimum(tl.maximum(low, LEAST + 1), MOST)),
            number_to_score(tl.minimum(high, MOST)),
        )  # finite
        middle = score_to_number(below * (1 - share) + above * share)
        middle = tl.where(guesses < GUESSES, middle, high - (high - low) // 2)
        middle = tl.minimum(tl.maximum(middle, low + 1), high)
        count = _reach(first, second, middle)
        guesses += 1
        low, reached = tl.where(count >= k, middle, low), tl.where(count >= k, count, reached)
        high, beyond = tl.where(count >= k, high, middle - 1), tl.where(count >= k, beyond, tl.maximum(count, 1))
    tied = reached > k  # then `low` is the k-th largest, and others equal it
    room = k
    if tied:
        equal = tl.sum((first == low).to(tl.int32)) + tl.sum((second == low).to(tl.int32))
        room = k - (reached - equal)
    place, base = head.to(tl.int64) * line, head.to(tl.int64) * rows if FLAT else 0
    room, place = _write_top(index, first, base + row, low, tied, room, place)
    _write_top(index, second, base + later, low, tied, room, place)


@triton.jit(do_not_specialize=["rows", "heads", "line", "s_b", "s_h"])
def _list_few(scores, index, rows, heads, line, s_b, s_h, s_n, K: tl.constexpr, FLAT: tl.constexpr, TILE: tl.constexpr):
    """Write the indices of a head's K largest scores (`_list_top`): take the largest one K times.

    A key holds the number of a score in its high bits and 2^20 - 1 - row in its low bits. So no two keys are equal, and
    of equal scores the lower row has the larger key.
    """
    head = tl.program_id(0)
    scores += (head // heads).to(tl.int64) * s_b + (head % heads).to(tl.int64) * s_h
    row = tl.arange(0, TILE)
    key = (_load_numbers(scores, row, rows, s_n).to(tl.int64) << 20) + ((1 << 20) - 1 - row)
    last = tl.max(key, 0)
    for _ in tl.static_range(K - 1):
        last = tl.max(tl.where(key < last, key, 0), 0)
    kept = (key >= last).to(tl.int32)
    place, base = head.to(tl.int64) * line, head.to(tl.int64) * rows if FLAT else 0
    tl.store(index + place + tl.cumsum(kept, 0) - 1, base + row.to(tl.int64), mask=kept == 1)


def top_k_indices_triton(scores: Tensor, k: int, flat: bool, counts: Tensor | None, into: Tensor | None) -> Tensor:
    index = into
    if index is None:
        index = torch.empty(*scores.shape[:2], k, dtype=torch.int64, device=scores.device)
        index = index if counts is None else index.fill_(-1)
    if counts is not None:
        choose_by_digits(scores, counts, index, index.stride(1), most=k, LIST=True, FLAT=False)
        return index
    list_top(scores, index, flat)
    return index.flatten() if flat else index


def list_top(scores: Tensor, index: Tensor, flat: bool = False, counted: Tensor | None = None) -> None:
    """Write the indices of each head's k largest scores, ascending.

    Args:
        scores: (B, H, n)
        index: Gets the indices, (B, H, k). The lists of all heads lie at equal distances.
        flat: Whether the rows of all heads are counted together.
        counted: See `choose_by_digits`. Used only if no program can hold the scores of a head (SINGLE).
    """
    (batch, heads, rows), (k, line) = scores.shape, (index.shape[2], index.stride(1))
    if rows > SINGLE:
        choose_by_digits(scores, k, index, line, counted, LIST=True, FLAT=flat)
        return
    if k <= FEW and rows <= SIZES[-1][0]:
        tile = max(HELD, triton.next_power_of_2(rows))
        _list_few[batch * heads,](
            scores, index, rows, heads, line, *scores.stride(), K=k, FLAT=flat, TILE=tile, num_warps=tile // HELD
        )
        return
    tile, more = next(sizes for sizes in SIZES if rows <= sum(sizes))
    _list_top[batch * heads,](
        scores, index, rows, k, heads, line, *scores.stride(), FLAT=flat, TILE=tile, MORE=more, num_warps=8
    )


@triton.jit(do_not_specialize=["rows", "heads", "stride_b", "stride_h"])
def _join_heads(
    products,
    window,
    out,
    work,
    rows,
    heads,
    stride_b,
    stride_h,
    stride_n,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Find the largest of all heads' products with some rows, and count the first digits."""
    b, row = tl.program_id(1), tl.program_id(0) * N + tl.arange(0, N)
    best, here = tl.zeros((N,), tl.uint32), row < rows
    products += b.to(tl.int64) * stride_b
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        at = products + head[:, None].to(tl.int64) * stride_h + row[None].to(tl.int64) * stride_n
        some = tl.load(at, mask=(head < heads)[:, None] & here[None], other=float("-inf"))  # (HEADS, N)
        best = tl.maximum(best, tl.max(score_to_number(some), 0))
    if WINDOW:
        best = tl.where((row >= tl.load(window)) & (row < tl.load(window + 1)), best, LEAST)
    tl.store(out + b.to(tl.int64) * rows + row, number_to_score(best), mask=here)
    _count_digits(best, here, 24, work + b * LINE)


def top_k_of_heads_triton(
    products: Tensor, k: int, window: Tensor | None, counts: Tensor | None, into: Tensor
) -> Tensor:
    batch, heads, rows = products.shape
    scores = torch.empty(batch, 1, rows, dtype=torch.float32, device=products.device)
    work = torch.zeros(batch, LINE.value, dtype=torch.int32, device=products.device)
    _join_heads[triton.cdiv(rows, JOINED), batch](
        products,
        None if window is None else window.contiguous(),
        scores,
        work,
        rows,
        heads,
        *products.stride(),
        WINDOW=window is not None,
        N=JOINED,
        HEADS=HEADS,
        num_warps=4,
    )
    if counts is None:
        list_top(scores, into, counted=work)
    else:
        choose_by_digits(scores, counts, into, into.stride(1), work, most=k, LIST=True, FLAT=False)
    return into


@triton.jit(do_not_specialize=["size"])
def _count_marks(marks, counts, size, TILE: tl.constexpr):
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(counts + tile, tl.sum(tl.load(marks + place, mask=place < size, other=0).to(tl.int32)))  # (TILE,)


@triton.jit(do_not_specialize=["size", "total"])
def _write_places(marks, counts, places, size, total, TILE: tl.constexpr):
    tile = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    for first in range(0, tile, 1024):
        other = first + tl.arange(0, 1024)
        before += tl.sum(tl.load(counts + other, mask=other < tile, other=0).to(tl.int64))  # (1024,)
    place = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    mark = tl.load(marks + place, mask=place < size, other=0).to(tl.int32)  # (TILE,)
    slot = before + tl.cumsum(mark, 0) - 1
    tl.store(places + slot, place, mask=(mark == 1) & (slot < total))


def kept_indices_triton(kept: Tensor, total: int | None) -> Tensor:
    marks = kept.contiguous().view(torch.uint8)
    tiles = triton.cdiv(marks.numel(), TILE)
    counts = torch.empty(tiles, dtype=torch.int32, device=kept.device)
    if tiles:
        _count_marks[tiles,](marks, counts, marks.numel(), TILE=TILE)
    total = int(marks.sum()) if total is None else total
    places = torch.zeros(total, dtype=torch.int64, device=kept.device)  # zeros in case the total is wrong
    if total:
        _write_places[tiles,](marks, counts, places, marks.numel(), total, TILE=TILE)
    return places


@triton.jit(do_not_specialize=["total", "heads", "rows", "each"])
def _copy(
    index,
    keys,
    values,
    new_keys,
    new_values,
    total,
    heads,
    rows,
    dim,
    each,
    new_h,
    k_b,
    k_h,
    k_n,
    k_d,
    v_b,
    v_h,
    v_n,
    v_d,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(index + slot, mask=slot < total, other=0)  # (ROWS,)
    head, row = place // rows, place % rows
    batch, head = head // heads, head % heads
    column = tl.arange(0, DIM)[None]
    here = (slot < total)[:, None] & (column < dim)
    out = (slot // each * new_h + slot % each * dim)[:, None] + column
    k = (batch * k_b + head * k_h + row * k_n)[:, None] + column * k_d
    v = (batch * v_b + head * v_h + row * v_n)[:, None] + column * v_d
    tl.store(new_keys + out, tl.load(keys + k, mask=here), mask=here)  # (ROWS, DIM)
    tl.store(new_values + out, tl.load(values + v, mask=here), mask=here)  # (ROWS, DIM)


def gather_rows_triton(
    index: Tensor, keys: Tensor, values: Tensor, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    total, (_, heads, rows, dim) = len(index), keys.shape
    new = into or (keys.new_empty(total, dim), values.new_empty(total, dim))
    each, new_h = (total, 0) if into is None else (into[0].shape[2], into[0].stride(1))
    if total:
        _copy[triton.cdiv(total, ROWS),](
            index.contiguous(),
            keys,
            values,
            *new,
            total,
            heads,
            rows,
            dim,
            each,
            new_h,
            *keys.stride(),
            *values.stride(),
            ROWS=ROWS,
            DIM=triton.next_power_of_2(dim),
        )
    return new
