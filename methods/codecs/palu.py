"""palu: store keys and values of a group of heads together in fewer numbers, by projections of low rank (Palu).

Source: the Palu paper (arXiv 2407.21118); shadowpa0327/Palu bb22666, palu/model/modules/svd_linear.py (what is stored)
and quant.py (rounding). Symbols: k the keys of a group of KV heads before QK norm and rotation, or their values, w
numbers; r the group's rank; U (w, r) and b as in palu_projections.py.

    h = U⁺ (k − b)        k̂ = U h + b

A token's latents h of keys and of values are all that is stored of a group, in the model's dtype or in `bits` bits.
Keys are normed and rotated after they are read. The projection is part of the model: a token attends to k̂ of all
tokens, its own included, in the prefill too.

With `bits`, latents are rotated by an orthogonal matrix (`make_rotation`; it is fused into U) and rounded per token and
group. With the range [lo, hi] = `clip`·[min h, max h] and q = 2^bits − 1,

    s = max(hi − lo, 1e-5)/q,    z = clamp(round(−lo/s), 0, q),    c = clamp(round(h/s) + z, 0, q),    ĥ = (c − z)·s

Eviction is beyond the source. Heads of a group may keep different tokens. Latents of a token stay while one of its
heads keeps it, with a byte for each head that says so, and then are read for these heads only.

The source computes h = VT x from what enters the projection. kvbench computes the same h from keys and values, which in
bfloat16 were rounded before: with a large bias, such as Qwen2.5's of keys, h is less exact. The source also multiplies
W_o by the U of values, so that values are never reconstructed; results are the same. s is stored in float16, z in a
byte.

A CUDA graph decodes, whose attention reads the latents or their codes, and makes no rows
(kernels/latent_attention/README.md). `round_latents` and `restore_latents` are there. A graph that cuts attends to rows
that are made of latents when a token is appended, as many as the method keeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvbench.interfaces.codec import Angles, Codec, Packed, Packing, copy_samples, join
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.networks import LayerWeights
from kvbench.interfaces.settings import setting
from kvbench.kernels.latent_attention import (
    LatentRows,
    Rounding,
    Side,
    append_latents,
    attend_latents,
    restore_latents,
    round_latents,
)
from kvbench.kernels.latent_attention.rounding import EIGHT
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.methods.codecs.palu_projections import (
    SIDES,
    LayerProjections,
    PaluFile,
    check_numbers,
    compare_identity,
    compare_model,
    list_files,
    peek_projections,
    read_projections,
)
from kvbench.validation import SettingError

Latents = tuple[Tensor, ...]  # (n, r), or codes (n, r·bits/8) uint8, s (n, 1) float16 and z (n, 1) uint8
PACKING = Packing(before_attention=True, takes_unrotated_keys=True, grows=True, replicates=True)


@dataclass(frozen=True)
class Palu(Codec):
    """Store latents of low rank of keys and values."""

    path: str | None = setting()
    """The file of the projections, or a folder with such files."""
    bits: int | None = setting(choices=(None, 2, 3, 4))
    """Bits of a latent; `None` keeps it as the model's numbers."""
    clip: float = setting(above=0, maximum=1)
    """Share of the latents' range that the rounding covers."""
    hadamard: bool = setting()
    """Whether latents are rotated before they are rounded."""

    packs = True
    packing = PACKING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None:
            wrong = next((rank for ranks in self.file.ranks.values() for rank in ranks if rank % EIGHT), None)
            if wrong is not None:
                raise SettingError(f"codec.bits={self.bits}: needs ranks that {EIGHT} divides, and a group has {wrong}")
        _ = self.file  # refuse an unusable file at once

    @property
    def weights_bytes(self) -> int:
        return 2 * self.file.bytes  # U and its pseudo-inverse

    @cached_property
    def file(self) -> PaluFile:
        """What the file of the projections says about itself."""
        return peek_projections(self.path)

    @cached_property
    def projections(self) -> LayerWeights[LayerProjections]:
        """The projections, which all codecs with this file and the same rotation share."""
        about = [(str(file), file.stat()) for file in list_files(self.path)]
        stamp = tuple((name, status.st_mtime_ns, status.st_size) for name, status in about)
        return load_once(str(self.path), self.bits is not None and self.hadamard, stamp)

    def check(self, layout: Layout) -> None:
        compare_model(self.file, self.path, layout)
        check_numbers(self.path)

    def check_identity(self, identify: Callable[[], str]) -> None:
        compare_identity(self.file, self.path, identify)

    def of_layer(self, layer: int, layers: int) -> "PaluLayer":
        return PaluLayer(self.name, self, layer)


