"""What tests of decode paths do to an answer that is under way, whatever rows it reads."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from tests.support.answer_paths import assert_same
from tests.support.tiny_models import ids


def answer_both(contexts: tuple[GenerationContext, GenerationContext], end: int, read_last: bool) -> None:
    """Let two contexts answer until a token that both generate first behind `end` others, and compare the answers."""
    with contexts[0].branch():
        free = torch.stack(list(contexts[0].generate(40, Sampling(), frozenset()))).flatten().tolist()
    stop = next(iter(token for token in free[end:] if token not in free[:end]))
    answers = [list(context.generate(40, Sampling(), frozenset([stop]), read_last)) for context in contexts]
    assert torch.equal(*map(torch.stack, answers))


def assert_nothing_follows_the_end(modules: GenerationContext, step: GenerationContext, end: int, read: bool) -> None:
    """What a graph decoded beyond the end of an answer is as if it never was. Arguments as of `answer_both`."""
    answer_both((modules, step), end, read)
    assert step.decoding == "graph"
    assert_same(modules, step)
    assert torch.allclose(modules.logits, step.logits, atol=1e-5)
    again = [list(context.generate(12, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, again))


def answer_with_interruptions(context: GenerationContext, first: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Read three tokens after `first` tokens of an answer for `batch` samples, and answer aside after four more.

    Returns:
        All generated tokens, and the logits of the three.
    """
    answer = context.generate(40, Sampling(), frozenset())
    tokens = [next(answer) for _ in range(first)]
    logits = context.extend(ids(3, 9).repeat(batch, 1))
    tokens += [next(answer) for _ in range(4)]
    with context.branch():
        aside = list(context.generate(12, Sampling(), frozenset()))
    return torch.stack(tokens + aside + list(answer)), logits


def assert_freed_at_once(make: Callable[[], GenerationContext]) -> None:
    """A context that has answered is freed when it is dropped, and not when Python next looks for cycles."""
    context = make()
    with context.branch():
        list(context.generate(20, Sampling(), frozenset()))
    layer = weakref.ref(context.own_layers[0])
    gc.disable()
    try:
        del context
        assert layer() is None
    finally:
        gc.enable()
