"""Attention over listed rows in Triton: programs split the list, and the splits are joined as in `attention`.

A program takes the queries of a KV head that share a list: one if every query head has its own, otherwise the group's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, SPLITS, add_sink, add_tile, cap_tile, combine_splits, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

PROGRAMS = 264  # most programs that the rows are split into


@triton.jit(do_not_specialize=["listed", "after", "splits"])
def _listed(
    queries,
    keys,
    values,
    blocks,
    last,
    outputs,
    counts,
    step,
    part_acc,
    part_max,
    part_norm,
    sinks,
    query_heads,
    group,
    lists,
    listed,
    after,
    splits,
    queries_each,
    dim,
    scale,
    sq_b,
    sq_h,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    COUNT: tl.constexpr,
    SINGLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    line, split = tl.program_id(0), tl.program_id(1)
    first_query = line * queries_each
    b, first_head = (first_query // query_heads).to(tl.int64), first_query % query_heads
    h = (first_head // group).to(tl.int64)
    columns, member = tl.arange(0, D), tl.arange(0, M)
    asking = member < queries_each
    where = asking[:, None] & (columns < dim)[None]
    at = queries + b * sq_b + (first_head + member)[:, None].to(tl.int64) * sq_h + columns[None]
    q = tl.load(at, mask=where, other=0.0)  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    newest = tl.load(last).to(tl.int32)
    total = listed * SIZE
    rest = 0
    if TAIL:
        rest = tl.maximum(newest - after + 1, 0)
    share = tl.cdiv(tl.cdiv(total + rest, splits), N) * N
    high = tl.minimum((split + 1) * share, total + rest)
    blocks += (b * lists + first_head * lists // query_heads) * listed
    keys += b * sk_b + h * sk_h
    values += b * sv_b + h * sv_h
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    seen = tl.zeros([N], tl.int32)
    for begin in range(split * share, high, N):
        item = begin + tl.arange(0, N)
        block = tl.load(blocks + item // SIZE, mask=item < tl.minimum(total, high), other=0).to(tl.int32)  # (N,)
        row = block * SIZE + item % SIZE
        if TAIL:
            row = tl.where(item < total, row, after + item - total)
        here = (item < high) & (row <= newest)
        if COUNT:
            seen += here.to(tl.int32)
        there = here[:, None] & (columns < dim)[None]
        k = tl.load(keys + row[:, None].to(tl.int64) * sk_n + columns[None], mask=there, other=0.0)  # (N, D)
        v = tl.load(values + row[:, None].to(tl.int64) * sv_n + columns[None], mask=there, other=0.0)  # (N, D)
        if CAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        logits = cap_tile(tl.dot(q, k.T, input_precision="ieee") * scale, CAP)  # (M, N)
        logits = tl.where(here[None], logits, float("-inf"))
        m, norm, acc = add_tile(logits, v, m, norm, acc)
    if COUNT:
        tl.atomic_add(counts + tl.load(step), (tl.sum(seen) * queries_each).to(tl.int64))
    if SINGLE:
        if sinks is not None:
            sink = tl.load(sinks + first_head + member, mask=asking, other=float("-inf"))
            m, norm, acc = add_sink(m, norm, acc, sink)
        place = (first_query + member).to(tl.int64)
        tl.store(outputs + place[:, None] * dim + columns[None], acc / norm[:, None], mask=where)
    else:
        part = ((line * splits + split) * queries_each + member).to(tl.int64)
        tl.store(part_acc + part[:, None] * dim + columns[None], acc, mask=where)
        tl.store(part_max + part, m, mask=asking)
        tl.store(part_norm + part, norm, mask=asking)


def attend_listed_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    size: int,
    last: Tensor,
    scaling: float,
    after: int | None,
    counts: tuple[Tensor, Tensor] | None,
    extras: SoftmaxExtras | None,
) -> Tensor:
    batch, query_heads, _, dim = queries.shape
    group, (lists, listed) = query_heads // keys.shape[1], blocks.shape[1:]
    queries_each = 1 if lists == query_heads else group
    lines = batch * query_heads // queries_each
    queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
    wide, exact = max(16, triton.next_power_of_2(dim)), queries.dtype == torch.float32
    tile = 32 if exact else 64 if wide > 128 else 128  # chosen by trial on an H200
    longest = listed * size + (0 if after is None else keys.shape[2] - after)
    most = min(max(1, PROGRAMS // lines), SPLITS[1])
    splits = min(most, triton.cdiv(longest, 2 * tile))
    outputs = torch.empty(batch, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    parts = [outputs, outputs, outputs]
    if most > 1:  # not `splits`: it follows from lengths, and each value of a constant is compiled
        parts = [
            torch.empty(lines, splits, queries_each, *more, dtype=torch.float32, device=queries.device)
            for more in ((dim,), (), ())
        ]
    counted, step = (last, last) if counts is None else counts
    _listed[lines, splits](
        queries,
        keys,
        values,
        blocks.contiguous(),
        last,
        outputs,
        counted,
        step,
        *parts,
        get_sinks(extras),
        query_heads,
        group,
        lists,
        listed,
        after or 0,
        splits,
        queries_each,
        dim,
        scaling * LOG2E.value,
        *queries.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        SIZE=size,
        TAIL=after is not None,
        COUNT=counts is not None,
        SINGLE=most == 1,
        M=max(16, triton.next_power_of_2(queries_each)),
        N=tile,
        D=wide,
        CAST=is_interpreting() and queries.dtype == torch.bfloat16,
        CAP=find_cap(extras),
        num_warps=4,
        num_stages=2,
    )
    if most > 1:
        combine_splits[(batch * query_heads,)](
            *parts,
            outputs,
            outputs,
            1,
            queries_each,
            splits,
            dim,
            LSE=False,
            S=SPLITS[most > SPLITS[0]],
            D=wide,
            sinks=get_sinks(extras),
            query_heads=query_heads,
            num_warps=4,
        )
    return outputs
