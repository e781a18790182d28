"""Wrap methods, allocators and codecs so that every call of a hook is checked (kvbench.cache.guard)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.cache.guard import ROWS, Guard, T, find_codec_of_layer
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import (
    Angles,
    Codec,
    Cuttable,
    Growable,
    Growing,
    ListingGrowing,
    MadeRows,
    Packed,
    Replicable,
)
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, ReadRequest, State
from kvbench.interfaces.row_reader import ListedRows
from kvbench.interfaces.rows import Rows
from kvbench.validation import ContractError

HOOKS = ("update", "protect_sinks", "protect", "score", "select", "merge", "cut", "read", "forget")


class GuardedMethod:
    """A method whose hooks are checked.

    Arguments and results are those of `kvbench.interfaces.method.Method`. Hooks that the method does not override are
    kvbench's own and are called without a check.
    """

    def __init__(self, method: Method, guard: Guard) -> None:
        self.method, self.guard, self.owner = method, guard, f"method={method.name}"
        self.own = {hook for hook in HOOKS if method.overrides(hook)}

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        handed = self.guard.handed_rows(observation, rows)
        found = self.guard.call(self.owner, "update", handed, lambda: self.method.update(observation, rows, state))
        if not isinstance(found, Mapping):
            raise ContractError(self._said("update", f"{type(found).__name__}, expected a mapping of names to tensors"))
        for name, column in found.items():
            if name not in rows.columns or column is not rows.columns[name]:
                hook = f"update, column {name!r},"
                self.guard.expect(self.owner, hook, column, rows.mass.shape, "number", rows.mass.device)
                self._not_nan(hook, column, observation, rows)
        return found

    def protect_sinks(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self._mask("protect_sinks", self.method.protect_sinks, observation, rows, quota)

    def protect(self, observation: Observation, rows: Rows, quota: int | Tensor) -> Tensor | None:
        return self._mask("protect", self.method.protect, observation, rows, quota)

    def score(self, observation: Observation, rows: Rows, state: State) -> Tensor:
        handed = self.guard.handed_rows(observation, rows)
        found = self.guard.call(self.owner, "score", handed, lambda: self.method.score(observation, rows, state))
        self.guard.expect(self.owner, "score", found, rows.mass.shape, "float", rows.mass.device)
        self._not_nan("score", found, observation, rows)
        return found

    def head_quotas(self, quota: int, observation: Observation, state: State, heads: int) -> Tensor:
        handed = self.guard.handed_rows(observation, None)
        found = self.guard.call(
            self.owner, "head_quotas", handed, lambda: self.method.head_quotas(quota, observation, state)
        )
        per_sample = isinstance(found, Tensor) and found.dim() == 2
        shape = (observation.queries.shape[0], heads) if per_sample else (heads,)
        self.guard.expect(self.owner, "head_quotas", found, shape, "int", None)
        self.guard.note(lambda: (found < 1).any(), self._said("head_quotas", "less than one row for a head"))
        return found

    def count_rows(self, scores: Tensor) -> Tensor:
        handed = self.guard.handed(scores=scores)
        found = self.guard.call(self.owner, "count_rows", handed, lambda: self.method.count_rows(scores))
        self.guard.expect(self.owner, "count_rows", found, scores.shape[:2], "int", scores.device)
        return found

    def cut(
        self, observation: Observation, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor,
        each: int | None, state: State,
    ) -> Rows:  # fmt: skip
        """Return the rows that stay: the result of the method's `cut`, or of its `select` and `merge`."""
        if not self.own & {"select", "merge", "cut"}:
            return self.method.cut(rows, scores, quotas, protected, each)
        handed = self.guard.handed(scores=scores, quotas=quotas, protected=protected).add_rows(rows)
        if "cut" not in self.own:
            hook = "merge" if "merge" in self.own else "select"
            kept = self.guard.call(self.owner, "select", handed, lambda: self.method.select(scores, quotas))
            self.guard.expect(self.owner, "select", kept, scores.shape, "bool", scores.device)
            handed.add("kept", kept)
            handed.add_seen(observation)
            found = self.guard.call(
                self.owner, "merge", handed, lambda: self.method.merge(observation, rows, kept, state)
            )
        else:
            hook = "cut"
            found = self.guard.call(
                self.owner, "cut", handed, lambda: self.method.cut(rows, scores, quotas, protected, each)
            )
        self._check_rows(hook, found, rows, quotas)
        return found

    def select(self, scores: Tensor, quotas: Tensor) -> Tensor:
        if "select" not in self.own:
            return self.method.select(scores, quotas)
        handed = self.guard.handed(scores=scores, quotas=quotas)
        found = self.guard.call(self.owner, "select", handed, lambda: self.method.select(scores, quotas))
        self.guard.expect(self.owner, "select", found, scores.shape, "bool", scores.device)
        return found

    def read(self, request: ReadRequest, rows: Callable[[], Rows], state: State, held: int) -> Tensor | None:
        """Return what the method's `read` returns. `held` is the number of the layer's rows, padded."""
        if "read" not in self.own:
            return None
        handed = self.guard.handed(queries=request.queries)
        watched = self.guard.handing(handed, rows)
        found = self.guard.call(self.owner, "read", handed, lambda: self.method.read(request, watched, state))
        if found is not None:
            shape = (*request.queries.shape[:2], held)
            self.guard.expect(self.owner, "read", found, shape, "bool", request.queries.device)
        return found

    def forget(self, state: State) -> None:
        if "forget" in self.own:
            self.guard.call(self.owner, "forget", self.guard.handed(), lambda: self.method.forget(state))

    def _mask(
        self, name: str, hook: Callable[..., Tensor | None], observation: Observation, rows: Rows, quota: int | Tensor
    ) -> Tensor | None:
        """Return the rows that a hook protects, (B, H, n) bool, or None."""
        if name not in self.own:
            return None
        handed = self.guard.handed_rows(observation, rows)
        found = self.guard.call(self.owner, name, handed, lambda: hook(observation, rows, quota))
        if found is not None:
            self.guard.expect(self.owner, name, found, rows.mass.shape, "bool", rows.mass.device)
        return found

    def _said(self, hook: str, what: str) -> str:
        return f"{self.owner}: {hook} of layer {self.guard.layer} returned {what}"

    def _not_nan(self, hook: str, found: Tensor, observation: Observation, rows: Rows) -> None:
        def is_wrong() -> Tensor:
            wrong = found.isnan()
            return (wrong if observation.each == len(rows) else wrong & rows.present).any()  # none of `each` is absent

        if found.dtype.is_floating_point:
            self.guard.note(is_wrong, self._said(hook, "NaN"))

    def _check_rows(self, hook: str, found: object, before: Rows, quotas: Tensor) -> None:
        if not isinstance(found, Rows):
            raise ContractError(self._said(hook, f"{type(found).__name__}, expected Rows"))
        count = found.mass.shape[-1] if isinstance(found.mass, Tensor) and found.mass.dim() else 0
        for name in ROWS:
            old = getattr(before, name)
            own, shape = getattr(found, name), (*old.shape[:2], count, *old.shape[3:])
            kind = "float" if old.dtype.is_floating_point else "int"
            self.guard.expect(self.owner, f"{hook}, {name},", own, shape, kind, old.device)
            if own.dtype != old.dtype:
                raise ContractError(self._said(f"{hook}, {name},", f"{own.dtype}, expected {old.dtype}"))
            if own is not old and kind == "float":
                line = self._said(f"{hook}, {name},", "numbers that are not finite")
                self.guard.note(partial(is_not_finite, own), line)
        for name, column in found.columns.items():
            shape = (*before.mass.shape[:2], count)
            self.guard.expect(self.owner, f"{hook}, column {name!r},", column, shape, "number", before.mass.device)
        asked = quotas.to(found.mass.device)
        line = self._said(hook, "a number of rows that differs from the quota of a head")
        self.guard.note(lambda: (found.present.sum(-1) != asked).any(), line)
        if self.method.merges and not self.method.weighs_rows:
            line = self._said(hook, "masses that stand for more tokens than before")
            self.guard.note(
                lambda: ((found.mass.sum(-1) > before.mass.sum(-1) + 0.5) | (found.mass < 0).any(-1)).any(), line
            )


