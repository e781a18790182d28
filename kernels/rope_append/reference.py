"""Norm, rotation and write in PyTorch."""

import torch
from torch import Tensor

from kvbench.kernels.fused_linear.reference import rms_norm_reference
from kvbench.kernels.rerotation.reference import rotate_half


def append_reference(
    queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, tail_keys: Tensor, tail_values: Tensor,
    tail: int, step: Tensor, slots: Tensor | None, norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:  # fmt: skip
    batch, _, _, dim = tail_keys.shape
    first, tokens = int(step), len(keys) // batch
    here = slice(tail + first, tail + first + tokens)
    angles = cos[first : first + tokens].to(queries.dtype), sin[first : first + tokens].to(queries.dtype)
    queries, keys, values = (x.view(batch, tokens, -1, dim).transpose(1, 2) for x in (queries, keys, values))
    if norms is not None:
        queries, keys = (
            rms_norm_reference(x, weight, norms[2]) for x, weight in ((queries, norms[0]), (keys, norms[1]))
        )
    keys = rotate(keys, *angles)
    if slots is None:
        tail_keys[:, :, here], tail_values[:, :, here] = keys, values
    else:
        where = slots.long()[..., None, None].expand_as(keys)
        tail_keys.scatter_(2, where, keys)
        tail_values.scatter_(2, where, values)
    return rotate(queries, *angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([turning * cos + rotate_half(turning) * sin, rest], -1)
