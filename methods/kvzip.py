"""kvzip: keep the rows that the model attends to when it is asked to repeat the text (KVzip).

Source: the KVzip paper (arXiv 2505.23416); snu-mllab/KVzip, model/wrapper.py, attention/score.py; NVIDIA/kvpress,
kvzip_press.py. After the prompt the model repeats the text, one chunk of it in a read (kvbench.interfaces.repeating).
Then

    s_j = max over the queries of the read and over the group's query heads of p_j

where p is a softmax over the rows of the prefix, of the chunk and of the read itself.

KVzip+ (`norms`; NVIDIA/kvpress, kvzip_press.py, kvzip_plus_normalization; the KVzap paper, arXiv 2601.07891) compares
what row j adds to the residual stream with what is there:

    s_j = max over queries t and query heads g of p_{g,t,j}·‖W_o^g v_j‖₂ / ‖h_t‖₂

W_o^g is the output projection of query head g, v_j the value, and h_t the hidden state of query t that enters the
layer. kvbench takes h_t before the layer's norm, because that is the stream to which attention adds. kvpress reads h_t
at the attention module, behind the norm, where its length differs less between tokens.

The prefix is what stands before the user's text. It is neither repeated nor cut. With `sinks`, as in kvpress, that many
first rows of the prompt are safe instead, even if the prefix is shorter or empty. The other rows of a longer prefix
score 0, and the softmax contains those sinks that stand before the chunk. (Without a chat template the source also
repeats the tokenizer's first token.)

With scope=model the rows of all layers and heads compete for the whole budget. With scope=head every head has its
quota, or what an allocator gives it. kvbench's own choices: the prefix counts in the budget, every head keeps at least
one row, the softmax is in float32, and ties go to the lower layer, head and position. (The source keeps what is
strictly above a threshold, which may be fewer rows than asked.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.repeating import Repeating
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.kernels.max_attention import max_attention
from kvbench.kernels.row_selection import top_k_mask


@dataclass(frozen=True)
class KVzip(Repeating):
    """Score rows by the attention they receive while the model repeats the prompt."""

    scope: str = setting(choices=("model", "head"))
    """Whether the rows of all layers and heads compete, or those of each head."""
    norms: bool = setting()
    """Whether attention is weighed by the projected values and the hidden states (KVzip+)."""

    @property
    def sets_head_quotas(self) -> bool:
        return self.scope == "model"

    @property
    def wants_hidden(self) -> bool:
        return self.norms

    @property
    def weighs_values(self) -> bool:
        return self.norms

    def refuses(self, allocator: Allocator, codec: Codec) -> str | None:
        if self.sets_head_quotas and allocator.name != "uniform" and not allocator.cascades:
            shares = f"allocator={allocator.name}: {self.name} shares rows out itself"
            return f"{shares}; use method.scope=head or allocator=uniform"
        return super().refuses(allocator, codec)

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Score the rows that the read is about. Nothing has been cut yet, so a row's index is its position."""
        if observation.about is None:
            return {}
        (start, stop), new = observation.about, observation.queries.shape[2]
        safe = min(self.safe(observation), start)
        parts = [rows.keys[:, :, :safe], rows.keys[:, :, start:stop], rows.keys[:, :, -new:]]
        keys, chunk = torch.cat(parts, 2), slice(safe, safe + stop - start)
        if self.norms:
            assert observation.hidden is not None  # `wants_hidden`
            weight = 1 / observation.hidden.to(rows.mass.dtype).norm(dim=-1)
            found = max_attention(observation.queries, keys, observation.scaling, weight=weight, together=False)[
                ..., chunk
            ]
            found = (found * self.project_norms(observation, rows.values[:, :, start:stop])).amax(2)
        else:
            found = max_attention(observation.queries, keys, observation.scaling)[..., chunk]
        scores = state.layer.get("scores", found.new_zeros(*found.shape[:2], observation.prompt)).clone()
        scores[..., start:stop] = found
        state.layer["scores"] = scores
        if self.sets_head_quotas:  # otherwise no layer would read and free them
            state.shared["scores"] = {**state.shared.get("scores", {}), observation.layer: scores}
        return {}

    @staticmethod
    def project_norms(observation: Observation, values: Tensor) -> Tensor:
        """Return ‖W_o^g v_j‖₂ of values (B, H, n, d), (B, H, G, n): ‖W v‖² is vᵀ(WᵀW)v, without n projected vectors."""
        heads, dim = values.shape[1], values.shape[3]
        dtype = torch.promote_types(values.dtype, torch.float32)
        weight = observation.output_weight.to(dtype).unflatten(1, (heads, -1, dim))
        values = values.to(dtype)[:, :, None]  # (B, H, 1, n, d)
        squares = (values @ torch.einsum("ohgd,ohge->hgde", weight, weight) * values).sum(-1)
        return squares.clamp(min=0).sqrt()

    def forget(self, state: State) -> None:
        state.layer.pop("scores", None)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        return state.layer["scores"]

    def head_quotas(self, quota: int, observation: Observation, state: State) -> Tensor:
        """Return how many of the largest scores of all layers and heads each head of this layer has, (B, H).

        Every head keeps its safe rows, and at least one row. These do not compete.
        """
        if "allotted" not in state.shared:
            found = state.shared.pop("scores")
            scores = torch.stack(
                [found[layer].to(found[observation.layer].device) for layer in observation.cut_layers], 1
            )
            _, layers, heads, rows = scores.shape
            own = max(1, min(self.safe(observation), quota - 1))
            safe = torch.arange(rows, device=scores.device) < self.safe(observation)
            ranked = top_k_mask(scores.masked_fill(safe, torch.inf).flatten(1, 2), own).view_as(scores)
            open_ = scores.masked_fill(ranked, -torch.inf).flatten(1)
            won = top_k_mask(open_[:, None], layers * heads * (quota - own)).view_as(scores)
            counts = own + won.sum(-1)
            state.shared["allotted"] = {layer: counts[:, i] for i, layer in enumerate(observation.cut_layers)}
        return state.shared["allotted"][observation.layer]
