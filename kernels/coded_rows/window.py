"""Attend to the newest rows, which are not rounded yet, in Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.attention.triton import LOG2E, add_tile, cap_tile, find_cap
from kvbench.kernels.coded_rows.form import RawWindow
from kvbench.kernels.softmax_extras import SoftmaxExtras

TILE = 32  # rows that a program reads at once
MOST = 8  # programs of one head; they run alone, so that few wide ones would leave the GPU idle


@triton.jit(do_not_specialize=["splits", "total", "waiting"])
def _attend_window(
    queries,
    step,
    ring,
    part_acc,
    part_max,
    part_norm,
    group,
    heads,
    splits,
    total,
    waiting,
    scale,
    EVERY: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    CAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Attend with M queries of one KV head to some of its raw rows. `heads`: B·H.

    Parts of the head begin with `splits` others of `total`.
    """
    head, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.program_id(2) * M + tl.arange(0, M)
    asking = index < group
    column = tl.arange(0, D)
    inside = asking[:, None] & (column < DIM)[None]
    q = tl.load(queries + (head * group + index)[:, None] * DIM + column[None], mask=inside, other=0.0)  # (M, D)
    if CAST:
        q = q.to(tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    newest = waiting + tl.load(step)  # the token's own row
    keys, values = ring + head * RING * DIM, ring + (heads + head) * RING * DIM
    for first in range(newest - newest % EVERY + program * N, newest + 1, tl.num_programs(1) * N):
        row = first + tl.arange(0, N)
        here = row <= newest
        where = here[:, None] & (column < DIM)[None]
        place = (row % RING)[:, None] * DIM + column[None]
        k = tl.load(keys + place, mask=where, other=0.0)  # (N, D)
        v = tl.load(values + place, mask=where, other=0.0)  # (N, D)
        if CAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        logits = cap_tile(tl.dot(q, k.T, input_precision="ieee") * scale, CAP)  # (M, N)
        m, norm, acc = add_tile(tl.where(here[None], logits, float("-inf")), v, m, norm, acc)
    part = (head * total + splits + program) * group + index
    tl.store(part_acc + part[:, None] * DIM + column[None], acc, mask=inside)
    tl.store(part_max + part, m, mask=asking)
    tl.store(part_norm + part, norm, mask=asking)


def count_programs(window: RawWindow) -> int:
    """Return the number of programs that attend to the window of one head."""
    return min(MOST, triton.cdiv(window.every, TILE))


def attend_window(
    queries: Tensor,
    window: RawWindow,
    scaling: float,
    step: Tensor,
    extras: SoftmaxExtras | None,
    parts: Sequence[Tensor],
    splits: int,
    each: int,
) -> None:
    """Attend to the window, and write the sums behind those of `splits` other ranges of rows.

    Args:
        queries: (B, Hq, 1, d), contiguous.
        window: The window.
        scaling: The factor of the logits.
        step: Number of tokens read since the memory was made, int32 on the device.
        extras: The cap of the softmax.
        parts: Sums of weighted values, largest logits and sums of weights: (B·H, P, G, d) and (B·H, P, G) float32, for
            G queries of a head.
        splits: Parts that others write. P is larger by `count_programs`.
        each: Queries of a program.
    """
    batch, heads, ring, dim = window.ring.shape[1:]
    total, group = parts[0].shape[1:3]
    _attend_window[batch * heads, total - splits, triton.cdiv(group, each)](
        queries,
        step,
        window.ring,
        *parts,
        group,
        batch * heads,
        splits,
        total,
        window.waiting,
        scaling * LOG2E.value,
        EVERY=window.every,
        RING=ring,
        CAP=find_cap(extras),
        CAST=triton.knobs.runtime.interpret and queries.dtype == torch.bfloat16,
        M=each,
        N=TILE,
        DIM=dim,
        D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
