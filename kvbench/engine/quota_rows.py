"""What rows that a CUDA graph cuts have in common, however a cut moves them: memory, and the method's view of them.

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
from kvbench.engine.graph_decoding import CHUNK, StepRows
from kvbench.interfaces.observation import Observation, State, StateCapture
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.rerotation import rotate_rows
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


def repeats_cuts(choice: CachePolicy) -> bool:
    """Return whether every cut of a layer at its quota runs the same operations."""
    own_cut = choice.method.overrides("cut", "merge", "select", "head_quotas")
    return choice.method.capturable and not own_cut and choice.allocator.is_uniform


def is_at_quota(layers: Sequence[Layer], quota: int, since: int = 0) -> bool:
    """Return whether all heads of all layers hold exactly `quota` rows and the last `since` tokens, one token a row."""
    return all(
        own.rows.even and own.rows.longest == quota and own.rows.tail == since and own.rows.mass is None
        and own.rows.is_raw for own in layers
    )  # fmt: skip


def capture_states(weights: DecoderWeights, layers: Sequence[Layer], since: int) -> list[State] | None:
    """Ask the method for states of the layers that a graph can change, or None if the modules must decode.

    Args:
        weights: The model's weights.
        layers: The layers.
        since: Steps that the method has counted since the last cut.
    """
    like, rows = weights.embed, layers[0].rows
    to_queries, to_keys, _ = weights.blocks[layers[0].index].project
    dim = len(to_keys) // rows.shape[1]
    queries = like.new_empty(rows.shape[0], len(to_queries) // dim, 0, dim)
    capture, states = StateCapture(queries, rows.seen, since, CHUNK), []
    for layer in layers:
        captured = layer.method.capture_state(layer.state, capture)
        if captured is None:
            return None
        states.append(captured)
    return states


def release_state(layer: Layer, captured: State, since: int) -> None:
    """Leave the method's state of a layer as the modules would have left it (`Method.release_state`)."""
    if captured is not layer.state:
        layer.method.release_state(captured, layer.state, layer.rows.seen, since)
        layer.update_memory()


def show(
    weights: DecoderWeights, layer: Layer, state: State, rows: Rows, queries: Tensor, outputs: Tensor,
    lse: Tensor | None, first: Tensor, each: int | None, prompt: Tensor | None = None,
) -> tuple[Observation, Rows]:  # fmt: skip
    """Show a layer's block to the method inside a graph (`QuotaRows.show`).

    `state` is what `update` gets. `prompt` is `Observation.prompt` if the layer does not know that of all samples.
    """
    progress = layer.progress
    observation = Observation(
        queries, outputs, lse, weights.scaling, weights.blocks[layer.index].output, weights.rotation,
        layer.index, layer.layers, cast(int, first),
        progress.prompt if prompt is None else cast(int, prompt), False, progress.decoding, layer.cut_layers,
        progress.prefix, each=each,
    )  # fmt: skip
    if layer.choice.method.overrides("update"):
        rows = replace(rows, columns={**rows.columns, **layer.method.update(observation, rows, state)})
    return observation, rows


def write_columns(columns: Mapping[str, Tensor], found: Mapping[str, Tensor], present: Tensor) -> None:
    """Write what `update` returned for the rows that are `present`, (n,) bool. The columns of absent rows stay 0."""
    for name, column in columns.items():
        if found[name] is not column:
            torch.where(present, found[name], column, out=column)


