"""Generate: read token after token behind a compressed prompt.

Two paths read the tokens. `ModulePath` goes through the model's modules, asks the method about every token and cuts
where the method cuts while decoding. `GraphPath` replays a CUDA graph of the whole step; it serves until the next cut,
or through all cuts if every interval between two of them does the same (`kvbench.engine.fixed_quota_rows`).
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.guard import without_gradients
from kvbench.engine.context import ROOM, PromptContext
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.fixed_quota_rows import FixedQuotaRows, is_at_quota, is_shift_invariant
from kvbench.engine.graph_decoding import GraphDecoder, GrowingRows
from kvbench.engine.sampling import Sampling
from kvbench.engine.timing import now
from kvbench.models.transformers_port import kvbench_attention

WORTH = 8  # tokens that must be left for a graph to be captured
WORTH_BETWEEN_CUTS = 32  # the same where the next cut makes it useless


class GenerationContext(PromptContext):
    """A batch of prompts of one length in one compressed cache, which answers."""

    @without_gradients
    def generate(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
        read_last: bool = False,
        seeds: tuple[int, ...] | None = None,
        min_new_tokens: int = 0,
    ) -> Iterator[Tensor]:
        """Yield token after token, (B,) each, until every sample has given a token of `stop` or there are
        `max_new_tokens`.

        Args:
            max_new_tokens: Most tokens of a sample.
            sampling: How a token is chosen.
            stop: Token ids that end an answer.
            read_last: Read the last token into the cache too: what follows then continues the whole answer.
            seeds: Seeds of the samples' draws, where they are not the context's own.
            min_new_tokens: 1 if no answer may begin with a token of `stop`, else 0.
        """
        self.leave_path()
        ended, ends = torch.zeros(len(self.seeds), dtype=torch.bool), torch.tensor(sorted(stop), dtype=torch.int64)
        draws = sampling.draws(seeds or self.seeds, max_new_tokens + 1, 0 if seeds else self.drawn)
        draws, logits = draws.to(self.logits.device), self.logits
        for layer in self.own_layers:
            layer.attended.clear()
        self.capture_ms, self.decoding = 0.0, "modules"
        begin = now(self.device)
        if min_new_tokens:
            logits = logits.index_fill(1, ends.to(logits.device), -math.inf)
        token = sampling.pick(logits, draws[:, 0]).cpu()
        self.stamps, path = [now(self.device) - begin], None
        try:
            for count in range(1, max_new_tokens + 1):
                self.drawn += 1
                yield token
                ended |= torch.isin(token, ends)
                is_last = count == max_new_tokens or bool(ended.all())
                if is_last and not read_last:
                    break
                if path is None or path.is_over or path is not self.path:  # or something else was read since
                    self.leave_path()
                    left = max_new_tokens - count + read_last
                    path = self.path = open_path(self, token, left, sampling, draws[:, count:])
                token, stamp = path.step()
                self.stamps.append(stamp)
                if is_last:
                    break
        finally:
            if path is self.path:
                self.leave_path()
            self.set_progress(room=ROOM)

    @without_gradients
    def reserve(self, tokens: int) -> None:
        """Make room for an answer of `tokens`, or up to its first cut, as reading it would: then `bytes` counts it."""
        self.leave_path()
        if tokens > 1 and not self.choice.codec.packs:
            for layer in self.own_layers:
                layer.reserve(find_first_cut(self, tokens - 1) or tokens - 1)


def open_path(context: GenerationContext, token: Tensor, left: int, sampling: Sampling, draws: Tensor) -> DecodePath:
    """The path that reads `token` (B,) and those behind it; `left` tokens are to be read, with draws (B, left + 1)."""
    if context.weights is not None:
        quota = find_constant_quota(context, left)
        if quota is not None:
            rows = partial(FixedQuotaRows, size=context.choice.method.decode_interval, quota=quota)
            return GraphPath(context, rows, token, left, sampling, draws)
        cut = find_first_cut(context, left)
        before_cut = left if cut is None else cut - 1
        if before_cut >= (WORTH if cut is None else WORTH_BETWEEN_CUTS):
            return GraphPath(context, GrowingRows, token, before_cut, sampling, draws)
    return ModulePath(context, token, left, sampling, draws)


def find_first_cut(context: GenerationContext, left: int) -> int | None:
    """Find after which of the next `left` tokens, counted from 1, the first cut follows that may take rows away.
    Returns None if there is none.
    """
    method, layers = context.choice.method, context.own_layers
    quota = context.find_decode_quota(context.seen + 1) if method.decoding else None
    if quota is None:
        return None
    free = 0  # tokens that uniform heads have room for
    if context.choice.allocator.is_uniform and not method.sets_head_quotas and all(own.rows.even for own in layers):
        free = max(0, quota - max(own.rows.longest_head for own in layers))
    first = method.decode_interval - context.since_cut
    first += max(0, -((first - free - 1) // method.decode_interval)) * method.decode_interval
    return first if first <= left else None


def find_constant_quota(context: GenerationContext, left: int) -> int | None:
    """Find the quota, if every layer is exactly at it and will be cut back to it for all of the next `left` tokens.
    Returns None if the quota changes, or if the answer is too short to pay for capturing a graph.
    """
    method = context.choice.method
    if not method.decoding or context.since_cut or left < max(WORTH, method.decode_interval):
        return None
    quota = context.find_decode_quota(context.seen + 1)
    is_constant = quota is not None and quota == context.find_decode_quota(context.seen + left)
    return (
        quota if is_constant and is_shift_invariant(context.choice) and is_at_quota(context.own_layers, quota) else None
    )


class ModulePath:
    """Reads one token through the model's modules. Behind it a graph may serve again, so it is over after one."""

    def __init__(self, context: GenerationContext, token: Tensor, left: int, sampling: Sampling, draws: Tensor) -> None:
        self.context, self.token, self.left = context, token, left
        self.sampling, self.draws = sampling, draws
        self.began = context.stamps[-1]
        self.is_over = False

    def step(self) -> tuple[Tensor, float]:
        context, self.is_over = self.context, True
        begin = now(context.device)
        context.set_progress(room=(find_first_cut(context, self.left) or self.left) - 1)
        with kvbench_attention(context.model):  # not across a yield: another context may use the model meanwhile
            context.read_tokens(self.token[:, None].to(context.logits.device))
        token = self.sampling.pick(context.logits, self.draws[:, 0]).cpu()
        return token, self.began + now(context.device) - begin

    def close(self) -> None:
        """The modules have left the context as it must be."""


