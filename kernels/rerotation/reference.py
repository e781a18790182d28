"""The rotation in PyTorch."""

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    """Return (−x₂, x₁), where x₁ and x₂ are the halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([turning * cos + rotate_half(turning) * sin, rest], -1)


def rerotate_reference(x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    (cos, sin), (new_cos, new_sin) = ([part.to(dtype) for part in pair] for pair in (before, after))
    rotated = cos.shape[-1]
    y = x[..., :rotated].to(dtype)
    plain = (y * cos - rotate_half(y) * sin) / (cos.square() + sin.square())
    turned = (plain * new_cos + rotate_half(plain) * new_sin).to(x.dtype)
    return torch.cat([turned, x[..., rotated:]], dim=-1)
