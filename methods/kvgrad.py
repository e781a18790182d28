"""kvgrad: keep the rows that change the final hidden states most while the model repeats the text (KVgrad).

Source: the KVgrad paper (openreview.net/forum?id=cg1wTCJjjk); NVIDIA/kvpress, kvgrad_press.py (pull request 279, in
version 0.5.5; pull request 286 made its chunks shorter). As for KVzip, the model repeats the text in chunks
(kvbench.interfaces.repeating). Symbols: t the tokens of one read, p_{g,t,j} the attention of query head g to row j,
W_o^g its output projection, v_j the value, a_t what the layer's attention returns, after W_o, h_t the hidden state that
leaves the last layer, before the final norm.

    Φ   = Σ_t ‖h_t‖₂²
    s_j = max over t and the group's query heads g of p_{g,t,j}·‖W_o^g v_j‖₂·‖∂Φ/∂a_t‖₂

p is a softmax over the safe first rows, the rows of the chunk and the read itself. One backward pass per chunk gives
the gradients of all layers; they flow through the read's own keys and values, and not into the prompt's. The
activations of one read are held, so memory grows with `chunk`. The source takes the gradient of the residual stream
behind the attention, which is that of a_t unless the model norms a_t first (Gemma). kvbench's own choice: Φ is in at
least float32.

`sinks`, `scope` and everything else are as in KVzip.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation
from kvbench.interfaces.repeating import RepeatScores
from kvbench.interfaces.rows import mass_dtype


@dataclass(frozen=True)
class KVgrad(RepeatScores):
    """Score rows by how much they move the final hidden states while the model repeats the prompt."""

    wants = ("gradient",)
    weighs_values = True

    def objective(self, hidden: Tensor) -> Tensor:
        return hidden.to(mass_dtype(hidden)).square().sum()

    def weigh(self, observation: Observation) -> Tensor:
        assert observation.gradient is not None  # the method wants it
        norms = observation.gradient.to(mass_dtype(observation.queries)).norm(dim=-1)
        return norms.clamp(min=torch.finfo(norms.dtype).tiny)  # a weight must be positive
