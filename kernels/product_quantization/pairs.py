"""The rows with the largest scores where a row has two codes, without a score for each row.

A row's score follows from its pair of codes, and a head has few pairs (`count_pairs`). `_rank_pairs` scores the pairs
instead of the rows, weighs each with the number of its rows, and finds the pairs whose rows are all listed, and those
that have the score of the last listed row. `_list_pairs` lists the rows by their pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.product_quantization.centroids import find_width
from kvbench.kernels.row_selection.triton import TILE, _number, _wait, split_rows

MORE = 256  # further rows whose pairs are counted at once


@triton.jit
def _load_pairs(codes, row, here, first, c_m, WIDE: tl.constexpr):
    """Return the pairs of rows (N,); 0 for those that are not `here`. `codes` points to those of row `first`."""
    one = tl.load(codes + (row - first), mask=here, other=0).to(tl.int32)
    return one * WIDE + tl.load(codes + c_m + (row - first), mask=here, other=0).to(tl.int32)


@triton.jit
def _reach(numbers, rows, low):
    """Count the rows of the pairs whose numbers are not below `low`."""
    return tl.sum(tl.where(numbers >= low, rows, 0))


@triton.jit(do_not_specialize=["heads", "count", "first", "counted", "k", "c_b", "c_h", "c_m"])
def _rank_pairs(
    codes, tables, counts, totals, stop, classes, rooms, arrived, heads, group, count, first, counted, k, c_b, c_h, c_m,
    WIDE: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the class of each pair of a head (B·H, W·W), and for how many rows of class 1 there is room.

    A pair is of class 2 if its score is above that of the k-th row, of class 1 if it is that score, otherwise of class
    0. `counts` (B·H, W·W) are those of the rows from `first` to `counted`. With those of later candidates they are
    `totals`.
    """
    line = tl.program_id(0)
    tl.store(arrived + line, 0)
    codes += (line // heads).to(tl.int64) * c_b + (line % heads).to(tl.int64) * c_h
    pair, member = tl.arange(0, WIDE * WIDE), tl.arange(0, G)
    rows = tl.load(counts + line.to(tl.int64) * WIDE * WIDE + pair)
    last = tl.load(stop).to(tl.int32)
    own = totals + line.to(tl.int64) * WIDE * WIDE
    tl.store(own + pair, rows)
    tl.debug_barrier()
    for begin in range(counted, last, N):
        row = begin + tl.arange(0, N)
        here = row < last
        tl.atomic_add(own + _load_pairs(codes, row, here, first, c_m, WIDE), 1, mask=here, sem="relaxed")
    tl.debug_barrier()
    rows = tl.load(own + pair, cache_modifier=".cg")
    there = (rows > 0)[:, None] & (member < group)[None]
    table = tables + line.to(tl.int64) * 2 * count * G + member[None]
    logits = tl.load(table + (pair // WIDE)[:, None] * G, mask=there, other=float("-inf"))
    logits += tl.load(table + (count + pair % WIDE)[:, None] * G, mask=there, other=0.0)
    most = tl.max(logits, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(rows.to(tl.float32)[:, None] * tl.exp2(logits - most[None]), 0)
    whole = most + tl.log2(tl.where(total > 0, total, 1.0))
    numbers = tl.where(rows > 0, _number(tl.sum(tl.exp2(logits - whole[None]), 1)), 0)
    low, high = tl.full((), 1, tl.uint32), tl.max(numbers, 0)  # k rows reach `low`, and fewer reach `high` + 1
    while low < high:
        middle = high - (high - low) // 2
        enough = _reach(numbers, rows, middle) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    above = tl.sum(tl.where(numbers > low, rows, 0))
    found = tl.where(numbers > low, 2, tl.where(numbers == low, 1, 0))
    tl.store(classes + line * WIDE * WIDE + pair, found.to(tl.uint8))
    tl.store(rooms + line, k - above)


@triton.jit(do_not_specialize=["heads", "first", "per_split", "line", "c_b", "c_h", "c_m"])
def _list_pairs(
    codes, classes, rooms, arrived, tallies, stop, found, heads, first, per_split, line, c_b, c_h, c_m,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Write the rows of class 2, and the first ones of class 1 that there is room for, each head's `line` places behind
    those of the head before.

    The programs of a head count first and write afterwards, as in `_choose` of kernels.row_selection.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    codes += (head // heads).to(tl.int64) * c_b + (head % heads).to(tl.int64) * c_h
    classes += head * WIDE * WIDE
    tallies += head * SPLITS * 2
    last, room = tl.load(stop).to(tl.int32), tl.load(rooms + head)
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, last)
    if BEGIN == 0:
        above, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for start in range(begin, end, TILE):
            row = start + tl.arange(0, TILE)
            here = row < end
            own = tl.load(classes + _load_pairs(codes, row, here, first, c_m, WIDE), mask=here, other=0)
            above += tl.sum((own == 2).to(tl.int32))
            equal += tl.sum((own == 1).to(tl.int32))
        tl.store(tallies + 2 * split, above)
        tl.store(tallies + 2 * split + 1, equal)
    if BEGIN == 0 and END == 2:
        _wait(arrived + head, SPLITS)
    if END == 2:
        other = tl.arange(0, SPLITS)
        earlier = other < split
        above = tl.sum(tl.where(earlier, tl.load(tallies + 2 * other, cache_modifier=".cg"), 0))
        equal = tl.sum(tl.where(earlier, tl.load(tallies + 2 * other + 1, cache_modifier=".cg"), 0))
        place = head.to(tl.int64) * line + above + tl.minimum(equal, room)
        for start in range(begin, end, TILE):
            row = start + tl.arange(0, TILE)
            here = row < end
            own = tl.load(classes + _load_pairs(codes, row, here, first, c_m, WIDE), mask=here, other=0)
            equals = (own == 1).to(tl.int32)
            stays = (own == 2) | ((equals == 1) & (equal + tl.cumsum(equals, 0) <= room))
            kept = stays.to(tl.int32)
            tl.store(found + place + tl.cumsum(kept, 0) - 1, row.to(tl.int64), mask=stays)
            place += tl.sum(kept)
            equal += tl.sum(equals)


def list_by_pairs(
    tables: Tensor, codes: Tensor, counts: Tensor, group: int, first: int, counted: int, stop: Tensor, found: Tensor
) -> None:
    """List the k candidates with the largest scores. There are at least k candidates.

    Args:
        tables: Logits in base 2 of each centroid for each query head of a group, (B·H, 2, K, G).
        codes: As of `choose_by_codes`.
        counts: `count_pairs` of the codes of the rows from `first` to `counted`.
        group: Number of query heads of a KV head.
        first: As of `choose_by_codes`.
        counted: The row after the last one in `counts`, at least first + k.
        stop: As of `choose_by_codes`, at least `counted`.
        found: As of `choose_by_codes`.
    """
    (lines, _, count, grouped), heads, wide = tables.shape, codes.shape[1], find_width(tables.shape[2])
    (splits, per_split), device, strides = split_rows(codes.shape[3]), codes.device, codes.stride()[:3]
    classes = torch.empty(lines, wide * wide, dtype=torch.uint8, device=device)
    rooms, arrived = (torch.empty(lines, dtype=torch.int32, device=device) for _ in range(2))
    tallies = torch.empty(lines, splits, 2, dtype=torch.int32, device=device)
    _rank_pairs[lines,](
        codes, tables, counts, torch.empty_like(counts), stop, classes, rooms, arrived, heads, group, count, first,
        counted, found.shape[2], *strides,
        WIDE=wide, G=grouped, N=MORE, num_warps=16 if wide * wide * grouped > 4096 else 4,
    )  # fmt: skip
    given = codes, classes, rooms, arrived, tallies, stop, found, heads, first, per_split, found.stride(1), *strides
    apart = is_interpreting() and splits > 1  # programs run one after the other there and cannot wait
    for begin, end in ((0, 1), (1, 2)) if apart else ((0, 2),):
        _list_pairs[splits, lines](*given, WIDE=wide, SPLITS=splits, TILE=TILE, BEGIN=begin, END=end)
