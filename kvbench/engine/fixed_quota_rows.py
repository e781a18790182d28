"""Rows that are cut after every few tokens, at fixed addresses for a CUDA graph.

Tokens are read behind the quota's rows. After every `size` tokens each head is cut to its quota again. This is how a
prompt is read in short blocks, and an answer if the method cuts it after every few tokens. The rows that stay at a cut
are gathered into spare memory for one layer, which all layers share, and copied back. A method that watches is shown
every token. Between two cuts the slots behind the newest row are rows that do not exist.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.engine.graph_decoding import Attend, Norms
from kvbench.engine.method_view import PresentRows, find_present_rows
from kvbench.engine.quota_rows import QuotaRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.method import fit_protected
from kvbench.interfaces.observation import State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.cut_order import RECENTS, SINKS, Protection, rank_scores
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_selection import gather_rows, kept_indices
from kvbench.models.decoder_weights import DecoderWeights


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
        self.before = rows.tail  # tokens read since the last cut
        self.seen = rows.seen - self.before
        end = self.seen + -(-(self.before + tokens) // size) * size
        capacities = [torch.full(layer.rows.shape, quota + size) for layer in answers[0]]
        super().__init__(weights, answers, capacities, self.seen, end, implementation, states)
        self.quota, self.size = quota, size
        self.every_place = torch.stack(self.places)
        self.places = list(self.every_place)
        self.intervals = [part.unflatten(0, (-1, size)) for part in self.angles]
        self.spare = torch.empty_like(self.padded(0)[:, :, :, :quota])
        self.all = torch.arange(self.spare[0, ..., 0].numel(), device=self.device)  # indices of all spare rows
        self.quotas = torch.full(self.held, quota, device=self.device)
        self.slots = torch.arange(quota + size, device=self.device)
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
        tail, step = (None, None) if cuts else (self.quota + 1, self.since)
        first = self.at[0] * self.size + (self.since.long() + self.seen)  # position of the first token read
        implementation, method = self.implementation, self.layers[0].choice.method
        shows = cuts or method.watches
        lse = shows and method.wants_lse
        held = self.find_present() if shows and not cuts else None

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
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
                asking, None, turned, values, self.weights.scaling, lse=lse, tail=tail, step=step,
                implementation=implementation,
            )  # fmt: skip
            if cuts:
                self.cut(index, queries, outputs, sums, first)
            elif held is not None:
                self.view.watch(index, keys, values, held, queries, outputs, sums, first)
            return outputs

        return attend

    def find_present(self) -> PresentRows:
        """Return which slots hold a row when the next token has been appended."""
        return find_present_rows(self.slots <= self.since + self.quota, self.every_place, self.spare)

    def cut(self, index: int, queries: Tensor, outputs: Tensor, lse: Tensor | None, first: Tensor) -> None:
        """Let the method see what the layer has read, and cut the layer to its quota."""
        layer, quota, implementation = self.layers[index], self.quota, self.implementation
        (keys, values), places, method = self.padded(index).unbind(), self.places[index], layer.method
        rows = Rows(keys, values, places, self.mass[index], self.columns[index])
        with layer.guard.unnoted():  # `invalid` notes NaN, so guards add nothing to the graph
            observation, rows = self.view.show(index, rows, queries, outputs, lse, first, quota + self.size)
            scores = method.score(observation, rows, self.view.states[index]).to(rows.mass.dtype)
            self.invalid |= scores.max().isnan()
            scores = rank_scores(scores)
            sinks, recents = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
            if sinks is not None or recents is not None:
                protection = fit_protected(sinks, recents, rows, quota)
                scores = scores.masked_fill(protection.kept, torch.inf)
                self.count_protected(index, protection)
            kept = method.select(scores, self.quotas)
        layer.guard.release()
        which = kept_indices(kept, self.quotas.numel() * quota, implementation=implementation)
        spare = gather_rows(which, keys, values, into=(self.spare[0], self.spare[1]), implementation=implementation)
        # copy_ would be slower, because the target is not dense
        gather_rows(self.all, *spare, into=(keys[:, :, :quota], values[:, :, :quota]), implementation=implementation)
        places[..., :quota] = places.flatten()[which].view(*self.held, quota)
        places[..., quota:] += self.size
        for name, column in self.columns[index].items():
            column[..., :quota] = rows.columns[name].flatten()[which].view(*self.held, quota)
            column[..., quota:] = 0

    def count_protected(self, index: int, protection: Protection) -> None:
        """Count the protected rows that fit the quota, and the most that ever did not."""
        protected, *given_up = self.tally[index]
        torch.sum(protection.kept, -1, out=protected)
        for most, kind in zip(given_up, (SINKS, RECENTS), strict=True):
            if kind in protection.given_up:
                torch.maximum(most, protection.given_up[kind][..., 0], out=most)

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
        begin = like.seen - like.tail
        later = torch.arange(begin, begin + self.size, device=self.device)
        for index, layer in enumerate(self.layers):
            held = layer.rows.view()
            for into, old in zip(self.padded(index), (held.keys, held.values), strict=True):
                into[:, :, : len(held)] = old
            self.places[index][..., :quota] = held.places[..., :quota]
            self.places[index][..., quota:] = later
        self.view.take_columns()
        self.invalid.zero_()
        self.at.fill_((begin - self.seen) // self.size)
        self.since.fill_(like.tail)
        self.tally.zero_()
        return like.seen - self.before - self.seen

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        quota, size, read = self.quota, self.size, self.before + read
        since, kept = read % size, self.layers[0].rows.seen - self.seen
        attended = [quota + token % size + 1 for token in range(kept, read)]
        evicted = (read // size - kept // size) * size
        for index, layer in enumerate(self.layers if attended else ()):
            held = [part[:, :, :quota].clone().flatten(0, 2) for part in self.padded(index)]  # later tokens write here
            tail = [part[:, :, quota : quota + since].clone() for part in self.padded(index)] if since else None
            places = self.places[index][..., :quota].int().flatten()
            rows = layer.rows.replace_all(
                read - kept, Plain(*held), places, layer.rows.lengths, quota, True,
                self.view.copy_columns(index, quota + since), tail,
            )  # fmt: skip
            layer.replace_rows(rows, evicted, attended, max(attended))
            if evicted:
                self.give_tally(index)

    def finish(self, read: int, answer: int = 0) -> None:
        """Give the layers the first `read` tokens and the method's states. The rows are not used any more."""
        self.keep(read)
        if read:
            self.view.release_states(self.layers[0].rows.tail)