def take_columns(columns: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Copy a layer's columns (B, H, m) into the first slots of those at fixed addresses, (B, H, n).

    The other slots get 0.
    """
    for name, column in columns.items():
        known = held[name]
        column[..., : known.shape[2]] = known
        column[..., known.shape[2] :] = 0


class QuotaRows(StepRows):
    """The rows of all layers, with room for the tokens until the next cut, at fixed addresses."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], batch: int, seen: int, end: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Prepare rows. `allocate` gives them memory.

        Args:
            weights: The model's weights.
            layers: The layers. Their rows are not packed and stand for one token each.
            batch: Number of samples.
            seen: Number of tokens read before the first one that `angles` are for.
            end: The position behind the last token that will be read.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.weights, self.layers, self.implementation, self.seen, self.end = weights, layers, implementation, seen, end
        self.states = [layer.state for layer in layers]  # that the method's hooks get
        self.held, self.device = torch.Size((batch, layers[0].rows.shape[1])), weights.embed.device
        self.prompt: Tensor | None = None  # tokens of each sample's prompt, (B, 1, 1), if the layers do not know them
        turns = weights.rotation(torch.arange(seen, end, device=self.device)[None])
        self.angles = [part[0].to(weights.embed.dtype) for part in turns]  # cos and sin from the first token on

    def allocate(self, capacities: Sequence[Tensor]) -> None:
        """Allocate memory for the rows, empty.

        Args:
            capacities: For each layer, the number of rows that each head has memory for, (B, H) on the CPU.
        """
        weights, layers = self.weights, self.layers
        dim = len(weights.blocks[0].project[1]) // self.held[1]
        shapes = [(*self.held, int(own.max())) for own in capacities]
        self.rows = [weights.embed.new_zeros(2, int(own.sum()), dim) for own in capacities]  # keys and values
        self.starts = [(own.flatten().cumsum(0) - own.flatten()).view_as(own).to(self.device) for own in capacities]
        self.places = [torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in shapes]
        self.columns: list[dict[str, Tensor]] = [
            {name: own.new_zeros(shape) for name, own in layer.rows.columns.items()}
            for layer, shape in zip(layers, shapes, strict=True)
        ]
        dtype = mass_dtype(weights.embed)
        ones = {shape: torch.ones(shape, dtype=dtype, device=self.device) for shape in set(shapes)}
        self.mass = [ones[shape] for shape in shapes]
        self.table: tuple[Tensor, Tensor] | None = None  # cos and sin of all positions, if rows are rotated by slot
        if layers[0].choice.method.uses_cache_positions:
            most = max(self.end, *(shape[2] for shape in shapes))
            cos, sin = weights.rotation(torch.arange(most, device=self.device)[None])
            self.table = cos[0], sin[0]
        self.invalid = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a score was NaN
        # for each head the rows that it protected at its last cut, and the largest numbers of sinks and of other
        # protected rows that its quota had no room for at a cut
        self.tally = torch.zeros(len(layers), 3, *self.held, dtype=torch.int64, device=self.device)

    def give_tally(self, index: int) -> None:
        """Let a layer note how many rows its heads protected and gave up."""
        protected, sinks, recents = self.tally[index].clone()  # later steps write into `tally`
        self.layers[index].count_protected(protected)
        self.layers[index].count_given_up({"sinks": sinks, "recents": recents})

    def padded(self, index: int) -> Tensor:
        """Return keys and values of a layer whose heads have equal memory, (2, B, H, n, d)."""
        rows = self.rows[index]
        return rows.view(2, *self.places[index].shape, rows.shape[2])

    def rotate_by_slot(
        self, index: int, queries: Tensor, places: Tensor, asking: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate a layer's queries and keys by their slots in the cache, in place of their positions.

        Args:
            index: The layer.
            queries: (B, heads, T, d)
            places: The positions of the queries, which broadcast to (B, heads, T).
            asking: Their slots, which broadcast likewise.
            slots: The slot of each row, or what broadcasts to it, (B, H, n).

        Returns:
            The queries and the keys (B, H, n, d).
        """
        assert self.table is not None
        queries = rotate_rows(queries, *self.table, places, asking, implementation=self.implementation)
        return queries, rotate_rows(
            self.padded(index)[0], *self.table, self.places[index], slots, implementation=self.implementation
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
            first: The position of the block's first token, or those of the samples, (B, 1, 1).
            each: Number of rows that every head holds with the block; None if it changes.

        Returns:
            The observation, and the rows with the columns that the method has updated.
        """
        layer, state = self.layers[index], self.states[index]
        return show(self.weights, layer, state, rows, queries, outputs, lse, first, each, self.prompt)

    def marked(self, tokens: Tensor) -> Tensor:
        """Return `tokens` (B,), or -1 for all of them after a NaN score. The host reads the tokens anyway."""
        return tokens.masked_fill(self.invalid, -1)

    def check(self) -> None:
        """Raise a ContractError if a score was NaN."""
        if self.invalid:
            raise ContractError(f"method={self.layers[0].choice.method.name}: score returned NaN")
