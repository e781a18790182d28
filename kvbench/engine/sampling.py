"""Choose the next token of an answer."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.validation import check_sampling

NOT_FINITE = -2  # stands for a token that was chosen from logits that are not finite


def mark_tokens(tokens: Tensor, logits: Tensor) -> Tensor:
    """Mark the tokens that were chosen from logits that are not finite. The host need not wait for the device.

    Args:
        tokens: Token ids, (B,).
        logits: What they were chosen from, (B, vocab).

    Returns:
        The tokens, and `NOT_FINITE` in place of those.
    """
    low, high = logits.aminmax(dim=-1)  # one pass, which hands NaN on
    return tokens.where((low.float() - high.float()).isfinite(), NOT_FINITE)


class TokenChooser(Protocol):
    """Chooses the tokens of an answer. `Sampling` does, and so does whatever reads an answer that is given."""

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """Return a number for each of `tokens` tokens, (B, tokens), of which `after` tokens were chosen before."""

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Choose a token per sample, (B,), from logits (B, vocab) and one of its numbers, (B,)."""


@dataclass(frozen=True)
class GivenTokens:
    """A `TokenChooser` that picks given tokens. All compare equal: the ids come in place of the random numbers."""

    ids: Tensor = field(compare=False)
    """The tokens, (B, n)."""

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """Return the token ids, (B, tokens); zeros behind the last of `ids` are not used."""
        return pad(self.ids.cpu(), (0, tokens - self.ids.shape[1]))

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Return the token ids of one step, (B,)."""
        return draws


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Raises:
        SettingError: The temperature is negative, or `top_p` is not in (0, 1].
    """

    temperature: float = 0.0
    """0 always chooses the most probable token."""
    top_p: float = 1.0
    """A token is drawn from the smallest set of tokens with at least this probability."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """Return random numbers in [0, 1), (B, tokens).

        Args:
            seeds: One seed per sample, so that no sample depends on the others of its batch.
            tokens: Number of tokens to choose.
            after: Number of tokens chosen before; their random numbers are skipped.
        """
        numbers = [torch.rand(after + tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(numbers)[:, after:]

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Choose a token per sample: the one whose interval of the cumulative probability contains the draw.

        The most probable token comes first.

        Args:
            logits: (B, vocab)
            draws: Random numbers in [0, 1), (B,).

        Returns:
            Token ids, (B,).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.float() / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
        upto = ordered.cumsum(-1)
        before = (upto <= draws[:, None] * upto[:, -1:]).sum(-1, keepdim=True)
        last = (ordered > 0).sum(-1, keepdim=True) - 1  # rounding may let the product reach the sum
        return tokens.gather(-1, before.minimum(last)).squeeze(-1)
