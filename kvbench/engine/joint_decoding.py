"""Decode answers of several contexts as one batch, which reads the model's weights once per step for all of them.

A step computes the layers' linear parts for all samples together. Contexts whose rows only grow append and attend to
them together too (`JoinedGrowingRows`). So do contexts whose method, the same for all, cuts at every token
(`JoinedReplacedRows`). Any other context appends to and attends to its own rows (`StepRows`), as it would alone. The
contexts need not hold equally many rows, and their answers end on their own.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.generation import Answer, GenerationContext, PlannedRows, count_read, make_rows, plan_rows
from kvbench.engine.graph_decoding import GraphDecoder, GrowingRows, Norms, StepRows, read_token
from kvbench.engine.joined_growing_rows import JoinedGrowingRows
from kvbench.engine.joined_replaced_rows import JoinedReplacedRows, find_shared_kind
from kvbench.engine.replaced_rows import ReplacedRows
from kvbench.engine.sampling import GivenTokens
from kvbench.engine.spending import spend
from kvbench.engine.streams import STREAMS, join_after, make_streams
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
    each must forget its answer (`PromptContext.branch`) or read all tokens that it may (`read_given`): the batch goes
    on until the longest answer ends, and what a shorter one then leaves, apart from its counts, may be what further
    tokens left.

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
            # what answers follow comes first, then the shortest: the others are not ready to join yet
            first = sorted(waiting.values(), key=lambda answer: (not answer.keeps_rows, answer.left))
            joined = join_answers(first) or first[:1]
            members = {number: own for number, own in waiting.items() if own in joined}
            while running := [number for number, answer in members.items() if not answer.is_over]:
                for number in running:
                    members[number].step()
                    go_on(number)
                    if members[number].is_over:
                        leave(members[number])
            for number in sorted(
                members.keys() & waiting.keys()
            ):  # no step of the others changes their contexts any more
                for handed in waiting[number].context.watched:
                    handed.renew()
                go_on(number)
    return [results[number] for number in range(len(begun))]


def leave(answer: Answer) -> None:
    """Let the answers that were joined with this one go on without it, because it is over."""
    if isinstance(answer.path, JointPath):
        answer.path.decoder.rows.running.discard(answer.path.number)


def join_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Let answers read their tokens as one batch, as far as possible. Returns those that will; none is one alone.

    An answer stays out if modules must read its tokens, if a graph cannot read all of them or needs to cut rows after
    some of them, if it has another length than the first one, if only one of both has given tokens, or if it would
    append to memory that another one uses.
    """
    parts: list[tuple[Answer, PlannedRows]] = []
    used: set[int] = set()
    for answer in answers:
        like, context = parts[0][0] if parts else answer, answer.context
        if answer.is_over or answer.path is not None:
            continue
        if answer.left != like.left or context.model is not like.context.model:
            continue
        if answer.draws.dtype != like.draws.dtype:  # tokens that are given, and tokens that are chosen
            continue
        planned, memory = plan_rows(context, answer.left, WORTH_TOGETHER), list_memory(context)
        if planned is None or planned.cut or planned.tokens < answer.left or used & memory:
            continue
        used |= memory
        parts.append((answer, planned))
    if len(parts) > 1:
        with spend("capturing"):
            JointDecoder(parts)
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


def find_kind(rows: StepRows) -> object | None:
    """Return what is equal for contexts whose rows share their kernel calls, or None for rows that share none."""
    if type(rows) is GrowingRows:
        return GrowingRows
    return find_shared_kind(rows) if type(rows) is ReplacedRows else None


def group_alike(rows: Sequence[StepRows]) -> list[list[int]]:
    """Return the numbers of the contexts whose rows share their kernel calls, group by group."""
    groups: list[list[int]] = []
    kinds: list[object | None] = []  # of each group
    for number, kind in enumerate(map(find_kind, rows)):
        if kind is not None and kind in kinds:
            groups[kinds.index(kind)].append(number)
        else:
            groups.append([number])
            kinds.append(kind)
    return groups


