"""Rows of heads that hold different numbers, or more from cut to cut, at fixed addresses for a CUDA graph.

They are cut after every few tokens, as `FixedQuotaRows`. How many rows each head keeps may follow from its protected
rows, which the host does not know. But it knows how many all heads of a sample keep together after each cut. So the
rows of a layer that a cut left lie one head behind the other in memory for as many as the layer will ever hold, and
attention reads on the device where each head begins and how many rows it has. The tokens since the last cut lie behind
them, in slots of their own.

Hooks see rows padded to the longest head that the answer may come to, absent rows on the left, as from the modules.
Keys and values are gathered for the hooks at each cut, and at each token if the method watches, into memory that one
layer needs at a time. Positions, masses and columns are small, so they lie padded all the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kvbench.cache.eviction import Eviction, Quota
from kvbench.cache.layer import Layer
from kvbench.cache.storage import StoredRows
from kvbench.engine.appended_rows import AppendedRows
from kvbench.engine.fixed_quota_rows import FixedQuotaRows
from kvbench.engine.graph_decoding import StepRows
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import RaggedRows
from kvbench.kernels.cut_order import count_marks
from kvbench.kernels.row_replacement import NEVER
from kvbench.kernels.row_selection import gather_rows, kept_indices, top_k_mask
from kvbench.models.decoder_weights import DecoderWeights


def make_interval_rows(
    weights: DecoderWeights,
    answers: Sequence[Sequence[Layer]],
    tokens: int,
    size: int,
    quotas: Sequence[list[tuple[int, ...]] | int],
    states: Sequence[State],
    since: int,
    implementation: str | None = None,
) -> list[StepRows]:
    """Make rows for all layers of an answer: `FixedQuotaRows` for each quota, `UnevenRows`, and `AppendedRows`.

    Args:
        weights: The model's weights.
        answers: The layers of the only answer.
        tokens: Number of tokens that will be read.
        size: Number of tokens between two cuts.
        quotas: Rows per head of each layer after a cut; for each cut the mean of each sample if heads hold different
            numbers, or more from cut to cut; `NEVER` for a layer that is not cut.
        states: The method's captured states of the layers (`capture_states`).
        since: Tokens read since the last cut.
        implementation: Name of the kernels' implementation; None chooses one.
    """
    (layers,), made = answers, list[StepRows]()

    def select(numbers: Sequence[int]) -> tuple[list[Layer], list[State]]:
        return [layers[number] for number in numbers], [states[number] for number in numbers]

    shared = {number: quota for number, quota in enumerate(quotas) if isinstance(quota, list)}
    if shared:
        some, own_states = select([*shared])
        own_quotas = [*shared.values()]
        made.append(UnevenRows(weights, [some], tokens, size, own_quotas, implementation, own_states))
    for quota in sorted({quota for quota in quotas if isinstance(quota, int)}):  # layers that only append come last
        some, own_states = select([number for number, layer_quota in enumerate(quotas) if layer_quota == quota])
        if quota < NEVER:
            made.append(FixedQuotaRows(weights, [some], tokens, size, quota, implementation, own_states))
        elif layers[0].choice.method.watches:
            made.append(AppendedRows(weights, [some], tokens, implementation, own_states, since))
        else:
            made.append(AppendedRows(weights, [some], tokens, implementation))
    return made


def count_rows_ahead(layer: Layer, quotas: Sequence[tuple[int, ...]], size: int) -> list[list[int]]:
    """Return how many rows each sample of a layer holds in all its heads now and after each cut.

    Args:
        layer: The layer. Its heads share a quota, or hold equally many rows.
        quotas: For each cut the mean rows per head that it leaves, one number per sample.
        size: Number of tokens between two cuts.
    """
    heads, lengths = layer.rows.shape[1], layer.rows.lengths
    assert lengths is not None  # the layer was cut
    counts: list[list[int]] = [lengths.sum(1).tolist()]
    for per_sample in quotas:
        pairs = zip(per_sample, counts[-1], strict=True)
        counts.append([min(heads * quota, held + heads * size) for quota, held in pairs])
    return counts


class UnevenRows(FixedQuotaRows):
    """The rows of an answer's layers, of which the heads of a sample share a quota after every `size` tokens."""

    uneven = True

    def __init__(
        self,
        weights: DecoderWeights,
        answers: Sequence[Sequence[Layer]],
        tokens: int,
        size: int,
        quotas: Sequence[Sequence[tuple[int, ...]]],
        implementation: str | None = None,
        states: Sequence[State] | None = None,
    ) -> None:
        """Allocate memory. `back` copies the layers' rows into it.

        Args:
            weights: The model's weights.
            answers: The layers of the only answer, which were cut, with those read since the last cut.
            tokens: Number of tokens that will be read.
            size: Number of tokens between two cuts.
            quotas: For each layer and each cut of the answer the mean rows per head that it leaves, one number per
                sample; for at least one cut.
            implementation: Name of the kernels' implementation; None chooses one.
            states: The method's captured states of the layers (`capture_states`); None for the layers' own.
        """
        (layers,) = answers
        samples, heads = layers[0].rows.shape
        counts = [count_rows_ahead(*layer_and_quotas, size) for layer_and_quotas in zip(layers, quotas, strict=True)]
        self.counts = [
            [sum(per_sample) for per_sample in layer] for layer in counts
        ]  # rows of each layer now and after each cut
        self.most = [max(after_cuts) for after_cuts in self.counts]
        longest = max(layer.rows.longest_head for layer in layers) + tokens
        room = max(
            min(longest, of // heads if layer.even else of - heads + 1)  # each of uneven heads keeps at least one row
            for layer, of in zip(layers, (max(map(max, per_cut)) for per_cut in counts), strict=True)
        )
        stored = [most + 1 + samples * heads * size for most in self.most]  # with a row of zeros
        super().__init__(weights, answers, tokens, size, room, implementation, states, stored)
        self.begin, self.behind, self.each = room, 0, None
        self.wanted = [Quota(per_cut[0], shares=layer.shares) for per_cut, layer in zip(quotas, layers, strict=True)]
        # of each layer whose quota changes, for each cut, (cuts, B)
        self.changing = {
            index: torch.tensor(per_cut, device=self.device)
            for index, per_cut in enumerate(quotas)
            if len(set(per_cut)) > 1
        }
        self.differing = {
            index for index, per_cut in enumerate(quotas) if any(len(set(samples)) > 1 for samples in per_cut)
        }
        self.starts = list(torch.zeros_like(self.lengths))
        # of each layer: rows of the longest head after the last cut, and the most of a head after a cut and before one
        self.longest = torch.zeros(3, len(layers), dtype=torch.int64, device=self.device)
        self.known = self.longest.tolist()

    def find_quota(self, index: int) -> Quota:
        wanted = self.wanted[index]
        if index not in self.changing:
            return wanted
        samples = cast(tuple[int, ...], self.changing[index].index_select(0, self.at)[0].unbind())
        return replace(wanted, samples=samples if index in self.differing else samples[:1] * len(samples))

    def count_held(self, index: int, cuts: int) -> float:
        return self.counts[index][cuts] / self.held.numel()

    def find_tail(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self.rows[index][:, self.most[index] + 1 :].unflatten(1, (*self.held, self.size))
        return keys, values

    def find_others(self, index: int) -> RaggedRows:
        keys, values = self.rows[index][:, : self.most[index]]
        return RaggedRows(keys, values, None, self.starts[index].flatten(), self.lengths[index].flatten(), self.room)

    def view_rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all rows of a layer, (B, H, n, d) each, with zeros for absent rows."""
        count, tail = self.most[index], torch.arange(self.held.numel() * self.size, device=self.device)
        present, source = self.find_rows(index)
        source = source.masked_fill(~present, count)
        sources = torch.cat([source, (tail + count + 1).view(*self.held, self.size)], 2)
        keys, values = gather_rows(
            sources.flatten(), *self.rows[index][:, None, None].unbind(), implementation=self.implementation
        )
        return keys.view(*sources.shape, -1), values.view(*sources.shape, -1)

    def find_rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return which slots of a layer hold a row that a cut left, and its index among these, (B, H, room) each."""
        ranks = self.slots[: self.room] - (self.room - self.lengths[index])[..., None]
        return ranks >= 0, (ranks + self.starts[index][..., None]).clamp(min=0)

    def set_lengths(self, index: int, lengths: Tensor) -> None:
        """Note how many rows of each head of a layer, (B, H), a cut has left."""
        flat = lengths.flatten()
        self.lengths[index].copy_(lengths)
        self.starts[index].copy_((flat.cumsum(0) - flat).view(self.held))
        self.mass[index][..., : self.room] = self.find_rows(index)[0]

    def note_scores(
        self, observation: Observation, rows: Rows, state: State, compute: Callable[[Observation], Tensor]
    ) -> Tensor:
        scores = compute(observation)
        self.invalid |= (scores.isnan() & rows.present).any()
        return scores

    def move(self, index: int, eviction: Eviction) -> None:
        """Move the rows that stay at a cut of a layer behind each other."""
        after, room, implementation = eviction.rows, self.room, self.implementation
        present = after.present.to(
            after.mass.dtype
        )  # a wrong number of them, which a hook may cause, is noted by `count_cut`
        kept = top_k_mask(present, eviction.counts, implementation=implementation).flatten()
        most, numbers = self.most[index], torch.arange(len(kept), device=self.device)
        places = (count_marks(kept).long() - 1).where(kept, most)
        which = torch.zeros(most + 1, dtype=torch.int64, device=self.device).scatter_(0, places, numbers)[:most]
        into = self.rows[index][:, None, None, :most].unbind()
        keys, values = (part.flatten(0, 2)[None, None] for part in (after.keys, after.values))
        gather_rows(which, keys, values, into=(into[0], into[1]), implementation=implementation)
        self.set_lengths(index, eviction.counts)
        stays, source = self.find_rows(index)
        source = which[source]
        self.places[index][..., :room] = torch.where(stays, after.places.flatten()[source], -1)
        self.places[index][..., room:].add_(self.size)
        for name, column in self.columns[index].items():
            column[..., :room] = torch.where(stays, after.columns[name].flatten()[source], 0)
            column[..., room:] = 0

    def advance(self, cuts: bool) -> None:
        super().advance(cuts)
        if cuts:
            now, after, before = self.longest
            torch.maximum(before, now + self.size, out=before)
            torch.amax(self.lengths, (1, 2), out=now)
            torch.maximum(after, now, out=after)

    def back(self, step: int) -> int:
        read = super().back(step)
        self.longest.zero_()
        torch.amax(self.lengths, (1, 2), out=self.longest[0])
        return read

    def take_rows(self, index: int, rows: StoredRows) -> None:
        assert rows.stored is not None and rows.places is not None and rows.lengths is not None  # the layer was cut
        for into, old in zip(self.rows[index], rows.stored.read(), strict=True):
            into[: len(old)] = old
        if rows.tail:
            for into, tail in zip(self.find_tail(index), (rows.tail_keys, rows.tail_values), strict=True):
                assert tail is not None  # it holds tokens
                into[:, :, : rows.tail] = tail[:, :, : rows.tail]
        self.set_lengths(index, rows.lengths)
        present, source = self.find_rows(index)
        self.places[index][..., : self.room] = torch.where(present, rows.places.long()[source], -1)

    def keep(self, read: int) -> None:
        self.known = self.longest.tolist()  # once for all layers, because the host waits for it
        super().keep(read)
        for layer, most in zip(self.layers, self.known[1], strict=True):
            layer.count_peak(most)

    def copy_rows(self, index: int, tokens: int, tail: Sequence[Tensor] | None) -> StoredRows:
        layer, room, longest = self.layers[index], self.room, self.known[0][index]
        count = self.counts[index][(layer.rows.seen + tokens - self.seen) // self.size]
        which = kept_indices(self.find_rows(index)[0], count, implementation=self.implementation)
        since = tail[0].shape[2] if tail else 0
        return layer.rows.replace_all(
            tokens,
            Plain(*self.rows[index][:, :count].clone()),
            self.places[index][..., :room].take(which).int(),
            self.lengths[index].clone(),
            longest,
            layer.even,
            self.view.copy_columns(index, room + since, room - longest),
            tail,
        )

    def find_peak(self, index: int, attended: Sequence[float], since: int) -> int:
        now, _, before = (lengths[index] for lengths in self.known)
        return max(before, now + since if since else 0)
