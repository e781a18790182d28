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
token the code z and the numbers of its references. With `bits`, each `group` of numbers of z is rounded to so many
bits, with a scale and a zero. Layers of `full_layers` are left to another codec, `base`.

As for every codec of kvbench, a prompt's rows stay raw while it is read, so it is compressed as one block and attention
in the prefill is exact; the source also compresses between the blocks of a prompt. It keeps positions of tokens and
references in 8 bytes each, here numbers of references take 2 or 4 bytes and positions none. Its centres in fp8 are left
out.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from kvbench.interfaces.codec import Angles, Codec, MadeRows, Packed, Packing, copy_samples
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.networks import LayerWeights
from kvbench.interfaces.row_reader import ListedRows
from kvbench.interfaces.rows import mass_dtype
from kvbench.interfaces.settings import check_layers, scale_layers, setting
from kvbench.interfaces.tensor_files import require_finite
from kvbench.kernels.quantize import Groups, dequantize, quantize
from kvbench.kernels.reconstruction import (
    Expansion,
    ReferencedRows,
    attend_compressed,
    reserve_weights,
    take_codes,
)
from kvbench.kernels.rope_append import append
from kvbench.kernels.row_selection import top_k_indices
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.methods.codecs.delta_compressors import (
    Compressor,
    CompressorFile,
    compare_model,
    find_file,
    peek_compressors,
    read_compressors,
)
from kvbench.validation import SettingError

