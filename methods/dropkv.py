"""dropkv: rows whose removal would change the attention output most stay.

Source: the DropKV paper; AozhongZhang/DropKV, patches/dropkv_transformers.patch (the paper's runs) and
dropkv_cache.py (average pooling). Removing row j changes the output a_t of query t by p/(1-p)·(a_t - v_j), so
s_j = mean over the group of Σ_t (p_{t,j}/(1 - p_{t,j} + ε))²·‖a_t - v_j‖² over the last w queries t, then pooled
over all rows; the last w rows stay. The published code rounds p to bfloat16 first: a sink's p rounds to 1 and its
score becomes about 1/ε².
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.removal_scores import dropkv
from kvbench.kernels.window_attention.pooling import POOLINGS, pool_group
from kvbench.validation import SettingError, is_number, require_choice, require_int, require_odd


@dataclass(frozen=True)
class DropKV(Method):
    """`window` w, `kernel` κ, `pooling` max|avg, `epsilon` ε, `p_dtype` bf16 (p is rounded) | fp32 (it is not)."""

    window: int
    kernel: int
    pooling: str
    epsilon: float
    p_dtype: str

    position_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.window", self.window, 1)
        require_odd("method.kernel", self.kernel)
        require_choice("method.pooling", self.pooling, POOLINGS)
        require_choice("method.p_dtype", self.p_dtype, ("bf16", "fp32"))
        if not is_number(self.epsilon) or not self.epsilon > 0:
            raise SettingError(f"method.epsilon={self.epsilon}: a number above 0")

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        queries, outputs = observation.queries[:, :, -self.window :], observation.outputs[:, :, -self.window :]
        rounded = self.p_dtype == "bf16"
        scores = dropkv(
            queries, rows.keys, rows.values, outputs, rows.mass, observation.scaling, self.epsilon, rounded
        )  # fmt: skip
        return pool_group(scores[:, :, None], None, self.kernel, self.pooling)
