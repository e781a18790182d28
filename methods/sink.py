"""sink: the first rows and the newest (StreamingLLM).

Source: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py and pos_shift/modify_llama.py. positions rolling, the
official definition: keys are rotated by their slot in the cache, the query by its own, so positions have no gaps and
never pass the rows held. positions original: as the model rotated them, in NVIDIA/kvpress, microsoft/MInference and
most re-implementations. They differ once something was evicted. Where a model's frequencies follow the longest place
(longrope, dynamic), rolling takes those of the largest slot: a long text of which few rows are held is then attended to
with the frequencies of a short one.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.validation import require_choice, require_int


@dataclass(frozen=True)
class Sink(Method):
    """`sinks`: first tokens that stay, the rest of the quota goes to the newest; `positions` rolling | original."""

    sinks: int
    positions: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.sinks", self.sinks, 0)
        require_choice("method.positions", self.positions, ("rolling", "original"))

    @property
    def uses_cache_positions(self) -> bool:
        return self.positions == "rolling"

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places < self.sinks

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return rows.places.double()
