"""expected_attention: rows that future queries are expected to look at stay.

Source: the Expected Attention paper (Eq. 9, Listing 1); NVIDIA/kvpress, expected_attention_press.py, with its
decoding_press.py for decoding. Symbols: μ, Σ mean and biased covariance of a head's queries before rotation, over all
tokens since the sinks; R̄ mean rotation of the T positions after the last token read (not orthogonal: fast pairs
average towards 0; the identity where a model rotates only a part of d); s the scaling of the logits; m_j mass.
z_j = s·(R̄μ)·k_j + s²·k_jᵀ(R̄ΣR̄ᵀ)k_j/2 + log m_j, p = softmax over the rows that are no sinks, per query head;
score (mean of p over the group + ε)·‖v_j‖. With fewer than two queries the newest rows stay.

The queries are the layer's own (after its QK norm, if any), turned back by the model's own rotary embedding: no
hidden states are kept.

While decoding, decode_queries says whose moments a cut takes. text: those of the last `buffer` queries of the text but
its sinks, the prompt's too, and R̄ is of the positions after them. buffer: as kvpress's DecodingPress has it. It keeps
the queries of the last `buffer` passes of the model since the prompt or the last cut, and those of the cut's own pass
come on top: 257 at 256. Of these it drops the first `sinks`, and R̄ is of the T positions that begin at the number of
all, as if the text began with the buffer. A pass counts as one step of decode_interval however many tokens it reads (a
question is one pass), and a pass of as many tokens as a cut leaves rows is followed by a cut at once. The source has no
scores where the buffer has no more than `sinks` queries; here the newest rows stay then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.expected_attention import Moments, expected_scores, merge, moments
from kvbench.validation import SettingError, is_number, require_choice, require_int

PLACES = 8192  # rotations that are made at once


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """`positions` T that the rotation is averaged over; `sinks` that stay and whose queries do not count; `epsilon` ε;
    `use_covariance`: without it z has no Σ; `use_vnorm`: without it the score is p; `buffer`: queries (text) or passes
    (buffer) remembered for cuts while decoding; `decode_queries` text | buffer.
    """

    positions: int
    sinks: int
    epsilon: float
    use_covariance: bool
    use_vnorm: bool
    buffer: int
    decode_queries: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.positions", self.positions, 1)
        require_int("method.sinks", self.sinks, 0)
        require_int("method.buffer", self.buffer, 2)
        require_choice("method.decode_queries", self.decode_queries, ("text", "buffer"))
        if not is_number(self.epsilon) or not self.epsilon >= 0:
            raise SettingError(f"method.epsilon={self.epsilon}: a number of at least 0")

    @property
    def weighs_values(self) -> bool:
        return self.use_vnorm

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Moments of the prompt's queries (`count`, `mean`, `scatter`), and `recent`, the last queries as they came."""
        if self.decode_queries == "buffer" and observation.decoding:
            self.fill(observation, state)
            return {}
        new = observation.queries[:, :, max(0, self.sinks - observation.first) :]
        if new.shape[2] == 0:
            return {}
        if self.decoding and self.decode_queries == "text":
            before = state.layer.get("recent", new[:, :, :0])
            kept = max(0, self.buffer - new.shape[2])
            before = before[:, :, max(0, before.shape[2] - kept) :]
            state.layer["recent"] = torch.cat([before, new[:, :, -self.buffer :]], 2)
        if not observation.decoding:
            found = moments(new, self.use_covariance, shared_rotations(observation, new.shape[2], state))
            if "count" in state.layer:
                found = merge(self.prompt_moments(state), found)
            state.layer |= {"count": found.count, "mean": found.mean, "scatter": found.scatter}
        return {}

    def fill(self, observation: Observation, state: State) -> None:
        """Put the queries of this pass into the buffer `recent`, which is empty after a cut; `passes`: the tokens that
        each pass in it read.
        """
        passes = () if state.layer.get("emptied", True) else state.layer["passes"][-self.buffer :]
        before = state.layer["recent"][:, :, -sum(passes) :] if passes else observation.queries[:, :, :0]
        passes = (*passes, observation.queries.shape[2])
        state.layer |= {"recent": torch.cat([before, observation.queries], 2), "passes": passes}
        state.layer["emptied"] = observation.share is not None

    def steps(self, tokens: int, quota: int | None) -> int:
        """One a token, or of kvpress's buffer one a pass, and all where a pass is as long as what a cut leaves."""
        if self.decode_queries == "text":
            return tokens
        return self.decode_interval if quota is not None and tokens >= quota else 1

    def forget(self, state: State) -> None:
        for name in ("count", "mean", "scatter"):
            state.layer.pop(name, None)

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int) -> Tensor:
        return rows.places < self.sinks

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        found, buffered = self.moments(observation, state), observation.decoding and self.decode_queries == "buffer"
        if found is None or found.count < (1 if buffered else 2):
            return rows.places.to(rows.mass.dtype)
        first = state.layer["recent"].shape[2] if buffered else observation.tokens
        turn = shared(
            "mean rotation", observation, state, lambda: mean_rotation(observation, first, self.positions, found.mean)
        )
        covariance = found.covariance
        if covariance is not None:
            covariance = turn @ covariance @ turn.mT
        competing = rows.mass.masked_fill(rows.places < self.sinks, 0)  # a sink that finds no room goes first
        values = rows.values if self.use_vnorm else None
        return expected_scores(
            found.mean @ turn.mT, covariance, rows.keys, competing, observation.scaling, values, self.epsilon
        )

    def moments(self, observation: Observation, state: State) -> Moments | None:
        """Of the prompt's queries, or of the last ones while decoding."""
        if not observation.decoding:
            return self.prompt_moments(state) if "count" in state.layer else None
        if "recent" not in state.layer:
            return None
        recent = state.layer["recent"]
        if self.decode_queries == "buffer":
            recent = recent[:, :, self.sinks :]
        if recent.shape[2] == 0:
            return None
        return moments(recent, self.use_covariance, shared_rotations(observation, recent.shape[2], state))

    @staticmethod
    def prompt_moments(state: State) -> Moments:
        return Moments(state.layer["count"], state.layer["mean"], state.layer["scatter"])


