"""Scores of rows by their codes, in three launches, and the rows with the largest scores.

`_products` multiplies the query heads with the centroids. Afterwards a row's logit is a sum of `m` of these products.
It also finds the codes of the newest row, which is no candidate yet. `_sums` finds the log-sum-exp of each span of
rows, and `_scores` joins those of all spans and computes the logits again. If the largest scores are wanted too,
`_scores` counts the first digits of the scores for `kernels.row_selection`.

No product is a term of a sum over threads. A thread would fuse its own product with the addition, but not those that it
gets from others, and rows with equal codes would differ in the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.product_quantization.pairs import CENTROIDS, LOG2E, find_nearest_centroid, list_by_pairs
from kvbench.kernels.row_selection.triton import LINE, SINGLE, clear_work, count_first_digits, list_top
from kvbench.kernels.softmax_extras import SoftmaxExtras

SPAN = 2048  # rows of a program, unless the group is large; it does not depend on the batch (order of sums)
LOGITS = 16384  # most logits that a program holds
SPANS = tl.constexpr(64)  # spans whose sums are joined at once


@triton.jit(do_not_specialize=["count", "heads", "first", "k_b", "k_h", "c_b", "c_h", "c_m"])
def _products(
    queries,
    codebook,
    tables,
    keys,
    codes,
    last,
    heads,
    group,
    parts,
    count,
    size,
    first,
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
    M: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    CAST: tl.constexpr,
    ENCODE: tl.constexpr,
):
    """Multiply a group's queries with N centroids of a part, into tables (B, H, m, K, G) of logits in base 2.

    ENCODE: the first program of a part also finds the code of row `last` of the keys.
    """
    line, part = tl.program_id(1), tl.program_id(2)
    b, h = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    if ENCODE and tl.program_id(0) == 0:
        newest, book = tl.load(last).to(tl.int64), codebook + (line * parts + part).to(tl.int64) * count * size
        key = keys + b * k_b + h * k_h + newest * k_n + part * size * k_d
        tl.store(
            codes + b * c_b + h * c_h + part * c_m + newest - first,
            find_nearest_centroid(key, book, count, size, k_d, N, E),
        )
    code, column, member = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, E), tl.arange(0, M)
    wide = (column < size)[None]
    at = b * q_b + (h * group + member)[:, None] * q_h + (part * size + column)[None] * q_d
    query = tl.load(queries + at, mask=(member < group)[:, None] & wide, other=0.0)  # (M, E)
    line = (line * parts + part).to(tl.int64) * count
    at = (line + code)[:, None] * size + column[None]
    centroid = tl.load(codebook + at, mask=(code < count)[:, None] & wide, other=0.0)  # (N, E)
    if CAST:
        query, centroid = query.to(tl.float32), centroid.to(tl.float32)
    product = tl.dot(centroid, tl.trans(query), input_precision="ieee") * scale  # (N, M)
    there = (code < count)[:, None] & (member < G)[None]
    tl.store(tables + (line + code)[:, None] * G + member[None], product, mask=there)


@triton.jit
def _load_logits(
    codes, tables, row, first, stop, line, count, group, c_m, PARTS: tl.constexpr, G: tl.constexpr, CAP: tl.constexpr
):
    """Return the logits of rows in base 2, (N, G); -inf for rows that are no candidates and beyond the group.

    `codes` points to the codes of row `first` of the head number `line`.
    """
    here, member = (row >= first) & (row < stop), tl.arange(0, G)
    logits = tl.zeros((row.shape[0], G), tl.float32)
    for part in tl.static_range(PARTS):
        code = tl.load(codes + part * c_m + (row - first), mask=here, other=0).to(tl.int32)  # (N,)
        logits += tl.load(tables + ((line * PARTS + part) * count + code)[:, None] * G + member[None])  # (N, G)
    return tl.where(here[:, None] & (member < group)[None], cap_tile(logits, CAP), float("-inf"))


@triton.jit
def _add_logarithm(most, total, otherwise):
    """Return most + log2(total), or `otherwise` where the total is 0."""
    return tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)), otherwise)


@triton.jit(do_not_specialize=["heads", "count", "first", "rows", "c_b", "c_h", "c_m"])
def _sums(
    codes,
    tables,
    stop,
    sums,
    work,
    heads,
    count,
    group,
    first,
    rows,
    c_b,
    c_h,
    c_m,
    PARTS: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute the logarithm of the sum of 2^logit over a span of rows, (B·H, spans, G), in base 2.

    COUNT: the first program of a head also clears its work, for `_scores`.
    """
    span, line = tl.program_id(0), tl.program_id(1)
    if COUNT and span == 0:
        clear_work(work + line * LINE)
    codes += (line // heads).to(tl.int64) * c_b + (line % heads).to(tl.int64) * c_h
    row, last = span * N + tl.arange(0, N), tl.minimum(tl.load(stop), rows).to(tl.int32)
    logits = _load_logits(codes, tables, row, first, last, line, count, group, c_m, PARTS, G, CAP)
    most = tl.max(logits, 0)
    total = tl.sum(tl.exp2(logits - tl.where(most == float("-inf"), 0.0, most)[None]), 0)
    at = (line * tl.num_programs(0) + span).to(tl.int64) * G + tl.arange(0, G)
    tl.store(sums + at, _add_logarithm(most, total, float("-inf")))


@triton.jit(do_not_specialize=["heads", "count", "first", "rows", "c_b", "c_h", "c_m"])
def _scores(
    codes,
    tables,
    stop,
    sums,
    scores,
    work,
    heads,
    count,
    group,
    first,
    rows,
    c_b,
    c_h,
    c_m,
    PARTS: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    COUNT: tl.constexpr,
    CAP: tl.constexpr,
):
    """Join the sums of all spans, SPANS at once, and write the scores of a span.

    COUNT: their first digits are counted in the head's work.
    """
    span, spans, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    codes += (line // heads).to(tl.int64) * c_b + (line % heads).to(tl.int64) * c_h
    member = tl.arange(0, G)
    most, total = tl.full((G,), float("-inf"), tl.float32), tl.zeros((G,), tl.float32)
    for begin in range(0, spans, SPANS):
        other = begin + tl.arange(0, SPANS)
        at, there = (line * spans + other).to(tl.int64)[:, None] * G + member[None], (other < spans)[:, None]
        span_sums = tl.load(sums + at, mask=there, other=float("-inf"))  # (SPANS, G)
        new = tl.maximum(most, tl.max(span_sums, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(most - safe) + tl.sum(tl.exp2(span_sums - safe[None]), 0)
        most = new
    whole = _add_logarithm(most, total, 0.0)
    row, last = span * N + tl.arange(0, N), tl.minimum(tl.load(stop), rows).to(tl.int32)
    logits = _load_logits(codes, tables, row, first, last, line, count, group, c_m, PARTS, G, CAP)
    score = tl.sum(tl.exp2(logits - whole[None]), 1)
    score = tl.where((row >= first) & (row < last), score, float("-inf"))
    tl.store(scores + line.to(tl.int64) * rows + row, score, mask=row < rows)
    if COUNT:
        count_first_digits(score, row < rows, work + line * LINE)


def code_scores_triton(
    queries: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    newest: tuple[Tensor, Tensor] | None = None,
    work: Tensor | None = None,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    """Return scores.

    Args:
        queries: As of `code_scores`.
        codes: As of `code_scores`.
        codebook: As of `code_scores`.
        scaling: As of `code_scores`.
        first: As of `code_scores`.
        stop: As of `code_scores`.
        newest: The keys, and the newest row, whose codes are written.
        work: Where the first digits of the scores are counted (`choose_by_digits`).
        extras: As of `code_scores`.
    """
    batch, heads, parts, count, size = codebook.shape
    group, rows, lines = queries.shape[1] // heads, first + codes.shape[3], batch * heads
    codes = codes if codes.stride(3) == 1 else codes.contiguous()
    wide = triton.next_power_of_2(group)  # query heads of a table
    span = min(SPAN, max(16, LOGITS // wide))
    spans = triton.cdiv(rows, span)
    scores = torch.empty(batch, heads, rows, dtype=torch.float32, device=codes.device)
    if not scores.numel():
        return scores
    tables = multiply(queries, codes, codebook, scaling, first, stop, newest)
    sums = torch.empty(lines, spans, wide, dtype=torch.float32, device=codes.device)
    sizes = heads, count, group, first, rows, *codes.stride()[:3]
    shape = {"PARTS": parts, "G": wide, "N": span, "COUNT": work is not None, "CAP": find_cap(extras), "num_warps": 8}
    _sums[spans, lines](codes, tables, stop, sums, work, *sizes, **shape)
    _scores[spans, lines](codes, tables, stop, sums, scores, work, *sizes, **shape)
    return scores


def multiply(
    queries: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    newest: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the logits of all centroids in base 2, (B·H, m, K, G), with G rounded up to a power of two.

    Arguments are those of `code_scores_triton`.
    """
    batch, heads, parts, count, size = codebook.shape
    group, lines = queries.shape[1] // heads, batch * heads
    wide = triton.next_power_of_2(group)
    tables = torch.empty(lines, parts, count, wide, dtype=torch.float32, device=codes.device)
    keys, last = (queries[..., None], stop) if newest is None else newest
    _products[triton.cdiv(count, CENTROIDS), lines, parts](
        queries,
        codebook.contiguous(),
        tables,
        keys,
        codes,
        last,
        heads,
        group,
        parts,
        count,
        size,
        first,
        scaling * LOG2E,
        *queries.stride(),
        *keys.stride(),
        *codes.stride()[:3],
        M=max(16, wide),
        N=CENTROIDS,
        E=max(16, triton.next_power_of_2(size)),
        G=wide,
        CAST=is_interpreting() and queries.dtype == torch.bfloat16,
        ENCODE=newest is not None,
        num_warps=4,
    )
    return tables


def choose_by_codes_triton(
    queries: Tensor,
    keys: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scaling: float,
    first: int,
    stop: Tensor,
    last: Tensor,
    rows: Tensor,
    counted: tuple[Tensor, int] | None,
    extras: SoftmaxExtras | None,
) -> None:
    all_rows = first + codes.shape[3]
    if counted is not None and rows.numel():
        list_by_pairs(queries, keys, codes, codebook, scaling, first, stop, last, rows, *counted, extras)
        return
    lines, work = codes[:, :, 0, 0].numel(), None
    if all_rows > SINGLE:
        work = torch.empty(lines, LINE.value, dtype=torch.int32, device=codes.device)
    scores = code_scores_triton(queries, codes, codebook, scaling, first, stop, (keys, last), work, extras)
    if rows.numel():
        list_top(scores, rows, counted=work)
