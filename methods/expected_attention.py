"""expected_attention: keep the rows that future queries are expected to attend to.

Source: the Expected Attention paper (Eq. 9, Listing 1); NVIDIA/kvpress, expected_attention_press.py, and for decoding
its decoding_press.py. Symbols: μ, Σ mean and biased covariance of a head's queries before rotation, over all tokens
after the sinks; R̄ the mean rotation of the T positions after the last token read (not orthogonal: fast pairs average
towards 0; it is the identity on dimensions that the model does not rotate); s the scaling of the logits; m_j the mass.

    z_j = s·(R̄μ)·k_j + s²·k_jᵀ(R̄ΣR̄ᵀ)k_j/2 + log m_j
    p = softmax of z over the rows that are no sinks (first rows or a model's own), per query head
    score_j = (mean of p_j over the group + ε)·‖v_j‖

With fewer than two queries the newest rows stay. The queries are the layer's own (after its QK norm, if any), rotated
back by the model's own rotary embedding, so no hidden states are kept.

While decoding, `decode_queries` says whose moments a cut uses:

- text: the last `buffer` queries of the text except its sinks, including the prompt's. R̄ averages the positions after
  them.
- buffer: as in kvpress's DecodingPress. It keeps the queries of the last `buffer` passes of the model since the prompt
  or the last cut, plus those of the cut's own pass (257 at 256). It drops the first `sinks` of them. R̄ averages the T
  positions that begin at the number of all queries kept, as if the text began with the buffer. A pass counts as one
  step of decode_interval, however many tokens it reads (a question is one pass). If a pass reads as many tokens as a
  cut leaves rows, a cut follows at once. If the buffer has no more than `sinks` queries, the source has no scores; here
  the newest rows stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State, StateCapture
from kvbench.interfaces.query_ring import make_ring, share_among_layers
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.expected_attention import Moments, expected_scores, merge, moments

PLACES = 8192  # rotations that are computed at once


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """Score rows by the attention that future queries are expected to pay them."""

    positions: int = setting(minimum=1)
    """Number of future positions that the rotation is averaged over, T."""
    sinks: int = setting(minimum=0)
    """Number of first rows that always stay. Their queries do not enter the moments."""
    epsilon: float = setting(minimum=0)
    """Number that is added to the probabilities, ε."""
    use_covariance: bool = setting()
    """Whether z contains the term with Σ."""
    use_vnorm: bool = setting()
    """Whether the score is multiplied by the norm of the value."""
    buffer: int = setting(minimum=2)
    """Number of queries (text) or passes (buffer) that are remembered for cuts while decoding."""
    decode_queries: str = setting(choices=("text", "buffer"))
    """Which queries a cut while decoding uses."""

    takes_rotation = True
    refusals = {"softcap": "expects exponentials of logits without a cap; use another method"}

    @property
    def weighs_values(self) -> bool:
        return self.use_vnorm

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Remember the moments of the prompt's queries (`count`, `mean`, `scatter`) and the last queries (`recent`).

        Inside a CUDA graph the last queries are in `ring`.
        """
        if observation.decoding and not self.decoding:
            return {}
        if "ring" in state.layer:
            state.layer["ring"].append(observation, state)
            return {}
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
            new_moments = moments(new, self.use_covariance, shared_rotations(observation, new.shape[2], state))
            if "count" in state.layer:
                new_moments = merge(self.prompt_moments(state), new_moments)
            state.layer |= {"count": new_moments.count, "mean": new_moments.mean, "scatter": new_moments.scatter}
        return {}

    def fill(self, observation: Observation, state: State) -> None:
        """Append the queries of this pass to the buffer `recent`, which is empty after a cut.

        `passes` holds the number of tokens of each pass in the buffer.
        """
        passes = () if state.layer.get("emptied", True) else state.layer["passes"][-self.buffer :]
        before = state.layer["recent"][:, :, -sum(passes) :] if passes else observation.queries[:, :, :0]
        passes = (*passes, observation.queries.shape[2])
        state.layer |= {"recent": torch.cat([before, observation.queries], 2), "passes": passes}
        state.layer["emptied"] = observation.share is not None

    def capture_state(self, state: State, capture: StateCapture) -> State | None:
        """Move the last queries into a ring, if every cut uses the same number of queries.

        With decode_queries=buffer every pass since the last cut must have read one token.
        """
        none, count = capture.queries, self.buffer
        known = state.layer.get("recent", none)
        if self.decode_queries == "buffer":
            known, count = known if capture.since else none, min(self.buffer + 1, self.decode_interval)
            if capture.since and set(state.layer["passes"]) != {1}:
                return None
        elif known is none or capture.seen - capture.since + self.decode_interval < self.sinks + self.buffer:
            return None
        return State(state.seeds, {"ring": make_ring(known, count, capture)}, state.shared)

    def release_state(self, captured: State, state: State, seen: int, since: int) -> None:
        ring = captured.layer["ring"]
        if self.decode_queries == "text":
            state.layer["recent"] = ring.last(seen, min(ring.count, seen - self.sinks))
            return
        passes = min(ring.count, since or ring.count)
        state.layer |= {"recent": ring.last(seen, passes), "passes": (1,) * passes, "emptied": since == 0}

    captured = Captured(capture_state=capture_state, release_state=release_state)

    def steps(self, tokens: int, quota: int | None) -> int:
        """Count one step per token with decode_queries=text.

        With decode_queries=buffer a pass is one step, or a whole interval if it reads as many tokens as a cut leaves.
        """
        if self.decode_queries == "text":
            return tokens
        return self.decode_interval if quota is not None and tokens >= quota else 1

    def forget(self, state: State) -> None:
        for name in ("count", "mean", "scatter"):
            state.layer.pop(name, None)

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places < self.sinks

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        query_moments, buffered = (
            self.moments(observation, state),
            observation.decoding and self.decode_queries == "buffer",
        )
        if query_moments is None or query_moments.count < (1 if buffered else 2):
            return rows.places.to(rows.mass.dtype)
        first = query_moments.count + self.sinks if buffered else observation.tokens  # no sink is in the moments
        turn = share_among_layers(
            "mean rotation",
            observation,
            state,
            lambda: mean_rotation(observation, first, self.positions, query_moments.mean),
        )
        covariance = query_moments.covariance
        if covariance is not None:
            covariance = turn @ covariance @ turn.mT
        competing = rows.mass.masked_fill(rows.places < self.sinks, 0)  # a sink that does not fit the quota goes first
        values = rows.values if self.use_vnorm else None
        return expected_scores(
            query_moments.mean @ turn.mT, covariance, rows.keys, competing, observation.scaling, values, self.epsilon
        )

    def moments(self, observation: Observation, state: State) -> Moments | None:
        """Return the moments of the prompt's queries or, while decoding, of the last queries; None without queries."""
        if not observation.decoding:
            return self.prompt_moments(state) if "count" in state.layer else None
        if "ring" in state.layer:
            recent = state.layer["ring"].last(observation.tokens, state.layer["ring"].count)
        elif "recent" in state.layer:
            recent = state.layer["recent"]
        else:
            return None
        if self.decode_queries == "buffer":
            recent = recent[:, :, self.sinks :]
        if recent.shape[2] == 0:
            return None
        return moments(recent, self.use_covariance, shared_rotations(observation, recent.shape[2], state))

    @staticmethod
    def prompt_moments(state: State) -> Moments:
        """Return the moments of the prompt's queries."""
        return Moments(state.layer["count"], state.layer["mean"], state.layer["scatter"])


