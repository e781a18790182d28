"""One layer of the cache.

For every block the layer attends to its rows and the block, asks the method which rows stay, cuts to the quota, and
frees the other rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from weakref import ProxyType, proxy, ref

import torch
from torch import Tensor, empty, zeros_like
from torch.utils.checkpoint import checkpoint

from kvbench.cache.accounting import LayerTally, MemoryMeter
from kvbench.cache.eviction import (
    SCORE,
    HeadShares,
    LayerPolicy,
    Quota,
    ScoreSharing,
    evict,
    score_rows,
    without_tensors,
)
from kvbench.cache.guard import Guard, Guarded, Handed, copy_containers, find_tensors
from kvbench.cache.hook_table import expecting, guard_hooks
from kvbench.cache.policy import CachePolicy, Progress
from kvbench.cache.rerotation import rotate_by_slot
from kvbench.cache.storage import Bytes, StoredRows, count_bytes
from kvbench.cache.watched_observation import watch
from kvbench.interfaces.codec import ListingGrowing
from kvbench.interfaces.observation import LayerInputs, Observation, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import attend, attend_ragged
from kvbench.kernels.dispatch import FAST
from kvbench.kernels.softmax_extras import SoftmaxExtras


class Layers(list["Layer | None"]):
    """All layers of a cache, with the progress of the prompt and the bytes of all layers.

    An entry is None for a layer that keeps transformers' own cache: a sliding window or a recurrent state. Layers refer
    to this list weakly, so that the memory of a cache is freed at once when the cache is dropped.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.progress = Progress()
        self.memory = MemoryMeter(count)

    @cached_property
    def cut_layers(self) -> tuple[int, ...]:
        """The layers that share the budget."""
        layers = [layer for layer in self if layer is not None]
        return tuple(layer.index for layer in layers if not layer.method.skips_layer(layer.index, layer.layers))


@dataclass(frozen=True)
class LayerSnapshot:
    """The state of a layer at some time. Its rows share their tensors with the layer's."""

    rows: StoredRows
    tally: LayerTally
    shares: HeadShares | None
    shown: Observation | None
    token_bytes: int
    stamped: tuple[Handed, ...]
    attended: list[float]
    state: dict[str, Any]
    """The method's state of this layer."""
    kept: Handed
    """Tensors that the method remembered, with their versions."""


