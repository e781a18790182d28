"""Reduce the columns of the attention probabilities over the queries: their sum or their maximum.

A program owns a tile of rows of one KV head and goes through all queries that see one of them, query head by query
head. No two programs add to the same number, so results are reproducible. Partial sums per query of a tile are added
only at the end, so the loop has no reduction and reads one log-sum-exp per query. Logits are in units of log 2, so that
exp2 can be used. Mass is a factor of a column and is applied once, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.softmax_extras import SoftmaxExtras

LOG2E = 1.4426950408889634


@triton.jit
def over_queries(
    acc,
    key,
    queries,
    lse,
    begin,
    end,
    tokens,
    row,
    past,
    scale,
    stride_t,
    stride_d,
    stride_l,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MAXIMUM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    UNIT: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add the queries from `begin` to `end` of one head to `acc` (BLOCK_T, BLOCK_N).

    DIAGONAL: some of the queries do not see all rows.
    """
    member, channel = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    queries += begin.to(tl.int64) * stride_t
    lse += begin.to(tl.int64) * stride_l
    for start in range(begin, end, BLOCK_T):
        token = start + member
        here = token < tokens
        mask = here[:, None] if DIM == BLOCK_D else here[:, None] & (channel < DIM)[None, :]
        # (BLOCK_T, BLOCK_D)
        query = tl.load(queries + member[:, None] * stride_t + channel[None, :] * stride_d, mask=mask, other=0.0)
        total = tl.load(lse + member * stride_l, mask=here, other=float("inf")) * UNIT  # (BLOCK_T,)
        queries += BLOCK_T * stride_t
        lse += BLOCK_T * stride_l
        if CAST:
            query = query.to(tl.float32)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # (BLOCK_T, BLOCK_N)
        logits = cap_tile(products, CAP) - total[:, None]
        if DIAGONAL:
            logits = tl.where(row[None, :] <= past + token[:, None], logits, float("-inf"))
        acc = tl.maximum(acc, logits) if MAXIMUM else acc + tl.exp2(logits)
    return acc


@triton.jit
def store(out, acc, mass, row, rows, stride, share, MAXIMUM: tl.constexpr, HAS_MASS: tl.constexpr):
    """Weight a tile's columns. Rows of mass 0 get 0, whatever they hold."""
    held = row < rows
    value = tl.exp2(tl.max(acc, 0)) if MAXIMUM else tl.sum(acc, 0) * share
    if HAS_MASS:
        weight = tl.load(mass + row.to(tl.int64) * stride, mask=held, other=0.0).to(tl.float32)  # (BLOCK_N,)
        value = tl.where(weight > 0, value * weight, 0.0)
    tl.store(out + row, value, mask=held)