class GraphPath:
    """Reads tokens by replaying a CUDA graph. What it has read is counted when it is closed."""

    def __init__(
        self,
        context: GenerationContext,
        make_rows: partial | type,
        token: Tensor,
        left: int,
        sampling: Sampling,
        draws: Tensor,
    ) -> None:
        """`make_rows`: makes the rows of all layers at fixed addresses, `kvbench.engine.graph_decoding.StepRows`."""
        begin = now(context.device)
        self.context, self.began = context, context.stamps[-1]
        context.set_progress(decoding=True)
        context.decoding = "graph"
        rows = make_rows(context.weights, context.own_layers, left, seen=context.seen)
        token = token.to(context.logits.device)
        self.decoder = GraphDecoder(context.weights, rows, token, left, sampling.pick, draws)
        context.capture_ms += 1000 * (now(context.device) - begin)

    @property
    def is_over(self) -> bool:
        return self.decoder.done

    def step(self) -> tuple[Tensor, float]:
        token, elapsed = self.decoder.next()
        return token, self.began + elapsed

    def close(self) -> None:
        context, read = self.context, self.decoder.read
        logits = self.decoder.close()
        if read:  # none where the first step failed
            context.logits = logits
        context.count_tokens(read)
        context.since_cut += read
        method = context.choice.method
        if method.decoding:
            context.since_cut %= method.decode_interval
            if context.find_decode_quota(context.seen) is not None:  # a cut that found no row too many counts too
                for layer in context.own_layers:
                    layer.count_peak(layer.rows.longest_head - context.since_cut)