def join_alike(parts: Sequence[StepRows]) -> StepRows:
    """Join the rows of one group of `group_alike`."""
    if len(parts) == 1:
        return parts[0]
    growing = [part for part in parts if isinstance(part, GrowingRows)]
    return JoinedGrowingRows(growing) if growing else JoinedReplacedRows(cast(Sequence[ReplacedRows], parts))


class JoinedRows(StepRows):
    """The rows of several contexts, each for its own samples of a batch."""

    def __init__(
        self, parts: Sequence[StepRows], sizes: Sequence[int], groups: Sequence[int], device: torch.device
    ) -> None:
        """Join rows that are never cut (`StepRows.cuts`) and have read none of their tokens.

        Args:
            parts: The rows of each context.
            sizes: Number of its samples.
            groups: How many contexts after each other share their kernel calls (`group_alike`), in order.
            device: Where they are.
        """
        self.parts, self.sizes = parts, list(sizes)
        self.kept = set(range(len(parts)))  # numbers of the contexts that get rows while answers go on
        self.running = set(self.kept)  # numbers of the contexts whose answers are not over
        self.pieces, self.piece_sizes, begin = [], [], 0  # what reads tokens, and its samples
        for count in groups:
            self.pieces.append(join_alike(parts[begin : begin + count]))
            self.piece_sizes.append(sum(sizes[begin : begin + count]))
            begin += count
        for number, piece in enumerate(self.pieces):
            piece.use_lane(number % STREAMS)
        self.streams = make_streams(device)[: min(STREAMS, len(self.pieces)) - 1] if device.type == "cuda" else []

    def cuts(self, number: int) -> bool:
        return False

    def reader(self, cuts: bool) -> Callable[[int, Sequence[Tensor], Norms], Tensor]:
        readers = [piece.reader(False) for piece in self.pieces]

        def attend(index: int, projected: Sequence[Tensor], norms: Norms) -> Tensor:
            own = zip(*(part.split(self.piece_sizes) for part in projected), strict=True)
            return self.side_by_side(
                [partial(reader, index, three, norms) for reader, three in zip(readers, own, strict=True)]
            )

        return attend

    def side_by_side(self, work: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Do all work on several streams, and return the results one after the other along the batch."""
        if len(work) == 1:
            return work[0]()
        if not self.streams:
            return torch.cat([own() for own in work])
        here = torch.cuda.current_stream()
        every = [here, *self.streams]
        for other in self.streams:
            other.wait_stream(here)
        results = []

        def join() -> None:
            for other in self.streams:
                here.wait_stream(other)

        with join_after(join):
            for number, own in enumerate(work):
                with torch.cuda.stream(every[number % len(every)]):
                    results.append(own())
        return torch.cat(results)

    def prepare(self) -> None:
        for piece in self.pieces:
            piece.prepare()

    def settle(self) -> None:
        for piece in self.pieces:
            piece.settle()

    def advance(self, cuts: bool) -> None:
        for piece in self.pieces:
            piece.advance(False)

    def pack_due(self, number: int) -> None:
        for piece in self.pieces:
            piece.pack_due(number)

    def marked(self, tokens: Tensor) -> Tensor:
        own = zip(self.pieces, tokens.split(self.piece_sizes), strict=True)
        return torch.cat([piece.marked(some) for piece, some in own])

    def check(self) -> None:
        for number in sorted(self.running):
            self.parts[number].check()

    def back(self, step: int) -> int:
        """Return to the state after `step` tokens, before the first answer is over."""
        for piece in self.pieces:
            piece.back(step)
        return step

    def keep(self, read: int) -> None:
        """Give the layers of the contexts in `kept` whose answers are not over the first `read` tokens."""
        for number in self.running & self.kept:
            self.parts[number].keep(read)


class JointDecoder:
    """Decodes the answers of several contexts as one batch."""

    @without_gradients
    def __init__(self, parts: Sequence[tuple[Answer, PlannedRows]]) -> None:
        """Capture the graph, if the device is a GPU, and become the path of each answer.

        Args:
            parts: Answers that are equally long at most, and rows that serve all their tokens without cuts.
        """
        first, planned = parts[0]
        weights, device = first.context.weights, first.context.last_logits.device
        assert weights is not None  # `plan_rows`
        begin, tokens = now(device.type), planned.tokens
        made = [make_rows(answer.context, own) for answer, own in parts]
        groups = group_alike(made)
        order = list(chain(*groups))
        answers = [parts[number][0] for number in order]
        sizes = [len(answer.token) for answer in answers]
        self.weights = weights
        self.rows = JoinedRows([made[number] for number in order], sizes, [len(group) for group in groups], device)
        self.rows.kept -= {number for number, answer in enumerate(answers) if not answer.keeps_rows}
        samplings = [answer.sampling for answer in answers]
        alike = all(own == samplings[0] for own in samplings)

        def pick(logits: Tensor, draws: Tensor) -> Tensor:
            if alike:
                return samplings[0].pick(logits, draws)
            own = zip(samplings, logits.split(sizes), draws.split(sizes), strict=True)
            return torch.cat([sampling.pick(some, numbers) for sampling, some, numbers in own])

        self.decoder = GraphDecoder(
            weights, self.rows, torch.cat([answer.token for answer in answers]).to(device), tokens, pick,
            torch.cat([answer.left_draws[:, :tokens] for answer in answers]),
        )  # fmt: skip
        self.history: list[tuple[Sequence[Tensor], float]] = []  # tokens of each answer, seconds since the first step
        spent = 1000 * (now(device.type) - begin) / len(parts)
        for number, answer in enumerate(answers):
            answer.path = answer.context.path = JointPath(self, number, answer)
            answer.context.capture_ms += spent
            answer.context.decoded_together = len(parts)

    def take(self, number: int, read: int) -> tuple[Tensor, float]:
        """Return token `read` of an answer, counted from 0, and the seconds since the first step began."""
        while len(self.history) <= read:
            tokens, elapsed = self.decoder.next()
            self.history.append((tokens.split(self.rows.sizes), elapsed))
        own, elapsed = self.history[read]
        return own[number], elapsed

    @without_gradients
    def close(self, number: int, read: int) -> Tensor | None:
        """Give the layers of a context the first `read` tokens. If it will forget them, the layers only count them.

        No answer may read further tokens.

        Args:
            number: The number of the answer.
            read: How many tokens of it were read and returned.

        Returns:
            The logits of the last one, (B, vocab), or None if they are lost.
        """
        part, done = self.rows.parts[number], self.decoder.read + len(self.decoder.ahead)
        logits: Tensor | None = None
        if number not in self.rows.kept:
            part.forget(read)
            return None
        if read == done:
            logits = self.decoder.logits.split(self.rows.sizes)[number].clone()
        else:  # the other answers were longer
            tokens = self.decoder.tokens.split(self.rows.sizes)[number]
            for step in range(part.back(read), read):
                logits = read_token(self.weights, part, tokens[:, step], False, None)
                part.advance(False)
        part.finish(read)
        return logits


class JointPath:
    """Reads the tokens of one of several answers that are decoded together."""

    def __init__(self, decoder: JointDecoder, number: int, answer: Answer) -> None:
        self.decoder, self.number, self.context = decoder, number, answer.context
        self.began, self.read, self.tokens = answer.context.stamps[-1], 0, answer.left

    @property
    def is_over(self) -> bool:
        return self.read == self.tokens

    def step(self) -> tuple[Tensor, float]:
        token, elapsed = self.decoder.take(self.number, self.read)
        self.read += 1
        return token, self.began + elapsed

    def close(self) -> None:
        logits = self.decoder.close(self.number, self.read)
        count_read(self.context, self.read, logits)
