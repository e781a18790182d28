"""Rows that only grow while a method sees every token, at fixed addresses for a CUDA graph.

A method that watches may decode many tokens before the first cut, in heads that still hold every token. The method is
shown them as `FixedQuotaRows` show it the tokens between two cuts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import GrowingRows, Norms
from kvbench.engine.quota_rows import release_state, show, take_columns, write_columns
from kvbench.interfaces.observation import State
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.models.decoder_weights import DecoderWeights


class WatchedRows(GrowingRows):
    """The rows of all layers, of which none was cut, with memory for further tokens."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, states: Sequence[State], since: int,
        seen: int, implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Reserve memory for the tokens.

        Args:
            weights: The model's weights.
            layers: The layers, of which none was cut.
            tokens: Number of tokens to read at most.
            states: The method's captured states of the layers (`capture_states`).
            since: Steps that the method has counted since the last cut.
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, layers, tokens, seen, implementation)
        self.states, self.since = list(states), since
        keys = self.tails[0][0]
        # rows that do not exist are finite, because hooks may calculate with them
        for keys, values, tail in self.tails.values():
            keys[:, :, tail:] = values[:, :, tail:] = 0
        self.slots = torch.arange(keys.shape[2], device=keys.device)
        self.columns: list[dict[str, Tensor]] = [
            {name: own.new_zeros(keys.shape[:3]) for name, own in layer.rows.columns.items()} for layer in layers
        ]

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        first, like = self.step.long() + self.seen, self.tails[0][0]
        present = self.slots <= first  # no row has left, so slots are positions
        places = self.slots.where(present, -1).expand(like.shape[:3])
        mass = present.to(mass_dtype(like)).expand(like.shape[:3])
        lse = self.layers[0].choice.method.wants_lse

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, (keys, values, _) = self.append(index, projected, norms), self.tails[index]
            outputs, sums = self.attend_all(index, queries, lse)
            layer, columns = self.layers[index], self.columns[index]
            rows = Rows(keys, values, places, mass, columns)
            with layer.guard.unnoted():
                _, rows = show(self.weights, layer, self.states[index], rows, queries, outputs, sums, first, None)
            layer.guard.release()
            write_columns(columns, rows.columns, present)
            return outputs

        return attend

    def back(self, step: int) -> int:
        """Copy the columns from the layers and return how many tokens these have counted."""
        for layer, columns in zip(self.layers, self.columns, strict=True):
            take_columns(columns, layer.rows.columns)
        return super().back(self.kept)

    def keep(self, read: int) -> None:
        """Let the layers count the first `read` tokens, and give them the columns that these left."""
        if read > self.kept:
            super().keep(read)
            for layer, columns in zip(self.layers, self.columns, strict=True):
                held = {name: column[..., : self.seen + read].clone() for name, column in columns.items()}
                layer.rows = layer.rows.with_columns(held)

    def finish(self, read: int) -> None:
        """Give the layers the first `read` tokens and the method's states. The rows are not used any more."""
        self.keep(read)
        interval = self.layers[0].choice.method.decode_interval
        for layer, captured in zip(self.layers, self.states, strict=True):
            if read:
                release_state(layer, captured, (self.since + read) % interval)
