"""The caches that are measured: kvbench's and transformers' own.

Each reads a prompt, can copy it to a batch, and generates a greedy answer.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvbench.cache.layer import Layer
from kvbench.cache.storage import Bytes
from kvbench.efficiency.measured_task import WARMED, list_ends, read_task
from kvbench.engine.generation import Answer, GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.engine.sampling import Sampling
from kvbench.engine.timing import Stamps, spread
from kvbench.interfaces.derived_method import derive_method
from kvbench.interfaces.method import Method
from kvbench.kernels.dispatch import force_implementation
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.transformers_port import (
    copy_plain_rows,
    count_plain_rows,
    count_plain_states,
    make_plain_cache,
    repeat_plain_rows,
    text_config,
)
from kvbench.runs.spec import RunSpec


def drop_warmed(steps: list[float]) -> list[float]:
    """Return the steps of an answer that are timed."""
    return steps[min(WARMED, len(steps) // 2) :]


def spread_tokens(answers: Sequence[Sequence[float]], interval: int) -> dict[str, float]:
    """Return the spread of the tokens' times, with their 99th percentile.

    Args:
        answers: Of each answer, the milliseconds of its timed tokens.
        interval: Tokens of an interval of periodic work. `intervals` is how many whole ones the shortest answer has.
    """
    steps = [step for answer in answers for step in answer]
    whole = min(map(len, answers)) // interval
    return spread(steps) | {"p99": float(np.quantile(steps, 0.99)), "intervals": whole}


class CacheUnderTest(Protocol):
    """A cache that holds one prompt or a batch, and its answer.

    Attributes:
        capture_ms: Milliseconds that the last answer took to capture graphs.
        path: What read the last answer's tokens.
    """

    capture_ms: float
    path: str

    def read(self, ids: Tensor) -> None:
        """Read a prompt, shape (B, n), up to its first answer token."""

    def answer(self, count: int, most: int | None = None) -> list[float]:
        """Generate `count` tokens greedily, or only `most` of them with room for all.

        Returns:
            Milliseconds from each token to the next.
        """

    def bytes(self) -> Bytes:
        """Return the bytes that the cache holds."""

    def bytes_per_token(self) -> int:
        """Return the bytes of the cache that one further token must read."""

    def bytes_after(self) -> int:
        """Return the bytes of the rows at the end of the last answer."""

    def operations_per_token(self) -> int:
        """Return the operations that make the rows of one further token, beside those of attention."""

    def drop(self) -> None:
        """Free the cache."""


class ReplicableCache(CacheUnderTest, Protocol):
    """A cache that can copy its prompt to a batch."""

    def replicate(self, times: int) -> None:
        """Copy the one prompt to a batch."""


class KVBenchCache:
    """The method, allocator and codec of a run, in kvbench's own cache."""

    def __init__(self, model: torch.nn.Module, run: RunSpec, room: int) -> None:
        self.model, self.run, self.room = model, run, room
        self.choice = run.choice()  # once, because no time may contain reading its files
        self.capture_ms, self.path, self.count = 0.0, "", 0
        self._context: GenerationContext | None = None

    @property
    def context(self) -> GenerationContext:
        """The context that read the prompt."""
        assert self._context is not None  # `read` has made it
        return self._context

    def read(self, ids: Tensor) -> None:
        run, seeds = self.run, (self.run.seed,) * len(ids)
        self._context = GenerationContext(
            self.model, self.choice, run.budget, run.block_size, seeds, compile=run.compile, answer=self.room
        )
        self.context.prefill(ids)

    def replicate(self, times: int) -> None:
        replicate(self.context, times, self.room)

    def generate(self, count: int) -> Generator[None]:
        """Generate a greedy answer to the prompt, a token at each step, as a run does: no rows of its tokens stay."""
        with self.context.branch(), closing(Answer(self.context, count, Sampling(), frozenset())) as answer:
            yield
            while not answer.is_over:
                if answer.step():
                    yield

    def answer(self, count: int, most: int | None = None) -> list[float]:
        self.count = 0  # if memory runs out, there is no answer
        for _ in islice(self.generate(count), most):
            pass
        stamps, self.count = self.context.stamps[:most], count
        self.capture_ms, self.path = self.context.capture_ms, self.context.decoding
        return [1000 * (after - before) for before, after in pairwise(stamps)]

    def bytes(self) -> Bytes:
        return self.context.bytes()

    def bytes_per_token(self) -> int:
        """Return the bytes of the cache that one further token must read.

        If the method attends to few of many rows, a row counts once for all query heads of a group that attend to it.
        What the method remembers in order to choose rows counts too, if a layer chooses. Of rows that a codec makes,
        what `Codec.count_needs` says counts.
        """
        context, held = self.context, self.context.bytes()
        if self.choice.codec.packing.lists_rows:
            return sum(read for read, _ in self.count_needs()) + context.sliding_bytes() + held.state + held.recurrent
        if not self.choice.method.attends_subset:
            return held.rows + held.recurrent
        with context.branch(), ExitStack() as stack:
            counts = [stack.enter_context(count_rows_read(layer)) for layer in context.own_layers]
            context.extend(context.last_logits.argmax(-1, keepdim=True))
            read = sum(
                layer.bytes().rows * (sum(rows) / layer.rows.mean_rows if rows else 1)
                for rows, layer in zip(counts, context.own_layers, strict=True)
            )
        return round(read) + context.sliding_bytes() + held.recurrent + (held.state if any(counts) else 0)

    def bytes_after(self) -> int:
        context = self.context
        with context.branch():
            # token by token, because the cuts of an answer are not those of one block
            for _ in context.generate(max(1, self.count), Sampling(), frozenset()):
                pass
            return context.bytes().rows

    def operations_per_token(self) -> int:
        return sum(operations for _, operations in self.count_needs()) if self.choice.codec.packs else 0

    def count_needs(self) -> list[tuple[int, int]]:
        """Return what one further token must read in each layer, in bytes, and the operations that make rows of it."""
        context = self.context
        with context.branch():
            context.extend(context.last_logits.argmax(-1, keepdim=True))
            return [layer.count_needs() for layer in context.own_layers]

    def drop(self) -> None:
        self._context = None


