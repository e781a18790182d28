"""Generate tokens after a compressed prompt.

Two paths read the tokens. `ModulePath` runs the model's modules, shows every token to the method, and cuts if the
method cuts while decoding. `GraphPath` replays a CUDA graph of the whole step. It can be used until the next cut, or
across cuts if every cut runs the same operations (`kvbench.engine.quota_rows`).
"""

import math
from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.answer_quotas import AnswerQuotas, find_answer_quotas, replaces_rows
from kvbench.engine.context import ROOM, PromptContext
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.fixed_quota_rows import FixedQuotaRows
from kvbench.engine.graph_decoding import CHUNK, GraphDecoder, GrowingRows, StepRows, only_appends
from kvbench.engine.packed_rows import PackedRows
from kvbench.engine.quota_rows import capture_states, is_at_quota, repeats_cuts
from kvbench.engine.read_rows import ReadRows, make_reader, reads_in_graph
from kvbench.engine.replaced_rows import ReplacedRows
from kvbench.engine.sampling import TokenChooser
from kvbench.engine.sliding_rows import add_windows
from kvbench.engine.timing import now
from kvbench.engine.watched_rows import WatchedRows
from kvbench.interfaces.row_reader import RowReader
from kvbench.models.transformers_port import kvbench_attention

WORTH = 8  # a graph is captured for this many tokens or more
WORTH_BETWEEN_CUTS = 32  # the same if the next cut makes the graph useless


class GenerationContext(PromptContext):
    """A batch of prompts of one length in one compressed cache that can generate answers."""

    @without_gradients
    def generate(
        self,
        max_new_tokens: int,
        sampling: TokenChooser,
        stop: frozenset[int],
        read_last: bool = False,
        seeds: tuple[int, ...] | None = None,
        min_new_tokens: int = 0,
    ) -> Generator[Tensor, None, None]:
        """Yield tokens, (B,) each on the CPU, until every sample has a token of `stop` or `max_new_tokens` tokens.

        Args:
            max_new_tokens: Largest number of tokens of a sample.
            sampling: How a token is chosen.
            stop: Token ids that end an answer.
            read_last: Whether the last token is read into the cache too, so that what follows continues the answer.
            seeds: Seeds of the samples; None uses the context's own.
            min_new_tokens: 1 if no answer may begin with a token of `stop`, otherwise 0.
        """
        self.leave_path()
        ended, ends = torch.zeros(len(self.seeds), dtype=torch.bool), torch.tensor(sorted(stop), dtype=torch.int64)
        draws = sampling.draws(seeds or self.seeds, max_new_tokens + 1, 0 if seeds else self.drawn)
        logits = self.last_logits
        draws = draws.to(logits.device)
        for layer in self.own_layers:
            layer.attended.clear()
        self.capture_ms, self.decoding = 0.0, "modules"
        begin = now(self.device)
        if min_new_tokens:
            logits = logits.index_fill(1, ends.to(logits.device), -math.inf)
        token = sampling.pick(logits, draws[:, 0]).cpu()
        path: DecodePath | None = None
        self.stamps = [now(self.device) - begin]
        try:
            for count in range(1, max_new_tokens + 1):
                self.drawn += 1
                yield token
                ended |= torch.isin(token, ends)
                is_last = count == max_new_tokens or bool(ended.all())
                if is_last and not read_last:
                    break
                if path is None or path.is_over or path is not self.path:  # or other tokens were read since
                    self.leave_path()
                    left = max_new_tokens - count + read_last
                    opened = now(self.device)
                    path = self.path = open_path(self, token, left, sampling, draws[:, count:])
                    if isinstance(path, GraphPath):
                        self.capture_ms += 1000 * (now(self.device) - opened)
                token, stamp = path.step()
                self.stamps.append(stamp)
                if is_last:
                    break
        finally:
            if path is self.path:
                self.leave_path()
            self.set_progress(room=ROOM)

    @property
    def last_logits(self) -> Tensor:
        """The logits of the last token read, (B, vocab). A prompt must have been read."""
        assert self.logits is not None
        return self.logits

    @without_gradients
    def reserve(self, tokens: int) -> None:
        """Reserve memory for an answer of `tokens` tokens, or up to its first cut, so that `bytes` counts it."""
        self.leave_path()
        if tokens > 1 and not self.choice.codec.packs:
            for layer in self.own_layers:
                layer.reserve(find_first_cut(self, tokens - 1) or tokens - 1)
        elif tokens > WORTH and self.weights is not None and only_appends(self.choice):
            # the modules would pack every token into new memory
            for layer in self.own_layers:
                layer.reserve_packed(tokens - 1, CHUNK)


