"""Rows of layers that are exactly at their quota, at fixed addresses for a CUDA graph.

Tokens are read behind the quota's rows. After every `size` tokens each head is cut to its quota again. This is how a
prompt is read in short blocks, and an answer if the method cuts while decoding.

The method must score rows only by the block and by their distance to it (`Method.position_free`). Every interval
between two cuts then runs the same operations, so it can be captured once in a CUDA graph. Positions are stored as if
each interval began at `INTERVAL_ORIGIN`. The rows that stay at a cut are gathered into spare memory for one layer,
which all layers share, and copied back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbench.cache.eviction import bound_scores
from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy
from kvbench.engine.graph_decoding import Norms
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.method import fit_protected
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows, mass_dtype
from kvbench.kernels.attention import attend_ragged
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_selection import gather_rows, kept_indices
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.validation import ContractError

INTERVAL_ORIGIN = 1 << 40  # position of the first token of every interval, larger than any prompt


def is_shift_invariant(choice: CachePolicy) -> bool:
    """Return whether every interval between two cuts runs the same operations on layers at their quota."""
    return choice.method.position_free and choice.allocator.is_uniform and not choice.codec.packs


def is_at_quota(layers: Sequence[Layer], quota: int) -> bool:
    """Return whether all heads of all layers hold exactly `quota` rows, each of a single token."""
    return all(
        own.rows.even and own.rows.longest == quota and own.rows.tail == 0 and own.rows.mass is None and own.rows.is_raw
        for own in layers
    )


class FixedQuotaRows:
    """The rows of L layers with `quota` rows per head, and memory for the `size` tokens between two cuts."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, size: int, quota: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Allocate memory. `back` copies the layers' rows into it.

        Args:
            weights: The model's weights.
            layers: The layers, all at their quota (`is_at_quota`).
            tokens: Number of tokens that will be read.
            size: Number of tokens between two cuts.
            quota: Rows per head after a cut.
            seen: Number of tokens read so far.
            implementation: Name of the kernels' implementation; None chooses one.
        """
        self.weights, self.layers, self.implementation = weights, layers, implementation
        self.size, self.quota, self.seen = size, quota, seen
        stored, held = layers[0].rows.stored, layers[0].rows.shape
        assert isinstance(stored, Plain)  # `is_at_quota`
        like = stored.keys
        shape, device, dim = (*held, quota + size), like.device, like.shape[1]
        self.rows = like.new_zeros(len(layers), 2, *shape, dim)  # keys and values, (L, 2, B, H, quota + size, d)
        self.spare = like.new_empty(2, *held, quota, dim)
        self.all = torch.arange(self.spare[0, ..., 0].numel(), device=device)  # indices of all spare rows
        self.places = torch.full((len(layers), *shape), INTERVAL_ORIGIN - 1, device=device)
        self.places[..., quota:] = torch.arange(INTERVAL_ORIGIN, INTERVAL_ORIGIN + size, device=device)
        self.ones = torch.ones(shape, dtype=mass_dtype(like), device=device)
        self.quotas = torch.full(held, quota, device=device)
        intervals = -(-tokens // size)
        turns = weights.rotation(torch.arange(seen, seen + intervals * size, device=device)[None])
        self.angles = [part[0].to(weights.embed.dtype).unflatten(0, (-1, size)) for part in turns]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # number of complete intervals
        self.since = torch.zeros((), dtype=torch.int32, device=device)  # tokens read since the last cut
        self.worst = torch.zeros((), dtype=self.ones.dtype, device=device)  # largest score so far, NaN if any score was

    def cuts(self, number: int) -> bool:
        """Return whether the layers are cut after the token of this number, counted from 0."""
        return (number + 1) % self.size == 0

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """Return the function that appends and attends in one layer, for `forward_step`.

        It reads one token while decoding, or the tokens of a whole interval of a prompt. With `cuts` they are the last
        of the interval, and every layer is cut.
        """
        cos, sin = (part.index_select(0, self.at)[0] for part in self.angles)
        tail, step = (None, None) if cuts else (self.quota + 1, self.since)
        implementation = self.implementation

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            queries, new_keys, new_values = projected
            keys, values = self.rows[index].unbind()
            queries = append(
                queries, new_keys, new_values, cos, sin, keys, values, self.quota, self.since,
                norms=norms, implementation=implementation,
            )  # fmt: skip
            outputs, _ = attend_ragged(
                queries, None, keys, values, self.weights.scaling, tail=tail, step=step, implementation=implementation
            )
            if cuts:
                self.cut(index, queries, outputs)
            return outputs

        return attend

    def cut(self, index: int, queries: Tensor, outputs: Tensor) -> None:
        """Cut a layer to its quota."""
        layer, quota = self.layers[index], self.quota
        progress, method, implementation = layer.progress, layer.method, self.implementation
        (keys, values), places = self.rows[index].unbind(), self.places[index]
        rows, first = Rows(keys, values, places, self.ones), INTERVAL_ORIGIN + self.size - queries.shape[2]
        observation = Observation(
            queries, outputs, None, self.weights.scaling, self.weights.blocks[index].output, self.weights.rotation,
            index, len(self.layers), first, progress.prompt, False, progress.decoding, layer.cut_layers,
            progress.prefix,
        )  # fmt: skip
        with layer.guard.unnoted():  # `worst` notes NaN, so guards add nothing to the graph
            scores = method.score(observation, rows, layer.state).to(self.ones.dtype)
            self.worst.copy_(torch.maximum(self.worst, scores.max()))
            sinks, recents = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
            if sinks is not None or recents is not None:
                scores = bound_scores(scores).masked_fill(fit_protected(sinks, recents, rows, quota), torch.inf)
            kept = method.select(scores, self.quotas)
        layer.guard.release()
        which = kept_indices(kept, self.quotas.numel() * quota, implementation=implementation)
        spare = gather_rows(which, keys, values, into=(self.spare[0], self.spare[1]), implementation=implementation)
        # copy_ would be slower, because the target is not dense
        gather_rows(self.all, *spare, into=(keys[:, :, :quota], values[:, :, :quota]), implementation=implementation)
        places[..., :quota] = places.flatten()[which].view(*self.quotas.shape, quota) - self.size

    def advance(self, cuts: bool) -> None:
        """Count a token, or an interval, after all layers have read it."""
        if cuts:
            self.at += 1
            self.since.zero_()
        else:
            self.since += 1

    def marked(self, tokens: Tensor) -> Tensor:
        """Return `tokens` (B,), or -1 for all of them after a NaN score. The host reads the tokens anyway."""
        return tokens.masked_fill(self.worst.isnan(), -1)

    def check(self) -> None:
        """Raise a ContractError if a score was NaN."""
        if self.worst.isnan():
            raise ContractError(f"method={self.layers[0].choice.method.name}: score returned NaN")

    def back(self, step: int) -> int:
        """Copy the rows from the layers and return how many tokens have been read by then: `step` or fewer."""
        quota, like = self.quota, self.layers[0].rows
        begin = like.seen - like.tail
        for index, layer in enumerate(self.layers):
            assert layer.rows.stored is not None and layer.rows.places is not None  # `is_at_quota`
            held, tail = layer.rows.stored.read(), (layer.rows.tail_keys, layer.rows.tail_values)
            for into, old, new in zip(self.rows[index], held, tail, strict=True):
                into[:, :, :quota] = old.view(*self.quotas.shape, quota, -1)
                if like.tail and new is not None:
                    into[:, :, quota : quota + like.tail] = new[:, :, : like.tail]
            self.places[index, ..., :quota] = (
                layer.rows.places.view(*self.quotas.shape, quota).long() - begin + INTERVAL_ORIGIN
            )
        self.at.fill_((begin - self.seen) // self.size)
        self.since.fill_(like.tail)
        self.worst.zero_()
        return like.seen - self.seen

    def keep(self, read: int) -> None:
        """Give the layers the rows that the first `read` tokens left, as if the layers had read and cut them."""
        quota, since = self.quota, read % self.size
        more, begin = read + self.seen - self.layers[0].rows.seen, self.seen + read - since
        for index, layer in enumerate(self.layers if more else ()):
            held = [part[:, :, :quota].flatten(0, 2) for part in self.rows[index]]
            tail = [part[:, :, quota : quota + since].clone() for part in self.rows[index]] if since else None
            places = (self.places[index, ..., :quota] + (begin - INTERVAL_ORIGIN)).int().flatten()
            layer.replace_rows(Plain(*held), places, tail, more, self.size)

    def finish(self, read: int) -> None:
        """See `keep`."""
        self.keep(read)
