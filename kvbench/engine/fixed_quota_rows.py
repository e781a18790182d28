"""Rows that are cut after every few tokens, at fixed addresses for a CUDA graph.

Tokens are read behind the quota's rows. After every `size` tokens each head is cut to its quota again. This is how a
prompt is read in short blocks, and an answer if the method cuts it after every few tokens. A cut is `evict`, as on the
host. The rows that stay are gathered into spare memory for one layer, which all layers share, and copied back. If the
method merges, the quota's rows have masses. Tokens that are read behind them stand for themselves. A method that
watches is shown every token. Between two cuts the slots behind the newest row are rows that do not exist.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.eviction import Eviction, LayerPolicy, Quota, evict
from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows, count_dtype
from kvbench.engine.appended_rows import AppendedRows
from kvbench.engine.graph_decoding import Attend, Norms, StepRows
from kvbench.engine.method_view import find_present_rows
from kvbench.engine.quota_rows import QuotaRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import RaggedRows, attend_ragged
from kvbench.kernels.cut_order import RECENTS, SINKS
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_replacement import NEVER
from kvbench.kernels.row_selection import gather_rows, top_k_indices
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError


def make_fixed_quota_rows(
    weights: DecoderWeights, answers: Sequence[Sequence[Layer]], tokens: int, size: int, quotas: Sequence[int],
    states: Sequence[State], since: int, implementation: str | None = None,
) -> list[StepRows]:  # fmt: skip
    """Make rows for all layers of an answer: `FixedQuotaRows` for each quota, and `AppendedRows` where nothing is cut.

    Args:
        weights: The model's weights.
        answers: The layers of the only answer.
        tokens: Number of tokens that will be read.
        size: Number of tokens between two cuts.
        quotas: Rows per head of each layer after a cut; `NEVER` for a layer that is not cut.
        states: The method's captured states of the layers (`capture_states`).
        since: Tokens read since the last cut.
        implementation: Name of the kernels' implementation; None chooses one.
    """
    (layers,), found = answers, list[StepRows]()
    for quota in sorted(set(quotas)):  # layers that only append come last
        numbers = [number for number, own in enumerate(quotas) if own == quota]
        some, own_states = [layers[number] for number in numbers], [states[number] for number in numbers]
        if quota < NEVER:
            found.append(FixedQuotaRows(weights, [some], tokens, size, quota, implementation, own_states))
        elif layers[0].choice.method.watches:
            found.append(AppendedRows(weights, [some], tokens, implementation, own_states, since))
        else:
            found.append(AppendedRows(weights, [some], tokens, implementation))
    return found


class FixedQuotaRows(QuotaRows):
    """The rows of an answer's layers, cut to `quota` rows per head after every `size` tokens."""

    def __init__(
        self, weights: DecoderWeights, answers: Sequence[Sequence[Layer]], tokens: int, size: int, quota: int,
        implementation: str | None = None, states: Sequence[State] | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory. `back` copies the layers' rows into it.

        Args:
            weights: The model's weights.
            answers: The layers of the only answer, or of a prompt, all at their quota (`is_at_quota`), maybe with
                tokens read since the last cut.
            tokens: Number of tokens that will be read.
            size: Number of tokens between two cuts.
            quota: Rows per head after a cut.
            implementation: Name of the kernels' implementation; None chooses one.
            states: The method's captured states of the layers (`capture_states`); None for the layers' own.
        """
        rows = answers[0][0].rows
        self.before = rows.longest_head - quota  # tokens read since the last cut
        self.seen = rows.seen - self.before
        end = self.seen + -(-(self.before + tokens) // size) * size
        capacities = [torch.full(layer.rows.shape, quota + size) for layer in answers[0]]
        super().__init__(weights, answers, capacities, self.seen, end, implementation, states)
        self.quota, self.size, self.wanted = quota, size, Quota((quota,) * self.held[0], each=quota)
        self.merges = answers[0][0].choice.method.merges
        self.slots = torch.arange(quota + size, device=self.device)
        self.every_place = self.slots.repeat(len(self.layers), *self.held, 1)  # ascending, also before `back` fills it
        self.places = list(self.every_place)
        self.every_mass = torch.stack(self.mass) if self.merges else None
        self.mass = self.mass if self.every_mass is None else list(self.every_mass)
        self.intervals = [part.unflatten(0, (-1, size)) for part in self.angles]
        self.spare = torch.empty_like(self.padded(0)[:, :, :, :quota])
        self.all = torch.arange(self.spare[0, ..., 0].numel(), device=self.device)  # indices of all spare rows
        self.lengths = torch.full(self.held, quota, device=self.device)
        # of each layer and head: rows that the last cut left, if a hook of the method's chose them, and tokens evicted
        # since `keep`, if the method merges
        self.left = self.lengths.repeat(len(self.layers), 1, 1)
        self.evicted = torch.zeros_like(self.left)
        self.miscounted = torch.zeros((), dtype=torch.bool, device=self.device)  # whether a cut left others than quota
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
        cos, sin = (part.index_select(0, self.at)[0] for part in self.intervals)
        begin = self.quota if self.merges else 0  # of the rows without masses
        tail, step = (None, None) if cuts else (self.quota + 1 - begin, self.since)
        first = self.at[0] * self.size + (self.since.long() + self.seen)  # position of the first token read
        implementation, method = self.implementation, self.layers[0].choice.method
        shows = cuts or method.watches
        lse = shows and method.wants_lse
        held = None  # which slots hold a row when the token has been appended
        if shows and not cuts:
            present = self.slots <= self.since + self.quota
            held = find_present_rows(present, self.every_place, self.spare, self.every_mass)

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
            new_keys, new_values = self.pack(index, new_keys, new_values, first)
            keys, values = self.padded(index).unbind()
            queries = append(
                queries, new_keys, new_values, cos, sin, keys, values, self.quota, self.since,
                norms=norms, implementation=implementation,
            )  # fmt: skip
            asking, turned = queries, keys
            if self.table is not None:
                offsets = torch.arange(queries.shape[2], device=self.device)
                slots = offsets + (self.since + self.quota)
                asking, turned = self.rotate_by_slot(index, queries, offsets + first, slots, self.slots)
            outputs, sums = attend_ragged(
                asking, self.find_weighed(index, turned, values), turned[:, :, begin:], values[:, :, begin:],
                self.weights.scaling, lse=lse, tail=tail, step=step, implementation=implementation,
            )  # fmt: skip
            if cuts:
                self.cut(index, queries, outputs, sums, first)
            elif held is not None:
                self.view.watch(index, keys, values, held, queries, outputs, sums, first)
            return outputs

        return attend

    def find_weighed(self, index: int, keys: Tensor, values: Tensor) -> RaggedRows | None:
        """Return the quota's rows of a layer with their masses, or None if the method does not merge.

        Args:
            index: The layer.
            keys: The keys of all its slots, (B, H, n, d).
            values: Their values, (B, H, n, d).
        """
        if not self.merges:
            return None
        starts, mass = self.starts[index].flatten(), self.mass[index].flatten()
        return RaggedRows(keys.flatten(0, 2), values.flatten(0, 2), mass, starts, self.lengths.flatten(), self.quota)

    def cut(self, index: int, queries: Tensor, outputs: Tensor, lse: Tensor | None, first: Tensor) -> None:
        """Let the method see what the layer has read, and cut the layer to its quota."""
        layer, (keys, values) = self.layers[index], self.padded(index).unbind()
        rows = Rows(keys, values, self.places[index], self.mass[index], self.columns[index])
        policy = LayerPolicy(layer.method, layer.allocator, self.view.states[index], self.note_scores)
        with layer.guard.unnoted():  # `invalid` notes NaN and wrong counts, so guards add nothing to the graph
            observation, rows = self.view.show(index, rows, queries, outputs, lse, first, self.quota + self.size)
            found = evict(observation, rows, policy, self.wanted)
        layer.guard.release()
        self.move(index, found.rows, self.list_left(found))
        self.count_cut(index, found)

    def note_scores(
        self, observation: Observation, rows: Rows, state: State, compute: Callable[[Observation], Tensor]
    ) -> Tensor:
        """Return the scores of a layer's rows, and note whether one of them is NaN."""
        scores = compute(observation)
        self.invalid |= scores.max().isnan()
        return scores

    def list_left(self, found: Eviction) -> Tensor:
        """Return which of `found.rows` stay, as `kept_indices` counts them: the quota's number of each head.

        Raises:
            ContractError: A hook returned fewer rows.
        """
        if found.index is not None:
            return found.index
        if len(found.rows) == self.quota:
            return self.all
        if len(found.rows) < self.quota:
            raise self.refuse_count()
        present = found.rows.present.to(found.rows.mass.dtype)
        return top_k_indices(present, self.quota, flat=True, implementation=self.implementation)

    def move(self, index: int, after: Rows, which: Tensor) -> None:
        """Move the rows that stay at a cut of a layer to the first slots.

        Args:
            index: The layer.
            after: What the cut returned.
            which: The rows of it that stay, as `kept_indices` counts them.
        """
        quota, implementation, places = self.quota, self.implementation, self.places[index]
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

    def count_cut(self, index: int, found: Eviction) -> None:
        """Count the protected rows that fit the quota, the most that ever did not, and the tokens that are gone.

        If a hook chose the rows that stay, note whether it left every head its quota.
        """
        if found.given_up:
            protected, *given_up = self.tally[index]
            protected.copy_(found.protected)
            for most, kind in zip(given_up, (SINKS, RECENTS), strict=True):
                if kind in found.given_up:
                    torch.maximum(most, found.given_up[kind], out=most)
        if self.merges:
            self.evicted[index].add_(found.evicted)
        if found.index is None:
            torch.sum(found.rows.present, -1, out=self.left[index])
            if index == len(self.layers) - 1:  # of all layers at once
                self.miscounted |= (self.left != self.quota).any()
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
        quota, like = self.quota, self.layers[0].rows
        since = like.longest_head - quota
        begin = like.seen - since
        later = torch.arange(begin, begin + self.size, device=self.device)
        for index, layer in enumerate(self.layers):
            held = layer.rows.view()
            for into, old in zip(self.padded(index), (held.keys, held.values), strict=True):
                into[:, :, : len(held)] = old
            self.places[index][..., :quota] = held.places[..., :quota]
            self.places[index][..., quota:] = later
            if self.merges:
                self.mass[index][..., :quota] = held.mass[..., :quota]
        self.view.take_columns()
        for noted in (self.invalid, self.miscounted, self.tally, self.evicted):
            noted.zero_()
        self.at.fill_((begin - self.seen) // self.size)
        self.since.fill_(since)
        return like.seen - self.before - self.seen

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        quota, size, read = self.quota, self.size, self.before + read
        since, kept = read % size, self.layers[0].rows.seen - self.seen
        attended = [quota + token % size + 1 for token in range(kept, read)]
        cut = (read // size - kept // size) * size  # rows that a head has lost
        evicted = self.evicted.clone() if self.merges else [cut] * len(self.layers)  # later cuts write here
        self.evicted.zero_()
        for index, layer in enumerate(self.layers if attended else ()):
            make = self.copy_raw if self.packed[index] is None else self.list_packed
            layer.replace_rows(make(index, read, since), evicted[index], attended, max(attended))
            if cut:
                self.give_tally(index)

    def copy_raw(self, index: int, read: int, since: int) -> StoredRows:
        """Return a copy of a layer's rows, for the layer.

        Args:
            index: The layer.
            read: Tokens read since the last cut before this answer.
            since: Tokens read since the last cut.
        """
        quota, before = self.quota, self.layers[index].rows
        weighs, seen = self.layers[0].choice.method.weighs_rows, self.seen + read - since  # by the last cut
        dtype = self.mass[0].dtype if weighs else count_dtype(seen)
        held = [part[:, :, :quota].clone().flatten(0, 2) for part in self.padded(index)]  # later tokens write here
        tail = [part[:, :, quota : quota + since].clone() for part in self.padded(index)] if since else None
        places = self.places[index][..., :quota].int().flatten()
        mass = self.mass[index][..., :quota].to(dtype, copy=True).flatten() if self.merges else None
        return before.replace_all(
            self.seen + read - before.seen, Plain(*held), places, self.lengths, quota, True,
            self.view.copy_columns(index, quota + since), tail, mass,
        )  # fmt: skip

    def list_packed(self, index: int, read: int, since: int) -> StoredRows:
        """Return the rows of a layer whose codec packs, packed. Arguments as of `copy_raw`."""
        packed, count = self.packed[index], self.quota + since
        assert packed is not None  # the layer packs
        places, lengths = self.places[index][..., :count].int().flatten(), torch.full_like(self.lengths, count)
        columns = self.view.copy_columns(index, count)
        return packed.finish_cut(read - self.before, places, lengths, count, True, columns)

    def finish(self, read: int, answer: int = 0) -> None:
        """Give the layers the first `read` tokens and the method's states. The rows are not used any more."""
        self.keep(read)
        if read:
            self.view.release_states(self.layers[0].rows.longest_head - self.quota)

    def forget(self, read: int, answer: int = 0) -> None:
        """Do the same with rows of no meaning, which no codec needs to pack."""
        self.packed = [None] * len(self.layers)
        self.finish(read, answer)