COMPARED = 2**25  # pairs of a token and a candidate that are compared at once, in all samples together
ALIGNED = 64  # they are compared with a multiple of so many candidates, which suits matrix units
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
    group: int | None = setting(minimum=1)
    """With `bits`: consecutive numbers of a code that share a scale and a zero; `None` for all of a token."""
    scales: str = setting(choices=("float16", "model"))
    """With `bits`: the dtype of scales and zeros, float16 or that of the model's numbers."""
    remove: str | None = setting(choices=(None, "residual", "reference"))
    """What a token is reconstructed without: the residual (k̂v = ref), the reference (k̂v = f_d(f_c(kv))), or nothing."""

    packs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("codec.full_layers", self.full_layers, self.depth)
        if self.nearest > self.sinks:
            raise SettingError(f"codec.nearest={self.nearest}: at most codec.sinks={self.sinks}, the first candidates")
        if self.base.packing.joins_heads:
            raise SettingError(f"codec.base={self.base.name}: a codec that stores each head on its own, such as raw")
        if self.base.packing.before_attention:
            raise SettingError(
                f"codec.base={self.base.name}: packs rows as they are read; a codec that packs after the prefill's "
                "last cut, such as kivi, or one with rounding=cut"
            )
        if self.bits is not None and self.file.code * self.bits % 8:
            raise SettingError(f"codec.bits={self.bits}: codes of {self.file.code} numbers do not fill whole bytes")
        if self.bits is None and self.group is not None:
            raise SettingError(f"codec.group={self.group}: needs codec.bits=4 or 2, or use null")
        if self.bits is not None and (self.file.code % self.group_size or self.group_size * self.bits % 8):
            raise SettingError(
                f"codec.group={self.group}: a divisor of the {self.file.code} numbers of a code that fills whole bytes"
            )
        whole_rows = '"remove": "reference"' in self.file.metadata.get("recipe", "")  # as `describe_training` writes it
        if whole_rows and self.remove != "reference":
            raise SettingError(f"codec.path={self.path}: trained without references; needs codec.remove=reference")

    @property
    def group_size(self) -> int:
        """Numbers of a code that share a scale and a zero."""
        return self.group or self.file.code

    @cached_property
    def packing(self) -> Packing:
        other = self.base.packing if self.base.packs else Packing(grows=True, replicates=True)
        interval = max(self.recent, other.interval)
        return replace(
            other, keeps=False, takes_unrotated_keys=True, joins_heads=True, lists_rows=True, interval=interval
        )

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
    def compressors(self) -> LayerWeights[Compressor]:
        """The compressors, which all codecs with this file share."""
        about = find_file(self.path).stat()
        return load_once(str(self.path), about.st_mtime_ns, about.st_size)

    def find_full_layers(self, layers: int) -> list[int]:
        """Return the layers that `base` stores in a model of `layers` layers.

        Raises:
            SettingError: The model has fewer layers.
        """
        return scale_layers("codec.full_layers", self.full_layers, self.depth, layers)

    def check(self, layout: Layout) -> None:
        compare_model(self.file, self.path, layout.layers, 2 * layout.heads * layout.dim)
        require_finite(find_file(self.path), f"codec.path={self.path}", "compressors")
        self.find_full_layers(layout.layers)
        self.base.check(layout)

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

    def index_centres(self, centres: list[int], block: Tensor) -> Tensor:
        """Return the centres of a block (B, n, …) as whole numbers on its device.

        At equal distances the device makes them itself. To copy them the host would wait for it.
        """
        if not self.stride_alpha:
            return torch.arange(0, block.shape[1], self.stride, device=block.device)
        return torch.tensor(centres, device=block.device, dtype=torch.int64)

    def count_compressed(self, waiting: int) -> int:
        """Return how many tokens are compressed now, if `waiting` raw ones follow sinks and compressed tokens."""
        return (waiting - self.recent) // self.recent * self.recent if waiting >= 2 * self.recent else 0

    def count_blocks(self, waiting: int, tokens: int) -> int:
        """Return how many blocks of `recent` tokens are compressed while tokens come one by one.

        Args:
            waiting: Raw tokens that follow the sinks and the compressed tokens, less than 2·recent. While sinks are
                still to come, minus their number.
            tokens: Number of tokens that come.
        """
        return max(0, (waiting + tokens) // self.recent - 1)


@lru_cache(maxsize=1)
def load_once(path: str, changed: int, size: int) -> LayerWeights[Compressor]:
    """Load a file of compressors, unless it was loaded last and has the same time of change and size."""
    described = peek_compressors(path)
    return LayerWeights(read_compressors(path, described.layers, described.width))


@dataclass(frozen=True)
class DeltaLayer(Codec):
    """The codec of one layer that is compressed."""

    whole: Delta
    """The codec of all layers."""
    layer: int
    """The index of the layer."""

    packing = Packing(takes_unrotated_keys=True, joins_heads=True, grows=True, lists_rows=True)

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "DeltaRows":
        batch, heads = lengths.shape
        none = keys.new_empty(batch, 0, 2 * heads * keys.shape[1])
        codes = self.encode(none, none) if self.whole.remove != "residual" else None
        references = none.new_empty(batch, 0, self.whole.nearest, dtype=torch.int16)
        stored = None if self.whole.remove == "reference" else references
        return DeltaRows(self, heads, 0, self.whole.sinks, none, stored, codes, none).extend(keys, values, lengths)

    def find_packed(self, packed: Packed, more: int = 0) -> tuple[int, int] | None:
        assert isinstance(packed, DeltaRows)  # what `pack` returned
        whole, waiting = self.whole, packed.seen - self.whole.sinks - packed.compressed
        sinks = min(whole.sinks, packed.seen + more)
        return sinks, sinks + packed.compressed + whole.recent * whole.count_blocks(waiting, more)

    def count_needs(self, packed: Packed, rows: float) -> tuple[int, int] | None:
        """See kernels/reconstruction/README.md."""
        assert isinstance(packed, DeltaRows)  # what `pack` returned
        bases, count = packed.bases, packed.sinks
        made = max(0.0, rows - packed.sinks - packed.waiting.shape[1])
        stored = [] if packed.codes is None else list_parts(packed.codes)
        if packed.references is not None:
            stored.append(packed.references)
            count = min(bases.shape[1], count + round(made * self.whole.nearest))
        read = packed.waiting.nbytes + bases.nbytes * count // max(1, bases.shape[1])
        read += round(made * sum(part.nbytes for part in stored) / max(1, packed.compressed))
        if packed.codes is None:
            return read, 0
        compressor = self.whole.compressors.like(self.layer, bases)
        products = sum(matrix.numel() for network in compressor.up for matrix in network.weights)
        of_values = compressor.split_last()[1][0].numel()  # values are made of the sum of codes, not of each row's code
        return read + products * bases.element_size(), round(2 * len(bases) * made * (products - of_values))

    def compress(self, block: Tensor, bases: Tensor, centres: list[int]) -> "Block":
        """Compress a block of tokens, (B, n, 2·d_k), with these centres. `bases` are those of earlier blocks."""
        numbers, more = None, block[:, :0]
        if self.whole.remove != "reference":
            at = self.whole.index_centres(centres, block)
            numbers, more = self.find_references(block, bases, centres, at), block[:, at]
            bases = torch.cat([bases, more], 1)
        codes = []
        if self.whole.remove != "residual":
            for piece in pieces(block.shape[1], CODED):
                tokens = block[:, piece]
                codes.append(self.encode(tokens, tokens if numbers is None else mean_of(bases, numbers[:, piece])))
        return Block(more, numbers, join_codes(codes) if codes else None)

    def encode(self, kv: Tensor, references: Tensor) -> "Codes":
        """Return the codes of kv (B, n, 2·d_k) with the means of their references, (B, n, 2·d_k)."""
        compressor, bits = self.whole.compressors.like(self.layer, kv), self.whole.bits
        codes = compressor.compress(kv)
        if self.whole.remove is None:
            codes = codes - compressor.compress(references)
        if bits is None:
            return codes
        scales = torch.float16 if self.whole.scales == "float16" else codes.dtype
        return quantize(codes, bits, self.whole.group_size, scales)

    def decode(self, codes: "Codes", like: Tensor) -> Tensor:
        """Return f_d of codes, (B, n, 2·d_k), with the dtype of `like`."""
        return self.whole.compressors.like(self.layer, like).expand(self.read_codes(codes, like.dtype))

    def read_codes(self, codes: "Codes", dtype: torch.dtype) -> Tensor:
        """Return codes as numbers, (B, n, d_c)."""
        if isinstance(codes, Tensor):
            return codes
        bits = self.whole.bits
        assert bits is not None  # `encode` returned a tensor without bits
        return dequantize(codes, bits, self.whole.group_size, dtype)

    def find_references(self, block: Tensor, bases: Tensor, centres: list[int], at: Tensor) -> Tensor:
        """Return the numbers of each token's references, (B, n, k) int64.

        Candidates are numbered: `bases` (B, b, 2·d_k), then the centres of the block (B, n, 2·d_k), which are also
        given on the device. They are compared by half of 2·kv·c − ‖c‖², in the same order.
        """
        candidates, first = torch.cat([bases, block[:, at]], 1), bases.shape[1]
        halves, numbers = candidates.to(mass_dtype(candidates)).square().sum(-1).mul_(0.5), []
        for piece in pieces(block.shape[1], max(1, COMPARED // candidates[..., 0].numel())):
            known = first + bisect_left(centres, piece.stop)
            known = min(candidates.shape[1], known + -known % ALIGNED)
            scores = multiply_exactly(block[:, piece], candidates[:, :known]).sub_(halves[:, None, :known])
            start = bisect_left(centres, piece.start)  # earlier centres come before all these tokens
            rows = torch.arange(piece.start, piece.stop, device=block.device)
            later = at[start : known - first] > rows[:, None]
            scores[:, :, first + start :].masked_fill_(later, -torch.inf)
            numbers.append(top_k_indices(scores, self.whole.nearest))
        return torch.cat(numbers, 1)


Codes = Tensor | Groups
"""Codes of compressed tokens, (B, m, d_c), as numbers or in a few bits."""


@dataclass(frozen=True)
class Block:
    """What is stored of a block of tokens that is compressed."""

    centres: Tensor
    """Its centres, (B, b, 2·d_k)."""
    references: Tensor | None
    """Numbers of the references of each token, (B, n, k) int64."""
    codes: Codes | None
    """The codes."""

    def tensors(self) -> list[Tensor]:
        """Return all of it, in this order."""
        codes = [] if self.codes is None else list_parts(self.codes)
        return [self.centres, *([] if self.references is None else [self.references]), *codes]


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

    @property
    def seen(self) -> int:
        """Number of tokens."""
        return self.sinks + self.compressed + self.waiting.shape[1]

    def read(self) -> tuple[Tensor, Tensor]:
        pieces_read = [self.reconstruct(piece) for piece in pieces(self.compressed, CODED)]
        kv = torch.cat([self.bases[:, : self.sinks], *pieces_read, self.waiting], 1)
        keys, values = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 3)
        return keys, values

    def reconstruct(self, piece: slice) -> Tensor:
        """Return compressed tokens as they are read, (B, n, 2·d_k)."""
        reference = None if self.references is None else mean_of(self.bases, self.references[:, piece])
        if self.codes is None:
            assert reference is not None  # rows have references if they have no codes
            return reference
        decoded = self.codec.decode(slice_codes(self.codes, piece), self.bases)
        return decoded if reference is None else decoded + reference

    def tensors(self) -> list[Tensor]:
        codes = [] if self.codes is None else list_parts(self.codes)
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
        """Return the rows with further tokens (B, n, 2·d_k). Tokens are compressed once enough of them are raw."""
        count = self.codec.whole.count_compressed(self.waiting.shape[1] + kv.shape[1])
        if self.waiting.shape[1] or not count:  # `compress` copies what it keeps
            kv = torch.cat([self.waiting, kv], 1)
        return self.compress(kv, count) if count else replace(self, waiting=kv)

    def compress(self, waiting: Tensor, count: int) -> "DeltaRows":
        """Return the rows with the first `count` of the tokens that waited, (B, n, 2·d_k), compressed as a block."""
        whole = self.codec.whole
        centres, following = whole.find_centres(whole.sinks + self.compressed, count, self.following)
        block = self.codec.compress(waiting[:, :count], self.bases, centres)
        return self.join([block], count, following, waiting[:, count:].clone())

    def join(self, blocks: list[Block], count: int, following: int, waiting: Tensor) -> "DeltaRows":
        """Return the rows with further blocks of `count` tokens in all, and these raw tokens, (B, n, 2·d_k)."""
        if not blocks:
            return replace(self, waiting=waiting)
        bases = torch.cat([self.bases, *(block.centres for block in blocks)], 1)
        references, codes = self.references, self.codes
        if references is not None:
            more = [block.references for block in blocks if block.references is not None]
            references = join_numbers([references, *more], bases.shape[1])
        if codes is not None:
            codes = join_codes([codes, *(block.codes for block in blocks if block.codes is not None)])
        total = self.compressed + count
        return DeltaRows(self.codec, self.heads, total, following, bases, references, codes, waiting)

    def replicate(self, times: int, lengths: Tensor) -> "DeltaRows":
        tensors = {name: getattr(self, name) for name in ("bases", "references", "codes", "waiting")}
        return replace(self, **copy_samples(tensors, times))

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GrowingDelta":
        return GrowingDelta(self, tokens)


class GrowingDelta:
    """Compressed rows, and memory for the tokens that come, raw, and for the blocks that they fill.

    Nothing is overwritten, so any number of tokens may be taken back. A block is compressed between two steps
    (`pack_due`), by the operations that compress a prompt. A step finds out from the number of tokens on the device
    which blocks there are.
    """

    def __init__(self, held: DeltaRows, tokens: int) -> None:
        """Allocate memory for further tokens."""
        whole = held.codec.whole
        self.held, self.tokens, self.codec = held, tokens, held.codec
        self.has_sinks = held.sinks == whole.sinks  # otherwise the first tokens that come are sinks
        self.behind = held.seen - whole.sinks - held.compressed  # raw tokens that may be compressed
        bases, self.start = (held.bases, held.waiting) if self.has_sinks else (held.bases[:, :0], held.bases)
        self.centres: list[list[int]] = []  # of each block that the tokens fill
        self.following, sizes = [held.following], [0 if self.has_sinks else whole.sinks]
        for number in range(whole.count_blocks(self.behind, tokens)):
            first = whole.sinks + held.compressed + number * whole.recent
            centres, following = whole.find_centres(first, whole.recent, self.following[-1])
            self.centres.append(centres)
            self.following.append(following)
            sizes.append(0 if held.references is None else len(centres))
        self.stops = list(accumulate(sizes))  # of the bases of these blocks, behind those that are held
        count, references = len(self.centres) * whole.recent, None
        if held.references is not None:
            references = held.references.new_empty(len(bases), count, whole.nearest, dtype=torch.int32)
        self.codes = None if held.codes is None else reserve_codes(held.codes, count)
        raw_from = whole.sinks + held.compressed if self.has_sinks else 0
        self.rows = ReferencedRows(
            whole.sinks,
            whole.recent,
            held.seen,
            held.compressed,
            raw_from,
            bases,
            bases.new_empty(len(bases), self.stops[-1], bases.shape[2]),
            held.references,
            references,
            bases.new_empty(len(bases), self.start.shape[1] + tokens, bases.shape[2]),
        )
        self.every = torch.arange(held.seen + tokens, device=bases.device).expand(len(bases), -1)  # all rows

    def begin(self) -> None:
        self.rows.raw[:, : self.start.shape[1]] = self.start

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
        made: MadeRows | None = None,
        counts: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        rows, first = self.rows, self.rows.seen - self.rows.raw_from
        raw = rows.raw.unflatten(-1, (2, self.held.heads, -1)).transpose(1, 3)  # (B, H, 2, room, d)
        cos, sin = angles.cos, angles.sin
        queries = append(
            queries,
            keys,
            values,
            cos[rows.seen :],
            sin[rows.seen :],
            raw[:, :, 0],
            raw[:, :, 1],
            first,
            step,
            norms=norms,
            rotates_keys=False,
            implementation=implementation,
        )
        if made is None:
            made = self.make_rows(ListedRows(self.every[:, None]), queries.shape[1], step, implementation)
        listed, weights, *decoded = made
        expansion = Expansion(decoded[0], decoded[1], self.values_matrix) if decoded else None
        return attend_compressed(
            queries,
            listed,
            expansion,
            rows,
            cos,
            sin,
            step,
            scaling,
            norm=None if norms is None else norms[1:],
            counts=counts,
            weights=weights,
            extras=extras,
            implementation=implementation,
        )

    def make_rows(self, listed: ListedRows, query_heads: int, step: Tensor, implementation: str | None) -> MadeRows:
        """Return the list, (B, n), memory for weights, and, if codes are stored, the parts of an `Expansion`."""
        indices, held, more = listed.blocks[:, 0].contiguous(), self.held.codes, self.codes
        if held is None or more is None:
            return indices, reserve_weights(self.rows, query_heads, implementation=implementation)
        pairs = zip(list_parts(held), list_parts(more), strict=True)
        taken = [take_codes(indices, *pair, self.rows, step, implementation=implementation) for pair in pairs]
        codes = self.codec.read_codes(Groups(*taken) if len(taken) > 1 else taken[0], self.rows.raw.dtype)
        compressor = self.find_compressor()
        (key_weight, key_bias), (value_weight, value_bias) = compressor.split_last()
        inner = compressor.find_inner(codes)  # of K and V together, or one behind the other
        of_values = inner[..., inner.shape[2] - value_weight.shape[1] :]
        if value_bias is not None:  # it is the last column of `values_matrix`
            of_values = torch.cat([of_values, torch.ones_like(of_values[..., :1])], -1)
        keys = linear(inner[..., : key_weight.shape[1]], key_weight, key_bias)
        return indices, reserve_weights(self.rows, query_heads, implementation=implementation), keys, of_values

    def find_compressor(self) -> Compressor:
        """Return the layer's compressor where the rows are, in their dtype."""
        return self.codec.whole.compressors.like(self.codec.layer, self.rows.raw)

    @cached_property
    def values_matrix(self) -> Tensor:
        """f_d's last matrix for V, (d_k, …), with its bias as a further column if it has one."""
        weight, bias = self.find_compressor().split_last()[1]
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    def pack_due(self, number: int) -> None:
        whole, rows = self.codec.whole, self.rows
        block = whole.count_blocks(self.behind, number)
        if whole.count_blocks(self.behind, number + 1) == block:
            return
        if not self.has_sinks:
            rows.more_bases[:, : whole.sinks] = rows.raw[:, : whole.sinks]
        bases = torch.cat([rows.bases, rows.more_bases[:, : self.stops[block]]], 1)
        first = whole.sinks + self.held.compressed + block * whole.recent - rows.raw_from
        made = self.codec.compress(rows.raw[:, first : first + whole.recent], bases, self.centres[block])
        for into, tensor in zip(self.view_block(block).tensors(), made.tensors(), strict=True):
            into.copy_(tensor)

    def view_block(self, block: int) -> Block:
        """Return the memory for what is stored of a block."""
        rows, size = self.rows, self.codec.whole.recent
        tokens = slice(block * size, (block + 1) * size)
        references = None if rows.more_references is None else rows.more_references[:, tokens]
        codes = None if self.codes is None else slice_codes(self.codes, tokens)
        return Block(rows.more_bases[:, self.stops[block] : self.stops[block + 1]], references, codes)

    def finish(self, read: int, lengths: Tensor) -> DeltaRows:
        rows, held, whole = self.rows, self.held, self.codec.whole
        seen, blocks = held.seen + read, whole.count_blocks(self.behind, read)
        sinks = min(whole.sinks, seen)
        if not self.has_sinks:
            held = replace(held, bases=rows.raw[:, :sinks].clone())
        first = sinks + held.compressed + blocks * whole.recent - rows.raw_from
        waiting = rows.raw[:, first : seen - rows.raw_from].clone()
        made = [self.view_block(block) for block in range(blocks)]
        return held.join(made, blocks * whole.recent, self.following[blocks], waiting)

    def tensors(self) -> list[Tensor]:
        rows, codes = self.rows, [] if self.codes is None else list_parts(self.codes)
        return [rows.more_bases, rows.raw, *codes, *([] if rows.more_references is None else [rows.more_references])]


def pieces(count: int, most: int) -> Iterator[slice]:
    """Yield slices of up to `most` of `count` tokens."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def multiply_exactly(rows: Tensor, others: Tensor) -> Tensor:
    """Return the products of rows (B, n, w) with others (B, m, w), (B, n, m), in at least float32.

    A GPU multiplies numbers of 16 bits with matrix units and adds the products up in float32, which loses nothing.
    """
    dtype = mass_dtype(rows)
    if rows.device.type == "cuda" and rows.dtype != dtype:
        return torch.bmm(rows, others.mT, out_dtype=dtype)
    return rows.to(dtype) @ others.to(dtype).mT


def mean_of(bases: Tensor, numbers: Tensor) -> Tensor:
    """Return the means of k of the `bases` (B, b, w), (B, n, w), by their numbers (B, n, k).

    They are added up in at least float32, which `embedding_bag` does by itself on a GPU, and the bases that a token
    refers to are never gathered into memory.
    """
    before = torch.arange(len(bases), device=bases.device)[:, None, None] * bases.shape[1]
    added = bases if bases.is_cuda else bases.to(mass_dtype(bases))
    means = embedding_bag((numbers.long() + before).flatten(0, 1), added.flatten(0, 1), mode="mean")
    return means.unflatten(0, numbers.shape[:2]).to(bases.dtype)


def join_numbers(parts: list[Tensor], bases: int) -> Tensor:
    """Return numbers among `bases` bases one after the other, as narrow as they can be."""
    dtype = torch.int16 if bases <= NARROW else torch.int32
    return torch.cat([part.to(dtype) for part in parts], 1)


def list_parts(codes: Codes) -> list[Tensor]:
    """Return the tensors of codes, (B, m, …) each."""
    return [codes] if isinstance(codes, Tensor) else [*codes]


def slice_codes(codes: Codes, tokens: slice) -> Codes:
    """Return the codes of some tokens."""
    return codes[:, tokens] if isinstance(codes, Tensor) else Groups(*(part[:, tokens] for part in codes))


def reserve_codes(codes: Codes, tokens: int) -> Codes:
    """Return memory for the codes of further tokens."""
    made = [part.new_empty(len(part), tokens, *part.shape[2:]) for part in list_parts(codes)]
    return made[0] if isinstance(codes, Tensor) else Groups(*made)


def join_codes(parts: list[Codes]) -> Codes:
    """Return codes one after the other."""
    if isinstance(parts[0], Groups):
        return Groups(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))
    return torch.cat([part for part in parts if isinstance(part, Tensor)], 1)
