"""The base of codecs that round each row to codes of 8 or 4 bits, as servers store caches."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbench.interfaces.codec import Angles, Packing
from kvbench.interfaces.row_codec import EncodedRows, Parts, RowCodec
from kvbench.interfaces.settings import setting
from kvbench.kernels.coded_rows import (
    CodedRows,
    CodedSide,
    Form,
    append_newest,
    attend_coded,
    decode,
    encode,
    round_in_place,
)
from kvbench.kernels.softmax_extras import SoftmaxExtras


@dataclass(frozen=True)
class RoundingCodec(RowCodec):
    """The base of codecs that round each row to codes. A codec says the forms of keys and values."""

    rounding: str = setting(choices=("written", "cut"))
    """When rows are rounded: as they are "written", so that the model attends to rounded rows from the first token on,
    or after the last "cut" of the prefill, so that the model reads the prompt exactly.
    """

    @cached_property
    def packing(self) -> Packing:  # type: ignore[override]
        written = self.rounding == "written"
        return Packing(
            before_attention=written,
            keeps=True,
            token_by_token=not written,
            grows=self.decodes_codes,
            replicates=True,
        )

    @property
    def decodes_codes(self) -> bool:
        """Whether a token attends to codes, in a graph. Otherwise rows are read back, through the model's modules."""
        return True

    @property
    def forms(self) -> tuple[Form, Form]:
        """How keys and how values become codes."""
        raise NotImplementedError(f"{self.name} has no forms")

    def find_forms(self, dim: int) -> tuple[Form, Form]:
        """Return the forms of keys and values of `dim` channels, for codecs whose levels depend on their number."""
        return self.forms

    def find_factors(self, dim: int) -> tuple[float, float]:
        """Return what the numbers of keys and of values are divided by before they are rounded, behind the turns."""
        return 1.0, 1.0

    def make_turns(self, dim: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the matrices (d, d) that keys and values are multiplied with before they are rounded."""
        return None, None

    def find_head_factors(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return what the keys and the values of each head are divided by before, (H,) float32 each.

        None stands for the factors of all heads, `find_factors`. A codec has one kind or the other.
        """
        return None

    def divide(self, keys: Tensor, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (R, d) each, over the factors of their heads, which hold `lengths` (B, H) rows."""
        factors = self.find_head_factors(keys.device)
        if factors is None:
            return keys, values
        return keys.float() / spread(factors[0], lengths, keys), values.float() / spread(factors[1], lengths, values)

    def encode(self, rows: Tensor) -> Parts:
        return self.encode_side(0, rows)

    def encode_values(self, rows: Tensor) -> Parts:
        return self.encode_side(1, rows)

    def encode_side(self, side: int, rows: Tensor) -> Parts:
        """Round keys (0) or values (1), (R, d)."""
        dim = rows.shape[1]
        turn = self.make_turns(dim, rows.device)[side]
        return encode(rows, self.find_forms(dim)[side], self.find_factors(dim)[side], turn)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return self.decode_side(0, parts, dtype)

    def decode_values(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return self.decode_side(1, parts, dtype)

    def decode_side(self, side: int, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return what the codes of keys (0) or values (1) stand for, (R, d)."""
        dim = parts[0].shape[1] * 8 // self.forms[side].bits
        turn = self.make_turns(dim, parts[0].device)[side]
        return decode(parts, self.find_forms(dim)[side], dtype, self.find_factors(dim)[side], turn)

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "RoundedRows":
        return RoundedRows(self, *self.encode_both(*self.divide(keys, values, lengths)), lengths, keys.dtype)


def spread(factors: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the factor of each row, (R, 1), of those of heads (H,), which hold `lengths` (B, H) rows."""
    each = factors.repeat(len(lengths)).repeat_interleave(lengths.flatten(), output_size=len(rows))
    return each[:, None]


@dataclass(frozen=True)
class RoundedRows(EncodedRows):
    """Rows of a `RoundingCodec`, which a CUDA graph can append to."""

    codec: RoundingCodec

    def read(self) -> tuple[Tensor, Tensor]:
        keys, values = super().read()
        factors = self.codec.find_head_factors(keys.device)
        if factors is None:
            return keys, values
        each = (spread(factor, self.lengths, keys) for factor in factors)
        scaled = [(rows.float() * factor).to(self.dtype) for rows, factor in zip((keys, values), each, strict=True)]
        return scaled[0], scaled[1]

    def find_factors(self, dim: int) -> tuple[float | Tensor, float | Tensor]:
        """Return the factors of keys and values of `dim` channels: of all rows, or of each head, (B, H) float32."""
        each = self.codec.find_head_factors(self.lengths.device)
        if each is None:
            return self.codec.find_factors(dim)
        keys, values = (factor.expand(self.lengths.shape).contiguous() for factor in each)
        return keys, values

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> EncodedRows:
        return super().extend(*self.codec.divide(keys, values, lengths - self.lengths), lengths)

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GrowingCodes":
        return GrowingCodes(self, tokens, mass)


class GrowingCodes:
    """Codes, and memory for those of the tokens that come. Nothing is overwritten."""

    def __init__(self, held: RoundedRows, tokens: int, mass: Tensor | None) -> None:
        """Allocate memory. See `Growable.growing`."""
        self.held, self.tokens, codec, lengths = held, tokens, held.codec, held.lengths
        keys = held.keys[0]
        dim = keys.shape[1] * 8 // codec.forms[0].bits
        factors, turns = held.find_factors(dim), codec.make_turns(dim, keys.device)
        more = [
            tuple(part.new_empty(*lengths.shape, tokens, *part.shape[1:]) for part in parts)
            for parts in (held.keys, held.values)
        ]
        key_side, value_side = map(CodedSide, codec.find_forms(dim), (held.keys, held.values), more, factors, turns)
        newest = torch.empty(2, *lengths.shape, dim, dtype=held.dtype, device=keys.device)
        starts = (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)
        longest = int(lengths.max())
        self.rows = CodedRows(
            key_side, value_side, lengths, starts, longest, mass, newest, codec.packing.before_attention
        )

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
        queries = append_newest(
            queries, keys, values, angles[0], angles[1], self.rows, step, norms=norms, implementation=implementation
        )
        return attend_coded(queries, self.rows, scaling, step, extras=extras, implementation=implementation)

    def append(self, keys: Tensor, values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        newest = self.rows.newest
        for row, given in zip(newest, (keys, values), strict=True):
            row.copy_(given.view_as(row))
        round_in_place(self.rows, step)
        return newest[0].flatten(1), newest[1].flatten(1)

    def pack_due(self, number: int) -> None:
        """Do nothing: `attend` packs."""

    def finish(self, read: int, lengths: Tensor) -> RoundedRows:
        keys, values = (
            tuple(part[:, :, :read].flatten(0, 2) for part in side.more) for side in (self.rows.keys, self.rows.values)
        )
        return self.held.append(keys, values, lengths)

    def tensors(self) -> list[Tensor]:
        return [*self.rows.keys.more, *self.rows.values.more, self.rows.newest]
