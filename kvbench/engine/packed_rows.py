"""Packed rows at fixed addresses for a CUDA graph.

A codec that packs writes an answer's rows into memory of its own (`kvbench.interfaces.codec.Growing`) and attends to
them there. The packed rows that the layers hold are shared and not copied. The layers get all new rows at once when the
answer ends, because a layer's rows are an immutable value: joining packed rows for every chunk would copy the cache.
A codec may leave some layers raw.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import CHUNK, GrowingRows, Norms
from kvbench.interfaces.codec import Angles, join_angles
from kvbench.models.decoder_weights import DecoderWeights


class PackedRows(GrowingRows):
    """Rows of which a codec packs the old ones."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weights, layers, tokens, seen, implementation)
        self.growing = {index: layer.reserve_packed(tokens, CHUNK) for index, layer in enumerate(layers) if layer.packs}
        self.turned_later = {index for index in self.growing if layers[index].codec.takes_unrotated_keys}
        self.own_angles = self.all_angles = join_angles(*self.angles)
        if self.turned_later:
            places = torch.arange(seen + tokens, device=weights.embed.device)
            cos, sin = weights.rotation(places[None])  # from the first position on
            self.all_angles = join_angles(cos[0].to(weights.embed.dtype), sin[0].to(weights.embed.dtype))
        for growing in self.growing.values():
            growing.begin()

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        if index in self.growing:
            return self.attend_packed(index, projected, norms)
        return super().attend(index, projected, norms)

    def find_angles(self, index: int) -> Angles:
        """Return the angles that a packed layer needs."""
        return self.all_angles if index in self.turned_later else self.own_angles

    def attend_packed(self, index: int, projected: Sequence[Tensor], norms: Norms, *made: Any) -> Tensor:
        """Append a token to a packed layer and attend to all rows, or to made ones (`ListingGrowing.attend`)."""
        queries, keys, values = projected
        return self.growing[index].attend(
            queries, keys, values, self.find_angles(index), self.step, self.weights.scaling, norms,
            self.implementation, *made,
        )  # fmt: skip

    def pack_due(self, number: int) -> None:
        for growing in self.growing.values():
            growing.pack_due(number)

    def finish(self, read: int) -> None:
        """Give the layers the first `read` tokens. Packed ones get all of them only now."""
        self.keep(read)
        if read and self.growing:
            for index, attended in self.list_attended(0, read, self.growing).items():
                self.layers[index].finish_growing(read, attended)
                del self.growing[index]  # some codecs copy their rows, so the next layer may need the memory
        self.growing = {}
