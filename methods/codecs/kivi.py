"""kivi: old keys and values rounded to 2 or 4 bits, keys per channel, values per token (KIVI).

Source: the KIVI paper (arXiv 2402.02750), Section 3 and Algorithm 1; jy-yuan/KIVI, models/llama_kivi.py (what is packed
when) and quant/new_pack.py (rounding). Symbols: n rows of a head, G group, R residual.
Keys: the first n - n mod R rows are packed per channel in groups of G consecutive rows. Values: all but the last R rows
are packed per row in groups of G consecutive channels. So in decoding keys are packed R rows at once when their
residual reaches R, values row by row. Prefill attention sees raw rows; a token sees its own row raw.

As in the code, decoding takes one token at a time: several known tokens give what they give one by one. Beyond it, and
needed here: GQA; heads of different lengths, each with its own residual, since eviction comes before packing; a guard
for constant groups, which the code divides by zero; rounding in float32 whatever the model's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.interfaces.codec import Codec, join, split
from kvbench.kernels.quantize import Groups, dequantize, quantize
from kvbench.validation import SettingError, require_choice, require_int


@dataclass(frozen=True)
class Kivi(Codec):
    """`bits` 2 | 4; `group` G rows of a key's channel, channels of a value; `residual` R, a multiple of G."""

    bits: int
    group: int
    residual: int

    packs = True
    token_by_token = True

    def __post_init__(self) -> None:
        require_choice("codec.bits", self.bits, (2, 4))
        require_int("codec.group", self.group, 1)
        require_int("codec.residual", self.residual, 1)
        if self.group * self.bits % 8:
            raise SettingError(f"codec.group={self.group}: groups of {self.bits} bits must fill whole bytes")
        if self.residual % self.group:
            raise SettingError(f"codec.residual={self.residual}: a multiple of codec.group={self.group}")

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KiviRows":
        dim = keys.shape[-1]
        if dim % self.group:
            raise SettingError(f"codec.group={self.group}: heads of {dim} channels are no whole groups of values")
        empty = KiviRows(
            self, torch.zeros_like(lengths), self.key_groups(keys[:0]), keys[:0], self.value_groups(values[:0]),
            values[:0],
        )  # fmt: skip
        return empty.extend(keys, values, lengths)

    def key_groups(self, keys: Tensor) -> Groups:
        """Keys (m·G, d) as m groups: codes (m, d, G·bits/8), scale and zero (m, d, 1)."""
        return quantize(keys.view(len(keys) // self.group, self.group, keys.shape[-1]).mT, self.bits, self.group)

    def value_groups(self, values: Tensor) -> Groups:
        """Values (m, d): codes (m, d·bits/8), scale and zero (m, d/G)."""
        return quantize(values, self.bits, self.group)


@dataclass(frozen=True)
class KiviRows:
    """Packed groups and raw residuals, flat in the order (sample, head, place)."""

    codec: Kivi
    lengths: Tensor  # (B, H) rows of every head; the layer's own tensor, counted there
    key_groups: Groups
    keys: Tensor  # (r, d) raw
    value_groups: Groups
    values: Tensor  # (r', d) raw

    def packed(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H) rows that are packed in heads of `lengths` rows: of keys and of values."""
        residual = self.codec.residual
        return lengths - lengths % residual, (lengths - residual).clamp(min=0)

    def read(self) -> tuple[Tensor, Tensor]:
        bits, group, dtype = self.codec.bits, self.codec.group, self.keys.dtype
        of_keys, of_values = self.packed(self.lengths)
        keys = dequantize(self.key_groups, bits, group, dtype, turned=True).mT.flatten(0, 1)
        values = dequantize(self.value_groups, bits, group, dtype)
        return (
            join(keys, of_keys, self.keys, self.lengths - of_keys),
            join(values, of_values, self.values, self.lengths - of_values),
        )

    def tensors(self) -> list[Tensor]:
        return [*self.key_groups, self.keys, *self.value_groups, self.values]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KiviRows":
        codec, more = self.codec, lengths - self.lengths
        before, after = self.packed(self.lengths), self.packed(lengths)
        raw_keys = join(self.keys, self.lengths - before[0], keys, more)
        raw_values = join(self.values, self.lengths - before[1], values, more)
        old_keys, raw_keys = split(raw_keys, lengths - before[0], after[0] - before[0])
        old_values, raw_values = split(raw_values, lengths - before[1], after[1] - before[1])
        key_groups, value_groups = codec.key_groups(old_keys), codec.value_groups(old_values)
        group = codec.group
        return KiviRows(
            codec,
            lengths,
            append(self.key_groups, before[0] // group, key_groups, (after[0] - before[0]) // group),
            raw_keys,
            append(self.value_groups, before[1], value_groups, after[1] - before[1]),
            raw_values,
        )


def append(groups: Groups, counts: Tensor, more: Groups, more_counts: Tensor) -> Groups:
    """Both, head by head; nothing is packed again."""
    if len(more.codes) == 0:
        return groups
    return Groups(*(join(old, counts, new, more_counts) for old, new in zip(groups, more, strict=True)))
