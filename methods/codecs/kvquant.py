"""kvquant: keys before rotation and values as codes of a code book that was fitted to the model, with exact outliers.

Source: the KVQuant paper (arXiv 2401.18079); SqueezeAILab/KVQuant, quant/kvquant/simquant_module_quantizer.py (941b20b)
and quant/llama_simquant.py (4b6598e). Symbols: x a number of a key, before QK norm and RoPE, or of a value; [l, u] its
range; t the share of outliers; c_0 < c_1 < … the 2^bits numbers of the code book of a layer's keys or of its values.

    z = (x − (u + l)/2)/((u − l)/2),   code = the nearest c to z,   x̂ = c·(u − l)/2 + (u + l)/2

The range of keys is that of a channel: the t/2 and the 1 − t/2 quantiles over calibration texts. That of values is
found for each row, from the numbers that are no outliers. Outliers are stored as they are, with their channels. `norm`
reads a·c + b in place of c, with a and b that give the calibrated z the mean and the deviation that they had (Q-Norm).
The first `sinks` tokens stay raw. `python -m kvbench calibrate kvquant` makes the file of ranges and code books.

Where kvbench differs (ours): each row of a head has exactly ⌈t·d⌉ outliers, so that rows have one size: of a key the
numbers that lie furthest outside their ranges, in units of half a range, and of a value those furthest from the row's
median. The source takes all keys outside their ranges, and of the values of all heads of a token the share t. So a row
here depends on its own head only, and heads may keep other rows. Outliers are stored in the model's dtype, the number
of a channel in one byte up to 256 channels. The middle and half of a value's range are float16, and rounding is by
these. After an eviction with rounding=cut the raw tokens are the first ones that a head still holds.

Answers are read through the model's modules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbench.interfaces.codec import Codec, Packing, copy_samples, join, split
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.settings import setting
from kvbench.interfaces.tensor_files import TensorFile, read_tensors
from kvbench.validation import SettingError

BITS = (2, 3, 4)
SIDES = ("key", "value")
RANGES = ("key_low", "key_high")  # tensors of a file: l and u, (layers, KV heads, d)
OUTLIERS = "outliers"  # tensor of a file: t, (1,)
WIDE = 256  # channels that a byte can number
Parts = tuple[Tensor, ...]


def name_levels(side: str, bits: int) -> str:
    """Return the name of the tensor with the code books, (layers, 2^bits)."""
    return f"{side}_levels_{bits}"


def name_norms(side: str, bits: int) -> str:
    """Return the name of the tensor with a and b of Q-Norm, (layers, 2)."""
    return f"{side}_norms_{bits}"


@dataclass(frozen=True)
class KVQuant(Codec):
    """Store codes of keys before rotation, by ranges of channels, and of values, by ranges of rows."""

    path: str | None = setting()
    """The file of ranges and code books."""
    bits: int = setting(choices=BITS)
    """Bits of a code."""
    norm: bool = setting()
    """Whether codes are read with Q-Norm."""
    sinks: int = setting(minimum=0)
    """Number of first tokens that stay raw."""
    rounding: str = setting(choices=("written", "cut"))
    """When rows are rounded: as they are "written", so that the model attends to rounded rows from the first token on,
    or after the last "cut" of the prefill, so that the model reads the prompt exactly.
    """

    packs = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.file  # refuse an unusable file at once

    @property
    def packing(self) -> Packing:
        written = self.rounding == "written"
        return Packing(
            before_attention=written,
            keeps=True,
            takes_unrotated_keys=True,
            token_by_token=not written,
            replicates=True,
        )

    @cached_property
    def file(self) -> TensorFile:
        """The file of ranges and code books.

        Raises:
            SettingError: The file cannot be read.
        """
        names: dict[str, tuple[str, ...]] = dict.fromkeys(RANGES, ("layers", "KV heads", "dimensions"))
        for side in SIDES:
            names |= {name_levels(side, self.bits): ("layers", "codes"), name_norms(side, self.bits): ("layers", "2")}
        return read_tensors(self.path, names | {OUTLIERS: ("1",)}, "ranges and code books", "kvquant", "codec.path")

    @property
    def weights_bytes(self) -> int:
        return self.file.nbytes

    @cached_property
    def outliers(self) -> float:
        """The share of outliers, t."""
        return float(self.file.tensors[OUTLIERS])

    def check(self, layout: Layout) -> None:
        where, layers = f"codec.path={self.path}", layout.layers
        if layout.dim % 8:
            raise SettingError(f"codec={self.name}: heads of {layout.dim} channels, which are no multiple of 8")
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(RANGES, (layers, layout.heads, layout.dim))
        for side in SIDES:
            sizes |= {name_levels(side, self.bits): (layers, 2**self.bits), name_norms(side, self.bits): (layers, 2)}
        for name, size in sizes.items():
            if (stored := tuple(self.file.tensors[name].shape)) != size:
                raise SettingError(f"{where}: {name} has {stored} numbers, the model needs {size}")
        held = list(layout.held)
        low, high = (self.file.tensors[name][held] for name in RANGES)
        levels = torch.cat([self.file.tensors[name_levels(side, self.bits)][held] for side in SIDES])
        if (high < low).any() or (levels.diff() < 0).any():
            raise SettingError(f"{where}: the ends of a range, or the numbers of a code book, do not ascend")
        if not 0 <= self.outliers < 1:
            raise SettingError(f"{where}: {OUTLIERS} is {self.outliers}, no share in [0, 1)")

    def check_identity(self, identify: Callable[[], str]) -> None:
        self.file.check_identity(identify)

    def of_layer(self, layer: int, layers: int) -> "KVQuantLayer":
        return KVQuantLayer(self.name, self, layer)


def widen(rows: Tensor) -> Tensor:
    """Return rows in float32 at least, in which codes are found."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def count_outliers(share: float, dim: int) -> int:
    """Return the number of outliers of a row of `dim` channels."""
    return math.ceil(share * dim)


