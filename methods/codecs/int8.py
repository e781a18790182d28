"""int8: keys and values as whole numbers of 8 bits, with a scale for each token and head (vLLM, SGLang).

Source: vLLM's `int8_per_token_head` (pull request 38378): s = max(max|x|/127, 1e-6) in float32, x/s rounded to the
nearest whole number in [-128, 127]. Versions before pull request 45361 cut numbers off towards zero
(`truncates=true`). SGLang's `--int8-kv-cache` has a zero in the middle of the row's range, with s = (max - min)/255,
both in float16 (`symmetric=false`). There the largest number of a row would get code 127.5, and gets 127 here.

Rows of equal numbers and rows of zeros are read as they were, up to the rounding of what is stored. NaN in a row makes
all of the row NaN, which ends the run; so do numbers above 65504 with symmetric=false, for which float16 has no zero.

Servers let the first chunk of a prompt attend to its raw rows, kvbench lets it attend to the rounded ones.
"""

from dataclasses import dataclass

import torch

from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import Form
from kvbench.methods.codecs.coded_rows import RoundingCodec


@dataclass(frozen=True)
class Int8(RoundingCodec):
    """Store rows as whole numbers of 8 bits."""

    symmetric: bool = setting()
    """Whether codes are spread around zero, or around the middle of each row's range."""
    truncates: bool = setting()
    """Whether numbers are cut off towards zero, as the first versions of vLLM do."""

    @property
    def forms(self) -> tuple[Form, Form]:
        rounding = "cut" if self.truncates else "even"
        if self.symmetric:
            form = Form("int8", "largest", least=1e-6, rounding=rounding)
        else:
            form = Form("int8", "middle", stored=torch.float16, rounding=rounding)
        return form, form
