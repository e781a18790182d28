"""cake: rows that the last queries attend to, steadily or by turns, stay (CAKE's indicator).

Source: the CAKE paper; antgroup/cakekv, cake/cake_cache.py. Over the last w queries t, per query head:
s_j = pool_κ(mean_t p_{t,j} + γ·var_t p_{t,j}), unbiased variance (0 for one query), window rows dropped before pooling
and always kept; then the mean over the group. While decoding: the newest query's attention instead of the mean, no
variance. How many rows each layer has is allocator=cake; DropKV's table calls the indicator alone CAKE.
The source cuts nothing while L ≤ cache size + w, though w counts in its size; here every prompt above the quota is cut.
Where the window covers all that a head holds (not defined there), rows of the block only are without a score.
Pooling runs over rows in order of place; the published decoding pools over rows in the order of their scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.window_attention import window_statistics
from kvbench.kernels.window_attention.pooling import pool_group
from kvbench.validation import SettingError, is_number, require_int, require_odd


@dataclass(frozen=True)
class Cake(Method):
    """`window` w, `kernel` κ of the average pooling, `gamma` γ."""

    window: int
    kernel: int
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.window", self.window, 1)
        require_odd("method.kernel", self.kernel)
        if not is_number(self.gamma) or not self.gamma >= 0:
            raise SettingError(f"method.gamma={self.gamma}: a number from 0 on")

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        count = 1 if observation.decoding else self.window
        queries = observation.queries[:, :, -count:]
        of = ("mean", "variance") if queries.shape[2] > 1 else ("mean",)
        scores, *variance = window_statistics(
            queries, rows.keys, rows.mass, observation.scaling, of
        )  # (B, H, G, n) each
        for own in variance:
            scores = scores.add(own, alpha=self.gamma)
        inside = rows.places >= observation.tokens - self.window
        if observation.queries.shape[2] < self.window:
            covered = (inside | ~rows.present).all(-1, keepdim=True)
            inside = torch.where(covered, rows.places >= observation.first, inside)
        return pool_group(scores, inside, self.kernel, "avg")
