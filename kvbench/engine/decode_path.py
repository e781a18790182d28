"""The interface of a decode path, which reads the tokens of an answer."""

from typing import Protocol

from torch import Tensor


class DecodePath(Protocol):
    """Reads the tokens of an answer one by one into a context."""

    @property
    def is_over(self) -> bool:
        """Whether this path cannot read another token, so that another path must."""

    def step(self) -> tuple[Tensor, float]:
        """Read the token that was generated last and generate the next one.

        Returns:
            The next token, (B,) on the CPU, and the seconds since the answer began, without the time that capturing a
            graph took.
        """

    def close(self) -> None:
        """Leave the context as if the model's modules had read the tokens that were generated.

        If nobody needs the rows of these tokens (`Answer.keeps_rows`), the context may only count them.
        """
