"""Read short blocks of a prompt in a CUDA graph of kvbench's own forward step.

KeyDiff's protocol cuts after every 128 tokens. A block of 128 tokens takes no longer than reading the weights once, if
the GPU does not wait for the host.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.batch_rows import BatchRows
from kvbench.engine.fixed_quota_rows import FixedQuotaRows
from kvbench.engine.graph_decoding import capture
from kvbench.engine.ring_rows import make_rings
from kvbench.kernels.dispatch import is_announcing
from kvbench.models.decoder_step import forward_step
from kvbench.models.decoder_weights import DecoderWeights

SHORT = 511  # longest block that is read in a graph; longer ones keep a GPU busy anyway


class GraphPrefill:
    """Reads blocks of `size` tokens into layers that hold `quota` rows per head."""

    def __init__(
        self,
        weights: DecoderWeights,
        layers: Sequence[Layer],
        windows: Sequence[Any],
        ids: Tensor,
        size: int,
        quota: int,
    ) -> None:
        """Allocate memory.

        Args:
            weights: The model's weights.
            layers: The layers, all at their quota.
            windows: The cache layers of the layers with a sliding window.
            ids: Token ids of n whole blocks, (B, n·size).
            size: Number of tokens of a block.
            quota: Rows per head after a block.
        """
        self.weights, self.layers = weights, layers
        self.ids = ids.view(len(ids), -1, size)
        rows = FixedQuotaRows(weights, [layers], ids.shape[1], size, quota)
        self.at = rows.at  # number of blocks read
        rings = make_rings(weights, windows, ids.shape[1], size)
        self.rows = BatchRows([[*rings, rows]], [[len(ids)]], ids.device)

    def read(self) -> None:
        """Read all blocks and leave the layers as if they had read and cut them."""
        graph = self.ids.is_cuda and not is_announcing()
        work = capture(self.one).replay if graph else self.one  # captured on empty rows; `back` fills them
        self.rows.back(0)
        for layer in self.layers:  # free the rows that `back` has copied
            layer.rows = layer.rows.without_cut()
        for _ in range(self.ids.shape[1]):
            work()
        self.rows.check()
        self.rows.keep(self.ids.shape[1] * self.ids.shape[2])

    def one(self) -> None:
        """Read the next block."""
        ids = self.ids.index_select(1, self.at)[:, 0]
        forward_step(self.weights, ids, self.rows.reader(cuts=True), None)
        self.rows.advance(cuts=True)
