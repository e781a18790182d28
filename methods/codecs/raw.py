"""raw: keys and values as the model wrote them."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.codec import Codec


@dataclass(frozen=True)
class RawRows:
    """Keys and values (R, d), untouched."""

    keys: Tensor
    values: Tensor

    def read(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]


@dataclass(frozen=True)
class Raw(Codec):
    """No compression: reads back exactly what was written."""

    def write(self, keys: Tensor, values: Tensor, lengths: Tensor) -> RawRows:
        return RawRows(keys, values)
