"""Read a prompt into a compressed cache, block by block.

For every block, each layer attends to its rows and the block, asks the method, and is cut to its quota. Only then is
the next block read. Decoding is the same loop with blocks of one token.
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
from kvbench.cache.guard import Guard, Handed, copy_containers, find_tensors, without_gradients
from kvbench.cache.hook_table import guard_hooks
from kvbench.cache.layer import Layer, Layers, LayerSnapshot
from kvbench.cache.policy import CachePolicy, Progress
from kvbench.cache.refusals import explain_one_block
from kvbench.cache.storage import Bytes, count_bytes
from kvbench.engine.answer_quotas import replaces_rows
from kvbench.engine.appended_rows import only_appends
from kvbench.engine.decode_path import DecodePath
from kvbench.engine.graph_prefill import SHORT, GraphPrefill
from kvbench.engine.quota_rows import cuts_in_graph, is_at_quota, repeats_cuts
from kvbench.engine.read_rows import reads_in_graph
from kvbench.engine.spending import spend
from kvbench.engine.timing import now
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.observation import ExtraRead, PromptEncoder, State
from kvbench.kernels.dispatch import FAST
from kvbench.models.admission import admit_model
from kvbench.models.decoder_weights import DecoderWeights, collect_weights
from kvbench.models.layer_state import LayerState
from kvbench.models.transformers_port import (
    CacheLayerPort,
    Frequencies,
    differentiate,
    forward,
    kvbench_attention,
    make_cache,
    read_layout,
    text_config,
)
from kvbench.stops import check_stop
from kvbench.validation import ContractError, SettingError

MOST = 8192  # most tokens that are read at once in place of several blocks, so that activations stay small
FEW = 4  # a graph is captured for this many whole blocks or more
ROOM = 64  # tokens that growing storage reserves ahead if the engine does not know how many will come


@dataclass(frozen=True)
class ContextSnapshot:
    """The state of a context at some time."""

    layers: list[LayerSnapshot]
    sliding: list[tuple[Tensor, Tensor, int]]
    """Keys, values and number of tokens of each layer with a sliding window."""
    recurrent: list[LayerState]
    """Copies of the states of each layer with a recurrent or convolutional state."""
    frequencies: Frequencies | None
    seen: int
    since_cut: int
    drawn: int
    logits: Tensor | None
    progress: Progress
    memory: tuple[list[int], int]
    shared: dict[str, Any]
    """The method's state that all layers share."""