def open_path(
    context: GenerationContext, token: Tensor, left: int, sampling: TokenChooser, draws: Tensor
) -> DecodePath:
    """Choose the path that reads the next tokens.

    Args:
        context: The context to read into.
        token: The token that was generated last, (B,).
        left: Number of tokens to read, this one included.
        sampling: How a token is chosen.
        draws: Random numbers for the tokens to generate, (B, left + 1).
    """
    if context.window is not None:  # the modules raise the error at the first token behind it
        left = min(left, context.window - context.seen)
    if context.weights is not None:
        cut_rows = find_cut_rows(context, left)
        if cut_rows is not None:
            return GraphPath(context, cut_rows, token, left, sampling, draws)
        reader = find_reader(context, left)
        if reader is not None:
            return GraphPath(context, partial(ReadRows, reader=reader), token, left, sampling, draws)
        cut = find_first_cut(context, left)
        before_cut = left if cut is None else cut - 1
        if is_worth(before_cut, left):
            growing = find_growing_rows(context)
            if growing is not None:
                return GraphPath(context, growing, token, before_cut, sampling, draws)
        plan = plan_replacing(context, left)
        if plan is not None:
            return GraphPath(context, partial(ReplacedRows, plan=plan), token, plan.tokens, sampling, draws)
    return ModulePath(context, token, left, sampling, draws)


def is_worth(tokens: int, left: int) -> bool:
    """Return whether a graph that reads `tokens` of `left` tokens pays for being captured."""
    return tokens >= (WORTH if tokens == left else WORTH_BETWEEN_CUTS)


def find_growing_rows(context: GenerationContext) -> Callable[..., StepRows] | None:
    """Return what makes rows that only grow until the next cut, or None if the modules must read."""
    choice, method, layers = context.choice, context.choice.method, context.own_layers
    if only_appends(choice):
        return PackedRows if choice.codec.packs else GrowingRows
    shows = method.watches and repeats_cuts(choice) and not method.uses_cache_positions and not method.attends_subset
    cuts = context.find_decode_quota(context.seen + 1) is not None and not replaces_rows(choice)
    if not shows or not cuts or context.weights is None or any(own.rows.stored is not None for own in layers):
        return None
    states = capture_states(context.weights, layers, context.since_cut)
    return None if states is None else partial(WatchedRows, states=states, since=context.since_cut)


