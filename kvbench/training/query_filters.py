"""Q-Filters' directions, from a model's queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError


@dataclass(frozen=True)
class QueryRecorder(Method):
    """The full cache, and the queries at `places` in every layer's state."""

    places: Tensor  # (n,)

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        state.layer["queries"] = observation.queries[0, :, self.places].float().cpu()
        return {}


def collect_queries(model: torch.nn.Module, sequences: Sequence[Tensor], count: int, seed: int) -> list[Tensor | None]:
    """Rotated queries (query heads, about `count`, d) of every layer at random places of `sequences` (tokens,), equally
    many of each; None for layers with a sliding window.
    """
    generator = torch.Generator().manual_seed(seed)
    codec = build("codec", load_settings("codec", "raw"))
    found = []
    for ids in sequences:
        places = torch.randperm(len(ids), generator=generator)[: -(-count // len(sequences))].sort().values
        choice = CachePolicy(QueryRecorder("recorder", places), Allocator("uniform"), codec)
        context = GenerationContext(model, choice, Budget(1.0), None, (seed,))
        context.prefill(ids[None].to(next(model.parameters()).device))
        found.append([None if layer is None else layer.state.layer["queries"] for layer in context.layers])
    return [None if own[0] is None else torch.cat(own, 1) for own in zip(*found, strict=True)]


def compute_query_filters(
    model: torch.nn.Module, sequences: Sequence[Tensor], count: int = 3000, seed: int = 0
) -> Tensor:
    """(layers, KV heads, d) float32; zeros for layers with a sliding window, which no method cuts."""
    shape = read_layout(model)
    filters = torch.zeros(shape.layers, shape.heads, shape.dim)
    for layer, own in enumerate(collect_queries(model, sequences, count, seed)):
        if own is not None:
            filters[layer] = -find_directions(own).view(shape.heads, -1, shape.dim).mean(1)
    return filters


def find_directions(own: Tensor) -> Tensor:
    """(query heads, d) first right singular vectors of queries (query heads, n, d), most queries on their side."""
    first = torch.linalg.svd(own, full_matrices=False).Vh[:, 0]
    positive = ((own @ first[..., None]) > 0).float().mean((1, 2)) >= 0.5
    return torch.where(positive[:, None], first, -first)


def split_text(tokenizer: object, text: str, sequences: int, length: int) -> list[Tensor]:
    """`sequences` pieces of `length` tokens, each with what the tokenizer puts first; SettingError if text is short."""
    start = tokenizer("").input_ids
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    piece = length - len(start)
    if piece < 1 or len(ids) < sequences * piece:
        raise SettingError(f"--sequences={sequences}: the text has {len(ids)} tokens, {sequences * piece} are needed")
    return [torch.tensor(start + ids[i * piece : (i + 1) * piece]) for i in range(sequences)]
