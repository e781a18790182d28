"""The rows with the largest scores where a row has two codes, without a score for each row.

A row's score follows from its pair of codes, and a head has few pairs (`count_pairs`). `_rank_pairs` scores the pairs
instead of the rows, weighs each with the number of its rows, and finds the pairs whose rows are all listed, and those
that have the score of the last listed row. `_list_pairs` lists the rows by their pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.product_quantization.centroids import find_width, round_up
from kvbench.kernels.row_selection.triton import score_to_number, wait_for_programs
from kvbench.kernels.softmax_extras import SoftmaxExtras

LOG2E = 1.4426950408889634
CENTROIDS = 64  # centroids that a program multiplies or compares at once
MORE = 256  # further rows whose pairs are counted at once
TILE = 4096  # rows whose pairs a program looks up at once
MOST = 64  # programs that list the rows of a head
NEAR = 1 << 18  # bounds at most this far apart are near
STEPS = 12  # most numbers between near bounds that are looked at one by one
COUNTED = 21  # bits of a number of rows. Three such numbers are added up as one


@triton.jit
def find_nearest_centroid(key, codebook, count, size, stride, N: tl.constexpr, E: tl.constexpr):
    """Return the centroid of codebook (count, size) nearest to a key (size,), the first of equally near ones."""
    column = tl.arange(0, E)
    key = tl.load(key + column * stride, mask=column < size, other=0.0).to(tl.float32)  # (E,)
    best, best_code = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for begin in range(0, count, N):
        code = begin + tl.arange(0, N)
        here = (code < count)[:, None] & (column < size)[None]
        # (N, E)
        centroid = tl.load(codebook + code[:, None] * size + column[None], mask=here, other=0.0).to(tl.float32)
        nearness = tl.where(code < count, tl.sum(centroid * (2 * key[None] - centroid), 1), float("-inf"))
        largest = tl.max(nearness, 0)
        nearest = tl.min(tl.where(nearness == largest, code, 256), 0)
        best_code = tl.where(largest > best, nearest, best_code)
        best = tl.maximum(best, largest)
    return best_code.to(tl.uint8)


@triton.jit
def _load_pairs(codes, row, here, first, c_m, WIDE: tl.constexpr):
    """Return the pairs of rows (N,); 0 for those that are not `here`. `codes` points to those of row `first`."""
    one = tl.load(codes + (row - first), mask=here, other=0).to(tl.int32)  # (N,)
    return one * WIDE + tl.load(codes + c_m + (row - first), mask=here, other=0).to(tl.int32)  # (N,)


@triton.jit
def _narrow(numbers, rows, k, low, high, COUNTED: tl.constexpr):
    """Return nearer bounds, from the counts (int64) of the rows that reach three numbers between them.

    A sum over all threads takes longer than its terms, so the three counts are added up as one number.
    """
    fourth, most = (high - low) // 4 + 1, (1 << COUNTED) - 1
    reach = tl.where(numbers >= low + fourth, rows, 0) + (tl.where(numbers >= low + 2 * fourth, rows, 0) << COUNTED)
    reach = tl.sum(reach + (tl.where(numbers >= low + 3 * fourth, rows, 0) << 2 * COUNTED), 0)
    one, two, three = reach & most, (reach >> COUNTED) & most, reach >> 2 * COUNTED
    enough = (one >= k).to(tl.uint32) + (two >= k).to(tl.uint32) + (three >= k).to(tl.uint32)
    low += enough * fourth
    return low, tl.where(enough == 3, high, tl.minimum(high, low + fourth - 1))


@triton.jit
def _find_last(numbers, rows, k, COUNTED: tl.constexpr, NEAR: tl.constexpr, STEPS: tl.constexpr):
    """Return the number of the k-th row in descending order. `rows` says how many rows have each of the numbers.

    Between near bounds there are mostly few pairs, so the largest ones are looked at one by one before the bounds are
    narrowed further.
    """
    low = tl.min(tl.where(numbers > 0, numbers, 0xFFFFFFFF), 0).to(tl.uint32)
    high = tl.max(numbers, 0)  # k rows reach `low`, and fewer reach `high` + 1
    wide, steps = rows.to(tl.int64), tl.full((), 0, tl.int32)
    while low + NEAR < high:
        low, high = _narrow(numbers, wide, k, low, high, COUNTED)
    while (low < high) & (steps < STEPS):
        largest = tl.max(tl.where(numbers <= high, numbers, 0), 0)
        enough = tl.sum(tl.where(numbers >= largest, rows, 0), 0) >= k
        low, high = tl.where(enough, largest, low), tl.where(enough, largest, largest - 1)
        steps += 1
    while low < high:
        low, high = _narrow(numbers, wide, k, low, high, COUNTED)
    return low


@triton.jit
def _multiply(
    query, codebook, code, column, there, count, size, scale, G: tl.constexpr, M: tl.constexpr, CAST: tl.constexpr
):
    """Return logits (W, G) in base 2 of the centroids `code` (W,) for queries (M, E). Those from G on are 0."""
    where = (code < count)[:, None] & there
    centroid = tl.load(codebook + code[:, None] * size + column[None], mask=where, other=0.0)  # (W, E)
    if CAST:
        query, centroid = query.to(tl.float32), centroid.to(tl.float32)
    product = tl.dot(centroid, tl.trans(query), input_precision="ieee") * scale  # (W, M)
    return tl.sum(tl.reshape(product, [code.shape[0], M // G, G]), 1)


@triton.jit(do_not_specialize=["heads", "count", "first", "counted", "k", "c_b", "c_h", "c_m", "k_b", "k_h"])
def _rank_pairs(
    queries,
    codebook,
    keys,
    codes,
    counts,
    totals,
    stop,
    last,
    classes,
    rooms,
    arrived,
    heads,
    group,
    count,
    size,
    first,
    counted,
    k,
    scale,
    q_b,
    q_h,
    q_d,
    k_b,
    k_h,
    k_n,
    k_d,
    c_b,
    c_h,
    c_m,
    WIDE: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    CENTROIDS: tl.constexpr,
    COUNTED: tl.constexpr,
    NEAR: tl.constexpr,
    STEPS: tl.constexpr,
    CAST: tl.constexpr,
    AHEAD: tl.constexpr,
    CAP: tl.constexpr,
):
    """Write the class of each pair of a head (B·H, W·W), and for how many rows of class 1 there is room.

    A pair is of class 2 if its score is above that of the k-th row, of class 1 if it is that score, otherwise of class
    0. `counts` (B·H, W·W) are those of the rows from `first` to `counted`. With those of later candidates they are
    `totals`. The last two programs of a head find the codes of row `last` of the keys instead. With AHEAD,
    `_list_pairs` may begin at once.
    """
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    part, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = line // heads, line % heads
    codes += b * c_b + h * c_h
    codebook += line * 2 * count * size
    column = tl.arange(0, E)
    there = (column < size)[None]
    if part > 0:
        newest, book = tl.load(last).to(tl.int64), codebook + (part - 1) * count * size
        key = keys + b * k_b + h * k_h + newest * k_n + (part - 1) * size * k_d
        nearest = find_nearest_centroid(key, book, count, size, k_d, CENTROIDS, E)
        tl.store(codes + (part - 1) * c_m + newest - first, nearest)
    else:
        tl.store(arrived + line, 0)
        pair, code, member = tl.arange(0, WIDE * WIDE), tl.arange(0, WIDE), tl.arange(0, M)
        rows = tl.load(counts + line * WIDE * WIDE + pair)  # (WIDE * WIDE,)
        stop_row = tl.load(stop).to(tl.int32)
        head_totals = totals + line * WIDE * WIDE
        tl.store(head_totals + pair, rows)
        tl.debug_barrier()
        for begin in range(counted, stop_row, N):
            row = begin + tl.arange(0, N)
            here = row < stop_row
            tl.atomic_add(head_totals + _load_pairs(codes, row, here, first, c_m, WIDE), 1, mask=here, sem="relaxed")
        at = queries + b * q_b + (h * group + member)[:, None] * q_h + column[None] * q_d
        asking = (member < group)[:, None] & there
        one, two = tl.load(at, mask=asking, other=0.0), tl.load(at + size * q_d, mask=asking, other=0.0)  # (M, E)
        logits = _multiply(one, codebook, code, column, there, count, size, scale, G, M, CAST)[:, None]
        more = _multiply(two, codebook + count * size, code, column, there, count, size, scale, G, M, CAST)
        logits = cap_tile(tl.reshape(logits + more[None], [WIDE * WIDE, G]), CAP)
        tl.debug_barrier()
        rows = tl.load(head_totals + pair, cache_modifier=".cg")  # (WIDE * WIDE,)
        logits = tl.where((rows > 0)[:, None] & (tl.arange(0, G) < group)[None], logits, float("-inf"))
        most = tl.max(logits, 0)
        most = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(rows.to(tl.float32)[:, None] * tl.exp2(logits - most[None]), 0)
        whole = most + tl.log2(tl.where(total > 0, total, 1.0))
        numbers = tl.where(rows > 0, score_to_number(tl.sum(tl.exp2(logits - whole[None]), 1)), 0)
        low = _find_last(numbers, rows, k, COUNTED, NEAR, STEPS)
        above = tl.sum(tl.where(numbers > low, rows, 0))
        pair_classes = tl.where(numbers > low, 2, tl.where(numbers == low, 1, 0))
        tl.store(classes + line * WIDE * WIDE + pair, pair_classes.to(tl.uint8))
        tl.store(rooms + line, k - above)


@triton.jit
def _load_tile(codes, start, end, first, c_m, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Return some rows, and their pairs; 0 from row `end` on."""
    row = start + tl.arange(0, TILE)
    return row, _load_pairs(codes, row, row < end, first, c_m, WIDE)


