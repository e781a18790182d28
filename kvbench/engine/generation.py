"""Generate tokens after a compressed prompt.

Two paths read the tokens. `ModulePath` runs the model's modules, shows every token to the method, and cuts if the
method cuts while decoding. `GraphPath` replays a CUDA graph of the whole step. It can be used until the next cut, or
across cuts if every cut runs the same operations (`kvbench.engine.quota_rows`).
"""

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.cache.layer import Layer
from kvbench.engine.answer_quotas import AnswerQuotas, find_answer_quotas, find_layer_quotas, replaces_rows
from kvbench.engine.appended_rows import AppendedRows, only_appends
from kvbench.engine.context import ROOM, PromptContext
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.graph_decoding import CHUNK, StepRows
from kvbench.engine.graph_path import AnswerBatch, PlannedRows
from kvbench.engine.method_view import capture_states
from kvbench.engine.quota_rows import cuts_in_graph, is_at_quota, shares_in_graph
from kvbench.engine.read_rows import ReadRows, make_reader, reads_in_graph
from kvbench.engine.replaced_rows import find_shared_kind, make_replaced_rows
from kvbench.engine.sampling import NOT_FINITE, TokenChooser, mark_tokens
from kvbench.engine.spending import spend
from kvbench.engine.timing import now
from kvbench.engine.uneven_rows import make_interval_rows
from kvbench.kernels.row_replacement import NEVER
from kvbench.models.decoder_weights import DecoderWeights
from kvbench.models.transformers_port import kvbench_attention
from kvbench.stops import check_stop
from kvbench.validation import NumericalError

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

        The arguments are those of `Answer`. Other tokens may follow the answer.
        """
        answer = Answer(self, max_new_tokens, sampling, stop, read_last, seeds, min_new_tokens, keeps_rows=True)
        try:
            yield answer.token
            while not answer.is_over:
                if answer.step():
                    yield answer.token
        finally:
            answer.close()

    @property
    def last_logits(self) -> Tensor:
        """The logits of the last token read, (B, vocab). A prompt must have been read."""
        assert self.logits is not None
        return self.logits

    @spend("capturing")
    @without_gradients
    def reserve(self, tokens: int) -> None:
        """Reserve memory for an answer of `tokens` tokens, or up to its first cut, so that `bytes` counts it."""
        self.leave_path()
        if tokens > 1 and not self.choice.codec.packs:
            room = find_first_cut(self, tokens - 1) or tokens - 1
            for layer in self.own_layers:
                layer.reserve(room)
        elif tokens > WORTH and self.weights is not None and self._grows_packed(tokens - 1):
            # the modules would pack every token into new memory
            room = (find_first_cut(self, tokens - 1) or tokens) - 1
            for layer in self.own_layers if room >= min(tokens - 1, WORTH_BETWEEN_CUTS) else ():
                if layer.packs:
                    layer.reserve_packed(room, CHUNK)
                else:
                    layer.reserve(room)

    def _grows_packed(self, tokens: int) -> bool:
        """Return whether a graph appends the next tokens to packed rows."""
        return only_appends(self.choice) or plan_reading(self, tokens, WORTH) is not None


class Answer:
    """An answer that is being generated, token by token, until every sample has an end token or no token is left.

    Attributes:
        context: The context that the tokens are read into.
        token: The last token of the answer, (B,) on the CPU.
        is_over: Whether no token follows.
        keeps_rows: Whether the rows of its tokens are needed when it is over.
        path: What reads the tokens; None before the second token. Another path may follow it.
    """

    @spend("answering")
    @without_gradients
    def __init__(
        self,
        context: GenerationContext,
        max_new_tokens: int,
        sampling: TokenChooser,
        stop: frozenset[int],
        read_last: bool = False,
        seeds: tuple[int, ...] | None = None,
        min_new_tokens: int = 0,
        keeps_rows: bool = False,
    ) -> None:
        """Choose the first token.

        Args:
            context: A context that has read a prompt.
            max_new_tokens: Largest number of tokens of a sample.
            sampling: How a token is chosen.
            stop: Token ids that end an answer.
            read_last: Whether the last token is read into the cache too, so that what follows continues the answer.
            seeds: Seeds of the samples; None uses the context's own.
            min_new_tokens: 1 if no answer may begin with a token of `stop`, otherwise 0.
            keeps_rows: Whether other tokens follow the answer's, also in a branch that will be forgotten.
        """
        check_stop()
        context.leave_path()
        self.context, self.sampling, self.read_last = context, sampling, read_last
        self.keeps_rows = keeps_rows or not context.forgets
        self.ended = torch.zeros(len(context.seeds), dtype=torch.bool)
        self.ends = torch.tensor(sorted(stop), dtype=torch.int64)
        self.path: DecodePath | None = None
        self.is_closed = False
        self.count, self.most = 0, max_new_tokens
        draws = sampling.draws(seeds or context.seeds, max_new_tokens + 1, 0 if seeds else context.drawn)
        before = logits = context.last_logits
        self.draws = draws.to(logits.device)
        for layer in context.own_layers:
            layer.attended.clear()
        context.capture_ms, context.decoding, context.decoded_together = 0.0, "modules", 1
        begin = now(context.device)
        if min_new_tokens:
            logits = logits.index_fill(1, self.ends.to(logits.device), -math.inf)
        token = mark_tokens(sampling.pick(logits, self.draws[:, 0]), before).cpu()
        context.stamps = [now(context.device) - begin]
        self._take(token)

    @property
    def left(self) -> int:
        """The number of tokens that may have to be read."""
        return self.most - self.count + self.read_last

    @property
    def left_draws(self) -> Tensor:
        """Random numbers for the tokens that may follow, (B, number of tokens)."""
        return self.draws[:, self.count :]

    def step(self) -> bool:
        """Read the last token and generate the next one. Returns whether that token is part of the answer."""
        check_stop()
        path = self.path
        if path is None or path.is_over or path is not self.context.path:  # or other tokens were read since
            path = self._open_path()
        token, stamp = path.step()
        self.context.stamps.append(stamp)
        if self.is_last:
            self.is_over = True
            return False
        self._take(token)
        return True

    @without_gradients
    def _open_path(self) -> DecodePath:
        context = self.context
        context.leave_path()
        self.path = context.path = path = open_path(self)
        return path

    def end(self) -> None:
        """Let no further token follow."""
        self.is_over = True

    @spend("answering")
    def close(self) -> None:
        """Leave the context with the tokens of the answer that were read.

        Others can follow them if the answer keeps its rows.
        """
        if not self.is_closed:
            self.is_closed = True
            if self.path is self.context.path:
                self.context.leave_path()
            self.path = None  # paths may refer to the answer
            self.context.set_progress(room=ROOM)

    def _take(self, token: Tensor) -> None:
        """Append a token of each sample to the answer.

        Raises:
            NumericalError: The logits of a sample that has not ended are not finite.
        """
        if bool((token < 0).any()):
            require_tokens(token[~self.ended], self.context.model)
            token = token.clamp(min=0)  # of samples that have ended
        self.token, self.count = token, self.count + 1
        self.context.drawn += 1
        self.ended |= torch.isin(token, self.ends)
        self.is_last = self.count == self.most or bool(self.ended.all())
        self.is_over = self.is_last and not self.read_last


def require_tokens(tokens: Tensor, model: torch.nn.Module) -> None:
    """Raise a NumericalError if one of the tokens, on the CPU, is marked as `NOT_FINITE`."""
    if bool((tokens == NOT_FINITE).any()):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise NumericalError(f"model: its logits are not finite in {dtype}; use another dtype or other weights")


def require_logits(logits: Tensor, model: torch.nn.Module) -> None:
    """Raise a NumericalError unless logits of any shape are finite. The host waits for the device."""
    flat = logits.flatten()[None]
    require_tokens(mark_tokens(torch.zeros(1, dtype=torch.int64, device=flat.device), flat).cpu(), model)


def open_path(answer: Answer) -> DecodePath:
    """Choose the path that reads the next tokens of an answer."""
    begin, planned = now(answer.context.device), plan_rows(answer.context, answer.left)
    if planned is None:
        return ModulePath(answer)
    with spend("capturing"):
        AnswerBatch([(answer, planned)], begin)
    assert answer.path is not None
    return answer.path


@spend("capturing")
def plan_rows(context: GenerationContext, left: int, worth: int = WORTH) -> PlannedRows | None:
    """Choose the rows with which a graph can read the next tokens, or None if the modules must read.

    Args:
        context: The context to read into.
        left: Number of tokens to read at most.
        worth: Number of tokens for which a graph is captured.
    """
    if context.window is not None:  # the modules raise the error at the first token behind it
        left = min(left, context.window - context.seen)
    if context.weights is None or left < worth:
        return None
    cut_rows = find_cut_rows(context, left)
    if cut_rows is not None:
        return PlannedRows(cut_rows, left, cut=True)
    reading = plan_reading(context, left, worth)
    if reading is not None:
        return reading
    cut = find_first_cut(context, left)
    before_cut = left if cut is None else cut - 1
    if before_cut == left or before_cut >= WORTH_BETWEEN_CUTS:
        appended = plan_appended(context, before_cut)
        if appended is not None:
            return appended
    plan = plan_replacing(context, left)
    if plan is None:
        return None
    kind = None if context.sliding_layers() else find_shared_kind(context.own_layers, plan)
    return PlannedRows(make_replaced_rows, plan.tokens, kind=kind, plan=plan)


def make_alone(
    kind: Callable[..., StepRows],
    weights: DecoderWeights,
    answers: Sequence[Sequence[Layer]],
    tokens: int,
    **more: object,
) -> list[StepRows]:
    """Make rows of one kind for all layers."""
    return [kind(weights, answers, tokens, **more)]


def plan_appended(context: GenerationContext, tokens: int) -> PlannedRows | None:
    """Plan rows that only grow until the next cut, or return None if the modules must read."""
    choice, method, layers = context.choice, context.choice.method, context.own_layers
    if only_appends(choice):
        shares = not choice.codec.packs and not context.sliding_layers()
        return PlannedRows(partial(make_alone, AppendedRows), tokens, kind=AppendedRows if shares else None)
    shows = method.watches and cuts_in_graph(choice) and not method.uses_cache_positions and not method.attends_subset
    cuts = context.find_decode_quota(context.seen + 1) is not None and not replaces_rows(choice)
    if not shows or not cuts or context.weights is None or any(layer.rows.stored is not None for layer in layers):
        return None
    states = capture_states(context.weights, layers, context.since_cut)
    if states is None:
        return None
    return PlannedRows(partial(make_alone, AppendedRows, states=states, since=context.since_cut), tokens)


def find_first_cut(context: GenerationContext, left: int) -> int | None:
    """Return after which of the next `left` tokens, counted from 1, the first cut that may evict rows follows.

    Returns None if no such cut follows.
    """
    method, layers = context.choice.method, context.own_layers
    quota = context.find_decode_quota(context.seen + 1) if method.decoding else None
    if quota is None:
        return None
    free = 0  # tokens that still fit the quota of uniform heads
    if context.choice.allocator.is_uniform and not method.sets_head_quotas and all(layer.rows.even for layer in layers):
        free = max(0, quota - max(layer.rows.longest_head for layer in layers))
    first = method.decode_interval - context.since_cut
    first += max(0, -((first - free - 1) // method.decode_interval)) * method.decode_interval
    return first if first <= left else None


def plan_reading(context: GenerationContext, left: int, worth: int) -> PlannedRows | None:
    """Plan rows of which each of the next `left` tokens attends to a few, or return None if the modules must read.

    The rows serve tokens with the same quota. If it grows within the answer, further rows serve those that follow.
    """
    if context.weights is None or not reads_in_graph(context.choice):
        return None
    prompt, seen, budget = context.progress.prompt, context.seen, context.budget
    quota = budget.rows(prompt, seen + 1)
    tokens = left
    if quota != budget.rows(prompt, seen + left):
        tokens = next(token for token in range(1, left) if budget.rows(prompt, seen + token + 1) != quota)
    if tokens < worth:
        return None
    reader = make_reader(context.weights, context.own_layers, tokens, quota, budget.fraction)
    return None if reader is None else PlannedRows(partial(make_alone, ReadRows, reader=reader), tokens)


def find_cut_rows(context: GenerationContext, left: int) -> Callable[..., list[StepRows]] | None:
    """Return what makes rows that a graph cuts after every few of the next `left` tokens, or None if none can."""
    quotas, method = find_interval_quotas(context, left), context.choice.method
    if quotas is None or context.weights is None:
        return None
    states = capture_states(context.weights, context.own_layers, context.since_cut)
    if states is None:
        return None
    return partial(
        make_interval_rows, size=method.decode_interval, quotas=quotas, states=states, since=context.since_cut
    )


def plan_replacing(context: GenerationContext, left: int) -> AnswerQuotas | None:
    """Return the quotas of the next `left` tokens, or of as many as `ReplacedRows` can read.

    Returns None if these are too few to pay for capturing a graph. The modules ask again at every token, so a plan of
    the first tokens must show that a plan of all is worth its time.
    """
    choice, layers = context.choice, context.own_layers
    if not replaces_rows(choice) or any(layer.rows.mass is not None for layer in layers):
        return None
    if choice.method.watches and any(layer.index not in layer.cut_layers for layer in layers):
        return None  # the method must see spared layers too, and `ReplacedRows` do not show them

    def plan(tokens: int) -> AnswerQuotas | None:
        first, last = (context.find_decode_quota(context.seen + token) for token in (1, tokens))
        nominal = [first] * tokens  # the quota never falls while tokens are read
        if first != last:
            nominal = [context.find_decode_quota(context.seen + token) for token in range(1, tokens + 1)]
        known = [quota for quota in nominal if quota is not None]
        return find_answer_quotas(layers, known) if len(known) == tokens else None

    begin = plan(min(left, WORTH_BETWEEN_CUTS))
    if begin is None or begin.tokens < min(left, WORTH_BETWEEN_CUTS):
        return None
    return begin if begin.tokens == left else plan(left)


def find_interval_quotas(context: GenerationContext, left: int) -> list[list[tuple[int, ...]] | int] | None:
    """Return the quotas of rows that a graph cuts after every few of the next `left` tokens, or None for no graph.

    There is none if rows are replaced at every token (`plan_replacing`), or if the answer is too short to pay for
    capturing it. The modules ask again at every token, so the first tokens are planned alone before all are.

    Returns:
        For each layer one of three: the number of rows of every head after each cut; a list with the mean number of
        rows per head of each sample for each cut, if heads hold different numbers of rows or more from cut to cut;
        `NEVER` if the method spares the layer.
    """
    choice, method = context.choice, context.choice.method
    least = (
        WORTH if method.watches else max(WORTH, method.decode_interval)
    )  # others' tokens before a cut are planned without it
    if not method.decoding or replaces_rows(choice) or not cuts_in_graph(choice) or left < least:
        return None
    begin = min(left, max(WORTH_BETWEEN_CUTS, 2 * method.decode_interval))
    by_layer = [find_quotas_of_cuts(layer, context, begin) for layer in context.own_layers]
    known = [quotas for quotas in by_layer if quotas is not None]
    if len(known) < len(by_layer) or all(quotas == NEVER for quotas in known):
        return None
    if begin < left:
        by_layer = [find_quotas_of_cuts(layer, context, left) for layer in context.own_layers]
        known = [quotas for quotas in by_layer if quotas is not None]
    return known if len(known) == len(by_layer) else None


def find_quotas_of_cuts(layer: Layer, context: GenerationContext, left: int) -> list[tuple[int, ...]] | int | None:
    """Return the quotas of a layer (`find_interval_quotas`), or None if no graph can cut it."""
    method, since = context.choice.method, context.since_cut
    cuts = range(method.decode_interval - since, left + 1, method.decode_interval) or range(1, 2)
    quotas, known = list[tuple[int, ...]](), dict[int, tuple[int, ...]]()
    for number in cuts:
        nominal = context.find_decode_quota(context.seen + number)
        if nominal is None:
            return None
        if nominal not in known:
            head_quotas = find_layer_quotas(layer, nominal, left).expand(len(context.seeds), 1)
            known[nominal] = tuple(head_quotas.flatten().tolist())
        quotas.append(known[nominal])
    quota = quotas[0][0]
    if quota == NEVER:  # rows that only grow are shown to a method if the layer was never cut
        return NEVER if not method.watches or layer.rows.stored is None else None
    if layer.even and {*sum(known.values(), ())} == {quota}:
        return quota if is_at_quota([layer], quota, since) else None
    return quotas if shares_in_graph(layer, quotas, method.decode_interval, since) else None


class ModulePath:
    """Reads one token through the model's modules. It is over after one token, because a graph may be possible then."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.began = answer, answer.context.stamps[-1]
        self.is_over = False

    @without_gradients
    def step(self) -> tuple[Tensor, float]:
        answer, context, self.is_over = self.answer, self.answer.context, True
        begin = now(context.device)
        context.set_progress(room=(find_first_cut(context, answer.left) or answer.left) - 1)
        with kvbench_attention(context.model):  # not across a yield, because another context may use the model
            context.read_tokens(answer.token[:, None].to(context.last_logits.device))
        token = answer.sampling.pick(context.last_logits, answer.left_draws[:, 0])
        token = mark_tokens(token, context.last_logits).cpu()
        return token, self.began + now(context.device) - begin

    def close(self) -> None:
        """Do nothing: the modules have already updated the context."""
