"""cake: keep the rows that the last queries attend to, steadily or with changes (the indicator of CAKE).

Source: the CAKE paper; antgroup/cakekv, cake/cake_cache.py. Symbols: w the number of last queries t, p_{t,j} their
attention to row j, κ the width of the average pooling.

    s_j = pool_κ(mean_t p_{t,j} + γ·var_t p_{t,j})

The variance is unbiased (0 for one query). The scores are per query head. The rows of the window are left out before
pooling and always stay. The last step is the mean over the group. While decoding, the newest query's attention replaces
the mean, and there is no variance. The number of rows of each layer is the matter of allocator=cake. DropKV's table
calls the indicator alone CAKE.

Differences from the source: it cuts nothing while L ≤ cache size + w, although its cache size includes w; here every
prompt above the quota is cut. If the window covers everything that a head holds, which the source does not define, only
the rows of the block have no score. Pooling here runs over rows in the order of the text; the published decoding pools
over rows in the order of their scores.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method, find_rows_without_votes
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.window_attention import window_statistics
from kvbench.kernels.window_attention.pooling import pool_group


@dataclass(frozen=True)
class Cake(Method):
    """Score rows by the mean and the variance of the last queries' attention."""

    window: int = setting(minimum=1)
    """Number of last queries that score, w. Their own rows always stay."""
    kernel: int = setting(minimum=1, odd=True)
    """Width of the average pooling, κ."""
    gamma: float = setting(minimum=0)
    """Weight of the variance, γ."""

    captured = Captured(order_free=True)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        count = 1 if observation.decoding else self.window
        queries = observation.queries[:, :, -count:]
        of = ("mean", "variance") if queries.shape[2] > 1 else ("mean",)
        given = queries, rows.keys, rows.mass, observation.scaling
        scores, *variance = window_statistics(*given, of, extras=observation.extras)  # (B, H, G, n) each
        for spread in variance:
            scores = scores.add(spread, alpha=self.gamma)
        inside = find_rows_without_votes(observation, rows, self.window)
        return pool_group(scores, inside, self.kernel, "avg", order=rows.order)
