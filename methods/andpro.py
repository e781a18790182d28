"""andpro: rows whose weighted values point along an anchor output stay (anchor direction projection).

Source: the AnDPro paper; MIRALab-USTC/LLM-AnDPro, andpro_snapkv/monkeypatch/snapkv_utils.py (commit dfc2617). Symbols:
the last w queries t, p_{t,j} their attention, v_j values, a_t the anchor of query t. s_j = mean over the group of Σ_t
p_{t,j}·⟨a_t, v_j⟩. In the paper a_t is the attention output. The code differs: p is max-pooled over κ rows first; rows
are scored by chunks, as the chunk's sum; a_t = Σ p_{t,j}·v_j over the rows that may be dropped; the first chunk stays
beside the window's; one top-k runs over all heads of the layer, which here is allocator=ada with mode safeguard and
alpha 0. Its chunks count from each head's first row; a quota may split one chunk. The paper's form never holds p
(kernels/removal_scores); with κ > 1 or the code's anchor p is made in full, on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.removal_scores import andpro
from kvbench.kernels.window_attention import window_probabilities
from kvbench.kernels.window_attention.pooling import pool
from kvbench.validation import require_choice, require_int, require_odd


@dataclass(frozen=True)
class AnDPro(Method):
    """`window` w; `kernel` κ, 1: none; `chunk`: rows scored together; `first`: chunks that stay at the start;
    `anchor` output|droppable.
    """

    window: int
    kernel: int
    chunk: int
    first: int
    anchor: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.window", self.window, 1)
        require_odd("method.kernel", self.kernel)
        require_int("method.chunk", self.chunk, 1)
        require_int("method.first", self.first, 0)
        require_choice("method.anchor", self.anchor, ("output", "droppable"))

    def chunks(self, rows: Rows) -> Tensor:
        """(B, H, n) the chunk that a row is in, from the head's first row on; -1 where absent."""
        return (rows.present.cumsum(-1) - 1).masked_fill(~rows.present, -self.chunk) // self.chunk

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.present & (self.chunks(rows) < self.first)

    def protect(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        chunks = self.chunks(rows)
        last = chunks[..., -1:] - self.window // self.chunk  # the last chunk that is not the window's
        return rows.present & (chunks > last)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        batch, heads, n = rows.mass.shape
        queries, outputs = observation.queries[:, :, -self.window :], observation.outputs[:, :, -self.window :]
        if self.kernel == 1 and self.anchor == "output":
            return self.by_chunks(
                andpro(queries, rows.keys, rows.values, outputs, rows.mass, observation.scaling), rows
            )
        p = window_probabilities(queries, rows.keys, rows.mass, observation.scaling)  # (B, H, G, w, n)
        groups = p.shape[2]
        p = pool(p, self.kernel, "max").flatten(2, 3)  # of non-negative numbers: absent rows are no one's maximum
        p = p * rows.present[:, :, None]
        values = rows.values.to(p.dtype)
        if self.anchor == "output":
            anchors = outputs.to(p.dtype).reshape(batch, heads, -1, values.shape[-1])
        else:
            safe = self.protect_sinks(observation, rows, n) | self.protect(observation, rows, n)
            anchors = p * ~safe[:, :, None] @ values
        return self.by_chunks((p * (anchors @ values.mT)).sum(2) / groups, rows)

    def by_chunks(self, scores: Tensor, rows: Rows) -> Tensor:
        """(B, H, n): every row with its chunk's sum."""
        if self.chunk == 1:
            return scores
        chunks = self.chunks(rows).clamp(min=0)
        return torch.zeros_like(scores).scatter_add_(2, chunks, scores).gather(2, chunks)
