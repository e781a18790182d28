"""Find the largest probabilities in two passes over queries × keys.

The first pass computes the queries' log-sum-exps, the second the columns' maxima, with the kernel of
`accumulated_attention`. The maximum of logits minus log-sum-exps needs only one exponential, at the end. Logits are in
units of log 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.accumulated_attention.triton import LOG2E, columns
from kvbench.kernels.attention.triton import cap_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks


@triton.jit
def over_rows(
    top,
    total,
    query,
    keys,
    begin,
    end,
    rows,
    last,
    scale,
    stride_n,
    stride_d,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIAGONAL: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add the rows from `begin` to `end` to the running maximum and sum of exponentials.

    `last` is the last row that a query sees.
    """
    channel = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        place = keys + row.to(tl.int64)[:, None] * stride_n + channel[None, :] * stride_d
        key = tl.load(place, mask=(row < rows)[:, None] & (channel < DIM)[None, :], other=0.0)  # (BLOCK_N, BLOCK_D)
        if CAST:
            key = key.to(tl.float32)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale  # (BLOCK_T, BLOCK_N)
        logits = cap_tile(logits, CAP)
        if DIAGONAL:
            logits = tl.where(row[None, :] <= last[:, None], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(logits - new[:, None]), 1)
        top = new
    return top, total


@triton.jit(do_not_specialize=["tokens", "rows"])
def lse_kernel(
    queries,
    keys,
    out,
    tokens,
    rows,
    query_heads,
    group,
    scale,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_h,
    k_n,
    k_d,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_T  # late queries see most rows, so they start first
    sample, head = (tl.program_id(1) // query_heads).to(tl.int64), (tl.program_id(1) % query_heads).to(tl.int64)
    token, channel = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    place = queries + sample * q_b + head * q_h + token.to(tl.int64)[:, None] * q_t + channel[None, :] * q_d
    query = tl.load(place, mask=(token < tokens)[:, None] & (channel < DIM)[None, :], other=0.0)  # (BLOCK_T, BLOCK_D)
    if CAST:
        query = query.to(tl.float32)
    head_keys = keys + sample * k_b + head // group * k_h
    past = rows - tokens
    top, total = tl.full((BLOCK_T,), float("-inf"), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    middle = (first + past + 1) // BLOCK_N * BLOCK_N  # all queries of the tile see the rows before this one
    top, total = over_rows(
        top,
        total,
        query,
        head_keys,
        0,
        middle,
        rows,
        past + token,
        scale,
        k_n,
        k_d,
        DIM,
        BLOCK_D,
        BLOCK_N,
        False,
        CAST,
        PRECISION,
        CAP,
    )
    top, total = over_rows(
        top,
        total,
        query,
        head_keys,
        middle,
        tl.minimum(first + BLOCK_T + past, rows),
        rows,
        past + token,
        scale,
        k_n,
        k_d,
        DIM,
        BLOCK_D,
        BLOCK_N,
        True,
        CAST,
        PRECISION,
        CAP,
    )
    at = out + tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(at, top + tl.log2(total), mask=token < tokens)


def tiles(dtype: torch.dtype, dim: int, tokens: int) -> dict[str, int]:
    """Choose queries and rows of a tile, warps and stages, for few and for many queries."""
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "BLOCK_T": 16 if tokens <= 16 else 32, "num_warps": 4, "num_stages": 2}
    wide = 128 if dim <= 128 else 64
    return {"BLOCK_N": wide, "BLOCK_T": 16 if tokens <= 16 else 128, "num_warps": 8, "num_stages": 2}


def lse(queries: Tensor, keys: Tensor, scaling: float, extras: SoftmaxExtras | None) -> Tensor:
    """Return the log-sum-exp of every query's logits and sink in units of log 2, (B, H·G, T) float32."""
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    out = torch.empty(batch, query_heads, tokens, dtype=torch.float32, device=queries.device)
    sizes = tiles(queries.dtype, dim, tokens)
    lse_kernel[(triton.cdiv(tokens, sizes["BLOCK_T"]), batch * query_heads)](
        queries,
        keys,
        out,
        tokens,
        rows,
        query_heads,
        query_heads // heads,
        scaling * LOG2E,
        *queries.stride(),
        *keys.stride(),
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        CAST=is_interpreting(),
        PRECISION="ieee",
        CAP=find_cap(extras),
        **sizes,
    )
    sinks = get_sinks(extras)
    return out if sinks is None else torch.logaddexp2(out, LOG2E * sinks.float()[:, None])


def max_attention_triton(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    weight: Tensor | None = None,
    together: bool = True,
    extras: SoftmaxExtras | None = None,
) -> Tensor:
    sums = lse(queries, keys, scaling, extras)
    if weight is not None:  # a factor of the probabilities is a term of their logarithms
        sums = sums - weight.float().log2()[:, None]
    return columns(queries, keys, None, sums, scaling, together, True, 1.0, extras)
