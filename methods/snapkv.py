"""snapkv: rows that the last queries attended to stay, smoothed over their neighbours.

Source: FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py; values from its experiments/LongBench/config.
s_j = pool_κ(mean_t p_{t,j}) over the last w queries t, window rows dropped before pooling and always kept. The source
sums, which ranks alike; ports take the mean, and CriticalKV's ε is set against it. The source chooses rows for every
query head. Per KV head there is one mean over the group's query heads, after pooling (NVIDIA/kvpress, which averages)
or before it (FFY0/AdaKV; Zefan-Cai/KVCache-Factory): the same for average pooling only. Under blocks the window is the
current block's last min(w, T) queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.window_attention import window_statistics
from kvbench.kernels.window_attention.pooling import POOLINGS, pool_group
from kvbench.validation import require_choice, require_int, require_odd


@dataclass(frozen=True)
class SnapKV(Method):
    """`window` queries that vote and rows that stay; `kernel`, `pooling` avg|max; `group` after|before pooling."""

    window: int
    kernel: int
    pooling: str
    group: str

    position_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.window", self.window, 1)
        require_odd("method.kernel", self.kernel)
        require_choice("method.pooling", self.pooling, POOLINGS)
        require_choice("method.group", self.group, ("after", "before"))

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        (votes,) = window_statistics(
            observation.queries[:, :, -self.window :], rows.keys, rows.mass, observation.scaling
        )
        # rows of the window have no votes; where the window covers all that a head holds, those of the block have none
        inside = rows.places >= observation.tokens - self.window
        if observation.queries.shape[2] < self.window:
            covered = (inside | ~rows.present).all(-1, keepdim=True)
            inside = torch.where(covered, rows.places >= observation.first, inside)
        return pool_group(votes, inside, self.kernel, self.pooling, self.group)
