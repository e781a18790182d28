"""The shares in Triton, with a program for each sample."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["heads"])
def _share(targets, least, most, total, out, heads, H: tl.constexpr):
    """Share the rows of one sample out among at most H heads."""
    sample = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, H)
    exists = head < heads
    own = sample * heads + head
    target = tl.load(targets + own, mask=exists, other=0.0)
    low = tl.load(least + own, mask=exists, other=0)
    high = tl.load(most + own, mask=exists, other=0)
    counts = tl.minimum(tl.maximum(target.to(tl.int64), low), high)
    wanted = tl.minimum(tl.maximum(tl.load(total + sample), tl.sum(low, 0)), tl.sum(high, 0))
    for _ in range(heads + 2):  # each pass but the last two fills a head
        missing = wanted - tl.sum(counts, 0)
        grows = missing > 0
        step = tl.where(grows, 1, -1)
        left = missing * step
        room = tl.where(grows, high - counts, counts - low)
        is_open = exists & (room > 0)
        number = tl.maximum(tl.sum(is_open.to(tl.int64), 0), 1)
        share = tl.maximum(left // number, 1)
        distance = (counts.to(tl.float64) - target) * step
        mine, other = tl.expand_dims(distance, 1), tl.expand_dims(distance, 0)
        earlier = (tl.expand_dims(head, 0) < tl.expand_dims(head, 1)) & (other == mine)
        before = (earlier | (other < mine)) & tl.expand_dims(is_open, 0)
        gets = is_open & (tl.sum(before.to(tl.int64), 1) < left // share)
        counts += tl.where(gets, tl.minimum(share, room) * step, 0)
    tl.store(out + own, counts, mask=exists)


def share_rows_triton(targets: Tensor, least: Tensor, most: Tensor, total: Tensor) -> Tensor:
    out, heads = torch.empty_like(least, memory_format=torch.contiguous_format), least.shape[1]
    given = (own.contiguous() for own in (targets, least, most, total))
    _share[(len(out),)](*given, out, heads, H=triton.next_power_of_2(heads), num_warps=1)
    return out