@lru_cache(maxsize=2)
def load_once(path: str, rotated: bool, stamp: tuple[tuple[str, int, int], ...]) -> LayerWeights[LayerProjections]:
    """Load a file of projections, unless it was loaded lately and its files have the same times of change and sizes."""
    return LayerWeights(read_projections(path, rotated))


@dataclass(frozen=True)
class PaluLayer(Codec):
    """The codec of one layer."""

    whole: Palu
    """The codec of all layers."""
    layer: int
    """The index of the layer."""

    packing = PACKING

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "PaluRows":
        batch, heads = lengths.shape
        groups, width = self.whole.file.groups, self.whole.file.width
        none = keys.new_empty(0, width)
        latents = self.encode([none] * 2 * groups)
        empty = PaluRows(self, (batch, heads), lengths.new_zeros(groups, batch), latents, None, none)
        return empty.extend(keys, values, lengths)

    def encode(self, rows: Sequence[Tensor]) -> tuple[Latents, ...]:
        """Return the latents of the keys of each group, (n, w), and then of the values."""
        encoded, bits = [], self.whole.bits
        for projection, group in zip(self.whole.projections.like(self.layer, rows[0]).each, rows, strict=True):
            latents = projection.encode(group)
            encoded.append((latents,) if bits is None else round_latents(latents, bits, self.whole.clip))
        return tuple(encoded)

    def decode(self, latents: Sequence[Latents], like: Tensor) -> list[Tensor]:
        """Return the keys of each group, (n, w), and then the values, with the dtype of `like`."""
        rows, bits = [], self.whole.bits
        for projection, group in zip(self.whole.projections.like(self.layer, like).each, latents, strict=True):
            rows.append(projection.decode(group[0] if bits is None else restore_latents(group, bits, like.dtype)))
        return rows

    def count_needs(self, packed: Packed, rows: float) -> tuple[int, int] | None:
        assert isinstance(packed, PaluRows)  # what `pack` returned
        share = rows * packed.shape[0] * packed.shape[1] / max(1, packed.count())
        weights = [projection.up for projection in self.whole.projections.like(self.layer, packed.like).each]
        stored = sum(part.nbytes for part in packed.tensors())
        keys = len(packed.counts)  # values need not be made: their latents are summed
        made = sum(
            2 * len(group[0]) * up.numel() for group, up in zip(packed.latents[:keys], weights[:keys], strict=True)
        )
        return round(stored * share) + sum(up.nbytes for up in weights), round(made * share)


