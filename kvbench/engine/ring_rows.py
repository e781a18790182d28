"""The windows of sliding layers at fixed addresses for a CUDA graph.

No method cuts a layer with a sliding window. It holds the last tokens in a ring: new rows take the slots of rows that
have left the window. Attention does not depend on the order of rows, so the ring is read as it lies. transformers' own
cache layers (`SlidingWindowLayer`) get the rows in the order of the text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.graph_decoding import StepRows, change_tables, find_layer_angles
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.attention.sdpa import attend_masked
from kvbench.kernels.rope_append import append
from kvbench.models.decoder_step import Attend, Norms
from kvbench.models.decoder_weights import DecoderWeights, SlidingWindow
from kvbench.models.transformers_port import put_in_order


def make_rings(
    weights: DecoderWeights, windows: Sequence[Any], tokens: int, block: int = 1, implementation: str | None = None
) -> list[StepRows]:
    """Return rows for the layers with a sliding window, none if no layer has one. Arguments as in `RingRows`."""
    if weights.sliding is None:
        return []
    return [RingRows(weights, weights.sliding, windows, tokens, block, implementation)]


class RingRows(StepRows):
    """The windows of all layers that have one."""

    def __init__(
        self,
        weights: DecoderWeights,
        window: SlidingWindow,
        layers: Sequence[Any],
        tokens: int,
        block: int = 1,
        implementation: str | None = None,
    ) -> None:
        """Allocate memory. `back` copies the windows into it.

        Args:
            weights: The model's weights.
            window: The window, and the indices of the layers that have one.
            layers: Their cache layers (`SlidingWindowLayer`).
            tokens: Number of tokens to read at most.
            block: Number of tokens that are read at once.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.scaling, self.window, self.layers, self.indices = weights.scaling, window.tokens, layers, window.layers
        self.extras = [weights.blocks[index].attention.extras for index in window.layers]
        self.seen, self.block, self.implementation = layers[0].cumulative_length, block, implementation
        keys = layers[0].keys
        self.held, self.device = keys.shape[:2], keys.device
        self.size = window.tokens - 1 + block  # slots of a ring: all rows that a query of a block sees
        # keys and values, (L, 2, B, H, size, d)
        self.rings = keys.new_zeros(len(layers), 2, *self.held, self.size, keys.shape[3])
        self.angles = find_layer_angles(weights, window.layers, self.seen, self.seen + tokens, keys)
        self.orders = [weights.orders[layer] for layer in window.layers]  # the layers hold the model's own
        self.step = torch.zeros((), dtype=torch.int32, device=self.device)  # number of tokens read

    def reader(self, cuts: bool) -> Attend:
        return self.read_token() if self.block == 1 else self.read_block()

    def read_token(self) -> Attend:
        """Return the function that appends a token to a ring and attends to all its rows."""
        position = self.step + self.seen
        slots = (position % self.size).repeat(self.held)
        count = (position + 1).clamp(max=self.size)  # rows of the ring that exist

        def attend(ring: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            (queries, new_keys, new_values), (keys, values) = projected, self.rings[ring].unbind()
            queries = append(
                queries,
                new_keys,
                new_values,
                *self.angles[ring],
                keys,
                values,
                0,
                self.step,
                slots=slots,
                norms=norms,
                implementation=self.implementation,
            )
            outputs, _ = attend_ragged(
                queries,
                None,
                keys,
                values,
                self.scaling,
                tail=0,
                step=count,
                extras=self.extras[ring],
                implementation=self.implementation,
            )
            return outputs

        return attend

    def read_block(self) -> Attend:
        """Return the function that appends a block to a ring. Each of its queries attends to its own window."""
        tokens = self.step + torch.arange(self.block, device=self.device)
        angles = change_tables(self.angles, lambda part: part.index_select(0, tokens))
        position, slot = (tokens + self.seen)[:, None], torch.arange(self.size, device=self.device)
        held = position[-1] - (position[-1] - slot) % self.size  # the position of each slot's row; below 0 for none
        seen = (held >= 0) & (held <= position) & (held > position - self.window)  # (T, size)
        slots = (position % self.size)[:, 0]
        fresh = self.rings.new_empty(*self.rings.shape[1:4], self.block, self.rings.shape[5])
        none = torch.zeros_like(self.step)

        def attend(ring: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
            queries = append(
                queries,
                new_keys,
                new_values,
                *angles[ring],
                fresh[0],
                fresh[1],
                0,
                none,
                norms=norms,
                implementation=self.implementation,
            )
            self.rings[ring].index_copy_(3, slots, fresh)
            keys, values = self.rings[ring].unbind()
            return attend_masked(queries, keys, values, self.scaling, seen, self.extras[ring])

        return attend

    def advance(self, cuts: bool) -> None:
        self.step += self.block

    def back(self, step: int) -> int:
        """Copy the windows from their layers, and return how many tokens these have read: `step` or fewer."""
        read = self.layers[0].cumulative_length - self.seen
        slots = self.list_slots(read)
        for ring, layer, order in zip(self.rings, self.layers, self.orders, strict=True):
            for into, rows in zip(ring, (put_in_order(layer.keys, order), layer.values), strict=True):
                into.index_copy_(2, slots, rows)
        self.step.fill_(read)
        return int(read)

    def keep(self, read: int) -> None:
        """Give the layers the windows that the first `read` tokens left."""
        if read + self.seen > self.layers[0].cumulative_length:
            slots = self.list_slots(read)
            for ring, layer, order in zip(self.rings, self.layers, self.orders, strict=True):
                keys, layer.values = (rows.index_select(2, slots) for rows in ring)
                layer.keys = put_in_order(keys, None if order is None else order.argsort())
                layer.cumulative_length = read + self.seen

    def finish(self, read: int, answer: int = 0) -> None:
        self.keep(read)

    def forget(self, read: int, answer: int = 0) -> None:
        """Leave the windows as they are: what they hold will be forgotten, too."""

    def list_slots(self, read: int) -> Tensor:
        """Return the slots of the rows that a layer holds after `read` tokens, in the order of the text."""
        stop = self.seen + read
        return torch.arange(max(0, stop - self.window + 1), stop, device=self.device) % self.size
