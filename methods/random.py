"""random: keep random rows. Every informed method must beat this baseline.

    s_j = u(seed, layer, head, j), uniform in [0, 1)

The hash u depends on nothing else, so blocks and batches do not change the choice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows


@dataclass(frozen=True)
class Random(Method):
    """Score rows at random. A row keeps its score while it is held, so blocks and batches do not change the choice."""

    captured = Captured()

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        device = rows.places.device
        # Each seed is filled in on the device. The host would have to copy a tensor of seeds to it.
        seeds = torch.stack([torch.full((1, 1), seed, device=device) for seed in state.seeds])
        heads = torch.arange(rows.heads, device=device)[None, :, None]
        stream = scramble(scramble(seeds) + observation.layer * 4096 + heads)
        return (scramble(stream + rows.places) >> 11 & (1 << 52) - 1).double() / (1 << 52)


def scramble(x: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser (Steele, Lea, Flood 2014) to int64 numbers, with overflow."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & (1 << 33) - 1)
