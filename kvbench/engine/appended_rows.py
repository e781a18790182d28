"""Rows that only grow, at fixed addresses for a CUDA graph.

Each layer keeps its cut part where it is, and has memory for further tokens behind its tail. A codec that packs writes
the rows into memory of its own (`kvbench.interfaces.codec.Growing`) and attends to them there. The packed rows that the
layers hold are shared and not copied. The layers get all new packed rows at once when the answer ends, because a
layer's rows are an immutable value: joining packed rows for every chunk would copy the cache. A codec may leave some
layers raw.

Several answers whose layers pack nothing share one kernel call (`kvbench.kernels.joined_rows`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.graph_decoding import CHUNK, StepRows, find_layer_angles
from kvbench.engine.method_view import MethodView, find_present_rows
from kvbench.interfaces.codec import Angles, join_angles
from kvbench.interfaces.observation import State
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.joined_rows import Part, append_joined, attend_joined, join_parts
from kvbench.kernels.rope_append import append
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models.decoder_step import Attend, Norms
from kvbench.models.decoder_weights import DecoderWeights


def only_appends(choice: CachePolicy) -> bool:
    """Return whether decoding only appends rows and attends to all of them, apart from cuts."""
    method = choice.method
    if choice.codec.packs and not choice.codec.packing.grows:
        return False
    return not (method.attends_subset or method.uses_cache_positions or method.watches)


def reserve_part(layer: Layer, tokens: int) -> Part:
    """Reserve memory for further tokens behind a layer's rows, and return the rows with it."""
    layer.reserve(tokens)
    layer.rows = rows = layer.rows.with_starts()
    assert rows.tail_keys is not None and rows.tail_values is not None  # reserved
    return Part(rows.ragged(), rows.tail_keys, rows.tail_values, rows.tail)