class GuardedAllocator:
    """An allocator whose hooks are checked.

    Arguments and results are those of `kvbench.interfaces.allocator.Allocator`. Hooks that the allocator does not
    override are called without a check.
    """

    def __init__(self, allocator: Allocator, guard: Guard) -> None:
        self.allocator, self.guard, self.owner = allocator, guard, f"allocator={allocator.name}"
        self.own = {hook for hook in ("layer", "heads", "safe") if allocator.overrides(hook)}

    def layer(
        self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
    ) -> tuple[int, ...]:
        """Return the rows per head, one number per sample."""
        batch = observation.queries.shape[0]
        if "layer" not in self.own:
            return (quota,) * batch
        handed = self.guard.handed().add_seen(observation)
        watched = self.guard.handing(handed, rows)
        found = self.guard.call(
            self.owner, "layer", handed, lambda: self.allocator.layer(quota, observation, watched, shared)
        )
        return self._quotas("layer", (found,) * batch if is_whole(found) else found, batch)

    def heads(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        if "heads" not in self.own:
            return self.allocator.heads(scores, protected, quota)
        handed = self.guard.handed(scores=scores, protected=protected)
        found = self.guard.call(self.owner, "heads", handed, lambda: self.allocator.heads(scores, protected, quota))
        self.guard.expect(self.owner, "heads", found, scores.shape[:2], "int", scores.device)

        def is_wrong() -> Tensor:
            held, total = (scores > -torch.inf).sum(-1), found.sum(-1, keepdim=True)
            return ((found < 1) | (found > held) | (total > found.shape[1] * quota)).any()

        line = f"counts that are not from 1 to the rows of a head and at most {quota} on average"
        self.guard.note(is_wrong, self._said("heads", line))
        return found

    def safe(self, scores: Tensor, protected: Tensor, quota: int) -> Tensor:
        if "safe" not in self.own:
            return self.allocator.safe(scores, protected, quota)
        handed = self.guard.handed(scores=scores, protected=protected)
        found = self.guard.call(self.owner, "safe", handed, lambda: self.allocator.safe(scores, protected, quota))
        self.guard.expect(self.owner, "safe", found, scores.shape, "bool", scores.device)
        return found

    def earlier(self, quota: int, observation: Observation, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        handed = self.guard.handed_rows(observation, None)
        found = self.guard.call(
            self.owner, "earlier", handed, lambda: self.allocator.earlier(quota, observation, shared)
        )
        if not isinstance(found, Mapping) or not set(found) <= set(observation.cut_layers):
            raise ContractError(self._said("earlier", "no mapping of layers that share the budget to rows"))
        return {layer: self._quotas("earlier", own, observation.queries.shape[0]) for layer, own in found.items()}

    def _quotas(self, hook: str, found: object, batch: int) -> tuple[int, ...]:
        if not isinstance(found, tuple | list) or len(found) != batch or not all(is_whole(own) for own in found):
            raise ContractError(self._said(hook, f"{found!r}, expected a whole number of rows from 1 on per sample"))
        return tuple(found)

    def _said(self, hook: str, what: str) -> str:
        return f"{self.owner}: {hook} of layer {self.guard.layer} returned {what}"


def is_not_finite(tensor: Tensor) -> Tensor:
    """Return whether a tensor has a number that is not finite, as a bool tensor without dimensions."""
    return ~tensor.isfinite().all()


def is_whole(found: object) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(found, int) and not isinstance(found, bool) and found >= 1


class GuardedCodec:
    """A codec whose hooks are checked. It packs rows as `GuardedRows`."""

    def __init__(self, codec: Codec, guard: Guard, layers: int) -> None:
        """Take the codec of the guard's layer, of `layers` layers."""
        self.owner, self.guard = f"codec={codec.name}", guard
        self.codec = find_codec_of_layer(codec, guard.layer, layers)

    @property
    def packs(self) -> bool:
        """Whether the codec packs the layer's rows."""
        return self.codec.packs

    @property
    def packs_before_attention(self) -> bool:
        """Whether the codec packs the layer's rows as they are read."""
        return self.codec.packs_before_attention

    @property
    def takes_unrotated_keys(self) -> bool:
        """Whether the layer's keys are stored before QK norm and rotation."""
        return self.codec.takes_unrotated_keys

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "GuardedRows":
        owner, guard = self.owner, self.guard
        handed = guard.handed(keys=keys, values=values, lengths=lengths)
        found = guard.call(owner, "pack", handed, lambda: self.codec.pack(keys, values, lengths))
        packed = GuardedRows(found, owner, guard, (keys.shape[0], keys.shape[1]), keys.dtype, keys.device)
        for name, part in zip(("keys", "values"), packed.read(), strict=True):
            line = f"{owner}: pack of layer {guard.layer} returns {name} that are not finite"
            guard.note(partial(is_not_finite, part), line)
        return packed

    def find_packed(self, rows: "GuardedRows", more: int) -> tuple[int, int] | None:
        found = self.guard.call(
            self.owner, "find_packed", self.guard.handed(), lambda: self.codec.find_packed(rows.packed, more)
        )
        if found is not None and not (isinstance(found, tuple) and [type(own) for own in found] == [int, int]):
            raise ContractError(
                f"{self.owner}: find_packed of layer {self.guard.layer} returned {found!r}, expected two whole numbers"
            )
        return found

    def count_needs(self, rows: "GuardedRows", attended: float) -> tuple[int, int] | None:
        return self.guard.call(
            self.owner, "count_needs", self.guard.handed(), lambda: self.codec.count_needs(rows.packed, attended)
        )


@dataclass(frozen=True)
class GuardedRows:
    """Packed rows (R, d) of one layer that are checked whenever they are read or extended."""

    packed: Packed
    owner: str
    guard: Guard
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def read(self) -> tuple[Tensor, Tensor]:
        found = self.guard.call(self.owner, "read", self.guard.handed(), lambda: tuple(self.packed.read()))
        if len(found) != 2:
            raise ContractError(f"{self.owner}: read of layer {self.guard.layer} returned no keys and values")
        for name, part in zip(("keys", "values"), found, strict=True):
            self.guard.expect(self.owner, f"read, {name},", part, self.shape, "float", self.device)
            if part.dtype != self.dtype:
                where = f"{self.owner}: read, {name}, of layer {self.guard.layer} returned"
                raise ContractError(f"{where} {part.dtype}, expected {self.dtype}")
        return found

    def tensors(self) -> list[Tensor]:
        return self.guard.call(self.owner, "tensors", self.guard.handed(), lambda: list(self.packed.tensors()))

    def extend(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "GuardedRows":
        handed = self.guard.handed(keys=keys, values=values, lengths=lengths)
        for number, tensor in enumerate(self.tensors()):
            handed.add(f"tensors()[{number}]", tensor)  # snapshots refer to packed rows, so these must not change
        found = self.guard.call(self.owner, "extend", handed, lambda: self.packed.extend(keys, values, lengths))
        shape = (self.shape[0] + len(keys), self.shape[1])
        return GuardedRows(found, self.owner, self.guard, shape, self.dtype, self.device)

    def keep(self, kept: Tensor) -> "GuardedRows":
        handed = self.guard.handed(kept=kept)
        for number, tensor in enumerate(self.tensors()):
            handed.add(f"tensors()[{number}]", tensor)
        packed = cast(Cuttable, self.packed)  # the codec packs before attention
        found = self.guard.call(self.owner, "keep", handed, lambda: packed.keep(kept))
        shape = (int(kept.sum()), self.shape[1])
        return GuardedRows(found, self.owner, self.guard, shape, self.dtype, self.device)

    def replicate(self, times: int, lengths: Tensor) -> "GuardedRows":
        packed = cast(Replicable, self.packed)  # the codec replicates
        handed = self.guard.handed(lengths=lengths)
        found = self.guard.call(self.owner, "replicate", handed, lambda: packed.replicate(times, lengths))
        shape = (self.shape[0] * times, self.shape[1])
        return GuardedRows(found, self.owner, self.guard, shape, self.dtype, self.device)

    def growing(self, tokens: int, ahead: int, seen: int, places: Tensor, mass: Tensor | None) -> "GuardedGrowing":
        handed = self.guard.handed()
        for number, tensor in enumerate(self.tensors()):
            handed.add(f"tensors()[{number}]", tensor)
        handed.add("places", places)
        handed.add("mass", mass)
        packed = cast(Growable, self.packed)  # the codec grows
        found = self.guard.call(
            self.owner, "growing", handed, lambda: packed.growing(tokens, ahead, seen, places, mass)
        )
        return GuardedGrowing(found, self)


@dataclass(frozen=True)
class GuardedGrowing:
    """Growing rows of one layer whose hooks are checked."""

    growing: Growing
    rows: GuardedRows
    """The rows before the first token that was appended."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the memory has room for."""
        return self.growing.tokens

    def begin(self) -> None:
        self._call("begin", self.growing.begin)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, angles: Angles, step: Tensor,
        scaling: float, norms: tuple[Tensor, Tensor, float] | None, implementation: str | None,
        made: MadeRows | None = None, counts: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        given = queries, keys, values, angles, step, scaling, norms, implementation
        growing = cast(ListingGrowing, self.growing)  # if there are made rows, the codec lists rows
        more = () if made is None else (made, counts)
        found = self._call("attend", lambda: growing.attend(*given, *more))
        dim = self.rows.shape[1]
        shape = (len(queries), queries.shape[1] // dim, 1, dim)
        self.rows.guard.expect(self.rows.owner, "growing.attend", found, shape, "float", queries.device)
        return found

    def make_rows(self, listed: ListedRows, query_heads: int, step: Tensor, implementation: str | None) -> MadeRows:
        growing = cast(ListingGrowing, self.growing)  # the codec lists rows
        return self._call("make_rows", lambda: growing.make_rows(listed, query_heads, step, implementation))

    def pack_due(self, number: int) -> None:
        self._call("pack_due", lambda: self.growing.pack_due(number))

    def finish(self, read: int, lengths: Tensor) -> GuardedRows:
        rows = self.rows
        shape = (rows.shape[0] + read * lengths.numel(), rows.shape[1])
        found = self._call("finish", lambda: self.growing.finish(read, lengths))
        return GuardedRows(found, rows.owner, rows.guard, shape, rows.dtype, rows.device)

    def tensors(self) -> list[Tensor]:
        return self._call("tensors", lambda: list(self.growing.tensors()))

    def _call(self, hook: str, work: Callable[[], T]) -> T:
        return self.rows.guard.call(self.rows.owner, f"growing.{hook}", self.rows.guard.handed(), work)
