"""Compute the directions of Q-Filters from a model's queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.models.encoding import encode_text
from kvbench.models.transformers_port import read_layout
from kvbench.training.recording import record_states
from kvbench.validation import SettingError


@dataclass(frozen=True)
class QueryRecorder(Method):
    """The full cache, which also stores some queries in the state of every layer."""

    places: Tensor = field(kw_only=True)
    """Positions of the queries, shape (n,)."""

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        state.layer["queries"] = observation.queries[0, :, self.places].float().cpu()
        return {}


def collect_queries(model: torch.nn.Module, sequences: Sequence[Tensor], count: int, seed: int) -> list[Tensor | None]:
    """Collect queries of every layer, after RoPE, at random positions.

    Args:
        model: The model.
        sequences: Texts as token ids, each of shape (tokens,). Each contributes the same number of queries.
        count: Number of queries from all sequences together. The share of a sequence is rounded up.
        seed: Seed of the positions.

    Returns:
        The queries of each layer, shape (query heads, about `count`, d); None for layers with a sliding window.
    """
    generator = torch.Generator().manual_seed(seed)
    collected = []
    for ids in sequences:
        places = torch.randperm(len(ids), generator=generator)[: -(-count // len(sequences))].sort().values
        states = record_states(model, ids, QueryRecorder("recorder", places=places))
        collected.append([None if state is None else state.layer["queries"] for state in states])
    return [None if queries[0] is None else torch.cat(queries, 1) for queries in zip(*collected, strict=True)]


def compute_query_filters(
    model: torch.nn.Module, sequences: Sequence[Tensor], count: int = 3000, seed: int = 0
) -> Tensor:
    """Compute the directions of all KV heads.

    Args:
        model: The model.
        sequences: Texts as token ids, each of shape (tokens,).
        count: Number of queries from all sequences together.
        seed: Seed of the queries' positions.

    Returns:
        The directions in float32, shape (layers, KV heads, d); zeros for layers with a sliding window.
    """
    shape = read_layout(model)
    filters = torch.zeros(shape.layers, shape.heads, shape.dim)
    for layer, queries in enumerate(collect_queries(model, sequences, count, seed)):
        if queries is not None:
            filters[layer] = -find_directions(queries).view(shape.heads, -1, shape.dim).mean(1)
    return filters


def find_directions(queries: Tensor) -> Tensor:
    """Return the first right singular vector of each head's queries.

    The sign is chosen so that most queries have a positive product with the vector.

    Args:
        queries: Queries, shape (query heads, n, d).

    Returns:
        The vectors, shape (query heads, d).
    """
    first = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]
    positive = ((queries @ first[..., None]) > 0).float().mean((1, 2)) >= 0.5
    return torch.where(positive[:, None], first, -first)


def split_text(tokenizer: Any, text: str, sequences: int, length: int) -> list[Tensor]:
    """Split a text into sequences of `length` tokens, each of which begins with the tokenizer's special tokens.

    Raises:
        SettingError: The text is too short for so many sequences.
    """
    start = encode_text(tokenizer, "")[0]
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    piece = length - len(start)
    if piece < 1 or len(ids) < sequences * piece:
        raise SettingError(f"--sequences={sequences}: the text has {len(ids)} tokens, {sequences * piece} are needed")
    return [torch.tensor(start + ids[i * piece : (i + 1) * piece]) for i in range(sequences)]
