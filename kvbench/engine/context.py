"""Blocks in, cuts inside the loop: for every block each layer attends over (held rows ∪ block), the method is asked,
the layer is cut to its quota, and only then the next block is read. Decoding is the same loop with one token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kvbench.cache.accounting import MemoryMeter
from kvbench.cache.guard import (
    Handed,
    check_shape,
    copy_containers,
    count_steps,
    extra_reads,
    find_tensors,
    without_gradients,
)
from kvbench.cache.layer import Layer, Layers, LayerSnapshot
from kvbench.cache.policy import CachePolicy, Progress
from kvbench.cache.storage import Bytes, count_bytes
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.fixed_quota_rows import is_at_quota, is_shift_invariant
from kvbench.engine.graph_decoding import only_appends
from kvbench.engine.graph_prefill import SHORT, GraphPrefill
from kvbench.engine.timing import now
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import ExtraRead, PromptEncoder, State
from kvbench.kernels.dispatch import FAST
from kvbench.models.decoder_weights import collect_weights
from kvbench.models.transformers_port import Frequencies, forward, kvbench_attention, make_cache, read_layout
from kvbench.validation import ContractError, SettingError

MOST = 8192  # tokens of blocks that are read as one: what they take beside the cache stays small
FEW = 4  # whole blocks from which on graphs are captured for them
ROOM = 64  # tokens that growing storage reserves beyond what it needs when the engine does not know how many will come


@dataclass(frozen=True)
class ContextSnapshot:
    """What a context was at some time."""

    layers: list[LayerSnapshot]
    sliding: list[tuple[Tensor, Tensor, int]]  # keys, values, tokens of the layers with a sliding window
    frequencies: Frequencies | None
    seen: int
    since_cut: int
    drawn: int
    logits: Tensor | None
    progress: Progress
    memory: tuple[list[int], int]
    shared: dict[str, Any]  # the method's state of all layers


class PromptContext:
    """A batch of prompts of one length in one compressed cache. `ids` (B, tokens), the first `prefix` in front of the
    user's text; `words`: for methods that have some of their own for the model;
    `compile`: decode in a CUDA graph where that is possible; `answer`: tokens to keep room for where nothing is cut.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        choice: CachePolicy,
        budget: Budget,
        block_size: int | None,
        seeds: tuple[int, ...],
        prefix: int = 0,
        words: PromptEncoder | None = None,
        compile: bool = True,
        answer: int = 0,
    ) -> None:
        self.model, self.choice, self.budget, self.block_size, self.seeds = model, choice, budget, block_size, seeds
        self.device = next(model.parameters()).device.type
        self.prefix, self.words, self.answer = prefix, words or PromptEncoder(), answer
        shape = read_layout(model)
        check_shape(choice.method, shape.layers, shape.heads, shape.dim, shape.sliding)
        state = State(seeds)
        self.layers = Layers(shape.layers)
        for index in range(shape.layers):
            own = None if index in shape.sliding else Layer(index, shape.layers, choice, state, self.layers)
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
        self.path: DecodePath | None = None  # reads the answer that is under way
        usable = compile and can_capture(model) and only_appends(choice)
        self.weights = collect_weights(model) if usable else None  # of models that can be decoded in a graph

    @property
    def progress(self) -> Progress:
        return self.layers.progress

    def set_progress(self, **changes: Any) -> None:
        """Tell the layers where the prompt stands (`Progress`)."""
        self.layers.progress = replace(self.progress, **changes)

    @property
    def memory(self) -> MemoryMeter:
        """Bytes that the layers occupy, and the most they ever did; sliding-window layers are not among them."""
        return self.layers.memory

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
        captured = self.weights is not None and is_shift_invariant(self.choice) and size <= SHORT and not each
        captured = captured and self.budget.of == "prompt"
        quota = self.budget.rows(prompt, prompt) if captured else None
        with kvbench_attention(self.model):
            while self.seen < prompt:
                tokens = min(size, prompt - self.seen)
                if quota is not None and self.seen < quota:  # blocks that fit the quota are cut by nothing: read as one
                    tokens = min(prompt - self.seen, max(size, min(quota - self.seen, MOST) // size * size))
                block = ids[:, self.seen : self.seen + tokens]
                rows = self.expect(tokens, max((reading.ids.shape[1] for reading in again), default=0))
                logits = self._read(block, self.progress.quota, keep=0 if each else 1)
                if each:
                    each(logits)
                count = (prompt - self.seen - 1) // size  # whole blocks before the last
                if quota is not None and count >= FEW and is_at_quota(self.own_layers, quota):
                    more = ids[:, self.seen : self.seen + count * size]
                    GraphPrefill(self.weights, self.own_layers, more, size, quota, self.seen).read()
                    self.count_tokens(more.shape[1])
            self.set_progress(last=False)
            if again:
                self._reread(again, rows)
        last = logits[:, -1].clone() if each else logits[:, -1]  # a view would keep the block's alive
        return self.end(last)

    def begin(self, prompt: int) -> None:
        """A prompt of so many tokens comes."""
        self.set_progress(prompt=prompt, prefix=min(self.prefix, prompt), decoding=False)

    def expect(self, tokens: int, read_again: int = 0) -> int | None:
        """The next so many tokens of the prompt come; `read_again`: tokens that the model reads after the prompt and
        forgets. Returns rows per head that the cut behind them leaves, None for all.
        """
        method, prompt, seen = self.choice.method, self.progress.prompt, self.seen + tokens
        rows = None if method.attends_subset else self.budget.rows(prompt, seen)
        keeps_all = rows is None or rows >= prompt
        self.set_progress(
            last=seen == prompt,
            share=self.budget.share(prompt, seen),
            quota=None if method.needs_extra_reads else rows,
            room=(prompt - seen + self.answer if keeps_all else 0) + read_again,
        )
        return rows

    def passed(self, tokens: int, frequencies: Frequencies | None) -> None:
        """The tokens that were expected went through all layers, but not through this context's own cache: the model
        read them with these `frequencies`.
        """
        self.count_tokens(tokens)
        if frequencies is not None:
            self.cache.frequencies.take_over(frequencies)
        self._check()

    def end(self, logits: Tensor) -> Tensor:
        """The prompt is read; `logits` (B, vocab) of its last token."""
        self.set_progress(last=False, room=ROOM)
        for layer in self.own_layers:  # after the last block of all layers: cascades cut earlier ones again
            layer.pack_all()
        self.logits = logits
        return logits

    def _readings(self, ids: Tensor) -> list[ExtraRead]:
        """What the model reads about the prompt before the cut; nothing where all of it is kept."""
        method, prompt = self.choice.method, ids.shape[1]
        quota = self.budget.rows(prompt, prompt)
        if not method.needs_extra_reads or quota is None or quota >= prompt:
            return []
        found = extra_reads(method, ids, self.progress.prefix, self.words, self.choice.exact)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if any(int(reading.ids.max()) >= vocabulary for reading in found):
            raise SettingError(f"method: {method.name} lets the model read token ids above its last, {vocabulary - 1}")
        return found

    def _reread(self, readings: list[ExtraRead], quota: int) -> None:
        """Let the model read about the prompt, forget what it read but not what the method noted, and cut."""
        begin, layers = now(self.device), self.own_layers
        for reading in readings:
            with self.branch(keeps_state=True):
                self.set_progress(about=(reading.start, reading.stop))
                self._read(reading.ids, None, keep=1)
                noted = [(dict(layer.state.layer), layer.tally.peak_attended) for layer in layers]
                shared, peak = dict(layers[0].state.shared), self.memory.peak
            for layer, (own, attended) in zip(layers, noted, strict=True):
                layer.state.layer = own
                layer.count_peak_attended(attended)
                layer.update_memory()
            layers[0].state.shared.update(shared)
            self.memory.peak = max(self.memory.peak, peak)
            self.reread_tokens += reading.ids.shape[1]
        self.reread_ms += 1000 * (now(self.device) - begin)
        self.set_progress(quota=quota)
        for layer in layers:
            layer.stamp()
        for layer in layers:
            layer.cut_after_readings(quota)
        self._check()
        self.set_progress(quota=None)

    @without_gradients
    def extend(self, ids: Tensor) -> Tensor:
        """Read further tokens (B, t) over the held rows; cut only if the method cuts while decoding. Returns logits
        (B, t, vocab).
        """
        self.leave_path()
        with kvbench_attention(self.model):
            return self.read_tokens(ids)

    def read_tokens(self, ids: Tensor) -> Tensor:
        """Read tokens (B, t) that follow the prompt through the attached model. Returns logits (B, t, vocab)."""
        if self.choice.token_by_token and ids.shape[1] > 1:
            return torch.cat([self.read_tokens(token) for token in ids.split(1, dim=1)], dim=1)
        method, seen, rows = self.choice.method, self.seen + ids.shape[1], None
        quota = self.find_decode_quota(seen) if method.decoding else None
        self.since_cut += self._steps(ids.shape[1], quota)
        if method.decoding and self.since_cut >= method.decode_interval:
            rows = quota
            self.since_cut = 0
        self.set_progress(
            decoding=True,
            look=self.budget.rows(self.progress.prompt, seen) if method.attends_subset else self.progress.look,
            share=None if rows is None else Fraction(rows),
        )
        logits = self._read(ids, rows, keep=0)
        self.logits = logits[:, -1].clone()  # a view would keep the logits of all tokens alive
        return logits

    def _steps(self, tokens: int, quota: int | None) -> int:
        """What the method says that reading `tokens` counts towards the next cut; it may have kept references too."""
        if not self.choice.method.overrides("steps"):
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
        self.set_progress(quota=quota)
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
        quota, allocator = self.progress.quota, self.choice.allocator
        if quota is not None and not self.choice.method.sets_head_quotas:
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

    def find_decode_quota(self, seen: int) -> int | None:
        """Rows per head that a cut while decoding leaves when `seen` tokens are read, None for all."""
        return self.choice.method.decode_size or self.budget.rows(self.progress.prompt, seen)

    @without_gradients
    def leave_path(self) -> None:
        """End the answer that is under way, if there is one: what is asked for now comes behind it."""
        path, self.path = self.path, None
        if path is not None:
            path.close()

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that did not go through the model's modules."""
        self.seen += tokens
        for port in self.cache.layers:
            port.seen = self.seen

    @contextmanager
    def branch(self, keeps_state: bool = False) -> Iterator[None]:
        """Whatever is read inside is forgotten afterwards; the compressed context is shared, not computed again.
        `keeps_state`: the caller keeps what the method notes inside, so the method may write it in place.
        """
        self.leave_path()
        snapshot, lent = self.snapshot(), self._lent()
        kept = self.own_layers[0].guard.handed()
        for name, tensor in find_tensors({"state.shared": snapshot.shared}):
            kept.add(name, tensor)
        try:
            yield
        finally:
            self.restore(snapshot)
        checked = [(lent, "a hook that kept a reference to what it was handed")]
        if not keeps_state:
            for layer, own in zip(self.own_layers, snapshot.layers, strict=True):
                layer.check_snapshot(own)
            checked.append((kept, "a hook"))
        for written, hook in checked:
            if found := written.written():
                self.own_layers[0].guard.report(self.choice.owners, hook, found)

    def snapshot(self) -> ContextSnapshot:
        """Everything that `restore` needs. Rows are shared, not copied."""
        frequencies = self.cache.frequencies
        return ContextSnapshot(
            layers=[layer.snapshot() for layer in self.own_layers],
            sliding=[(own.keys, own.values, own.cumulative_length) for own in self.sliding_layers()],
            frequencies=frequencies and frequencies.copy(),
            seen=self.seen, since_cut=self.since_cut, drawn=self.drawn, logits=self.logits,
            progress=self.progress, memory=self.memory.snapshot(),
            shared=copy_containers(self.own_layers[0].state.shared),
        )  # fmt: skip

    def restore(self, snapshot: ContextSnapshot) -> None:
        """Return to a snapshot, also from an answer that was not ended."""
        self.path = None
        for layer, own in zip(self.own_layers, snapshot.layers, strict=True):
            layer.restore(own)
        for own, (keys, values, length) in zip(self.sliding_layers(), snapshot.sliding, strict=True):
            own.keys, own.values, own.cumulative_length = keys, values, length
        if snapshot.frequencies:
            self.cache.frequencies.take_over(snapshot.frequencies)
        self.since_cut, self.drawn, self.logits = snapshot.since_cut, snapshot.drawn, snapshot.logits
        self.seen = snapshot.seen
        for port in self.cache.layers:
            if hasattr(port, "seen"):
                port.seen = snapshot.seen
        self.layers.progress = snapshot.progress
        self.memory.restore(snapshot.memory)
        shared = self.own_layers[0].state.shared
        shared.clear()
        shared.update(snapshot.shared)

    def _lent(self) -> Handed:
        """What other contexts still hold of the keys and values that this context's method was handed."""
        found = self.own_layers[0].guard.handed()
        own = {id(tensor) for layer in self.own_layers for tensor in layer.rows.named_tensors().values()}
        for index, reference in self.lent:
            if (tensor := reference()) is not None and id(tensor) not in own:
                found.add(f"keys or values of layer {index}, which other runs share", tensor)
        return found

    def sliding_layers(self) -> list:
        """transformers' own cache layers of the layers with a sliding window."""
        return [own for own, layer in zip(self.cache.layers, self.layers, strict=True) if layer is None]

    def bytes(self) -> Bytes:
        """What the cache occupies now; sliding-window layers count as rows."""
        total = sum((layer.bytes() for layer in self.own_layers), Bytes())
        shared = count_bytes(v for v in self.own_layers[0].state.shared.values() if isinstance(v, Tensor))
        return total + Bytes(rows=self.sliding_bytes(), state=shared)

    def sliding_bytes(self) -> int:
        """Bytes of the sliding-window layers' own caches, which no method touches."""
        return sum(c.keys.nbytes + c.values.nbytes for c in self.sliding_layers() if c.is_initialized)

    def full_bytes(self) -> int:
        """Bytes that keys and values of all tokens seen would take."""
        return self.sliding_bytes() + sum(layer.full_bytes() for layer in self.own_layers)


def can_capture(model: torch.nn.Module) -> bool:
    """Whether the model is where graphs are recorded, in a dtype of the kernels: a reference waits for the host."""
    like = next(model.parameters())
    return like.is_cuda and like.device.index == torch.cuda.current_device() and like.dtype in FAST