class PromptContext:
    """A batch of prompts of one length in one compressed cache."""

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
        like: "PromptContext | None" = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model: A supported transformers model.
            choice: The method, allocator and codec.
            budget: How many rows may stay.
            block_size: Number of tokens read between two cuts. `None` reads the prompt as one block.
            seeds: One seed per sample.
            prefix: Number of tokens before the user's text.
            words: Turns a method's own words to the model into token ids.
            compile: Whether to use CUDA graphs if possible.
            answer: Number of tokens to reserve memory for if nothing is cut.
            like: A context just made for the same model, which lends the weights that it has collected.

        Raises:
            SettingError: The method cannot serve this model.
        """
        self.model, self.choice, self.budget, self.block_size, self.seeds = model, choice, budget, block_size, seeds
        self.device = next(model.parameters()).device.type
        self.prefix, self.words, self.answer = prefix, words or PromptEncoder(), answer
        admit_model(model)
        shape = read_layout(model)
        choice.check(shape)
        state = State(seeds)
        self.layers, held = Layers(shape.layers), set(shape.held)
        for index in range(shape.layers):
            cut_layer = Layer(index, shape.layers, choice, state, self.layers) if index in held else None
            self.layers.append(cut_layer)
        self.sliding, self.window = shape.sliding, shape.window
        self.cache = make_cache(model, self.layers)
        self.logits: Tensor | None = None  # of the last token read, (B, vocab)
        self.seen = 0
        self.since_cut = 0
        self.drawn = 0  # tokens generated; a further answer continues the stream of random numbers
        self.reread_tokens, self.reread_ms = 0, 0.0  # tokens and time of extra reads
        self.stamps: list[float] = []  # seconds from the start of `generate` to each token, without capturing
        self.capture_ms = 0.0  # time that capturing graphs took
        self.decoding = "modules"  # how the answer's tokens were read: "modules" or "graph"
        self.decoded_together = 1  # contexts whose answers were decoded as one batch, this one included
        self.lent: list[tuple[int, ref[Tensor]]] = []  # layer, and keys or values that other contexts may share
        self.watched: list[Handed] = []  # the same tensors while `branch` watches them
        self.path: DecodePath | None = None  # reads the current answer
        self.method = guard_hooks(choice.method, Guard(exact=choice.exact))  # its hooks that belong to no layer
        self.defers_faults = False  # whether blocks are read ahead of the device, until `raise_faults` is called
        usable = compile and can_capture(model) and decodes_in_graph(choice)
        lent = like.weights if like is not None else None
        weights = (lent or collect_weights(model)) if usable else None
        if weights is not None and choice.codec.packing.takes_unrotated_keys and not has_plain_keys(weights, shape):
            weights = None
        self.weights: DecoderWeights | None = weights  # None if the model cannot be decoded in a graph

    @property
    def progress(self) -> Progress:
        """How far the prompt has been read."""
        return self.layers.progress

    def set_progress(self, **changes: Any) -> None:
        """Tell the layers how far the prompt has been read (fields of `Progress`)."""
        self.layers.progress = replace(self.progress, **changes)

    @property
    def memory(self) -> MemoryMeter:
        """The bytes that the layers occupy, and their peak. Windows and recurrent states are not included."""
        return self.layers.memory

    @property
    def own_layers(self) -> list[Layer]:
        """The layers whose rows kvbench holds (`Layout.held`)."""
        return [layer for layer in self.layers if layer is not None]

    @without_gradients
    def prefill(self, ids: Tensor, each: Callable[[Tensor], None] | None = None) -> Tensor:
        """Read the prompt in blocks and cut after each block.

        Args:
            ids: Token ids, (B, tokens).
            each: Called with the logits of every block, (B, tokens, vocab), before the next block is read.

        Returns:
            The logits of the last token, (B, vocab).

        Raises:
            SettingError: The method needs the prompt as one block, or the prompt is longer than the model's window.
            ContractError: A hook broke its contract.
        """
        prompt = ids.shape[1]
        if self.choice.method.one_block and self.block_size is not None and self.block_size < prompt:
            method = self.choice.method
            raise SettingError(f"block_size={self.block_size}: {method.name} {explain_one_block(method)}")
        self.begin(prompt)
        rows: int | None = None
        again, size = self._readings(ids), self.block_size or prompt
        captured = self.weights is not None and repeats_cuts(self.choice) and size <= SHORT and not each
        captured = captured and not self._is_too_long(size * len(ids))
        captured = captured and self.choice.allocator.is_uniform
        captured = captured and self.budget.of == "prompt" and self.fits_window(prompt)
        captured = captured and not self.choice.captures_state and not self.choice.asks_for_inputs
        captured = captured and not self.choice.codec.packing.before_attention
        quota = self.budget.rows(prompt, prompt) if captured else None
        with kvbench_attention(self.model):
            while self.seen < prompt:
                check_stop()
                tokens = min(size, prompt - self.seen)
                # blocks below the quota are never cut, so read several at once
                if quota is not None and self.seen < quota:
                    tokens = min(prompt - self.seen, max(size, min(quota - self.seen, MOST) // size * size))
                block = ids[:, self.seen : self.seen + tokens]
                rows = self.expect(tokens, max((reading.ids.shape[1] for reading in again), default=0))
                logits = self._read(block, self.progress.quota, keep=0 if each else 1)
                if each:
                    each(logits)
                count = (prompt - self.seen - 1) // size  # whole blocks before the last block
                if quota is not None and self.weights and count >= FEW and is_at_quota(self.own_layers, quota):
                    more = ids[:, self.seen : self.seen + count * size]
                    windows = self.sliding_layers()
                    GraphPrefill(self.weights, self.own_layers, windows, more, size, quota).read()
                    self.count_tokens(more.shape[1])
            self.set_progress(last=False)
            if again and rows is not None:
                self._reread(again, rows)
        last = logits[:, -1].clone() if each else logits[:, -1]  # a view would keep the logits of the block alive
        return self.end(last)

    def _is_too_long(self, tokens: int) -> bool:
        """Return whether the model's modules read a block of this many tokens faster than kvbench's own step."""
        longest = None if self.weights is None else self.weights.longest_block
        return longest is not None and tokens > longest

    def begin(self, prompt: int) -> None:
        """Begin a prompt of this many tokens."""
        self.set_progress(prompt=prompt, prefix=min(self.prefix, prompt), decoding=False)

    def expect(self, tokens: int, read_again: int = 0) -> int | None:
        """Prepare the layers for the next block of the prompt.

        Args:
            tokens: Number of tokens of the block.
            read_again: Number of tokens that the model reads after the prompt and then forgets.

        Returns:
            Rows per head that the cut after the block leaves, or None for all rows.
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
        """Count a block that went through all layers by way of another cache.

        Args:
            tokens: Number of tokens of the block.
            frequencies: The rotary frequencies with which the model read it.
        """
        self.count_tokens(tokens)
        if frequencies is not None and self.cache.frequencies is not None:
            self.cache.frequencies.take_over(frequencies)
        self._check()

    def end(self, logits: Tensor) -> Tensor:
        """End the prompt with the logits of its last token, (B, vocab)."""
        self.set_progress(last=False, room=ROOM)
        for layer in self.own_layers:  # only now, because cascades may cut earlier layers again
            layer.pack_all()
        self.logits = logits
        return logits

    def _readings(self, ids: Tensor) -> list[ExtraRead]:
        """Return the extra reads before the cut; none if nothing is cut."""
        method, prompt = self.choice.method, ids.shape[1]
        quota = self.budget.rows(prompt, prompt)
        if not method.needs_extra_reads or quota is None or quota >= prompt:
            return []
        readings = list(self.method.extra_reads(ids, self.progress.prefix, self.words))
        vocabulary = text_config(self.model).vocab_size
        if any(int(reading.ids.max()) >= vocabulary for reading in readings):
            raise SettingError(f"method: {method.name} gives the model token ids above {vocabulary - 1}, its last")
        return readings

    def _reread(self, readings: list[ExtraRead], quota: int) -> None:
        """Let the model read about the prompt, keep only what the method remembered of it, and cut."""
        begin, layers = now(self.device), self.own_layers
        for reading in readings:
            with self.branch(keeps_state=True):
                self.set_progress(about=(reading.start, reading.stop))
                self._read(reading.ids, None, keep=1)
                noted = [(dict(layer.state.layer), layer.tally.peak_attended) for layer in layers]
                shared, peak = dict(layers[0].state.shared), self.memory.peak
            for layer, (remembered, attended) in zip(layers, noted, strict=True):
                layer.state.layer = remembered
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
        """Read further tokens. The cache is cut only if the method cuts while decoding.

        Args:
            ids: Token ids, (B, t).

        Returns:
            Their logits, (B, t, vocab).
        """
        self.leave_path()
        with kvbench_attention(self.model):
            return self.read_tokens(ids)

    def read_tokens(self, ids: Tensor) -> Tensor:
        """Read tokens that follow the prompt, inside `kvbench_attention`.

        Args:
            ids: Token ids, (B, t).

        Returns:
            Their logits, (B, t, vocab).
        """
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
            fraction=self.budget.fraction if method.attends_subset else None,
            share=None if rows is None else Fraction(rows),
        )
        logits = self._read(ids, rows, keep=0)
        self.logits = logits[:, -1].clone()  # a view would keep the logits of all tokens alive
        return logits

    def _steps(self, tokens: int, quota: int | None) -> int:
        """Return how many steps towards the next cut the method counts for these tokens."""
        if not self.choice.method.overrides("steps"):
            return tokens
        for layer in self.own_layers:
            layer.stamp()
        steps = self.method.steps(tokens, quota)
        for layer in self.own_layers:
            layer.check_stamped()
        return steps

    def _read(self, ids: Tensor, quota: int | None, keep: int) -> Tensor:
        """Read a block through the model; return the logits of its last `keep` tokens, or of all tokens for 0."""
        if not self.fits_window(ids.shape[1]):
            raise SettingError(
                f"model: every layer has a sliding window of {self.window} tokens, so no prompt may be longer"
            )
        self.set_progress(quota=quota)
        for layer in self.own_layers:
            layer.stamp()
        if "gradient" in self.choice.method.wants and self.progress.about is not None:
            logits, gradients = differentiate(self.model, ids, self.cache, self.method.objective)
            for layer in self.own_layers:
                layer.observe_gradient(gradients[layer.index])
        else:
            logits = forward(self.model, ids, self.cache, keep)
        self.seen += ids.shape[1]
        self._check()
        return logits

    def fits_window(self, tokens: int) -> bool:
        """Return whether further tokens fit in the window, if every layer has one (`Layout.window`)."""
        return self.window is None or self.seen + tokens <= self.window

    def _check(self) -> None:
        """Check the hooks after a block has passed all layers.

        Raises:
            ContractError: A hook wrote into a tensor, or returned something that only the device could check.
        """
        for layer in self.own_layers:
            layer.check_stamped()
        quota, allocator = self.progress.quota, self.choice.allocator
        if quota is not None and not self.choice.method.sets_head_quotas:
            self._check_total(quota, f"allocator={allocator.name}")
        if not self.defers_faults:
            self.raise_faults()

    def raise_faults(self) -> None:
        """Raise what the guards noted on the device.

        The host waits for the device once for all layers, and not at all if the guards noted nothing.

        Raises:
            ContractError: A hook returned something that only the device could check.
        """
        noted = [(line, flag) for layer in self.own_layers for line, flag in layer.guard.faults.items()]
        if not noted:
            return
        device = next(self.model.parameters()).device
        flags = torch.stack([flag.to(device) for _, flag in noted]).tolist()
        for (line, _), wrong in zip(noted, flags, strict=True):
            if wrong:
                raise ContractError(line)
        for layer in self.own_layers:
            layer.guard.faults.clear()

    def _check_total(self, quota: int, owner: str) -> None:
        """Note a fault if the layers that share the budget hold more than `quota` rows per head on average."""
        layers_with_rows = self.own_layers
        layers = [layer for layer in layers_with_rows if layer.index in layer.cut_layers]
        if not layers or all(layer.rows.even and layer.rows.longest_head <= quota for layer in layers):
            return
        device = next(self.model.parameters()).device
        held = torch.stack([layer.rows.counts().sum(-1).to(device) for layer in layers]).sum(0)  # (B,)
        limit = quota * sum(layer.rows.shape[1] for layer in layers)
        line = f"{owner}: the layers hold more rows than the budget of {quota} per head on average"
        layers[0].guard.note(lambda: (held > limit).any(), line)

    def find_decode_quota(self, seen: int) -> int | None:
        """Return the rows per head that a cut while decoding leaves after `seen` tokens, or None for all rows."""
        return self.choice.method.decode_size or self.budget.rows(self.progress.prompt, seen)

    @without_gradients
    def leave_path(self) -> None:
        """End the current answer, if there is one, so that other tokens can follow it."""
        path, self.path = self.path, None
        if path is not None:
            path.close()

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that did not go through the model's modules."""
        self.seen += tokens
        for port in self.ports():
            port.seen = self.seen

    @property
    def forgets(self) -> bool:
        """Whether what is read now will be forgotten, because `branch` was entered."""
        return bool(self.watched)

    @contextmanager
    def branch(self, keeps_state: bool = False) -> Iterator[None]:
        """Forget everything that is read inside the `with` block. The compressed prompt is shared, not computed again.

        Args:
            keeps_state: Whether the caller keeps what the method remembers inside. The method may then write to its
                state in place.

        Raises:
            ContractError: A hook wrote into tensors that must not change.
        """
        self.leave_path()
        snapshot, lent = self.snapshot(), self._lent()
        kept = self.own_layers[0].guard.handed()
        for name, tensor in find_tensors({"state.shared": snapshot.shared}):
            kept.add(name, tensor)
        self.watched.append(lent)
        try:
            yield
        finally:
            self.watched.remove(lent)
            self.restore(snapshot)
        checked = [(lent, "a hook that kept a reference to what it was handed")]
        if not keeps_state:
            for layer, layer_snapshot in zip(self.own_layers, snapshot.layers, strict=True):
                layer.check_snapshot(layer_snapshot)
            checked.append((kept, "a hook"))
        for written, hook in checked:
            self.own_layers[0].guard.check(self.choice.owners, hook, [written])

    @spend("restoring")
    def snapshot(self) -> ContextSnapshot:
        """Return everything that `restore` needs. Rows are shared, not copied; recurrent states are copied."""
        frequencies = self.cache.frequencies
        return ContextSnapshot(
            layers=[layer.snapshot() for layer in self.own_layers],
            sliding=[(window.keys, window.values, window.cumulative_length) for window in self.sliding_layers()],
            recurrent=self.cache.copy_states(),
            frequencies=frequencies and frequencies.copy(),
            seen=self.seen,
            since_cut=self.since_cut,
            drawn=self.drawn,
            logits=self.logits,
            progress=self.progress,
            memory=self.memory.snapshot(),
            shared=copy_containers(self.own_layers[0].state.shared),
        )

    @spend("restoring")
    def restore(self, snapshot: ContextSnapshot) -> None:
        """Return to a snapshot, also during an answer."""
        self.path = None
        for layer, layer_snapshot in zip(self.own_layers, snapshot.layers, strict=True):
            layer.restore(layer_snapshot)
        for window, (keys, values, length) in zip(self.sliding_layers(), snapshot.sliding, strict=True):
            window.keys, window.values, window.cumulative_length = keys, values, length
        self.cache.put_states(snapshot.recurrent)
        if snapshot.frequencies and self.cache.frequencies:
            self.cache.frequencies.take_over(snapshot.frequencies)
        self.since_cut, self.drawn, self.logits = snapshot.since_cut, snapshot.drawn, snapshot.logits
        self.seen = snapshot.seen
        for port in self.ports():
            port.seen = snapshot.seen
        self.layers.progress = snapshot.progress
        self.memory.restore(snapshot.memory)
        shared = self.own_layers[0].state.shared
        shared.clear()
        shared.update(snapshot.shared)

    @spend("restoring")
    def _lent(self) -> Handed:
        """Return the shared keys and values that other contexts still hold, watched."""
        watched = self.own_layers[0].guard.handed()
        held = {id(tensor) for layer in self.own_layers for tensor in layer.rows.named_tensors().values()}
        for index, reference in self.lent:
            if (tensor := reference()) is not None and id(tensor) not in held:
                watched.add(f"keys or values of layer {index}, which other runs share", tensor)
        return watched

    def ports(self) -> list[CacheLayerPort]:
        """Return the ports of the layers that hold rows."""
        return [port for port in self.cache.layers if isinstance(port, CacheLayerPort)]

    def sliding_layers(self) -> list[Any]:
        """Return transformers' own cache layers of the layers with a sliding window."""
        return [self.cache.layers[index] for index in self.sliding]

    def bytes(self) -> Bytes:
        """Return the bytes that the cache occupies now. The windows of sliding layers count as rows."""
        total = sum((layer.bytes() for layer in self.own_layers), Bytes())
        shared = count_bytes(v for v in self.own_layers[0].state.shared.values() if isinstance(v, Tensor))
        return total + Bytes(rows=self.sliding_bytes(), state=shared, recurrent=self.cache.count_state_bytes())

    def sliding_bytes(self) -> int:
        """Return the bytes of the layers with a sliding window, which no method cuts."""
        return sum(c.keys.nbytes + c.values.nbytes for c in self.sliding_layers() if c.is_initialized)

    def full_bytes(self) -> int:
        """Return the bytes that keys and values of all tokens read would take."""
        return self.sliding_bytes() + sum(layer.full_bytes() for layer in self.own_layers)


