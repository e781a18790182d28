"""The interfaces of methods that let the model repeat the prompt before the prompt is cut.

Source of the requests: snu-mllab/KVzip, model/wrapper.py; NVIDIA/kvpress, kvzip_press.py. After the prompt the model
reads, over the whole cache, a request to repeat the text and then the text itself, `chunk` tokens at a time. One such
read consists of the request, the last `postfix` tokens before the chunk (for all chunks but the first), the tokens that
the chat template puts between a message and its answer, and the chunk. The read is then forgotten.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.max_attention import max_attention
from kvbench.kernels.row_selection import top_k_mask
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Repeating(Method):
    """The base of methods that see how the model repeats the prompt. What stands before the user's text stays."""

    chunk: int = setting(minimum=1)
    """Number of tokens that are repeated at a time."""
    postfix: int = setting(minimum=0)
    """Number of tokens before a chunk that its request quotes."""
    first: Any = setting()
    """The request for the first chunk, a text or token ids. (OmegaConf supports no union of text and list.)"""
    later: Any = setting()
    """The request for every other chunk, a text or token ids."""
    sinks: int | None = setting(minimum=0)
    """Number of first rows that always stay; `None` keeps the prefix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first", "later"):
            request = getattr(self, name)
            ids = isinstance(request, Sequence) and all(type(token) is int and token >= 0 for token in request)
            if not isinstance(request, str) and not ids:
                raise SettingError(f"method.{name}={request}: a text, or a list of token ids")

    def extra_reads(self, ids: Tensor, prefix: int, words: PromptEncoder) -> Iterator[ExtraRead]:
        turn, start = ids.new_tensor(words.turn), prefix
        for chunk in torch.split(ids[:, prefix:], self.chunk, dim=1):
            name = "first" if start == prefix else "later"
            request = ids.new_tensor(words.ids(f"method.{name}", getattr(self, name)))
            before = ids[:, max(prefix, start - self.postfix) : start]
            spoken = [request.expand(len(ids), -1), before, turn.expand(len(ids), -1), chunk]
            yield ExtraRead(torch.cat(spoken, 1), start, start + chunk.shape[1])
            start += chunk.shape[1]

    def safe(self, observation: Observation) -> int:
        """Return how many first rows always stay."""
        return observation.prefix if self.sinks is None else self.sinks

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor:
        return rows.places < self.safe(observation)


@dataclass(frozen=True)
class RepeatScores(Repeating):
    """The base of methods that score rows by the attention that they receive while the model repeats the prompt.

    s_j = max over the queries t of a read and over the group's query heads of p_{t,j}, where p is a softmax over the
    first rows that are safe, the rows that the read is about, and the rows of the read itself. With `weigh`, p_{t,j} is
    multiplied by weight_t·‖W_o^g v_j‖₂, where W_o^g is the output projection of query head g and v_j the value.
    """

    scope: str = setting(choices=("model", "head"))
    """Whether the rows of all layers and heads compete, or those of each head."""

    def weigh(self, observation: Observation) -> Tensor | None:
        """Return the weight of each query of a read, (B, T), or None if bare probabilities are the scores."""
        return None

    @property
    def sets_head_quotas(self) -> bool:
        return self.scope == "model"

    @property
    def refusals(self) -> Mapping[str, str]:
        shares = {
            "cascading_allocator": "shares rows out itself; use allocator=uniform",
            "allocator": "shares rows out itself; use method.scope=head or allocator=uniform",
        }
        return shares if self.sets_head_quotas else {}

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Score the rows that the read is about. Nothing has been cut yet, so a row's index is its position."""
        if observation.about is None:
            return {}
        (start, stop), new = observation.about, observation.queries.shape[2]
        safe = min(self.safe(observation), start)
        parts = [rows.keys[:, :, :safe], rows.keys[:, :, start:stop], rows.keys[:, :, -new:]]
        keys, chunk = torch.cat(parts, 2), slice(safe, safe + stop - start)
        weight = self.weigh(observation)
        if weight is None:
            given = observation.queries, keys, observation.scaling
            chunk_scores = max_attention(*given, extras=observation.extras)[..., chunk]
        else:
            chunk_scores = self.score_weighed(observation, weight, keys, rows.values[:, :, start:stop], chunk)
        scores = state.layer.get("scores", chunk_scores.new_zeros(*chunk_scores.shape[:2], observation.prompt)).clone()
        scores[..., start:stop] = chunk_scores
        state.layer["scores"] = scores
        if self.sets_head_quotas:  # `head_quotas` reads these scores and frees them
            state.shared["scores"] = {**state.shared.get("scores", {}), observation.layer: scores}
        return {}

    @classmethod
    def score_weighed(
        cls, observation: Observation, weight: Tensor, keys: Tensor, values: Tensor, chunk: slice
    ) -> Tensor:
        """Return the scores of rows whose probabilities are weighed, (B, H, n).

        Args:
            observation: A read. All its queries count.
            weight: The weight of each query, (B, T).
            keys: Keys of the rows of the softmax, (B, H, m, d). The last T of them are the read's own.
            values: Values of the rows that are scored, (B, H, n, d).
            chunk: Where these rows stand among the keys.
        """
        given, extras = (observation.queries, keys, observation.scaling), observation.extras
        attention = max_attention(*given, weight=weight, together=False, extras=extras)
        return (attention[..., chunk] * cls.project_norms(observation, values)).amax(2)

    @staticmethod
    def project_norms(observation: Observation, values: Tensor) -> Tensor:
        """Return ‖W_o^g v_j‖₂ of values (B, H, n, d), (B, H, G, n): ‖W v‖² is vᵀ(WᵀW)v, without n projected vectors."""
        heads, dim = values.shape[1], values.shape[3]
        dtype = torch.promote_types(values.dtype, torch.float32)
        weight = observation.output_weight.to(dtype)
        weight = weight.reshape(len(weight), heads, -1, dim)
        values = values.to(dtype)[:, :, None]  # (B, H, 1, n, d)
        squares = (values @ torch.einsum("ohgd,ohge->hgde", weight, weight) * values).sum(-1)
        return squares.clamp(min=0).sqrt()

    def forget(self, state: State) -> None:
        state.layer.pop("scores", None)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        scores: Tensor = state.layer["scores"]
        return scores

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """Return how many of the largest scores of all layers and heads each head of this layer has, (B, H).

        Every head keeps its safe rows, and at least one row. These do not compete.
        """
        if "allotted" not in state.shared:
            layer_scores = state.shared.pop("scores")
            scores = torch.stack(
                [layer_scores[layer].to(layer_scores[observation.layer].device) for layer in observation.cut_layers], 1
            )
            _, layers, heads, rows = scores.shape
            least = max(1, min(self.safe(observation), quota - 1))
            safe = torch.arange(rows, device=scores.device) < self.safe(observation)
            ranked = top_k_mask(scores.masked_fill(safe, torch.inf).flatten(1, 2), least).view_as(scores)
            open_ = scores.masked_fill(ranked, -torch.inf).flatten(1)
            won = top_k_mask(open_[:, None], layers * heads * (quota - least)).view_as(scores)
            counts = least + won.sum(-1)
            state.shared["allotted"] = {layer: counts[:, i] for i, layer in enumerate(observation.cut_layers)}
        own_counts: Tensor = state.shared["allotted"][observation.layer]
        return own_counts
