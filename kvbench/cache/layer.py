"""One layer of the cache: attend over (held rows ∪ block), ask the method, cut to the quota, free the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import proxy, ref

from torch import Tensor, zeros_like

from kvbench.cache.accounting import LayerTally, MemoryMeter
from kvbench.cache.eviction import SCORE, HeadShares, LayerPolicy, Quota, evict, score_rows, without_tensors
from kvbench.cache.guard import Guard, Handed, copy_containers, find_tensors, is_spared
from kvbench.cache.guarded_hooks import GuardedAllocator, GuardedCodec, GuardedMethod
from kvbench.cache.policy import CachePolicy, Progress
from kvbench.cache.rerotation import rotate_by_slot
from kvbench.cache.storage import Bytes, StoredRows, count_bytes
from kvbench.interfaces.codec import Plain
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import attend, attend_ragged
from kvbench.kernels.dispatch import FAST


class Layers(list["Layer | None"]):
    """All layers of a cache, None for one that keeps its own; how far the prompt is read, and the bytes of all layers.
    Layers refer to this list weakly, so that the memory of a cache is freed at once when the cache is dropped.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.progress = Progress()
        self.memory = MemoryMeter(count)


@dataclass(frozen=True)
class LayerSnapshot:
    """What a layer was at some time. Its rows share their tensors with the layer's."""

    rows: StoredRows
    tally: LayerTally
    shares: HeadShares | None
    shown: Observation | None
    token_bytes: int
    stamped: Handed
    attended: list[float]
    state: dict[str, Any]  # the method's, of this layer
    kept: Handed  # tensors that the method remembered, with their versions


