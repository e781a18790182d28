"""Moments of queries and expected scores of keys, each by streaming kernels. Derivation: README.md.

A product of bfloat16 keys with float32 matrices is computed as two bfloat16 products. x = high + low, with 8 bits each,
equals x to 2^-17, and costs as much as one TF32 product (2^-11). Factors of the scatter of bfloat16 queries are rounded
to bfloat16. float16 rows use three TF32 products, float32 rows IEEE arithmetic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.expected_attention.gaussian import Moments

QUERY_PROGRAMS = 264  # two for each SM of an H100
KEY_PROGRAMS = 1056
PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "ieee"}


@triton.jit
def upright(
    queries, cos, sin, token, end, q_t, q_d, c_t, c_d, s_t, s_d, DIM: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr
):
    """Load two halves of the channels of some tokens, (tokens, C) each in float32, and rotate them back.

    Tokens from `end` on are 0. The first 2·HALF channels are rotated in pairs.
    """
    first, second, pair = halves(DIM, HALF, C)
    here = (token < end)[:, None]
    if DIM == 2 * C:
        mask, other = here, here
    else:
        mask, other = here & (pair < (DIM + 1) // 2)[None, :], here & (pair < DIM // 2)[None, :]
    # (BLOCK_T, BLOCK_C)
    x = tl.load(queries + token[:, None] * q_t + first[None, :] * q_d, mask=mask, other=0.0).to(tl.float32)
    # (BLOCK_T, BLOCK_C)
    y = tl.load(queries + token[:, None] * q_t + second[None, :] * q_d, mask=other, other=0.0).to(tl.float32)
    if HALF > 0:
        turns = here if HALF == C else here & (pair < HALF)[None, :]
        # (BLOCK_T, BLOCK_C)
        c = tl.load(cos + token[:, None] * c_t + pair[None, :] * c_d, mask=turns, other=1.0).to(tl.float32)
        # (BLOCK_T, BLOCK_C)
        s = tl.load(sin + token[:, None] * s_t + pair[None, :] * s_d, mask=turns, other=0.0).to(tl.float32)
        scale = 1.0 / (c * c + s * s)
        c, s = c * scale, s * scale  # x and y stay, because a product rounded later would differ from the shift's
        x, y = x * c + y * s, y * c - x * s
    return x, y


@triton.jit
def halves(DIM: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr):
    """Return the channels of both halves of a head, (C,) each, and the index of each pair."""
    pair = tl.arange(0, C)
    first = tl.where(pair < HALF, pair, pair + HALF)
    second = tl.where(pair < HALF, pair + HALF, pair + (DIM + 1) // 2)
    return first, second, pair


@triton.jit
def outer(x, y, total, PRECISION: tl.constexpr):
    """Return total + xᵀy."""
    return tl.dot(tl.trans(x), y, total, input_precision=PRECISION)  # (BLOCK_C, BLOCK_C)


@triton.jit(do_not_specialize=["tokens", "per"])
def moments_kernel(
    queries,
    cos,
    sin,
    sums,
    shifts,
    scatters,
    tokens,
    per,
    heads,
    q_b,
    q_h,
    q_t,
    q_d,
    c_t,
    c_d,
    s_t,
    s_d,
    SCATTER: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    QUARTERS: tl.constexpr,
    ROUND: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute Σ(q - c) and Σ(q - c)(q - c)ᵀ over `per` queries of a head, where c is the mean of the first few.

    With ROUND each factor is rounded to bfloat16.
    """
    which, split = tl.program_id(0), tl.program_id(1)  # heads at the same tokens run together and share cos and sin
    first = (split * per).to(tl.int64)
    queries += (which // heads).to(tl.int64) * q_b + (which % heads).to(tl.int64) * q_h + first * q_t
    cos += first * c_t
    sin += first * s_t
    end = tl.minimum(per, tokens - split * per)
    member = tl.arange(0, BLOCK_T)
    few = tl.minimum(end, BLOCK_T).to(tl.float32)
    x, y = upright(queries, cos, sin, member, end, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF, BLOCK_C)
    x_shift, y_shift = tl.sum(x, 0) / few, tl.sum(y, 0) / few
    x_total, y_total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32), tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    cross, others = square, square
    for start in range(0, end, BLOCK_T):
        token = start + member
        here = (token < end)[:, None]
        x, y = upright(queries, cos, sin, token, end, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF, BLOCK_C)
        x, y = tl.where(here, x - x_shift[None, :], 0.0), tl.where(here, y - y_shift[None, :], 0.0)
        x_total += x
        y_total += y
        if SCATTER:
            left, right = x, y
            if ROUND:
                left, right = x.to(tl.bfloat16), y.to(tl.bfloat16)
            if CAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            if QUARTERS:  # a program computes one quarter, otherwise all
                quarter = tl.program_id(2)
                left, right = tl.where(quarter == 2, right, left), tl.where(quarter == 0, left, right)
                square = outer(left, right, square, PRECISION)
            else:
                square = outer(left, left, square, PRECISION)
                cross = outer(left, right, cross, PRECISION)
                others = outer(right, right, others, PRECISION)
    low, high, pair = halves(DIM, HALF, BLOCK_C)
    at = split.to(tl.int64) * tl.num_programs(0) + which
    there, more = pair < (DIM + 1) // 2, pair < DIM // 2
    tl.store(sums + at * DIM + low, tl.sum(x_total, 0), mask=there)
    tl.store(sums + at * DIM + high, tl.sum(y_total, 0), mask=more)
    tl.store(shifts + at * DIM + low, x_shift, mask=there)
    tl.store(shifts + at * DIM + high, y_shift, mask=more)
    if SCATTER:
        scatters += at * DIM * DIM
        if QUARTERS:
            quarter = tl.program_id(2)
            row, column = tl.where(quarter == 2, high, low), tl.where(quarter == 0, low, high)
            held, all_held = tl.where(quarter == 2, more, there), tl.where(quarter == 0, there, more)
            store_block(scatters, row, column, held, all_held, square, DIM)
            store_block(scatters, column, row, all_held & (quarter == 1), held, tl.trans(square), DIM)
        else:
            store_block(scatters, low, low, there, there, square, DIM)
            store_block(scatters, low, high, there, more, cross, DIM)
            store_block(scatters, high, low, more, there, tl.trans(cross), DIM)
            store_block(scatters, high, high, more, more, others, DIM)


