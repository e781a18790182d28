"""The base of codecs that pack each row on its own, keys and values alike: a codec is then two functions."""

from dataclasses import dataclass, replace

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
    """

    packing = Packing(replicates=True)

    def encode(self, rows: Tensor) -> Parts:
        """Pack keys or values (R, d)."""
        raise NotImplementedError(f"{self.name} has no encode")

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the rows that `encode` has packed, (R, d), in the model's dtype."""
        raise NotImplementedError(f"{self.name} has no decode")

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "EncodedRows":
        return EncodedRows(self, self.encode_all(keys), self.encode_all(values), lengths, keys.dtype)

    def encode_all(self, rows: Tensor) -> Parts:
        """Pack rows (R, d), and check what came out.

        Raises:
            ContractError: It is no tuple of tensors that have R rows each.
        """
        parts = self.encode(rows)
        if not isinstance(parts, tuple) or any(part.shape[:1] != rows.shape[:1] for part in parts):
            raise ContractError(f"codec={self.name}: encode must return a tuple of tensors of {len(rows)} rows each")
        return parts


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
        return self.codec.decode(self.keys, self.dtype), self.codec.decode(self.values, self.dtype)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "EncodedRows":
        held = self.lengths.cpu()  # once, because the host waits for it
        more = lengths.cpu() - held

        def follow(known: Parts, rows: Tensor) -> Parts:
            return tuple(
                join(old, held, new, more) for old, new in zip(known, self.codec.encode_all(rows), strict=True)
            )

        return replace(self, keys=follow(self.keys, keys), values=follow(self.values, values), lengths=lengths)

    def replicate(self, times: int, lengths: Tensor) -> "EncodedRows":
        return replace(
            self, keys=copy_samples(self.keys, times), values=copy_samples(self.values, times), lengths=lengths
        )
