"""Two streaming passes over keys: sums for the anchor, split over rows, then one number per row. No key is written.

Absent rows (mass 0) add nothing to a sum, whatever they hold. Symbols: k key, a anchor, both in float32 in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 1e-12  # torch's normalize: k / max(‖k‖, UNIT)
COSINE = 1e-8  # torch's cosine_similarity: both norms at least COSINE
PROGRAMS = 2048  # enough to keep every SM's loads in flight
TILE = 4096  # number of elements of a tile


@triton.jit(do_not_specialize=["rows", "per", "m_b", "m_h"])
def sums_kernel(
    keys,
    mass,
    sums,
    weights,
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
    NORMALISED: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute Σ m·k or Σ m·k/‖k‖, and Σ m, over `per` rows of a head. Rows of a tile are added only at the end."""
    split, which = tl.program_id(0), tl.program_id(1)
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    member, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    first = split * per
    keys += sample * k_b + head * k_h + first.to(tl.int64) * k_n
    mass += sample * m_b + head * m_h + first.to(tl.int64) * m_n
    end = tl.minimum(per, rows - first)
    total, counted = tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, end, BLOCK_N):
        row = start + member
        weight = tl.load(mass + row * m_n, mask=row < end, other=0.0).to(tl.float32)  # (BLOCK_N,)
        there = (weight > 0)[:, None] & (channel < DIM)[None, :]
        place = keys + row[:, None] * k_n + channel[None, :] * k_d
        # (BLOCK_N, BLOCK_D)
        key = tl.load(place, mask=(row < end)[:, None] & (channel < DIM)[None, :], other=0.0).to(tl.float32)
        key = tl.where(there, key, 0.0)
        counted += weight
        if NORMALISED:
            weight = weight / tl.maximum(tl.sqrt(tl.sum(key * key, 1)), UNIT)
        total += key * weight[:, None]
    at = which.to(tl.int64) * tl.num_programs(0) + split
    tl.store(sums + at * DIM + channel, tl.sum(total, 0), mask=channel < DIM)
    tl.store(weights + at, tl.sum(counted, 0))


@triton.jit(do_not_specialize=["rows"])
def compare_kernel(
    keys,
    anchor,
    out,
    rows,
    heads,
    k_b,
    k_h,
    k_n,
    k_d,
    a_b,
    a_h,
    a_d,
    METRIC: tl.constexpr,
    COSINE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a METRIC for BLOCK_N rows of a head: cosine, dot, euclidean, or norm, which reads no anchor."""
    first, which = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    sample, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    member, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    held, inside = first + member < rows, channel < DIM
    keys += sample * k_b + head * k_h + first.to(tl.int64) * k_n
    place = keys + member[:, None] * k_n + channel[None, :] * k_d
    key = tl.load(place, mask=held[:, None] & inside[None, :], other=0.0).to(tl.float32)  # (BLOCK_N, BLOCK_D)
    if METRIC == "norm":
        value = tl.sqrt(tl.sum(key * key, 1))
    else:
        to = tl.load(anchor + sample * a_b + head * a_h + channel * a_d, mask=inside, other=0.0)  # (BLOCK_D,)
        if METRIC == "euclidean":
            apart = to[None, :] - key
            value = -tl.sqrt(tl.sum(apart * apart, 1))
        else:
            value = tl.sum(key * to[None, :], 1)
        if METRIC == "cosine":
            value = value / tl.maximum(tl.sqrt(tl.sum(to * to, 0)), COSINE)
            value = value / tl.maximum(tl.sqrt(tl.sum(key * key, 1)), COSINE)
    tl.store(out + which.to(tl.int64) * rows + first + member, value, mask=held)


def tile(dim: int) -> dict[str, int]:
    """Choose rows and channels of a tile, 32 elements per thread."""
    wide = triton.next_power_of_2(dim)
    return {"BLOCK_N": TILE // wide, "BLOCK_D": wide, "num_warps": 4}


def anchor_triton(keys: Tensor, mass: Tensor, normalised: bool) -> Tensor:
    batch, heads, rows, dim = keys.shape
    sizes = tile(dim)
    per = max(4 * sizes["BLOCK_N"], triton.next_power_of_2(triton.cdiv(rows * batch * heads, PROGRAMS)))
    splits = triton.cdiv(rows, per)
    sums = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=keys.device)
    weights = torch.empty(batch, heads, splits, 1, dtype=torch.float32, device=keys.device)
    sums_kernel[(splits, batch * heads)](
        keys,
        mass,
        sums,
        weights,
        rows,
        per,
        heads,
        *keys.stride(),
        *mass.stride(),
        NORMALISED=normalised,
        UNIT=UNIT,
        DIM=dim,
        **sizes,
    )
    return sums.sum(2) / weights.sum(2)


def similarity_triton(keys: Tensor, anchor: Tensor, metric: str) -> Tensor:
    batch, heads, rows, dim = keys.shape
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=keys.device)
    sizes = tile(dim)
    compare_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]), batch * heads)](
        keys, anchor, out, rows, heads, *keys.stride(), *anchor.stride(), METRIC=metric, COSINE=COSINE, DIM=dim, **sizes
    )
    return out


def norms_triton(rows: Tensor) -> Tensor:
    return similarity_triton(rows, rows[:, :, 0], "norm")
