"""Round numbers to a few bits in groups and pack the codes into bytes."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.quantize.reference import Groups, dequantize_reference, quantize_reference

__all__ = ["Groups", "quantize", "dequantize"]


@announced
def quantize(
    x: Tensor, bits: int, group: int, scales: torch.dtype = torch.float16, *, implementation: str | None = None
) -> Groups:
    """Quantize x in groups along the last dimension. Computed in float32, or in float64 for float64 x.

    Args:
        x: (…, n)
        bits: 1, 2, 4 or 8.
        group: Numbers that share a scale and a zero. It divides n.
        scales: The dtype of scales and zeros.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        Codes (…, n·bits/8) uint8, and scale and zero (…, n/group) in the dtype `scales`.

    Raises:
        ValueError: `bits` is not allowed, n is not a multiple of `group`, or a group does not fill whole bytes.
    """
    if bits not in (1, 2, 4, 8) or group < 1 or group * bits % 8 or x.shape[-1] % group:
        raise ValueError(f"quantize: {tuple(x.shape)} to {bits} bits in groups of {group}")
    if choose_implementation("quantize", implementation, x) == "reference":
        return quantize_reference(x, bits, group, scales)
    from kvbench.kernels.quantize.triton import quantize_triton

    return Groups(*quantize_triton(x, bits, group, scales))


@announced
def dequantize(
    groups: Groups,
    bits: int,
    group: int,
    dtype: torch.dtype,
    turned: bool = False,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the numbers that the codes stand for.

    Args:
        groups: What `quantize` returned.
        bits: Bits of a code.
        group: Numbers that share a scale and a zero.
        dtype: The dtype of the result.
        turned: Whether the last two dimensions may be swapped in memory, like in a transposed x.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (…, n)

    Raises:
        ValueError: Codes and groups do not fit.
    """
    size = groups.codes.shape[-1] * 8
    if size != groups.scale.shape[-1] * group * bits or groups.scale.shape != groups.zero.shape:
        shapes = ", ".join(str(tuple(part.shape)) for part in groups)
        raise ValueError(f"dequantize: codes, scale, zero {shapes} of {bits} bits in groups of {group}")
    if choose_implementation("dequantize", implementation, groups.scale.new_empty(0, dtype=dtype)) == "reference":
        return dequantize_reference(groups, bits, group, dtype)
    from kvbench.kernels.quantize.triton import dequantize_triton

    return dequantize_triton(*groups, bits, group, dtype, turned)