@triton.jit
def store_block(square, row, column, held, all_held, block, DIM: tl.constexpr):
    mask = held[:, None] & all_held[None, :]
    tl.store(square + row[:, None] * DIM + column[None, :], block, mask=mask)


@triton.jit(do_not_specialize=["tokens", "per", "splits"])
def join_kernel(
    sums,
    shifts,
    scatters,
    mean,
    scatter,
    tokens,
    per,
    splits,
    SCATTER: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the parts of a head's mean and scatter, ROWS at a time. Each part has a shift of its own."""
    which, heads = tl.program_id(0), tl.num_programs(0)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    held_rows, held_columns = row < DIM, column < DIM
    base, all_base = (
        tl.load(shifts + which * DIM + row, mask=held_rows),
        tl.load(shifts + which * DIM + column, mask=held_columns),
    )  # (ROWS,), (BLOCK_D,)
    middle, all_middle = tl.zeros((ROWS,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for split in range(splits):
        at, count = (split * heads + which).to(tl.int64) * DIM, tl.minimum(per, tokens - split * per).to(tl.float32)
        apart = tl.load(shifts + at + row, mask=held_rows, other=0.0) - base  # (ROWS,)
        middle += apart * count + tl.load(sums + at + row, mask=held_rows, other=0.0)  # (ROWS,)
        apart = tl.load(shifts + at + column, mask=held_columns, other=0.0) - all_base  # (BLOCK_D,)
        all_middle += apart * count + tl.load(sums + at + column, mask=held_columns, other=0.0)  # (BLOCK_D,)
    middle, all_middle = base + middle / tokens, all_base + all_middle / tokens
    tl.store(mean + which * DIM + row, middle, mask=held_rows)
    if SCATTER:
        here = held_rows[:, None] & held_columns[None, :]
        total = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for split in range(splits):
            at, count = (split * heads + which).to(tl.int64) * DIM, tl.minimum(per, tokens - split * per).to(tl.float32)
            inside = tl.load(sums + at + row, mask=held_rows, other=0.0)  # (ROWS,)
            all_inside = tl.load(sums + at + column, mask=held_columns, other=0.0)  # (BLOCK_D,)
            away = tl.load(shifts + at + row, mask=held_rows, other=0.0) + inside / count - middle  # (ROWS,)
            # (BLOCK_D,)
            all_away = tl.load(shifts + at + column, mask=held_columns, other=0.0) + all_inside / count - all_middle
            square = scatters + at * DIM
            part = tl.load(square + row[:, None] * DIM + column[None, :], mask=here, other=0.0)  # (ROWS, BLOCK_D)
            turned = tl.load(square + column[None, :] * DIM + row[:, None], mask=here, other=0.0)  # (ROWS, BLOCK_D)
            total += (part + turned) / 2
            total -= (inside[:, None] * all_inside[None, :]) / count
            total += (away[:, None] * all_away[None, :]) * count
        tl.store(scatter + which * DIM * DIM + row[:, None] * DIM + column[None, :], total, mask=here)


def moments_triton(queries: Tensor, scatter: bool, turn: tuple[Tensor, Tensor] | None) -> Moments:
    batch, heads, tokens, dim = queries.shape
    tiles = query_tiles(queries.dtype, dim)
    quarters = 3 if scatter and tiles["QUARTERS"] else 1
    splits = max(1, min(QUERY_PROGRAMS // (batch * heads * quarters), triton.cdiv(tokens, 4 * tiles["BLOCK_T"])))
    per = triton.cdiv(triton.cdiv(tokens, splits), tiles["BLOCK_T"]) * tiles["BLOCK_T"]
    splits = triton.cdiv(tokens, per)
    new: dict[str, Any] = dict(dtype=torch.float32, device=queries.device)
    sums, shifts = (torch.empty(splits, batch, heads, dim, **new) for _ in range(2))
    mean, whole = torch.empty(batch, heads, dim, **new), None
    scatters = made = mean
    if scatter:
        scatters, made = torch.empty(splits, batch, heads, dim, dim, **new), torch.empty(batch, heads, dim, dim, **new)
        whole = made
    cos, sin = (queries[0, 0],) * 2 if turn is None else turn
    moments_kernel[(batch * heads, splits, quarters)](
        queries,
        cos,
        sin,
        sums,
        shifts,
        scatters,
        tokens,
        per,
        heads,
        *queries.stride(),
        *cos.stride(),
        *sin.stride(),
        SCATTER=scatter,
        HALF=0 if turn is None else cos.shape[1],
        DIM=dim,
        ROUND=queries.dtype == torch.bfloat16,
        CAST=is_interpreting(),
        PRECISION=PRECISION[queries.dtype],
        **tiles,
    )
    join_kernel[(batch * heads, triton.cdiv(dim, 16))](
        sums,
        shifts,
        scatters,
        mean,
        made,
        tokens,
        per,
        splits,
        SCATTER=scatter,
        DIM=dim,
        ROWS=16,
        BLOCK_D=triton.next_power_of_2(dim),
    )
    return Moments(tokens, mean, whole)


def query_tiles(dtype: torch.dtype, dim: int) -> dict[str, int]:
    wide, half = max(16, triton.next_power_of_2(triton.cdiv(dim, 2))), dtype == torch.bfloat16
    warps, stages = (4, 3) if half and wide <= 64 else (8, 2)
    return {"BLOCK_C": wide, "BLOCK_T": 32, "QUARTERS": wide > 64, "num_warps": warps, "num_stages": stages}


@triton.jit
def load_square(covariance, rows, columns, scale, DIM: tl.constexpr, SPLIT: tl.constexpr, CAST: tl.constexpr):
    """Return a block of scale·Σ as high and low bfloat16 with SPLIT, otherwise the block itself, twice."""
    inside = (rows < DIM)[:, None] & (columns < DIM)[None, :]
    whole = tl.load(covariance + rows[:, None] * DIM + columns[None, :], mask=inside, other=0.0) * scale  # (C, C)
    high, low = whole, whole
    if SPLIT:
        high = whole.to(tl.bfloat16)
        low = (whole - high.to(tl.float32)).to(tl.bfloat16)
        if CAST:
            high, low = high.to(tl.float32), low.to(tl.float32)
    return high, low


@triton.jit
def times(key, high, low, side, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """Return side + key·(high + low)."""
    side = tl.dot(key, high, side, input_precision=PRECISION)  # (BLOCK_N, C)
    if SPLIT:
        side = tl.dot(key, low, side, input_precision=PRECISION)  # (BLOCK_N, C)
    return side


@triton.jit(do_not_specialize=["rows", "per", "m_b", "m_h"])
def logits_kernel(
    keys,
    mass,
    mean,
    covariance,
    logits,
    tops,
    totals,
    scale,
    rows,
    per,
    heads,
    k_b,
    k_h,
    k_n,
    k_d,
    m_b,
    m_h,
    m_n,
    GROUP: tl.constexpr,
    QUADRATIC: tl.constexpr,
    HAS_MASS: tl.constexpr,
    DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    CAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute s·k·μ + s²·kᵀΣk/2 + log mass for `per` rows and one query head, and its part of the softmax.

    That part is the maximum and the sum of exponentials relative to it. The query head's Σ stays in the program.
    Because Σ is symmetric, only three of its quarters are multiplied.
    """
    part, which = tl.program_id(1), tl.program_id(2)  # query heads of a group run together and share keys
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    asking = which.to(tl.int64) * GROUP + tl.program_id(0)
    first = (part * per).to(tl.int64)
    keys += sample * k_b + head * k_h + first * k_n
    mass += sample * m_b + head * m_h + first * m_n
    logits += asking * rows + first
    end = tl.minimum(per, rows - part * per)
    member, low, high = tl.arange(0, BLOCK_N), tl.arange(0, C), C + tl.arange(0, C)
    low_mean = tl.load(mean + asking * DIM + low, mask=low < DIM, other=0.0) * scale  # (C,)
    high_mean = tl.load(mean + asking * DIM + high, mask=high < DIM, other=0.0) * scale  # (C,)
    half = scale * scale / 2
    if QUADRATIC:
        covariance += asking * DIM * DIM
        if C <= 64:
            ll, ll_rest = load_square(covariance, low, low, half, DIM, SPLIT, CAST)
            lh, lh_rest = load_square(covariance, low, high, 2 * half, DIM, SPLIT, CAST)
            hh, hh_rest = load_square(covariance, high, high, half, DIM, SPLIT, CAST)
    top, total = tl.full((BLOCK_N,), float("-inf"), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, end, BLOCK_N):
        row = start + member
        held = row < end
        place = keys + row[:, None] * k_n
        if DIM == 2 * C:
            k = tl.load(place + low[None, :] * k_d, mask=held[:, None], other=0.0)  # (BLOCK_N, C)
            m = tl.load(place + high[None, :] * k_d, mask=held[:, None], other=0.0)  # (BLOCK_N, C)
        else:
            # (BLOCK_N, C)
            k = tl.load(place + low[None, :] * k_d, mask=held[:, None] & (low < DIM)[None, :], other=0.0)
            # (BLOCK_N, C)
            m = tl.load(place + high[None, :] * k_d, mask=held[:, None] & (high < DIM)[None, :], other=0.0)
        one, other = tl.zeros((BLOCK_N, C), tl.float32), tl.zeros((BLOCK_N, C), tl.float32)
        if QUADRATIC:
            a, b = k, m
            if CAST or not SPLIT:
                a, b = k.to(tl.float32), m.to(tl.float32)
            if C > 64:  # too large to stay in registers
                ll, ll_rest = load_square(covariance, low, low, half, DIM, SPLIT, CAST)
            one = times(a, ll, ll_rest, one, SPLIT, PRECISION)
            if C > 64:
                lh, lh_rest = load_square(covariance, low, high, 2 * half, DIM, SPLIT, CAST)
            other = times(a, lh, lh_rest, other, SPLIT, PRECISION)
            if C > 64:
                hh, hh_rest = load_square(covariance, high, high, half, DIM, SPLIT, CAST)
            other = times(b, hh, hh_rest, other, SPLIT, PRECISION)
        value = tl.sum((one + low_mean[None, :]) * k.to(tl.float32), 1)
        value += tl.sum((other + high_mean[None, :]) * m.to(tl.float32), 1)
        there = held
        if HAS_MASS:
            weight = tl.load(mass + row * m_n, mask=held, other=0.0).to(tl.float32)  # (BLOCK_N,)
            there = weight > 0
            value += tl.log(tl.where(there, weight, 1.0))
        value = tl.where(there, value, float("-inf"))
        tl.store(logits + row, value, mask=held)
        new = tl.maximum(top, value)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.exp(value - base)
        top = new
    most = tl.max(top, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    at = asking * tl.num_programs(1) + part
    tl.store(tops + at, most)
    tl.store(totals + at, tl.sum(total * tl.exp(top - base), 0))


@triton.jit(do_not_specialize=["rows", "parts", "m_b", "m_h"])
def scores_kernel(
    logits,
    tops,
    totals,
    mass,
    values,
    out,
    rows,
    parts,
    heads,
    epsilon,
    m_b,
    m_h,
    m_n,
    v_b,
    v_h,
    v_n,
    v_d,
    GROUP: tl.constexpr,
    WEIGHED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute the mean probability p over the group for BLOCK_N rows of a head; with WEIGHED, (p + ε)·‖v‖."""
    first, which = (tl.program_id(0) * BLOCK_N).to(tl.int64), tl.program_id(1)
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    member, part = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    held = first + member < rows
    score = tl.zeros((BLOCK_N,), tl.float32)
    for other in range(GROUP):
        asking = which.to(tl.int64) * GROUP + other
        maxima = tl.load(tops + asking * parts + part, mask=part < parts, other=float("-inf"))  # (BLOCK_P,)
        sums = tl.load(totals + asking * parts + part, mask=part < parts, other=0.0)  # (BLOCK_P,)
        top = tl.max(maxima, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        logit = tl.load(logits + asking * rows + first + member, mask=held, other=0.0)  # (BLOCK_N,)
        score += tl.exp(logit - top) / tl.maximum(tl.sum(sums * tl.exp(maxima - top), 0), 1e-30)  # 0 if there is no row
    score = score / GROUP
    if WEIGHED:
        channel = tl.arange(0, BLOCK_D)
        place = values + sample * v_b + head * v_h + first * v_n + member[:, None] * v_n + channel[None, :] * v_d
        # (BLOCK_N, BLOCK_D)
        value = tl.load(place, mask=held[:, None] & (channel < DIM)[None, :], other=0.0).to(tl.float32)
        score = (score + epsilon) * tl.sqrt(tl.sum(value * value, 1))
    weight = tl.load(mass + sample * m_b + head * m_h + (first + member) * m_n, mask=held, other=0.0)  # (BLOCK_N,)
    tl.store(out + which.to(tl.int64) * rows + first + member, tl.where(weight > 0, score, 0.0), mask=held)


def logits_triton(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, mass: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (B, H·G, n), and the maximum and sum of exponentials of each part of the rows, (B, H·G, parts)."""
    batch, heads, rows, dim = keys.shape
    query_heads = mean.shape[1]
    mean = mean.contiguous()
    tiles = key_tiles(keys.dtype, dim)
    tile = tiles["BLOCK_N"]
    per = tile * max(1, rows * batch * query_heads // (tile * KEY_PROGRAMS))
    parts = triton.cdiv(rows, per)
    new: dict[str, Any] = dict(dtype=torch.float32, device=keys.device)
    logits = torch.empty(batch, query_heads, rows, **new)
    tops, totals = (torch.empty(batch, query_heads, parts, **new) for _ in range(2))
    logits_kernel[(query_heads // heads, parts, batch * heads)](
        keys,
        mean if mass is None else mass,
        mean,
        mean if covariance is None else covariance.contiguous(),
        logits,
        tops,
        totals,
        scaling,
        rows,
        per,
        heads,
        *keys.stride(),
        *((0, 0, 0) if mass is None else mass.stride()),
        GROUP=query_heads // heads,
        QUADRATIC=covariance is not None,
        HAS_MASS=mass is not None,
        DIM=dim,
        SPLIT=keys.dtype == torch.bfloat16,
        CAST=is_interpreting(),
        PRECISION=PRECISION[keys.dtype],
        **tiles,
    )
    return logits, tops, totals


def most_parts(heads: int) -> int:
    """Return the largest number of parts in which the rows of so many query heads are read."""
    return triton.cdiv(2 * KEY_PROGRAMS, heads)


def key_tiles(dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Choose the rows of a tile. A program also holds three quarters of Σ, C by C numbers each."""
    half = max(16, triton.next_power_of_2(dim) // 2)
    if dtype == torch.bfloat16:
        if half > 64:
            return {"BLOCK_N": 128, "C": half, "num_warps": 8, "num_stages": 1}
        return {"BLOCK_N": 64, "C": half, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 32, "C": half, "num_warps": 8, "num_stages": 1}


def scores_triton(
    mean: Tensor,
    covariance: Tensor | None,
    keys: Tensor,
    mass: Tensor,
    scaling: float,
    values: Tensor | None,
    epsilon: float,
) -> Tensor:
    batch, heads, rows, _ = keys.shape
    logits, tops, totals = logits_triton(mean, covariance, keys, mass, scaling)
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=keys.device)
    values, weighed = keys if values is None else values, values is not None
    dim, wide = values.shape[3], triton.next_power_of_2(values.shape[3])
    tile = max(16, 8192 // wide)
    scores_kernel[(triton.cdiv(rows, tile), batch * heads)](
        logits,
        tops,
        totals,
        mass,
        values,
        out,
        rows,
        tops.shape[2],
        heads,
        epsilon,
        *mass.stride(),
        *values.stride(),
        GROUP=mean.shape[1] // heads,
        WEIGHED=weighed,
        DIM=dim,
        BLOCK_D=wide,
        BLOCK_N=tile,
        BLOCK_P=triton.next_power_of_2(most_parts(batch * mean.shape[1])),
        num_warps=4,
    )
    return out
