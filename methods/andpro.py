"""andpro: keep the rows whose weighted values point along an anchor output (anchor direction projection).

Source: the AnDPro paper; MIRALab-USTC/LLM-AnDPro, andpro_snapkv/monkeypatch/snapkv_utils.py (commit dfc2617). Symbols:
w the number of last queries t, p_{t,j} their attention to row j, v_j the values, a_t the anchor of query t.

    s_j = mean over the group of Σ_t p_{t,j}·⟨a_t, v_j⟩

In the paper a_t is the attention output. The published code differs:

- It max-pools p over κ rows first.
- It scores rows by chunks. Every row of a chunk has the chunk's sum.
- Its anchor a_t = Σ p_{t,j}·v_j runs only over the rows that may be dropped.
- It keeps the first chunk and the chunks of the window.
- It runs one top-k over all heads of a layer. Here that is allocator=ada with mode safeguard and alpha 0.

Chunks are counted from each head's first row, and a quota may split one chunk. The paper's form never holds p
(kernels/removal_scores). With κ > 1 or the code's anchor, p is computed in full on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.removal_scores import andpro
from kvbench.kernels.window_attention import window_probabilities
from kvbench.kernels.window_attention.pooling import pool


@dataclass(frozen=True)
class AnDPro(Method):
    """Score rows by their share of an anchor direction."""

    window: int = setting(minimum=1)
    """Number of last queries that score, w."""
    kernel: int = setting(minimum=1, odd=True)
    """Width of the max pooling, κ; 1 does not pool."""
    chunk: int = setting(minimum=1)
    """Number of rows that are scored together."""
    first: int = setting(minimum=0)
    """Number of chunks at the start that always stay."""
    anchor: str = setting(choices=("output", "droppable"))
    """The anchor: the attention output (paper), or its part from the rows that may be dropped (code)."""

    captured = Captured()

    def chunks(self, rows: Rows) -> Tensor:
        """Return the chunk of each row, counted from the head's first row, (B, H, n); -1 for absent rows."""
        return (rows.present.cumsum(-1) - 1).masked_fill(~rows.present, -self.chunk) // self.chunk

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.present & (self.chunks(rows) < self.first)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        chunks = self.chunks(rows)
        last = chunks[..., -1:] - self.window // self.chunk  # the last chunk before the window's
        return rows.present & (chunks > last)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        batch, heads, n = rows.mass.shape
        queries, outputs = observation.queries[:, :, -self.window :], observation.outputs[:, :, -self.window :]
        if self.kernel == 1 and self.anchor == "output":
            given = queries, rows.keys, rows.values, outputs, rows.mass, observation.scaling
            return self.by_chunks(andpro(*given, extras=observation.extras), rows)
        looked = queries, rows.keys, rows.mass, observation.scaling
        p = window_probabilities(*looked, extras=observation.extras)  # (B, H, G, w, n)
        groups = p.shape[2]
        p = pool(p, self.kernel, "max").flatten(2, 3)  # p is never negative, so an absent row is never the maximum
        p = p * rows.present[:, :, None]
        values = rows.values.to(p.dtype)
        if self.anchor == "output":
            anchors = outputs.to(p.dtype).reshape(batch, heads, -1, values.shape[-1])
        else:
            safe = self.protect_sinks(observation, rows, n) | self.protect(observation, rows, n)
            anchors = p * ~safe[:, :, None] @ values
        return self.by_chunks((p * (anchors @ values.mT)).sum(2) / groups, rows)

    def by_chunks(self, scores: Tensor, rows: Rows) -> Tensor:
        """Give every row the sum of its chunk's scores, (B, H, n)."""
        if self.chunk == 1:
            return scores
        chunks = self.chunks(rows).clamp(min=0)
        return torch.zeros_like(scores).scatter_add_(2, chunks, scores).gather(2, chunks)
