"""The interface of the ways in which the tokens of an answer are read."""

from typing import Protocol

from torch import Tensor


class DecodePath(Protocol):
    """Reads the tokens of an answer, one after the other, behind what a context holds."""

    @property
    def is_over(self) -> bool:
        """Whether it cannot read a further token: another path must."""

    def step(self) -> tuple[Tensor, float]:
        """Read the last token that was given. Returns the next one, (B,) on the CPU, and the seconds since the answer
        began, without what capturing a graph took.
        """

    def close(self) -> None:
        """Leave the context as if the model's modules had read what was asked for."""
