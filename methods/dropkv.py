"""dropkv: rows whose removal would change the attention output most stay.

Source: the DropKV paper; AozhongZhang/DropKV, patches/dropkv_transformers.patch (the paper's runs) and
dropkv_cache.py (average pooling). Removing row j changes the output a_t of query t by p/(1-p)·(a_t - v_j), so
s_j = mean over the group of Σ_t (p_{t,j}/(1 - p_{t,j} + ε))²·‖a_t - v_j‖² over the last w queries t, then pooled
over all rows; the last w rows stay. The published code rounds p to bfloat16 first: a sink's p rounds to 1 and its
score becomes about 1/ε².
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.window import window
from kvbench.kernels.window.pool import POOLINGS, pool
from kvbench.method import Method, Seen, State
from kvbench.rows import Rows
from kvbench.settings import SettingError, choose, number, odd, whole


@dataclass(frozen=True)
class DropKV(Method):
    """`window` w, `kernel` κ, `pooling` max|avg, `epsilon` ε, `p_dtype` bf16 (p is rounded) | fp32 (it is not)."""

    window: int
    kernel: int
    pooling: str
    epsilon: float
    p_dtype: str

    relative = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("method.window", self.window, 1)
        odd("method.kernel", self.kernel)
        choose("method.pooling", self.pooling, POOLINGS)
        choose("method.p_dtype", self.p_dtype, ("bf16", "fp32"))
        if not number(self.epsilon) or not self.epsilon > 0:
            raise SettingError(f"method.epsilon={self.epsilon}: a number above 0")

    def protect(self, seen: Seen, rows: Rows, quota: int) -> Tensor:
        return rows.places >= seen.tokens - self.window

    def score(self, seen: Seen, rows: Rows, state: State) -> Tensor:
        batch, heads = rows.mass.shape[:2]
        p = window(seen.queries[:, :, -self.window :], rows.keys, rows.mass, seen.scaling)
        if self.p_dtype == "bf16":
            p = p.bfloat16().to(p.dtype)
        weights = (p / (1 - p + self.epsilon)).square()  # (B, H, G, w, n)
        outputs = seen.outputs[:, :, -self.window :].to(p.dtype).reshape(batch, heads, -1, rows.values.shape[-1])
        # differences, not ‖a‖² + ‖v‖² - 2a·v: where p is near 1 the weight is about 1/ε² and a is near v
        distances = torch.cdist(outputs, rows.values.to(p.dtype), compute_mode="donot_use_mm_for_euclid_dist")
        scores = (weights.flatten(2, 3) * distances.square()).sum(-2) / weights.shape[2]
        return pool(scores, self.kernel, self.pooling)