def shared(name: str, observation: Observation, state: State, make: Callable[[], Any]) -> Any:
    """What depends on places alone, made by a block's first layer and dropped by its last."""
    about = observation.tokens, observation.queries.shape[2], observation.queries.device
    before, found = state.shared.pop(name, (None, None))
    if before != about:
        found = make()
    if observation.layer < max(observation.cut_layers, default=0):
        state.shared[name] = about, found
    return found


def shared_rotations(observation: Observation, tokens: int, state: State) -> tuple[Tensor, Tensor]:
    return shared("rotations", observation, state, lambda: rotations(observation, tokens))


def rotations(observation: Observation, tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin (tokens, r/2), one for each pair, that the last queries read were rotated with; in the dtype of the
    queries, as the model rotated them. Made in parts: the model's own are float32 and twice as wide.
    """
    places = torch.arange(observation.tokens - tokens, observation.tokens, device=observation.queries.device)
    made: list[Tensor] = []
    for start in range(0, tokens, PLACES):
        some = torch.cat([places[start : start + PLACES], places[-1:]])  # frequencies may depend on the last place
        parts = [part[0, :-1, : part.shape[2] // 2] for part in observation.rotation(some[None])]
        made = made or [observation.queries.new_empty(tokens, part.shape[1]) for part in parts]
        for table, part in zip(made, parts, strict=True):
            table[start : start + PLACES] = part
    return made[0], made[1]


def mean_rotation(observation: Observation, first: int, positions: int, like: Tensor) -> Tensor:
    """R̄ (d, d), averaged over `positions` places from `first` on; the dtype and dimension d of `like` (…, d)."""
    places = torch.arange(first, first + positions, device=like.device)
    cos, sin = (part[0].mean(0) for part in observation.rotation(places[None]))
    return turned(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device), cos, sin).mT  # column by column


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R·x over the last dimension: pairs (i, i + r/2) of the first r dimensions turn, the others stay as they are."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    part, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    one, other = part.chunk(2, dim=-1)
    return torch.cat([part * cos + torch.cat([-other, one], -1) * sin, rest], -1)
