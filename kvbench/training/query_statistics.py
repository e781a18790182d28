"""Compute TriAttention's statistics of a model's queries before rotation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.rerotation import rerotate
from kvbench.methods.triattention import ABS, MEAN, pair_sizes
from kvbench.models.transformers_port import read_layout
from kvbench.training.recording import record_states


@dataclass(frozen=True)
class QuerySums(Method):
    """The full cache, which also adds up the queries of every layer, as they are before rotation."""

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Put the sums of the vectors and of the sizes of their pairs into the state, in float64."""
        queries = observation.queries[0].float()  # after the norm of queries, if the model has one
        places = torch.arange(queries.shape[1], device=queries.device) + observation.first
        cos, sin = (part[0] for part in observation.rotation(places[None]))
        plain = rerotate(queries, (cos, sin), (torch.ones_like(cos), torch.zeros_like(sin)))
        sums = {MEAN: plain, ABS: pair_sizes(plain, cos.shape[1])}
        for name, vectors in sums.items():
            state.layer[name] = state.layer.get(name, 0) + vectors.double().sum(1).cpu()
        return {}


def compute_query_statistics(model: torch.nn.Module, sequences: Iterable[Tensor]) -> dict[str, Tensor]:
    """Compute the mean of the queries and the mean size of their pairs, over all tokens of some texts.

    Args:
        model: The model.
        sequences: Texts as token ids, each of shape (tokens,).

    Returns:
        In float32, q_mean (layers, query heads, d) and q_abs_mean (layers, query heads, d/2), as a file of TriAttention
        holds them. Layers with a sliding window have zeros.
    """
    tokens, totals = 0, dict[int, dict[str, Tensor]]()
    for ids in sequences:
        tokens += len(ids)
        for layer, state in enumerate(record_states(model, ids, QuerySums("recorder"))):
            if state is not None:
                before = totals.get(layer)
                totals[layer] = {
                    name: total if before is None else before[name] + total for name, total in state.layer.items()
                }
    like = next(iter(totals.values()))
    none = {name: torch.zeros_like(total) for name, total in like.items()}
    layers = [totals.get(layer, none) for layer in range(read_layout(model).layers)]
    return {name: torch.stack([(sums[name] / tokens).float() for sums in layers]) for name in (MEAN, ABS)}