@triton.jit(do_not_specialize=["tokens", "rows", "m_b", "m_h", "l_b", "l_h"])
def columns_kernel(
    queries,
    keys,
    mass,
    lse,
    out,
    tokens,
    rows,
    heads,
    scale,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_h,
    k_n,
    k_d,
    m_b,
    m_h,
    m_n,
    l_b,
    l_h,
    l_t,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAXIMUM: tl.constexpr,
    HAS_MASS: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    """Reduce all queries for one tile of rows.

    TOGETHER: one column for the group (the mean of sums, or the largest of maxima), otherwise one per query head. UNIT
    is the factor that converts an lse to units of log 2.
    """
    first = tl.program_id(0) * BLOCK_N  # most queries see the early rows, so these start first
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, channel = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    held = row < rows
    place = keys + sample * k_b + head * k_h + row.to(tl.int64)[:, None] * k_n + channel[None, :] * k_d
    key = tl.load(place, mask=held[:, None] & (channel < DIM)[None, :], other=0.0)  # (BLOCK_N, BLOCK_D)
    if CAST:
        key = key.to(tl.float32)
    past = rows - tokens
    begin = tl.maximum(first - past, 0) // BLOCK_T * BLOCK_T
    middle = tl.cdiv(tl.maximum(tl.minimum(first + BLOCK_N - 1 - past, tokens), 0), BLOCK_T) * BLOCK_T
    mass += sample * m_b + head * m_h
    acc = tl.full((BLOCK_T, BLOCK_N), float("-inf") if MAXIMUM else 0.0, tl.float32)
    for member in range(GROUP):
        asking = head * GROUP + member
        head_queries, sums = queries + sample * q_b + asking * q_h, lse + sample * l_b + asking * l_h
        if not TOGETHER:
            acc = tl.full((BLOCK_T, BLOCK_N), float("-inf") if MAXIMUM else 0.0, tl.float32)
        acc = over_queries(
            acc,
            key,
            head_queries,
            sums,
            begin,
            middle,
            tokens,
            row,
            past,
            scale,
            q_t,
            q_d,
            l_t,
            DIM,
            BLOCK_D,
            BLOCK_T,
            MAXIMUM,
            True,
            UNIT,
            CAST,
            PRECISION,
            CAP,
        )
        acc = over_queries(
            acc,
            key,
            head_queries,
            sums,
            middle,
            tokens,
            tokens,
            row,
            past,
            scale,
            q_t,
            q_d,
            l_t,
            DIM,
            BLOCK_D,
            BLOCK_T,
            MAXIMUM,
            False,
            UNIT,
            CAST,
            PRECISION,
            CAP,
        )
        if not TOGETHER:
            column = out + (sample * heads * GROUP + asking) * rows
            store(column, acc, mass, row, rows, m_n, 1.0, MAXIMUM, HAS_MASS)
    if TOGETHER:
        column = out + (sample * heads + head) * rows
        store(column, acc, mass, row, rows, m_n, 1.0 / GROUP, MAXIMUM, HAS_MASS)


def blocks(dtype: torch.dtype, dim: int, tokens: int) -> dict[str, int]:
    """Choose rows and queries of a tile, warps and stages.

    At d = 128 a block has one group of four warps, and three blocks share an SM, so that the exponentials of one block
    overlap with the products of another. There are tiles for few and for many queries, because each size is compiled.
    """
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "BLOCK_T": 16 if tokens <= 16 else 32, "num_warps": 4, "num_stages": 2}
    wide = 128 if dim <= 128 else 64
    return {"BLOCK_N": wide, "BLOCK_T": 16 if tokens <= 16 else 64, "num_warps": 4, "num_stages": 2}


def columns(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor | None,
    lse: Tensor,
    scaling: float,
    together: bool,
    maximum: bool,
    unit: float,
    extras: SoftmaxExtras | None,
) -> Tensor:
    """Return (B, H, n) if `together`, otherwise (B, H, G, n), float32. `lse` times `unit` is in units of log 2."""
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    group = query_heads // heads
    shape = (batch, heads, rows) if together else (batch, heads, group, rows)
    out = torch.empty(shape, dtype=torch.float32, device=queries.device)
    sizes = blocks(queries.dtype, dim, tokens)
    columns_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]), batch * heads)](
        queries,
        keys,
        lse if mass is None else mass,
        lse,
        out,
        tokens,
        rows,
        heads,
        scaling * LOG2E,
        *queries.stride(),
        *keys.stride(),
        *((0, 0, 0) if mass is None else mass.stride()),
        *lse.stride(),
        GROUP=group,
        TOGETHER=together,
        MAXIMUM=maximum,
        HAS_MASS=mass is not None,
        UNIT=unit,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        CAST=is_interpreting(),
        PRECISION="ieee",
        CAP=find_cap(extras),
        **sizes,
    )
    return out


def accumulated_attention_triton(
    queries: Tensor,
    keys: Tensor,
    mass: Tensor,
    lse: Tensor,
    scaling: float,
    mean: bool,
    extras: SoftmaxExtras | None,
) -> Tensor:
    return columns(queries, keys, mass, lse, scaling, mean, False, LOG2E, extras)
