"""fp8: keys and values as floats of 8 bits, as servers store caches (vLLM, SGLang).

Source: vLLM, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py and quantized_kvcache.md in its documentation
(`--kv-cache-dtype fp8`, `fp8_per_token_head`); SGLang, srt/mem_cache/memory_pool.py. With scope=tensor a number x is
stored as e4m3(x/s) and read as that times s, with one scale s for keys and one for values, 1 unless a checkpoint has
others (k_scale, v_scale). With scope=row each row of a head stores a scale of its own in float32,
max(max|x|/448, 1e-6).

`path` names a file of calibrated scales, those that checkpoints bring as k_scale and v_scale: the largest size of a
layer's keys, as they are cached, and of its values in some texts, over 448. With scope=tensor a layer has one scale for
its keys and one for its values, with scope=head each KV head has its own (vLLM with llm-compressor's per-head scales).
The file holds those of heads (`python -m kvbench calibrate fp8`); a layer's is the largest of its heads.

Numbers beyond the largest float become that one, as servers do it, and so does infinity; torch's cast would give NaN.
NaN stays NaN, and ends the run; with scope=row infinity does too, because it would be the scale. Floats of 8 bits are
made and read by arithmetic on whole numbers and shifts, so every machine gives the same codes, whether its hardware has
such floats or not.

Servers let the first chunk of a prompt attend to its raw rows, kvbench lets it attend to the rounded ones. vLLM with
FlashAttention 3 rounds queries too, kvbench does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import TensorFile, read_tensors
from kvbench.kernels.coded_rows import Form
from kvbench.methods.codecs.coded_rows import RoundingCodec
from kvbench.validation import SettingError

SCALES = ("k_scale", "v_scale")  # tensors of a file, (layers, KV heads)
LEAST, MOST = 2.0**-126, 2.0**112  # float32 holds them exactly, and what each number of e4m3 and e5m2 is read as
ALLOWED = f"a number in [{LEAST:.3g}, {MOST:.3g}]"


@dataclass(frozen=True)
class Fp8(RoundingCodec):
    """Store rows as floats of 8 bits."""

    format: str = setting(choices=("e4m3", "e5m2"))
    """The float: 4 bits of exponent and 3 of mantissa, or 5 and 2."""
    scope: str = setting(choices=("tensor", "head", "row"))
    """What shares a scale: all keys, or all values, of a layer; those of a head; or the channels of a row."""
    path: str | None = setting()
    """The file of calibrated scales, which scope=head needs. With scope=tensor, `None` stands for `key_scale` and
    `value_scale`.
    """
    key_scale: float = setting(minimum=LEAST, maximum=MOST, allowed=ALLOWED)
    """The scale of the keys of all layers with scope=tensor and no file, k_scale."""
    value_scale: float = setting(minimum=LEAST, maximum=MOST, allowed=ALLOWED)
    """The scale of the values of all layers with scope=tensor and no file, v_scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            if self.scope == "row" and scale != 1:
                raise SettingError(f"codec.{name}={scale:g}: each row has its own with codec.scope=row; use 1")
            if self.path is not None and scale != 1:
                raise SettingError(f"codec.{name}={scale:g}: codec.path={self.path} has the scales; use 1")
        if self.path is not None and self.scope == "row":
            raise SettingError(
                f"codec.path={self.path}: with codec.scope=row each row has its own scale; use path=null"
            )
        if self.file is not None and self.format != "e4m3":
            raise SettingError(f"codec.format={self.format}: calibrated scales are those of e4m3")

    @cached_property
    def file(self) -> TensorFile | None:
        """The file of the scales, or None if none is needed.

        Raises:
            SettingError: The file cannot be read.
        """
        if self.path is None and self.scope != "head":
            return None
        names = dict.fromkeys(SCALES, ("layers", "KV heads"))
        return read_tensors(self.path, names, "scales", "fp8", "codec.path")

    @property
    def weights_bytes(self) -> int:
        return 0 if self.file is None else self.file.nbytes

    def check(self, layout: Layout) -> None:
        if self.file is None:
            return
        for name, scales in self.file.tensors.items():
            if tuple(scales.shape) != (layout.layers, layout.heads):
                raise SettingError(
                    f"codec.path={self.path}: {name} has (layers, KV heads) {tuple(scales.shape)}, the model "
                    f"{(layout.layers, layout.heads)}"
                )
            held = scales[list(layout.held)]
            if not ((held >= LEAST) & (held <= MOST)).all():
                raise SettingError(f"codec.path={self.path}: each number of {name} must be {ALLOWED}")

    def check_identity(self, identify: Callable[[], str]) -> None:
        if self.file is not None:
            self.file.check_identity(identify)

    def of_layer(self, layer: int, layers: int) -> RoundingCodec:
        if self.file is None:
            return self
        return ScaledFp8(self.name, self.rounding, whole=self, file=self.file, layer=layer)

    @property
    def forms(self) -> tuple[Form, Form]:
        form = Form(self.format, "largest", least=1e-6) if self.scope == "row" else Form(self.format)
        return form, form

    def find_factors(self, dim: int) -> tuple[float, float]:
        return float(self.key_scale), float(self.value_scale)


@dataclass(frozen=True)
class ScaledFp8(RoundingCodec):
    """The codec of one layer with calibrated scales."""

    whole: Fp8 = field(kw_only=True)
    """The codec of all layers."""
    file: TensorFile = field(kw_only=True, compare=False)
    """The file of the scales."""
    layer: int = field(kw_only=True)
    """The index of the layer."""

    @property
    def forms(self) -> tuple[Form, Form]:
        return self.whole.forms

    def find_head_factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, device=device)
        keys, values = (self.file.like(name, like)[self.layer] for name in SCALES)
        if self.whole.scope == "head":
            return keys, values
        return keys.amax().expand_as(keys), values.amax().expand_as(values)
