"""tova: keep the rows that the newest query attends to, at every step. No row is protected.

Source: schwartz-lab-NLP/TOVA, src/tova_cache.py. Symbols: p_{last,j} the attention of the newest query to row j.

    s_j = mean_h p_{last,j}

With scope=layer the mean runs over all query heads, and all KV heads of a layer keep the same rows. With scope=group it
runs over the group's query heads, and each KV head keeps its own rows, as the KeyDiff paper runs it. NVIDIA/kvpress,
tova_press.py, always keeps the last row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.window_attention import window_statistics


@dataclass(frozen=True)
class TOVA(Method):
    """Score rows by the attention of the newest query."""

    scope: str = setting(choices=("layer", "group"))
    """Whose query heads are averaged: all of the layer, or those of the KV head's group."""
    recent: int = setting(minimum=0)
    """Number of newest rows that always stay."""

    captured = Captured(order_free=True)

    @property
    def refusals(self) -> Mapping[str, str]:
        reason = "scores all heads of a layer alike, so they cannot compete; use method.scope=group"
        return {"uneven_allocator": reason} if self.scope == "layer" else {}

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        # p: (B, H, G, n)
        given = observation.queries[:, :, -1:], rows.keys, rows.mass, observation.scaling
        (p,) = window_statistics(*given, extras=observation.extras)
        if self.scope == "group":
            return p.mean(2)
        return p.flatten(1, 2).mean(1, keepdim=True).expand_as(rows.mass)
