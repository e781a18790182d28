"""Reading further tokens in branches and behind them."""

from collections.abc import Callable

import torch

from kvbench.cache.policy import CachePolicy
from kvbench.engine.compressed_cache import CompressedCache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from tests.support.tiny_models import ids


def check_after_branches(held: CompressedCache, check: Callable[[int], None]) -> None:
    """Check what a method remembers: after 118 tokens, after further ones, and after branches, which leave no trace.

    Args:
        held: The cache of a tiny model that has read 118 tokens.
        check: Gets the number of tokens read.
    """
    check(118)
    with held.branch():
        first = held.extend(ids(12, seed=1))
        check(130)
    check(118)
    with held.branch():
        assert torch.equal(held.extend(ids(12, seed=1)), first)
    held.extend(ids(1))
    check(119)


def read_on_in_branches(
    model: torch.nn.Module, choice: CachePolicy, samples: slice
) -> tuple[GenerationContext, torch.Tensor]:
    """Read some of two prompts of 60 tokens, and twice 8 further tokens in a branch, which leaves no trace.

    Returns the context and the logits of the further tokens, (B, 8, vocab).
    """
    prompts, more = ids(60, batch=2)[samples], ids(8, seed=1, batch=2)[samples]
    context = GenerationContext(model, choice, Budget(1.0), None, (0,) * len(prompts))
    context.prefill(prompts)
    before, answers = str(context.bytes()), []
    for _ in range(2):
        with context.branch():
            answers.append(torch.cat([context.extend(token) for token in more.split(1, dim=1)], 1))
        assert str(context.bytes()) == before
    assert torch.equal(*answers)
    return context, answers[0]
