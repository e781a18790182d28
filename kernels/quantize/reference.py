"""Rounding and packing in PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float16).max


class Groups(NamedTuple):
    """A quantized tensor x (…, n)."""

    codes: Tensor
    """(…, n·bits/8) uint8"""
    scale: Tensor
    """(…, n/group)"""
    zero: Tensor
    """(…, n/group), with the dtype of `scale`"""


def quantize_reference(x: Tensor, bits: int, group: int, scales: torch.dtype) -> Groups:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    grouped = x.unflatten(-1, (-1, group)).to(work)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / (2**bits - 1)).clamp(max=LARGEST).to(scales)
    zero = low.clamp(-LARGEST, LARGEST).to(scales)
    step = scale.to(work).masked_fill(scale == 0, torch.inf)[..., None]  # in a constant group all codes are 0
    codes = ((grouped - zero.to(work)[..., None]) / step).clamp(0, 2**bits - 1).round().to(torch.uint8)
    parts = codes.flatten(-2).unflatten(-1, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    return Groups((parts << shifts).sum(-1, dtype=torch.uint8), scale, zero)


def dequantize_reference(groups: Groups, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    work = torch.float64 if dtype == torch.float64 else torch.float32
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=groups.codes.device)
    codes = ((groups.codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2).unflatten(-1, (-1, group))
    return (codes * groups.scale.to(work)[..., None] + groups.zero.to(work)[..., None]).flatten(-2).to(dtype)
