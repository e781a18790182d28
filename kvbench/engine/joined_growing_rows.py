"""Append to and attend to the growing rows of several contexts with one kernel call for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.graph_decoding import AppendedRows, GrowingRows, Norms
from kvbench.kernels.joined_rows import Part, append_joined, attend_joined, join_parts


class JoinedGrowingRows(AppendedRows):
    """The growing rows of several contexts, which read their next tokens together.

    They count these tokens in a step of their own. The step of a context alone stays as it is until its `back` sets it.
    """

    def __init__(self, parts: Sequence[GrowingRows]) -> None:
        """Join rows that have read none of their tokens yet.

        Args:
            parts: The rows of each context, in the order of the samples.
        """
        first = min(part.seen for part in parts)
        last = max(part.seen + len(part.angles[0]) for part in parts)
        super().__init__(parts[0].weights, [], last - first, first, parts[0].implementation)
        self.parts, count = parts, len(parts[0].tails)
        self.joined = [join_parts([Part(own.held[i], *own.tails[i]) for own in parts]) for i in range(count)]
        places = [part.seen - first for part in parts for _ in part.tails[0][0]]  # of each sample
        self.places = torch.tensor(places, device=self.step.device)

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        (queries, keys, values), layer = projected, self.joined[index]
        queries = append_joined(
            queries, keys, values, *self.angles, self.places, layer, self.step,
            norms=norms, implementation=self.implementation,
        )  # fmt: skip
        return attend_joined(queries, layer, self.weights.scaling, self.step, implementation=self.implementation)

    def keep(self, read: int) -> None:
        for part in self.parts:
            part.keep(read)
