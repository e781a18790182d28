"""int4: keys and values in 4 bits, with a Hadamard rotation before rounding (QuaRot, vLLM).

Source: spcl/QuaRot, quarot/transformers/kv_cache.py, arXiv 2404.00456 (`preset=quarot`); vLLM,
vllm/v1/attention/ops/int4_per_token_head.py, pull request 40835 (`preset=vllm`). Rows are multiplied by the Hadamard
matrix over √d for each head, after RoPE. Queries are too, so their products with keys stay as they are; outputs are
turned back. Symbols: x the numbers of a group of a turned row, by default all channels of the row.

`zero=number`, QuaRot: s = max(max x - min x, 1e-5)/15 and the zero min x are stored in float16; a code is
(x - min x)/s, rounded. QuaRot turns keys alone in the cache. It folds the rotation of values into the weights W_v and
W_o, which rounds other numbers than those of values; `hadamard=both` turns values in the codec. `clip` is its
clip_ratio.

`zero=point`, vLLM: s = max((max x - min x)/15, 1e-6) in float32, and the zero is a code, -min x/s rounded into 0…15,
which takes the place of the 4 lowest bits of s. With `signs=true` the matrix has vLLM's fixed random signs. vLLM does
not divide its matrix by √d, so its scales are √d times as large; the codec does that too. A row whose numbers have one
sign loses a part of its range, as in the source.

NaN in a row makes all of the row NaN, which ends the run; so do numbers above 65504 with zero=number, for which float16
has no zero. QuaRot reads the prompt exactly (`rounding=cut`); vLLM rounds rows as they are written, but lets the first
chunk of a prompt attend to its raw rows, where kvbench lets it attend to the rounded ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form, make_hadamard
from kvbench.methods.codecs.coded_rows import RoundingCodec
from kvbench.validation import SettingError

SEED = 0x9E3779B9  # of vLLM's signs


@dataclass(frozen=True)
class Int4(RoundingCodec):
    """Store rows in 4 bits."""

    hadamard: str = setting(choices=("none", "keys", "both"))
    """What is multiplied with the Hadamard matrix before it is rounded."""
    signs: bool = setting()
    """Whether channels get vLLM's fixed random signs before."""
    zero: str = setting(choices=("number", "point"))
    """What a group stores beside its scale: its smallest "number", or a "point", the code of zero."""
    group: int | None = setting(minimum=2)
    """Channels that share a scale and a zero; null for all channels of a row."""
    clip: float = setting(above=0.0, maximum=1.0)
    """The share of a group's range that codes are spread over; numbers beyond get the first or the last code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None and self.group & (self.group - 1):
            raise SettingError(f"codec.group={self.group}: a power of two of at least 2, or null")
        if self.signs and self.hadamard == "none":
            raise SettingError("codec.signs=true: signs alone change nothing; use codec.hadamard=keys or both")

    def check(self, layout: Layout) -> None:
        if self.hadamard != "none" and layout.dim & (layout.dim - 1):
            raise SettingError(
                f"codec.hadamard={self.hadamard}: heads of {layout.dim} channels, and the matrix needs a power of two; "
                "use codec.hadamard=none"
            )
        if layout.dim % (self.group or 2):
            name = "codec=int4" if self.group is None else f"codec.group={self.group}"
            raise SettingError(f"{name}: {layout.dim} channels per head do not divide into groups of {self.group or 2}")

    @property
    def forms(self) -> tuple[Form, Form]:
        group = self.group or 0
        if self.zero == "point":
            form = Form("uint4", "point", group, 15e-6, self.clip, rounding="up")
        else:
            form = Form("uint4", "range", group, 1e-5, self.clip, stored=torch.float16)
        return form, form

    def find_factors(self, dim: int) -> tuple[float, float]:
        factor = dim**-0.5 if self.zero == "point" else 1.0
        return factor if self.hadamard != "none" else 1.0, factor if self.hadamard == "both" else 1.0

    def make_turns(self, dim: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.hadamard == "none":
            return None, None
        matrix = make_hadamard(dim, SEED if self.signs else None, device)
        return matrix, matrix if self.hadamard == "both" else None
