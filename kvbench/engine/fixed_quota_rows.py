"""Rows of layers that hold just their quota: tokens are read behind them, and after every `size` tokens each head is
cut to its quota again. A prompt is read so in short blocks, and an answer by a method that cuts while decoding.

It serves a method that scores rows by what is shown and by their distance to it: then every interval between two cuts
does the same, whatever its place, and can be recorded once in a CUDA graph. Places are kept as if each interval began
at `INTERVAL_ORIGIN`. What stays at a cut is gathered into room for one layer, which all layers share, and copied back.
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

INTERVAL_ORIGIN = 1 << 40  # place of the first token of every interval, larger than any prompt


def is_shift_invariant(choice: CachePolicy) -> bool:
    """Whether every interval between two cuts does the same to layers that hold their quota."""
    return choice.method.position_free and choice.allocator.is_uniform and not choice.codec.packs


def is_at_quota(layers: Sequence[Layer], quota: int) -> bool:
    """Whether all layers hold just their quota of single tokens, evenly."""
    return all(
        own.rows.even and own.rows.longest == quota and own.rows.tail == 0 and own.rows.mass is None and own.rows.is_raw
        for own in layers
    )


class FixedQuotaRows:
    """Rows of L layers that hold `quota` a head, and room for the `size` tokens between two cuts."""

    def __init__(
        self, weights: DecoderWeights, layers: Sequence[Layer], tokens: int, size: int, quota: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        """`tokens` are to come behind `seen` others."""
        self.weights, self.layers, self.implementation = weights, layers, implementation
        self.size, self.quota, self.seen = size, quota, seen
        like, held = layers[0].rows.stored.keys, layers[0].rows.shape
        shape, device, dim = (*held, quota + size), like.device, like.shape[1]
        self.rows = like.new_zeros(len(layers), 2, *shape, dim)  # keys and values, (L, 2, B, H, quota + size, d)
        self.spare = like.new_empty(2, *held, quota, dim)
        self.all = torch.arange(self.spare[0, ..., 0].numel(), device=device)  # its rows
        self.places = torch.full((len(layers), *shape), INTERVAL_ORIGIN - 1, device=device)
        self.places[..., quota:] = torch.arange(INTERVAL_ORIGIN, INTERVAL_ORIGIN + size, device=device)
        self.ones = torch.ones(shape, dtype=mass_dtype(like), device=device)
        self.quotas = torch.full(held, quota, device=device)
        intervals = -(-tokens // size)
        turns = weights.rotation(torch.arange(seen, seen + intervals * size, device=device)[None])
        self.angles = [part[0].to(weights.embed.dtype).unflatten(0, (-1, size)) for part in turns]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # intervals that are over
        self.since = torch.zeros((), dtype=torch.int32, device=device)  # tokens read since the last cut
        self.worst = torch.zeros((), dtype=self.ones.dtype, device=device)  # largest score so far, NaN if any was

    def cuts(self, number: int) -> bool:
        """Whether the layers are cut behind the `number`-th token to come."""
        return (number + 1) % self.size == 0

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        """What reads tokens in one layer after the other, for `forward_step`: one token or, of a prompt, the
        interval's. With `cuts` they are its last, and every layer is cut.
        """
        angles = [part.index_select(0, self.at)[0] for part in self.angles]
        reach = {} if cuts else {"tail": self.quota + 1, "step": self.since}
        own = {"implementation": self.implementation}

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            rows = self.rows[index].unbind()
            queries = append(*projected, *angles, *rows, self.quota, self.since, norms=norms, **own)
            outputs, _ = attend_ragged(queries, None, *rows, self.weights.scaling, **reach, **own)
            if cuts:
                self.cut(index, queries, outputs)
            return outputs

        return attend

    def cut(self, index: int, queries: Tensor, outputs: Tensor) -> None:
        """Keep the quota's rows of a layer."""
        layer, quota = self.layers[index], self.quota
        progress, method, own = layer.progress, layer.method, {"implementation": self.implementation}
        (keys, values), places = self.rows[index].unbind(), self.places[index]
        rows, first = Rows(keys, values, places, self.ones), INTERVAL_ORIGIN + self.size - queries.shape[2]
        observation = Observation(
            queries, outputs, None, self.weights.scaling, self.weights.blocks[index].output, self.weights.rotation,
            index, len(self.layers), first, progress.prompt, False, progress.decoding, layer.cut_layers,
            progress.prefix,
        )  # fmt: skip
        with layer.guard.unnoted():  # `worst` has it: nothing is added to a graph that runs for every token
            scores = method.score(observation, rows, layer.state).to(self.ones.dtype)
            self.worst.copy_(torch.maximum(self.worst, scores.max()))
            sinks, recents = method.protect_sinks(observation, rows, quota), method.protect(observation, rows, quota)
            if sinks is not None or recents is not None:
                scores = bound_scores(scores).masked_fill(fit_protected(sinks, recents, rows, quota), torch.inf)
            kept = method.select(scores, self.quotas)
        layer.guard.release()
        which = kept_indices(kept, self.quotas.numel() * quota, **own)
        spare = gather_rows(which, keys, values, into=tuple(self.spare.unbind()), **own)
        gather_rows(
            self.all, *spare, into=(keys[:, :, :quota], values[:, :, :quota]), **own
        )  # copy_ is slower: not dense
        places[..., :quota] = places.flatten()[which].view(*self.quotas.shape, quota) - self.size

    def advance(self, cuts: bool) -> None:
        """All layers are through."""
        if cuts:
            self.at += 1
            self.since.zero_()
        else:
            self.since += 1

    def marked(self, tokens: Tensor) -> Tensor:
        """`tokens` (B,), or -1 for all where scores are not numbers: what the host looks at anyway says it."""
        return tokens.masked_fill(self.worst.isnan(), -1)

    def check(self) -> None:
        """ContractError if a score was not a number."""
        if self.worst.isnan():
            raise ContractError(f"method={self.layers[0].choice.method.name}: score returned NaN")

    def back(self, step: int) -> int:
        """Begin where the layers are, with as many tokens to come read as this returns: `step` or fewer."""
        quota, like = self.quota, self.layers[0].rows
        begin = like.seen - like.tail
        for index, layer in enumerate(self.layers):
            held, tail = layer.rows.stored.read(), (layer.rows.tail_keys, layer.rows.tail_values)
            for into, old, new in zip(self.rows[index], held, tail, strict=True):
                into[:, :, :quota] = old.view(*self.quotas.shape, quota, -1)
                if like.tail:
                    into[:, :, quota : quota + like.tail] = new[:, :, : like.tail]
            self.places[index, ..., :quota] = (
                layer.rows.places.view(*self.quotas.shape, quota).long() - begin + INTERVAL_ORIGIN
            )
        self.at.fill_((begin - self.seen) // self.size)
        self.since.fill_(like.tail)
        self.worst.zero_()
        return like.seen - self.seen

    def keep(self, read: int) -> None:
        """Leave the layers as if they had read, and cut, the first `read` tokens, which are read here."""
        quota, since = self.quota, read % self.size
        more, begin = read + self.seen - self.layers[0].rows.seen, self.seen + read - since
        for index, layer in enumerate(self.layers if more else ()):
            held = [part[:, :, :quota].flatten(0, 2) for part in self.rows[index]]
            tail = [part[:, :, quota : quota + since].clone() for part in self.rows[index]] if since else None
            places = (self.places[index, ..., :quota] + (begin - INTERVAL_ORIGIN)).int().flatten()
            layer.replace_rows(Plain(*held), places, tail, more, self.size)
