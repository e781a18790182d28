"""How the next token of an answer is chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.validation import check_sampling


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: greedy at temperature 0, else from the smallest set of tokens with probability `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """(B, tokens) numbers in [0, 1) behind the first `after`, those of a sample by its own seed, so that none
        depends on its neighbours.
        """
        own = [torch.rand(after + tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(own)[:, after:]

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """(B,) token ids from logits (B, vocab): where draws (B,) fall in the cumulative probabilities, largest
        first.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.float() / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
        upto = ordered.cumsum(-1)
        before = (upto <= draws[:, None] * upto[:, -1:]).sum(-1, keepdim=True)
        last = (ordered > 0).sum(-1, keepdim=True) - 1  # rounding may let the product reach the sum
        return tokens.gather(-1, before.minimum(last)).squeeze(-1)
