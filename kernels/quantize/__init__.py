"""Rounding to 2 or 4 bits in groups, really packed."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.quantize.reference import Groups, dequantize_reference, quantize_reference

__all__ = ["Groups", "quantize", "dequantize"]


def quantize(x: Tensor, bits: int, group: int, *, implementation: str | None = None) -> Groups:
    """Codes (…, n·bits/8) uint8, scale and zero (…, n/group) float16 of x (…, n), in groups along the last dimension.

    Computed in float32 (float64 for float64 x). ValueError unless `bits` is 1, 2, 4 or 8, n is whole groups and a
    group is whole bytes.
    """
    if bits not in (1, 2, 4, 8) or group < 1 or group * bits % 8 or x.shape[-1] % group:
        raise ValueError(f"quantize: {tuple(x.shape)} to {bits} bits in groups of {group}")
    if choose_implementation("quantize", implementation, x) == "reference":
        return quantize_reference(x, bits, group)
    from kvbench.kernels.quantize.triton import quantize_triton

    return Groups(*quantize_triton(x, bits, group))


def dequantize(
    groups: Groups,
    bits: int,
    group: int,
    dtype: torch.dtype,
    turned: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    """(…, n) in `dtype`: what `quantize` kept of x. `turned`: in memory the last two dimensions may lie the other way
    round, as they did in a transposed x. ValueError where codes and groups do not fit.
    """
    size = groups.codes.shape[-1] * 8
    if size != groups.scale.shape[-1] * group * bits or groups.scale.shape != groups.zero.shape:
        shapes = ", ".join(str(tuple(part.shape)) for part in groups)
        raise ValueError(f"dequantize: codes, scale, zero {shapes} of {bits} bits in groups of {group}")
    if choose_implementation("dequantize", implementation, groups.scale.new_empty(0, dtype=dtype)) == "reference":
        return dequantize_reference(groups, bits, group, dtype)
    from kvbench.kernels.quantize.triton import dequantize_triton

    return dequantize_triton(*groups, bits, group, dtype, turned)
