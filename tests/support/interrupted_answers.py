"""What tests of decode paths do to an answer that is under way, whatever rows it reads."""

from contextlib import closing

import torch
from torch import Tensor

from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from tests.support.tiny_models import ids


def answer_both(contexts: tuple[GenerationContext, GenerationContext], end: int, read_last: bool) -> None:
    """Let two contexts answer until a token that both generate first behind `end` others, and compare the answers."""
    free: list[int] = []
    with contexts[0].branch(), closing(contexts[0].generate(end + 12, Sampling(), frozenset())) as answer:
        while len(free) <= end or free[-1] in free[:end]:
            free.append(int(next(answer)))
    stop = free[-1]
    answers = [list(context.generate(40, Sampling(), frozenset([stop]), read_last)) for context in contexts]
    assert torch.equal(*map(torch.stack, answers))


def answer_with_interruptions(context: GenerationContext, first: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Read three tokens after `first` tokens of an answer for `batch` samples, and answer aside after four more.

    Returns:
        All generated tokens, and the logits of the three.
    """
    answer = context.generate(first + 10, Sampling(), frozenset())
    tokens = [next(answer) for _ in range(first)]
    logits = context.extend(ids(3, 9).repeat(batch, 1))
    tokens += [next(answer) for _ in range(4)]
    with context.branch():
        aside = list(context.generate(9, Sampling(), frozenset()))
    return torch.stack(tokens + aside + list(answer)), logits
