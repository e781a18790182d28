"""Statistics of the last w queries' attention, without their probabilities in memory.

Symbols: M = GT·WT queries of one program, GT query heads of a KV head by WT >= w queries (powers of two; those beyond G
and w are padding), N rows at once, x = q·k·scaling·log2 e + log2 mass. First the rows are split among programs. Each
program computes for every query the sum of 2^(x - c) over its rows, where c is the maximum of its first rows, and the
sums are joined. Then every program multiplies its keys once more and reduces p over the queries of each head. There are
no atomics, so results are reproducible. K is read once per launch if G·w <= 128.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

SPLITS = 128  # most parts of the rows; the second launch reads as many partial sums per query
PROGRAMS = 1056  # target: 8 for each of the 132 multiprocessors of an H100 or H200, 4 if each has many queries
LOWEST = tl.constexpr(-1e30)  # x of a row that a query does not see; finite, so that differences are not NaN
MOST = tl.constexpr(1e30)  # largest sum; beyond it, terms may have been infinite
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tiles:
    """How a launch is divided into programs."""

    heads: int  # query heads of a program, GT
    width: int  # queries of a program, WT
    count: int  # tiles of a group
    rows: int  # rows at once, N
    depth: int  # the padded head dimension, D
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return the arguments of a launch. With 128 registers per thread, two programs of 8 warps run side by side."""
        return {"num_warps": self.warps, "num_stages": self.stages} | ({"maxnreg": 128} if self.warps == 8 else {})

    @property
    def queries(self) -> int:
        return self.heads * self.width