def decodes_in_graph(choice: CachePolicy) -> bool:
    """Return whether tokens of an answer may be read in a CUDA graph.

    A captured step does not go through the modules whose inputs a method may ask for. A method that neither cuts nor
    chooses rows while decoding needs none there. A codec gets keys before rotation from the step if its packed rows
    grow.
    """
    codec, method = choice.codec, choice.method
    grows = codec.packs and codec.packing.grows
    asks = choice.shows_inputs and (method.decoding or method.attends_subset)
    if asks or (codec.packing.takes_unrotated_keys and not grows):
        return False
    return only_appends(choice) or cuts_in_graph(choice) or replaces_rows(choice) or reads_in_graph(choice)


def has_plain_keys(weights: DecoderWeights, layout: Layout) -> bool:
    """Return whether a codec that takes keys before norm and rotation can norm and rotate them in a captured step.

    Its kernels norm each head, and its own weights were made for the order of the model's projection.
    """
    normed = any(block.attention.projected_norms is not None for block in weights.blocks)
    return not (layout.joint_norm or normed) and all(order is None for order in weights.orders)


def can_capture(model: torch.nn.Module) -> bool:
    """Return whether CUDA graphs can be captured for a model.

    The model must be on the current GPU, in a dtype that the kernels support. The reference implementations wait for
    the host, so they cannot be captured.
    """
    like = next(model.parameters())
    return like.is_cuda and like.device.index == torch.cuda.current_device() and like.dtype in FAST