@triton.jit
def _load_classes(classes, row, pair, end):
    """Return the classes of rows; 0 from row `end` on."""
    return tl.load(classes + pair, mask=row < end, other=0).to(tl.int32)  # (TILE,)


@triton.jit
def _write_rows(rows, row, row_classes, equal, room, place):
    """Write the rows that stay, and return how many rows of class 1 there were so far, and the place behind."""
    equals = (row_classes == 1).to(tl.int32)
    stays = (row_classes == 2) | ((equals == 1) & (equal + tl.cumsum(equals, 0) <= room))
    kept = stays.to(tl.int32)
    tl.store(rows + place + tl.cumsum(kept, 0) - 1, row.to(tl.int64), mask=stays)
    return equal + tl.sum(equals), place + tl.sum(kept)


@triton.jit(do_not_specialize=["heads", "first", "per_split", "splits", "line", "c_b", "c_h", "c_m"])
def _list_pairs(
    codes,
    classes,
    rooms,
    arrived,
    tallies,
    stop,
    rows,
    heads,
    first,
    per_split,
    splits,
    line,
    c_b,
    c_h,
    c_m,
    WIDE: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    ONE: tl.constexpr,
    AHEAD: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
):
    """Write the rows of class 2, and the first ones of class 1 that there is room for, each head's `line` places behind
    those of the head before.

    The programs of a head count first and write afterwards, as in `_choose` of kernels.row_selection. With ONE each has
    at most TILE rows, whose classes it then keeps in registers. With AHEAD, `_rank_pairs` may still run when it begins,
    so that the pairs of these rows are there when the classes are.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    codes += (head // heads).to(tl.int64) * c_b + (head % heads).to(tl.int64) * c_h
    classes += head * WIDE * WIDE
    tallies += head * splits * 2
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, tl.load(stop).to(tl.int32))
    above, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if ONE:
        row, pair = _load_tile(codes, begin, end, first, c_m, WIDE, TILE)
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    room = tl.load(rooms + head)
    if ONE:
        row_classes = _load_classes(classes, row, pair, end)
        above, equal = tl.sum((row_classes == 2).to(tl.int32)), tl.sum((row_classes == 1).to(tl.int32))
    elif BEGIN == 0:
        for start in range(begin, end, TILE):
            row, pair = _load_tile(codes, start, end, first, c_m, WIDE, TILE)
            some = _load_classes(classes, row, pair, end)
            above += tl.sum((some == 2).to(tl.int32))
            equal += tl.sum((some == 1).to(tl.int32))
    if BEGIN == 0:
        tl.store(tallies + 2 * split, above)
        tl.store(tallies + 2 * split + 1, equal)
    if BEGIN == 0 and END == 2:
        wait_for_programs(arrived + head, splits)
    if END == 2:
        other = tl.arange(0, MOST)
        earlier = other < split
        above = tl.sum(tl.load(tallies + 2 * other, mask=earlier, other=0, cache_modifier=".cg"))  # (MOST,)
        equal = tl.sum(tl.load(tallies + 2 * other + 1, mask=earlier, other=0, cache_modifier=".cg"))  # (MOST,)
        place = head.to(tl.int64) * line + above + tl.minimum(equal, room)
        if ONE:
            _write_rows(rows, row, row_classes, equal, room, place)
        else:
            for start in range(begin, end, TILE):
                row, pair = _load_tile(codes, start, end, first, c_m, WIDE, TILE)
                row_classes = _load_classes(classes, row, pair, end)
                equal, place = _write_rows(rows, row, row_classes, equal, room, place)


def list_by_pairs(
    queries: Tensor,
    keys: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    last: Tensor,
    rows: Tensor,
    counts: Tensor,
    counted: int,
    extras: SoftmaxExtras | None,
) -> None:
    """List the k candidates with the largest scores, of which there are at least k, and find the newest row's codes.

    Args:
        queries: As of `choose_by_codes`.
        keys: As of `choose_by_codes`.
        codes: As of `choose_by_codes`.
        codebook: As of `choose_by_codes`.
        scaling: As of `choose_by_codes`.
        first: As of `choose_by_codes`.
        stop: As of `choose_by_codes`, at least `counted`.
        last: As of `choose_by_codes`.
        rows: As of `choose_by_codes`.
        counts: `count_pairs` of the codes of the rows from `first` to `counted`.
        counted: The row after the last one in `counts`, at least first + k.
        extras: As of `choose_by_codes`.
    """
    batch, heads, _, count, size = codebook.shape
    group, lines, wide, device = queries.shape[1] // heads, batch * heads, find_width(count), codes.device
    grouped, strides = round_up(group), codes.stride()[:3]
    splits = min(MOST, triton.cdiv(codes.shape[3], TILE))
    per_split = triton.cdiv(triton.cdiv(codes.shape[3], splits), TILE) * TILE
    classes = torch.empty(lines, wide * wide, dtype=torch.uint8, device=device)
    rooms, arrived = (torch.empty(lines, dtype=torch.int32, device=device) for _ in range(2))
    tallies = torch.empty(lines, splits, 2, dtype=torch.int32, device=device)
    nvidia = torch.version.hip is None and not is_interpreting()
    ahead = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)  # programmatic dependent launch
    _rank_pairs[3, lines](
        queries,
        codebook.contiguous(),
        keys,
        codes,
        counts,
        torch.empty_like(counts),
        stop,
        last,
        classes,
        rooms,
        arrived,
        heads,
        group,
        count,
        size,
        first,
        counted,
        rows.shape[2],
        scaling * LOG2E,
        *queries.stride(),
        *keys.stride(),
        *strides,
        WIDE=wide,
        G=grouped,
        M=max(16, grouped),
        E=max(16, round_up(size)),
        N=MORE,
        CENTROIDS=CENTROIDS,
        COUNTED=COUNTED,
        NEAR=NEAR,
        STEPS=STEPS,
        CAST=is_interpreting() and queries.dtype == torch.bfloat16,
        AHEAD=ahead,
        CAP=find_cap(extras),
        num_warps=8 if wide * wide * grouped > 4096 else 4,
    )
    given = codes, classes, rooms, arrived, tallies, stop, rows, heads, first, per_split, splits
    apart = is_interpreting() and splits > 1  # the interpreter runs programs one after the other, so they cannot wait
    for begin, end in ((0, 1), (1, 2)) if apart else ((0, 2),):
        _list_pairs[splits, lines](
            *given,
            rows.stride(1),
            *strides,
            WIDE=wide,
            MOST=MOST,
            TILE=TILE,
            ONE=per_split == TILE,
            AHEAD=ahead,
            BEGIN=begin,
            END=end,
            num_warps=8,
            **({"launch_pdl": True} if ahead else {}),
        )
