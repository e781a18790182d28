"""knorm: keep the rows whose keys have a small norm (L2 norm method).

Source: alessiodevoto/l2compress, cache.py. Symbols: k_j the key as stored; RoPE preserves its norm.

    s_j = -‖k_j‖₂

The source's setting prune_after, which leaves a layer of fewer than 2048 rows as it is, does not exist here: every
layer that holds more than its quota is cut.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.key_similarity import norms
from kvbench.validation import SettingError, require_int


@dataclass(frozen=True)
class Knorm(Method):
    """Score rows by the norm of their keys."""

    skip_layers: tuple[int, ...] = setting()
    """Layers that are never cut. Their rows come on top of the budget and are measured."""

    captured = Captured(order_free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skip_layers, list | tuple):
            raise SettingError(f"method.skip_layers={self.skip_layers}: a list of layers, such as [0, 1]")
        for layer in self.skip_layers:
            require_int("method.skip_layers", layer, 0)

    def skips_layer(self, layer: int, layers: int) -> bool:
        return layer in self.skip_layers

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return -norms(rows.keys)
