"""kivi: round old keys and values to 2 or 4 bits, keys per channel and values per token (KIVI).

Source: the KIVI paper (arXiv 2402.02750), Section 3 and Algorithm 1; jy-yuan/KIVI, models/llama_kivi.py (what is packed
when) and quant/new_pack.py (rounding). Symbols: n rows of a head, G group, R residual.

Keys: the first n - n mod R rows are packed per channel, in groups of G consecutive rows. Values: all but the last R
rows are packed per row, in groups of G consecutive channels. While decoding, keys are therefore packed R rows at a
time, when their residual reaches R, and values row by row. Attention in the prefill sees raw rows, and a token sees its
own row raw.

As in the source, decoding takes one token at a time, so several known tokens give the same result as one by one. Beyond
the source, and needed here: GQA; heads of different lengths, each with its own residual, because eviction comes before
packing; a guard for constant groups, for which the source divides by zero; rounding in float32 whatever the model's
dtype.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbench.interfaces.codec import Angles, Codec, Packing, copy_samples, join, split
from kvbench.interfaces.settings import setting
from kvbench.kernels.packed_attention import PackedRows, append_packed, attend_packed
from kvbench.kernels.quantize import Groups, dequantize, quantize
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.validation import SettingError


@dataclass(frozen=True)
class Kivi(Codec):
    """Store old rows in 2 or 4 bits."""

    bits: int = setting(choices=(2, 4))
    """Bits of a number."""
    group: int = setting(minimum=1)
    """Rows of a key's channel, or channels of a value, that share a scale and a zero, G."""
    residual: int = setting(minimum=1)
    """Number of newest rows that stay raw, R. A multiple of G."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group * self.bits % 8:
            raise SettingError(f"codec.group={self.group}: groups of {self.bits} bits must fill whole bytes")
        if self.residual % self.group:
            raise SettingError(f"codec.residual={self.residual}: a multiple of codec.group={self.group}")

    @cached_property
    def packing(self) -> Packing:
        return Packing(token_by_token=True, interval=self.residual, grows=True, replicates=True)

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KiviRows":
        dim = keys.shape[-1]
        if dim % self.group:
            raise SettingError(f"codec.group={self.group}: {dim} channels per head do not divide into such groups")
        empty = KiviRows(
            self,
            torch.zeros_like(lengths),
            self.key_groups(keys[:0]),
            keys[:0],
            self.value_groups(values[:0]),
            values[:0],
        )
        return empty.extend(keys, values, lengths)

    def key_groups(self, keys: Tensor) -> Groups:
        """Quantize keys (m·G, d) as m groups: codes (m, d, G·bits/8), scale and zero (m, d, 1)."""
        return quantize(keys.view(len(keys) // self.group, self.group, keys.shape[-1]).mT, self.bits, self.group)

    def value_groups(self, values: Tensor) -> Groups:
        """Quantize values (m, d): codes (m, d·bits/8), scale and zero (m, d/G)."""
        return quantize(values, self.bits, self.group)


@dataclass(frozen=True)
class KiviRows:
    """Packed groups and raw residuals, flat in the order (sample, head, position)."""

    codec: Kivi
    lengths: Tensor
    """Rows of every head, (B, H). The tensor belongs to the layer, which counts its bytes."""
    key_groups: Groups
    keys: Tensor
    """Raw keys, (r, d)."""
    value_groups: Groups
    values: Tensor
    """Raw values, (r', d)."""

    def packed(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many keys and how many values are packed in heads of `lengths` rows, (B, H) each."""
        residual = self.codec.residual
        return lengths - lengths % residual, (lengths - residual).clamp(min=0)

    def read(self) -> tuple[Tensor, Tensor]:
        bits, group, dtype, lengths = self.codec.bits, self.codec.group, self.keys.dtype, self.lengths.cpu()
        of_keys, of_values = self.packed(lengths)
        keys = dequantize(self.key_groups, bits, group, dtype, turned=True).mT.flatten(0, 1)
        values = dequantize(self.value_groups, bits, group, dtype)
        return (
            join(keys, of_keys, self.keys, lengths - of_keys),
            join(values, of_values, self.values, lengths - of_values),
        )

    def tensors(self) -> list[Tensor]:
        return [*self.key_groups, self.keys, *self.value_groups, self.values]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "KiviRows":
        codec, held, longer = self.codec, self.lengths.cpu(), lengths.cpu()
        before, after = self.packed(held), self.packed(longer)
        raw_keys = join(self.keys, held - before[0], keys, longer - held)
        raw_values = join(self.values, held - before[1], values, longer - held)
        old_keys, raw_keys = split(raw_keys, longer - before[0], after[0] - before[0])
        old_values, raw_values = split(raw_values, longer - before[1], after[1] - before[1])
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

    def replicate(self, times: int, lengths: Tensor) -> "KiviRows":
        tensors = self.key_groups, self.keys, self.value_groups, self.values
        return KiviRows(self.codec, lengths, *copy_samples(tensors, times))

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GrowingKivi":
        return GrowingKivi(self, tokens, ahead, mass)


class GrowingKivi:
    """Packed rows, memory for the groups that further tokens fill, and rings of the newest rows.

    The rings have room for R rows, the token that is read, and the tokens that may be taken back.
    """

    def __init__(self, held: KiviRows, tokens: int, ahead: int, mass: Tensor | None) -> None:
        """Allocate memory. See `Growable.growing`."""
        codec, lengths, like = held.codec, held.lengths, held.keys
        (batch, heads), dim, residual = lengths.shape, like.shape[1], codec.residual
        self.held, self.tokens = held, tokens
        self.counts = held.packed(lengths)
        ring = [like.new_empty(batch, heads, residual + ahead + 1, dim) for _ in range(2)]
        groups = (residual - 1 + tokens - 1) // residual * (residual // codec.group)  # the last token packs none
        self.rows = PackedRows(
            codec.bits,
            codec.group,
            residual,
            lengths,
            int(lengths.max()),
            mass,
            find_starts(lengths),
            held.key_groups,
            find_starts(self.counts[0] // codec.group),
            held.value_groups,
            find_starts(self.counts[1]),
            reserve(held.key_groups, batch, heads, groups),
            reserve(held.value_groups, batch, heads, tokens - 1),
            *ring,
        )

    def begin(self) -> None:
        rows = self.rows
        for ring, raw, packed in zip(
            (rows.ring_keys, rows.ring_values), (self.held.keys, self.held.values), self.counts, strict=True
        ):
            heads, slots = self.find_slots(packed, rows.lengths)
            ring.flatten(0, 1)[heads, slots] = raw

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
        queries = append_packed(
            queries, keys, values, *angles[:2], self.rows, step, norms=norms, implementation=implementation
        )
        return attend_packed(queries, self.rows, scaling, step, extras=extras, implementation=implementation)

    def pack_due(self, number: int) -> None:
        """Do nothing: `attend` packs."""

    def finish(self, read: int, lengths: Tensor) -> KiviRows:
        """Return all rows. A group that the last token's row completes has not been packed yet, and is packed here."""
        rows, group, before = self.rows, self.rows.group, lengths - 1
        packed = self.held.packed(before)
        rings = [ring.flatten(0, 1) for ring in (rows.ring_keys, rows.ring_values)]
        raw = [ring[self.find_slots(count, before)] for ring, count in zip(rings, packed, strict=True)]
        keys, values = (ring[self.find_slots(before, lengths)] for ring in rings)
        counts, more = self.counts, [new - old for new, old in zip(packed, self.counts, strict=True)]
        held = KiviRows(
            self.held.codec,
            before,
            append(rows.held_keys, counts[0] // group, take_first(rows.more_keys, more[0] // group), more[0] // group),
            raw[0],
            append(rows.held_values, counts[1], take_first(rows.more_values, more[1]), more[1]),
            raw[1],
        )
        return held.extend(keys, values, lengths)

    def tensors(self) -> list[Tensor]:
        rows = self.rows
        return [*rows.more_keys, *rows.more_values, rows.ring_keys, rows.ring_values]

    def find_slots(self, first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head and the slot of the ring of each row from `first` to `stop` (B, H), in the order of rows."""
        ring = self.rows.ring_keys.shape[2]
        row = first.view(-1, 1) + torch.arange(ring, device=first.device)
        heads, number = (row < stop.view(-1, 1)).nonzero(as_tuple=True)
        return heads, row[heads, number] % ring


def find_starts(counts: Tensor) -> Tensor:
    """Return the index of each head's first of `counts` (B, H) rows."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)


def reserve(groups: Groups, batch: int, heads: int, room: int) -> Groups:
    """Return memory for `room` further groups of each head, (B, H, room, …)."""
    return Groups(*(part.new_empty(batch, heads, room, *part.shape[1:]) for part in groups))


def take_first(groups: Groups, counts: Tensor) -> Groups:
    """Return the first `counts` (B, H) of the groups (B, H, room, …) of each head, flat."""
    taken = torch.arange(groups.codes.shape[2], device=counts.device) < counts[..., None]
    return Groups(*(part[taken] for part in groups))


def append(groups: Groups, counts: Tensor, more: Groups, more_counts: Tensor) -> Groups:
    """Append further groups to those of each head. Nothing is packed again."""
    if len(more.codes) == 0:
        return groups
    return Groups(*(join(old, counts, new, more_counts) for old, new in zip(groups, more, strict=True)))
