"""The base of codecs that pack each row on its own: a codec is then two functions."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvbench.interfaces.codec import Codec, Packing, copy_samples, join
from kvbench.validation import ContractError

Parts = tuple[Tensor, ...]
"""What keys or values are packed as: tensors whose first dimension is that of the rows, (R, …)."""


@dataclass(frozen=True)
class RowCodec(Codec):
    """The base of codecs that pack each row on its own.

    @dataclass(frozen=True)
    class Half(RowCodec):
        def encode(self, rows):
            return (rows.half(),)

        def decode(self, parts, dtype):
            return parts[0].to(dtype)

    Values may be packed in another way than keys: `encode_values` and `decode_values` are those of keys by default.
    """

    packing = Packing(keeps=True, replicates=True)

    def encode(self, rows: Tensor) -> Parts:
        """Pack keys (R, d)."""
        raise NotImplementedError(f"{self.name} has no encode")

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the rows that `encode` has packed, (R, d), in the model's dtype."""
        raise NotImplementedError(f"{self.name} has no decode")

    def encode_values(self, rows: Tensor) -> Parts:
        """Pack values (R, d)."""
        return self.encode(rows)

    def decode_values(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the rows that `encode_values` has packed, (R, d), in the model's dtype."""
        return self.decode(parts, dtype)

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "EncodedRows":
        return EncodedRows(self, *self.encode_both(keys, values), lengths, keys.dtype)

    def encode_both(self, keys: Tensor, values: Tensor) -> tuple[Parts, Parts]:
        """Pack keys and values (R, d), and check what came out.

        Raises:
            ContractError: It is no tuple of tensors that have R rows each.
        """
        both = self.encode(keys), self.encode_values(values)
        for parts in both:
            if not isinstance(parts, tuple) or any(part.shape[:1] != keys.shape[:1] for part in parts):
                raise ContractError(
                    f"codec={self.name}: encode must return a tuple of tensors of {len(keys)} rows each"
                )
        return both


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a `RowCodec`, flat in the order (sample, head, position)."""

    codec: RowCodec
    keys: Parts
    values: Parts
    lengths: Tensor
    """Number of rows of each head, (B, H)."""
    dtype: torch.dtype
    """The model's."""

    def read(self) -> tuple[Tensor, Tensor]:
        return self.codec.decode(self.keys, self.dtype), self.codec.decode_values(self.values, self.dtype)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "EncodedRows":
        return self.append(*self.codec.encode_both(keys, values), lengths)

    def append(self, keys: Parts, values: Parts, lengths: Tensor) -> Self:
        """Return the rows followed in each head by encoded ones. `lengths` (B, H) counts old and new rows together."""
        if not len(self.keys[0]):
            return replace(self, keys=keys, values=values, lengths=lengths)
        held = self.lengths.cpu()  # once, because the host waits for it
        more = lengths.cpu() - held

        def follow(known: Parts, parts: Parts) -> Parts:
            return tuple(join(old, held, part, more) for old, part in zip(known, parts, strict=True))

        return replace(self, keys=follow(self.keys, keys), values=follow(self.values, values), lengths=lengths)

    def keep(self, kept: Tensor) -> "EncodedRows":
        heads = torch.arange(self.lengths.numel(), device=kept.device)
        numbers = heads.repeat_interleave(self.lengths.flatten(), output_size=len(kept))
        lengths = torch.zeros_like(self.lengths.flatten()).index_add(0, numbers, kept.to(self.lengths.dtype))
        index = kept.nonzero().squeeze(1)
        keys, values = (tuple(part[index] for part in parts) for parts in (self.keys, self.values))
        return replace(self, keys=keys, values=values, lengths=lengths.view_as(self.lengths))

    def replicate(self, times: int, lengths: Tensor) -> "EncodedRows":
        return replace(
            self, keys=copy_samples(self.keys, times), values=copy_samples(self.values, times), lengths=lengths
        )
