"""Blocks in, cuts inside the loop: for every block each layer attends over (held rows ∪ block), the method is asked,
the layer is cut to its quota, and only then the next block is read. Decoding is the same loop with one token.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from kvbench.allocator import Allocator
from kvbench.blocks import SHORT, Blocks
from kvbench.budget import Budget
from kvbench.decoding import Decoder, GrowingRows, appends
from kvbench.guard import Handed, check_shape, copy_containers, count_steps, readings, state_of, without_gradients
from kvbench.kernels.implementation import FAST
from kvbench.layer import Choice, Course, Layer, Layers
from kvbench.method import Method, Reading, State, Words
from kvbench.model import Frequencies, attached, forward, layout, make_cache, weights_of
from kvbench.rows import Bytes, size
from kvbench.settings import ContractError, SettingError, check_sampling
from kvbench.steady import SteadyRows, repeats, steady
from kvbench.timing import now

MOST = 8192  # tokens of blocks that are read as one: what they take beside the cache stays small
FEW = 4  # whole blocks from which on graphs are captured for them
WORTH = 8  # tokens that must be left for a graph to be captured
WORTH_BETWEEN_CUTS = 32  # the same where the next cut makes it useless
ROOM = 64  # tokens that growing storage reserves beyond what it needs when the engine does not know how many will come


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: greedy at temperature 0, else from the smallest set of tokens with probability `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)

    def draws(self, seeds: tuple[int, ...], tokens: int, after: int = 0) -> Tensor:
        """(B, tokens) numbers in [0, 1) behind the first `after`, those of a sample by its own seed, so that none
        depends on its neighbours.
        """
        own = [torch.rand(after + tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(own)[:, after:]

    def pick(self, logits: Tensor, draws: Tensor) -> Tensor:
        """(B,) token ids from logits (B, vocab): where draws (B,) fall in the cumulative probabilities, largest
        first.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.float() / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
        upto = ordered.cumsum(-1)
        before = (upto <= draws[:, None] * upto[:, -1:]).sum(-1, keepdim=True)
        last = (ordered > 0).sum(-1, keepdim=True) - 1  # rounding may let the product reach the sum
        return tokens.gather(-1, before.minimum(last)).squeeze(-1)


