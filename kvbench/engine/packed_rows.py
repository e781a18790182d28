"""Packed rows at fixed addresses for a CUDA graph.

A codec that packs writes an answer's rows into memory of its own (`kvbench.interfaces.codec.Growing`) and attends to
them there. The packed rows that the layers hold are shared and not copied. The layers get all new rows at once when the
answer ends, because a layer's rows are an immutable value: joining packed rows for every chunk would copy the cache.
"""

from collections.abc import Sequence

from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import CHUNK, AppendedRows, Norms
from kvbench.models.decoder_weights import DecoderWeights


class PackedRows(AppendedRows):
    """Rows of which a codec packs the old ones."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weights, layers, tokens, seen, implementation)
        self.growing = [layer.reserve_packed(tokens, CHUNK) for layer in layers]
        for growing in self.growing:
            growing.begin()

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        queries, keys, values = projected
        return self.growing[index].attend(
            queries, keys, values, self.angles, self.step, self.weights.scaling, norms, self.implementation
        )

    def keep(self, read: int) -> None:
        """Do nothing: `finish` gives the layers all tokens, and no step goes back further than a chunk."""

    def finish(self, read: int) -> None:
        if read:
            for layer in self.layers:
                layer.finish_growing(read)
        self.growing = []
