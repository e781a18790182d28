"""Norm, rotation and write in PyTorch."""

import torch
from torch import Tensor

from kvbench.kernels.fused_linear.reference import rms_norm_reference
from kvbench.kernels.rerotation.reference import rotate_reference


def append_reference(
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
    rotates_keys: bool = True,
    wraps: bool = False,
) -> Tensor:
    batch, dim = len(tail_keys) if starts is None else len(starts), tail_keys.shape[-1]
    plain = keys.view(batch, -1, keys.shape[1] // dim, dim).transpose(1, 2)
    queries, keys, values = rotate_projected(queries, keys, values, cos, sin, batch, dim, step, norms, offsets)
    keys = keys if rotates_keys else plain
    if slots is None:
        first = (tail + int(step)) % tail_keys.shape[2] if wraps else tail + int(step)
        here = slice(first, first + keys.shape[2])
        tail_keys[:, :, here], tail_values[:, :, here] = keys, values
    elif starts is not None:
        where = (starts + slots).flatten()
        tail_keys[where], tail_values[where] = keys.flatten(0, 2), values.flatten(0, 2)
    else:
        where = slots.long()[..., None, None].expand_as(keys)
        tail_keys.scatter_(2, where, keys)
        tail_values.scatter_(2, where, values)
    return queries


def rotate_projected(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    batch: int,
    dim: int,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and values by head: (B, heads, T, d) each."""
    tokens = len(keys) // batch
    places = step + torch.arange(tokens, device=step.device)
    if offsets is not None:
        places = (offsets[:, None] + places)[:, None]  # (B, 1, T)
    angles = cos[places].to(queries.dtype), sin[places].to(queries.dtype)
    queries, keys, values = (x.view(batch, tokens, -1, dim).transpose(1, 2) for x in (queries, keys, values))
    if norms is not None:
        queries, keys = (
            rms_norm_reference(x, weight, norms[2]) for x, weight in ((queries, norms[0]), (keys, norms[1]))
        )
    return rotate_reference(queries, *angles), rotate_reference(keys, *angles), values
