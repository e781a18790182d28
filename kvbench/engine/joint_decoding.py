"""Decode answers of several contexts as one batch.

Work that needs tokens is a session: it yields its answer, and whoever runs the sessions lets those answers take their
steps together that one graph can read (`kvbench.engine.graph_path`).
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kvbench.engine.generation import Answer, GenerationContext, plan_rows
from kvbench.engine.graph_path import AnswerBatch, GraphPath, PlannedRows
from kvbench.engine.sampling import GivenTokens
from kvbench.engine.spending import spend
from kvbench.engine.timing import now

WORTH_TOGETHER = 2  # a graph of several answers is captured for this many tokens or more
T = TypeVar("T")
Session = Generator[Answer, None, T]
"""Work that yields an answer when it needs the next token, and once more when the answer is over (`Answer.end`).

Who runs it calls `Answer.step` and continues it.
"""


def finish_answer(answer: Answer, goes_on: Callable[[Tensor], bool]) -> Session[None]:
    """Generate an answer up to its end, or up to the first token for which `goes_on` is false, and close it.

    Args:
        answer: The answer, which has its first token.
        goes_on: Gets each token of the answer, (B,).
    """
    with closing(answer):
        while True:
            if not goes_on(answer.token):
                answer.end()
            ended = answer.is_over
            yield answer
            if ended:
                return


@dataclass(frozen=True)
class Reading:
    """What it cost to read given tokens."""

    milliseconds: float = 0.0
    """Without the time that capturing a graph took."""
    capture_ms: float = 0.0
    """That time."""
    together: int = 1
    """Number of contexts that read such tokens as one batch. Above 1, the time is that of all."""


def read_given(context: GenerationContext, ids: Tensor) -> Session[Reading]:
    """Read given tokens one by one, as those of an answer, so that a graph can read them and others beside them.

    Args:
        context: The context, which keeps them.
        ids: Token ids, (B, n).

    Returns:
        A session with what it cost.
    """
    drawn = context.drawn
    yield from finish_answer(
        Answer(context, ids.shape[1], GivenTokens(ids), frozenset(), read_last=True, keeps_rows=True), lambda _: True
    )
    context.drawn = drawn  # none of them was drawn
    return Reading(1000 * context.stamps[-1], context.capture_ms, context.decoded_together)


def read_on(context: GenerationContext, ids: Tensor) -> Session[Reading]:
    """Read known tokens that follow, (B, n), and say in the end what it cost.

    They are read as one block, or on a GPU like those of an answer if they must be read one by one (`read_given`).
    """
    if context.choice.token_by_token and context.weights is not None:
        return (yield from read_given(context, ids))
    with spend("reading"):
        begin = now(context.device)
        context.extend(ids)
        return Reading(1000 * (now(context.device) - begin))


@spend("answering")
def run_alone(session: Session[T]) -> T:
    """Run a session whose answers are decoded alone, and return its result."""
    with closing(session):
        while True:
            try:
                answer = next(session)
            except StopIteration as end:
                return end.value
            if not answer.is_over:
                answer.step()


@spend("answering")
def run_together(sessions: Iterable[Session[T]]) -> list[T]:
    """Run sessions side by side and decode their answers together where possible. Returns their results.

    A session begins before the next one is asked for. No two may append to the same memory (`separate_memory`), and
    each that is decoded with others forgets its answer (`PromptContext.branch`) or reads all tokens that it may
    (`read_given`): the batch goes on until the longest answer ends, and only counts what a shorter one has read.

    If one of them raises an error, all of them are ended.

    Contexts may have read memory that another one appends to. A write there does not mean that a hook kept a reference,
    so such hooks are found only where answers are decoded alone.
    """
    begun: list[Session[T]] = []
    results: dict[int, T] = {}
    waiting: dict[int, Answer] = {}

    def go_on(number: int) -> None:
        waiting.pop(number, None)
        try:
            waiting[number] = next(begun[number])
        except StopIteration as end:
            results[number] = end.value

    with ExitStack() as stack:
        for number, session in enumerate(sessions):
            begun.append(stack.enter_context(closing(session)))
            go_on(number)
        while waiting:
            # answers that others follow come first, then the shortest: the others are not ready to join yet
            first = sorted(waiting.values(), key=lambda answer: (not answer.keeps_rows, answer.left))
            joined = join_answers(first) or first[:1]
            members = {number: answer for number, answer in waiting.items() if answer in joined}
            while running := [number for number, answer in members.items() if not answer.is_over]:
                for number in running:
                    members[number].step()
                    go_on(number)
                    if members[number].is_over:
                        leave(members[number])
            # no step of the others changes the contexts of these any more
            for number in sorted(members.keys() & waiting.keys()):
                for handed in waiting[number].context.watched:
                    handed.renew()
                go_on(number)
    return [results[number] for number in range(len(begun))]


def leave(answer: Answer) -> None:
    """Let the answers that were joined with this one go on without it, because it is over."""
    if isinstance(answer.path, GraphPath):
        answer.path.batch.leave(answer.path.number)


def join_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Let answers read their tokens as one batch, as far as possible. Returns those that will; none is one alone.

    An answer stays out if modules must read its tokens, if a graph cannot read all of them or needs to cut rows after
    some of them, if it has another length than the first one, if only one of both has given tokens, if its tokens are
    chosen and its rows are needed, or if it would append to memory that another one uses.
    """
    parts: list[tuple[Answer, PlannedRows]] = []
    used: set[int] = set()
    begin = now(answers[0].context.device)
    for answer in answers:
        like, context = parts[0][0] if parts else answer, answer.context
        if answer.is_over or answer.path is not None:
            continue
        if answer.left != like.left or context.model is not like.context.model:
            continue
        if answer.draws.dtype != like.draws.dtype:  # tokens that are given, and tokens that are chosen
            continue
        if answer.keeps_rows and answer.draws.is_floating_point():  # it may end early, and its rows are needed then
            continue
        planned, memory = plan_rows(context, answer.left, WORTH_TOGETHER), list_memory(context)
        if planned is None or planned.cut or planned.tokens < answer.left or used & memory:
            continue
        used |= memory
        parts.append((answer, planned))
    if len(parts) > 1:
        with spend("capturing"):
            AnswerBatch(parts, begin)
    return [answer for answer, _ in parts] if len(parts) > 1 else []


def separate_memory(context: GenerationContext, used: set[int]) -> None:
    """Let a context append to memory of its own, before it and others read on side by side.

    Contexts that read a prompt together and have cut nothing share its rows and the room behind them.

    Args:
        context: The context.
        used: What the other contexts append to (`list_memory`). This context's is added.
    """
    if used & list_memory(context):
        for layer in context.own_layers:
            layer.copy_tail()
    used |= list_memory(context)


def list_memory(context: GenerationContext) -> set[int]:
    """Return the addresses of the memory that a context's layers append to."""
    tails = [layer.rows.tail_keys for layer in context.own_layers]
    return {tail.untyped_storage().data_ptr() for tail in tails if tail is not None and tail.numel()}