def normalise_keys(keys: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return z of keys, where their ranges end at `low` and `high`; all have shapes that broadcast."""
    half = (high - low) / 2
    return (keys - (high + low) / 2) / half.masked_fill(half == 0, 1.0)


def normalise_values(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the outliers and the range of each value.

    Args:
        values: (R, d), in float32 at least.
        count: Number of outliers of a row.

    Returns:
        z (R, d), which means nothing for outliers; the middle and the half of each range, (R, 2) float16; and the
        channels of the outliers, (R, count) int64.
    """
    index = (values - values.median(-1, keepdim=True).values).abs().topk(count, -1).indices
    inside = torch.ones_like(values, dtype=torch.bool).scatter(-1, index, False)
    low, high = (values.masked_fill(~inside, end) for end in (math.inf, -math.inf))
    low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    scales = torch.cat([(high + low) / 2, (high - low) / 2], -1).half()
    middle, half = scales.to(values).split(1, -1)
    return (values - middle) / half.masked_fill(half == 0, 1.0), scales, index


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (R, d) in d·bits/8 bytes: eight codes in `bits` bytes, the first one in the lowest bits."""
    places = torch.arange(8, device=codes.device)
    words = (codes.view(len(codes), codes.shape[1] // 8, 8) << bits * places).sum(-1, keepdim=True)
    return (words >> 8 * places[:bits] & 255).flatten(1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes (R, d) that `pack_codes` has packed, int64."""
    places = torch.arange(8, device=packed.device)
    words = packed.view(len(packed), packed.shape[1] // bits, bits).long() << 8 * places[:bits]
    return (words.sum(-1, keepdim=True) >> bits * places & 2**bits - 1).flatten(1)


@dataclass(frozen=True)
class KVQuantLayer(Codec):
    """The codec of one layer."""

    whole: KVQuant
    """The codec of all layers."""
    layer: int
    """The index of the layer."""

    @property
    def packing(self) -> Packing:
        return self.whole.packing

    def find(self, name: str, like: Tensor) -> Tensor:
        """Return the layer's part of a tensor of the file, with the device and the dtype of `like`."""
        return self.whole.file.like(name, like)[self.layer]

    def find_levels(self, side: str, like: Tensor) -> Tensor:
        """Return what codes are read as, (2^bits,)."""
        levels = self.find(name_levels(side, self.whole.bits), like)
        if not self.whole.norm:
            return levels
        factor, shift = self.find(name_norms(side, self.whole.bits), like)
        return levels * factor + shift

    def find_ranges(self, heads: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper ends of the ranges of keys, (R, d) each, whose heads are `heads` (R,)."""
        low, high = (self.find(name, like)[heads] for name in RANGES)
        return low, high

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KVQuantRows":
        no_keys, no_values, nothing = keys[:0], values[:0], torch.zeros_like(lengths)
        coded = self.encode_keys(no_keys, nothing.flatten()[:0]), self.encode_values(no_values)
        empty = KVQuantRows(self, *coded, no_keys, no_values, nothing, nothing, self.whole.sinks)
        return replace(empty.extend(keys, values, lengths), left=0) if len(keys) else empty

    def encode_keys(self, rows: Tensor, heads: Tensor) -> Parts:
        """Return the codes of keys (R, d), the channels of their outliers and these, by the head of each row (R,)."""
        z = normalise_keys(widen(rows), *self.find_ranges(heads, widen(rows[:0])))
        index = z.abs().topk(count_outliers(self.whole.outliers, rows.shape[1]), -1).indices
        return self.round("key", z), *store_outliers(rows, index)

    def encode_values(self, rows: Tensor) -> Parts:
        """Return the codes of values (R, d), the channels of their outliers, these, and the ranges."""
        z, scales, index = normalise_values(widen(rows), count_outliers(self.whole.outliers, rows.shape[1]))
        return self.round("value", z), *store_outliers(rows, index), scales

    def round(self, side: str, z: Tensor) -> Tensor:
        """Return the packed codes of z (R, d)."""
        levels = self.find(name_levels(side, self.whole.bits), z)
        return pack_codes(torch.bucketize(z, (levels[1:] + levels[:-1]) / 2, right=True), self.whole.bits)

    def decode_keys(self, parts: Parts, heads: Tensor) -> Tensor:
        """Return the keys that codes stand for, (R, d), by the head of each row (R,)."""
        codes, index, outliers = parts
        like = widen(outliers[:0])
        low, high = self.find_ranges(heads, like)
        rows = self.find_levels("key", like)[unpack_codes(codes, self.whole.bits)] * ((high - low) / 2)
        return (rows + (high + low) / 2).to(outliers.dtype).scatter(-1, index.long(), outliers)

    def decode_values(self, parts: Parts) -> Tensor:
        """Return the values that codes stand for, (R, d)."""
        codes, index, outliers, scales = parts
        like = widen(outliers[:0])
        middle, half = scales.to(like).split(1, -1)
        rows = self.find_levels("value", like)[unpack_codes(codes, self.whole.bits)] * half + middle
        return rows.to(outliers.dtype).scatter(-1, index.long(), outliers)


def store_outliers(rows: Tensor, index: Tensor) -> Parts:
    """Return the channels of outliers, in one byte each if that suffices, and the outliers of rows, (R, count) each."""
    return index.to(torch.uint8 if rows.shape[1] <= WIDE else torch.int16), rows.gather(-1, index)


def number_heads(lengths: Tensor, rows: int) -> Tensor:
    """Return the head of each of `rows` flat rows, (R,), of heads that hold `lengths` (B, H) rows."""
    heads = torch.arange(lengths.shape[1], device=lengths.device).repeat(len(lengths))
    return heads.repeat_interleave(lengths.flatten(), output_size=rows)


@dataclass(frozen=True)
class KVQuantRows:
    """The rows of one layer. The raw ones of a head stand before the others."""

    codec: KVQuantLayer
    keys: Parts
    """Codes, outliers' channels and outliers, of rows that are not raw."""
    values: Parts
    """Codes, outliers' channels, outliers and ranges."""
    raw_keys: Tensor
    """Keys of raw rows, flat."""
    raw_values: Tensor
    """Their values."""
    raw: Tensor
    """Number of raw rows of each head, (B, H)."""
    lengths: Tensor
    """Number of all rows of each head, (B, H)."""
    left: int
    """Number of next tokens that stay raw."""

    @property
    def coded(self) -> Tensor:
        """Number of rows of each head that are not raw, (B, H)."""
        return self.lengths - self.raw

    def read(self) -> tuple[Tensor, Tensor]:
        keys = self.codec.decode_keys(self.keys, number_heads(self.coded, len(self.keys[0])))
        values = self.codec.decode_values(self.values)
        counts = self.raw.cpu(), self.coded.cpu()  # once, because the host waits for them
        return (
            join(self.raw_keys, counts[0], keys, counts[1]),
            join(self.raw_values, counts[0], values, counts[1]),
        )

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, self.raw_keys, self.raw_values, self.raw]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KVQuantRows":
        more = lengths - self.lengths
        raw = more.clamp(max=self.left)
        first, coded, held = raw.cpu(), (more - raw).cpu(), self.coded.cpu()
        raw_keys, new_keys = split(keys, first + coded, first)
        raw_values, new_values = split(values, first + coded, first)
        parts = self.codec.encode_keys(new_keys, number_heads(more - raw, len(new_keys)))

        def follow(known: Parts, new: Parts) -> Parts:
            return tuple(join(old, held, part, coded) for old, part in zip(known, new, strict=True))

        known = self.raw.cpu()
        return replace(
            self,
            keys=follow(self.keys, parts),
            values=follow(self.values, self.codec.encode_values(new_values)),
            raw_keys=join(self.raw_keys, known, raw_keys, first),
            raw_values=join(self.raw_values, known, raw_values, first),
            raw=self.raw + raw,
            lengths=lengths,
            left=self.left - int(first.max()),
        )

    def keep(self, kept: Tensor) -> "KVQuantRows":
        each = self.lengths.cpu(), self.raw.cpu()
        raw, coded = split(kept, *each)
        sizes = each[1].flatten().tolist(), (each[0] - each[1]).flatten().tolist()
        counts = [
            torch.stack([head.sum() for head in marks.split_with_sizes(of_heads)]).view_as(self.raw)
            for marks, of_heads in zip((raw, coded), sizes, strict=True)
        ]
        return replace(
            self,
            keys=tuple(part[coded] for part in self.keys),
            values=tuple(part[coded] for part in self.values),
            raw_keys=self.raw_keys[raw],
            raw_values=self.raw_values[raw],
            raw=counts[0],
            lengths=counts[0] + counts[1],
        )

    def replicate(self, times: int, lengths: Tensor) -> "KVQuantRows":
        copies = copy_samples((self.keys, self.values, self.raw_keys, self.raw_values, self.raw), times)
        keys, values, raw_keys, raw_values, raw = copies
        return replace(
            self, keys=keys, values=values, raw_keys=raw_keys, raw_values=raw_values, raw=raw, lengths=lengths
        )
