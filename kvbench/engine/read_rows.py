"""Rows that only grow and of which each token attends to some, at fixed addresses for a CUDA graph."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvbench.cache.guard import ask
from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.graph_decoding import CHUNK, GrowingRows, Norms
from kvbench.interfaces.row_reader import CapturedAnswer, RowReader
from kvbench.kernels.listed_attention import attend_listed
from kvbench.models.decoder_weights import DecoderWeights


def reads_in_graph(choice: CachePolicy) -> bool:
    """Return whether a method that attends to few rows may do so in a CUDA graph."""
    return choice.method.attends_subset and choice.method.overrides("row_reader") and not choice.codec.packs


def count_query_heads(weights: DecoderWeights, keys: Tensor) -> int:
    """Return the number of query heads of a model whose keys are (B, H, n, d)."""
    return weights.blocks[0].project[0].shape[0] // keys.shape[3]


def make_reader(
    weights: DecoderWeights, layers: Sequence[Layer], tokens: int, quota: int | None, fraction: Fraction | None
) -> RowReader | None:
    """Ask the method for a reader of the next tokens, or None if the modules must read.

    Args:
        weights: The model's weights.
        layers: The layers, of which none was cut.
        tokens: Number of tokens to read at most.
        quota: Rows that a query head may attend to, the same for all these tokens.
        fraction: The budget if it is a fraction.
    """
    for layer in layers:
        layer.reserve(tokens)
    keys = {layer.index: layer.rows.tail_keys for layer in layers if layer.rows.tail_keys is not None}
    first, method = layers[0], layers[0].choice.method
    query_heads = count_query_heads(weights, keys[first.index])
    answer = CapturedAnswer(
        keys, {layer.index: layer.state for layer in layers}, len(weights.blocks), query_heads, first.rows.seen,
        tokens, first.progress.prompt, quota, fraction, weights.scaling, CHUNK,
    )  # fmt: skip
    return ask(f"method={method.name}", "row_reader", lambda: method.row_reader(answer))


class ReadRows(GrowingRows):
    """Rows that only grow. A reader lists those that a token attends to."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, reader: RowReader, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Reserve memory for the tokens.

        Args:
            weights: The model's weights.
            layers: The layers, of which none was cut.
            tokens: Number of tokens to read at most.
            reader: Chooses the rows (`make_reader`).
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        super().__init__(weights, layers, tokens, seen, implementation)
        self.choose_rows = reader
        like = weights.embed
        self.counts = torch.zeros(len(layers), tokens, dtype=torch.int64, device=like.device)  # rows attended to
        self.listing: set[int] = set()  # layers that attend to listed rows

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        last = self.step.long() + self.seen
        choose = self.choose_rows.choose(last)
        owner = f"method={self.layers[0].choice.method.name}"

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, (keys, values, _) = self.append(index, projected, norms), self.tails[index]
            layer = self.layers[index].index
            rows = ask(owner, "row_reader", lambda: choose(layer, queries, keys), f" of layer {layer}")
            if rows is None:
                return self.attend_all(index, queries)[0]
            self.listing.add(index)
            return attend_listed(
                queries, keys, values, rows.blocks, rows.size, last, self.weights.scaling,
                after=rows.after, counts=(self.counts[index], self.step), implementation=self.implementation,
            )  # fmt: skip

        return attend

    def back(self, step: int) -> int:
        self.counts[:, step:] = 0
        return super().back(step)

    def keep(self, read: int) -> None:
        keys = self.tails[0][0]
        new = self.counts[:, self.kept : read].cpu().double() / (len(keys) * count_query_heads(self.weights, keys))
        for index, layer in enumerate(self.layers):
            listed = new[index].float().tolist() if index in self.listing else None
            layer.count_appended(read - self.kept, listed)
        self.kept = read

    def finish(self, read: int) -> None:
        super().finish(read)
        self.choose_rows.finish(self.seen + read)
