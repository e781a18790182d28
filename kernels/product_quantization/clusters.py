"""k-means of the sub-vectors of keys, and their nearest centroids, in Triton.

`_assign` finds the nearest centroid of each sub-vector, and for k-means adds up those of each centroid over a span of
rows. `_move` adds up the spans, eight at a time and in a fixed order, and moves the centroids. Keys are read as they
are, so there is no copy of them in float32.

A sub-vector in bfloat16 is multiplied with a centroid on the matrix units. For this a centroid is a sum of PIECES
numbers in bfloat16: with three the products are as exact as in float32. Other keys are multiplied in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting

SPAN = 2048  # rows of a program; it does not depend on the batch, so that sums are always in the same order
SHARE = 16  # centroids that a program moves
SPANS = 8  # spans whose sums are added up at once
FEW = tl.constexpr(64)  # most centroids whose members a program counts at the end; more would not fit its registers
SEARCH = 4096  # distances that are searched at once


@triton.jit
def _cut(centroid, CAST: tl.constexpr):
    """Return numbers in bfloat16 whose sum is the centroid (K, E): the largest, one for the rest, one for its rest."""
    high = centroid.to(tl.bfloat16)
    rest = centroid - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    if CAST:
        return high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
    else:
        return high, middle, low


@triton.jit(do_not_specialize=["rows", "count", "heads", "k_b", "k_h"])
def _assign(
    keys,
    centroids,
    codes,
    distances,
    sums,
    sizes,
    rows,
    count,
    size,
    heads,
    parts,
    k_b,
    k_h,
    k_n,
    k_d,
    K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    SPAN: tl.constexpr,
    PIECES: tl.constexpr,
    CAST: tl.constexpr,
    SUM: tl.constexpr,
):
    """Write the codes of a span of rows, (B·H·m, n); of equally near centroids the first one counts.

    SUM: write, in place of codes, the squared distances of the rows to their centroids, (B·H·m, n), and the sums of the
    rows of each centroid, (spans, B·H·m, K, e), with their numbers, (spans, B·H·m, K).
    """
    span, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, part = line // parts, line % parts
    keys += (head // heads) * k_b + (head % heads) * k_h + part * size * k_d
    code, column = tl.arange(0, K), tl.arange(0, E)
    there = (code < count)[:, None] & (column < size)[None]
    place = code[:, None] * size + column[None]
    centroid = tl.load(centroids + line * count * size + place, mask=there, other=0.0).to(tl.float32)  # (K, E)
    norm = tl.where(code < count, tl.sum(centroid * centroid, 1), float("inf"))
    total, number = tl.zeros((K, E), tl.float32), tl.zeros((K,), tl.int32)
    members = tl.zeros((N, K if K <= FEW else 1), tl.int32)
    if PIECES > 0:
        high, middle, low = _cut(centroid, CAST)
    for start in range(span * SPAN, tl.minimum(rows, span * SPAN + SPAN), N):
        row = start + tl.arange(0, N)
        here = row < rows
        at = row.to(tl.int64)[:, None] * k_n + column[None] * k_d
        point = tl.load(keys + at, mask=here[:, None] & (column < size)[None], other=0.0)  # (N, E)
        product = tl.zeros((N, K), tl.float32)
        if PIECES == 0:
            product = tl.dot(point.to(tl.float32), tl.trans(centroid), product, input_precision="ieee")  # (N, K)
        else:
            exact = point.to(high.dtype)
            if PIECES == 3:
                product = tl.dot(exact, tl.trans(low), product, input_precision="ieee")  # (N, K)
                product = tl.dot(exact, tl.trans(middle), product, input_precision="ieee")  # (N, K)
            product = tl.dot(exact, tl.trans(high), product, input_precision="ieee")  # (N, K)
        nearness = 2 * product - norm[None]
        largest = tl.max(nearness, 1)
        nearest = tl.min(tl.where(nearness == largest[:, None], code[None], count - 1), 1)
        if SUM:
            wide = point.to(tl.float32)
            tl.store(distances + line * rows + row, tl.sum(wide * wide, 1) - largest, mask=here)
            member = (nearest[:, None] == code[None]) & here[:, None]
            if PIECES == 0 or CAST:
                total = tl.dot(tl.trans(member.to(tl.float32)), wide, total, input_precision="ieee")  # (K, E)
            else:
                total = tl.dot(tl.trans(member.to(point.dtype)), point, total)  # (K, E)
            if K <= FEW:
                members += member.to(tl.int32)
            else:
                number += tl.sum(member.to(tl.int32), 0)
        else:
            tl.store(codes + line * rows + row, nearest.to(tl.uint8), mask=here)
    if SUM:
        line += span * tl.num_programs(1)
        tl.store(sums + line * count * size + place, total, mask=there)
        number = tl.sum(members, 0) if K <= FEW else number
        tl.store(sizes + line * count + code, number, mask=code < count)


@triton.jit
def _find_farthest(distances, rows, before, place, SEARCH: tl.constexpr):
    """Return the largest distance that comes after `before`, that of row `place`, and its row.

    Distances are in descending order, and of equal ones the first row comes first.
    """
    most, farthest = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, rows, SEARCH):
        row = start + tl.arange(0, SEARCH)
        distance = tl.load(distances + row, mask=row < rows, other=float("-inf"))  # (SEARCH,)
        behind = (distance < before) | ((distance == before) & (row > place))
        distance = tl.where(behind, distance, float("-inf"))
        largest = tl.max(distance, 0)
        first = tl.min(tl.where(distance == largest, row, rows), 0)
        farthest = tl.where(largest > most, first, farthest)
        most = tl.maximum(most, largest)
    return most, farthest


@triton.jit(do_not_specialize=["rows", "count", "heads", "spans", "k_b", "k_h"])
def _move(
    keys,
    centroids,
    distances,
    sums,
    sizes,
    rows,
    count,
    size,
    heads,
    parts,
    spans,
    k_b,
    k_h,
    k_n,
    k_d,
    K: tl.constexpr,
    E: tl.constexpr,
    SHARE: tl.constexpr,
    SPANS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Move SHARE centroids of a part to the means of their rows, and those without rows to the farthest rows."""
    share, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lines, all_codes, column = tl.num_programs(1), tl.arange(0, K), tl.arange(0, E)
    code, other = share * SHARE + tl.arange(0, SHARE), tl.arange(0, SPANS)
    total, number = tl.zeros((SHARE, E), tl.float32), tl.zeros((SHARE,), tl.int32)
    each = tl.zeros((K,), tl.int32)
    for begin in range(0, spans, SPANS):
        span = begin + other
        base, there = span.to(tl.int64) * lines + line, span < spans
        here = there[:, None] & (code < count)[None]
        at = (base[:, None] * count + code[None])[:, :, None] * size + column[None, None]
        # (SPANS, SHARE, E)
        total += tl.sum(tl.load(sums + at, mask=here[:, :, None] & (column < size)[None, None], other=0.0), 0)
        number += tl.sum(tl.load(sizes + base[:, None] * count + code[None], mask=here, other=0), 0)  # (SPANS, SHARE)
        at = base[:, None] * count + all_codes[None]
        each += tl.sum(tl.load(sizes + at, mask=there[:, None] & (all_codes < count)[None], other=0), 0)  # (SPANS, K)
    centroids += line * count * size
    mean = total / tl.maximum(number, 1).to(tl.float32)[:, None]
    kept = ((code < count) & (number > 0))[:, None] & (column < size)[None]
    tl.store(centroids + code[:, None] * size + column[None], mean, mask=kept)
    empty = ((each == 0) & (all_codes < count)).to(tl.int32)
    order = tl.cumsum(empty, 0)
    head, part = line // parts, line % parts
    keys += (head // heads) * k_b + (head % heads) * k_h + part * size * k_d
    distance, row = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for index in range(0, tl.sum(empty)):
        distance, row = _find_farthest(distances + line * rows, rows, distance, row, SEARCH)
        mine = tl.sum(tl.where((order == index + 1) & (empty == 1), all_codes, 0))
        point = tl.load(keys + row.to(tl.int64) * k_n + column * k_d, mask=column < size, other=0.0)  # (E,)
        moves = (column < size) & (mine // SHARE == share)
        tl.store(centroids + mine * size + column, point.to(tl.float32), mask=moves)


def choose_sizes(count: int, size: int) -> dict[str, int]:
    """Return the numbers of centroids and of rows of a program, and how many warps it has."""
    wide = max(16, triton.next_power_of_2(count))
    return {
        "K": wide,
        "E": max(16, triton.next_power_of_2(size)),
        "N": 64,
        "SPAN": SPAN,
        "num_warps": 4 if wide <= 64 else 8,
    }


def encode_triton(keys: Tensor, codebook: Tensor) -> Tensor:
    batch, heads, parts, count, size = codebook.shape
    codes = torch.empty(batch, heads, parts, keys.shape[2], dtype=torch.uint8, device=keys.device)
    is_short = keys.dtype == torch.bfloat16
    _assign[triton.cdiv(keys.shape[2], SPAN), batch * heads * parts](
        keys,
        codebook.contiguous(),
        codes,
        None,
        None,
        None,
        keys.shape[2],
        count,
        size,
        heads,
        parts,
        *keys.stride(),
        **choose_sizes(count, size),
        PIECES=int(is_short),
        CAST=is_short and is_interpreting(),
        SUM=False,
    )
    return codes


def find_centroids_triton(keys: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    batch, heads, parts, count, size = centroids.shape
    centroids, rows, lines = centroids.float().clone(), keys.shape[2], batch * heads * parts
    spans, sizes = triton.cdiv(rows, SPAN), choose_sizes(count, size)
    distances = torch.empty(lines, rows, dtype=torch.float32, device=keys.device)
    sums = torch.empty(spans, lines, count, size, dtype=torch.float32, device=keys.device)
    numbers = torch.empty(spans, lines, count, dtype=torch.int32, device=keys.device)
    is_short = keys.dtype == torch.bfloat16
    for _ in range(iterations):
        _assign[spans, lines](
            keys,
            centroids,
            None,
            distances,
            sums,
            numbers,
            rows,
            count,
            size,
            heads,
            parts,
            *keys.stride(),
            **sizes,
            PIECES=3 * is_short,
            CAST=is_short and is_interpreting(),
            SUM=True,
        )
        _move[triton.cdiv(count, SHARE), lines](
            keys,
            centroids,
            distances,
            sums,
            numbers,
            rows,
            count,
            size,
            heads,
            parts,
            spans,
            *keys.stride(),
            K=sizes["K"],
            E=sizes["E"],
            SHARE=SHARE,
            SPANS=SPANS,
            SEARCH=SEARCH,
            num_warps=4,
        )
    return centroids
