"""Packed rows at fixed addresses for a CUDA graph.

A codec that packs writes an answer's rows into memory of its own (`kvbench.interfaces.codec.Growing`) and attends to
them there. The packed rows that the layers hold are shared and not copied. The layers get all new rows at once when the
answer ends, because a layer's rows are an immutable value: joining packed rows for every chunk would copy the cache.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import CHUNK, Norms
from kvbench.models.decoder_weights import DecoderWeights


class PackedRows:
    """Rows that only grow, of which a codec packs the old ones.

    The number of tokens read so far is on the device (`step`).
    """

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Reserve memory for all tokens.

        Args:
            weights: The model's weights.
            layers: The layers, whose rows the codec has packed.
            tokens: Number of tokens to read at most.
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.weights, self.layers, self.implementation = weights, layers, implementation
        places = torch.arange(seen, seen + tokens, device=weights.embed.device)
        cos, sin = weights.rotation(places[None])
        self.angles = cos[0].to(weights.embed.dtype), sin[0].to(weights.embed.dtype)
        self.growing = [layer.reserve_packed(tokens, CHUNK) for layer in layers]
        for growing in self.growing:
            growing.begin()
        self.step = torch.zeros((), dtype=torch.int32, device=weights.embed.device)

    def cuts(self, number: int) -> bool:
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        return self.attend

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        """Append a token and return the attention outputs of one layer, (B, Hq, 1, d)."""
        queries, keys, values = projected
        return self.growing[index].attend(
            queries, keys, values, self.angles, self.step, self.weights.scaling, norms, self.implementation
        )

    def advance(self, cuts: bool) -> None:
        self.step += 1

    def marked(self, tokens: Tensor) -> Tensor:
        return tokens

    def check(self) -> None:
        """Do nothing: these rows are never scored."""

    def back(self, step: int) -> int:
        self.step.fill_(step)
        return step

    def keep(self, read: int) -> None:
        """Do nothing: `finish` gives the layers all tokens, and no step goes back further than a chunk."""

    def finish(self, read: int) -> None:
        if read:
            for layer in self.layers:
                layer.finish_growing(read)
        self.growing = []
