"""Compute the scales with which fp8 stores the rows of a model: the largest sizes of keys and values over 448."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.methods.codecs.fp8 import SCALES
from kvbench.models.transformers_port import read_layout
from kvbench.training.recording import record_states

LARGEST = 448.0  # the largest number of e4m3


@dataclass(frozen=True)
class RowMaxima(Method):
    """The full cache, which also finds the largest size of the keys and of the values of each head."""

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        """Put the sizes into the state, (H,) each. Keys are as they are cached: normed and rotated."""
        for name, numbers in zip(SCALES, (rows.keys, rows.values), strict=True):
            state.layer[name] = numbers[0].float().abs().amax((1, 2)).cpu()
        return {}


def compute_row_scales(model: torch.nn.Module, sequences: Iterable[Tensor]) -> dict[str, Tensor]:
    """Compute the largest sizes of keys and values over all tokens of some texts, over the largest number of e4m3.

    Args:
        model: The model.
        sequences: Texts as token ids, each of shape (tokens,).

    Returns:
        k_scale and v_scale, (layers, KV heads) float32. Heads whose numbers are all 0, and those of layers that hold no
        rows, have a scale of 1.
    """
    layout = read_layout(model)
    largest = {name: torch.zeros(layout.layers, layout.heads) for name in SCALES}
    for ids in sequences:
        for layer, state in enumerate(record_states(model, ids, RowMaxima("recorder"))):
            if state is not None:
                for name, sizes in largest.items():
                    sizes[layer] = sizes[layer].maximum(state.layer[name])
    return {name: torch.where(sizes > 0, sizes / LARGEST, 1.0) for name, sizes in largest.items()}