def find_first_cut(context: GenerationContext, left: int) -> int | None:
    """Return after which of the next `left` tokens, counted from 1, the first cut that may evict rows follows.

    Returns None if no such cut follows.
    """
    method, layers = context.choice.method, context.own_layers
    quota = context.find_decode_quota(context.seen + 1) if method.decoding else None
    if quota is None:
        return None
    free = 0  # tokens that still fit the quota of uniform heads
    if context.choice.allocator.is_uniform and not method.sets_head_quotas and all(own.rows.even for own in layers):
        free = max(0, quota - max(own.rows.longest_head for own in layers))
    first = method.decode_interval - context.since_cut
    first += max(0, -((first - free - 1) // method.decode_interval)) * method.decode_interval
    return first if first <= left else None


def find_reader(context: GenerationContext, left: int) -> RowReader | None:
    """Return what chooses the rows of the next `left` tokens, or None if the modules must read them."""
    prompt, seen = context.progress.prompt, context.seen
    quota = context.budget.rows(prompt, seen + 1)
    same = left >= WORTH and quota == context.budget.rows(prompt, seen + left)
    if not same or context.weights is None or not reads_in_graph(context.choice):
        return None
    return make_reader(context.weights, context.own_layers, left, quota)


def find_cut_rows(context: GenerationContext, left: int) -> Callable[..., StepRows] | None:
    """Return what makes rows that a graph cuts after every few of the next `left` tokens, or None if none can."""
    quota, method = find_constant_quota(context, left), context.choice.method
    if quota is None or context.weights is None:
        return None
    states = capture_states(context.weights, context.own_layers, context.since_cut)
    if states is None:
        return None
    return partial(FixedQuotaRows, size=method.decode_interval, quota=quota, states=states)


def plan_replacing(context: GenerationContext, left: int) -> AnswerQuotas | None:
    """Return the quotas of the next `left` tokens, or of as many as `ReplacedRows` can read.

    Returns None if these are too few to pay for capturing a graph. The modules ask again at every token, so the first
    tokens are planned alone before all are.
    """
    choice, layers = context.choice, context.own_layers
    if not replaces_rows(choice) or left < WORTH or any(own.rows.mass is not None for own in layers):
        return None
    if choice.method.watches and any(own.index not in own.cut_layers for own in layers):
        return None  # the method must see spared layers too, and `ReplacedRows` do not show them

    def plan(tokens: int) -> AnswerQuotas | None:
        nominal = [context.find_decode_quota(context.seen + token) for token in range(1, tokens + 1)]
        known = [quota for quota in nominal if quota is not None]
        return find_answer_quotas(layers, known) if len(known) == tokens else None

    begin = plan(min(left, WORTH_BETWEEN_CUTS))
    if begin is None or not is_worth(begin.tokens, left):
        return None
    return begin if begin.tokens == left else plan(left)


def find_constant_quota(context: GenerationContext, left: int) -> int | None:
    """Return the quota of rows that are cut after every few tokens, if every layer is exactly at it and stays there.

    Returns None if the quota changes within `left` tokens, if rows are cut at every token (`plan_replacing`), or if the
    answer is too short to pay for capturing a graph.
    """
    method = context.choice.method
    least = WORTH if method.watches else max(WORTH, method.decode_interval)  # others are read without cuts before one
    if not method.decoding or replaces_rows(context.choice) or left < least:
        return None
    quota = context.find_decode_quota(context.seen + 1)
    if quota is None or quota != context.find_decode_quota(context.seen + left):
        return None
    return quota if repeats_cuts(context.choice) and is_at_quota(context.own_layers, quota, context.since_cut) else None


class ModulePath:
    """Reads one token through the model's modules. It is over after one token, because a graph may be possible then."""

    def __init__(
        self, context: GenerationContext, token: Tensor, left: int, sampling: TokenChooser, draws: Tensor
    ) -> None:
        self.context, self.token, self.left = context, token, left
        self.sampling, self.draws = sampling, draws
        self.began = context.stamps[-1]
        self.is_over = False

    def step(self) -> tuple[Tensor, float]:
        context, self.is_over = self.context, True
        begin = now(context.device)
        context.set_progress(room=(find_first_cut(context, self.left) or self.left) - 1)
        with kvbench_attention(context.model):  # not across a yield, because another context may use the model
            context.read_tokens(self.token[:, None].to(context.last_logits.device))
        token = self.sampling.pick(context.last_logits, self.draws[:, 0]).cpu()
        return token, self.began + now(context.device) - begin

    def close(self) -> None:
        """Do nothing: the modules have already updated the context."""


class GraphPath:
    """Reads tokens by replaying a CUDA graph. The context counts them when the path is closed."""

    def __init__(
        self,
        context: GenerationContext,
        make_rows: Callable[..., StepRows],
        token: Tensor,
        left: int,
        sampling: TokenChooser,
        draws: Tensor,
    ) -> None:
        """Capture the graph.

        Args:
            context: The context to read into.
            make_rows: Makes the rows of all layers at fixed addresses.
            token: The token that was generated last, (B,).
            left: Number of tokens to read.
            sampling: How a token is chosen.
            draws: Random numbers for the tokens to generate, (B, left + 1).
        """
        assert context.weights is not None  # `open_path`
        self.context, self.began = context, context.stamps[-1]
        context.set_progress(decoding=True)
        context.decoding = "graph"
        weights = context.weights
        rows = make_rows(weights, context.own_layers, left, seen=context.seen)
        rows = add_windows(weights, context.sliding_layers(), rows, left, context.seen)
        token = token.to(context.last_logits.device)
        self.decoder = GraphDecoder(weights, rows, token, left, sampling.pick, draws)

    @property
    def is_over(self) -> bool:
        return self.decoder.done

    def step(self) -> tuple[Tensor, float]:
        token, elapsed = self.decoder.next()
        return token, self.began + elapsed

    def close(self) -> None:
        context, read = self.context, self.decoder.read
        logits = self.decoder.close()
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
