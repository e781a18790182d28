"""Rounding to 2 or 4 bits in groups, really packed."""

import torch
from torch import Tensor

from kvbench.kernels.pack.reference import Groups, pack_reference, unpack_reference

__all__ = ["Groups", "pack", "unpack"]


def pack(x: Tensor, bits: int, group: int) -> Groups:
    """Codes (…, n·bits/8) uint8, scale and zero (…, n/group) float16 of x (…, n), in groups along the last dimension.

    Computed in float32 (float64 for float64 x). ValueError unless `bits` is 1, 2, 4 or 8, n is whole groups and a
    group is whole bytes.
    """
    if bits not in (1, 2, 4, 8) or group < 1 or group * bits % 8 or x.shape[-1] % group:
        raise ValueError(f"pack: {tuple(x.shape)} to {bits} bits in groups of {group}")
    return pack_reference(x, bits, group)


def unpack(groups: Groups, bits: int, group: int, dtype: torch.dtype) -> Tensor:
    """(…, n) in `dtype`: what `pack` kept of x."""
    return unpack_reference(groups, bits, group, dtype)
