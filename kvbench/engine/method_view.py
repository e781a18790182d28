"""What a method is shown of layers whose tokens a CUDA graph reads, and what it remembers of them.

The hooks of a method with `captured` run the same operations at every position. They get the position of the block as a
tensor on the device, so one captured graph serves a whole answer. What `update` returns is written to columns at fixed
addresses. Any rows can show a token to the method: those that only grow before the first cut, and those that are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.hook_table import call_captured
from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import CHUNK
from kvbench.interfaces.observation import Observation, State, StateCapture
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.models.decoder_weights import DecoderWeights


def capture_states(weights: DecoderWeights, layers: Sequence[Layer], since: int) -> list[State] | None:
    """Ask the method for states of the layers that a graph can change, or None if the modules must decode.

    Args:
        weights: The model's weights.
        layers: The layers.
        since: Steps that the method has counted since the last cut.
    """
    if not layers[0].choice.captures_state:
        return [layer.state for layer in layers]
    like, rows = weights.embed, layers[0].rows
    to_queries, to_keys, _ = (linear.weight for linear in weights.blocks[layers[0].index].attention.project)
    dim = len(to_keys) // rows.shape[1]
    queries = like.new_empty(rows.shape[0], len(to_queries) // dim, 0, dim)
    capture, states = StateCapture(queries, rows.seen, since, CHUNK), []
    for layer in layers:
        captured = call_captured(layer.method, "capture_state", layer.state, capture)
        if captured is None:
            return None
        states.append(captured)
    return states


@dataclass(frozen=True)
class PresentRows:
    """Which of n slots hold a row after a token that no cut follows was appended."""

    present: Tensor
    """(n,) bool"""
    places: Tensor
    """Positions of the rows, (L, B, H, n), -1 for absent ones."""
    mass: Tensor
    """Tokens that each row stands for, (L, B, H, n), 0 for absent ones."""


def find_present_rows(present: Tensor, places: Tensor, like: Tensor, mass: Tensor | None = None) -> PresentRows:
    """Return which slots hold a row.

    Args:
        present: Whether each slot does, (n,).
        places: Positions of the rows of all slots, (L, B, H, n).
        like: Gives the dtype of the mass.
        mass: Tokens that each of these rows stands for, (L, B, H, n); None for one each.
    """
    weights = present.to(mass_dtype(like)).expand(places.shape) if mass is None else mass.where(present, 0)
    return PresentRows(present, places.where(present, -1), weights)


class MethodView:
    """The columns of some layers at fixed addresses, and the method's states of these layers.

    Attributes:
        layers: The layers, whose hooks are called.
        states: What the hooks get.
        columns: The method's values of each layer's rows, by name, (B, H, n).
        prompt: Tokens of each sample's prompt, (B, 1, 1), if the layers do not know them.
        wants_lse: Whether the method wants the log-sum-exps of attention.
    """

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], states: Sequence[State], shapes: Sequence[torch.Size]
    ) -> None:
        """Allocate the columns, empty.

        Args:
            weights: The model's weights.
            layers: The layers.
            states: The method's states of the layers.
            shapes: (B, H, n) of each layer, with n slots for rows.
        """
        self.weights, self.layers, self.states = weights, layers, list(states)
        self.prompt: Tensor | None = None
        self.wants_lse = "lse" in layers[0].choice.method.wants
        self.columns: list[dict[str, Tensor]] = [
            {name: column.new_zeros(shape) for name, column in layer.rows.columns.items()}
            for layer, shape in zip(layers, shapes, strict=True)
        ]

    def show(
        self,
        index: int,
        rows: Rows,
        queries: Tensor,
        outputs: Tensor,
        lse: Tensor | None,
        first: Tensor,
        each: int | None,
    ) -> tuple[Observation, Rows]:
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
        layer = self.layers[index]
        progress = layer.progress
        observation = Observation(
            queries=queries,
            outputs=outputs,
            lse=lse,
            scaling=self.weights.scaling,
            output_weight=self.weights.blocks[layer.index].attention.output.weight,
            rotation=self.weights.rotations[layer.index],
            layer=layer.index,
            layers=layer.layers,
            first=cast(int, first),
            prompt=progress.prompt if self.prompt is None else cast(int, self.prompt),
            last=False,
            decoding=progress.decoding,
            cut_layers=layer.cut_layers,
            prefix=progress.prefix,
            each=each,
            extras=self.weights.blocks[layer.index].attention.extras,
        )
        if layer.choice.method.overrides("update"):
            columns = {**rows.columns, **layer.method.update(observation, rows, self.states[index])}
            rows = replace(rows, columns=columns)
        return observation, rows

    def watch(
        self,
        index: int,
        keys: Tensor,
        values: Tensor,
        held: PresentRows,
        queries: Tensor,
        outputs: Tensor,
        lse: Tensor | None,
        first: Tensor,
    ) -> None:
        """Show the method a token that no cut follows. Arguments as of `show`, keys and values (B, H, n, d).

        What `update` returned is kept for the rows that are present. The columns of absent rows stay 0.
        """
        layer, columns = self.layers[index], self.columns[index]
        rows = Rows(keys, values, held.places[index], held.mass[index], columns)
        with layer.guard.unnoted():
            _, rows = self.show(index, rows, queries, outputs, lse, first, None)
        layer.guard.release()
        for name, column in columns.items():
            if rows.columns[name] is not column:
                torch.where(held.present, rows.columns[name], column, out=column)

    def take_columns(self, begins: Sequence[int]) -> None:
        """Copy the layers' columns (B, H, m) into the slots from `begins` on. The other slots get 0."""
        for begin, layer, columns in zip(begins, self.layers, self.columns, strict=True):
            for name, column in columns.items():
                known = layer.rows.columns[name]
                column.zero_()
                column[..., begin : begin + known.shape[2]] = known

    def copy_columns(self, index: int, stop: int, begin: int = 0) -> dict[str, Tensor]:
        """Return a copy of a layer's columns of the slots from `begin` to before `stop`, (B, H, n) by name."""
        return {name: column[..., begin:stop].clone() for name, column in self.columns[index].items()}

    def release_states(self, since: int) -> None:
        """Leave the method's states as the modules would have left them (`Captured.release_state`).

        Args:
            since: Steps that the method has counted since the last cut.
        """
        for layer, captured in zip(self.layers, self.states, strict=True):
            if captured is not layer.state:
                call_captured(layer.method, "release_state", captured, layer.state, layer.rows.seen, since)
                layer.update_memory()
