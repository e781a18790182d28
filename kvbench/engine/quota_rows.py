"""What rows that a CUDA graph cuts have in common, however a cut moves them: memory, and what is counted."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.answer_quotas import knows_quotas
from kvbench.engine.graph_decoding import CHUNK, Angles, StepRows, find_layer_angles
from kvbench.engine.method_view import MethodView
from kvbench.interfaces.codec import CuttableGrowing
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import State
from kvbench.interfaces.rows import mass_dtype
from kvbench.kernels.rerotation import rotate_rows
from kvbench.kernels.rope_append import append
from kvbench.models.decoder_step import Norms
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


def captures_cuts(method: Method) -> bool:
    """Return whether a method's hooks can be captured that cut a layer to the quota that it is given."""
    return method.captured is not None and not method.attends_subset and not method.sets_head_quotas


def repeats_cuts(choice: CachePolicy) -> bool:
    """Return whether every cut of a layer at its quota runs the same operations, and its quota is known before."""
    return captures_cuts(choice.method) and knows_quotas(choice.allocator)


def cuts_in_graph(choice: CachePolicy) -> bool:
    """Return whether a graph can contain the cuts of layers that hold their rows, whatever rows each head holds."""
    allocator = choice.allocator
    known = knows_quotas(allocator) or (allocator.capturable and not allocator.overrides("layer"))
    return known and captures_cuts(choice.method)


def shares_in_graph(layer: Layer, quotas: Sequence[tuple[int, ...]], size: int, since: int) -> bool:
    """Return whether a graph can cut a layer whose heads hold different numbers of rows, or more from cut to cut.

    Args:
        layer: The layer.
        quotas: For each cut the mean rows per head that it leaves, one number per sample.
        size: Number of tokens between two cuts.
        since: Tokens read since the last cut.
    """
    method, rows, held = layer.choice.method, layer.rows, layer.rows.longest
    if method.merges or method.uses_cache_positions or (layer.shares is None and not layer.choice.allocator.even):
        return False
    if rows.even != layer.even or rows.lengths is None or rows.tail != since or not rows.is_raw:
        return False
    for per_sample in quotas if layer.even else ():
        # the modules leave out a cut that would evict nothing
        if len(set(per_sample)) > 1 or held + size <= per_sample[0]:
            return False
        held = per_sample[0]
    return True


def is_at_quota(layers: Sequence[Layer], quota: int, since: int = 0) -> bool:
    """Return whether all heads of all layers hold exactly `quota` rows and, behind them, the last `since` tokens."""

    def fits(layer: Layer) -> bool:
        rows = layer.rows
        if layer.packs:  # the tokens too
            return layer.codec.cuts_in_graph and rows.even and rows.longest == quota + since
        return rows.even and rows.longest == quota and rows.tail == since and rows.is_raw

    return all(map(fits, layers))


