"""Read the tokens of answers by replaying one CUDA graph of the whole step, which reads the model's weights once.

The answers of several contexts are decoded as one batch, and a lone answer is a batch of one. The contexts need not
hold equally many rows, and their answers end on their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.answer_quotas import AnswerQuotas
from kvbench.engine.batch_rows import BatchRows, group_alike
from kvbench.engine.context import PromptContext
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.graph_decoding import GraphDecoder, StepRows
from kvbench.engine.ring_rows import make_rings
from kvbench.engine.sampling import TokenChooser
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
    def left(self) -> int:
        """The number of tokens that may have to be read."""

    @property
    def left_draws(self) -> Tensor:
        """Random numbers for the tokens that may follow, (B, number of tokens)."""


@dataclass(frozen=True)
class PlannedRows:
    """Rows that a graph can read tokens into.

    Attributes:
        make: Makes them for answers of one kind: (weights, layers of each answer, tokens, implementation=), and
            `plans=` if the answers have a plan.
        tokens: Number of tokens that they serve.
        cut: Whether they are cut after some of these tokens, which needs a graph of its own.
        kind: What is equal for answers that share their kernel calls; None if this one shares none.
        plan: The quotas of the answer, if a row leaves for every token.
    """

    make: Callable[..., Sequence[StepRows]]
    tokens: int
    cut: bool = False
    kind: object | None = None
    plan: AnswerQuotas | None = None


def make_rows(
    contexts: Sequence[PromptContext], planned: Sequence[PlannedRows], implementation: str | None = None
) -> list[StepRows]:
    """Make the planned rows of answers of one kind, and those of their layers with a sliding window.

    Args:
        contexts: The contexts of the answers. There is one if some layers have a window.
        planned: The rows of each.
        implementation: Name of the kernels' implementation; None chooses one.
    """
    (first, *_), weights, windows = planned, contexts[0].weights, contexts[0].sliding_layers()
    assert weights is not None  # `plan_rows`
    for context in contexts:
        context.set_progress(decoding=True)
        context.decoding = "graph"
    plans = [rows.plan for rows in planned if rows.plan is not None]
    layers, more = [context.own_layers for context in contexts], {"plans": plans} if plans else {}
    rows = first.make(weights, layers, first.tokens, implementation=implementation, **more)
    return [*make_rings(weights, windows, first.tokens, implementation=implementation), *rows]


class AnswerBatch:
    """Answers that are decoded as one batch."""

    @without_gradients
    def __init__(self, parts: Sequence[tuple[DecodedAnswer, PlannedRows]], begin: float) -> None:
        """Capture the graph, if the device is a GPU, and become the path of each answer.

        Args:
            parts: Answers, and rows that serve equally many tokens of each. Rows of several are never cut.
            begin: When planning began (`kvbench.engine.timing.now`). It counts as capturing.
        """
        planned = parts[0][1]
        weights = parts[0][0].context.weights
        assert weights is not None  # a context without them has no planned rows
        device = weights.head.device
        self.tokens = planned.tokens
        groups = [[parts[number] for number in group] for group in group_alike([rows.kind for _, rows in parts])]
        answers = [answer for group in groups for answer, _ in group]
        self.sizes = sizes = [len(answer.token) for answer in answers]
        # another path reads the tokens that the graph cannot read, and needs the rows of those before
        self.forgotten = {n for n, answer in enumerate(answers) if not answer.keeps_rows and answer.left == self.tokens}
        self.rows = BatchRows(
            [make_rows([answer.context for answer, _ in group], [rows for _, rows in group]) for group in groups],
            [[len(answer.token) for answer, _ in group] for group in groups],
            device,
            keeps=len(parts) == 1 and not self.forgotten,
        )
        samplings = [answer.sampling for answer in answers]
        alike = all(sampling == samplings[0] for sampling in samplings)

        def pick(logits: Tensor, draws: Tensor) -> Tensor:
            if alike:
                return samplings[0].pick(logits, draws)
            split = zip(samplings, logits.split(sizes), draws.split(sizes), strict=True)
            return torch.cat([sampling.pick(some, numbers) for sampling, some, numbers in split])

        self.decoder = GraphDecoder(
            weights,
            self.rows,
            torch.cat([answer.token for answer in answers]).to(device),
            self.tokens,
            pick,
            torch.cat([answer.left_draws[:, : self.tokens] for answer in answers]),
        )
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
        per_answer, elapsed = self.history[read]
        return per_answer[number], elapsed

    def leave(self, number: int) -> None:
        """Let the other answers go on without one that is over."""
        self.rows.running.discard(number)

    @without_gradients
    def close(self, number: int, read: int) -> tuple[int, Tensor | None]:
        """Give the layers of a context the first `read` tokens. If it will forget them, the layers only count them.

        No answer may read further tokens. The layers get none if an error ended the other answers before this one,
        whose rows are needed, had read all of its tokens.

        Args:
            number: The number of the answer.
            read: How many tokens of it were read and returned.

        Returns:
            How many tokens the layers got, and the logits of the last one, (B, vocab), or None if they are lost.
        """
        if number in self.forgotten:
            self.rows.forget(read, number)
            return read, None
        if len(self.sizes) == 1:  # keep all tokens read, also one that raised an error
            return self.decoder.read, self.decoder.close()
        if read < self.tokens:
            return 0, None
        self.rows.finish(read, number)
        return read, self.decoder.logits.split(self.sizes)[number].clone()


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
