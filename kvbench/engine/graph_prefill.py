"""Blocks of a prompt by the decoder's own step, in a CUDA graph: KeyDiff's protocol cuts after every 128 tokens, and a
block of 128 takes as long as reading the weights once, if nothing waits for the host.
"""

from collections.abc import Sequence

from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.fixed_quota_rows import FixedQuotaRows
from kvbench.engine.graph_decoding import capture, forward_step
from kvbench.models.decoder_weights import DecoderWeights

SHORT = 511  # tokens of the longest block that is read so: a longer one keeps a GPU busy anyway


class GraphPrefill:
    """Blocks of `size` tokens: ids (B, n·size), behind `seen` others, read by layers that hold `quota` rows a head."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], ids: Tensor, size: int, quota: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        self.weights, self.implementation = weights, implementation
        self.ids = ids.view(len(ids), -1, size)
        self.rows = FixedQuotaRows(weights, layers, ids.shape[1], size, quota, seen, implementation)

    def read(self) -> None:
        """Read all blocks and leave the layers as if they had read and cut them."""
        work = capture(self.one).replay if self.ids.is_cuda else self.one  # on rows that are not there yet
        self.rows.back(0)
        for layer in self.rows.layers:  # what they held is not needed any more
            layer.rows = layer.rows.without_cut()
        for _ in range(self.ids.shape[1]):
            work()
        self.rows.check()
        self.rows.keep(self.ids.shape[1] * self.ids.shape[2])

    def one(self) -> None:
        """Read the next block."""
        ids = self.ids.index_select(1, self.rows.at)[:, 0]
        forward_step(self.weights, ids, self.rows.reader(cuts=True), self.implementation)
        self.rows.advance(cuts=True)