class QuotaRows(StepRows):
    """The rows of some layers of one or several answers, with room for the tokens until the next cut.

    If a codec packs the rows as they are read, those here are what the packed rows stand for, rotated. The codec packs
    every token in memory of its own, and when the layers get their rows it drops those that were cut.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        capacities: Sequence[Tensor],
        first: int,
        end: int,
        implementation: str | None = None,
        states: Sequence[State] | None = None,
        stored: Sequence[int] | None = None,
    ) -> None:
        """Allocate memory for the rows, empty.

        Args:
            weights: The model's weights.
            answers: The layers of each answer, in the order of the samples. Their rows stand for one token each, and a
                graph may cut them (`Codec.cuts_in_graph`). The hooks of the first answer's layers are called for all.
                If a codec packs the rows, there is one answer.
            capacities: For each layer, the number of slots of each head, (B, H) on the CPU.
            first: Number of tokens read before the first one that `angles` are for.
            end: The position behind the last token that will be read.
            implementation: Name of the kernels' implementation; None chooses one.
            states: The method's states of the layers; None for the layers' own.
            stored: For each layer, the number of rows that there is memory for; None for a row in each slot.
        """
        self.weights, self.answers, self.implementation = weights, answers, implementation
        self.layers = layers = answers[0]
        self.indices = [layer.index for layer in layers]
        sizes = [answer_layers[0].rows.shape[0] for answer_layers in answers]
        self.samples = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]  # of each answer
        self.held, self.device = torch.Size((sum(sizes), layers[0].rows.shape[1])), weights.embed.device
        self.angles = find_layer_angles(weights, self.indices, first, end, weights.embed)  # of each layer
        dim = len(weights.blocks[self.indices[0]].attention.project[1].weight) // self.held[1]
        shapes = [torch.Size((*self.held, int(capacity.max()))) for capacity in capacities]
        counts = [int(capacity.sum()) for capacity in capacities] if stored is None else stored
        self.rows = [weights.embed.new_zeros(2, count, dim) for count in counts]  # keys and values
        self.starts = [
            (capacity.flatten().cumsum(0) - capacity.flatten()).view_as(capacity).to(self.device)
            for capacity in capacities
        ]
        self.places = [torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in shapes]
        self.view = MethodView(weights, layers, states or [layer.state for layer in layers], shapes)
        self.columns = self.view.columns
        self.scratch = self.rows[0].new_empty(2, *self.held, 1, dim)  # a token that is normed and rotated to be packed
        self.scratch_slots = torch.zeros(self.held, dtype=torch.int64, device=self.device)
        self.packed = [layer.rows.reserve_packed(end - first, CHUNK) if layer.packs else None for layer in layers]
        dtype = mass_dtype(weights.embed)
        ones = {shape: torch.ones(shape, dtype=dtype, device=self.device) for shape in set(shapes)}
        self.mass = [ones[shape] for shape in shapes]
        self.tables: list[Angles] | None = None  # cos and sin of all positions, if rows are rotated by slot
        if layers[0].choice.method.uses_cache_positions:
            most = max(end, *(shape[2] for shape in shapes))
            like = weights.embed.new_empty(0, dtype=torch.float32)
            self.tables = find_layer_angles(weights, self.indices, 0, most, like)
        self.invalid = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a score was NaN
        # for each head the rows that it protected at its last cut, and the largest numbers of sinks and of other
        # protected rows that its quota had no room for at a cut
        self.tally = torch.zeros(len(layers), 3, *self.held, dtype=torch.int64, device=self.device)

    def pack(
        self,
        index: int,
        projected: Sequence[Tensor],
        position: Tensor,
        angles: Angles,
        step: Tensor,
        norms: Norms,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, bool]:
        """Let the codec of a layer, if it packs, pack a token.

        Args:
            index: The layer.
            projected: Queries, keys and values as projected, (B, heads·d) each.
            position: The token's position, a whole number on the device, maybe repeated for the samples.
            angles: The rotary embedding, for a codec that packs keys as they are after norm and rotation, as `append`
                takes it with `step`, `norms` and `offsets`.
            step: See `angles`.
            norms: See `angles`.
            offsets: See `angles`.

        Returns:
            The keys and values that the token then has, and whether its keys are still to be normed and rotated.
        """
        packed, (queries, keys, values) = self.packed[index], projected
        if packed is None:
            return keys, values, True
        rotates = not self.layers[index].codec.packing.takes_unrotated_keys
        if rotates:
            append(
                queries,
                keys,
                values,
                angles[0],
                angles[1],
                self.scratch[0],
                self.scratch[1],
                0,
                step,
                slots=self.scratch_slots,
                offsets=offsets,
                norms=norms,
                implementation=self.implementation,
            )
            keys, values = self.scratch.flatten(2)
        since = position.flatten()[:1] - packed.seen
        return *cast(CuttableGrowing, packed.growing).append(keys, values, since), not rotates

    def give_tally(self, index: int, answer: int = 0) -> None:
        """Let a layer of an answer note how many rows its heads protected and gave up."""
        protected, sinks, recents = self.tally[index, :, self.samples[answer]].clone()  # later steps write here
        layer = self.answers[answer][index]
        layer.count_protected(protected)
        layer.count_given_up({"sinks": sinks, "recents": recents})

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
        assert self.tables is not None
        table = self.tables[index]
        queries = rotate_rows(queries, *table, places, asking, implementation=self.implementation)
        return queries, rotate_rows(
            self.padded(index)[0], *table, self.places[index], slots, implementation=self.implementation
        )

    def marked(self, tokens: Tensor) -> Tensor:
        """Return `tokens` (B,), or -1 for all of them after a NaN score. The host reads the tokens anyway."""
        return tokens.masked_fill(self.invalid, -1)

    def check(self) -> None:
        """Raise a ContractError if a score was NaN."""
        if self.invalid:
            raise ContractError(f"method={self.layers[0].choice.method.name}: score returned NaN")
