"""Blocks of a prompt by the decoder's own step, in CUDA graphs: KeyDiff's protocol cuts after every 128 tokens, and a
block of 128 takes as long as reading the weights once, if nothing waits for the host.

It serves layers that hold just their quota, of a method that scores rows by what the block shows and by their distance
to it: then every block does the same, whatever its place. Places are kept as if each block began at `BEGIN`. A layer
has two sides: a block is written behind the rows of one, and the rows that stay are gathered into the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.allocator import Allocator
from kvbench.codec import Plain
from kvbench.decoding import Norms, capture, through
from kvbench.kernels.append import append
from kvbench.kernels.attend import attend_ragged
from kvbench.kernels.compact import find, take
from kvbench.layer import Choice, Layer, bounded
from kvbench.method import Seen, shrink
from kvbench.model import Weights
from kvbench.rows import Rows, mass_dtype

SHORT = 511  # tokens of the longest block that is read so: a longer one keeps a GPU busy anyway, and has no second side
BEGIN = 1 << 40  # place of every block, larger than any prompt


def serves(choice: Choice, size: int) -> bool:
    """Whether every block of `size` tokens does the same to layers that hold their quota, and it is worth it."""
    return size <= SHORT and choice.method.relative and type(choice.allocator) is Allocator and not choice.codec.packs


def steady(layers: Sequence[Layer], quota: int) -> bool:
    """Whether all layers hold just their quota of single tokens, evenly."""
    return all(
        own.rows.even and own.rows.longest == quota and own.rows.tail == 0 and own.rows.mass is None and own.rows.raw
        for own in layers
    )


class Blocks:
    """Blocks of `size` tokens: ids (B, n·size), behind `seen` others, read by layers that hold `quota` rows a head."""

    def __init__(
        self, weights: Weights, layers: Sequence[Layer], ids: Tensor, size: int, quota: int, seen: int,
        implementation: str | None = None,
    ) -> None:  # fmt: skip
        self.weights, self.layers, self.implementation = weights, layers, implementation
        self.size, self.quota, self.seen = size, quota, seen
        batch, device, dtype = len(ids), ids.device, weights.embed.dtype
        self.ids = ids.view(batch, -1, size)
        self.count, self.at = self.ids.shape[1], torch.zeros(1, dtype=torch.int64, device=device)
        self.zero = torch.zeros((), dtype=torch.int32, device=device)
        places = torch.arange(seen, seen + ids.shape[1], device=device)
        self.angles = [part[0].to(dtype).unflatten(0, (-1, size)) for part in weights.rotation(places[None])]
        self.sides = [[self.side(layer) for layer in layers] for _ in range(2)]
        self.worst = torch.zeros((), dtype=mass_dtype(weights.embed), device=device)

    def side(self, layer: Layer) -> list[Tensor]:
        """Room for keys and values (B, H, quota + size, d) and places (B, H, quota) of a layer."""
        like, (batch, heads) = layer.rows.stored.keys, layer.rows.shape
        shape = batch, heads, self.quota + self.size, like.shape[1]
        places = self.at.new_full((batch, heads, self.quota), BEGIN - 1)
        return [like.new_zeros(shape), like.new_zeros(shape), places]

    def fill(self) -> None:
        """Move what the layers hold into the first side."""
        for layer, (keys, values, places) in zip(self.layers, self.sides[0], strict=True):
            for new, old in zip((keys, values), layer.rows.stored.read(), strict=True):
                new[:, :, : self.quota] = old.view(*places.shape, -1)
            places.copy_(layer.rows.places.view(places.shape).long() - self.seen + BEGIN)
            layer.rows.stored = None

    def read(self) -> None:
        """Read all blocks and leave the layers as if they had read and cut them."""
        works = [lambda side=side: self.one(side) for side in range(2)]
        if self.ids.is_cuda:
            works = [capture(work).replay for work in works]  # on rows that are not there yet
            self.at.zero_()
            self.worst.zero_()
        self.fill()
        for number in range(self.count):
            works[number % 2]()
        if self.worst.isnan():
            raise FloatingPointError(f"{self.layers[0].choice.method.name}: scores are not numbers")
        end = self.seen + self.count * self.size
        for layer, (keys, values, places) in zip(self.layers, self.sides[self.count % 2], strict=True):
            held = [part[:, :, : self.quota].flatten(0, 2) for part in (keys, values)]
            layer.pass_through(Plain(*held), (places - BEGIN + end).flatten(), self.count * self.size, self.size)
        self.sides = []

    def one(self, side: int) -> None:
        """Read the next block from one side into the other."""
        angles = [part.index_select(0, self.at)[0] for part in self.angles]

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            keys, values, _ = self.sides[side][index]
            own = {"implementation": self.implementation}
            queries = append(*projected, *angles, keys, values, self.quota, self.zero, norms=norms, **own)
            outputs, _ = attend_ragged(queries, None, keys, values, self.weights.scaling, **own)
            self.cut(index, side, queries, outputs)
            return outputs

        through(self.weights, self.ids.index_select(1, self.at)[:, 0], attend, self.implementation)
        self.at += 1

    def cut(self, index: int, side: int, queries: Tensor, outputs: Tensor) -> None:
        """Gather the rows that stay into the other side."""
        layer, quota = self.layers[index], self.quota
        keys, values, places = self.sides[side][index]
        new = torch.arange(BEGIN, BEGIN + self.size, device=places.device).expand(*places.shape[:2], -1)
        ones = torch.ones(keys.shape[:3], dtype=mass_dtype(keys), device=keys.device)
        rows = Rows(keys, values, torch.cat([places, new], 2), ones)
        seen = Seen(
            queries, outputs, None, self.weights.scaling, self.weights.blocks[index].output, self.weights.rotation,
            index, len(self.layers), BEGIN, layer.course.prompt, False, False, layer.cut_layers, layer.course.prefix,
        )  # fmt: skip
        method = layer.choice.method
        scores = method.score(seen, rows, layer.state).to(ones.dtype)
        self.worst.copy_(torch.maximum(self.worst, scores.max()))  # NaN if any is
        protected = method.protect(seen, rows, quota)
        if protected is not None:
            scores = bounded(scores).masked_fill(shrink(protected, rows, quota), torch.inf)
        kept = method.select(scores, torch.full(places.shape[:2], quota, device=places.device))
        which = find(kept, kept.shape[0] * kept.shape[1] * quota, implementation=self.implementation)
        *into, left = self.sides[1 - side][index]
        into = tuple(part[:, :, :quota] for part in into)
        take(which, keys, values, into=into, implementation=self.implementation)
        left.copy_(rows.places.flatten()[which].view(places.shape) - self.size)
