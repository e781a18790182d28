"""fp8: keys and values as floats of 8 bits, as servers store caches (vLLM, SGLang).

Source: vLLM, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py and quantized_kvcache.md in its documentation
(`--kv-cache-dtype fp8`, `fp8_per_token_head`); SGLang, srt/mem_cache/memory_pool.py. With scope=tensor a number x is
stored as e4m3(x/s) and read as that times s, with one scale s for keys and one for values, 1 unless a checkpoint has
others (k_scale, v_scale). With scope=row each row of a head stores a scale of its own in float32,
max(max|x|/448, 1e-6).

Numbers beyond the largest float become that one, as servers do it; torch's cast would give NaN. NaN stays NaN, and ends
the run. Floats of 8 bits are made and read by arithmetic on whole numbers and shifts, so every machine gives the same
codes, whether its hardware has such floats or not.

Servers let the first chunk of a prompt attend to its raw rows, kvbench lets it attend to the rounded ones. vLLM with
FlashAttention 3 rounds queries too, kvbench does not.
"""

from dataclasses import dataclass

from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form
from kvbench.methods.codecs.coded_rows import RoundingCodec
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Fp8(RoundingCodec):
    """Store rows as floats of 8 bits."""

    format: str = setting(choices=("e4m3", "e5m2"))
    """The float: 4 bits of exponent and 3 of mantissa, or 5 and 2."""
    scope: str = setting(choices=("tensor", "row"))
    """What shares a scale: all rows, or the channels of a row."""
    key_scale: float = setting(above=0.0)
    """The scale of keys with scope=tensor, k_scale."""
    value_scale: float = setting(above=0.0)
    """The scale of values with scope=tensor, v_scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            if self.scope == "row" and scale != 1:
                raise SettingError(f"codec.{name}={scale:g}: each row has its own with codec.scope=row; use 1")

    @property
    def forms(self) -> tuple[Form, Form]:
        form = Form(self.format) if self.scope == "tensor" else Form(self.format, "largest", least=1e-6)
        return form, form

    def find_factors(self, dim: int) -> tuple[float, float]:
        return float(self.key_scale), float(self.value_scale)
