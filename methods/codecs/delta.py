"""delta: store a token as a short code of its difference to the mean of a few earlier tokens (DeltaKV).

Source: the DeltaKV paper; CURRENTF/Sparse-vLLM before 3652478, src/deltakv/modeling/cache_pipeline.py (what is stored
and when) and compressor.py. Symbols: kv = [K ‖ V] of a token, all KV heads of a layer together, K before QK norm and
rotation; f_c and f_d the layer's compressor and its inverse (delta_compressors.py); s the stride of centres, α its
growth; k the number of references.

The first `sinks` tokens of a layer stay raw. So do the newest: whenever 2·recent tokens or more have come since, the
first ⌊(n − recent)/recent⌋·recent of these n tokens are compressed, as one block. Centres of the block are its tokens
0, s, 2s, …; with α > 0 the distances grow over the whole text, next = p + s + ⌊α·(p − sinks)⌋ for a centre at position
p, the first one at p = sinks. A token's candidates are the sinks, the centres of earlier blocks, and the centres of its
own block up to itself. Its references are the k candidates c with the largest 2·kv·c − ‖c‖², which are the nearest.

    ref = mean of the references        z = f_c(kv) − f_c(ref)        k̂v = f_d(z) + ref

Centres stay raw too, and serve later tokens. A layer therefore holds its sinks and centres, and of every compressed
token the code z (in `bits` bits, if set, with one scale and zero a token) and the numbers of its references. Layers of
`full_layers` are left to another codec, `base`.

As for every codec of kvbench, a prompt's rows stay raw while it is read, so it is compressed as one block and attention
in the prefill is exact; the source also compresses between the blocks of a prompt. It keeps positions of tokens and
references in 8 bytes each, here numbers of references take 2 or 4 bytes and positions none. Its centres in fp8 are left
out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvbench.interfaces.codec import Codec, Packed
from kvbench.interfaces.settings import check_layers, scale_layers, setting
from kvbench.kernels.quantize import Groups, dequantize, quantize
from kvbench.kernels.row_selection import top_k_indices
from kvbench.methods.codecs.delta_compressors import (
    Compressor,
    CompressorFile,
    compare_model,
    find_file,
    peek_compressors,
    read_compressors,
)
from kvbench.validation import SettingError

COMPARED = 1024  # tokens that are compared with all their candidates at once
CODED = 8192  # tokens that are compressed or reconstructed at once
NARROW = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class Delta(Codec):
    """Store old tokens as compressed differences to earlier tokens."""

    path: str | None = setting()
    """The file of the compressors."""
    full_layers: tuple[int, ...] = setting()
    """Layers that `base` stores, in ascending order, of a model with `depth` layers."""
    depth: int | None = setting()
    """Number of layers that `full_layers` refers to. For another model they move in proportion. `None` takes exactly
    these layers in any model.
    """
    base: Codec = setting()
    """The codec of these layers."""
    sinks: int = setting(minimum=1)
    """First tokens that stay raw."""
    recent: int = setting(minimum=1)
    """Newest tokens that stay raw, at least. Tokens are compressed in multiples of so many."""
    stride: int = setting(minimum=1)
    """Distance between centres, s."""
    stride_alpha: float = setting(minimum=0)
    """Growth of the distance per token, α."""
    nearest: int = setting(minimum=1)
    """References of a token, k."""
    bits: int | None = setting(choices=(None, 2, 4))
    """Bits of a number of a code; `None` keeps it as the model's numbers."""
    remove: str | None = setting(choices=(None, "residual", "reference"))
    """What a token is reconstructed without: the residual (k̂v = ref), the reference (k̂v = f_d(f_c(kv))), or nothing."""

    packs = True
    takes_unrotated_keys = True
    joins_heads = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("codec.full_layers", self.full_layers, self.depth)
        if self.nearest > self.sinks:
            raise SettingError(f"codec.nearest={self.nearest}: at most codec.sinks={self.sinks}, the first candidates")
        if self.base.joins_heads:
            raise SettingError(f"codec.base={self.base.name}: a codec that stores each head on its own, such as raw")
        if self.bits is not None and self.file.code * self.bits % 8:
            raise SettingError(f"codec.bits={self.bits}: codes of {self.file.code} numbers do not fill whole bytes")
        _ = self.file  # refuse an unusable file at once

    @property
    def token_by_token(self) -> bool:
        return self.base.token_by_token

    @property
    def weights_bytes(self) -> int:
        layers = self.file.layers
        kept = layers - len(self.find_full_layers(layers))
        return 0 if self.remove == "residual" else self.file.bytes * kept // layers

    @cached_property
    def file(self) -> CompressorFile:
        """What the file of the compressors says about itself."""
        return peek_compressors(self.path)

    @cached_property
    def compressors(self) -> "LoadedCompressors":
        """The compressors, which all codecs with this file share."""
        about = find_file(self.path).stat()
        return load_once(str(self.path), about.st_mtime_ns, about.st_size)

    def find_full_layers(self, layers: int) -> list[int]:
        """Return the layers that `base` stores in a model of `layers` layers.

        Raises:
            SettingError: The model has fewer layers.
        """
        return scale_layers("codec.full_layers", self.full_layers, self.depth, layers)

    def check(self, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
        compare_model(self.file, self.path, layers, 2 * heads * dim)
        self.find_full_layers(layers)
        self.base.check(layers, heads, dim, sliding)

    def check_identity(self, identify: Callable[[], str]) -> None:
        if self.file.identity is not None:
            compare_model(self.file, self.path, self.file.layers, self.file.width, identify())

    def of_layer(self, layer: int, layers: int) -> Codec:
        if layer in self.find_full_layers(layers):
            return self.base.of_layer(layer, layers)
        return DeltaLayer(self.name, self, layer)

    def find_centres(self, start: int, count: int, following: int) -> tuple[list[int], int]:
        """Return the centres of a block, counted from its beginning, and the position of the next centre.

        Args:
            start: Position of the block's first token.
            count: Number of its tokens.
            following: Position of the first centre that no earlier block has. Counts only with α > 0.
        """
        if not self.stride_alpha:
            return list(range(0, count, self.stride)), start + count
        centres = []
        while following < start + count:
            centres.append(following - start)
            following += self.stride + int(self.stride_alpha * (following - self.sinks))
        return centres, following

    def count_compressed(self, waiting: int) -> int:
        """Return how many of `waiting` raw tokens behind the sinks and what is compressed are compressed now."""
        return (waiting - self.recent) // self.recent * self.recent if waiting >= 2 * self.recent else 0


class LoadedCompressors:
    """The compressors of a file, and their copies on the devices and in the dtypes that were asked for."""

    def __init__(self, path: str) -> None:
        described = peek_compressors(path)
        self.read = read_compressors(path, described.layers, described.width)
        self.copies: dict[tuple[int, torch.device, torch.dtype], Compressor] = {}

    def like(self, layer: int, tensor: Tensor) -> Compressor:
        """Return a layer's compressor with a tensor's device and dtype. It is copied once."""
        key = layer, tensor.device, tensor.dtype
        if key not in self.copies:
            self.copies[key] = self.read[layer].to(tensor.device, tensor.dtype)
        return self.copies[key]


@lru_cache(maxsize=1)
def load_once(path: str, changed: int, size: int) -> LoadedCompressors:
    """Load a file of compressors, unless it was loaded last and has the same time of change and size."""
    return LoadedCompressors(path)


@dataclass(frozen=True)
class DeltaLayer(Codec):
    """The codec of one layer that is compressed."""

    whole: Delta
    """The codec of all layers."""
    layer: int
    """The index of the layer."""

    packs = True
    takes_unrotated_keys = True
    joins_heads = True

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "DeltaRows":
        batch, heads = lengths.shape
        none = keys.new_empty(batch, 0, 2 * heads * keys.shape[1])
        codes = self.encode(none, none) if self.whole.remove != "residual" else None
        references = none.new_empty(batch, 0, self.whole.nearest, dtype=torch.int16)
        stored = None if self.whole.remove == "reference" else references
        return DeltaRows(self, heads, 0, self.whole.sinks, none, stored, codes, none).extend(keys, values, lengths)

    def find_packed(self, packed: Packed) -> tuple[int, int] | None:
        assert isinstance(packed, DeltaRows)  # what `pack` returned
        return packed.sinks, packed.sinks + packed.compressed

    def encode(self, kv: Tensor, references: Tensor) -> "Codes":
        """Return the codes of kv (B, n, 2·d_k) with the means of their references, (B, n, 2·d_k)."""
        compressor, bits = self.whole.compressors.like(self.layer, kv), self.whole.bits
        codes = compressor.compress(kv)
        if self.whole.remove is None:
            codes = codes - compressor.compress(references)
        return codes if bits is None else quantize(codes, bits, codes.shape[-1])

    def decode(self, codes: "Codes", like: Tensor) -> Tensor:
        """Return f_d of codes, (B, n, 2·d_k), with the dtype of `like`."""
        if isinstance(codes, Groups):
            bits = self.whole.bits
            assert bits is not None  # `encode`
            codes = dequantize(codes, bits, codes.codes.shape[-1] * 8 // bits, like.dtype)
        return self.whole.compressors.like(self.layer, like).expand(codes)

    def find_references(self, block: Tensor, bases: Tensor, centres: list[int]) -> Tensor:
        """Return the numbers of each token's references, (B, n, k) int64.

        Candidates are numbered: `bases` (B, b, 2·d_k), then the centres of the block (B, n, 2·d_k).
        """
        at = torch.tensor(centres, device=block.device, dtype=torch.int64)
        dtype = torch.float64 if block.dtype == torch.float64 else torch.float32
        candidates = torch.cat([bases, block[:, at]], 1).to(dtype)
        norms, found = candidates.square().sum(-1), []
        for piece in pieces(block.shape[1], COMPARED):
            scores = 2 * block[:, piece].to(dtype) @ candidates.mT - norms[:, None]
            rows = torch.arange(piece.start, piece.stop, device=block.device)
            later = at > rows[:, None]
            scores[:, :, bases.shape[1] :].masked_fill_(later, -torch.inf)
            found.append(top_k_indices(scores, self.whole.nearest))
        return torch.cat(found, 1)


Codes = Tensor | Groups
"""Codes of compressed tokens, (B, m, d_c), as numbers or in a few bits."""


@dataclass(frozen=True)
class DeltaRows:
    """The rows of one layer.

    Symbols: B samples, m compressed tokens, b sinks and centres, d_k the width of the keys of all heads together.
    """

    codec: DeltaLayer
    heads: int
    """Number of KV heads."""
    compressed: int
    """Number of compressed tokens, m."""
    following: int
    """Position of the next centre, if distances between centres grow."""
    bases: Tensor
    """The sinks and the centres, (B, b, 2·d_k)."""
    references: Tensor | None
    """Numbers among `bases` of the references of each compressed token, (B, m, k) int16 or int32."""
    codes: Codes | None
    waiting: Tensor
    """Raw tokens behind the compressed ones, (B, r, 2·d_k)."""

    @property
    def sinks(self) -> int:
        """Number of sinks read so far."""
        return min(self.codec.whole.sinks, self.bases.shape[1])

    def read(self) -> tuple[Tensor, Tensor]:
        pieces_read = [self.reconstruct(piece) for piece in pieces(self.compressed, CODED)]
        kv = torch.cat([self.bases[:, : self.sinks], *pieces_read, self.waiting], 1)
        keys, values = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 3)
        return keys, values

    def reconstruct(self, piece: slice) -> Tensor:
        """Return compressed tokens as they are read, (B, n, 2·d_k)."""
        found = None if self.references is None else mean_of(self.bases, self.references[:, piece])
        if self.codes is None:
            assert found is not None  # references or codes are stored
            return found
        codes = self.codes[:, piece] if isinstance(self.codes, Tensor) else Groups(*(x[:, piece] for x in self.codes))
        decoded = self.codec.decode(codes, self.bases)
        return decoded if found is None else decoded + found

    def tensors(self) -> list[Tensor]:
        codes = [] if self.codes is None else [self.codes] if isinstance(self.codes, Tensor) else [*self.codes]
        return [self.bases, *codes, self.waiting] + ([] if self.references is None else [self.references])

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "DeltaRows":
        batch = len(lengths)
        parts = [x.view(batch, self.heads, -1, x.shape[1]).transpose(1, 2).flatten(2) for x in (keys, values)]
        kv, whole = torch.cat(parts, -1), self.codec.whole
        if self.sinks < whole.sinks:  # they are complete before there are centres
            more = whole.sinks - self.sinks
            bases, kv = torch.cat([self.bases, kv[:, :more]], 1), kv[:, more:]
            return replace(self, bases=bases).wait(kv)
        return self.wait(kv)

    def wait(self, kv: Tensor) -> "DeltaRows":
        """Return the rows followed by further tokens (B, n, 2·d_k) behind the sinks, compressed if they are enough."""
        waiting = torch.cat([self.waiting, kv], 1)
        count = self.codec.whole.count_compressed(waiting.shape[1])
        return replace(self, waiting=waiting) if count == 0 else self.compress(waiting, count)

    def compress(self, waiting: Tensor, count: int) -> "DeltaRows":
        """Return the rows with the first `count` of the tokens that waited, (B, n, 2·d_k), compressed as a block."""
        codec, block = self.codec, waiting[:, :count]
        whole = codec.whole
        bases, numbers, following = self.bases, None, self.following
        if self.references is not None:
            centres, following = whole.find_centres(whole.sinks + self.compressed, count, following)
            numbers = codec.find_references(block, bases, centres)
            bases = torch.cat([bases, block[:, centres]], 1)
        codes = []
        for piece in pieces(count, CODED):
            if self.codes is not None:
                own = block[:, piece]
                codes.append(codec.encode(own, own if numbers is None else mean_of(bases, numbers[:, piece])))
        return DeltaRows(
            codec, self.heads, self.compressed + count, following, bases,
            None if numbers is None else join_numbers(self.references, numbers, bases.shape[1]),
            None if self.codes is None else join_codes([self.codes, *codes]), waiting[:, count:].clone(),
        )  # fmt: skip


def pieces(count: int, most: int) -> Iterator[slice]:
    """Yield slices of up to `most` of `count` tokens."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def mean_of(bases: Tensor, numbers: Tensor) -> Tensor:
    """Return the means of k of the `bases` (B, b, w), (B, n, w), by their numbers (B, n, k)."""
    batch = torch.arange(len(bases), device=bases.device)[:, None, None]
    return bases[batch, numbers.long()].mean(2)


def join_numbers(known: Tensor | None, more: Tensor, bases: int) -> Tensor:
    """Return numbers among `bases` bases one after the other, as narrow as they can be."""
    dtype = torch.int16 if bases <= NARROW else torch.int32
    return torch.cat([own.to(dtype) for own in (known, more) if own is not None], 1)


def join_codes(parts: list[Codes]) -> Codes:
    """Return codes one after the other."""
    if isinstance(parts[0], Groups):
        return Groups(*(torch.cat(own, 1) for own in zip(*parts, strict=True)))
    return torch.cat([own for own in parts if isinstance(own, Tensor)], 1)
