"""rkv: keep the rows that the last queries attend to and whose keys repeat no others (R-KV).

Source: the R-KV paper (arXiv 2505.24133); Zefan-Cai/R-KV, rkv/compression/r1_kv.py (commit 31cf555) and rkv/utils.py
(commit cc5a9b9). Symbols: w the number of last queries t of the text, g the query heads of a KV head, k_j the keys, n
the number of rows, κ the width of the max pooling, τ the similarity from which on keys repeat each other.

    a_t = softmax over the rows j before the window of max_g q_{g,t}·k_j·s
    A_j = pool_κ(mean_t a_{t,j})
    c_{i,j} = cos(k_i, k_j); 0 for i = j, and for the newest j with c_{i,j} > τ
    R   = softmax_j(mean_i c_{i,j})
    s_j = λ·A_j - (1-λ)·R_j

So of the rows that repeat a key, the newest is not held against that key. Rows of the window always stay. R runs over
all rows, those of the window included (kernels/key_redundancy). The queries of the last tokens are remembered across
blocks and while decoding. The source cuts the prompt, and an answer wherever the number of tokens of prompt and answer
is a multiple of 128; kvbench counts the 128 tokens from the end of the prompt.

kvbench's own choices: If no row repeats key i, no further c_{i,j} is 0; the source then zeroes that of the first row,
because its index for "none" is 0. A row of the window has A = 0, and so has every row if the window covers all that a
head holds. The softmaxes are in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State, StateCapture
from kvbench.interfaces.query_ring import make_ring
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.key_redundancy import key_redundancy
from kvbench.kernels.softmax_extras import cap_logits
from kvbench.kernels.window_attention.pooling import pool


@dataclass(frozen=True)
class RKV(Method):
    """Score rows by the attention of the last queries minus their redundancy."""

    window: int = setting(minimum=1)
    """Number of last queries that score, w. Their own rows always stay."""
    kernel: int = setting(minimum=1, odd=True)
    """Width of the max pooling, κ."""
    mix: float = setting(minimum=0, maximum=1)
    """Weight of attention against redundancy, λ."""
    similar: float = setting(minimum=0, maximum=1)
    """Cosine above which two keys repeat each other, τ."""

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Remember the last queries of the text (`queries`). Inside a CUDA graph they are in `ring`."""
        if "ring" in state.layer:
            state.layer["ring"].append(observation, state)
        elif self.decoding or not observation.decoding:
            new = observation.queries[:, :, -self.window :]
            before = state.layer.get("queries", new[:, :, :0])
            before = before[:, :, max(0, before.shape[2] + new.shape[2] - self.window) :]
            state.layer["queries"] = torch.cat([before, new], 2)
        return {}

    def forget(self, state: State) -> None:
        if not self.decoding:
            state.layer.pop("queries", None)

    def capture_state(self, state: State, capture: StateCapture) -> State | None:
        """Move the last queries into a ring, if the text has a whole window of them at the next cut."""
        if capture.seen - capture.since + self.decode_interval < self.window:
            return None
        ring = make_ring(state.layer["queries"], self.window, capture)
        return State(state.seeds, {"ring": ring}, state.shared)

    def release_state(self, captured: State, state: State, seen: int, since: int) -> None:
        state.layer["queries"] = captured.layer["ring"].last(seen, min(self.window, seen))

    captured = Captured(capture_state=capture_state, release_state=release_state)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places >= observation.tokens - self.window

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        hidden = ~rows.present | (rows.places >= observation.tokens - self.window)
        keys, queries = rows.keys.to(rows.mass.dtype), self.last_queries(observation, state)
        asking = queries.to(keys.dtype).reshape(*keys.shape[:2], -1, keys.shape[3])  # (B, H, G·w, d)
        logits = (asking @ keys.mT).unflatten(2, (-1, queries.shape[2])).amax(2) * observation.scaling
        logits = cap_logits(logits, observation.extras)  # the softmax goes over candidates, so sinks are not in it
        logits = logits.masked_fill(hidden[:, :, None], torch.finfo(keys.dtype).min)  # finite if all rows are hidden
        attention = logits.softmax(-1).mean(2).masked_fill(hidden, 0)
        pooled = pool(attention, self.kernel, "max").masked_fill(hidden, 0)
        return self.mix * pooled - (1 - self.mix) * key_redundancy(rows.keys, rows.present, self.similar)

    def last_queries(self, observation: Observation, state: State) -> Tensor:
        """Return the last queries of the text, (B, H·G, at most w, d)."""
        if "ring" in state.layer:
            ring = state.layer["ring"]
            return ring.last(observation.tokens, ring.count)
        return state.layer["queries"]
