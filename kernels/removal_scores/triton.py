"""DropKV's and AnDPro's scores in two launches: the window's partial sums over keys, then a pass over keys and values.

Symbols and tiles are those of kernels/window_attention/triton.py. A program has all queries of a KV head (or a tile of
them if there are more than 128), so the sum over the group stays inside it. It computes p and ⟨a, v⟩ for each row and
query by two tile products. ‖a - v‖² is ‖a‖² + ‖v‖² - 2⟨a, v⟩, except in a tile of rows where some p is over a quarter.
There it is summed by differences, because the weight grows to 1/ε² while a approaches v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.kernels.window_attention.triton import (
    LOG2E,
    load_queries,
    load_rows,
    load_sums,
    logits,
    query_sums,
    spans,
    strides,
    tiles,
    unbound,
)

LARGE = tl.constexpr(0.25)  # if p is larger, distances are summed by differences
STEP = tl.constexpr(8)  # columns of the differences that are summed at once


@triton.jit
def rounded(p):
    """Round float32 p >= 0 to the nearest bfloat16, ties to even, by its bits; Triton's interpreter would truncate."""
    bits = p.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def by_differences(
    v_start,
    a_start,
    row,
    tile,
    rows,
    tokens,
    group,
    v_row,
    a_head,
    a_token,
    GT: tl.constexpr,
    WT: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return ‖a - v‖² (N, M), summed column by column. In the padding a is 0."""
    m = tl.arange(0, GT * WT)
    head, token = tile * GT + m // WT, m % WT
    there = (head < group) & (token < tokens)
    v_at = v_start + row.to(tl.int64) * v_row
    a_at = a_start + head.to(tl.int64) * a_head + token.to(tl.int64) * a_token
    distances = tl.zeros((row.shape[0], GT * WT), tl.float32)
    for start in range(0, DIM, STEP):
        for column in tl.static_range(STEP):
            inside = start + column < DIM
            v = tl.load(v_at + start + column, mask=(row < rows) & inside, other=0.0).to(tl.float32)  # (N,)
            a = tl.load(a_at + start + column, mask=there & inside, other=0.0).to(tl.float32)  # (GT * WT,)
            away = v[:, None] - a[None, :]
            distances += away * away
    return distances


@triton.jit
def score_rows(
    q,
    a,
    lengths,
    k_start,
    v_start,
    a_start,
    mass,
    top,
    share,
    out,
    scale,
    epsilon,
    tile,
    group,
    tokens,
    first,
    last,
    rows,
    k_row,
    v_row,
    m_row,
    a_head,
    a_token,
    GT: tl.constexpr,
    WT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASS: tl.constexpr,
    REMOVAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute the scores of the rows from `first` to `last`, N at a time."""
    for start in range(first, last, N):
        row = start + tl.arange(0, N)
        k = load_rows(k_start, row, rows, k_row, D, DIM, CAST)
        v = load_rows(v_start, row, rows, v_row, D, DIM, CAST)
        x = logits(k, q, mass, row, rows, tokens, m_row, scale, WT, MASS, CAUSAL, CAP)
        p = tl.minimum(tl.exp2(x - top[None, :]) * share[None, :], 1.0)
        along = tl.dot(v, tl.trans(a), input_precision="ieee")  # (N, GT * WT)
        if REMOVAL:
            if ROUNDED:
                p = rounded(p)
            single = v.to(tl.float32)
            distances = tl.maximum(tl.sum(single * single, 1)[:, None] + lengths[None, :] - 2.0 * along, 0.0)
            if tl.max(p) > LARGE:
                distances = by_differences(
                    v_start, a_start, row, tile, rows, tokens, group, v_row, a_head, a_token, GT, WT, DIM
                )
            weights = p / (1.0 - p + epsilon)
            terms = weights * weights * distances
        else:
            terms = p * along
        # an absent row may hold NaN
        score = tl.sum(tl.where(p > 0, terms, 0.0), 1) / group
        tl.store(out + row, score, mask=row < rows)


@triton.jit(do_not_specialize=["tokens", "rows", "span", "m_batch", "m_head"])
def score_kernel(
    queries,
    keys,
    mass,
    values,
    outputs,
    top,
    share,
    scores,
    scale,
    epsilon,
    heads,
    group,
    tokens,
    rows,
    span,
    count,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_row,
    m_batch,
    m_head,
    m_row,
    v_batch,
    v_head,
    v_row,
    a_batch,
    a_head,
    a_token,
    GT: tl.constexpr,
    WT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASS: tl.constexpr,
    REMOVAL: tl.constexpr,
    ROUNDED: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute scores (count, B, H, n) of a tile of queries over `span` rows: DropKV's with REMOVAL, else AnDPro's."""
    tile, split, pair = tl.program_id(0) % count, tl.program_id(0) // count, tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q_start = queries + batch * q_batch + head * group * q_head
    a_start = outputs + batch * a_batch + head * group * a_head
    q = load_queries(q_start, tile, tokens, group, q_head, q_token, GT, WT, D, DIM, CAST)
    a = load_queries(a_start, tile, tokens, group, a_head, a_token, GT, WT, D, DIM, CAST)
    lengths = tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
    k_start, m_start = keys + batch * k_batch + head * k_head, mass + batch * m_batch + head * m_head
    v_start = values + batch * v_batch + head * v_head
    tile_top, tile_share = load_sums(top, share, pair * count + tile, GT * WT)
    out = scores + (tile * tl.num_programs(1) + pair).to(tl.int64) * rows
    first, last = split * span, tl.minimum(split * span + span, rows)
    free = unbound(first, last, rows, tokens, N)
    score_rows(
        q,
        a,
        lengths,
        k_start,
        v_start,
        a_start,
        m_start,
        tile_top,
        tile_share,
        out,
        scale,
        epsilon,
        tile,
        group,
        tokens,
        first,
        free,
        rows,
        k_row,
        v_row,
        m_row,
        a_head,
        a_token,
        GT,
        WT,
        N,
        D,
        DIM,
        MASS,
        REMOVAL,
        ROUNDED,
        False,
        CAST,
        CAP,
    )
    score_rows(
        q,
        a,
        lengths,
        k_start,
        v_start,
        a_start,
        m_start,
        tile_top,
        tile_share,
        out,
        scale,
        epsilon,
        tile,
        group,
        tokens,
        free,
        last,
        rows,
        k_row,
        v_row,
        m_row,
        a_head,
        a_token,
        GT,
        WT,
        N,
        D,
        DIM,
        MASS,
        REMOVAL,
        ROUNDED,
        True,
        CAST,
        CAP,
    )


def score_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    mass: Tensor | None,
    scaling: float,
    epsilon: float | None = None,
    rounding: bool = False,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    """Return DropKV's scores, or AnDPro's without `epsilon`."""
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    group = query_heads // heads
    cut = tiles(group, tokens, dim, keys.dtype, products=2)
    top, share = query_sums(queries, keys, mass, scaling, extras=extras)
    span, splits = spans(rows, batch * heads * cut.count, cut)
    scores = torch.empty(cut.count, batch, heads, rows, dtype=torch.float32, device=keys.device)
    score_kernel[(splits * cut.count, batch * heads)](
        queries,
        keys,
        keys if mass is None else mass,
        values,
        outputs,
        top,
        share,
        scores,
        scaling * LOG2E.value,
        epsilon or 0.0,
        heads,
        group,
        tokens,
        rows,
        span,
        cut.count,
        *strides(queries, keys, mass),
        *values.stride()[:3],
        *outputs.stride()[:3],
        GT=cut.heads,
        WT=cut.width,
        N=cut.rows,
        D=cut.depth,
        DIM=dim,
        MASS=mass is not None,
        REMOVAL=epsilon is not None,
        ROUNDED=rounding,
        CAST=is_interpreting(),
        CAP=find_cap(extras),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return scores.sum(0) if cut.count > 1 else scores[0]