def tiles(group: int, tokens: int, dim: int, dtype: torch.dtype, products: int = 1) -> Tiles:
    """Choose the tiles by rules instead of trials.

    A tile of logits has 32 numbers per thread. With wide rows and float32 it has fewer queries. `products` is 1 if a
    row's key is multiplied, 2 if its value is too.
    """
    depth, single = max(16, triton.next_power_of_2(dim)), dtype == torch.float32
    most = 64 if depth * dtype.itemsize > 256 else 128
    width = 1 if tokens == 1 else max(8, triton.next_power_of_2(tokens))  # few values, because each is compiled
    heads = min(triton.next_power_of_2(group), max(1, most // width))
    width = max(width, 16 // heads)
    queries = heads * width
    rows = 32 if single else 128 if products == 1 and queries <= 32 and depth <= 128 else 64
    warps = 8 if queries > 64 and products == 1 else 4
    stages = 1 if single or queries * products > 128 else 2 if depth > 128 else 3
    return Tiles(heads, width, triton.cdiv(group, heads), rows, depth, warps, stages)


def most_splits(packs: int, cut: Tiles) -> int:
    """Return the largest number of programs for each of `packs`, for any number of rows."""
    return max(1, min(SPLITS, triton.cdiv(PROGRAMS // (2 if cut.queries > 64 else 1), packs)))


def spans(rows: int, packs: int, cut: Tiles) -> tuple[int, int]:
    """Return the rows of a program, a multiple of the tile's, and the number of programs for each of `packs`."""
    splits = most_splits(packs, cut)
    span = triton.cdiv(triton.cdiv(rows, splits), cut.rows) * cut.rows
    return span, triton.cdiv(rows, span)


@triton.jit
def load_queries(
    start,
    tile,
    tokens,
    group,
    stride_head,
    stride_token,
    GT: tl.constexpr,
    WT: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    CAST: tl.constexpr,
):
    """Load the queries of a tile, (M, D), zeros in the padding. `start` points to the KV head's first query."""
    m = tl.arange(0, GT * WT)
    head, token, column = tile * GT + m // WT, m % WT, tl.arange(0, D)
    there = ((head < group) & (token < tokens))[:, None] & (column < DIM)[None, :]
    at = head.to(tl.int64) * stride_head + token.to(tl.int64) * stride_token
    q = tl.load(start + at[:, None] + column[None, :], mask=there, other=0.0)  # (GT * WT, D)
    return q.to(tl.float32) if CAST else q


@triton.jit
def load_rows(start, row, rows, stride_row, D: tl.constexpr, DIM: tl.constexpr, CAST: tl.constexpr):
    """Load the keys or values of `row` (N,), (N, D), zeros beyond the last row."""
    column = tl.arange(0, D)
    at = start + row.to(tl.int64)[:, None] * stride_row + column[None, :]
    if DIM == D:
        x = tl.load(at, mask=(row < rows)[:, None], other=0.0)  # (N, D)
    else:
        x = tl.load(at, mask=(row < rows)[:, None] & (column < DIM)[None, :], other=0.0)  # (N, D)
    return x.to(tl.float32) if CAST else x


@triton.jit
def unbound(first, last, rows, tokens, N: tl.constexpr):
    """Return the end of the tiles that every query sees entirely. Later tiles reach into the window."""
    return first + tl.maximum(tl.minimum(last, rows - tokens + 1) - first, 0) // N * N


@triton.jit
def logits(
    k,
    q,
    mass,
    row,
    rows,
    tokens,
    stride_row,
    scale,
    WT: tl.constexpr,
    MASS: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute x of the rows, (N, M). It is LOWEST where a query does not see a row, whatever the row holds."""
    x = cap_tile(tl.dot(k, tl.trans(q), input_precision="ieee") * scale, CAP)  # (N, GT * WT)
    if MASS:
        weight = tl.load(mass + row.to(tl.int64) * stride_row, mask=row < rows, other=0.0)  # (N,)
        seen = (weight > 0)[:, None]
        x += tl.log2(tl.where(weight > 0, weight, 1.0))[:, None]
    else:
        seen = (row < rows)[:, None]
    if CAUSAL:
        token = tl.arange(0, q.shape[0]) % WT
        seen = seen & (row[:, None] <= (rows - tokens + token)[None, :])
    return tl.where(seen, x, LOWEST)


@triton.jit
def gather_sums(
    k_start,
    q,
    mass,
    held,
    top,
    first,
    free,
    last,
    rows,
    tokens,
    group,
    stride_row,
    stride_mass,
    scale,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    GT: tl.constexpr,
    WT: tl.constexpr,
    MASS: tl.constexpr,
    HOLD: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Return Σ 2^(x - top) over the rows from `first` to `last`, (M,). All queries see the rows before `free`.

    The sums of each element of a tile are joined at the end. HOLD: the first query's x is written to `held` (GT, n).
    """
    sums = tl.zeros((N, GT * WT), tl.float32)
    for start in range(first, free, N):
        row = start + tl.arange(0, N)
        k = load_rows(k_start, row, rows, stride_row, D, DIM, CAST)
        x = logits(k, q, mass, row, rows, tokens, stride_mass, scale, WT, MASS, False, CAP)
        sums += tl.exp2(x - top[None, :])
        if HOLD:
            hold(x, held, row, rows, group, N, GT, WT)
    for start in range(free, last, N):
        row = start + tl.arange(0, N)
        k = load_rows(k_start, row, rows, stride_row, D, DIM, CAST)
        x = logits(k, q, mass, row, rows, tokens, stride_mass, scale, WT, MASS, True, CAP)
        sums += tl.exp2(x - top[None, :])
        if HOLD:
            hold(x, held, row, rows, group, N, GT, WT)
    return tl.sum(sums, 0)


@triton.jit
def hold(x, held, row, rows, group, N: tl.constexpr, GT: tl.constexpr, WT: tl.constexpr):
    """Write the x (N, M) of each head's first query to `held` (GT, n)."""
    member = tl.arange(0, GT)
    x = tl.where((tl.arange(0, WT) == 0)[None, None, :], tl.reshape(x, (N, GT, WT)), 0.0)
    there = (row < rows)[:, None] & (member < group)[None, :]
    tl.store(held + member.to(tl.int64)[None, :] * rows + row[:, None], tl.sum(x, 2), mask=there)


@triton.jit(do_not_specialize=["tokens", "rows", "span", "m_batch", "m_head"])
def partial_kernel(
    queries,
    keys,
    mass,
    maxima,
    sums,
    held,
    scale,
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
    GT: tl.constexpr,
    WT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASS: tl.constexpr,
    HOLD: tl.constexpr,
    AGAIN: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute the maxima and sums (splits, B·H·count, M) float32 of a tile of queries over `span` rows.

    HOLD: x of a single query is written to `held` (B, H, G, n). The maximum is that of the first tile. AGAIN: it is
    that of all tiles, if a sum relative to the first tile's maximum was too large.
    """
    tile, split, pair = tl.program_id(0) % count, tl.program_id(0) // count, tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q_start = queries + batch * q_batch + head * group * q_head
    q = load_queries(q_start, tile, tokens, group, q_head, q_token, GT, WT, D, DIM, CAST)
    k_start, m_start = keys + batch * k_batch + head * k_head, mass + batch * m_batch + head * m_head
    first, last = split * span, tl.minimum(split * span + span, rows)
    free = unbound(first, last, rows, tokens, N)
    x_start, left = held + (pair.to(tl.int64) * group + tile * GT) * rows, group - tile * GT
    packs = tl.num_programs(1) * count
    at = (split * packs + pair * count + tile).to(tl.int64) * (GT * WT) + tl.arange(0, GT * WT)
    broken = True
    if AGAIN:
        broken = tl.max(tl.load(sums + at)) > MOST  # (GT * WT,)
    if broken:
        top = tl.full((N, GT * WT), LOWEST, tl.float32)
        for start in range(first, last if AGAIN else first + N, N):
            row = start + tl.arange(0, N)
            k = load_rows(k_start, row, rows, k_row, D, DIM, CAST)
            top = tl.maximum(top, logits(k, q, m_start, row, rows, tokens, m_row, scale, WT, MASS, True, CAP))
        high = tl.max(top, 0)
        total = gather_sums(
            k_start,
            q,
            m_start,
            x_start,
            high,
            first,
            free,
            last,
            rows,
            tokens,
            left,
            k_row,
            m_row,
            scale,
            N,
            D,
            DIM,
            GT,
            WT,
            MASS,
            HOLD,
            CAST,
            CAP,
        )
        tl.store(maxima + at, high)
        tl.store(sums + at, total)


@triton.jit(do_not_specialize=["tokens", "splits"])
def join_kernel(
    maxima,
    sums,
    top,
    share,
    sinks,
    tokens,
    heads,
    group,
    count,
    splits,
    GT: tl.constexpr,
    WT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute each query's maximum of x and 1 / Σ 2^(x - maximum), (B·H·count, M) each.

    The sum has a term for the query head's sink, if there are any. The latter is 0 for padding and for a query that
    sees no row.
    """
    pack, m, split = tl.program_id(0), tl.arange(0, GT * WT), tl.arange(0, SPLITS)
    at = (split * tl.num_programs(0) + pack).to(tl.int64)[:, None] * (GT * WT) + m[None, :]
    there = (split < splits)[:, None]
    high = tl.load(maxima + at, mask=there, other=LOWEST)  # (SPLITS, GT * WT)
    total = tl.load(sums + at, mask=there, other=0.0)  # (SPLITS, GT * WT)
    most = tl.max(high, 0)
    total = tl.sum(total * tl.exp2(high - most[None, :]), 0)
    member = pack % count * GT + m // WT
    valid = (member < group) & (m % WT < tokens) & (most > LOWEST)
    if sinks is not None:
        sink = tl.load(sinks + pack // count % heads * group + member, mask=valid, other=0.0).to(tl.float32)
        total += tl.where(valid, tl.exp2(sink * LOG2E - most), 0.0)  # infinite if no row has a share
    tl.store(top + pack.to(tl.int64) * (GT * WT) + m, most)
    tl.store(share + pack.to(tl.int64) * (GT * WT) + m, tl.where(valid, 1.0 / tl.where(valid, total, 1.0), 0.0))


@triton.jit
def load_sums(top, share, pack, M: tl.constexpr):
    """Load the maxima and shares of a tile of queries, (M,) each."""
    at = pack.to(tl.int64) * M + tl.arange(0, M)
    return tl.load(top + at), tl.load(share + at)  # (M,)


@triton.jit
def reduce_rows(
    k_start,
    q,
    mass,
    top,
    share,
    mean,
    variance,
    entropy,
    out,
    real,
    first,
    last,
    rows,
    tokens,
    stride_row,
    stride_mass,
    scale,
    GT: tl.constexpr,
    WT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASS: tl.constexpr,
    MEAN: tl.constexpr,
    VARIANCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Write the statistics of the rows from `first` to `last` to `out` (GT,) + row, for the heads that are `real`."""
    for start in range(first, last, N):
        row = start + tl.arange(0, N)
        k = load_rows(k_start, row, rows, stride_row, D, DIM, CAST)
        x = logits(k, q, mass, row, rows, tokens, stride_mass, scale, WT, MASS, CAUSAL, CAP)
        p = tl.reshape(tl.exp2(x - top[None, :]) * share[None, :], (N, GT, WT))
        at = out[None, :] + row[:, None]
        there = (row < rows)[:, None] & real[None, :]
        middle = tl.sum(p, 2) / tokens
        if MEAN:
            tl.store(mean + at, middle, mask=there)
        if VARIANCE:
            away = tl.where((tl.arange(0, WT) < tokens)[None, None, :], p - middle[:, :, None], 0.0)
            tl.store(variance + at, tl.sum(away * away, 2) / tl.maximum(tokens - 1, 1), mask=there)
        if ENTROPY:
            tl.store(entropy + at, -tl.sum(p * tl.log(p + 1e-10), 2), mask=there)


@triton.jit(do_not_specialize=["tokens", "rows", "span", "m_batch", "m_head"])
def reduce_kernel(
    queries,
    keys,
    mass,
    top,
    share,
    mean,
    variance,
    entropy,
    scale,
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
    GT: tl.constexpr,
    WT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    MASS: tl.constexpr,
    MEAN: tl.constexpr,
    VARIANCE: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute the chosen statistics, (B, H, G, n) float32 each, of a tile of queries over `span` rows."""
    tile, split, pair = tl.program_id(0) % count, tl.program_id(0) // count, tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q_start = queries + batch * q_batch + head * group * q_head
    q = load_queries(q_start, tile, tokens, group, q_head, q_token, GT, WT, D, DIM, CAST)
    k_start, m_start = keys + batch * k_batch + head * k_head, mass + batch * m_batch + head * m_head
    tile_top, tile_share = load_sums(top, share, pair * count + tile, GT * WT)
    member = tile * GT + tl.arange(0, GT)
    out = (pair.to(tl.int64) * group + member) * rows
    first, last = split * span, tl.minimum(split * span + span, rows)
    free = unbound(first, last, rows, tokens, N)
    reduce_rows(
        k_start,
        q,
        m_start,
        tile_top,
        tile_share,
        mean,
        variance,
        entropy,
        out,
        member < group,
        first,
        free,
        rows,
        tokens,
        k_row,
        m_row,
        scale,
        GT,
        WT,
        N,
        D,
        DIM,
        MASS,
        MEAN,
        VARIANCE,
        ENTROPY,
        False,
        CAST,
        CAP,
    )
    reduce_rows(
        k_start,
        q,
        m_start,
        tile_top,
        tile_share,
        mean,
        variance,
        entropy,
        out,
        member < group,
        free,
        last,
        rows,
        tokens,
        k_row,
        m_row,
        scale,
        GT,
        WT,
        N,
        D,
        DIM,
        MASS,
        MEAN,
        VARIANCE,
        ENTROPY,
        True,
        CAST,
        CAP,
    )


@triton.jit(do_not_specialize=["rows"])
def share_kernel(held, top, share, group, rows, count, GT: tl.constexpr, WT: tl.constexpr, N: tl.constexpr):
    """Turn x of a single query into p, in place in `held` (B, H, G, n), N rows per program."""
    pair, head = tl.program_id(1) // group, tl.program_id(1) % group
    at = (pair * count + head // GT).to(tl.int64) * (GT * WT) + head % GT * WT
    row = tl.program_id(0) * N + tl.arange(0, N)
    x_at = held + tl.program_id(1).to(tl.int64) * rows + row
    p = tl.exp2(tl.load(x_at, mask=row < rows, other=LOWEST) - tl.load(top + at)) * tl.load(share + at)  # (N,)
    tl.store(x_at, p, mask=row < rows)


def strides(queries: Tensor, keys: Tensor, mass: Tensor | None) -> tuple[int, ...]:
    return (*queries.stride()[:3], *keys.stride()[:3], *((0, 0, 0) if mass is None else mass.stride()))


def query_sums(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    scaling: float,
    held: Tensor | None = None,
    extras: SoftmaxExtras | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the first three launches.

    Returns each query's maximum and one over its sum, (B·H·count, M) each. For a single query x is written to `held`.
    """
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    group, cut = query_heads // heads, tiles(query_heads // heads, tokens, dim, keys.dtype)
    packs = batch * heads * cut.count
    span, splits = spans(rows, packs, cut)
    maxima, sums = torch.empty(2, splits, packs, cut.queries, dtype=torch.float32, device=keys.device)
    for again in (False, True):
        partial_kernel[(splits * cut.count, batch * heads)](
            queries,
            keys,
            keys if mass is None else mass,
            maxima,
            sums,
            maxima if held is None else held,
            scaling * LOG2E.value,
            heads,
            group,
            tokens,
            rows,
            span,
            cut.count,
            *strides(queries, keys, mass),
            GT=cut.heads,
            WT=cut.width,
            N=cut.rows,
            D=cut.depth,
            DIM=dim,
            MASS=mass is not None,
            HOLD=held is not None and not again,
            AGAIN=again,
            CAST=is_interpreting(),
            CAP=find_cap(extras),
            **cut.options,
        )
    top, share = torch.empty(2, packs, cut.queries, dtype=torch.float32, device=keys.device)
    join_kernel[(packs,)](
        maxima,
        sums,
        top,
        share,
        get_sinks(extras),
        tokens,
        heads,
        group,
        cut.count,
        splits,
        GT=cut.heads,
        WT=cut.width,
        SPLITS=triton.next_power_of_2(most_splits(packs, cut)),
        num_warps=8,
    )
    return top, share


def window_statistics_triton(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    scaling: float,
    of: tuple[str, ...],
    extras: SoftmaxExtras | None,
) -> tuple[Tensor, ...]:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    group = query_heads // heads
    cut = tiles(group, tokens, dim, keys.dtype)
    made = {
        name: torch.empty(batch, heads, group, rows, dtype=torch.float32, device=keys.device)
        for name in dict.fromkeys(of)
    }
    if tokens == 1 and set(of) == {"mean"}:  # for one query x has the size of the result, so keys are read once
        held = made["mean"]
        top, share = query_sums(queries, keys, mass, scaling, held, extras)
        share_kernel[(triton.cdiv(rows, 1024), batch * query_heads)](
            held, top, share, group, rows, cut.count, GT=cut.heads, WT=cut.width, N=1024
        )
        return tuple(held for _ in of)
    top, share = query_sums(queries, keys, mass, scaling, extras=extras)
    span, splits = spans(rows, batch * heads * cut.count, cut)
    reduce_kernel[(splits * cut.count, batch * heads)](
        queries,
        keys,
        keys if mass is None else mass,
        top,
        share,
        *(made.get(name, top) for name in ("mean", "variance", "entropy")),
        scaling * LOG2E.value,
        heads,
        group,
        tokens,
        rows,
        span,
        cut.count,
        *strides(queries, keys, mass),
        GT=cut.heads,
        WT=cut.width,
        N=cut.rows,
        D=cut.depth,
        DIM=dim,
        MASS=mass is not None,
        MEAN="mean" in made,
        VARIANCE="variance" in made,
        ENTROPY="entropy" in made,
        CAST=is_interpreting(),
        CAP=find_cap(extras),
        **cut.options,
    )
    return tuple(made[name] for name in of)
