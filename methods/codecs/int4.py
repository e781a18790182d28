"""int4: keys and values in 4 bits, with a Hadamard rotation before rounding (QuaRot).

Source: spcl/QuaRot, quarot/transformers/kv_cache.py; arXiv 2404.00456. Rotated keys are multiplied by the Hadamard
matrix over √d for each head, and so are queries, which leaves their products as they are. A row is rounded between its
smallest and its largest number: s = max(max - min, 1e-5)/15 and the smallest number are stored in float16. QuaRot folds
the rotation of values into the weights W_v and W_o, which rounds other numbers than values; with `hadamard=both` the
codec rotates them itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form, make_hadamard
from kvbench.methods.codecs.coded_rows import RoundingCodec
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Int4(RoundingCodec):
    """Store rows in 4 bits."""

    hadamard: str = setting(choices=("none", "keys", "both"))
    """What is multiplied with the Hadamard matrix before it is rounded."""
    group: int | None = setting(minimum=2)
    """Channels that share a scale and a zero; null for all channels of a row."""

    def check(self, layout: Layout) -> None:
        if self.hadamard != "none" and layout.dim & (layout.dim - 1):
            raise SettingError(
                f"codec.hadamard={self.hadamard}: heads of {layout.dim} channels, and the matrix needs a power of two; none"
            )
        if layout.dim % (self.group or 2):
            raise SettingError(
                f"codec.group={self.group}: {layout.dim} channels per head do not divide into such groups"
            )

    @property
    def forms(self) -> tuple[Form, Form]:
        form = Form("uint4", "range", group=self.group or 0, least=1e-5, stored=torch.float16)
        return form, form

    def make_turns(self, dim: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.hadamard == "none":
            return None, None
        matrix = make_hadamard(dim, None, device)
        return matrix, matrix if self.hadamard == "both" else None