class Context:
    """A batch of prompts of one length in one compressed cache. `ids` (B, tokens), the first `prefix` in front of the
    user's text; `words`: for methods that have some of their own for the model;
    `compile`: decode in a CUDA graph where that is possible; `answer`: tokens to keep room for where nothing is cut.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        choice: Choice,
        budget: Budget,
        block_size: int | None,
        seeds: tuple[int, ...],
        prefix: int = 0,
        words: Words | None = None,
        compile: bool = True,
        answer: int = 0,
    ) -> None:
        self.model, self.choice, self.budget, self.block_size, self.seeds = model, choice, budget, block_size, seeds
        self.device = next(model.parameters()).device.type
        self.prefix, self.words, self.answer = prefix, words or Words(), answer
        shape = layout(model)
        check_shape(choice.method, shape.layers, shape.heads, shape.dim, shape.sliding)
        self.course = Course(prompt=0)
        state = State(seeds)
        self.layers = Layers()
        for index in range(shape.layers):
            own = (
                None if index in shape.sliding else Layer(index, shape.layers, choice, self.course, state, self.layers)
            )
            self.layers.append(own)
        self.window = shape.window
        self.cache = make_cache(model, self.layers)
        self.logits: Tensor | None = None  # (B, vocab) of the last token read
        self.seen = 0
        self.since_cut = 0
        self.drawn = 0  # tokens given: a further answer goes on in the stream of draws
        self.reread_tokens, self.reread_ms = 0, 0.0  # what reading about the prompt took
        self.stamps: list[float] = []  # seconds from the start of `generate` to each of its tokens, but for capturing
        self.capture_ms = 0.0  # what capturing graphs took
        self.decoding = "modules"  # or "graph": what read the answer's tokens
        self.lent: list[tuple[int, ref[Tensor]]] = []  # layer, keys or values that other contexts may hold (together)
        self.decoder: Decoder | None = None  # reads the answer that is under way; what it has read is not counted yet
        usable = compile and capturable(model) and appends(choice)
        self.weights = weights_of(model) if usable else None  # of models that can be decoded in a graph

    @property
    def own_layers(self) -> list[Layer]:
        """The layers that hold rows (all but sliding-window layers)."""
        return [layer for layer in self.layers if layer is not None]

    @without_gradients
    def prefill(self, ids: Tensor, each: Callable[[Tensor], None] | None = None) -> Tensor:
        """Read the prompt in blocks, cutting after each. Returns the last token's logits (B, vocab). `each` is given
        every block's (B, tokens, vocab), which were computed over the rows held before it and the block.
        """
        prompt = ids.shape[1]
        if self.choice.method.one_block and self.block_size is not None and self.block_size < prompt:
            raise SettingError(f"block_size={self.block_size}: {self.choice.method.name} needs the prompt as one block")
        self.begin(prompt)
        again, size = self._readings(ids), self.block_size or prompt
        captured = self.weights is not None and repeats(self.choice) and size <= SHORT and not each
        captured = captured and self.budget.of == "prompt"
        quota = self.budget.rows(prompt, prompt) if captured else None
        with attached(self.model):
            while self.seen < prompt:
                tokens = min(size, prompt - self.seen)
                if quota is not None and self.seen < quota:  # blocks that fit the quota are cut by nothing: read as one
                    tokens = min(prompt - self.seen, max(size, min(quota - self.seen, MOST) // size * size))
                block = ids[:, self.seen : self.seen + tokens]
                rows = self.expect(tokens, max((reading.ids.shape[1] for reading in again), default=0))
                logits = self._read(block, self.course.quota, keep=0 if each else 1)
                if each:
                    each(logits)
                count = (prompt - self.seen - 1) // size  # whole blocks before the last
                if quota is not None and count >= FEW and steady(self.own_layers, quota):
                    more = ids[:, self.seen : self.seen + count * size]
                    Blocks(self.weights, self.own_layers, more, size, quota, self.seen).read()
                    self._went(more.shape[1])
            self.course.last = False
            if again:
                self._reread(again, rows)
        last = logits[:, -1].clone() if each else logits[:, -1]  # a view would keep the block's alive
        return self.end(last)

    def begin(self, prompt: int) -> None:
        """A prompt of so many tokens comes."""
        self.course.prompt, self.course.prefix, self.course.decoding = prompt, min(self.prefix, prompt), False

    def expect(self, tokens: int, read_again: int = 0) -> int | None:
        """The next so many tokens of the prompt come; `read_again`: tokens that the model reads after the prompt and
        forgets. Returns rows per head that the cut behind them leaves, None for all.
        """
        course, method, left = self.course, self.choice.method, self.course.prompt - self.seen - tokens
        course.last = left == 0
        rows = None if method.reads else self.budget.rows(course.prompt, self.seen + tokens)
        course.share = self.budget.share(course.prompt, self.seen + tokens)
        course.quota = None if method.rereads else rows
        course.room = (left + self.answer if rows is None or rows >= course.prompt else 0) + read_again
        return rows

    def passed(self, tokens: int, frequencies: Frequencies | None) -> None:
        """The tokens that were expected went through all layers, but not through this context's own cache: the model
        read them with these `frequencies`.
        """
        self._went(tokens)
        if frequencies is not None:
            self.cache.frequencies.take_over(frequencies)
        self._check()

    def end(self, logits: Tensor) -> Tensor:
        """The prompt is read; `logits` (B, vocab) of its last token."""
        self.course.last = False
        for layer in self.own_layers:  # after the last block of all layers: cascades cut earlier ones again
            layer.settle()
        self.course.room = ROOM
        self.logits = logits
        return logits

    def _readings(self, ids: Tensor) -> list[Reading]:
        """What the model reads about the prompt before the cut; nothing where all of it is kept."""
        method, prompt = self.choice.method, ids.shape[1]
        quota = self.budget.rows(prompt, prompt)
        if not method.rereads or quota is None or quota >= prompt:
            return []
        found = readings(method, ids, self.course.prefix, self.words, self.choice.exact)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if any(int(reading.ids.max()) >= vocabulary for reading in found):
            raise SettingError(f"method: {method.name} lets the model read token ids above its last, {vocabulary - 1}")
        return found

    def _reread(self, readings: list[Reading], quota: int) -> None:
        """Let the model read about the prompt, forget what it read but not what the method noted, and cut."""
        begin, layers = now(self.device), self.own_layers
        for reading in readings:
            with self.branch(keeps_state=True):
                self.course.about = (reading.start, reading.stop)
                self._read(reading.ids, None, keep=1)
                noted = [(dict(layer.state.layer), layer.peak_attended) for layer in layers]
                shared, peak = dict(layers[0].state.shared), self.course.peak_bytes
            for layer, (own, attended) in zip(layers, noted, strict=True):
                layer.state.layer, layer.peak_attended = own, attended
                layer.weigh()
            layers[0].state.shared.update(shared)
            self.course.peak_bytes = max(self.course.peak_bytes, peak)
            self.reread_tokens += reading.ids.shape[1]
        self.reread_ms += 1000 * (now(self.device) - begin)
        self.course.quota = quota
        for layer in layers:
            layer.stamp()
        for layer in layers:
            layer.cut_after_readings(quota)
        self._check()
        self.course.quota = None

    @without_gradients
    def extend(self, ids: Tensor) -> Tensor:
        """Read further tokens (B, t) over the held rows; cut only if the method cuts while decoding. Returns logits
        (B, t, vocab).
        """
        self._leave()
        with attached(self.model):
            return self._extend(ids)

    def _extend(self, ids: Tensor) -> Tensor:
        if self.choice.token_by_token and ids.shape[1] > 1:
            return torch.cat([self._extend(token) for token in ids.split(1, dim=1)], dim=1)
        method = self.choice.method
        self.course.decoding = True
        if method.reads:
            self.course.look = self.budget.rows(self.course.prompt, self.seen + ids.shape[1])
        quota, rows = self._kept(self.seen + ids.shape[1]) if method.decoding else None, None
        self.since_cut += self._steps(ids.shape[1], quota)
        if method.decoding and self.since_cut >= method.decode_interval:
            rows = quota
            self.since_cut = 0
        self.course.share = None if rows is None else Fraction(rows)
        logits = self._read(ids, rows, keep=0)
        self.logits = logits[:, -1].clone()  # a view would keep the logits of all tokens alive
        return logits

    def _steps(self, tokens: int, quota: int | None) -> int:
        """What the method says that reading `tokens` counts towards the next cut; it may have kept references too."""
        if type(self.choice.method).steps is Method.steps:
            return tokens
        for layer in self.own_layers:
            layer.stamp()
        found = count_steps(self.choice.method, tokens, quota)
        for layer in self.own_layers:
            layer.check_stamped()
        return found

    def _read(self, ids: Tensor, quota: int | None, keep: int) -> Tensor:
        if self.window is not None and self.seen + ids.shape[1] > self.window:
            raise SettingError(
                f"model: every layer has a sliding window of {self.window} tokens, no prompt may be longer"
            )
        self.course.quota = quota
        for layer in self.own_layers:
            layer.stamp()
        logits = forward(self.model, ids, self.cache, keep)
        self.seen += ids.shape[1]
        self._check()
        return logits

    def _check(self) -> None:
        """A block went through all layers: ContractError for what a hook did to them, or gave that only the device can
        tell. The device is asked once for all layers, and not at all where nothing was noted.
        """
        for layer in self.own_layers:
            layer.check_stamped()
        quota, allocator = self.course.quota, self.choice.allocator
        if quota is not None and not self.choice.method.allots:
            self._check_total(quota, f"allocator={allocator.name}")
        noted = [(line, flag) for layer in self.own_layers for line, flag in layer.guard.faults.items()]
        if not noted:
            return
        device = next(self.model.parameters()).device
        found = torch.stack([flag.to(device) for _, flag in noted]).tolist()
        for (line, _), wrong in zip(noted, found, strict=True):
            if wrong:
                raise ContractError(line)
        for layer in self.own_layers:
            layer.guard.faults.clear()

    def _check_total(self, quota: int, owner: str) -> None:
        """Note it if the layers that share the budget hold more rows than `quota` a head, on average."""
        own = self.own_layers
        layers = [layer for layer in own if layer.index in layer.cut_layers]
        if not layers or all(layer.rows.even and layer.rows.longest_head <= quota for layer in layers):
            return
        device = next(self.model.parameters()).device
        held = sum(layer.rows.counts().sum(-1).to(device) for layer in layers)  # (B,)
        limit = quota * sum(layer.rows.shape[1] for layer in layers)
        line = f"{owner}: the layers hold more rows than the budget, {quota} a head on average"
        layers[0].guard.note(lambda: (held > limit).any(), line)

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
        """Token after token, (B,) each, until every sample has given a token of `stop` or `max_new_tokens` are out.
        The last one is read into the cache only if `read_last`: what follows then continues the whole answer.
        `seeds`: of the samples' draws, where not the context's own; `min_new_tokens`=1: no answer begins with a token
        of `stop`.
        """
        self._leave()
        begun = 0 if seeds else self.drawn
        draws = sampling.draws(seeds or self.seeds, max_new_tokens + 1, begun).to(self.logits.device)
        ended, ends = torch.zeros(len(self.seeds), dtype=torch.bool), torch.tensor(sorted(stop), dtype=torch.int64)
        for layer in self.own_layers:
            layer.attended.clear()
        begin, decoder = now(self.device), None
        self.capture_ms, self.decoding = 0.0, "modules"
        first = self.logits.index_fill(1, ends.to(self.logits.device), -math.inf) if min_new_tokens else self.logits
        token = sampling.pick(first, draws[:, 0]).cpu()
        self.stamps = [now(self.device) - begin]
        try:
            for count in range(1, max_new_tokens + 1):
                self.drawn += 1
                yield token
                ended |= torch.isin(token, ends)
                over = count == max_new_tokens or bool(ended.all())
                if over and not read_last:
                    break
                base, left = self.stamps[-1], max_new_tokens - count + read_last
                if decoder is None or decoder.done or decoder is not self.decoder:  # or something else was read since
                    self._leave()
                    decoder, since = self._decoder(token, left, sampling, draws[:, count:]), base
                if decoder is None:
                    token, elapsed = self._read_one(token, left, sampling, draws[:, count])
                else:
                    base, (token, elapsed) = since, decoder.next()
                self.stamps.append(base + elapsed)
                if over:
                    break
        finally:
            if decoder is self.decoder:
                self._leave()
            self.course.room = ROOM

    def _kept(self, seen: int) -> int | None:
        """Rows per head that a cut while decoding leaves when `seen` tokens are read, None for all."""
        return self.choice.method.decode_size or self.budget.rows(self.course.prompt, seen)

    def _cut_after(self, left: int) -> int | None:
        """Which of the `left` tokens to come, counted from 1, the first cut follows that may take rows away, None for
        none.
        """
        method, layers = self.choice.method, self.own_layers
        quota = self._kept(self.seen + 1) if method.decoding else None
        if quota is None:
            return None
        free = 0  # tokens that uniform heads have room for
        if type(self.choice.allocator) is Allocator and not method.allots and all(own.rows.even for own in layers):
            free = max(0, quota - max(own.rows.longest_head for own in layers))
        first = method.decode_interval - self.since_cut
        first += max(0, -((first - free - 1) // method.decode_interval)) * method.decode_interval
        return first if first <= left else None

    @without_gradients
    def reserve(self, tokens: int) -> None:
        """Make room for an answer of `tokens`, or up to its first cut, as reading it would: then `bytes` counts it."""
        self._leave()
        if tokens > 1 and not self.choice.codec.packs:
            for layer in self.own_layers:
                layer.reserve(self._cut_after(tokens - 1) or tokens - 1)

    def _read_one(self, token: Tensor, left: int, sampling: Sampling, draws: Tensor) -> tuple[Tensor, float]:
        """Read a token (B,) through the model's modules: the next, and seconds. `left`: tokens still to be read."""
        begin = now(self.device)
        self.course.room = (self._cut_after(left) or left) - 1
        with attached(self.model):  # not across a yield: another context may use the model meanwhile
            self._extend(token[:, None].to(self.logits.device))
        found = sampling.pick(self.logits, draws).cpu()
        return found, now(self.device) - begin

    def _decoder(self, token: Tensor, left: int, sampling: Sampling, draws: Tensor) -> Decoder | None:
        """A graph that reads the `left` tokens to come, or those before the next cut; None where the model's modules
        must read them, or where there are too few.
        """
        if self.weights is None:
            return None
        begin, token = now(self.device), token.to(self.logits.device)
        quota = self._steady_quota(left)
        if quota is not None:
            make = partial(SteadyRows, size=self.choice.method.decode_interval, quota=quota)
        else:
            cut = self._cut_after(left)
            make, left = GrowingRows, left if cut is None else cut - 1
            if left < (WORTH if cut is None else WORTH_BETWEEN_CUTS):
                return None
        self.course.decoding, self.decoding = True, "graph"
        rows = make(self.weights, self.own_layers, left, seen=self.seen)
        self.decoder = Decoder(self.weights, rows, token, left, sampling.pick, draws)
        self.capture_ms += 1000 * (now(self.device) - begin)
        return self.decoder

    def _steady_quota(self, left: int) -> int | None:
        """Rows per head to which the layers, that hold just so many now, are cut again and again while `left` tokens
        are decoded; None where that does not describe it or is not worth a graph.
        """
        method = self.choice.method
        if not method.decoding or self.since_cut or left < max(WORTH, method.decode_interval):
            return None
        quota = self._kept(self.seen + 1)
        ever = quota is not None and quota == self._kept(self.seen + left) and repeats(self.choice)
        return quota if ever and steady(self.own_layers, quota) else None

    @without_gradients
    def _leave(self) -> None:
        """Count what the graph of an answer has read, if there is one: what is asked for now comes behind it."""
        if self.decoder is None:
            return
        decoder, self.decoder = self.decoder, None
        logits = decoder.close()
        self.logits = logits if decoder.read else self.logits  # none where the first step failed
        self.since_cut += decoder.read
        self._went(decoder.read)
        if self.choice.method.decoding:
            self.since_cut %= self.choice.method.decode_interval
            if self._kept(self.seen) is not None:  # a cut that found no row too many counts too
                for layer in self.own_layers:
                    layer.peak_rows = max(layer.peak_rows, layer.rows.longest_head - self.since_cut)

    def _went(self, tokens: int) -> None:
        """Count tokens that did not go through the model's modules."""
        self.seen += tokens
        for port in self.cache.layers:
            port.seen = self.seen

    @contextmanager
    def branch(self, keeps_state: bool = False) -> Iterator[None]:
        """Whatever is read inside is forgotten afterwards; the compressed context is shared, not computed again.
        `keeps_state`: the caller keeps what the method notes inside, so the method may write it in place.
        """
        self._leave()
        marks = [layer.mark() for layer in self.own_layers]
        lent = self._lent()
        sliding = [(c.keys, c.values, c.cumulative_length) for c in self._sliding()]
        before = {name: getattr(self, name) for name in ("seen", "since_cut", "drawn", "logits")}
        shared = copy_containers(self.own_layers[0].state.shared)
        kept = self.own_layers[0].guard.handed()
        for name, tensor in state_of({"state.shared": shared}):
            kept.add(name, tensor)
        course, frequencies = dict(vars(self.course)), self.cache.frequencies
        began_with = frequencies and frequencies.copy()
        try:
            yield
        finally:
            self.decoder = None  # of an answer that was not ended inside
            for layer, mark in zip(self.own_layers, marks, strict=True):
                layer.rewind(mark)
            for own, (keys, values, length) in zip(self._sliding(), sliding, strict=True):
                own.keys, own.values, own.cumulative_length = keys, values, length
            for port in self.cache.layers:
                if hasattr(port, "seen"):
                    port.seen = before["seen"]
            if frequencies:
                frequencies.take_over(began_with)
            vars(self).update(before)
            vars(self.course).update(course)
            self.own_layers[0].state.shared.clear()
            self.own_layers[0].state.shared.update(shared)
        checked = [(lent, "a hook that kept a reference to what it was handed")]
        if not keeps_state:
            for layer, mark in zip(self.own_layers, marks, strict=True):
                layer.check_mark(mark)
            checked.append((kept, "a hook"))
        for written, hook in checked:
            if found := written.written():
                self.own_layers[0].guard.report(self.choice.owners, hook, found)

    def _lent(self) -> Handed:
        """What other contexts still hold of the keys and values that this context's method was handed."""
        found = self.own_layers[0].guard.handed()
        own = {id(tensor) for layer in self.own_layers for tensor in layer.rows.named_tensors().values()}
        for index, reference in self.lent:
            if (tensor := reference()) is not None and id(tensor) not in own:
                found.add(f"keys or values of layer {index}, which other runs share", tensor)
        return found

    def _sliding(self) -> list:
        return [own for own, layer in zip(self.cache.layers, self.layers, strict=True) if layer is None]

    def bytes(self) -> Bytes:
        """What the cache occupies now; sliding-window layers count as rows."""
        total = sum((layer.bytes() for layer in self.own_layers), Bytes())
        shared = size(v for v in self.own_layers[0].state.shared.values() if isinstance(v, Tensor))
        return total + Bytes(rows=self.sliding_bytes(), state=shared)

    def sliding_bytes(self) -> int:
        """Bytes of the sliding-window layers' own caches, which no method touches."""
        return sum(c.keys.nbytes + c.values.nbytes for c in self._sliding() if c.is_initialized)

    def full_bytes(self) -> int:
        """Bytes that keys and values of all tokens seen would take."""
        return self.sliding_bytes() + sum(layer.full_bytes() for layer in self.own_layers)


def rehearse(model: torch.nn.Module, choice: Choice, words: Words, ids: Tensor) -> None:
    """Read a short prompt `ids` (1, n), cut it to half, and decode a few tokens, with exact guards: ContractError for a
    hook that writes into what it is handed by whatever way. If that was a weight of the model (`spoils_model`), the
    caller must load the model again.
    """
    method = choice.method
    if type(method) is Method and not choice.codec.packs:  # the full cache has no hooks
        return
    if method.decoding:
        method = replace(method, decode_interval=1, decode_size=None)
    own = replace(choice, method=method, exact=True)
    for block in {None} if method.one_block else {None, ids.shape[1] // 2}:
        context = Context(model, own, Budget(0.5), block, (0,) * len(ids), 0, words, compile=False)
        context.prefill(ids)
        with context.branch():
            context.extend(ids[:, :2])
        for _ in context.generate(3, Sampling(), frozenset()):
            pass


def capturable(model: torch.nn.Module) -> bool:
    """Whether the model is where graphs are recorded, in a dtype of the kernels: a reference waits for the host."""
    like = next(model.parameters())
    return like.is_cuda and like.device.index == torch.cuda.current_device() and like.dtype in FAST
