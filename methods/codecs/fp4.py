"""fp4: keys and values as floats of 4 bits (e2m1) in blocks of 16 or 32 channels: NVFP4, MXFP4, SGLang's fp4.

Sources: vLLM's NVFP4 store kernel (pull requests 37332 and 40177), NVIDIA ModelOpt's scales of checkpoints; SGLang,
srt/layers/quantization/kvfp4_tensor.py; the OCP Microscaling specification. Symbols: a the largest size of a block's
numbers, s its scale. A number is read as s·code, and 6 is the largest code.

* scale=e4m3 (NVFP4): s = γ·e4m3(a/(6γ)), with one γ for a layer's keys and one for its values. Servers take γ from a
  checkpoint, or 1. ModelOpt writes amax/2688 or, in newer versions, amax/448, with the amax of calibration texts. With
  `global_scale` 2688 or 448, kvbench takes the largest size in the first rows of each sample that the codec rounds:
  those of the first block, or those that the last cut leaves. Larger numbers that follow are rounded to 2688·γ at
  most. A block whose scale is below the smallest e4m3 reads as 0.
* scale=above (SGLang): s = 2^e, the smallest power of two that is at least a/6 and 1e-10. Nothing is clipped.
* scale=below (OCP): s = 2^(floor(log2 a) - 2), at least 2^-126. Numbers above 6·s are read as 6·s.

A number between two codes gets the nearest one. Of two equally near ones it gets the even one, but with scale=above the
larger one, as SGLang does. Bytes of a row of d channels: d/2, and 1 for each block; with `global_scale` 2688 or 448
also 8 for each layer and sample. Rows are rounded as they are written, as servers do. The first block of a prompt
attends to its rounded rows, where servers let it attend to raw ones. A block with NaN reads as NaN, which ends the run,
and so does one with infinity, but with scale=e4m3 infinity is rounded as a large number is.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form
from kvbench.methods.codecs.coded_rows import RoundedRows, RoundingCodec
from kvbench.validation import SettingError

FORMS = {  # by `scale`
    "e4m3": Form("e2m1", "largest", stored=torch.float8_e4m3fn, wide=True),
    "above": Form("e2m1", "power", least=1e-10, stored=torch.float8_e8m0fnu, rounding="up", wide=True),
    "below": Form("e2m1", "power_below", least=2.0**-124, stored=torch.float8_e8m0fnu, wide=True),
}


@dataclass(frozen=True)
class Fp4(RoundingCodec):
    """Store rows as floats of 4 bits."""

    scale: str = setting(choices=tuple(FORMS))
    """What a block's scale is: a float of 8 bits, or the power of two "above" or "below"."""
    block: int = setting(choices=(16, 32))
    """Channels that share a scale."""
    global_scale: int = setting(choices=(1, 448, 2688))
    """With `scale` e4m3, what the largest size is divided by to give the scale γ of a layer; 1 for γ = 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "e4m3" and self.global_scale != 1:
            raise SettingError(f"codec.global_scale={self.global_scale}: only with codec.scale=e4m3; 1")

    def check(self, layout: Layout) -> None:
        if layout.dim % self.block:
            raise SettingError(
                f"codec.block={self.block}: {layout.dim} channels per head do not divide into such blocks"
            )

    @property
    def forms(self) -> tuple[Form, Form]:
        form = replace(FORMS[self.scale], group=self.block)
        return form, form

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> RoundedRows:
        if self.global_scale == 1:
            return super().pack(keys, values, lengths)
        empty = super().pack(keys[:0], values[:0], torch.zeros_like(lengths))
        scales = torch.zeros(2, len(lengths), device=keys.device)
        return ScaledRows(self, empty.keys, empty.values, empty.lengths, keys.dtype, scales, False).extend(
            keys, values, lengths
        )


@dataclass(frozen=True)
class ScaledRows(RoundedRows):
    """Rows that were divided by a scale for each sample, keys by one and values by another."""

    codec: Fp4
    scales: Tensor
    """Of keys and of values, (2, B) float32."""
    scaled: bool
    """Whether the scales are known. They are those of the first rows."""

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "ScaledRows":
        if not len(keys):
            return self
        counts = (lengths - self.lengths).sum(1)
        scales = self.scales
        if not self.scaled:
            samples = count_samples(counts, len(keys))
            largest = torch.stack([rows.abs().amax(1) for rows in (keys, values)]).to(scales.dtype)
            scales = scales.scatter_reduce(1, samples.expand(2, -1), largest, "amax")
            scales = scales.clamp(min=1e-30) / self.codec.global_scale
        keys, values = (
            side / spread(scale, counts, len(side)) for side, scale in zip((keys, values), scales, strict=True)
        )
        rows = super().extend(keys, values, lengths)
        return ScaledRows(self.codec, rows.keys, rows.values, lengths, self.dtype, scales, True)

    def read(self) -> tuple[Tensor, Tensor]:
        counts, wide = self.lengths.sum(1), torch.promote_types(self.dtype, torch.float32)
        keys, values = (
            (self.codec.decode(parts, wide) * spread(scale, counts, len(parts[0]))).to(self.dtype)
            for parts, scale in zip((self.keys, self.values), self.scales, strict=True)
        )
        return keys, values

    def find_factors(self, dim: int) -> tuple[Tensor, Tensor]:
        keys, values = (scale[:, None].expand(self.lengths.shape).contiguous() for scale in self.scales)
        return keys, values

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.scales]

    def replicate(self, times: int, lengths: Tensor) -> "ScaledRows":
        rows = super().replicate(times, lengths)
        return ScaledRows(
            self.codec, rows.keys, rows.values, lengths, self.dtype, self.scales.repeat(1, times), self.scaled
        )


def count_samples(counts: Tensor, rows: int) -> Tensor:
    """Return the number of the sample of each of so many rows, of which the samples have `counts` (B,)."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=rows)


def spread(scales: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Return the scale (B,) of each row's sample, (R, 1)."""
    return scales[count_samples(counts, rows)][:, None]
