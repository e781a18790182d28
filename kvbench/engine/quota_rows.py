"""What rows at a quota have in common, however a cut moves them: the method's view of them inside a CUDA graph.

The hooks of a `capturable` method run the same operations at every position. They get the position of the block as a
tensor on the device, so one captured graph serves a whole answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.graph_decoding import StepRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.rerotation import rotate_rows
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


def repeats_cuts(choice: CachePolicy) -> bool:
    """Return whether every cut of a layer at its quota runs the same operations."""
    method = choice.method
    own_cut = method.overrides("cut") or method.overrides("merge") or method.overrides("select")
    return method.capturable and not own_cut and choice.allocator.is_uniform


def is_at_quota(layers: Sequence[Layer], quota: int, since: int = 0) -> bool:
    """Return whether all heads of all layers hold exactly `quota` rows and the last `since` tokens, one token a row."""
    return all(
        own.rows.even and own.rows.longest == quota and own.rows.tail == since and own.rows.mass is None
        and own.rows.is_raw for own in layers
    )  # fmt: skip


class QuotaRows(StepRows):
    """The rows of L layers at their quota, with room for the tokens until the next cut, at fixed addresses."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], quota: int, size: int, seen: int, end: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory.

        Args:
            weights: The model's weights.
            layers: The layers, all at their quota (`is_at_quota`).
            quota: Rows per head after a cut.
            size: Number of tokens between two cuts.
            seen: Number of tokens read before the last cut.
            end: The position behind the last token that will be read.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.weights, self.layers, self.implementation = weights, layers, implementation
        self.states = [layer.state for layer in layers]  # that the method's hooks get
        self.quota, self.size, self.seen = quota, size, seen
        stored, self.held = layers[0].rows.stored, layers[0].rows.shape
        assert isinstance(stored, Plain)  # `is_at_quota`
        self.like = stored.keys
        shape, self.device = (*self.held, quota + size), self.like.device
        # keys and values, (L, 2, B, H, quota + size, d)
        self.rows = self.like.new_zeros(len(layers), 2, *shape, self.like.shape[1])
        self.places = torch.zeros(len(layers), *shape, dtype=torch.int64, device=self.device)
        self.columns: list[dict[str, Tensor]] = [
            {name: own.new_zeros(shape) for name, own in layer.rows.columns.items()} for layer in layers
        ]
        self.ones = torch.ones(shape, dtype=mass_dtype(self.like), device=self.device)
        turns = weights.rotation(torch.arange(seen, end, device=self.device)[None])
        self.angles = [part[0].to(weights.embed.dtype) for part in turns]  # cos and sin from the first token on
        self.table: tuple[Tensor, Tensor] | None = None  # cos and sin of all positions, if rows are rotated by slot
        if layers[0].choice.method.uses_cache_positions:
            cos, sin = weights.rotation(torch.arange(max(end, quota + size), device=self.device)[None])
            self.table = cos[0], sin[0]
        self.invalid = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a score was NaN

    def rotate_by_slot(
        self, index: int, queries: Tensor, first: Tensor, since: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate a layer's queries and keys by their slots in the cache, in place of their positions.

        Args:
            index: The layer.
            queries: (B, Hq, T, d)
            first: The first query's position.
            since: Number of tokens read since the last cut before these.
            slots: The slot of each row, or what broadcasts to it, (B, H, n).

        Returns:
            The queries and the keys (B, H, n, d).
        """
        assert self.table is not None
        offsets, implementation = torch.arange(queries.shape[2], device=self.device), self.implementation
        asking = rotate_rows(
            queries, *self.table, offsets + first, offsets + (since + self.quota), implementation=implementation
        )
        return asking, rotate_rows(
            self.rows[index, 0], *self.table, self.places[index], slots, implementation=implementation
        )

    def show(
        self, index: int, rows: Rows, queries: Tensor, outputs: Tensor, lse: Tensor | None, first: Tensor,
        each: int | None,
    ) -> tuple[Observation, Rows]:  # fmt: skip
        """Show a layer's block to the method.

        Args:
            index: The layer.
            rows: Its rows with the block.
            queries: (B, Hq, T, d), rotated as the model rotates them.
            outputs: The attention outputs, (B, Hq, T, d).
            lse: Their log-sum-exps, if the method wants them.
            first: The position of the block's first token.
            each: Number of rows that every head holds; None if the host does not know it.

        Returns:
            The observation, and the rows with the columns that the method has updated.
        """
        layer = self.layers[index]  # one of those that hold rows, so `layer.index` may be larger
        progress = layer.progress
        observation = Observation(
            queries, outputs, lse, self.weights.scaling, self.weights.blocks[layer.index].output, self.weights.rotation,
            layer.index, layer.layers, cast(int, first), progress.prompt, False, progress.decoding, layer.cut_layers,
            progress.prefix, each=each,
        )  # fmt: skip
        if layer.choice.method.overrides("update"):
            rows = replace(rows, columns={**rows.columns, **layer.method.update(observation, rows, self.states[index])})
        return observation, rows

    def marked(self, tokens: Tensor) -> Tensor:
        """Return `tokens` (B,), or -1 for all of them after a NaN score. The host reads the tokens anyway."""
        return tokens.masked_fill(self.invalid, -1)

    def check(self) -> None:
        """Raise a ContractError if a score was NaN."""
        if self.invalid:
            raise ContractError(f"method={self.layers[0].choice.method.name}: score returned NaN")

    def take_rows(self) -> None:
        """Copy the layers' rows into the first `quota` slots, in the order of the text, and forget NaN scores.

        Columns are copied for the tokens since the last cut too.
        """
        quota = self.quota
        for index, layer in enumerate(self.layers):
            assert layer.rows.stored is not None and layer.rows.places is not None  # `is_at_quota`
            for into, old in zip(self.rows[index], layer.rows.stored.read(), strict=True):
                into[:, :, :quota] = old.view(*self.held, quota, -1)
            self.places[index, ..., :quota] = layer.rows.places.view(*self.held, quota)
            for name, column in self.columns[index].items():
                known = layer.rows.columns[name]
                column[..., : known.shape[2]] = known
                column[..., known.shape[2] :] = 0
        self.invalid.zero_()

    def give_rows(
        self,
        index: int,
        stored: Plain,
        places: Tensor,
        columns: Mapping[str, Tensor],
        tokens: int,
        tail: Sequence[Tensor] | None = None,
    ) -> None:
        """Give a layer the rows that it holds after `tokens` further tokens, in the order of the text.

        Args:
            index: The layer.
            stored: Keys and values, (R, d) each.
            places: Positions, (B, H, quota).
            columns: The method's values, (B, H, quota) each, or with those of `tail`.
            tokens: Number of tokens read since the layer got its rows.
            tail: Keys and values read since the last cut, (B, H, t, d) each.
        """
        self.layers[index].replace_rows(stored, places.int().flatten(), columns, tail, tokens, self.size)
