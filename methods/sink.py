"""sink: the first rows and the newest (StreamingLLM).

Source: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py. Keys keep their original positions, as in NVIDIA/kvpress
and most re-implementations; the official re-rotation by cache slot differs beyond the trained length only.
"""

from dataclasses import dataclass

from torch import Tensor

from kvbench.method import Method, Seen, State
from kvbench.rows import Rows
from kvbench.settings import whole


@dataclass(frozen=True)
class Sink(Method):
    """`sinks`: first tokens that stay, the rest of the quota goes to the newest."""

    sinks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("method.sinks", self.sinks, 0)

    def protect(self, seen: Seen, rows: Rows, quota: int) -> Tensor:
        return rows.places < self.sinks

    def score(self, seen: Seen, rows: Rows, state: State) -> Tensor:
        return rows.places.double()