class AppendedRows(StepRows):
    """The rows of some layers of one or several answers. The number of tokens read so far is on the device (`step`)."""

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        tokens: int,
        implementation: str | None = None,
        states: Sequence[State] | None = None,
        since: int = 0,
    ) -> None:
        """Reserve memory for the tokens.

        Args:
            weights: The model's weights.
            answers: The layers of each answer, in the order of the samples. Those of several answers pack nothing.
            tokens: Number of tokens to read at most.
            implementation: Name of the kernels' implementation; None chooses one.
            states: The method's captured states of the layers (`capture_states`) if it is shown every token. There is
                one answer then, and no layer was cut.
            since: Steps that such a method has counted since the last cut.
        """
        self.weights, self.answers, self.layers, self.implementation = weights, answers, answers[0], implementation
        self.indices = [layer.index for layer in self.layers]
        self.seen = [layers[0].rows.seen for layers in answers]  # tokens read before the first one
        self.kept = [0] * len(answers)  # tokens that the layers have counted
        first, end, like = min(self.seen), max(self.seen) + tokens, weights.embed
        self.angles = find_layer_angles(weights, self.indices, first, end, like)  # of each layer
        self.step = torch.zeros((), dtype=torch.int32, device=like.device)
        raw = [index for index, layer in enumerate(self.layers) if not layer.packs]
        self.parts = {index: [reserve_part(layers[index], tokens) for layers in answers] for index in raw}
        self.joined = {index: join_parts(parts) for index, parts in self.parts.items()} if len(answers) > 1 else {}
        offsets = [[seen - first] * layers[0].rows.shape[0] for seen, layers in zip(self.seen, answers, strict=True)]
        self.offsets = torch.tensor(sum(offsets, []), device=like.device)  # of `angles`, of each sample
        self._reserve_packed(tokens)
        self.since, self.view = since, None if states is None else self._make_view(states)

    def _reserve_packed(self, tokens: int) -> None:
        packed = {index: layer for index, layer in enumerate(self.layers) if layer.packs}
        self.growing = {index: layer.reserve_packed(tokens, CHUNK) for index, layer in packed.items()}
        self.packed_angles: dict[int, Angles] = {}  # of each packed layer
        if packed:
            late = {number for number, layer in packed.items() if layer.codec.packing.takes_unrotated_keys}
            end, like = self.seen[0] + tokens, self.weights.embed
            from_start = find_layer_angles(self.weights, self.indices, 0, end, like) if late else self.angles
            tables = {number: (from_start if number in late else self.angles)[number] for number in packed}
            joined = {id(cos): join_angles(cos, sin) for cos, sin in {id(t[0]): t for t in tables.values()}.values()}
            self.packed_angles = {number: joined[id(cos)] for number, (cos, _) in tables.items()}
        for growing in self.growing.values():
            growing.begin()

    def _make_view(self, states: Sequence[State]) -> MethodView:
        for part in self.find_parts():  # rows that do not exist are finite, because hooks may calculate with them
            part.tail_keys[:, :, part.tail :] = part.tail_values[:, :, part.tail :] = 0
        shapes = [part.tail_keys.shape[:3] for part in self.find_parts()]
        places = torch.arange(shapes[0][2], device=self.step.device)  # no row has left, so slots are positions
        self.places = places.expand(len(shapes), *shapes[0])
        return MethodView(self.weights, self.layers, states, shapes)

    def find_parts(self) -> list[Part]:
        """Return the raw layers' rows of the first answer."""
        return [parts[0] for parts in self.parts.values()]

    def reader(self, cuts: bool) -> Attend:
        if self.view is None:
            return self.attend
        view, first, like = self.view, self.step.long() + self.seen[0], self.find_parts()[0].tail_keys
        held = find_present_rows(self.places[0, 0, 0] <= first, self.places, like)

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, part = self.append(index, projected, norms), self.parts[index][0]
            outputs, sums = self.attend_all(index, queries, view.wants_lse)
            view.watch(index, part.tail_keys, part.tail_values, held, queries, outputs, sums, first)
            return outputs

        return attend

    def attend(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        """Append a token and return the attention outputs of one layer, (B, Hq, 1, d)."""
        if index in self.growing:
            return self.attend_packed(index, projected, norms)
        return self.attend_all(index, self.append(index, projected, norms))[0]

    def append(self, index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
        """Append a token to a raw layer and return its rotated queries, (B, Hq, 1, d)."""
        queries, keys, values = projected
        if self.joined:
            return append_joined(
                queries,
                keys,
                values,
                *self.angles[index],
                self.offsets,
                self.joined[index],
                self.step,
                norms=norms,
                implementation=self.implementation,
            )
        (part,) = self.parts[index]
        return append(
            queries,
            keys,
            values,
            *self.angles[index],
            part.tail_keys,
            part.tail_values,
            part.tail,
            self.step,
            norms=norms,
            implementation=self.implementation,
        )

    def attend_all(
        self, index: int, queries: Tensor, lse: bool = False, largest: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to all rows of a raw layer. Returns outputs (B, Hq, 1, d) and, with `lse`, their log-sum-exps.

        The rows of several answers give no log-sum-exps.
        """
        scaling, extras, implementation = self.weights.scaling, self.find_extras(index), self.implementation
        if self.joined:
            given = queries, self.joined[index], scaling, self.step
            return attend_joined(*given, extras=extras, implementation=implementation), None
        (part,) = self.parts[index]
        return attend_ragged(
            queries,
            part.held,
            part.tail_keys,
            part.tail_values,
            scaling,
            lse=lse,
            largest=largest,
            tail=part.tail + 1,
            step=self.step,
            extras=extras,
            implementation=implementation,
        )

    def find_extras(self, index: int) -> SoftmaxExtras | None:
        """Return sinks and cap of a layer's softmax."""
        return self.weights.blocks[self.indices[index]].attention.extras

    def attend_packed(self, index: int, projected: Sequence[Tensor], norms: Norms, *made: Any) -> Tensor:
        """Append a token to a packed layer and attend to all rows, or to `made`, some rows made of packed ones."""
        queries, keys, values = projected
        return self.growing[index].attend(
            queries,
            keys,
            values,
            self.packed_angles[index],
            self.step,
            self.weights.scaling,
            norms,
            self.implementation,
            self.find_extras(index),
            *made,
        )

    def pack_due(self, number: int) -> None:
        for growing in self.growing.values():
            growing.pack_due(number)

    def advance(self, cuts: bool) -> None:
        self.step += 1

    def back(self, step: int) -> int:
        if self.view is not None:
            self.view.take_columns([0] * len(self.layers))
            step = self.kept[0]  # columns of earlier tokens are lost
        self.step.fill_(step)
        return step

    def keep(self, read: int) -> None:
        self.count(read, 0)

    def count(self, read: int, answer: int) -> None:
        """Let the raw layers of an answer count its first `read` tokens."""
        before, layers, self.kept[answer] = self.kept[answer], self.answers[answer], read
        if read == before:
            return
        for index, attended in self.list_attended(before, read, self.parts).items():
            layers[index].count_appended(read - before, attended)
            if self.view is not None:
                columns = self.view.copy_columns(index, self.seen[0] + read)
                layers[index].rows = layers[index].rows.with_columns(columns)

    def list_attended(self, start: int, stop: int, layers: Iterable[int]) -> dict[int, list[float] | None]:
        """Return how many rows a query head of these layers attended to, for the tokens from `start` to `stop`.

        None stands for all rows.
        """
        return dict.fromkeys(layers)

    def finish(self, read: int, answer: int = 0) -> None:
        """Give the layers of an answer its first `read` tokens. Packed ones get all of them only now."""
        self.count(read, answer)
        if read and self.growing:
            for index, attended in self.list_attended(0, read, self.growing).items():
                self.layers[index].finish_growing(read, attended)
                del self.growing[index]  # some codecs copy their rows, so the next layer may need the memory
        self.growing = {}
        if read and self.view is not None:
            self.view.release_states((self.since + read) % self.layers[0].choice.method.decode_interval)
