"""dropkv: keep the rows whose removal would change the attention output most.

Source: the DropKV paper; AozhongZhang/DropKV, patches/dropkv_transformers.patch (the paper's runs) and dropkv_cache.py
(average pooling). Symbols: w the number of last queries t, p_{t,j} their attention to row j, a_t their attention
outputs, v_j the values. Removing row j changes a_t by p/(1-p)·(a_t - v_j), so

    s_j = mean over the group of Σ_t (p_{t,j}/(1 - p_{t,j} + ε))²·‖a_t - v_j‖²

The scores are then pooled over all rows. The last w rows always stay. The published code rounds p to bfloat16 first, so
the p of a sink rounds to 1 and its score becomes about 1/ε².
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.removal_scores import dropkv
from kvbench.kernels.window_attention.pooling import POOLINGS, pool_group


@dataclass(frozen=True)
class DropKV(Method):
    """Score rows by how much their removal changes the attention output."""

    window: int = setting(minimum=1)
    """Number of last queries that score, w. Their own rows always stay."""
    kernel: int = setting(minimum=1, odd=True)
    """Width of the pooling, κ."""
    pooling: str = setting(choices=POOLINGS)
    """How neighbouring scores are pooled."""
    epsilon: float = setting(above=0)
    """Number that keeps the denominator above 0, ε."""
    p_dtype: str = setting(choices=("bf16", "fp32"))
    """Whether p is rounded to bfloat16 (as in the published code) or not."""

    captured = Captured(order_free=True)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        queries, outputs = observation.queries[:, :, -self.window :], observation.outputs[:, :, -self.window :]
        rounded = self.p_dtype == "bf16"
        given = queries, rows.keys, rows.values, outputs, rows.mass, observation.scaling
        scores = dropkv(*given, self.epsilon, rounded, extras=observation.extras)
        return pool_group(scores[:, :, None], None, self.kernel, self.pooling, order=rows.order)