@dataclass(frozen=True)
class PaluRows:
    """The rows of one layer.

    Symbols: B samples, H KV heads, G groups, n_g tokens of a group in all samples together.
    """

    codec: PaluLayer
    shape: tuple[int, int]
    """B and H."""
    counts: Tensor
    """Tokens of each group and sample, (G, B)."""
    latents: tuple[Latents, ...]
    """Latents of the keys of each group, and then of the values. Tokens are in the order (sample, position)."""
    held: tuple[Tensor, ...] | None
    """Which heads of each group hold which of its tokens, (n_g, H/G) bool. None if all heads hold the same tokens."""
    like: Tensor
    """An empty tensor with the dtype and the device of the rows."""

    def count(self) -> int:
        """Return the number of rows of all heads together, R."""
        if self.held is None:
            return len(self.latents[0][0]) * self.shape[1]
        return int(sum(mask.sum() for mask in self.held))

    def read(self) -> tuple[Tensor, Tensor]:
        rows = self.codec.decode(self.latents, self.like)
        groups = len(self.counts)
        keys, values = (
            self.flatten([x.unflatten(-1, (self.shape[1] // groups, -1)) for x in side])
            for side in (rows[:groups], rows[groups:])
        )
        return keys, values

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of all heads, flat in the order (sample, head, position), of each group's (n_g, H/G, d)."""
        if self.held is None:
            batch = self.shape[0]
            heads = [x.view(batch, len(x) // batch, *x.shape[1:]).transpose(1, 2) for x in parts]
            return torch.cat(heads, 1).flatten(0, 2)
        rows = torch.cat([x.transpose(0, 1)[mask.T] for x, mask in zip(parts, self.held, strict=True)])
        return rows if self.shape[0] == 1 else rows[self.find_order(self.held)]

    def find_order(self, held: Sequence[Tensor]) -> Tensor:
        """Return the row in the order (group, head, sample, position) that stands at each place of the flat rows."""
        samples = [
            number.expand(len(mask.T), -1)[mask.T] for number, mask in zip(self.number_samples(), held, strict=True)
        ]
        return torch.cat(samples).argsort(stable=True)

    def number_samples(self) -> list[Tensor]:
        """Return the sample of each token of each group, (n_g,)."""
        samples = torch.arange(self.shape[0], device=self.counts.device)
        return [samples.repeat_interleave(counts) for counts in self.counts]

    def count_on_host(self) -> Tensor:
        """Return `counts` on the CPU. The host waits for the device only if the samples hold different tokens."""
        batch = self.shape[0]
        if self.held is not None and batch > 1:
            return self.counts.cpu()
        return torch.tensor([[len(group[0]) // batch] * batch for group in self.latents[: len(self.counts)]])

    def keep(self, kept: Tensor) -> "PaluRows":
        heads = self.shape[1] // len(self.counts)
        held = self.held or tuple(kept.new_ones(len(group[0]), heads) for group in self.latents[: len(self.counts)])
        marks = torch.empty_like(kept)
        marks[self.find_order(held)] = kept
        after, stays = [], []
        for old, mark in zip(held, marks.split([int(old.sum()) for old in held]), strict=True):
            mask = old.T.clone()
            mask[old.T] = mark
            stays.append(mask.any(0))
            after.append(mask.T[stays[-1]])
        counts = torch.stack(
            [
                number[stay].bincount(minlength=self.shape[0])
                for number, stay in zip(self.number_samples(), stays, strict=True)
            ]
        )
        latents = tuple(
            tuple(part[stay] for part in group) for group, stay in zip(self.latents, stays * len(SIDES), strict=True)
        )
        same = all(mask.all() for mask in after) and bool((counts == counts[0, 0]).all())
        return replace(self, counts=counts, latents=latents, held=None if same else tuple(after))

    def tensors(self) -> list[Tensor]:
        return [*(part for group in self.latents for part in group), *(self.held or ()), self.counts]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "PaluRows":
        """Return the rows followed by a block, which has the same tokens for all heads."""
        (batch, heads), groups = self.shape, len(self.counts)
        tokens = len(keys) // (batch * heads)
        blocks = [
            group.flatten(0, 1).flatten(1)
            for rows in (keys, values)
            for group in rows.view(batch, heads, tokens, rows.shape[1]).transpose(1, 2).chunk(groups, 2)
        ]
        return self.append(self.codec.encode(blocks), tokens)

    def append(self, block: Sequence[Latents], tokens: int) -> "PaluRows":
        """Return the rows followed by those of a block of tokens, whose latents are in the order of `latents`."""
        counts = self.count_on_host()
        more = torch.full_like(counts[0], tokens)
        latents = tuple(
            tuple(join(old, sizes, new, more) for old, new in zip(before, after, strict=True))
            for before, after, sizes in zip(self.latents, block, [*counts] * len(SIDES), strict=True)
        )
        held = None
        if self.held is not None:
            new = self.held[0].new_ones(self.shape[0] * tokens, self.held[0].shape[1])
            held = tuple(join(mask, each, new, more) for mask, each in zip(self.held, counts, strict=True))
        return replace(self, counts=self.counts + tokens, latents=latents, held=held)

    def replicate(self, times: int, lengths: Tensor) -> "PaluRows":
        latents, held = copy_samples((self.latents, self.held), times)
        return replace(
            self, shape=(times, self.shape[1]), counts=self.counts.repeat(1, times), latents=latents, held=held
        )

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GrowingPalu":
        assert mass is None  # methods that merge are refused
        return GrowingPalu(self, tokens, seen, places)

    def find_positions(self, seen: int, places: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the positions of the latents, flat, int32, and where those of each group and sample begin, (G, B).

        The positions are None if every group has those of all tokens.

        Args:
            seen: Number of tokens read so far.
            places: Position of each row, (R,) int32 in the order (sample, head, position).
        """
        (batch, heads), groups = self.shape, len(self.counts)
        if self.held is None:
            count = len(self.latents[0][0]) // batch
            first = (
                torch.arange(batch * heads, device=places.device).view(batch, heads)[:, :: heads // groups].T * count
            )
            return (None if count == seen else places), first.contiguous()
        rows, start, positions = torch.empty_like(places), 0, []
        rows[self.find_order(self.held)] = places
        for marks in self.held:
            mask, count = marks.T, int(marks.sum())
            part = places.new_empty(mask.shape)
            part[mask] = rows[start : start + count]
            positions.append(part[mask.long().argmax(0), torch.arange(len(marks), device=places.device)])
            start += count
        counts = self.counts.flatten()
        return torch.cat(positions), (counts.cumsum(0) - counts).view_as(self.counts)


class GrowingPalu:
    """Latents, and memory for those of the tokens that come. Nothing is overwritten."""

    def __init__(self, held: PaluRows, tokens: int, seen: int, places: Tensor) -> None:
        """Allocate memory. See `Growable.growing`."""
        self.held, self.tokens = held, tokens
        groups = len(held.counts)
        keys, values = self.reserve(slice(groups)), self.reserve(slice(groups, None))
        positions, first = held.find_positions(seen, places)
        marks = None if held.held is None else torch.cat(held.held)
        longest = int(held.counts.max())
        self.rows = LatentRows(held.shape[1], seen, keys, values, held.counts, longest, positions, first, marks)
        self.made = [*keys.own_tensors, *values.own_tensors, first, *self.rows.own_tensors]
        if marks is not None and positions is not None:  # other positions are the layer's own
            self.made += [marks, positions]

    def reserve(self, side: slice) -> Side:
        """Return the latents of the keys or the values of each group, with memory for those of further tokens."""
        held, codec = self.held, self.held.codec
        each = codec.whole.projections.like(codec.layer, held.like).each[side]
        latents, bits = held.latents[side], codec.whole.bits
        room = len(each), held.shape[0], self.tokens
        more = latents[0][0].new_empty(*room, max(part[0].shape[1] for part in latents))
        rounding = None
        if bits is not None:
            steps, zeros = (tuple(part[number] for part in latents) for number in (1, 2))
            rounding = Rounding(
                bits, codec.whole.clip, steps, zeros, steps[0].new_empty(room), zeros[0].new_empty(room)
            )
        biases = None
        if any(one.bias is not None for one in each):
            biases = tuple(one.up.new_zeros(len(one.up)) if one.bias is None else one.bias for one in each)
        downs, ups = tuple(one.down for one in each), tuple(one.up for one in each)
        return Side(tuple(part[0] for part in latents), downs, ups, biases, more, rounding)

    def begin(self) -> None:
        """Do nothing: tokens are appended by their number."""

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Angles,
        step: Tensor,
        scaling: float,
        norms: tuple[Tensor, Tensor, float] | None,
        implementation: str | None,
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        norm_pairs = (None, None) if norms is None else ((norms[0], norms[2]), (norms[1], norms[2]))
        queries = append_latents(
            queries, keys, values, *angles[:2], self.rows, step, norm=norm_pairs[0], implementation=implementation
        )
        given = queries, angles.pairs, self.rows, scaling, step
        return attend_latents(*given, norm=norm_pairs[1], extras=extras, implementation=implementation)

    def append(self, keys: Tensor, values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        groups, codec = len(self.held.counts), self.held.codec
        latents = codec.encode([*keys.chunk(groups, 1), *values.chunk(groups, 1)])
        for side, group_latents in ((self.rows.keys, latents[:groups]), (self.rows.values, latents[groups:])):
            for group, written in enumerate(group_latents):
                side.write(group, step, written)
        made = codec.decode(latents, self.held.like)
        return torch.cat(made[:groups], 1), torch.cat(made[groups:], 1)

    def pack_due(self, number: int) -> None:
        """Do nothing: `attend` packs."""

    def finish(self, read: int, lengths: Tensor) -> PaluRows:
        return self.held.append([*self.rows.keys.list_more(read), *self.rows.values.list_more(read)], read)

    def tensors(self) -> list[Tensor]:
        return self.made
