"""Blocks in, cuts inside the loop: for every block each layer attends over (held rows ∪ block), the method is asked,
the layer is cut to its quota, and only then the next block is read. Decoding is the same loop with one token.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.budget import Budget
from kvbench.layer import Choice, Course, Layer
from kvbench.method import Reading, State, Words
from kvbench.model import attached, forward, layout, make_cache
from kvbench.rows import Bytes, size
from kvbench.settings import SettingError, number

ROOM = 64  # tokens that growing storage reserves beyond what it needs when the engine does not know how many will come


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: greedy at temperature 0, else from the smallest set of tokens with probability `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not number(self.temperature) or not self.temperature >= 0:
            raise SettingError(f"temperature={self.temperature}: a number from 0 (greedy) on")
        if not number(self.top_p) or not 0 < self.top_p <= 1:
            raise SettingError(f"top_p={self.top_p}: a share in (0, 1]")

    def pick(self, logits: Tensor, generators: list[torch.Generator]) -> Tensor:
        """(B,) token ids from logits (B, vocab); one generator a sample, so that none depends on its neighbours."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = (logits.float() / self.temperature).softmax(-1).cpu()
        ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        ordered[ordered.cumsum(-1) - ordered >= self.top_p] = 0
        picks = [torch.multinomial(row, 1, generator=g) for row, g in zip(ordered, generators, strict=True)]
        return tokens.gather(-1, torch.stack(picks)).squeeze(-1).to(logits.device)