def shared_rotations(observation: Observation, tokens: int, state: State) -> tuple[Tensor, Tensor]:
    """Return `rotations`, computed once for all layers of a block."""
    return share_among_layers("rotations", observation, state, lambda: rotations(observation, tokens))


def rotations(observation: Observation, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the cos and sin that the last queries were rotated with, (tokens, r/2) each, one for each pair.

    They have the dtype of the queries, as in the model. They are computed in parts, because the model's own are float32
    and twice as wide.
    """
    places = torch.arange(-tokens, 0, device=observation.queries.device) + observation.tokens
    made: list[Tensor] = []
    for start in range(0, tokens, PLACES):
        some = torch.cat([places[start : start + PLACES], places[-1:]])  # frequencies may depend on the last place
        parts = [part[0, :-1, : part.shape[2] // 2] for part in observation.rotation(some[None])]
        made = made or [observation.queries.new_empty(tokens, part.shape[1]) for part in parts]
        for table, part in zip(made, parts, strict=True):
            table[start : start + PLACES] = part
    return made[0], made[1]


def mean_rotation(observation: Observation, first: int | Tensor, positions: int, like: Tensor) -> Tensor:
    """Return R̄ (d, d), the mean over `positions` positions from `first` on, like `like` (…, d) in dtype and size."""
    places = torch.arange(positions, device=like.device) + first
    cos, sin = (part[0].mean(0) for part in observation.rotation(places[None]))
    return turned(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device), cos, sin).mT  # column by column


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of the first r dimensions of x; the other dimensions stay as they are."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    part, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    one, other = part.chunk(2, dim=-1)
    return torch.cat([part * cos + torch.cat([-other, one], -1) * sin, rest], -1)
