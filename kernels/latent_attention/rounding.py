"""Round latents to a few bits, and restore them.

Source: shadowpa0327/Palu bb22666, palu/model/modules/quant.py. The rule stands in methods/codecs/palu.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

EIGHT = 8  # codes whose bits of equal weight share a byte
LEAST = 1e-5  # smallest range of the latents of a token
LARGEST = torch.finfo(torch.float16).max


def round_latents(latents: Tensor, bits: int, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Round latents (n, r) to a few bits.

    Returns:
        The codes, (n, r·bits/8) uint8, s (n, 1) float16 and z (n, 1) uint8. A byte holds one bit of eight codes.
    """
    x = latents.to(torch.promote_types(latents.dtype, torch.float32))
    low, high = (clip * bound for bound in x.aminmax(dim=-1, keepdim=True))
    largest = 2**bits - 1
    scale = ((high - low).clamp(min=LEAST) / largest).clamp(max=LARGEST).half()
    step = scale.to(x.dtype)
    zero = (-low / step).round().clamp(0, largest)
    codes = ((x / step).round() + zero).clamp(0, largest).to(torch.uint8)
    shifts = torch.arange(EIGHT, dtype=torch.uint8, device=x.device)
    each = (codes[..., None] >> shifts[:bits] & 1).unflatten(1, (codes.shape[1] // EIGHT, EIGHT))  # (n, r/8, 8, bits)
    return (each << shifts[:, None]).sum(2, dtype=torch.uint8).flatten(1), scale, zero.to(torch.uint8)


def restore_latents(latents: Sequence[Tensor], bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that rounded latents stand for, (n, r)."""
    packed, scale, zero = latents
    shifts = torch.arange(EIGHT, dtype=torch.uint8, device=packed.device)
    each = packed.unflatten(1, (packed.shape[1] // bits, 1, bits)) >> shifts[:, None] & 1  # (n, r/8, 8, bits)
    codes = (each << shifts[:bits]).sum(-1, dtype=torch.uint8).flatten(1)
    work = torch.promote_types(dtype, torch.float32)
    return ((codes.to(work) - zero) * scale.to(work)).to(dtype)