class Layer:
    """The rows of one layer, and everything that happens to them when a block is read."""

    def __init__(self, index: int, layers: int, choice: CachePolicy, state: State, cache: Layers):
        self.index, self.layers, self.choice = index, layers, choice
        self.cache: Layers = cache if isinstance(cache, ProxyType) else proxy(cache)
        self.state = State(state.seeds, {}, state.shared)
        self.guard = Guard(index, choice.exact)
        self.method = guard_hooks(choice.method, self.guard)
        self.allocator = guard_hooks(choice.allocator, self.guard)
        self.codec = guard_hooks(guard_hooks(choice.codec, self.guard).of_layer(index, layers), self.guard)
        self.rows = StoredRows()
        self.tally = LayerTally()
        self.shares: HeadShares | None = None  # how heads shared the quota at the last uneven cut
        self.shown: Observation | None = None  # of this block, while a later layer may cut this one
        self.share_scores: ScoreSharing | None = None  # while contexts that read a prompt together cut this layer
        self.asked: list[str] | None = None  # notes what hooks ask the observation for (`watch`), if it is wanted
        self.stamped: tuple[Handed, ...] = ()  # tensors that a hook may have kept a reference to
        self.output_weight: ref[Tensor] | None = None  # W_o of the model's layer, after a hook has seen it
        self.inputs: LayerInputs | None = None  # of this block, until the hooks have seen it
        self.fresh: tuple[Tensor, Tensor] | None = None  # keys and values of a block that is differentiated
        self.read: Observation | None = None  # of such a block, until its gradient is known
        self.metered: ref[StoredRows] | None = None  # rows that the meter knows, if the method remembers nothing
        self.token_bytes = 0  # bytes of keys and values of one token, all samples and heads
        self.attended: list[float] = []  # mean rows attended to per query head, one number per token

    @property
    def progress(self) -> Progress:
        """How far the prompt has been read."""
        return self.cache.progress

    @property
    def packs(self) -> bool:
        """Whether the codec packs the layer's rows."""
        return self.codec.packs

    @property
    def wants_unrotated_keys(self) -> bool:
        """Whether the layer needs keys before QK norm and rotation."""
        return "unrotated_keys" in self.choice.method.wants or self.codec.packing.takes_unrotated_keys

    @property
    def wants_hidden(self) -> bool:
        """Whether the layer needs the hidden states that enter it."""
        return "hidden" in self.choice.method.wants

    @property
    def wants_normed_hidden(self) -> bool:
        """Whether the layer needs the hidden states behind its norm."""
        return "normed_hidden" in self.choice.method.wants

    @property
    def differentiates(self) -> bool:
        """Whether the block that is read is an extra read of a method that wants its gradient."""
        return "gradient" in self.choice.method.wants and self.progress.about is not None

    @property
    def cut_layers(self) -> tuple[int, ...]:
        """The layers that share the budget."""
        return self.cache.cut_layers

    @property
    def even(self) -> bool:
        """Whether all heads hold the same number of rows after a cut."""
        method, allocator = self.choice.method, self.choice.allocator
        return allocator.even and not method.sets_head_quotas and (len(self.state.seeds) == 1 or not allocator.cascades)

    # reading a block: append, attend, ask the method, cut

    def append(self, keys: Tensor, values: Tensor, inputs: LayerInputs | None = None) -> None:
        """Append a block.

        Args:
            keys: (B, H, T, d), rotated.
            values: (B, H, T, d)
            inputs: What enters the layer's attention, if the layer asks for any of it.
        """
        before, flushed, rotate = self.rows.tail_keys, self.progress.decoding and self.packs, None
        self.fresh = (keys, values) if self.differentiates else None
        if self.codec.packing.takes_unrotated_keys:
            assert inputs is not None and inputs.keys is not None  # `wants_unrotated_keys`
            keys, rotate = inputs.keys, inputs.rotate
        if self.differentiates:  # only detached tensors are stored
            keys, values = keys.detach(), values.detach()
        self.inputs = inputs
        if self.codec.packing.before_attention:
            self.rows = self.rows.append_packed(self.codec, keys, values, rotate)
        else:
            self.rows = self.rows.append(keys, values, 0 if flushed else self.progress.room, rotate)
        self.token_bytes = keys[:, :, 0].nbytes + values[:, :, 0].nbytes
        if self.rows.tail_keys is not before or self.codec.packing.before_attention:
            self.update_memory()
        self.stamp()

    def share_block_of(self, other: "Layer", inputs: LayerInputs | None) -> None:
        """Hold the first block that another layer has just read, in the same storage.

        Nothing is copied. Both layers may write behind the block, one after the other, if what the first one wrote is
        forgotten before the other begins.

        Args:
            other: A layer that stores the same keys, before or after rotation.
            inputs: What `append` gets.
        """
        self.rows, self.token_bytes, self.inputs = other.rows, other.token_bytes, inputs
        self.update_memory()
        self.stamp()

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        """Attend to all rows, then ask the method and cut the layer.

        Args:
            queries: Queries of the block, (B, H·G, T, d), rotated.
            scaling: The factor of the logits.
            output_weight: The layer's output projection W_o.
            rotation: The model's rotary embedding: positions -> cos, sin.
            extras: Sinks and cap of the layer's softmax; None for the plain one.

        Returns:
            The attention outputs, (B, H·G, T, d).
        """
        progress, rows = self.progress, self.rows
        view = Lazy(rows.view)
        look, rolled = None, None
        if progress.decoding:
            first = rows.seen - queries.shape[2]
            request = ReadRequest(
                queries=queries,
                layer=self.index,
                layers=self.layers,
                first=first,
                prompt=progress.prompt,
                scaling=scaling,
                extras=extras,
                quota=progress.look,
                fraction=progress.fraction,
                packed=self.find_packed() if self.choice.codec.packs and self.choice.method.attends_subset else None,
            )
            if self.method.overrides("read"):
                look = expecting(self.method, held=rows.longest_head).read(request, view, self.state)
        if self.choice.method.uses_cache_positions and not (rows.even and rows.longest_head == rows.seen):
            rolled = rotate_by_slot(queries, view(), rotation)
        outputs, lse = self.run_attention(queries, scaling, look, rolled, extras)
        seen = (queries.detach(), outputs.detach()) if self.differentiates else (queries, outputs)
        self.after_attention(*seen, lse, scaling, output_weight, rotation, view, extras)
        return outputs

    def find_packed(self, more: int = 0) -> tuple[int, int] | None:
        """Return start and stop of the packed rows of this layer, or of the first later layer whose codec reports them.

        Args:
            more: Number of tokens that will be read before, one by one.
        """
        for layer in filter(None, self.cache[self.index :]):
            if isinstance(layer.rows.stored, Guarded):
                span = layer.codec.find_packed(layer.rows.stored.owner.subject, more)
                if span is not None:
                    return span
        return None

    def run_attention(
        self,
        queries: Tensor,
        scaling: float,
        look: Tensor | None,
        rolled: tuple[Tensor, Tensor] | None,
        extras: SoftmaxExtras | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention outputs and, if the method wants them, the log-sum-exps.

        Args:
            queries: (B, H·G, T, d)
            scaling: The factor of the logits.
            look: Rows that each query head attends to, (B, H·G, n) bool; None for all.
            rolled: Queries and keys to use instead of the given queries and the rows' keys.
            extras: Sinks and cap of the softmax; None for the plain one.
        """
        rows, lse = self.rows, "lse" in self.choice.method.wants
        if self.fresh is not None:
            return self.run_differentiable_attention(queries, scaling, extras), None
        held = rows.stored is not None or queries.shape[2] < rows.tail
        if queries.is_cuda and queries.dtype in FAST and held and rows.is_raw and look is None and rolled is None:
            self.count_attended(None, None)
            self.rows = rows = rows.with_starts()
            assert rows.tail_keys is not None and rows.tail_values is not None  # the block was appended to the tail
            tail = rows.tail_keys, rows.tail_values
            return attend_ragged(queries, rows.ragged(), *tail, scaling, lse=lse, tail=rows.tail, extras=extras)
        keys, values, mass = rows.attention_view()
        self.count_attended(look, mass)
        asking, keys = rolled or (queries, keys)
        return attend(asking, keys, values, mass, scaling, look=look, lse=lse, extras=extras)

    def run_differentiable_attention(self, queries: Tensor, scaling: float, extras: SoftmaxExtras | None) -> Tensor:
        """Return the attention outputs of a block over all rows, (B, H·G, T, d). Gradients reach only the block.

        The backward pass computes the outputs again, so that only the block is held for it.
        """
        assert self.fresh is not None
        fresh, self.fresh = self.fresh, None
        held = [tensor[:, :, : -queries.shape[2]] for tensor in self.rows.attention_view()[:2]]
        self.count_attended(None, None)

        def work(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
            name = "sdpa" if extras is None else "reference"
            return attend(queries, keys, values, None, scaling, extras=extras, implementation=name)[0]

        outputs: Tensor = checkpoint(work, queries, *fresh, use_reentrant=False, preserve_rng_state=False)
        return outputs

    def observe_gradient(self, gradient: Tensor) -> None:
        """Show the method an extra read, with the gradient of what the layer's attention returned, (B, T, hidden)."""
        assert self.read is not None  # the model has read it
        observation, self.read = replace(self.read, gradient=gradient), None
        self.method.update(observation, self.rows.view(), self.state)
        self.update_memory()

    def after_attention(
        self,
        queries: Tensor,
        outputs: Tensor,
        lse: Tensor | None,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
        view: Callable[[], Rows],
        extras: SoftmaxExtras | None = None,
    ) -> None:
        """Let the method see the block, then cut the layer if a cut is due. `view` returns the rows."""
        method, progress = self.choice.method, self.progress
        first = self.rows.seen - queries.shape[2]
        if self.output_weight is None:
            self.output_weight = ref(output_weight)
        inputs, self.inputs = self.inputs, None
        unrotated = inputs.keys if inputs and "unrotated_keys" in method.wants else None
        if unrotated is not None and self.codec.packing.before_attention:
            unrotated = self.rows.read_newest_keys(unrotated.shape[2])
        observation = Observation(
            queries=queries,
            outputs=outputs,
            lse=lse,
            scaling=scaling,
            output_weight=output_weight,
            rotation=rotation,
            layer=self.index,
            layers=self.layers,
            first=first,
            prompt=progress.prompt,
            last=progress.last,
            decoding=progress.decoding,
            cut_layers=self.cut_layers,
            prefix=progress.prefix,
            about=progress.about,
            share=progress.share,
            each=self.rows.longest_head if self.rows.even else None,
            unrotated_keys=unrotated,
            hidden=inputs.hidden if inputs and "hidden" in method.wants else None,
            normed_hidden=inputs.normed_hidden if inputs and "normed_hidden" in method.wants else None,
            extras=extras,
        )
        if self.asked is not None:
            observation = watch(observation, self.asked)
        # until all hooks have returned, because the outputs go on through the model
        self.stamped += (self.guard.watch("observation", observation),)
        if self.differentiates:
            self.read = observation
        elif method.overrides("update"):
            rows = view()
            columns = self.method.update(observation, rows, self.state)
            if columns:
                self.rows = self.rows.with_columns({**self.rows.columns, **columns})
                shown = replace(rows, columns=MappingProxyType({**rows.columns, **columns}))
                view = Lazy(lambda: shown)
            self.update_memory()
        if progress.quota is not None:
            self.cut(observation, view, progress.quota)
        elif method.needs_extra_reads and progress.last:
            self.shown = without_tensors(observation)
        if progress.last:
            self.method.forget(self.state)
            self.update_memory()
        if progress.decoding and self.packs:
            self.rows = self.rows.pack_tail()
            self.update_memory()
        self.renew_stamp()
        is_last_layer = not any(self.cache[self.index + 1 :])
        if is_last_layer and (progress.quota is not None or not progress.decoding):
            for layer in filter(None, self.cache):
                layer.count_peak(layer.rows.longest_head)

    # cutting

    def cut(self, observation: Observation, view: Callable[[], Rows], nominal: int) -> None:
        """Cut every head to its quota, and earlier layers too if the allocator cascades.

        Args:
            observation: What the layer computed for the block.
            view: Returns the layer's rows.
            nominal: Rows per head, as the mean over the layers.
        """
        if self.index not in observation.cut_layers:
            return
        quota = self.find_quota(observation, view, nominal)
        cascades = self.choice.allocator.cascades and not observation.decoding
        if cascades and observation.tokens > nominal:  # later layers may cut this one again, by the same scores
            rows = view()
            rows = replace(rows, columns={**rows.columns, SCORE: score_rows(observation, rows, self.policy)})
            self.rows, self.shown = self.rows.with_columns(rows.columns), without_tensors(observation)
            view = Lazy(lambda: rows)
        if self.exceeds(quota):
            self.evict(observation, view(), quota)
        if cascades:
            layers = {layer.index: layer for layer in filter(None, self.cache)}
            for index, less in self.allocator.earlier(nominal, observation, self.state.shared).items():
                layers[index].cut_again(less)
            if self.index == observation.cut_layers[-1]:
                for index in observation.cut_layers:
                    layers[index].forget_scores()

    def find_quota(self, observation: Observation, view: Callable[[], Rows], nominal: int) -> Quota:
        """Return how many rows the heads of this layer may keep."""
        samples, method = self.share_among_layers(nominal, observation, view), self.choice.method
        if method.sets_head_quotas and method.budget_setting is None:
            return Quota(samples, self.share_among_heads(nominal, observation))
        return Quota(samples, shares=self.shares if observation.decoding else None)

    def share_among_layers(self, nominal: int, observation: Observation, view: Callable[[], Rows]) -> tuple[int, ...]:
        """Return the rows per head that the allocator gives the layer, one number per sample."""
        quotas = self.allocator.layer(nominal, observation, view, self.state.shared)
        return quotas if isinstance(quotas, tuple) else (quotas,) * self.rows.shape[0]

    def share_among_heads(self, nominal: int, observation: Observation) -> Tensor:
        """Return the rows that the method gives each head, (H,) or (B, H)."""
        method = expecting(self.method, heads=self.rows.shape[1])
        return method.head_quotas(nominal, observation, self.state).cpu()

    def exceeds(self, quota: Quota) -> bool:
        """Return whether a head may hold more rows than it may keep."""
        if self.choice.method.budget_setting is not None:
            return True
        if quota.heads is not None:
            return bool((self.rows.counts().cpu() > quota.heads).any())
        return not (self.rows.even and self.rows.longest_head <= min(quota.samples))

    def evict(self, observation: Observation, rows: Rows, quota: Quota) -> None:
        """Cut every head and free the rows that go."""
        if self.rows.even and self.even and len(set(quota.samples)) == 1:
            quota = replace(quota, each=min(self.rows.longest_head, quota.samples[0]))
        eviction = evict(observation, rows, self.policy, quota)
        if quota.heads is None and quota.shares is None:
            self.shares = None if self.choice.allocator.even else HeadShares(quota.samples, eviction.counts)
        self.tally = self.tally.add_cut(eviction.evicted, eviction.protected, eviction.given_up)
        chosen = None if eviction.index is None else (eviction.index, eviction.counts)
        method = self.choice.method
        self.rows = self.rows.keep(eviction.rows, self.even, method.merges, quota.each, chosen, method.weighs_rows)
        self.update_memory()

    def take_over_cut(
        self, rows: StoredRows, tally: LayerTally, state: dict[str, Any], held: int, rise: int, output_weight: Tensor
    ) -> None:
        """Take over the result of the same cut of an equal layer. The method does not see this layer's block.

        No hook has seen this layer's tensors, so they are not watched.

        Args:
            rows: The rows.
            tally: What was counted.
            state: The method's state of the layer.
            held: Bytes that the layer occupies then.
            rise: By how many bytes the cache grew at most during the cut.
            output_weight: This layer's output projection W_o.
        """
        self.rows, self.tally, self.state.layer, self.inputs = rows, tally, state, None
        self.output_weight, meter = ref(output_weight), self.cache.memory
        meter.peak = max(meter.peak, meter.total + rise)
        meter.update(self.index, held)
        self.metered = None if state else ref(rows)
        self.stamped = ()

    @property
    def policy(self) -> LayerPolicy:
        """The method and the allocator, guarded, the method's state, and how scores are shared."""
        return LayerPolicy(self.method, self.allocator, self.state, self.share_scores)

    def cut_again(self, samples: tuple[int, ...]) -> None:
        """Cut to fewer rows per head by the scores of this block. `samples` has one quota per sample."""
        if self.shown is not None and self.rows.longest_head > min(samples):
            self.evict(self.shown, self.rows.view(), Quota(samples))
            self.renew_stamp()

    def cut_after_readings(self, quota: int) -> None:
        """Cut the layer after all extra reads about the prompt."""
        assert self.shown is not None  # the prompt's last block left it
        self.cut(self.shown, Lazy(self.rows.view), quota)
        self.shown = None
        self.method.forget(self.state)
        self.renew_stamp()
        self.update_memory()

    def forget_scores(self) -> None:
        """Drop the block's scores, because no layer is cut by them again."""
        self.rows = self.rows.with_columns({k: column for k, column in self.rows.columns.items() if k != SCORE})
        self.shown = None
        self.renew_stamp()
        self.update_memory()

    def pack_all(self) -> None:
        """Pack the rows if the codec packs. Called when the prefill has ended."""
        if self.packs and not self.codec.packing.before_attention:
            self.rows = self.rows.pack(self.codec)
        self.update_memory()

    # decoding in a CUDA graph

    def reserve(self, tokens: int) -> None:
        """Reserve memory for further tokens, so that their rows have fixed addresses."""
        self.rows = self.rows.reserve(tokens)
        self.update_memory()

    def copy_tail(self) -> None:
        """Append further tokens to memory that no other context uses."""
        self.rows = self.rows.copy_tail()

    def reserve_packed(self, tokens: int, ahead: int) -> ListingGrowing:
        """Reserve memory for further tokens behind packed rows, of which `ahead` may be taken back at once."""
        self.rows = rows = self.rows.reserve_packed(tokens, ahead)
        self.update_memory()
        assert rows.growing is not None
        return rows.growing

    def finish_growing(self, tokens: int, attended: Sequence[float] | None = None) -> None:
        """Count decoded tokens that a CUDA graph has appended to packed rows. Arguments as of `count_appended`."""
        self.count_decoded(self.rows.finish_growing(tokens), tokens, attended)
        self.update_memory()

    def count_appended(self, tokens: int, attended: Sequence[float] | None = None) -> None:
        """Count decoded tokens whose keys and values are already behind the tail.

        Args:
            tokens: Number of tokens.
            attended: Mean rows per query head that each token attended to; None for all rows.
        """
        self.count_decoded(self.rows.count_appended(tokens), tokens, attended)

    def count_decoded(self, rows: StoredRows, tokens: int, attended: Sequence[float] | None = None) -> None:
        """Take over the rows after decoded tokens, and note how many rows each token attended to (None: all)."""
        before = self.rows.mean_rows
        self.rows = rows
        self.attended += [before + token for token in range(1, tokens + 1)] if attended is None else attended
        self.count_peak_attended(rows.longest_head)

    def find_quota_ahead(self, nominal: int) -> tuple[int, ...]:
        """Return the rows per head that a cut while decoding leaves, one number per sample.

        The allocator must be uniform or keep its shares (`Allocator.keeps_shares`).

        Args:
            nominal: Rows per head, as the mean over the layers.
        """
        return self.share_among_layers(nominal, self.observe_nothing(), self.rows.view)

    def find_head_quotas_ahead(self, nominal: int, tokens: int) -> Tensor:
        """Return the rows that each head keeps while the next `tokens` tokens are read, (H,) or (B, H).

        A head that keeps all rows has at least the tokens that will have been read. A smaller number may exceed those
        read so far: the head streams once it has so many. The method must stream (`Captured.streams`).
        """
        return self.share_among_heads(nominal, self.observe_nothing(tokens))

    def observe_nothing(self, tokens: int = 1) -> Observation:
        """Return the observation of the last one of the next decoded tokens, without tensors."""
        none, progress = empty(self.rows.shape[0], 0, 1, 0), self.progress
        return Observation(
            queries=none,
            outputs=none,
            lse=None,
            scaling=1.0,
            output_weight=none,
            rotation=lambda places: (places, places),
            layer=self.index,
            layers=self.layers,
            first=self.rows.seen + tokens - 1,
            prompt=progress.prompt,
            last=False,
            decoding=True,
            cut_layers=self.cut_layers,
        )

    def replace_rows(self, rows: StoredRows, evicted: Tensor | int, attended: Sequence[float], peak: int) -> None:
        """Take over the rows that a CUDA graph left.

        Args:
            rows: The rows.
            evicted: Tokens whose rows the graph evicted, (B, H), or a number for every head.
            attended: Mean rows per query head that each token attended to.
            peak: The largest number of rows that a head attended to.
        """
        self.rows, tally = rows, self.tally
        gone = tally.evicted
        if rows.lengths is not None and (isinstance(evicted, Tensor) or evicted):
            gone = evicted + (zeros_like(rows.lengths) if gone is None else gone)
        self.tally = replace(tally, evicted=gone, peak_attended=max(tally.peak_attended, peak))
        if self.progress.decoding:
            self.attended += attended
        self.update_memory()

    # counting

    def count_attended(self, look: Tensor | None, mass: Tensor | None) -> None:
        """Note how many rows were attended to. Rows that a head does not have (mass 0) do not count."""
        rows = self.rows
        self.count_peak_attended(rows.longest_head)
        if self.progress.decoding:
            if look is not None and mass is not None:
                look = look & (mass > 0).repeat_interleave(look.shape[1] // mass.shape[1], 1)
            self.attended.append(rows.mean_rows if look is None else look.sum(-1).float().mean().item())

    def count_protected(self, rows: Tensor) -> None:
        """Note the number of rows that each head protected at the last cut."""
        self.tally = replace(self.tally, head_protected=rows)

    def count_given_up(self, counts: Mapping[str, Tensor]) -> None:
        """Note how many protected rows of each kind a cut had no room for in each head."""
        self.tally = replace(self.tally, head_given_up=self.tally.find_most_given_up(counts))

    def count_peak(self, rows: int) -> None:
        """Note that a head held this many rows after a cut or a block."""
        if rows > self.tally.peak_rows:
            self.tally = replace(self.tally, peak_rows=rows)

    def count_peak_attended(self, rows: int) -> None:
        """Note that a head attended to this many rows."""
        if rows > self.tally.peak_attended:
            self.tally = replace(self.tally, peak_attended=rows)

    def bytes(self) -> Bytes:
        """Return the bytes that the layer occupies now, counted by the storages of its tensors."""
        state = count_bytes([entry for entry in self.state.layer.values() if isinstance(entry, Tensor)])
        return self.rows.bytes() + Bytes(state=state)

    def count_needs(self) -> tuple[int, int]:
        """Return how many bytes the last decoded token had to read, and how many operations turned them into rows."""
        attended = self.attended[-1] if self.attended else self.rows.mean_rows
        if isinstance(self.rows.stored, Guarded):
            needs = self.codec.count_needs(self.rows.stored.owner.subject, attended)
            if needs is not None:
                return needs
        return round(self.bytes().rows * min(1.0, attended / self.rows.mean_rows)), 0

    def full_bytes(self) -> int:
        """Return the bytes that keys and values of all tokens read would take."""
        return self.rows.seen * self.token_bytes

    def update_memory(self) -> None:
        """Tell the cache's meter how many bytes the layer occupies. Called after its storage may have changed."""
        known = self.metered is not None and self.metered() is self.rows
        if not known or self.state.layer or self.rows.growing is not None:
            self.cache.memory.update(self.index, self.bytes().total)
            self.metered = None if self.state.layer else ref(self.rows)

    # guards

    def stamp(self) -> None:
        """Note the versions of the layer's tensors, as the engine leaves them.

        `check_stamped` later finds out whether a method that kept a reference to one of them has written to it.
        """
        watched = self.guard.handed(**self.rows.named_tensors())
        self.stamped = (watched.add("observation.output_weight", self.output_weight and self.output_weight()),)

    def check_stamped(self) -> None:
        """Check that no tensor was written to since `stamp`, and stop holding the tensors.

        Raises:
            ContractError: A hook wrote to a tensor.
        """
        stamped, self.stamped = self.stamped, ()
        if any(map(Handed.is_changed, stamped)):
            self.guard.check(self.choice.owners, "a hook that kept a reference to what it was handed", stamped)

    def renew_stamp(self) -> None:
        """Check the tensors, then note those of the changed rows. Freed tensors are released."""
        self.guard.release()
        self.check_stamped()
        self.stamp()

    # snapshots

    def snapshot(self) -> LayerSnapshot:
        """Return everything that `restore` needs. Tensors are shared, not copied."""
        state, kept = copy_containers(self.state.layer), self.guard.handed()
        for name, tensor in [*find_tensors({"state": state}), *find_tensors({"rows.columns": self.rows.columns})]:
            kept.add(name, tensor)
        return LayerSnapshot(
            rows=self.rows,
            tally=self.tally,
            shares=self.shares,
            shown=self.shown,
            token_bytes=self.token_bytes,
            stamped=self.stamped,
            attended=list(self.attended),
            state=state,
            kept=kept,
        )

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Return to a snapshot. The cache's memory meter is restored with it by the engine."""
        self.rows = snapshot.rows
        self.tally = snapshot.tally
        self.shares = snapshot.shares
        self.shown = snapshot.shown
        self.token_bytes = snapshot.token_bytes
        self.stamped = snapshot.stamped
        self.attended = list(snapshot.attended)
        self.state.layer = copy_containers(snapshot.state)
        self.metered = None  # the engine restores the meter, which may not have known these rows yet

    def check_snapshot(self, snapshot: LayerSnapshot) -> None:
        """Check that the method has not written into tensors that it remembered at the snapshot.

        Otherwise one question would change the answer to the next.

        Raises:
            ContractError: The method wrote into such a tensor.
        """
        self.guard.check(self.choice.owners, "a hook", [snapshot.kept])


@dataclass
class Lazy:
    """Rows that are computed at the first call."""

    make: Callable[[], Rows]
    value: list[Rows] = field(default_factory=list)

    def __call__(self) -> Rows:
        if not self.value:
            self.value.append(self.make())
        return self.value[0]