class Context:
    """A batch of prompts of one length in one compressed cache. `ids` (B, tokens), the first `prefix` in front of the
    user's text; `words`: for methods that have some of their own for the model.
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
    ) -> None:
        self.model, self.choice, self.budget, self.block_size, self.seeds = model, choice, budget, block_size, seeds
        self.prefix, self.words = prefix, words or Words()
        shape = layout(model)
        choice.method.check(shape.layers, shape.heads, shape.dim, shape.sliding)
        self.course = Course(prompt=0)
        state = State(seeds)
        self.layers: list[Layer | None] = []
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
        self.reread_tokens, self.reread_ms = 0, 0.0  # what reading about the prompt took

    @property
    def own_layers(self) -> list[Layer]:
        """The layers that hold rows (all but sliding-window layers)."""
        return [layer for layer in self.layers if layer is not None]

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        """Read the prompt in blocks, cutting after each. Returns the last token's logits (B, vocab)."""
        prompt = ids.shape[1]
        if self.choice.method.one_block and self.block_size is not None and self.block_size < prompt:
            raise SettingError(f"block_size={self.block_size}: {self.choice.method.name} needs the prompt as one block")
        self.course.prompt, self.course.prefix, self.course.decoding = prompt, min(self.prefix, prompt), False
        blocks = ids.split(self.block_size or prompt, dim=1)
        readings = self._readings(ids)
        with attached(self.model):
            for number, block in enumerate(blocks):
                self.course.last = number == len(blocks) - 1
                rows = None if self.choice.method.reads else self.budget.rows(prompt, self.seen + block.shape[1])
                kept_whole = rows is None or rows >= prompt
                self.course.room = prompt - self.seen - block.shape[1] if kept_whole else 0
                self.course.room += max((reading.ids.shape[1] for reading in readings), default=0)
                logits = self._read(block, None if self.choice.method.rereads else rows, keep=1)
            self.course.last = False
            if readings:
                self._reread(readings, rows)
        for layer in self.own_layers:  # after the last block of all layers: cascades cut earlier ones again
            layer.settle()
        self.course.room = ROOM
        self.logits = logits[:, -1]
        return self.logits

    def _readings(self, ids: Tensor) -> list[Reading]:
        """What the model reads about the prompt before the cut; nothing where all of it is kept."""
        method, prompt = self.choice.method, ids.shape[1]
        quota = self.budget.rows(prompt, prompt)
        if not method.rereads or quota is None or quota >= prompt:
            return []
        readings = list(method.readings(ids, self.course.prefix, self.words))
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if any(int(reading.ids.max()) >= vocabulary for reading in readings):
            raise SettingError(f"method: {method.name} lets the model read token ids above its last, {vocabulary - 1}")
        return readings

    def _reread(self, readings: list[Reading], quota: int) -> None:
        """Let the model read about the prompt, forget what it read but not what the method noted, and cut."""
        begin, layers = now(self.model), self.own_layers
        for reading in readings:
            with self.branch():
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
        self.reread_ms += 1000 * (now(self.model) - begin)
        for layer in layers:
            layer.cut_after_readings(quota)

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> Tensor:
        """Read further tokens (B, t) over the held rows; cut only if the method cuts while decoding. Returns logits
        (B, t, vocab).
        """
        with attached(self.model):
            return self._extend(ids)

    def _extend(self, ids: Tensor) -> Tensor:
        if self.choice.token_by_token and ids.shape[1] > 1:
            return torch.cat([self._extend(token) for token in ids.split(1, dim=1)], dim=1)
        method = self.choice.method
        self.course.decoding = True
        if method.reads:
            self.course.look = self.budget.rows(self.course.prompt, self.seen + ids.shape[1])
        self.since_cut += ids.shape[1]
        rows = None
        if method.decoding and self.since_cut >= method.decode_interval:
            rows = method.decode_size or self.budget.rows(self.course.prompt, self.seen + ids.shape[1])
            self.since_cut = 0
        logits = self._read(ids, rows, keep=0)
        self.logits = logits[:, -1].clone()  # a view would keep the logits of all tokens alive
        return logits

    def _read(self, ids: Tensor, quota: int | None, keep: int) -> Tensor:
        if self.window is not None and self.seen + ids.shape[1] > self.window:
            raise SettingError(
                f"model: every layer has a sliding window of {self.window} tokens, no prompt may be longer"
            )
        self.course.quota = quota
        logits = forward(self.model, ids, self.cache, keep)
        self.seen += ids.shape[1]
        return logits

    @torch.inference_mode()
    def generate(
        self, max_new_tokens: int, sampling: Sampling, stop: frozenset[int], read_last: bool = False
    ) -> Iterator[Tensor]:
        """Token after token, (B,) each, until every sample has given a token of `stop` or `max_new_tokens` are out.
        The last one is read into the cache only if `read_last`: what follows then continues the whole answer.
        """
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        ended = torch.zeros(self.logits.shape[0], dtype=torch.bool, device=self.logits.device)
        for layer in self.own_layers:
            layer.attended.clear()
        for count in range(1, max_new_tokens + 1):
            token = sampling.pick(self.logits, generators)
            yield token
            ended = ended | torch.isin(token, torch.tensor(sorted(stop), device=token.device, dtype=token.dtype))
            over = count == max_new_tokens or bool(ended.all())
            if over and not read_last:
                break
            method, left = self.choice.method, max_new_tokens - count + read_last
            self.course.room = min(left, method.decode_interval) - 1 if method.decoding else left - 1
            with attached(self.model):  # not across a yield: another context may use the model meanwhile
                self._extend(token[:, None])
            if over:
                break
        self.course.room = ROOM

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Whatever is read inside is forgotten afterwards; the compressed context is shared, not computed again."""
        marks = [layer.mark() for layer in self.own_layers]
        sliding = [(c.keys, c.values, c.cumulative_length) for c in self._sliding()]
        seen, since, logits, shared = self.seen, self.since_cut, self.logits, dict(self.own_layers[0].state.shared)
        course = dict(vars(self.course))
        try:
            yield
        finally:
            for layer, mark in zip(self.own_layers, marks, strict=True):
                layer.rewind(mark)
            for own, (keys, values, length) in zip(self._sliding(), sliding, strict=True):
                own.keys, own.values, own.cumulative_length = keys, values, length
            for port in self.cache.layers:
                if hasattr(port, "seen"):
                    port.seen = seen
            self.seen, self.since_cut, self.logits = seen, since, logits
            vars(self.course).update(course)
            self.own_layers[0].state.shared.clear()
            self.own_layers[0].state.shared.update(shared)

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


def now(model: torch.nn.Module) -> float:
    """Seconds, when all that was asked of the model's device is done."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