def force_scoring(method: Method, implementation: str) -> Method:
    """Return the method, whose score and what it remembers for it are computed with this implementation.

    All else that a prefill computes, such as attention and the selection of rows, stays what a run takes.
    """
    of = type(method)

    def force(hook: Callable[..., Any]) -> Callable[..., Any]:
        def forced(*given: object) -> object:
            with force_implementation(implementation):
                return hook(*given)

        return forced

    hooks = {name: force(getattr(of, name)) for name in ("update", "score") if method.overrides(name)}
    return derive_method(method, hooks)


@contextmanager
def count_rows_read(layer: Layer) -> Iterator[list[float]]:
    """Yield a list that gets the mean number of rows of a KV head that each token read by the modules attends to.

    Tokens that attend to all rows, because the method does not choose, add nothing.
    """
    counts: list[float] = []
    count = layer.count_attended

    def counting(look: Tensor | None, mass: Tensor | None) -> None:
        if look is not None:
            counts.append(look.unflatten(1, (layer.rows.shape[1], -1)).any(2).sum(-1).float().mean().item())
        count(look, mass)

    setattr(layer, "count_attended", counting)  # noqa: B010 (mypy refuses the assignment)
    try:
        yield counts
    finally:
        delattr(layer, "count_attended")


class StepwiseAnswer:
    """Answers step by step. The device takes the time of a step, and nothing waits between steps."""

    capture_ms = 0.0
    path = ""
    token: Tensor

    def tokens(self, count: int) -> Iterator[None]:
        """Generate one token at each step."""
        raise NotImplementedError

    def bytes(self) -> Bytes:
        """Return the bytes that the cache holds."""
        raise NotImplementedError

    def bytes_after(self) -> int:
        """Return the bytes of the rows, because those of the answer stay."""
        return self.bytes().rows

    def operations_per_token(self) -> int:
        """Return 0: rows are attended to as they are stored."""
        return 0

    def answer(self, count: int, most: int | None = None) -> list[float]:
        stamps = Stamps(self.token.device.type)
        for _ in islice(self.tokens(count), most):
            stamps.put()
        return stamps.between()