class Layer:
    """Rows of one layer and what happens to them when a block is read."""

    def __init__(self, index: int, layers: int, choice: CachePolicy, state: State, cache: Layers):
        self.index, self.layers, self.choice, self.cache = index, layers, choice, proxy(cache)
        self.state = State(state.seeds, {}, state.shared)
        self.guard = Guard(index, choice.exact)
        self.method = GuardedMethod(choice.method, self.guard)
        self.allocator = GuardedAllocator(choice.allocator, self.guard)
        self.codec = GuardedCodec(choice.codec, self.guard)
        self.rows = StoredRows()
        self.tally = LayerTally()
        self.shares: HeadShares | None = None  # of the last uneven cut
        self.shown: Observation | None = None  # of this block, while the layer may be cut (again) later
        self.stamped = Handed(choice.exact)  # what a hook may have kept a reference to, as the engine left it
        self.output_weight: ref[Tensor] | None = None  # W_o of the model's layer, once a hook was handed it
        self.token_bytes = 0  # keys and values of one token, all samples and heads
        self.attended: list[float] = []  # mean rows attended per query head, one number a decoded token

    @property
    def progress(self) -> Progress:
        return self.cache.progress

    @property
    def packs(self) -> bool:
        return self.choice.codec.packs

    @cached_property
    def cut_layers(self) -> tuple[int, ...]:
        """Layers that share the budget."""
        method, layers = self.choice.method, self.layers
        return tuple(i for i, layer in enumerate(self.cache) if layer is not None and not is_spared(method, i, layers))

    @property
    def even(self) -> bool:
        """Whether all heads hold the same number of rows after a cut."""
        method, allocator = self.choice.method, self.choice.allocator
        return allocator.even and not method.sets_head_quotas and (len(self.state.seeds) == 1 or not allocator.cascades)

    # a block is read: append, attend, ask the method, cut

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Read a block's keys and values (B, H, T, d)."""
        before, flushed = self.rows.tail_keys, self.progress.decoding and self.packs
        self.rows = self.rows.append(keys, values, 0 if flushed else self.progress.room)
        self.token_bytes = 2 * keys[:, :, 0].nbytes
        if self.rows.tail_keys is not before:
            self.update_memory()
        self.stamp()

    def share_block_of(self, other: "Layer") -> None:
        """Hold the first block that another layer has just read, in its storage: nothing is copied. Both may write
        behind it, one after the other, if what the first one wrote is forgotten before the other begins.
        """
        self.rows, self.token_bytes = other.rows, other.token_bytes
        self.update_memory()
        self.stamp()

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Outputs (B, Hq, T, d) of the block's queries over all rows; the layer is cut before this returns."""
        progress, rows = self.progress, self.rows
        view = Lazy(rows.view)
        look, rolled = None, None
        if progress.decoding:
            first = rows.seen - queries.shape[2]
            request = ReadRequest(queries, self.index, self.layers, first, progress.prompt, scaling, progress.look)
            look = self.method.read(request, view, self.state, rows.longest_head)
        if self.choice.method.uses_cache_positions and not (rows.even and rows.longest_head == rows.seen):
            rolled = rotate_by_slot(queries, view(), rotation)
        outputs, lse = self.run_attention(queries, scaling, look, rolled)
        self.after_attention(queries, outputs, lse, scaling, output_weight, rotation, view)
        return outputs

    def run_attention(
        self, queries: Tensor, scaling: float, look: Tensor | None, rolled: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's outputs and, if the method wants them, log-sum-exps. `look`: rows that each query head sees;
        `rolled`: queries and keys to take in place of the rows' own.
        """
        rows, lse = self.rows, self.choice.method.wants_lse
        held = rows.stored is not None or queries.shape[2] < rows.tail
        if queries.is_cuda and queries.dtype in FAST and held and rows.is_raw and look is None and rolled is None:
            self.count_attended(None, None)
            self.rows = rows = rows.with_starts()
            return attend_ragged(
                queries, rows.ragged(), rows.tail_keys, rows.tail_values, scaling, lse=lse, tail=rows.tail
            )
        keys, values, mass = rows.attention_view()
        self.count_attended(look, mass)
        asking, keys = rolled or (queries, keys)
        return attend(asking, keys, values, mass, scaling, look=look, lse=lse)

    def after_attention(
        self,
        queries: Tensor,
        outputs: Tensor,
        lse: Tensor | None,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
        view: Callable[[], Rows],
    ) -> None:
        """What follows attention over the rows that are in `view`: the method is asked and the layer is cut."""
        method, progress = self.choice.method, self.progress
        first = self.rows.seen - queries.shape[2]
        if self.output_weight is None:
            self.output_weight = ref(output_weight)
        observation = Observation(
            queries, outputs, lse, scaling, output_weight, rotation, self.index, self.layers,
            first, progress.prompt, progress.last, progress.decoding, self.cut_layers, progress.prefix, progress.about,
            progress.share,
        )  # fmt: skip
        self.stamped.add_seen(observation)  # until all hooks were asked: what is seen goes on through the model
        if method.overrides("update"):
            found = self.method.update(observation, view(), self.state)
            self.rows = self.rows.with_columns({**self.rows.columns, **found})
            view = Lazy(self.rows.view)
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

    # cuts

    def cut(self, observation: Observation, view: Callable[[], Rows], nominal: int) -> None:
        """Cut every head to its quota, and earlier layers too where the allocator cascades. `nominal`: rows per head,
        mean over the layers.
        """
        if self.index not in observation.cut_layers:
            return
        quota = self.find_quota(observation, view, nominal)
        cascades = self.choice.allocator.cascades and not observation.decoding
        if cascades and observation.tokens > nominal:  # later layers may take more from this one: by the same scores
            rows = view()
            rows = replace(rows, columns={**rows.columns, SCORE: score_rows(observation, rows, self.policy)})
            self.rows, self.shown = self.rows.with_columns(rows.columns), without_tensors(observation)
            view = Lazy(lambda: rows)
        if self.exceeds(quota):
            self.evict(observation, view(), quota)
        if cascades:
            for index, less in self.allocator.earlier(nominal, observation, self.state.shared).items():
                self.cache[index].cut_again(less)
            if self.index == observation.cut_layers[-1]:
                for index in observation.cut_layers:
                    self.cache[index].forget_scores()

    def find_quota(self, observation: Observation, view: Callable[[], Rows], nominal: int) -> Quota:
        """Rows that the heads of this layer may keep."""
        samples = self.allocator.layer(nominal, observation, view, self.state.shared)
        if self.choice.method.sets_head_quotas:
            heads = self.method.head_quotas(nominal, observation, self.state, self.rows.shape[1]).cpu()
            return Quota(samples, heads)
        return Quota(samples, shares=self.shares if observation.decoding else None)

    def exceeds(self, quota: Quota) -> bool:
        """True if a head may hold more rows than it may keep."""
        if quota.heads is not None:
            return bool((self.rows.counts().cpu() > quota.heads).any())
        return not (self.rows.even and self.rows.longest_head <= min(quota.samples))

    def evict(self, observation: Observation, rows: Rows, quota: Quota) -> None:
        """Cut every head, and free what goes."""
        if self.rows.even and self.even and len(set(quota.samples)) == 1:
            quota = replace(quota, each=min(self.rows.longest_head, quota.samples[0]))
        found = evict(observation, rows, self.policy, quota)
        if quota.heads is None and quota.shares is None:
            self.shares = None if self.choice.allocator.even else HeadShares(quota.samples, found.counts)
        tally = self.tally
        self.tally = replace(
            tally,
            evicted=found.evicted if tally.evicted is None else tally.evicted + found.evicted,
            protected=found.protected,
            given_up=tally.given_up | {kind: tally.given_up[kind].maximum(own) for kind, own in found.given_up.items()},
        )
        self.rows = self.rows.keep(found.rows, even=self.even, merged=self.choice.method.merges, each=quota.each)
        self.update_memory()

    @property
    def policy(self) -> LayerPolicy:
        return LayerPolicy(self.method, self.allocator, self.state)

    def cut_again(self, samples: tuple[int, ...]) -> None:
        """Cut to fewer rows per head, one quota per sample, by the scores of this block."""
        if self.shown is not None and self.rows.longest_head > min(samples):
            self.evict(self.shown, self.rows.view(), Quota(samples))
            self.renew_stamp()

    def cut_after_readings(self, quota: int) -> None:
        """Cut a layer that the model has read about."""
        self.cut(self.shown, Lazy(self.rows.view), quota)
        self.shown = None
        self.method.forget(self.state)
        self.renew_stamp()
        self.update_memory()

    def forget_scores(self) -> None:
        """The block is over: no layer is cut again by its scores."""
        self.rows = self.rows.with_columns({k: column for k, column in self.rows.columns.items() if k != SCORE})
        self.shown = None
        self.renew_stamp()
        self.update_memory()

    def pack_all(self) -> None:
        """The prefill is over: nothing cuts this layer any more unless the method cuts while decoding."""
        if self.packs:
            self.rows = self.rows.pack(self.codec)
        self.update_memory()

    # what a CUDA graph reads

    def reserve(self, tokens: int) -> None:
        """Make room for further tokens, so that their rows have fixed addresses."""
        self.rows = self.rows.reserve(tokens)
        self.update_memory()

    def count_appended(self, tokens: int) -> None:
        """Count tokens that were decoded and attended to all rows, whose keys and values stand behind the tail."""
        before = self.rows.mean_rows
        self.rows = self.rows.count_appended(tokens)
        self.attended += [before + token for token in range(1, tokens + 1)]
        self.count_peak_attended(self.rows.longest_head)

    def replace_rows(
        self, stored: Plain, places: Tensor, tail: Sequence[Tensor] | None, tokens: int, interval: int
    ) -> None:
        """Hold what is left after `tokens` further tokens were read and the layer was cut after every `interval` of
        them to as many rows as before. `tail`: keys and values (B, H, t, d) read since the last cut.
        """
        rows, before = self.rows, self.rows.tail
        cuts = (before + tokens) // interval
        length = before + tokens - cuts * interval
        self.rows = rows.replace_all(stored, places, tail, length, rows.seen + tokens)
        gone = zeros_like(rows.lengths) if self.tally.evicted is None else self.tally.evicted
        self.tally = replace(self.tally, evicted=cuts * interval + gone)
        self.count_peak_attended(rows.longest + (interval if cuts else length))
        if self.progress.decoding:
            self.attended += [rows.longest + (before + token) % interval + 1 for token in range(tokens)]
        self.update_memory()

    # what is counted

    def count_attended(self, look: Tensor | None, mass: Tensor | None) -> None:
        """Note how many rows were attended; rows that a head does not have (mass 0) do not count."""
        rows = self.rows
        self.count_peak_attended(rows.longest_head)
        if self.progress.decoding:
            if look is not None and mass is not None:
                look = look & (mass > 0).repeat_interleave(look.shape[1] // mass.shape[1], 1)
            self.attended.append(rows.mean_rows if look is None else look.sum(-1).float().mean().item())

    def count_peak(self, rows: int) -> None:
        """A head held so many rows after a cut or a block."""
        if rows > self.tally.peak_rows:
            self.tally = replace(self.tally, peak_rows=rows)

    def count_peak_attended(self, rows: int) -> None:
        """A head attended over so many rows."""
        if rows > self.tally.peak_attended:
            self.tally = replace(self.tally, peak_attended=rows)

    def bytes(self) -> Bytes:
        """What the layer occupies now, counted on its storages."""
        held = self.rows.bytes()
        return replace(
            held, state=held.state + count_bytes(v for v in self.state.layer.values() if isinstance(v, Tensor))
        )

    def full_bytes(self) -> int:
        """Bytes that keys and values of all tokens seen would take."""
        return self.rows.seen * self.token_bytes

    def update_memory(self) -> None:
        """Tell the cache's meter what the layer occupies after its storage changed."""
        self.cache.memory.update(self.index, self.bytes().total)

    # guards

    def stamp(self) -> None:
        """Note in which state the engine leaves the layer's tensors while a block is read. `check_stamped` finds out
        whether a method that kept a reference to what it was handed wrote to them.
        """
        self.stamped = self.guard.handed(**self.rows.named_tensors())
        self.stamped.add("observation.output_weight", self.output_weight and self.output_weight())

    def check_stamped(self) -> None:
        """ContractError if a tensor was written to since `stamp`. No tensor is kept alive any longer for that."""
        stamped, self.stamped = self.stamped, Handed(self.choice.exact)
        if written := stamped.written():
            self.guard.report(self.choice.owners, "a hook that kept a reference to what it was handed", written)

    def renew_stamp(self) -> None:
        """Check what was noted and note it anew after the engine changed the layer's rows: what it freed is let go."""
        self.guard.release()
        self.check_stamped()
        self.stamp()

    # snapshots

    def snapshot(self) -> LayerSnapshot:
        """Everything that `restore` needs. Tensors are shared, not copied."""
        state, kept = copy_containers(self.state.layer), self.guard.handed()
        for name, tensor in [*find_tensors({"state": state}), *find_tensors({"rows.columns": self.rows.columns})]:
            kept.add(name, tensor)
        return LayerSnapshot(
            self.rows, self.tally, self.shares, self.shown, self.token_bytes, self.stamped,
            list(self.attended), state, kept,
        )  # fmt: skip

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Return to a snapshot. The cache's memory meter is restored with it by the engine."""
        self.rows, self.tally, self.shares, self.shown = (
            snapshot.rows, snapshot.tally, snapshot.shares, snapshot.shown
        )  # fmt: skip
        self.token_bytes, self.stamped, self.attended = (
            snapshot.token_bytes, snapshot.stamped, list(snapshot.attended)
        )  # fmt: skip
        self.state.layer = copy_containers(snapshot.state)

    def check_snapshot(self, snapshot: LayerSnapshot) -> None:
        """ContractError if the method wrote into tensors that it remembered at the snapshot: what it saw after one
        question would change the answer to the next.
        """
        if written := snapshot.kept.written():
            self.guard.report(self.choice.owners, "a hook", written)


@dataclass
class Lazy:
    """A value made when first asked for."""

    make: Callable[[], Rows]
    value: list[Rows] = field(default_factory=list)

    def __call__(self) -> Rows:
        if not self.value:
            self.value.append(self.make())
        return self.value[0]
