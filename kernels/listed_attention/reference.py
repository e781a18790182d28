"""The attention in PyTorch, with a mask over all rows."""

import torch
from torch import Tensor

from kvbench.kernels.attention.reference import attend_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


def attend_listed_reference(
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
    held = int(last) + 1
    look = mark_rows(blocks, size, held, after).repeat_interleave(queries.shape[1] // blocks.shape[1], 1)
    if counts is not None:
        counts[0][int(counts[1])] += look.sum()
    return attend_reference(queries, keys[:, :, :held], values[:, :, :held], None, scaling, look, False, extras)[0]


def mark_rows(blocks: Tensor, size: int, held: int, after: int | None) -> Tensor:
    """Return which of the first `held` rows lie in the listed blocks or from `after` on, (B, L, held) bool."""
    count = -(-held // size)  # blocks that exist
    marks = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.bool, device=blocks.device)
    rows = marks.scatter_(-1, blocks.clamp(max=count), True).repeat_interleave(size, -1)[..., :held]
    if after is not None:
        rows[..., after:] = True
    return rows
