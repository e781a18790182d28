"""snapkv: keep the rows that the last queries attended to, smoothed over their neighbours.

Source: FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py; values from its experiments/LongBench/config.
Symbols: w the number of last queries t, p_{t,j} their attention to row j, κ the width of the pooling.

    s_j = pool_κ(mean_t p_{t,j})

The rows of the window are left out before pooling and always stay. The source sums over t, which gives the same
ranking; its ports take the mean, and CriticalKV's ε assumes the mean. The source chooses rows for every query head. Per
KV head there is one mean over the group's query heads, after pooling (NVIDIA/kvpress, which uses average pooling) or
before it (FFY0/AdaKV; Zefan-Cai/KVCache-Factory). The two agree for average pooling only. If the prompt is read in
blocks, the window is the current block's last min(w, T) queries.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method, find_rows_without_votes
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.window_attention import window_statistics
from kvbench.kernels.window_attention.pooling import POOLINGS, pool_group


@dataclass(frozen=True)
class SnapKV(Method):
    """Score rows by the attention of the last queries."""

    window: int = setting(minimum=1)
    """Number of last queries that score, w. Their own rows always stay."""
    kernel: int = setting(minimum=1, odd=True)
    """Width of the pooling, κ."""
    pooling: str = setting(choices=POOLINGS)
    """How neighbouring scores are pooled."""
    group: str = setting(choices=("after", "before"))
    """Whether the group's query heads are averaged after pooling or before it."""

    captured = Captured(order_free=True)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        given = observation.queries[:, :, -self.window :], rows.keys, rows.mass, observation.scaling
        (votes,) = window_statistics(*given, extras=observation.extras)
        inside = find_rows_without_votes(observation, rows, self.window)
        return pool_group(votes, inside, self.kernel, self.pooling, self.group, order=rows.order)
