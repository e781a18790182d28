"""Norm, rotation and write in Triton, with a program for each token and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rounded(x, like):
    """Round float32 numbers to the dtype that the pointer `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def rotate_head(source, scale, cos, sin, at, column, turning, dim, epsilon, like, NORM: tl.constexpr):
    """Norm and rotate one head of one token, (D,) at `source`, by row `at` of cos and sin, in the dtype of `like`.

    The normed head is rounded to the dtype of its weight `scale` first.
    """
    there = column < dim
    half = turning // 2
    other = tl.where(column < half, column + half, tl.where(column < turning, column - half, column))
    x = tl.load(source + column, mask=there, other=0.0).to(tl.float32)  # (D,)
    y = tl.load(source + other, mask=there, other=0.0).to(tl.float32)  # (D,)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + epsilon)
        one = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)  # (D,)
        two = tl.load(scale + other, mask=there, other=0.0).to(tl.float32)  # (D,)
        x = _rounded(_rounded(x * inverse, scale) * one, like)
        y = _rounded(_rounded(y * inverse, scale) * two, like)
    angle = at * turning + column
    c = _rounded(tl.load(cos + angle, mask=column < turning, other=1.0).to(tl.float32), like)  # (D,)
    s = _rounded(tl.load(sin + angle, mask=column < turning, other=0.0).to(tl.float32), like)  # (D,)
    y = tl.where(column < half, -y, y)
    return _rounded(x * c, like) + _rounded(y * s, like)


@triton.jit(do_not_specialize=["tail", "tokens"])
def _append(
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    tail_keys,
    tail_values,
    out,
    step,
    slots,
    starts,
    offsets,
    tail,
    tokens,
    heads,
    query_heads,
    dim,
    turning,
    epsilon,
    s_q,
    s_k,
    s_v,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    NORM: tl.constexpr,
    SLOTS: tl.constexpr,
    STARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROTATE: tl.constexpr,
    RING: tl.constexpr,
    D: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    b, t = (token // tokens).to(tl.int64), token % tokens
    first = tl.load(step)
    column = tl.arange(0, D)
    there = column < dim
    row = tail + first + t
    if RING > 0:  # the rows of the tail, if it is a ring
        row = row % RING
    at = first + t
    if OFFSETS:
        at += tl.load(offsets + b).to(tl.int32)
    if SLOTS and head >= query_heads:
        row = tl.load(slots + b * heads + (head - query_heads) % heads).to(tl.int32)
        if STARTS:
            row += tl.load(starts + b * heads + (head - query_heads) % heads).to(tl.int32)
    if head >= query_heads + heads:
        h = head - query_heads - heads
        value = tl.load(values + token.to(tl.int64) * s_v + h * dim + column, mask=there)  # (D,)
        into = tail_values + b * sv_b + h.to(tl.int64) * sv_h + row.to(tl.int64) * sv_n
        tl.store(into + column, value, mask=there)
    else:
        is_key = head >= query_heads
        h = tl.where(is_key, head - query_heads, head)
        source = queries + token.to(tl.int64) * s_q + h * dim
        scale = query_norm
        if is_key:
            source = keys + token.to(tl.int64) * s_k + h * dim
            scale = key_norm
        rotated = rotate_head(source, scale, cos, sin, at, column, turning, dim, epsilon, out, NORM)
        if is_key:
            if not ROTATE:  # as projected
                rotated = tl.load(source + column, mask=there, other=0.0).to(tl.float32)  # (D,)
            place = tail_keys + b * sk_b + h.to(tl.int64) * sk_h + row.to(tl.int64) * sk_n
            tl.store(place + column, rotated, mask=there)
        else:
            tl.store(out + ((b * query_heads + h) * tokens + t) * dim + column, rotated, mask=there)


def append_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail: int,
    step: Tensor,
    slots: Tensor | None,
    starts: Tensor | None,
    offsets: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    rotates_keys: bool,
    wraps: bool,
) -> Tensor:
    (batch, heads), dim = tail_keys.shape[:2] if starts is None else starts.shape, tail_keys.shape[-1]
    into = [memory.stride()[:3] if starts is None else (0, 0, memory.stride(0)) for memory in (tail_keys, tail_values)]
    tokens, query_heads = len(keys) // batch, queries.shape[1] // dim
    out = torch.empty(batch, query_heads, tokens, dim, dtype=queries.dtype, device=queries.device)
    query_norm, key_norm, epsilon = norms or (queries, keys, 0.0)
    _append[(len(keys), query_heads + 2 * heads)](
        queries,
        keys,
        values,
        cos,
        sin,
        query_norm,
        key_norm,
        tail_keys,
        tail_values,
        out,
        step,
        step if slots is None else slots,
        step if starts is None else starts,
        step if offsets is None else offsets,
        tail,
        tokens,
        heads,
        query_heads,
        dim,
        cos.shape[1],
        epsilon,
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        *into[0],
        *into[1],
        NORM=norms is not None,
        SLOTS=slots is not None,
        STARTS=starts is not None,
        OFFSETS=offsets is not None,
        ROTATE=rotates_keys,
        RING=tail_keys.shape[2] if wraps else 0,
        D=triton.next_power_of_2(dim),
        num_warps=1 if dim <= 64 else 2,
    )
    return out
