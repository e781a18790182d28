"""fp8: keys and values as floats of 8 bits, as servers store caches (vLLM, SGLang).

Source: vLLM, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py and docs/features/quantization/quantized_kvcache.md
(`--kv-cache-dtype fp8`, `fp8_per_token_head`). With scope=tensor a number is cast as it is, by the servers' default scale
of 1; with scope=row each row of a head has a scale max|x|/448 in float32. Numbers beyond the largest float become that
one, where torch's cast would give NaN. NaN stays NaN, and ends the run.

Servers let the first block of a prompt attend to its raw rows, kvbench does not. Rounding is emulated by whole numbers
and shifts, so it is the same on every machine.
"""

from dataclasses import dataclass

import torch

from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form
from kvbench.methods.codecs.coded_rows import RoundingCodec


@dataclass(frozen=True)
class Fp8(RoundingCodec):
    """Store rows as floats of 8 bits."""

    format: str = setting(choices=("e4m3", "e5m2"))
    """The float: 4 bits of exponent and 3 of mantissa, or 5 and 2."""
    scope: str = setting(choices=("tensor", "row"))
    """What shares a scale: all rows, whose scale is 1, or the channels of a row."""

    @property
    def forms(self) -> tuple[Form, Form]:
        scale = "none" if self.scope == "tensor" else "largest"
        form = Form(self.format, scale, least=1e-6, stored=torch.float32)
        return form, form
