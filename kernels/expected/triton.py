"""Moments of queries and expected scores of keys, each by streaming kernels. Derivation: README.md.

Products of bfloat16 rows with float32 matrices are two bfloat16 products: x = high + low, each with 8 bits, is x to
2^-17, at what one TF32 product (2^-11) costs. float16 rows use three TF32 products, float32 rows IEEE arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.expected.gaussian import Moments
from kvbench.kernels.implementation import interpreting

QUERY_PROGRAMS = 264  # two for each SM of an H100
KEY_PROGRAMS = 2048
PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "ieee"}


@triton.jit
def upright(
    queries, cos, sin, token, end, channel, q_t, q_d, c_t, c_d, s_t, s_d, DIM: tl.constexpr, HALF: tl.constexpr
):
    """(tokens, channels) in float32, turned back; 0 from token `end` on."""
    there = (token < end)[:, None] & (channel < DIM)[None, :]
    x = tl.load(queries + token[:, None] * q_t + channel[None, :] * q_d, mask=there, other=0.0).to(tl.float32)
    if HALF > 0:
        second = channel >= HALF
        turns = there & (channel < 2 * HALF)[None, :]
        pair = tl.where(second, channel - HALF, channel)
        partner = tl.where(second, channel - HALF, channel + HALF)
        y = tl.load(queries + token[:, None] * q_t + partner[None, :] * q_d, mask=turns, other=0.0).to(tl.float32)
        c = tl.load(cos + token[:, None] * c_t + pair[None, :] * c_d, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + token[:, None] * s_t + pair[None, :] * s_d, mask=turns, other=0.0).to(tl.float32)
        x = (x * c + tl.where(second[None, :], -y, y) * s) / (c * c + s * s)
    return x


@triton.jit
def moments_kernel(
    queries, cos, sin, sums, shifts, scatters, tokens, per, heads, q_b, q_h, q_t, q_d, c_t, c_d, s_t, s_d,
    SCATTER: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of `per` queries of a head: Σ(q - c), c the mean of the first few, and Σ(q - c)(q - c)ᵀ for one block of rows and
    one of columns; where SPLIT, an A whose (A + Aᵀ)/2 it is.
    """
    which, split = tl.program_id(0), tl.program_id(1)  # heads at the same tokens run together and share cos and sin
    blocks: tl.constexpr = (DIM + BLOCK_C - 1) // BLOCK_C
    down, across = tl.program_id(2), 0
    if SCATTER:
        down, across = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    first = (split * per).to(tl.int64)
    queries += (which // heads).to(tl.int64) * q_b + (which % heads).to(tl.int64) * q_h + first * q_t
    cos += first * c_t
    sin += first * s_t
    end = tl.minimum(per, tokens - split * per)
    member = tl.arange(0, BLOCK_T)
    left, right = down * BLOCK_C + tl.arange(0, BLOCK_C), across * BLOCK_C + tl.arange(0, BLOCK_C)
    few = tl.minimum(end, BLOCK_T).to(tl.float32)
    x = upright(queries, cos, sin, member, end, left, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF)
    shift = tl.sum(x, 0) / few
    other = shift
    if SCATTER and blocks > 1:
        x = upright(queries, cos, sin, member, end, right, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF)
        other = tl.sum(x, 0) / few
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    scatter = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for start in range(0, end, BLOCK_T):
        token = start + member
        here = (token < end)[:, None]
        x = upright(queries, cos, sin, token, end, left, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF)
        x = tl.where(here, x - shift[None, :], 0.0)
        total += x
        if SCATTER:
            y = x
            if blocks > 1:
                y = upright(queries, cos, sin, token, end, right, q_t, q_d, c_t, c_d, s_t, s_d, DIM, HALF)
                y = tl.where(here, y - other[None, :], 0.0)
            if SPLIT:
                own, high = x.to(tl.bfloat16), y.to(tl.bfloat16)
                low = ((y - high.to(tl.float32)) * 2).to(tl.bfloat16)
                if CAST:
                    own, high, low = own.to(tl.float32), high.to(tl.float32), low.to(tl.float32)
                scatter = tl.dot(tl.trans(own), high, scatter)
                scatter = tl.dot(tl.trans(own), low, scatter)
            else:
                scatter = tl.dot(tl.trans(x), y, scatter, input_precision=PRECISION)
    at = split.to(tl.int64) * tl.num_programs(0) + which
    if across == 0:
        tl.store(sums + at * DIM + left, tl.sum(total, 0), mask=left < DIM)
        tl.store(shifts + at * DIM + left, shift, mask=left < DIM)
    if SCATTER:
        place = scatters + at * DIM * DIM + left[:, None] * DIM + right[None, :]
        tl.store(place, scatter, mask=(left < DIM)[:, None] & (right < DIM)[None, :])


def moments_triton(queries: Tensor, scatter: bool, turn: tuple[Tensor, Tensor] | None) -> Moments:
    batch, heads, tokens, dim = queries.shape
    own = query_tiles(queries.dtype, dim)
    across = triton.cdiv(dim, own["BLOCK_C"]) ** (2 if scatter else 1)
    splits = max(1, min(QUERY_PROGRAMS // (batch * heads * across), triton.cdiv(tokens, 4 * own["BLOCK_T"])))
    per = triton.cdiv(triton.cdiv(tokens, splits), own["BLOCK_T"]) * own["BLOCK_T"]
    splits = triton.cdiv(tokens, per)
    new = dict(dtype=torch.float32, device=queries.device)
    sums, shifts = (torch.empty(splits, batch, heads, dim, **new) for _ in range(2))
    scatters = torch.empty(splits, batch, heads, dim, dim, **new) if scatter else sums
    cos, sin = (queries[0, 0],) * 2 if turn is None else turn
    moments_kernel[(batch * heads, splits, across)](
        queries, cos, sin, sums, shifts, scatters, tokens, per, heads, *queries.stride(), *cos.stride(), *sin.stride(),
        SCATTER=scatter, HALF=0 if turn is None else cos.shape[1], DIM=dim, SPLIT=queries.dtype == torch.bfloat16,
        CAST=interpreting(), PRECISION=PRECISION[queries.dtype], **own,
    )  # fmt: skip
    return joined(sums, shifts, scatters if scatter else None, per, tokens)


def joined(sums: Tensor, shifts: Tensor, scatters: Tensor | None, per: int, tokens: int) -> Moments:
    """Moments of all parts (splits, B, H, …), each about a shift of its own: `per` queries each, the rest the last."""
    splits = len(sums)
    counts = torch.full((splits, 1, 1, 1), per, dtype=torch.float32, device=sums.device)
    counts[-1] = tokens - (splits - 1) * per
    means = shifts + sums / counts
    mean = shifts[0] + (counts * (means - shifts[0])).sum(0) / tokens
    if scatters is None:
        return Moments(tokens, mean, None)
    inside, between = ((x * counts.rsqrt()).movedim(0, -1) for x in (sums, (means - mean) * counts))
    total = scatters.sum(0) - inside @ inside.mT + between @ between.mT
    return Moments(tokens, mean, (total + total.mT) / 2)


def query_tiles(dtype: torch.dtype, dim: int) -> dict[str, int]:
    wide = min(max(16, triton.next_power_of_2(dim)), 128 if dtype == torch.bfloat16 else 64)
    return {"BLOCK_C": wide, "BLOCK_T": 64 if dtype == torch.bfloat16 else 32, "num_warps": 8, "num_stages": 2}


@triton.jit
def logits_kernel(
    keys, mass, linear, high, low, logits, tops, totals, rows, per, heads, k_b, k_h, k_n, k_d, m_b, m_h, m_n,
    GROUP: tl.constexpr, QUADRATIC: tl.constexpr, HAS_MASS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, CAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """k·(Σk + μ) + log mass of `per` rows and one query head, whose Σ stays, and its part of the softmax: the maximum
    and the sum of exponentials less it. `linear` is s·μ, `high` + `low` are s²Σ/2 (where not SPLIT, `high` alone).
    """
    part, which = tl.program_id(1), tl.program_id(2)  # query heads of a group run together and share keys
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    asking = which.to(tl.int64) * GROUP + tl.program_id(0)
    first = (part * per).to(tl.int64)
    keys += sample * k_b + head * k_h + first * k_n
    mass += sample * m_b + head * m_h + first * m_n
    logits += asking * rows + first
    end = tl.minimum(per, rows - part * per)
    member, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    top, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for block in tl.static_range(BLOCK_D // BLOCK_C):
        column = block * BLOCK_C + tl.arange(0, BLOCK_C)
        mean = tl.load(linear + asking * DIM + column, mask=column < DIM, other=0.0)
        if QUADRATIC:
            square = asking * DIM * DIM + channel[:, None] * DIM + column[None, :]
            inside = (channel < DIM)[:, None] & (column < DIM)[None, :]
            upper = tl.load(high + square, mask=inside, other=0.0)
            if SPLIT:
                lower = tl.load(low + square, mask=inside, other=0.0)
                if CAST:
                    upper, lower = upper.to(tl.float32), lower.to(tl.float32)
        if block > 0:
            tl.debug_barrier()  # the block before wrote the logits that this one adds to
        for start in range(0, end, BLOCK_N):
            row = start + member
            held = row < end
            place = keys + row[:, None] * k_n
            own = tl.load(place + column[None, :] * k_d, mask=held[:, None] & (column < DIM)[None, :], other=0.0)
            side = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
            if QUADRATIC:
                key = own
                if BLOCK_C < BLOCK_D:
                    key = tl.load(
                        place + channel[None, :] * k_d, mask=held[:, None] & (channel < DIM)[None, :], other=0.0
                    )
                if CAST or not SPLIT:
                    key = key.to(tl.float32)
                side = tl.dot(key, upper, side, input_precision=PRECISION)
                if SPLIT:
                    side = tl.dot(key, lower, side, input_precision=PRECISION)
            value = tl.sum((side + mean[None, :]) * own.to(tl.float32), 1)
            if block > 0:
                value += tl.load(logits + row, mask=held, other=0.0)
            if block == BLOCK_D // BLOCK_C - 1:
                there = held
                if HAS_MASS:
                    weight = tl.load(mass + row * m_n, mask=held, other=0.0).to(tl.float32)
                    there = weight > 0
                    value += tl.log(tl.where(there, weight, 1.0))
                value = tl.where(there, value, float("-inf"))
                new = tl.maximum(top, tl.max(value, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp(top - base) + tl.sum(tl.exp(value - base), 0)
                top = new
            tl.store(logits + row, value, mask=held)
    at = asking * tl.num_programs(1) + part
    tl.store(tops + at, top)
    tl.store(totals + at, total)


@triton.jit
def scores_kernel(
    logits, tops, totals, mass, values, out, rows, parts, heads, epsilon, m_b, m_h, m_n, v_b, v_h, v_n, v_d,
    GROUP: tl.constexpr, WEIGHED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Probabilities, their mean over the group, and, where WEIGHED, (p + ε)·‖v‖, of BLOCK_N rows of a head."""
    first, which = (tl.program_id(0) * BLOCK_N).to(tl.int64), tl.program_id(1)
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    member, part = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    held = first + member < rows
    score = tl.zeros((BLOCK_N,), tl.float32)
    for other in range(GROUP):
        asking = which.to(tl.int64) * GROUP + other
        maxima = tl.load(tops + asking * parts + part, mask=part < parts, other=float("-inf"))
        sums = tl.load(totals + asking * parts + part, mask=part < parts, other=0.0)
        top = tl.max(maxima, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        logit = tl.load(logits + asking * rows + first + member, mask=held, other=0.0)
        score += tl.exp(logit - top) / tl.maximum(tl.sum(sums * tl.exp(maxima - top), 0), 1e-30)  # 0 where no row is
    score = score / GROUP
    if WEIGHED:
        channel = tl.arange(0, BLOCK_D)
        place = values + sample * v_b + head * v_h + first * v_n + member[:, None] * v_n + channel[None, :] * v_d
        value = tl.load(place, mask=held[:, None] & (channel < DIM)[None, :], other=0.0).to(tl.float32)
        score = (score + epsilon) * tl.sqrt(tl.sum(value * value, 1))
    weight = tl.load(mass + sample * m_b + head * m_h + (first + member) * m_n, mask=held, other=0.0)
    tl.store(out + which.to(tl.int64) * rows + first + member, tl.where(weight > 0, score, 0.0), mask=held)


def logits_triton(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, mass: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, H·G, n), and of each part of the rows their maximum and sum of exponentials (B, H·G, parts)."""
    batch, heads, rows, dim = keys.shape
    query_heads = mean.shape[1]
    linear = (scaling * mean).contiguous()
    high = low = linear
    split = keys.dtype == torch.bfloat16
    if covariance is not None:
        high = (scaling**2 / 2 * covariance).contiguous()
        if split:
            whole, high = high, high.bfloat16()
            low = (whole - high).bfloat16()
    own = key_tiles(keys.dtype, dim)
    tile = own["BLOCK_N"]
    per = tile * max(1, min(8, rows * batch * query_heads // (tile * KEY_PROGRAMS)))
    parts = triton.cdiv(rows, per)
    new = dict(dtype=torch.float32, device=keys.device)
    logits = torch.empty(batch, query_heads, rows, **new)
    tops, totals = (torch.empty(batch, query_heads, parts, **new) for _ in range(2))
    logits_kernel[(query_heads // heads, parts, batch * heads)](
        keys, linear if mass is None else mass, linear, high, low, logits, tops, totals, rows, per, heads,
        *keys.stride(), *((0, 0, 0) if mass is None else mass.stride()),
        GROUP=query_heads // heads, QUADRATIC=covariance is not None, HAS_MASS=mass is not None, DIM=dim, SPLIT=split,
        CAST=interpreting(), PRECISION=PRECISION[keys.dtype], **own,
    )  # fmt: skip
    return logits, tops, totals


def key_tiles(dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Rows that pass by and a block of Σ that stays: all of its rows, BLOCK_C of its columns."""
    wide = max(16, triton.next_power_of_2(dim))
    if dtype == torch.bfloat16:
        rows = 128 if wide <= 128 else 64
        return {"BLOCK_N": rows, "BLOCK_D": wide, "BLOCK_C": min(wide, 128), "num_warps": 8, "num_stages": 2}
    return {"BLOCK_N": 32, "BLOCK_D": wide, "BLOCK_C": min(wide, 64), "num_warps": 8, "num_stages": 1}


def scores_triton(
    mean: Tensor, covariance: Tensor | None, keys: Tensor, mass: Tensor, scaling: float, values: Tensor | None,
    epsilon: float,
) -> Tensor:  # fmt: skip
    batch, heads, rows, _ = keys.shape
    logits, tops, totals = logits_triton(mean, covariance, keys, mass, scaling)
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=keys.device)
    values, weighed = keys if values is None else values, values is not None
    dim, wide = values.shape[3], triton.next_power_of_2(values.shape[3])
    tile = max(16, 8192 // wide)
    scores_kernel[(triton.cdiv(rows, tile), batch * heads)](
        logits, tops, totals, mass, values, out, rows, tops.shape[2], heads, epsilon, *mass.stride(), *values.stride(),
        GROUP=mean.shape[1] // heads, WEIGHED=weighed, DIM=dim, BLOCK_D=wide, BLOCK_N=tile,
        BLOCK_P=triton.next_power_of_2(tops.shape[2]), num_warps=4,
    )  # fmt: skip
    return out
