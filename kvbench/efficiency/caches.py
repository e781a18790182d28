"""What is measured: a prompt read into a cache, made a batch, and continued. kvbench's cache and transformers' own.

subject.read(ids)            the prompt (B, n): its last logits are there, and the first token
subject.replicate(times)     one prompt as a batch of many
subject.answer(count)        the answer, greedy: milliseconds from each token to the next
"""

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from itertools import islice, pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.storage import Bytes
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.engine.sampling import Sampling
from kvbench.engine.timing import Stamps
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.transformers_port import make_plain_cache
from kvbench.runs.spec import DTYPES, RunSpec

WARMED = 8  # steps of an answer before the median is taken, or half of a short answer


class CacheUnderTest(Protocol):
    """One prompt, or a batch, and its answer."""

    def read(self, ids: Tensor) -> None: ...

    def replicate(self, times: int) -> None: ...

    def answer(self, count: int, most: int | None = None) -> list[float]:
        """`most`: stop after as many tokens, with room for all of them."""

    def bytes(self) -> Bytes: ...

    def drop(self) -> None: ...


class KVBenchCache:
    """The method, allocator and codec of a run, in kvbench's own cache."""

    def __init__(self, model: torch.nn.Module, run: RunSpec, room: int) -> None:
        self.model, self.run, self.room = model, run, room
        self.capture_ms, self.path = 0.0, ""  # of the last answer: capturing graphs, and what read its tokens

    def read(self, ids: Tensor) -> None:
        run, seeds = self.run, (self.run.seed,) * len(ids)
        self.context = GenerationContext(
            self.model, run.choice(), run.budget, run.block_size, seeds, compile=run.compile, answer=self.room
        )
        self.context.prefill(ids)

    def replicate(self, times: int) -> None:
        replicate(self.context, times, self.room)

    def answer(self, count: int, most: int | None = None) -> list[float]:
        with closing(self.context.generate(count, Sampling(), frozenset())) as tokens:
            for _ in islice(tokens, most):
                pass
        stamps = self.context.stamps[:most]
        self.capture_ms, self.path = self.context.capture_ms, self.context.decoding
        return [1000 * (after - before) for before, after in pairwise(stamps)]

    def bytes(self) -> Bytes:
        return self.context.bytes()

    def drop(self) -> None:
        self.context = None


class StepwiseAnswer:
    """Answers step by step; the time of a step is the device's, nothing waits in between."""

    capture_ms, path = 0.0, ""

    def answer(self, count: int, most: int | None = None) -> list[float]:
        stamps = Stamps(self.token.device.type)
        for _ in islice(self.tokens(count), most):
            stamps.put()
        return stamps.between()


class TransformersDynamic(StepwiseAnswer):
    """transformers' dynamic cache as users have it: model.forward, SDPA, a greedy loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        self.cache = make_plain_cache(self.model)
        logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def replicate(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.token = self.token.repeat(times, 1)

    def tokens(self, count: int) -> Iterator[None]:
        yield
        for _ in range(count - 1):
            with torch.no_grad():
                logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
                self.token = logits[:, -1:].argmax(-1)
            yield

    def bytes(self) -> Bytes:
        return Bytes(rows=sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers))

    def drop(self) -> None:
        self.cache = None


class TransformersStatic(StepwiseAnswer):
    """transformers' static cache of `rows` tokens and the answer; the step of one token compiled, in a CUDA graph. What
    it holds was read into a dynamic cache and copied: only its decoding is compared.
    """

    def __init__(self, model: torch.nn.Module, rows: int, room: int, compiled: bool = True) -> None:
        self.model, self.rows, self.room = model, rows, room
        self.cache = None
        self.step = self.plain_step
        if compiled:
            self.step = torch.compile(self.plain_step, mode="reduce-overhead", dynamic=False)
            self.begin = torch.compiler.cudagraph_mark_step_begin

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        grown = TransformersDynamic(self.model)
        grown.read(ids)
        if self.cache is None:
            self.cache = make_plain_cache(self.model, self.rows + self.room)
        else:
            self.cache.reset()  # the same addresses: the graph stays valid
        for index, layer in enumerate(grown.cache.layers):
            self.cache.update(layer.keys, layer.values, index)
        self.token, self.place = grown.token, torch.full((1, 1), self.rows, device=ids.device)

    def begin(self) -> None:
        """A step begins: what the graph returned before is not needed any more."""

    def plain_step(self, token: Tensor, place: Tensor) -> Tensor:
        logits = self.model(input_ids=token, position_ids=place, past_key_values=self.cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    def tokens(self, count: int) -> Iterator[None]:
        yield
        for _ in range(count - 1):
            with torch.no_grad():
                self.begin()
                self.token = self.step(self.token, self.place).clone()  # the graph writes over what it returned
                self.place += 1
            yield

    def bytes(self) -> Bytes:
        return Bytes(rows=sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers))

    def drop(self) -> None:
        """Nothing: the graph needs its addresses, and the next prompt is written over this one."""


def make_cache_under_test(model: torch.nn.Module, run: RunSpec) -> CacheUnderTest:
    """The one that a run names."""
    room = max(run.task.ends)
    if run.task.baseline == "dynamic":
        return TransformersDynamic(model)
    if run.task.baseline == "static_compiled":
        return TransformersStatic(model, run.task.rows or run.task.length, room)
    return KVBenchCache(model, run, room)


@lru_cache(maxsize=1)
def load_weights(checkpoint: Checkpoint, dtype: str, device: str) -> torch.nn.Module:
    """The model; one a process is kept for the cells that follow."""
    return checkpoint.weights(DTYPES[dtype], device)


def load_model(run: RunSpec) -> torch.nn.Module:
    return load_weights(run.checkpoint, run.dtype, run.device)


def draw_prompt(run: RunSpec, model: torch.nn.Module, batch: int | None = None) -> Tensor:
    """(B, n) random tokens: of a static cache as many as it holds."""
    size = (batch or run.task.batch, run.task.rows or run.task.length)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(run.seed)).to(run.device)
