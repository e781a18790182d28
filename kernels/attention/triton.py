"""Attention over a ragged part and a tail in Triton.

For few queries the programs split the rows; for many queries they split the queries. Both kernels read the two parts
one after the other, with an online softmax in float32 and in base 2. Derivation: README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras, get_cap, get_sinks

LOG2E = tl.constexpr(1.4426950408889634)
PROGRAMS = {16: 512, 32: 512, 64: 264, 128: 132}  # most programs that rows are split into, by a program's queries
SPLITS = (16, 128)  # most splits that are joined at once; only two values, because each is compiled
FEW = 64  # queries of a KV head that one program always takes together
SCRATCH = 128 << 20  # bytes of partial results that the ranges of several samples may have
ENOUGH = 256  # programs of a sample, each with 128 queries of a head, that fill a GPU without splitting the rows


@triton.jit
def add_tile(logits, v, m, norm, acc):
    """Add a tile of rows to an online softmax in base 2.

    Logits (M, N) are -inf where a query does not see a row; v (N, D) are the values. The running maxima m (M,), sums of
    weights `norm` (M,) and weighted values `acc` (M, D) are returned with the tile.
    """
    new = tl.maximum(m, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(logits - safe[:, None])
    shrink = tl.exp2(m - safe)
    norm = norm * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")  # (M, D)
    return new, norm, acc


@triton.jit
def cap_tile(logits, CAP: tl.constexpr):
    """Return CAP·tanh(logits / CAP), or the logits if CAP is None. Both are in the same base."""
    if CAP is not None:
        logits = CAP - 2.0 * CAP / (1.0 + tl.exp2(logits * (2.0 * LOG2E / CAP)))
    return logits


@triton.jit
def add_sink(m, norm, acc, sink):
    """Add a sink, a term of the denominator without a value, to an online softmax in base 2. Shapes as in `add_tile`.

    `sink` (M,) is a logit in base e; -inf for none.
    """
    sink = sink.to(tl.float32) * LOG2E
    new = tl.maximum(m, sink)
    shrink = tl.exp2(m - new)
    return new, norm * shrink + tl.exp2(sink - new), acc * shrink[:, None]


@triton.jit
def attend_tile(
    q,
    m,
    norm,
    acc,
    keys,
    values,
    mass,
    stride_k,
    stride_v,
    row,
    stop,
    limit,
    offset,
    columns,
    dim,
    scale,
    MASS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    CAST: tl.constexpr,
    LARGEST: tl.constexpr = False,
    asking=None,
    largest=None,
    CAP: tl.constexpr = None,
    WINDOW: tl.constexpr = None,
):
    """Process one tile of rows.

    `row` (N,) are the rows' indices; those before `stop` exist. With MASKED a query sees rows up to `limit` (M,).
    `offset` is the number of elements from keys and values to row 0. With LARGEST, each row's largest product with the
    queries that there are, `asking` (M,), is stored. CAP is the cap of the logits in base 2, or None. With
    MASKED and a WINDOW a query sees no more than so many rows.
    """
    here = row < stop
    where = here[:, None] if WHOLE else here[:, None] & (columns < dim)[None]
    k = tl.load(keys + row[:, None].to(tl.int64) * stride_k + columns[None], mask=where, other=0.0)  # (N, D)
    v = tl.load(values + row[:, None].to(tl.int64) * stride_v + columns[None], mask=where, other=0.0)  # (N, D)
    if CAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    logits = tl.dot(q, k.T, input_precision="ieee")  # (M, N); for float32 inputs; other products are exact anyway
    if LARGEST:
        tl.store(largest + row, tl.max(tl.where(asking[:, None], logits, float("-inf")), 0), mask=here)
    logits = cap_tile(logits * scale, CAP)
    if MASS:
        weight = tl.load(mass + offset + row, mask=here, other=1).to(tl.float32)  # (N,)
        logits += tl.log2(weight)[None]
    if MASKED:
        seen = here[None] & (row[None] <= limit[:, None])
        if WINDOW is not None:
            seen = seen & (row[None] > limit[:, None] - WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
    else:
        logits = tl.where(here[None], logits, float("-inf"))
    return add_tile(logits, v, m, norm, acc)


@triton.jit(do_not_specialize=["tokens", "tail", "splits", "room"])
def _few(
    queries,
    held_keys,
    held_values,
    held_mass,
    starts,
    lengths,
    tail_keys,
    tail_values,
    step,
    largest,
    outputs,
    lse,
    part_acc,
    part_max,
    part_norm,
    sinks,
    query_heads,
    heads,
    tokens,
    tail,
    splits,
    room,
    dim,
    scale,
    sq_b,
    sq_h,
    sq_t,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    HELD: tl.constexpr,
    MASS: tl.constexpr,
    STEP: tl.constexpr,
    SINGLE: tl.constexpr,
    LSE: tl.constexpr,
    LARGEST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend with M queries of one KV head to one of `splits` ranges of its rows.

    The queries are in the order (query head of the group, token).
    """
    head, split = tl.program_id(0), tl.program_id(1)
    b, h = head // heads, head % heads
    group = query_heads // heads
    if STEP:
        tail += tl.load(step)
    columns = tl.arange(0, D)
    index = tl.program_id(2) * M + tl.arange(0, M)
    t = index % tokens
    asking = index < group * tokens
    query_head = h * group + index // tokens
    where = asking[:, None] & (columns < dim)[None]
    q = tl.load(
        queries
        + b.to(tl.int64) * sq_b
        + query_head[:, None].to(tl.int64) * sq_h
        + t[:, None].to(tl.int64) * sq_t
        + columns[None],
        mask=where,
        other=0.0,
    )  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    length = 0
    if HELD:
        length = tl.load(lengths + head).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length + tail, splits), N) * N
    low = split * share
    high = tl.minimum(low + share, length + tail)
    if HELD:
        start = tl.load(starts + head)
        stop = tl.minimum(high, length)
        for first in range(low, stop, N):
            m, norm, acc = attend_tile(
                q,
                m,
                norm,
                acc,
                held_keys + start * dim,
                held_values + start * dim,
                held_mass,
                dim,
                dim,
                first + tl.arange(0, N),
                stop,
                t,
                start,
                columns,
                dim,
                scale,
                MASS,
                False,
                WHOLE,
                CAST,
                CAP=CAP,
            )
    keys = tail_keys + b.to(tl.int64) * sk_b + h.to(tl.int64) * sk_h
    values = tail_values + b.to(tl.int64) * sv_b + h.to(tl.int64) * sv_h
    limit = tail - tokens + t
    for first in range(tl.maximum(low - length, 0), high - length, N):
        m, norm, acc = attend_tile(
            q,
            m,
            norm,
            acc,
            keys,
            values,
            held_mass,
            sk_n,
            sv_n,
            first + tl.arange(0, N),
            high - length,
            limit,
            0,
            columns,
            dim,
            scale,
            False,
            True,
            WHOLE,
            CAST,
            LARGEST,
            asking,
            largest + head.to(tl.int64) * room,
            CAP,
            WINDOW,
        )
    if SINGLE:
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=asking, other=float("-inf"))
            m, norm, acc = add_sink(m, norm, acc, sink)
        place = (b.to(tl.int64) * query_heads + query_head) * tokens + t
        tl.store(outputs + place[:, None] * dim + columns[None], acc / norm[:, None], mask=where)
        if LSE:
            tl.store(lse + place, (m + tl.log2(norm)) / LOG2E, mask=asking)
    else:
        part = ((head * splits + split) * group * tokens + index).to(tl.int64)
        tl.store(part_acc + part[:, None] * dim + columns[None], acc, mask=where)
        tl.store(part_max + part, m, mask=asking)
        tl.store(part_norm + part, norm, mask=asking)


