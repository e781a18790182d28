"""Append to the rows of several contexts in one launch, and attend to them in two. README.md has the plan."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, attend_tile, find_cap
from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.joined_rows.rows import JoinedLayer
from kvbench.kernels.rope_append.triton import rotate_head
from kvbench.kernels.softmax_extras import SoftmaxExtras, get_sinks

# the columns of `JoinedLayer.table`
HELD_KEYS, HELD_VALUES, TAIL_KEYS, TAIL_VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIRST_MASS, TAIL, FIRST, COUNT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
COLUMNS = tl.constexpr(8)
AT_ONCE = 32  # programs of a head whose results are joined at once


@triton.jit
def _append_joined(
    queries,
    keys,
    values,
    cos,
    sin,
    places,
    query_norm,
    key_norm,
    tail_keys,
    tail_values,
    out,
    table,
    step,
    heads,
    query_heads,
    dim,
    turning,
    epsilon,
    s_q,
    s_k,
    s_v,
    NORM: tl.constexpr,
    D: tl.constexpr,
):
    """Rotate or write one head of one sample. A sample has programs for its queries, its keys and its values."""
    b, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    since = tl.load(step)
    at = tl.load(places + b) + since
    column = tl.arange(0, D)
    there = column < dim
    if number < query_heads:
        source = queries + b * s_q + number * dim
        turned = rotate_head(source, query_norm, cos, sin, at, column, turning, dim, epsilon, out, NORM)
        tl.store(out + (b * query_heads + number) * dim + column, turned, mask=there)
    else:
        h = (number - query_heads) % heads
        line = table + (b * heads + h) * COLUMNS
        row = (tl.load(line + TAIL) + since) * dim
        if number < query_heads + heads:
            source = keys + b * s_k + h * dim
            turned = rotate_head(source, key_norm, cos, sin, at, column, turning, dim, epsilon, out, NORM)
            tl.store(tail_keys + tl.load(line + TAIL_KEYS) + row + column, turned, mask=there)
        else:
            value = tl.load(values + b * s_v + h * dim + column, mask=there)  # (D,)
            tl.store(tail_values + tl.load(line + TAIL_VALUES) + row + column, value, mask=there)


@triton.jit
def _attend_joined(
    queries,
    keys,
    values,
    table,
    starts,
    lengths,
    mass,
    programs,
    step,
    part_acc,
    part_max,
    part_norm,
    group,
    dim,
    scale,
    MASS: tl.constexpr,
    ALIGN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    CAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend with M queries of one KV head to one of the ranges of its rows."""
    program = tl.program_id(0).to(tl.int64)
    head = tl.load(programs + program)
    line = table + head * COLUMNS
    columns = tl.arange(0, D)
    index = tl.program_id(1) * M + tl.arange(0, M)
    asking = index < group
    where = asking[:, None] & (columns < dim)[None]
    q = tl.load(queries + (head * group + index)[:, None] * dim + columns[None], mask=where, other=0.0)  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    start, length = tl.load(starts + head), tl.load(lengths + head).to(tl.int32)
    rows = length + tl.load(line + TAIL).to(tl.int32) + tl.load(step) + 1
    share = tl.cdiv(tl.cdiv(rows, tl.load(line + COUNT).to(tl.int32)), N) * N
    low = (program - tl.load(line + FIRST)).to(tl.int32) * share
    high = tl.minimum(low + share, rows)
    stop = tl.minimum(high, length)
    held_keys = keys + tl.multiple_of(tl.load(line + HELD_KEYS), ALIGN) + start * dim
    held_values = values + tl.multiple_of(tl.load(line + HELD_VALUES), ALIGN) + start * dim
    first_mass = tl.load(line + FIRST_MASS)
    first_mass = tl.where(first_mass < 0, 0, first_mass + start)  # the first masses are ones, for rows without a mass
    for first in range(low, stop, N):
        m, norm, acc = attend_tile(
            q,
            m,
            norm,
            acc,
            held_keys,
            held_values,
            mass,
            dim,
            dim,
            first + tl.arange(0, N),
            stop,
            index,
            first_mass,
            columns,
            dim,
            scale,
            MASS,
            False,
            WHOLE,
            CAST,
            CAP=CAP,
        )
    tail_keys = keys + tl.multiple_of(tl.load(line + TAIL_KEYS), ALIGN)
    tail_values = values + tl.multiple_of(tl.load(line + TAIL_VALUES), ALIGN)
    for first in range(tl.maximum(low - length, 0), high - length, N):
        m, norm, acc = attend_tile(
            q,
            m,
            norm,
            acc,
            tail_keys,
            tail_values,
            mass,
            dim,
            dim,
            first + tl.arange(0, N),
            high - length,
            index,
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
    part = program * group + index
    tl.store(part_acc + part[:, None] * dim + columns[None], acc, mask=where)
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


@triton.jit
def _combine_joined(
    part_acc, part_max, part_norm, table, outputs, sinks, query_heads, group, dim, S: tl.constexpr, D: tl.constexpr
):
    """Join what the programs of one head found for one query, S programs at once, and its head's sink."""
    place = tl.program_id(0).to(tl.int64)
    line = table + place // group * COLUMNS
    before, count = tl.load(line + FIRST), tl.load(line + COUNT).to(tl.int32)
    columns = tl.arange(0, D)
    most = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for begin in range(0, count, S):
        program = begin + tl.arange(0, S)
        here = program < count
        part = (before + program) * group + place % group
        m = tl.load(part_max + part, mask=here, other=float("-inf"))  # (S,)
        norm = tl.load(part_norm + part, mask=here, other=0.0)  # (S,)
        where = here[:, None] & (columns < dim)[None]
        some = tl.load(part_acc + part[:, None] * dim + columns[None], mask=where, other=0.0)  # (S, D)
        new = tl.maximum(most, tl.max(m, 0))  # finite, because a head's first program has rows
        weight, shrink = tl.exp2(m - new), tl.exp2(most - new)
        total = total * shrink + tl.sum(weight * norm, 0)
        acc = acc * shrink + tl.sum(some * weight[:, None], 0)
        most = new
    if sinks is not None:
        sink = tl.load(sinks + place % query_heads).to(tl.float32) * LOG2E
        new = tl.maximum(most, sink)
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.exp2(sink - new)
        acc *= shrink
    tl.store(outputs + place * dim + columns, acc / total, mask=columns < dim)


def append_joined_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    layer: JoinedLayer,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    samples, heads, dim = layer.shape
    query_heads, tails = queries.shape[1] // dim, layer.parts[0]
    out = torch.empty(samples, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    query_norm, key_norm, epsilon = norms or (queries, keys, 0.0)
    _append_joined[(samples, query_heads + 2 * heads)](
        queries,
        keys,
        values,
        cos,
        sin,
        places,
        query_norm,
        key_norm,
        tails.tail_keys,
        tails.tail_values,
        out,
        layer.table,
        step,
        heads,
        query_heads,
        dim,
        cos.shape[1],
        epsilon,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        NORM=norms is not None,
        D=triton.next_power_of_2(dim),
        num_warps=1 if dim <= 64 else 2,
    )
    return out


def attend_joined_triton(
    queries: Tensor, layer: JoinedLayer, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    samples, heads, dim = layer.shape
    query_heads, tails, count = queries.shape[1], layer.parts[0], len(layer.programs)
    group, exact, wide = query_heads // heads, queries.dtype == torch.float32, max(16, triton.next_power_of_2(dim))
    queries_each = 16 if group <= 16 else 32 if exact else 64  # queries of a program
    outputs = torch.empty(samples, query_heads, 1, dim, dtype=queries.dtype, device=queries.device)
    partials = [
        torch.empty(count, group, *more, dtype=torch.float32, device=queries.device) for more in ((dim,), (), ())
    ]
    _attend_joined[count, triton.cdiv(group, queries_each)](
        queries.contiguous(),
        tails.tail_keys,
        tails.tail_values,
        layer.table,
        layer.starts,
        layer.lengths,
        layer.table if layer.mass is None else layer.mass,
        layer.programs,
        step,
        *partials,
        group,
        dim,
        scaling * LOG2E.value,
        MASS=layer.mass is not None,
        ALIGN=layer.align,
        M=queries_each,
        N=32 if exact or wide > 128 else 64,
        D=wide,
        WHOLE=dim in (16, 32, 64, 128, 256),
        CAST=is_interpreting() and queries.dtype == torch.bfloat16,
        CAP=find_cap(extras),
        num_warps=4,
        num_stages=2 if exact else 3,
    )
    more = get_sinks(extras), query_heads, group, dim
    _combine_joined[(samples * query_heads,)](*partials, layer.table, outputs, *more, S=AT_ONCE, D=wide, num_warps=4)
    return outputs
