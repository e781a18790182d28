"""The windows of sliding layers at fixed addresses for a CUDA graph, beside the rows of the other layers.

No method cuts a layer with a sliding window. It holds the last tokens in a ring: new rows take the slots of rows that
have left the window. Attention does not depend on the order of rows, so the ring is read as it lies. transformers' own
cache layers (`SlidingWindowLayer`) get the rows in the order of the text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.graph_decoding import Norms, StepRows
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.attention.sdpa import attend_masked
from kvbench.kernels.rope_append import append
from kvbench.models.decoder_weights import DecoderWeights, SlidingWindow


def add_windows(
    weights: DecoderWeights, windows: Sequence[Any], others: StepRows, tokens: int, seen: int, block: int = 1
) -> StepRows:
    """Return the rows of all layers: `others`, and windows if some layers have one. Arguments as in `SlidingRows`."""
    if weights.sliding is None:
        return others
    return SlidingRows(weights, weights.sliding, windows, others, tokens, seen, block)


class SlidingRows(StepRows):
    """The rows of all layers of a model in which some layers have a sliding window."""

    def __init__(
        self, weights: DecoderWeights, window: SlidingWindow, layers: Sequence[Any], others: StepRows,
        tokens: int, seen: int, block: int = 1, implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory. `back` copies the windows into it.

        Args:
            weights: The model's weights.
            window: The window, and the indices of the layers that have one.
            layers: Their cache layers (`SlidingWindowLayer`).
            others: The rows of the other layers.
            tokens: Number of tokens to read at most.
            seen: Number of tokens read so far.
            block: Number of tokens that are read at once.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.scaling, self.window, self.layers, self.others = weights.scaling, window.tokens, layers, others
        self.seen, self.block, self.implementation = seen, block, implementation
        keys = layers[0].keys
        self.held, self.device = keys.shape[:2], keys.device
        self.size = window.tokens - 1 + block  # slots of a ring: all rows that a query of a block sees
        # keys and values, (L, 2, B, H, size, d)
        self.rings = keys.new_zeros(len(layers), 2, *self.held, self.size, keys.shape[3])
        free = [index for index in range(len(weights.blocks)) if index not in window.layers]
        self.ring_of = {layer: number for number, layer in enumerate(window.layers)}
        self.other_of = {layer: number for number, layer in enumerate(free)}
        turns = window.rotation(torch.arange(seen, seen + tokens, device=self.device)[None])
        self.angles = [part[0].to(keys.dtype) for part in turns]  # cos and sin from the first token on
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)  # number of tokens read

    def cuts(self, number: int) -> bool:
        return self.others.cuts(number)

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that appends a token, or a block, and attends in one layer, for `forward_step`."""
        others, attend_window = self.others.reader(cuts), self.read_token() if self.block == 1 else self.read_block()

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            if index in self.other_of:
                return others(self.other_of[index], projected, norms)
            return attend_window(self.ring_of[index], projected, norms)

        return attend

    def read_token(self) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that appends a token to a ring and attends to all its rows."""
        position = self.step + self.seen
        slots = (position % self.size).repeat(self.held)
        count = (position + 1).clamp(max=self.size)  # rows of the ring that exist
        cos, sin = self.angles

        def attend(ring: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            (queries, new_keys, new_values), (keys, values) = projected, self.rings[ring].unbind()
            queries = append(
                queries, new_keys, new_values, cos, sin, keys, values, 0, self.step,
                slots=slots, norms=norms, implementation=self.implementation,
            )  # fmt: skip
            outputs, _ = attend_ragged(
                queries, None, keys, values, self.scaling, tail=0, step=count, implementation=self.implementation
            )
            return outputs

        return attend

    def read_block(self) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that appends a block to a ring. Each of its queries attends to its own window."""
        tokens = self.step + torch.arange(self.block, device=self.device)
        cos, sin = (part.index_select(0, tokens) for part in self.angles)
        position, slot = (tokens + self.seen)[:, None], torch.arange(self.size, device=self.device)
        held = position[-1] - (position[-1] - slot) % self.size  # the position of each slot's row; below 0 for none
        seen = (held >= 0) & (held <= position) & (held > position - self.window)  # (T, size)
        slots = (position % self.size)[:, 0]
        fresh = self.rings.new_empty(*self.rings.shape[1:4], self.block, self.rings.shape[5])
        none = torch.zeros_like(self.step)

        def attend(ring: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
            queries = append(
                queries, new_keys, new_values, cos, sin, fresh[0], fresh[1], 0, none,
                norms=norms, implementation=self.implementation,
            )  # fmt: skip
            self.rings[ring].index_copy_(3, slots, fresh)
            keys, values = self.rings[ring].unbind()
            return attend_masked(queries, keys, values, self.scaling, seen)

        return attend

    def prepare(self) -> None:
        self.others.prepare()

    def settle(self) -> None:
        self.others.settle()

    def advance(self, cuts: bool) -> None:
        self.step += self.block
        self.others.advance(cuts)

    def use_lane(self, lane: int) -> None:
        self.others.use_lane(lane)

    def pack_due(self, number: int) -> None:
        self.others.pack_due(number)

    def marked(self, tokens: Tensor) -> Tensor:
        return self.others.marked(tokens)

    def check(self) -> None:
        self.others.check()

    def back(self, step: int) -> int:
        """Copy the windows from their layers, which hold what the first `step` tokens left, or fewer.

        Returns the number of tokens.
        """
        read = self.layers[0].cumulative_length - self.seen
        slots = self.list_slots(read)
        for ring, layer in zip(self.rings, self.layers, strict=True):
            for into, rows in zip(ring, (layer.keys, layer.values), strict=True):
                into.index_copy_(2, slots, rows)
        self.step.fill_(read)
        return self.others.back(read)

    def keep(self, read: int) -> None:
        """Give the layers the windows that the first `read` tokens left."""
        if read + self.seen > self.layers[0].cumulative_length:
            slots = self.list_slots(read)
            for ring, layer in zip(self.rings, self.layers, strict=True):
                layer.keys, layer.values = (rows.index_select(2, slots) for rows in ring)
                layer.cumulative_length = read + self.seen
        self.others.keep(read)

    def finish(self, read: int) -> None:
        self.keep(read)
        self.others.finish(read)

    def forget(self, read: int) -> None:
        """Let the other layers count the first `read` tokens, and leave the windows. The rows are not used any more."""
        self.others.forget(read)

    def list_slots(self, read: int) -> Tensor:
        """Return the slots of the rows that a layer holds after `read` tokens, in the order of the text."""
        stop = self.seen + read
        return torch.arange(max(0, stop - self.window + 1), stop, device=self.device) % self.size
