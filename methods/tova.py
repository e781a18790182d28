"""tova: rows that the newest query attends to stay, at every step; nothing is protected.

Source: schwartz-lab-NLP/TOVA, src/tova_cache.py: s_j = mean over all query heads of p_{last,j}, one set of rows for
all KV heads of a layer. scope group: mean within the group, each KV head its own rows, as the KeyDiff paper runs it.
NVIDIA/kvpress, tova_press.py, keeps the last row for sure.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.window_attention import window_statistics
from kvbench.validation import require_choice, require_int


@dataclass(frozen=True)
class TOVA(Method):
    """`scope` layer|group: whose query heads vote together; `recent`: newest rows that stay for sure."""

    scope: str
    recent: int

    position_free = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("method.scope", self.scope, ("layer", "group"))
        require_int("method.recent", self.recent, 0)

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        if self.scope == "layer" and not allocator.even:
            return (
                f"allocator={allocator.name}: {self.name} scores all heads of a layer alike, they cannot compete; "
                "use method.scope=group"
            )
        return super().refuses(allocator, codec)

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places >= observation.tokens - self.recent

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        (p,) = window_statistics(
            observation.queries[:, :, -1:], rows.keys, rows.mass, observation.scaling
        )  # (B, H, G, n)
        if self.scope == "group":
            return p.mean(2)
        return p.flatten(1, 2).mean(1, keepdim=True).expand_as(rows.mass)
