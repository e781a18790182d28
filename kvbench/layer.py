"""One layer of the cache: attend over (held rows ∪ block), ask the method, cut to the quota, free the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from weakref import proxy, ref

import torch
from torch import Tensor

from kvbench.allocator import Allocator, settle
from kvbench.codec import Codec, Plain
from kvbench.guard import (
    Guard,
    GuardedAllocator,
    GuardedCodec,
    GuardedMethod,
    Handed,
    copy_containers,
    is_spared,
    state_of,
)
from kvbench.kernels.attend import attend, attend_ragged
from kvbench.kernels.implementation import FAST
from kvbench.method import Method, Seen, State, shrink
from kvbench.rows import Bytes, LayerRows, Rows, size
from kvbench.slots import by_slot

SCORE = "score"  # the column that holds a block's scores while the layer may be cut again


@dataclass
class Course:
    """Where a prompt stands; one object shared by all layers of a cache and moved on by the engine."""

    prompt: int  # tokens of the prompt (of the context where the question is hidden)
    last: bool = False  # the block being read is the prompt's last
    decoding: bool = False  # tokens after the prompt are being read
    prefix: int = 0  # tokens of the prompt in front of the user's text
    about: tuple[int, int] | None = None  # places that the model reads about, of methods that reread
    quota: int | None = None  # rows per head to cut to after this block, None: no cut
    share: Fraction | None = None  # the same, not floored to whole rows
    look: int | None = None  # rows that a query head may look at, of methods that read few of many, None: all
    room: int = 0  # tokens to reserve room for when storage must grow
    bytes: int = 0  # what all layers occupy now
    peak_bytes: int = 0  # the most they ever did


@dataclass(frozen=True)
class Choice:
    """What a cache is made with. `exact`: guards compare copies of all that hooks are handed (see kvbench.guard)."""

    method: Method
    allocator: Allocator
    codec: Codec
    exact: bool = False

    @property
    def owners(self) -> str:
        """Who may have kept a reference: the method, and an allocator or a codec that has hooks of its own."""
        own = [f"method={self.method.name}"]
        own += [f"allocator={self.allocator.name}"] * (type(self.allocator) is not Allocator)
        own += [f"codec={self.codec.name}"] * self.codec.packs
        return " or ".join(own)

    @property
    def token_by_token(self) -> bool:
        """Whether what follows the prefill is read one token at a time, several known tokens too."""
        return self.method.token_by_token or self.codec.token_by_token


class Layers(list["Layer | None"]):
    """All layers of a cache, None for one that keeps its own. They know of each other and do not keep each other: with
    the cache goes at once what it occupied.
    """


class Layer:
    """Rows of one layer and what happens to them when a block is read."""

    def __init__(self, index: int, layers: int, choice: Choice, course: Course, state: State, cache: Layers):
        self.index, self.layers, self.choice, self.course, self.cache = index, layers, choice, course, proxy(cache)
        self.state = State(state.seeds, {}, state.shared)
        self.guard = Guard(index, choice.exact)
        self.method, self.allocator = (
            GuardedMethod(choice.method, self.guard),
            GuardedAllocator(choice.allocator, self.guard),
        )
        self.rows = LayerRows(GuardedCodec(choice.codec, self.guard))
        self.stamped = Handed(choice.exact)  # what a hook may have kept a reference to, as the engine left it
        self.output_weight: ref[Tensor] | None = None  # W_o of the model's layer, once a hook was handed it
        self.evicted: Tensor | None = None  # (B, H) tokens whose rows are gone
        self.shown: Seen | None = None  # of this block, while the layer may be cut (again) later
        self.shares: tuple[tuple[int, ...], Tensor] | None = None  # quotas and rows per head at the last uneven cut
        self.protected = torch.tensor(0)  # most rows a head protected at the last cut
        # most rows of a kind that a head could not protect at any cut, because its quota had no room for them
        self.given_up = {"sinks": torch.tensor(0), "recents": torch.tensor(0)}
        self.peak_rows = 0  # most rows a head held after a cut, or after a block of a prompt that is not cut
        self.peak_attended = 0  # most rows a head ever attended over
        self.weight = 0  # bytes at the last weighing
        self.token_bytes = 0  # keys and values of one token, all samples and heads
        self.attended: list[float] = []  # mean rows attended per query head, one number a decoded token

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Read a block's keys and values (B, H, T, d)."""
        before = self.rows.tail_keys
        flushed = self.course.decoding and self.choice.codec.packs
        self.rows.append(keys, values, 0 if flushed else self.course.room)
        self.token_bytes = 2 * keys[:, :, 0].nbytes
        if self.rows.tail_keys is not before:
            self.weigh()
        self.stamp()

    def stamp(self) -> None:
        """Note in which state the engine leaves the layer's tensors while a block is read. `check_stamped` finds out
        whether a method that kept a reference to what it was handed wrote to them.
        """
        self.stamped = self.guard.handed(**self.rows.named_tensors())
        self.stamped.add("seen.output_weight", self.output_weight and self.output_weight())

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

    def adopt(self, other: "Layer") -> None:
        """Hold what another layer has just read, in its storage (see `LayerRows.adopt`)."""
        self.rows.adopt(other.rows)
        self.token_bytes = other.token_bytes
        self.weigh()
        self.stamp()

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Outputs (B, Hq, T, d) of the block's queries over all rows; the layer is cut before this returns."""
        method, course, rows = self.method, self.course, self.rows
        view = Lazy(rows.view)
        look, rolled = None, None
        if course.decoding:
            first = rows.seen - queries.shape[2]
            here = {"layer": self.index, "layers": self.layers, "first": first, "prompt": course.prompt}
            here |= {"scaling": scaling, "quota": course.look}
            look = method.read(queries, view, here, self.state, rows.longest_head)
        if self.choice.method.rolls and not (rows.even and rows.longest_head == rows.seen):
            rolled = by_slot(queries, view(), rotation)
        outputs, lse = self.look(queries, scaling, look, rolled)
        self.take(queries, outputs, lse, scaling, output_weight, rotation, view)
        return outputs

    def take(
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
        method, course, rows = self.choice.method, self.course, self.rows
        first = rows.seen - queries.shape[2]
        if self.output_weight is None:
            self.output_weight = ref(output_weight)
        seen = Seen(
            queries, outputs, lse, scaling, output_weight, rotation, self.index, self.layers,
            first, course.prompt, course.last, course.decoding, self.cut_layers, course.prefix, course.about,
            course.share,
        )  # fmt: skip
        self.stamped.add_seen(seen)  # until all hooks were asked: what is seen goes on through the model
        if type(method).update is not Method.update:
            rows.columns = {**rows.columns, **self.method.update(seen, view(), self.state)}
            view = Lazy(rows.view)
            self.weigh()
        if course.quota is not None:
            self.cut(seen, view, course.quota)
        elif method.rereads and course.last:
            self.shown = without_tensors(seen)
        if course.last:
            self.method.forget(self.state)
            self.weigh()
        if course.decoding and self.choice.codec.packs:
            rows.flush()
            self.weigh()
        self.renew_stamp()
        through = not any(self.cache[self.index + 1 :])  # the block is through all layers
        if through and (course.quota is not None or not course.decoding):
            for layer in filter(None, self.cache):
                layer.peak_rows = max(layer.peak_rows, layer.rows.longest_head)

    def look(
        self, queries: Tensor, scaling: float, look: Tensor | None, rolled: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's outputs and, if the method wants them, log-sum-exps. `look`: rows that each query head sees;
        `rolled`: queries and keys to take in place of the rows' own.
        """
        rows, lse = self.rows, self.choice.method.wants_lse
        held = rows.stored is not None or queries.shape[2] < rows.tail
        if queries.is_cuda and queries.dtype in FAST and held and rows.raw and look is None and rolled is None:
            self.count(None, None)
            return attend_ragged(
                queries, rows.ragged(), rows.tail_keys, rows.tail_values, scaling, lse=lse, tail=rows.tail
            )
        keys, values, mass = rows.attention_view()
        self.count(look, mass)
        asking, keys = rolled or (queries, keys)
        return attend(asking, keys, values, mass, scaling, look=look, lse=lse)

    def reserve(self, tokens: int) -> None:
        """Make room for further tokens, so that their rows have fixed addresses."""
        self.rows.reserve(tokens)
        self.weigh()

    def grow(self, tokens: int) -> None:
        """Count tokens that were decoded and attended to all rows, whose keys and values stand behind the tail."""
        before = self.rows.mean_rows
        self.rows.grow(tokens)
        self.attended += [before + token for token in range(1, tokens + 1)]
        self.peak_attended = max(self.peak_attended, self.rows.longest_head)

    def count(self, look: Tensor | None, mass: Tensor | None) -> None:
        """Note how many rows were attended; rows that a head does not have (mass 0) do not count."""
        rows = self.rows
        self.peak_attended = max(self.peak_attended, rows.longest_head)
        if self.course.decoding:
            if look is not None and mass is not None:
                look = look & (mass > 0).repeat_interleave(look.shape[1] // mass.shape[1], 1)
            self.attended.append(rows.mean_rows if look is None else look.sum(-1).float().mean().item())

    @cached_property
    def cut_layers(self) -> tuple[int, ...]:
        """Layers that share the budget."""
        method, layers = self.choice.method, self.layers
        return tuple(i for i, layer in enumerate(self.cache) if layer is not None and not is_spared(method, i, layers))

    def cut(self, seen: Seen, view: Callable[[], Rows], nominal: int) -> None:
        """Cut every head to its quota, and earlier layers too where the allocator cascades."""
        method, allocator, shared = self.choice.method, self.choice.allocator, self.state.shared
        if self.index not in seen.cut_layers:
            return
        quotas = self.allocator.layer(nominal, seen, view, shared)
        heads = self.rows.shape[1]
        allotted = self.method.allot(nominal, seen, self.state, heads).cpu() if method.allots else None
        again = allocator.cascades and not seen.decoding and seen.tokens > nominal
        if again or self.exceeds(min(quotas), allotted):
            rows = view()
            scores = self.method.score(seen, rows, self.state).to(rows.mass.dtype) if method.scores else rows.mass
            scores = bounded(scores)
            if again:
                rows = replace(rows, columns={**rows.columns, SCORE: scores})
                self.rows.columns, self.shown = dict(rows.columns), without_tensors(seen)
            if self.exceeds(min(quotas), allotted):
                self.divide(rows, scores, quotas, seen, allotted)
        if allocator.cascades and not seen.decoding:
            for index, less in self.allocator.earlier(nominal, seen, shared).items():
                self.cache[index].trim(less)
            if self.index == seen.cut_layers[-1]:
                for index in seen.cut_layers:
                    self.cache[index].forget_scores()

    def exceeds(self, quota: int, allotted: Tensor | None) -> bool:
        """True if a head may hold more rows than it may keep: `quota`, or its own of `allotted` (H,) or (B, H)."""
        if allotted is not None:
            return bool((self.rows.counts().cpu() > allotted).any())
        return not (self.rows.even and self.rows.longest_head <= quota)

    def trim(self, quotas: tuple[int, ...]) -> None:
        """Cut to fewer rows per head, one quota per sample, by the scores of this block."""
        if self.shown is not None and self.rows.longest_head > min(quotas):
            rows = self.rows.view()
            self.divide(rows, rows.columns[SCORE], quotas, self.shown, None)
            self.renew_stamp()

    def divide(self, rows: Rows, scores: Tensor, quotas: tuple[int, ...], seen: Seen, allotted: Tensor | None) -> None:
        """Share each sample's rows per head among the heads, unless the method allotted them, and cut them."""
        method, heads = self.method, self.allocator.heads
        protected = by_sample(quotas, lambda own, quota: self.protect(seen, rows, quota, own))
        scores = marked(scores, protected, rows)
        frozen = allotted is None and seen.decoding and self.shares is not None
        if frozen:
            counts = self.frozen_counts(rows, protected, quotas)
        elif allotted is None:
            counts = by_sample(quotas, lambda own, quota: heads(scores[own], protected[own], quota))
            self.shares = None if self.choice.allocator.even else (quotas, counts)
        else:
            counts = rows.present.sum(-1).minimum(allotted.to(rows.mass.device))
        self.protected = protected.sum(-1).max()
        safe = self.allocator.safe
        kept = protected | by_sample(quotas, lambda own, quota: safe(scores[own], protected[own], quota))
        if frozen:  # a head's share of another quota may have room for fewer rows than are safe at this one
            kept = protected | (kept & method.select(scores, counts))
        known = self.rows.even and self.even and len(set(quotas)) == 1
        each = min(self.rows.longest_head, quotas[0]) if known else None
        self.store(rows, method.cut(rows, scores, counts, kept, each), each)

    def protect(self, seen: Seen, rows: Rows, quota: int, samples: slice) -> Tensor:
        """Rows (B, H, n) of some `samples` that are protected within the quota; notes how many of each kind are not."""
        method = self.method
        sinks, recents = method.protect_sinks(seen, rows, quota), method.protect(seen, rows, quota)
        if sinks is not None and recents is not None:
            recents = recents & ~sinks  # a row that is both counts once
        kept = shrink(sinks, recents, rows, quota)
        for kind, wanted in (("sinks", sinks), ("recents", recents)):
            if wanted is not None:
                lost = ((wanted & rows.present) > kept)[samples].sum(-1).max()
                self.given_up = {**self.given_up, kind: self.given_up[kind].maximum(lost)}
        return kept[samples]

    def frozen_counts(self, rows: Rows, protected: Tensor, quotas: tuple[int, ...]) -> Tensor:
        """(B, H) rows per head in the proportions of the last cut before decoding."""
        before, counts = self.shares
        own, free = protected.sum(-1).tolist(), rows.present.sum(-1).tolist()
        return torch.tensor(
            [
                settle(
                    [count * quota / then for count in counts[sample].tolist()],
                    [max(1, safe) for safe in own[sample]], free[sample], quota * len(free[sample]),
                )
                for sample, (then, quota) in enumerate(zip(before, quotas, strict=True))
            ],
            device=rows.mass.device,
        )  # fmt: skip

    def pass_through(
        self, stored: Plain, places: Tensor, tail: Sequence[Tensor] | None, tokens: int, size: int
    ) -> None:
        """Take what is left after further `tokens` were read, and cut after every `size` to as many rows as before.
        `tail`: keys and values (B, H, t, d) read since the last cut.
        """
        rows, before = self.rows, self.rows.tail
        cuts = (before + tokens) // size
        rows.stored, rows.places, rows.seen = stored, places, rows.seen + tokens
        rows.tail = before + tokens - cuts * size
        rows.tail_keys, rows.tail_values = tail or (None, None)
        self.evicted = cuts * size + (torch.zeros_like(rows.lengths) if self.evicted is None else self.evicted)
        self.peak_attended = max(self.peak_attended, rows.longest + (size if cuts else rows.tail))
        if self.course.decoding:
            self.attended += [rows.longest + (before + token) % size + 1 for token in range(tokens)]
        self.weigh()

    def forget_scores(self) -> None:
        """The block is over: no layer is cut again by its scores."""
        self.rows.columns = {name: column for name, column in self.rows.columns.items() if name != SCORE}
        self.shown = None
        self.renew_stamp()
        self.weigh()

    @property
    def even(self) -> bool:
        """Whether all heads hold the same number of rows after a cut."""
        method, allocator = self.choice.method, self.choice.allocator
        return allocator.even and not method.allots and (len(self.state.seeds) == 1 or not allocator.cascades)

    def store(self, before: Rows, after: Rows, each: int | None) -> None:
        """Hold what a cut left, `each` rows per head where that is known."""
        gone = (before.mass.sum(-1) - after.mass.sum(-1)).round().long()
        self.evicted = gone if self.evicted is None else self.evicted + gone
        self.rows.keep(after, even=self.even, merged=self.choice.method.merges, each=each)
        self.weigh()

    def cut_after_readings(self, quota: int) -> None:
        """Cut a layer that the model has read about."""
        self.cut(self.shown, Lazy(self.rows.view), quota)
        self.shown = None
        self.method.forget(self.state)
        self.renew_stamp()
        self.weigh()

    def settle(self) -> None:
        """The prefill is over: nothing cuts this layer any more unless the method cuts while decoding."""
        self.rows.settle()
        self.weigh()

    def bytes(self) -> Bytes:
        """What the layer occupies now, counted on its storages."""
        state = size(v for v in self.state.layer.values() if isinstance(v, Tensor))
        return replace(self.rows.bytes(), state=self.rows.bytes().state + state)

    def full_bytes(self) -> int:
        """Bytes that keys and values of all tokens seen would take."""
        return self.rows.seen * self.token_bytes

    def weigh(self) -> None:
        """Bring the course's byte count up to date after storage changed."""
        now = self.bytes().total
        self.course.bytes += now - self.weight
        self.course.peak_bytes = max(self.course.peak_bytes, self.course.bytes)
        self.weight = now

    def mark(self) -> dict:
        """Everything `rewind` needs; storages are shared, not copied."""
        own = {k: v for k, v in vars(self).items() if k not in ("rows", "state", "cache", "course")}
        state, kept = copy_containers(self.state.layer), self.guard.handed()
        for name, tensor in [*state_of({"state": state}), *state_of({"rows.columns": self.rows.columns})]:
            kept.add(name, tensor)
        return {"own": own, "attended": list(self.attended), "rows": self.rows.mark(), "state": state, "kept": kept}

    def rewind(self, mark: dict) -> None:
        """Return to a mark."""
        vars(self).update(mark["own"])
        self.attended = list(mark["attended"])
        self.rows.rewind(mark["rows"])
        self.state.layer = copy_containers(mark["state"])

    def check_mark(self, mark: dict) -> None:
        """ContractError if the method wrote into tensors that it remembered at the mark: what it saw after one question
        would change the answer to the next.
        """
        if written := mark["kept"].written():
            self.guard.report(self.choice.owners, "a hook", written)


def bounded(scores: Tensor) -> Tensor:
    """Scores with no infinities, which mark what is protected and what is absent."""
    return scores.clamp(min=torch.finfo(scores.dtype).min, max=torch.finfo(scores.dtype).max)


def marked(scores: Tensor, protected: Tensor, rows: Rows) -> Tensor:
    """+inf where a row is protected, -inf where it is absent."""
    return scores.masked_fill(protected, torch.inf).masked_fill(~rows.present, -torch.inf)


def without_tensors(seen: Seen) -> Seen:
    """What was seen, but for what takes memory."""
    empty = seen.queries.new_empty(*seen.queries.shape[:3], 0)
    return replace(seen, queries=empty, outputs=empty, lse=None)


def by_sample(quotas: tuple[int, ...], work: Callable[[slice, int], Tensor]) -> Tensor:
    """`work(samples, quota)` for all samples at once where their quotas are equal, else one by one."""
    if len(set(quotas)) == 1:
        return work(slice(None), quotas[0])
    return torch.cat([work(slice(sample, sample + 1), quota) for sample, quota in enumerate(quotas)])


@dataclass
class Lazy:
    """A value made when first asked for."""

    make: Callable[[], Rows]
    value: list[Rows] = field(default_factory=list)

    def __call__(self) -> Rows:
        if not self.value:
            self.value.append(self.make())
        return self.value[0]