@triton.jit(do_not_specialize=["tokens", "splits"])
def combine_splits(
    part_acc,
    part_max,
    part_norm,
    outputs,
    lse,
    tokens,
    group,
    splits,
    dim,
    LSE: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    sinks=None,
    query_heads=1,
):
    """Join the splits of one query, and its head's sink. There is a program for each (sample, query head, token)."""
    place = tl.program_id(0).to(tl.int64)
    head, rest = place // (group * tokens), place % (group * tokens)
    split, columns = tl.arange(0, S), tl.arange(0, D)
    index = (head * splits + split) * group * tokens + rest
    m = tl.load(part_max + index, mask=split < splits, other=float("-inf"))  # (S,)
    norm = tl.load(part_norm + index, mask=split < splits, other=0.0)  # (S,)
    where = (split < splits)[:, None] & (columns < dim)[None]
    acc = tl.load(part_acc + index[:, None] * dim + columns[None], mask=where, other=0.0)  # (S, D)
    most = tl.max(m, 0)
    if sinks is not None:
        sink = tl.load(sinks + place // tokens % query_heads).to(tl.float32) * LOG2E
        most = tl.maximum(most, sink)
    weight = tl.exp2(m - most)
    total = tl.sum(weight * norm, 0)
    if sinks is not None:
        total += tl.exp2(sink - most)
    tl.store(outputs + place * dim + columns, tl.sum(acc * weight[:, None], 0) / total, mask=columns < dim)
    if LSE:
        tl.store(lse + place, (most + tl.log2(total)) / LOG2E)


@triton.jit(do_not_specialize=["tokens", "tail"])
def _many(
    queries,
    held_keys,
    held_values,
    held_mass,
    starts,
    lengths,
    tail_keys,
    tail_values,
    outputs,
    lse,
    sinks,
    query_heads,
    heads,
    tokens,
    tail,
    dim,
    scale,
    sq_b,
    sq_h,
    sq_t,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    HELD: tl.constexpr,
    MASS: tl.constexpr,
    LSE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend with M queries of one query head to the rows that they see. The last queries see most and come first."""
    block, query_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, head_of_sample = query_head // query_heads, query_head % query_heads
    h = head_of_sample // (query_heads // heads)
    columns, t = tl.arange(0, D), block * M + tl.arange(0, M)
    where = (t < tokens)[:, None] & (columns < dim)[None]
    q = tl.load(
        queries
        + b.to(tl.int64) * sq_b
        + head_of_sample.to(tl.int64) * sq_h
        + t[:, None].to(tl.int64) * sq_t
        + columns[None],
        mask=where,
        other=0.0,
    )  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    limit = tail - tokens + t
    if HELD:
        start, length = tl.load(starts + b * heads + h), tl.load(lengths + b * heads + h).to(tl.int32)
        for first in range(0, length, N):
            m, norm, acc = attend_tile(
                q,
                m,
                norm,
                acc,
                held_keys + start * dim,
                held_values + start * dim,
                held_mass,
                dim,
                dim,
                first + tl.arange(0, N),
                length,
                t,
                start,
                columns,
                dim,
                scale,
                MASS,
                False,
                WHOLE,
                CAST,
                CAP=CAP,
            )
    keys = tail_keys + b.to(tl.int64) * sk_b + h.to(tl.int64) * sk_h
    values = tail_values + b.to(tl.int64) * sv_b + h.to(tl.int64) * sv_h
    whole = (tail - tokens + block * M + 1) // N * N  # all queries see the rows before this one
    if WINDOW is not None:  # none sees rows before the first one's window
        whole = tl.maximum(tail - tokens + block * M + 1 - WINDOW, 0) // N * N
    for first in range(0 if WINDOW is None else whole, whole, N):
        m, norm, acc = attend_tile(
            q,
            m,
            norm,
            acc,
            keys,
            values,
            held_mass,
            sk_n,
            sv_n,
            first + tl.arange(0, N),
            whole,
            limit,
            0,
            columns,
            dim,
            scale,
            False,
            False,
            WHOLE,
            CAST,
            CAP=CAP,
        )
    for first in range(whole, tl.minimum(tail, tail - tokens + (block + 1) * M), N):
        m, norm, acc = attend_tile(
            q,
            m,
            norm,
            acc,
            keys,
            values,
            held_mass,
            sk_n,
            sv_n,
            first + tl.arange(0, N),
            tail,
            limit,
            0,
            columns,
            dim,
            scale,
            False,
            True,
            WHOLE,
            CAST,
            CAP=CAP,
            WINDOW=WINDOW,
        )
    if sinks is not None:
        m, norm, acc = add_sink(m, norm, acc, tl.load(sinks + head_of_sample + tl.zeros([M], tl.int32)))
    place = query_head.to(tl.int64) * tokens + t
    tl.store(outputs + place[:, None] * dim + columns[None], acc / norm[:, None], mask=where)
    if LSE:
        tl.store(lse + place, (m + tl.log2(norm)) / LOG2E, mask=t < tokens)


def count_together(queries: Tensor) -> int:
    """Return how many queries of a KV head a program takes at most if its rows are split."""
    if queries.dtype == torch.float32:
        return 32
    return 64 if queries.shape[3] > 128 else 128


def find_cap(extras: SoftmaxExtras | None) -> float | None:
    """Return the cap of logits in base 2, or None if there is none. Kernels are compiled for it."""
    cap = get_cap(extras)
    return None if cap is None else cap * LOG2E.value


def attend_triton(
    queries: Tensor,
    held: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    longest: int,
    tail: int,
    lse: bool,
    step: Tensor | None,
    largest: Tensor | None,
    extras: SoftmaxExtras | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `attend_ragged`. `longest` is the largest number of rows that a head may have.

    `largest` is given only if a program can take all queries of a KV head (`count_together`). `window` is the number of
    rows that a query sees at most, if no rows are held.
    """
    batch, query_heads, tokens, dim = queries.shape
    heads = keys.shape[1]
    group = query_heads // heads
    queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
    outputs = torch.empty(batch, query_heads, tokens, dim, dtype=queries.dtype, device=queries.device)
    sums = torch.empty(batch, query_heads, tokens, dtype=torch.float32, device=queries.device) if lse else outputs
    held_keys, held_values, mass, starts, lengths = held or (keys, values, None, keys, keys)
    exact = queries.dtype == torch.float32
    sizes = {
        "D": max(16, triton.next_power_of_2(dim)),
        "WHOLE": dim in (16, 32, 64, 128, 256),
        "HELD": held is not None,
        "MASS": mass is not None,
        "LSE": lse,
        "CAST": triton.knobs.runtime.interpret and queries.dtype == torch.bfloat16,
        "CAP": find_cap(extras),
        "WINDOW": window,
    }
    strides = (*queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3])
    scale, mass = scaling * LOG2E.value, held_keys if mass is None else mass
    sinks = get_sinks(extras)
    given = (queries, held_keys, held_values, mass, starts, lengths, keys, values)
    block_of_prompt = group * tokens > FEW  # rounded alike in any batch, because methods select rows by it
    if block_of_prompt and largest is None and query_heads * triton.cdiv(tokens, 128) >= ENOUGH:
        rows = 64 if exact or sizes["D"] > 128 else 128
        grid = (triton.cdiv(tokens, rows), batch * query_heads)
        _many[grid](
            *given,
            outputs,
            sums,
            sinks,
            query_heads,
            heads,
            tokens,
            tail,
            dim,
            scale,
            *strides,
            M=rows,
            N=32 if exact else 64,
            **sizes,
            num_warps=4 if exact else 8,
            num_stages=2 if exact else 3,
        )
        return outputs, sums if lse else None
    widest = count_together(queries)
    rows = 16 if group * tokens <= 16 else min(64, widest) if group * tokens <= 64 else widest
    block, tiles = 32 if exact or sizes["D"] > 128 else 64, triton.cdiv(group * tokens, rows)
    samples = 1 if block_of_prompt else batch
    most = min(max(1, PROGRAMS[rows] // (samples * heads * tiles)), SPLITS[1])
    splits = min(most, triton.cdiv(longest, 2 * block))
    needed = 4 * heads * splits * group * tokens * (dim + 2)  # bytes of a sample
    if most > 1 and samples < batch and batch * needed > SCRATCH:
        some = max(1, SCRATCH // needed)
        for low in range(0, batch, some):
            chunk, lines = slice(low, low + some), slice(low * heads, (low + some) * heads)
            cut = held and (*held[:3], held[3][lines], held[4][lines])
            outputs[chunk], part_sums = attend_triton(
                queries[chunk],
                cut,
                keys[chunk],
                values[chunk],
                scaling,
                longest,
                tail,
                lse,
                step,
                None if largest is None else largest[chunk],
                extras,
                window,
            )
            if part_sums is not None:
                sums[chunk] = part_sums
        return outputs, sums if lse else None
    parts = [outputs, outputs, outputs]
    if most > 1:  # not `splits`: it follows from lengths, and each value of a constant is compiled
        parts = [
            torch.empty(batch * heads, splits, group * tokens, *more, dtype=torch.float32, device=queries.device)
            for more in ((dim,), (), ())
        ]
    _few[batch * heads, splits, tiles](
        *given,
        step,
        outputs if largest is None else largest,
        outputs,
        sums,
        *parts,
        sinks,
        query_heads,
        heads,
        tokens,
        tail,
        splits,
        keys.shape[2],
        dim,
        scale,
        *strides,
        STEP=step is not None,
        SINGLE=most == 1,
        LARGEST=largest is not None,
        M=rows,
        N=block,
        **sizes,
        num_warps=8 if rows == 128 else 4,
        num_stages=2 if exact else 3,
    )
    if most > 1:
        combine_splits[(batch * query_heads * tokens,)](
            *parts,
            outputs,
            sums,
            tokens,
            group,
            splits,
            dim,
            LSE=lse,
            S=SPLITS[most > SPLITS[0]],
            D=sizes["D"],
            sinks=sinks,
            query_heads=query_heads,
            num_warps=4,
        )
    return outputs, sums if lse else None
