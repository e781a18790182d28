"""Read the tokens of answers by replaying one CUDA graph of the whole step, which reads the model's weights once.

The answers of several contexts are decoded as one batch, and a lone answer is a batch of one. The contexts need not
hold equally many rows, and their answers end on their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.context import PromptContext
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.graph_decoding import GraphDecoder, StepRows, read_token
from kvbench.engine.joined_rows import JoinedRows, group_alike
from kvbench.engine.sampling import TokenChooser
from kvbench.engine.sliding_rows import add_windows
from kvbench.engine.timing import now


class DecodedAnswer(Protocol):
    """What a batch must know of an answer (`kvbench.engine.generation.Answer`)."""

    token: Tensor
    """The last token, (B,) on the CPU."""
    sampling: TokenChooser
    keeps_rows: bool
    path: DecodePath | None

    @property
    def context(self) -> PromptContext:
        """The context that its tokens are read into."""

    @property
    def left_draws(self) -> Tensor:
        """Random numbers for the tokens that may follow, (B, number of tokens)."""


@dataclass(frozen=True)
class PlannedRows:
    """Rows that a graph can read tokens into.

    Attributes:
        make: Makes them: (weights, layers, tokens, seen=).
        tokens: Number of tokens that they serve.
        cut: Whether they are cut after some of these tokens, which needs a graph of its own.
    """

    make: Callable[..., StepRows]
    tokens: int
    cut: bool = False


def make_rows(context: PromptContext, planned: PlannedRows) -> StepRows:
    """Make planned rows, and the windows of layers that have one beside them."""
    assert context.weights is not None  # `plan_rows`
    context.set_progress(decoding=True)
    context.decoding = "graph"
    rows = planned.make(context.weights, context.own_layers, planned.tokens, seen=context.seen)
    return add_windows(context.weights, context.sliding_layers(), rows, planned.tokens, context.seen)


class AnswerBatch:
    """Answers that are decoded as one batch."""

    @without_gradients
    def __init__(self, parts: Sequence[tuple[DecodedAnswer, PlannedRows]], begin: float) -> None:
        """Capture the graph, if the device is a GPU, and become the path of each answer.

        Args:
            parts: Answers, and rows that serve equally many tokens of each. Rows of several are never cut.
            begin: When planning began (`kvbench.engine.timing.now`). It counts as capturing.
        """
        first, planned = parts[0]
        weights = first.context.weights
        assert weights is not None  # a context without them has no planned rows
        device = weights.head.device
        self.tokens = planned.tokens
        made = [make_rows(answer.context, own) for answer, own in parts]
        groups = group_alike(made)
        order = list(chain(*groups))
        answers, self.parts = [parts[number][0] for number in order], [made[number] for number in order]
        self.sizes = sizes = [len(answer.token) for answer in answers]
        self.weights, self.forgotten = weights, set[int]()
        rows = self.parts[0]
        if len(parts) > 1:
            rows = JoinedRows(self.parts, self.sizes, [len(group) for group in groups], device)
            self.forgotten = {number for number, answer in enumerate(answers) if not answer.keeps_rows}
            rows.kept -= self.forgotten
        self.rows = rows
        samplings = [answer.sampling for answer in answers]
        alike = all(own == samplings[0] for own in samplings)

        def pick(logits: Tensor, draws: Tensor) -> Tensor:
            if alike:
                return samplings[0].pick(logits, draws)
            own = zip(samplings, logits.split(sizes), draws.split(sizes), strict=True)
            return torch.cat([sampling.pick(some, numbers) for sampling, some, numbers in own])

        self.decoder = GraphDecoder(
            weights, rows, torch.cat([answer.token for answer in answers]).to(device), self.tokens, pick,
            torch.cat([answer.left_draws[:, : self.tokens] for answer in answers]),
        )  # fmt: skip
        self.history: list[tuple[Sequence[Tensor], float]] = []  # tokens of each answer, seconds since the first step
        spent = 1000 * (now(device.type) - begin) / len(parts)
        for number, answer in enumerate(answers):
            answer.path = answer.context.path = GraphPath(self, number, answer)
            answer.context.capture_ms += spent
            answer.context.decoded_together = len(parts)

    def take(self, number: int, read: int) -> tuple[Tensor, float]:
        """Return token `read` of an answer, counted from 0, and the seconds since the first step began."""
        while len(self.history) <= read:
            tokens, elapsed = self.decoder.next()
            self.history.append((tokens.split(self.sizes), elapsed))
        own, elapsed = self.history[read]
        return own[number], elapsed

    def leave(self, number: int) -> None:
        """Let the other answers go on without one that is over."""
        if isinstance(self.rows, JoinedRows):
            self.rows.running.discard(number)

    @without_gradients
    def close(self, number: int, read: int) -> tuple[int, Tensor | None]:
        """Give the layers of a context the first `read` tokens. If it will forget them, the layers only count them.

        No answer may read further tokens.

        Args:
            number: The number of the answer.
            read: How many tokens of it were read and returned.

        Returns:
            How many tokens the layers got, and the logits of the last one, (B, vocab), or None if they are lost.
        """
        if len(self.parts) == 1:  # the graph can read again what counts, a token that raised an error included
            return self.decoder.read, self.decoder.close()
        part, done = self.parts[number], self.decoder.read + len(self.decoder.ahead)
        logits: Tensor | None = None
        if number in self.forgotten:
            part.forget(read)
            return read, None
        if read == done:
            logits = self.decoder.logits.split(self.sizes)[number].clone()
        else:  # the other answers were longer
            tokens = self.decoder.tokens.split(self.sizes)[number]
            for step in range(part.back(read), read):
                logits = read_token(self.weights, part, tokens[:, step], False, None)
                part.advance(False)
        part.finish(read)
        return read, logits


class GraphPath:
    """Reads the tokens of one answer of a batch. The context counts them when the path is closed."""

    def __init__(self, batch: AnswerBatch, number: int, answer: DecodedAnswer) -> None:
        self.batch, self.number, self.context = batch, number, answer.context
        self.began, self.read = answer.context.stamps[-1], 0

    @property
    def is_over(self) -> bool:
        return self.read == self.batch.tokens

    def step(self) -> tuple[Tensor, float]:
        token, elapsed = self.batch.take(self.number, self.read)
        self.read += 1
        return token, self.began + elapsed

    def close(self) -> None:
        count_read(self.context, *self.batch.close(self.number, self.read))


def count_read(context: PromptContext, read: int, logits: Tensor | None) -> None:
    """Let a context count the tokens that a graph has read, as if the modules had read them.

    Args:
        context: The context. Its layers have the rows.
        read: Number of tokens.
        logits: Logits after the last of them, (B, vocab); None if they are lost.
    """
    if read:  # nothing was read if the first step failed
        context.logits = logits
    context.count_tokens(read)
    context.since_cut += read
    method = context.choice.method
    if method.decoding:
        context.since_cut %= method.decode_interval
        if context.find_decode_quota(context.seen) is not None:  # a cut that evicts nothing counts too
            for layer in context.own_layers:
                layer.count_peak(layer.rows.longest_head - context.since_cut)
