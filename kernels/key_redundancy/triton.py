"""Find for every row the newest row that repeats its key, tile by tile, and take its cosine from the sums.

Σ_i c_{i,j} over i ≠ j needs no pairs: it is k̂_j·Σ_i k̂_i less k̂_j·k̂_j, from the passes of kernels/key_similarity. Only
the newest row that repeats row i is a question about pairs. A program owns a tile of rows i. It goes through the rows j
from the newest spans to the oldest and ends when each of its rows has found one, so similar keys cost few products and
different ones n². Within a span the rows j come in ascending order, so that a later hit replaces an earlier one and
each span is reduced once. The products are those of the keys as they are, on tensor cores, with sums in float32; the
lengths of the keys are factors of them.

The cosine with the newest row is computed anew from its key. Many rows may have the same newest row, so the cosines are
added as whole numbers of 1/ONE, whose sum is the same in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.key_similarity.triton import UNIT, anchor_triton, norms_triton, similarity_triton

ONE = 2**32  # a cosine of 1 as a whole number
SPAN = 1024  # rows that are compared with a tile before the program checks whether it can stop


@triton.jit(do_not_specialize=["rows"])
def repeats_kernel(
    keys,
    inverse,
    repeated,
    rows,
    heads,
    similar,
    k_b,
    k_h,
    k_n,
    k_d,
    ONE: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAST: tl.constexpr,
):
    """Find the newest j with c_{i,j} > similar for BLOCK_N rows i, and add c_{i,j} to `repeated` (B, H, n) int64 at j.

    `inverse` (B, H, n) has 1/‖k‖, and 0 for absent rows.
    """
    sample, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys += sample * k_b + head * k_h
    inverse += tl.program_id(1).to(tl.int64) * rows
    repeated += tl.program_id(1).to(tl.int64) * rows
    inside = (channel < DIM)[None, :]
    share = tl.load(inverse + row, mask=row < rows, other=0.0)  # (BLOCK_N,)
    searches = share > 0
    place = keys + row.to(tl.int64)[:, None] * k_n + channel[None, :] * k_d
    key = tl.load(place, mask=searches[:, None] & inside, other=0.0)  # (BLOCK_N, BLOCK_D)
    if CAST:
        key = key.to(tl.float32)
    least = similar / tl.where(searches, share, 1.0)  # what k_i·k_j/‖k_j‖ must exceed
    newest = tl.where(searches, -1, rows)  # -1 while a row searches; absent ones do not
    end = rows
    while (end > 0) & (tl.min(newest, 0) < 0):
        begin = tl.maximum(end - SPAN, 0)
        latest = tl.full((BLOCK_M, BLOCK_N), -1, tl.int32)
        for start in range(begin, end, BLOCK_M):
            other = start + tl.arange(0, BLOCK_M)
            at = keys + other.to(tl.int64)[:, None] * k_n + channel[None, :] * k_d
            others = tl.load(at, mask=(other < rows)[:, None] & inside, other=0.0)  # (BLOCK_M, BLOCK_D)
            if CAST:
                others = others.to(tl.float32)
            product = tl.dot(others, tl.trans(key), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            product *= tl.load(inverse + other, mask=other < rows, other=0.0)[:, None]  # (BLOCK_M,)
            hit = (product > least[None, :]) & (other[:, None] != row[None, :])
            latest = tl.where(hit, other[:, None], latest)
        newest = tl.where(newest < 0, tl.max(latest, 0), newest)
        end = begin
    repeats = (newest >= 0) & (newest < rows)
    there = repeats[:, None] & inside
    # (BLOCK_N, BLOCK_D)
    key = tl.load(place, mask=there, other=0.0)  # again, so that the loop need not hold it in registers
    # (BLOCK_N, BLOCK_D)
    twin = tl.load(keys + newest.to(tl.int64)[:, None] * k_n + channel[None, :] * k_d, mask=there, other=0.0)
    cosine = tl.sum(key.to(tl.float32) * twin.to(tl.float32), 1)
    cosine = tl.where(repeats, cosine * share * tl.load(inverse + newest, mask=repeats, other=0.0), 0.0)  # (BLOCK_N,)
    tl.atomic_add(repeated + newest, (cosine * ONE).to(tl.int64), mask=repeats, sem="relaxed")


def tiles(dtype: torch.dtype, dim: int) -> dict[str, int]:
    """Choose rows (N) and the rows that they are compared with at once (M), warps and stages.

    At d = 128 a block has one group of four warps, and two blocks share an SM, so that the comparisons of one block
    overlap with the products of the other. 128 rows a tile keep the reads from the L2 cache below its bandwidth.
    """
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "BLOCK_M": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_N": 128 if dim <= 128 else 64, "BLOCK_M": 64, "num_warps": 4, "num_stages": 3 if dim <= 128 else 2}


def key_redundancy_triton(keys: Tensor, present: Tensor, similar: float) -> Tensor:
    batch, heads, rows, dim = keys.shape
    lengths = norms_triton(keys)
    inverse = lengths.clamp(min=UNIT).reciprocal().masked_fill(~present, 0)
    repeated = torch.zeros(batch, heads, rows, dtype=torch.int64, device=keys.device)
    sizes = tiles(keys.dtype, dim)
    repeats_kernel[(triton.cdiv(rows, sizes["BLOCK_N"]), batch * heads)](
        keys,
        inverse,
        repeated,
        rows,
        heads,
        similar,
        *keys.stride(),
        ONE=ONE,
        SPAN=SPAN,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        CAST=is_interpreting(),
        **sizes,
    )
    middle = anchor_triton(keys, present.float(), True)  # the mean of all k/‖k‖
    left_out = (lengths * inverse).square() + repeated.float() / ONE
    mean = similarity_triton(keys, middle, "dot") * inverse - left_out / present.sum(-1, keepdim=True)
    return mean.masked_fill(~present, -torch.inf).softmax(-1)
