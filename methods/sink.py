"""sink: keep the first rows and the newest rows (StreamingLLM).

Source: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py and pos_shift/modify_llama.py. Symbols: n tokens read, q
the quota of a head.

    held rows = {0, …, sinks - 1} ∪ {n - (q - sinks), …, n - 1}

With positions=rolling, the
official definition, each key is rotated by its slot in the cache and the query by its own slot. Positions then have no
gaps and never exceed the number of rows held. With positions=original, keys stay as the model rotated them, as in
NVIDIA/kvpress, microsoft/MInference and most re-implementations. The two differ once a row has been evicted.

If a model's frequencies follow the largest position (longrope, dynamic), rolling uses the frequencies of the largest
slot. The rows that are left of a long text are then attended to with the frequencies of a short text.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting


@dataclass(frozen=True)
class Sink(Method):
    """Keep the first rows; the newest rows fill the rest of the quota."""

    sinks: int = setting(minimum=0)
    """Number of first rows that always stay."""
    positions: str = setting(choices=("rolling", "original"))
    """Whether positions are slots in the cache (rolling) or in the text (original)."""

    captured = Captured(order_free=True)

    @property
    def uses_cache_positions(self) -> bool:
        return self.positions == "rolling"

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places < self.sinks

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return rows.places.to(rows.mass.dtype)  # exact up to 2^24 tokens
