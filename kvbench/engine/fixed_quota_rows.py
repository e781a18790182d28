"""Rows that are cut after every few tokens, at fixed addresses for a CUDA graph.

Tokens are read behind the quota's rows. After every `size` tokens each head is cut to its quota again. This is how a
prompt is read in short blocks, and an answer if the method cuts it after every few tokens. A cut is `evict`, as on the
host. The rows that stay are gathered into spare memory for one layer, which all layers share, and copied back. If the
method merges, the quota's rows have masses. Tokens that are read behind them stand for themselves. A method that
watches is shown every token. Between two cuts the slots behind the newest row are rows that do not exist.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.eviction import Eviction, LayerPolicy, Quota, evict
from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows, count_dtype
from kvbench.engine.graph_decoding import change_tables
from kvbench.engine.method_view import find_present_rows
from kvbench.engine.quota_rows import QuotaRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.cut_order import RECENTS, SINKS
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_selection import gather_rows, top_k_indices
from kvbench.models.decoder_step import Attend, Norms
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


class FixedQuotaRows(QuotaRows):
    """The rows of an answer's layers, cut to `room` rows per head after every `size` tokens."""

    uneven = False
    """Whether heads hold different numbers of rows (`kvbench.engine.uneven_rows`)."""

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        tokens: int,
        size: int,
        room: int,
        implementation: str | None = None,
        states: Sequence[State] | None = None,
        stored: Sequence[int] | None = None,
    ) -> None:
        """Allocate memory. `back` copies the layers' rows into it.

        Args:
            weights: The model's weights.
            answers: The layers of the only answer, or of a prompt, all at their quota (`is_at_quota`), maybe with
                tokens read since the last cut.
            tokens: Number of tokens that will be read.
            size: Number of tokens between two cuts.
            room: Slots of each head for the rows that a cut leaves: as many as their quota.
            implementation: Name of the kernels' implementation; None chooses one.
            states: The method's captured states of the layers (`capture_states`); None for the layers' own.
            stored: See `QuotaRows`.
        """
        like = answers[0][0]
        self.before = count_since_cut(like, room)
        self.seen = like.rows.seen - self.before
        end = self.seen + -(-(self.before + tokens) // size) * size
        capacities = [torch.full(layer.rows.shape, room + size) for layer in answers[0]]
        super().__init__(weights, answers, capacities, self.seen, end, implementation, states, stored)
        self.room, self.size = room, size
        self.each: int | None = room + size  # rows that every head holds at a cut; None if heads differ
        self.wanted = [Quota((room,) * self.held[0], each=room)] * len(self.layers)
        self.merges = answers[0][0].choice.method.merges
        self.begin = room if self.merges else 0  # of the slots whose rows stand for one token each
        self.behind = room - self.begin  # the slot of the next token among these
        self.slots = torch.arange(room + size, device=self.device)
        self.every_place = self.slots.repeat(len(self.layers), *self.held, 1)  # ascending, also before `back` fills it
        self.places = list(self.every_place)
        self.every_mass = torch.stack(self.mass) if self.merges or self.uneven else None
        self.mass = self.mass if self.every_mass is None else list(self.every_mass)
        self.intervals = change_tables(self.angles, lambda part: part.unflatten(0, (-1, size)))
        if not self.uneven:
            self.spare = torch.empty_like(self.padded(0)[:, :, :, :room])
            self.all = torch.arange(self.spare[0, ..., 0].numel(), device=self.device)  # indices of all spare rows
        # of each layer and head: rows that a cut should leave; rows that the last one left, if a hook chose them;
        # tokens evicted since `keep`, if their number is not `size` at every cut
        self.lengths = torch.full((len(self.layers), *self.held), room, device=self.device)
        self.left = self.lengths.clone()
        self.evicted = torch.zeros_like(self.left)
        self.miscounted = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a cut left other numbers
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)  # number of complete intervals
        self.since = torch.zeros((), dtype=torch.int32, device=self.device)  # tokens read since the last cut

    def cuts(self, number: int) -> bool:
        """Return whether the layers are cut after the token of this number, counted from 0."""
        return (self.before + number + 1) % self.size == 0

    def reader(self, cuts: bool) -> Attend:
        """Return the function that appends and attends in one layer, for `forward_step`.

        It reads one token while decoding, or the tokens of a whole interval of a prompt. With `cuts` they are the last
        of the interval, and every layer is cut.
        """
        angles = change_tables(self.intervals, lambda part: part.index_select(0, self.at)[0])
        tail, step = (None, None) if cuts else (self.behind + 1, self.since)
        first = self.at[0] * self.size + (self.since.long() + self.seen)  # position of the first token read
        implementation, method = self.implementation, self.layers[0].choice.method
        shows = cuts or method.watches
        lse = shows and "lse" in method.wants
        held = None  # which slots hold a row when the token has been appended
        if shows and not cuts:
            present = self.slots <= self.since + self.room
            held = find_present_rows(present, self.every_place, self.weights.embed, self.every_mass)

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            new_keys, new_values, rotates = self.pack(index, projected, first, angles[index], self.since, norms)
            keys, values = self.find_tail(index)
            queries = append(
                projected[0],
                new_keys,
                new_values,
                *angles[index],
                keys,
                values,
                self.behind,
                self.since,
                norms=norms,
                rotates_keys=rotates,
                implementation=implementation,
            )
            asking, others = queries, self.find_others(index)
            if self.tables is not None:
                offsets = torch.arange(queries.shape[2], device=self.device)
                slots = offsets + (self.since + self.room)
                asking, turned = self.rotate_by_slot(index, queries, offsets + first, slots, self.slots)
                keys, others = turned[:, :, self.begin :], others and replace(others, keys=turned.flatten(0, 2))
            outputs, sums = attend_ragged(
                asking,
                others,
                keys,
                values,
                self.weights.scaling,
                lse=lse,
                tail=tail,
                step=step,
                extras=self.weights.blocks[self.layers[index].index].attention.extras,
                implementation=implementation,
            )
            if cuts:
                self.cut(index, queries, outputs, sums, first)
            elif held is not None:
                self.view.watch(index, *self.view_rows(index), held, queries, outputs, sums, first)
            return outputs

        return attend

    def find_tail(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the slots of a layer whose rows stand for one token each, (B, H, m, d) for keys and for values."""
        keys, values = self.padded(index)[:, :, :, self.begin :]
        return keys, values

    def find_others(self, index: int) -> RaggedRows | None:
        """Return the rows of a layer that are not in these slots, or None if the method does not merge."""
        if not self.merges:
            return None
        keys, values = self.padded(index)
        starts, mass = self.starts[index].flatten(), self.mass[index].flatten()
        lengths = self.lengths[index].flatten()
        return RaggedRows(keys.flatten(0, 2), values.flatten(0, 2), mass, starts, lengths, self.room)

    def view_rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots of a layer, (B, H, n, d) each."""
        keys, values = self.padded(index)
        return keys, values

    def cut(self, index: int, queries: Tensor, outputs: Tensor, lse: Tensor | None, first: Tensor) -> None:
        """Let the method see what the layer has read, and cut the layer to its quota."""
        layer = self.layers[index]
        rows = Rows(*self.view_rows(index), self.places[index], self.mass[index], self.columns[index])
        policy = LayerPolicy(layer.method, layer.allocator, self.view.states[index], self.note_scores)
        with layer.guard.unnoted():  # `invalid` notes NaN and wrong counts, so guards add nothing to the graph
            observation, rows = self.view.show(index, rows, queries, outputs, lse, first, self.each)
            eviction = evict(observation, rows, policy, self.find_quota(index))
        layer.guard.release()
        self.move(index, eviction)
        self.count_cut(index, eviction)

    def find_quota(self, index: int) -> Quota:
        """Return the quota of a layer at the next cut."""
        return self.wanted[index]

    def note_scores(
        self, observation: Observation, rows: Rows, state: State, compute: Callable[[Observation], Tensor]
    ) -> Tensor:
        """Return the scores of a layer's rows, and note whether one of them is NaN."""
        scores = compute(observation)
        self.invalid |= scores.max().isnan()
        return scores

    def list_left(self, eviction: Eviction) -> Tensor:
        """Return which of `eviction.rows` stay, as `kept_indices` counts them: the quota's number of each head.

        Raises:
            ContractError: A hook returned fewer rows.
        """
        if eviction.index is not None:
            return eviction.index
        if len(eviction.rows) == self.room:
            return self.all
        if len(eviction.rows) < self.room:
            raise self.refuse_count()
        present = eviction.rows.present.to(eviction.rows.mass.dtype)
        return top_k_indices(present, self.room, flat=True, implementation=self.implementation)

    def move(self, index: int, eviction: Eviction) -> None:
        """Move the rows that stay at a cut of a layer to the first slots."""
        after, which = eviction.rows, self.list_left(eviction)
        quota, implementation, places = self.room, self.implementation, self.places[index]
        into = self.padded(index)[:, :, :, :quota].unbind()
        spare = gather_rows(
            which, after.keys, after.values, into=(self.spare[0], self.spare[1]), implementation=implementation
        )
        # copy_ would be slower, because the target is not dense
        gather_rows(self.all, *spare, into=(into[0], into[1]), implementation=implementation)

        def take(column: Tensor) -> Tensor:
            return column.flatten()[which].view(*self.held, quota)

        places[..., :quota] = take(after.places)
        places[..., quota:].add_(self.size)
        if self.merges:
            self.mass[index][..., :quota] = take(after.mass)
        for name, column in self.columns[index].items():
            column[..., :quota] = take(after.columns[name])
            column[..., quota:] = 0

    def count_cut(self, index: int, eviction: Eviction) -> None:
        """Count the protected rows that fit the quota, the most that did not fit at any cut, and the evicted tokens.

        If a hook chose the rows that stay, note whether it left every head its quota.
        """
        if eviction.given_up:
            protected, *given_up = self.tally[index]
            protected.copy_(eviction.protected)
            for most, kind in zip(given_up, (SINKS, RECENTS), strict=True):
                if kind in eviction.given_up:
                    torch.maximum(most, eviction.given_up[kind], out=most)
        if self.every_mass is not None:
            self.evicted[index].add_(eviction.evicted)
        if eviction.index is None:
            torch.sum(eviction.rows.present, -1, out=self.left[index])
            if index == len(self.layers) - 1:  # of all layers at once
                self.miscounted |= (self.left != self.lengths).any()
                self.invalid |= self.miscounted

    def refuse_count(self) -> ContractError:
        """Return the error of a method that leaves a head more or fewer rows than its quota."""
        name = self.layers[0].choice.method.name
        return ContractError(f"method={name}: a cut left a number of rows that differs from the quota of a head")

    def check(self) -> None:
        if self.miscounted:
            raise self.refuse_count()
        super().check()

    def advance(self, cuts: bool) -> None:
        """Count a token, or an interval, after all layers have read it."""
        if cuts:
            self.at += 1
            self.since.zero_()
        else:
            self.since += 1

    def back(self, step: int) -> int:
        """Copy the rows from the layers and return how many tokens have been read by then: `step` or fewer."""
        seen, since = self.layers[0].rows.seen, count_since_cut(self.layers[0], self.room)
        begin = seen - since
        later = torch.arange(begin, begin + self.size, device=self.device)
        for index, layer in enumerate(self.layers):
            self.places[index][..., self.room :] = later
            self.take_rows(index, layer.rows)
        self.view.take_columns([self.room + since - layer.rows.longest_head for layer in self.layers])
        for noted in (self.invalid, self.miscounted, self.tally, self.evicted):
            noted.zero_()
        self.at.fill_((begin - self.seen) // self.size)
        self.since.fill_(since)
        return seen - self.before - self.seen

    def take_rows(self, index: int, rows: StoredRows) -> None:
        """Copy the rows of a layer."""
        held, room = rows.view(), self.room
        for into, old in zip(self.padded(index), (held.keys, held.values), strict=True):
            into[:, :, : len(held)] = old
        self.places[index][..., :room] = held.places[..., :room]
        if self.merges:
            self.mass[index][..., :room] = held.mass[..., :room]

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        size, read = self.size, self.before + read
        since, kept = read % size, self.layers[0].rows.seen - self.seen
        if read == kept:
            return
        cut = (read // size - kept // size) * size  # rows that a head has lost
        evicted = [cut] * len(self.layers) if self.every_mass is None else self.evicted.clone()  # cuts write here
        self.evicted.zero_()
        for index, layer in enumerate(self.layers):
            if self.packed[index] is None:
                # later tokens write here
                tail = [part[:, :, self.behind :][:, :, :since].clone() for part in self.find_tail(index)]
                rows = self.copy_rows(index, read - kept, tail if since else None)
            else:
                rows = self.list_packed(index, read - self.before, since)
            attended = [self.count_held(index, token // size) + (token % size + 1) for token in range(kept, read)]
            layer.replace_rows(rows, evicted[index], attended, self.find_peak(index, attended, since))
            if cut:
                self.give_tally(index)

    def copy_rows(self, index: int, tokens: int, tail: Sequence[Tensor] | None) -> StoredRows:
        """Return a copy of a layer's rows after `tokens` further tokens. `tail` holds those since the last cut."""
        rows, room, mass = self.layers[index].rows, self.room, None
        since = tail[0].shape[2] if tail else 0
        if self.merges:
            weighs, seen = self.layers[0].choice.method.weighs_rows, rows.seen + tokens - since  # at the last cut
            dtype = self.mass[0].dtype if weighs else count_dtype(seen)
            mass = self.mass[index][..., :room].to(dtype, copy=True).flatten()
        return rows.replace_all(
            tokens,
            Plain(*(part[:, :, :room].clone().flatten(0, 2) for part in self.padded(index))),
            self.places[index][..., :room].int().flatten(),
            self.lengths[index].clone(),
            room,
            True,
            self.view.copy_columns(index, room + since),
            tail,
            mass,
        )

    def list_packed(self, index: int, tokens: int, since: int) -> StoredRows:
        """Return the rows of a layer whose codec packs, packed.

        Args:
            index: The layer.
            tokens: Tokens of this answer that were read.
            since: Tokens read since the last cut.
        """
        packed, count = self.packed[index], self.room + since
        assert packed is not None  # the layer packs
        places, lengths = self.places[index][..., :count].int().flatten(), self.lengths[index] + since
        return packed.finish_cut(tokens, places, lengths, count, True, self.view.copy_columns(index, count))

    def count_held(self, index: int, cuts: int) -> float:
        """Return how many rows per head a layer has held, as the mean, right after a number of cuts."""
        return self.room

    def find_peak(self, index: int, attended: Sequence[float], since: int) -> int:
        """Return the largest number of rows that a head of a layer has attended to since the layer got rows.

        Args:
            index: The layer.
            attended: The mean over the heads for each token.
            since: Tokens read since the last cut.
        """
        return int(max(attended))

    def finish(self, read: int, answer: int = 0) -> None:
        """Give the layers the first `read` tokens and the method's states. The rows are not used any more."""
        self.keep(read)
        if read:
            self.view.release_states(count_since_cut(self.layers[0], self.room))

    def forget(self, read: int, answer: int = 0) -> None:
        """Give the layers rows whose content is arbitrary, so no codec packs them. Otherwise like `finish`."""
        self.packed = [None] * len(self.layers)
        self.finish(read, answer)


def count_since_cut(layer: Layer, quota: int) -> int:
    """Return how many tokens a layer at its quota has read since the last cut, whether they are packed or not."""
    return layer.rows.longest_head - quota if layer.packs else layer.rows.tail