class TransformersDynamic(StepwiseAnswer):
    """transformers' dynamic cache as users call it: model.forward, SDPA, a greedy loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.cache = model, make_plain_cache(model)

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        self.cache = make_plain_cache(self.model)
        logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def replicate(self, times: int) -> None:
        repeat_plain_rows(self.cache, times)
        self.token = self.token.repeat(times, 1)

    def tokens(self, count: int) -> Iterator[None]:
        yield
        for _ in range(count - 1):
            with torch.no_grad():
                logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
                self.token = logits[:, -1:].argmax(-1)
            yield

    def bytes(self) -> Bytes:
        return Bytes(rows=count_plain_rows(self.cache), recurrent=count_plain_states(self.cache))

    def bytes_per_token(self) -> int:
        return self.bytes().rows + self.bytes().recurrent

    def drop(self) -> None:
        self.cache = make_plain_cache(self.model)


class TransformersStatic(StepwiseAnswer):
    """transformers' static cache with room for `rows` tokens and the answer.

    The step of one token is compiled and runs in a CUDA graph. The prompt is read into a dynamic cache and copied,
    because only decoding is compared.
    """

    def __init__(self, model: torch.nn.Module, rows: int, room: int, compiled: bool = True) -> None:
        self.model, self.rows, self.compiled = model, rows, compiled
        self.cache = make_plain_cache(model, rows + room)
        self.step: Callable[[Tensor, Tensor], Tensor] = self.plain_step
        if compiled:
            self.step = torch.compile(self.plain_step, mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        grown = TransformersDynamic(self.model)
        grown.read(ids)
        self.cache.reset()  # the same addresses: the graph stays valid
        copy_plain_rows(grown.cache, self.cache)
        self.token, self.place = grown.token, torch.full((1, 1), self.rows, device=ids.device)

    def plain_step(self, token: Tensor, place: Tensor) -> Tensor:
        logits = self.model(input_ids=token, position_ids=place, past_key_values=self.cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    def tokens(self, count: int) -> Iterator[None]:
        yield
        for _ in range(count - 1):
            with torch.no_grad():
                if self.compiled:
                    torch.compiler.cudagraph_mark_step_begin()  # the graph may overwrite what it returned before
                self.token = self.step(self.token, self.place).clone()
                self.place += 1
            yield

    def bytes(self) -> Bytes:
        return Bytes(rows=count_plain_rows(self.cache), recurrent=count_plain_states(self.cache))

    def bytes_per_token(self) -> int:
        return self.bytes().rows + self.bytes().recurrent

    def drop(self) -> None:
        """Do nothing: the graph needs its addresses, and the next prompt overwrites this one."""


def make_cache_under_test(model: torch.nn.Module, run: RunSpec) -> CacheUnderTest:
    """Make the cache that a run names."""
    task = read_task(run)
    if task.baseline == "static_compiled":
        return TransformersStatic(model, task.rows or task.length, max(list_ends(run)))
    return make_replicable_cache(model, run)


def make_replicable_cache(model: torch.nn.Module, run: RunSpec) -> ReplicableCache:
    """Make the cache that a run names. It is not the static one, whose graph is compiled for one batch."""
    task = read_task(run)
    if task.baseline == "dynamic":
        return TransformersDynamic(model)
    cache = KVBenchCache(model, run, max(list_ends(run)))
    if task.implementation is not None:
        cache.choice = replace(cache.choice, method=force_scoring(cache.choice.method, task.implementation))
    return cache


@lru_cache(maxsize=1)
def load_weights(checkpoint: Checkpoint, dtype: str, device: str) -> torch.nn.Module:
    """Load a model. The last one is kept for the next cells."""
    return checkpoint.weights(getattr(torch, dtype), device)


def load_model(run: RunSpec) -> torch.nn.Module:
    """Load the model of a run."""
    return load_weights(run.checkpoint, run.dtype, run.device)


def draw_prompt(run: RunSpec, model: torch.nn.Module, batch: int | None = None) -> Tensor:
    """Draw random tokens, shape (B, n). For a static cache, n is the number of its rows."""
    task = read_task(run)
    size = (batch or task.batch, task.rows or task.length)
    vocabulary = text_config(model).vocab_size
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(run.seed)).to(run.device)
