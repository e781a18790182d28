"""What the layers of a block share while they remember queries."""

from types import SimpleNamespace

import torch

from kvbench.interfaces.observation import State
from kvbench.interfaces.query_ring import share_among_layers


def test_positions_inside_a_graph_are_told_apart_without_reading_them():
    """Tensors without data stand for those of a graph that is captured: nobody can compare their numbers."""
    made, state, queries = [], State((0,)), torch.empty(1, 2, 1, 4, device="meta")
    one, other = (torch.zeros((), dtype=torch.int64, device="meta") for _ in range(2))

    def ask(first: int | torch.Tensor, last: bool = False, turn: str = "RoPE") -> int:
        observation = SimpleNamespace(first=first, queries=queries, is_last_layer=last, rotation=turn)
        return share_among_layers("slot", observation, state, lambda: made.append(first) or len(made))

    assert [ask(first) for first in (one, one, other, 1000, int("1000"), one)] == [1, 1, 2, 3, 3, 4]
    assert ask(one, turn="none") == 5 and ask(one) == 4  # layers that rotate otherwise share among themselves
    assert ask(one, last=True) == 4 and not state.shared
