"""Guard the engine against a method, an allocator or a codec that breaks its contract.

The engine calls every hook through a guard. A hook that raises, that returns something it must not, or that writes
into a tensor it was handed ends in a `ContractError`: one line that names who, the hook, the layer and the tensor.
Without it a method that normalises keys in place would change the full cache and every other cell that reads the same
prompt.

How a write is found: PyTorch counts the in-place writes to a tensor (`Tensor._version`), whichever view or detached
alias they go through. Reading that number costs the host a tenth of a microsecond and never waits for a GPU. There is
no such count under `torch.inference_mode`, therefore the engine runs `without_gradients`. A write that goes around
PyTorch (`.data`, NumPy, DLPack, a kernel of one's own) is not counted. Guards that are `exact` find it too: they copy
each tensor before a hook and compare afterwards. The runner does so once for every cell, before its first sample, and
`kvbench.check_method` does so in all its checks; a method that does it later, at some prompts only, is not found.

A fault that only the device can see (NaN, a wrong count) raises at once on a CPU. On a GPU it is noted and raised when
the block went through all layers, when the engine looks at the device anyway.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from kvbench.allocator import Allocator
from kvbench.codec import Codec, Packed
from kvbench.method import Method
from kvbench.observation import Reading, ReadRequest, Seen, State, Words
from kvbench.rows import Rows
from kvbench.settings import ContractError, SettingError

T = TypeVar("T")
Work = TypeVar("Work", bound=Callable[..., Any])
PASSED_ON = (ContractError, SettingError, torch.cuda.OutOfMemoryError)  # these say themselves what is wrong
ROWS = ("keys", "values", "places", "mass")
SHOWN = ("queries", "outputs", "lse", "output_weight")


def without_gradients(work: Work) -> Work:
    """Decorate a function or generator function so that it runs without gradients but with version counters."""
    return torch.inference_mode(False)(torch.no_grad()(work))


def version(tensor: Tensor) -> int:
    """How often the tensor was written to; 0 for a tensor made under inference_mode, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def ask(owner: str, hook: str, work: Callable[[], T], where: str = "") -> T:
    """Call a hook. ContractError if it raises; the message has the last line that is no installed package's."""
    try:
        return work()
    except PASSED_ON:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((own for own in reversed(frames) if "-packages" not in own.filename), frames[-1])
        reason = " ".join(str(error).split()) or "no message"
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise ContractError(f"{owner}: {hook}{where} raised {type(error).__name__}: {reason} ({place})") from error


def check_shape(method: Method, layers: int, heads: int, dim: int, sliding: tuple[int, ...]) -> None:
    """Ask a method whether it serves a model of this shape; SettingError if it does not (see `Method.check`)."""
    ask(f"method={method.name}", "check", lambda: method.check(layers, heads, dim, sliding))


def reason_against(method: Method, allocator: Allocator, codec: Codec) -> str | None:
    """Why the three cannot work together, None where they can (see `Method.refuses`)."""
    owner = f"method={method.name}"
    found = ask(owner, "refuses", lambda: method.refuses(allocator, codec))
    if found is not None and not isinstance(found, str):
        raise ContractError(f"{owner}: refuses returned {type(found).__name__}, expected a text or None")
    return found


def is_spared(method: Method, layer: int, layers: int) -> bool:
    """Whether a layer is never cut (see `Method.spares`)."""
    owner = f"method={method.name}"
    found = ask(owner, "spares", lambda: method.spares(layer, layers), f" of layer {layer}")
    if not isinstance(found, bool):
        raise ContractError(f"{owner}: spares of layer {layer} returned {type(found).__name__}, expected a bool")
    return found


def count_steps(method: Method, tokens: int, quota: int | None) -> int:
    """Steps towards the next cut that reading `tokens` counts (see `Method.steps`)."""
    owner = f"method={method.name}"
    found = ask(owner, "steps", lambda: method.steps(tokens, quota))
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ContractError(f"{owner}: steps returned {found!r}, expected a whole number from 0 on")
    return found


class Handed:
    """Tensors that a hook is handed, by name, with their versions and, of an exact guard, copies."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []
        self.copies: list[Tensor] = []

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and (self.exact or not tensor.is_inference()):  # the latter have no versions
            self.names.append(name)
            self.tensors.append(tensor)
            self.versions.append(version(tensor))
            if self.exact:
                self.copies.append(tensor.clone())

    def add_seen(self, seen: Seen) -> "Handed":
        for name in SHOWN:
            self.add(f"seen.{name}", getattr(seen, name))
        return self

    def add_rows(self, rows: Rows) -> "Handed":
        for name in ROWS:
            self.add(f"rows.{name}", getattr(rows, name))
        for name, column in rows.columns.items():
            self.add(f"rows.columns[{name!r}]", column)
        return self

    def written(self) -> list[str]:
        """Names of those that were written to, each once."""
        if not self.exact and [tensor._version for tensor in self.tensors] == self.versions:
            return []  # the usual case, and often asked: no loop of Python's own
        changed = [version(tensor) != before for tensor, before in zip(self.tensors, self.versions, strict=True)]
        if self.exact:
            pairs = zip(changed, self.tensors, self.copies, strict=True)
            changed = [counted or not same_bits(tensor, copy) for counted, tensor, copy in pairs]
        return list(dict.fromkeys(name for name, own in zip(self.names, changed, strict=True) if own))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (NaN equals itself)."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Guard:
    """Calls the hooks of one layer and notes what only the device can see."""

    def __init__(self, layer: int, exact: bool = False) -> None:
        self.layer, self.exact = layer, exact
        self.faults: dict[str, Tensor] = {}  # message -> flag on the device
        self.noting = True
        self.watched: tuple[Seen | None, Rows | None, Handed] = (None, None, Handed())

    def handed(self, **tensors: Tensor) -> Handed:
        """Watch these tensors."""
        found = Handed(self.exact)
        for name, tensor in tensors.items():
            found.add(name, tensor)
        return found

    def handed_rows(self, seen: Seen | None, rows: Rows | None) -> Handed:
        """Watch what is seen and rows. Hooks that are handed the same, one after the other, share one list."""
        if self.watched[0] is not seen or self.watched[1] is not rows:
            found = Handed(self.exact)
            if seen is not None:
                found.add_seen(seen)
            if rows is not None:
                found.add_rows(rows)
            self.watched = seen, rows, found
        return self.watched[2]

    def release(self) -> None:
        """Keep nothing alive that a hook was handed."""
        self.watched = (None, None, Handed())

    def call(self, owner: str, hook: str, handed: Handed, work: Callable[[], T]) -> T:
        """What the hook returns; ContractError if it raised or wrote into what it was handed."""
        try:
            found = ask(owner, hook, work, f" of layer {self.layer}")
        except ContractError:
            if written := handed.written():
                self.report(owner, hook, written)
            raise
        if written := handed.written():
            self.report(owner, hook, written)
        return found

    def handing(self, handed: Handed, rows: Callable[[], Rows]) -> Callable[[], Rows]:
        """`rows`, which a hook may ask for, watched from then on."""
        given: list[Rows] = []

        def hand_over() -> Rows:
            found = rows()
            if not given:
                given.append(found)
                handed.add_rows(found)
            return found

        return hand_over

    def report(self, owner: str, hook: str, names: Sequence[str]) -> NoReturn:
        """Raise for tensors of these names, which were written to."""
        weights = "seen.output_weight" in names
        lost = "; the model's weights are spoiled, load it again" if weights else ""
        line = f"{owner}: {hook} of layer {self.layer} wrote into {', '.join(names)}; it must return new tensors{lost}"
        raise ContractError(line, spoils_model=weights)

    def note(self, make: Callable[[], Tensor], line: str) -> None:
        """A fault where the flag that `make` gives, a bool of no dimension, is true."""
        if not self.noting:
            return
        flag = make()
        if flag.device.type == "cpu":
            if flag:
                raise ContractError(line)
        else:
            self.faults[line] = flag if line not in self.faults else self.faults[line] | flag

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """What only the device can tell is somebody else's affair inside."""
        self.noting = False
        try:
            yield
        finally:
            self.noting = True

    def expect(self, owner: str, hook: str, found: object, shape: tuple[int, ...], kind: str, device: Any) -> None:
        """ContractError unless `found` is a tensor of this shape, kind of dtype and device."""
        if not isinstance(found, Tensor):
            wrong = type(found).__name__
        elif found.shape != shape:
            wrong = f"a tensor of shape {tuple(found.shape)}"
        elif not KINDS[kind](found.dtype):
            wrong = f"a tensor of {str(found.dtype).removeprefix('torch.')}"
        elif device is not None and found.device != device:
            wrong = f"a tensor on {found.device}"
        else:
            return
        wanted = f"expected a {kind} tensor of shape {tuple(shape)}{f' on {device}' if device is not None else ''}"
        raise ContractError(f"{owner}: {hook} of layer {self.layer} returned {wrong}, {wanted}")


HOOKS = ("update", "protect_sinks", "protect", "score", "select", "merge", "cut", "read", "forget")
KINDS: Mapping[str, Callable[[torch.dtype], bool]] = {
    "float": lambda dtype: dtype.is_floating_point,
    "bool": lambda dtype: dtype == torch.bool,
    "int": lambda dtype: not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool,
    "number": lambda dtype: not dtype.is_complex,
}


class GuardedMethod:
    """A method's hooks, checked. Arguments and results are those of `kvbench.method.Method`. Hooks that the method
    leaves as they are in `Method` are called without a check: they are kvbench's own.
    """

    def __init__(self, method: Method, guard: Guard) -> None:
        self.method, self.guard, self.owner = method, guard, f"method={method.name}"
        self.own = {hook for hook in HOOKS if method.overrides(hook)}

    def update(self, seen: Seen, rows: Rows, state: State) -> Mapping[str, Tensor]:
        handed = self.guard.handed_rows(seen, rows)
        found = self.guard.call(self.owner, "update", handed, lambda: self.method.update(seen, rows, state))
        if not isinstance(found, Mapping):
            raise ContractError(self._said("update", f"{type(found).__name__}, expected a mapping of names to tensors"))
        for name, column in found.items():
            if name not in rows.columns or column is not rows.columns[name]:
                hook = f"update, column {name!r},"
                self.guard.expect(self.owner, hook, column, rows.mass.shape, "number", rows.mass.device)
                self._not_nan(hook, column, rows.present)
        return found

    def protect_sinks(self, seen: Seen, rows: Rows, quota: int) -> Tensor | None:
        return self._mask("protect_sinks", self.method.protect_sinks, seen, rows, quota)

    def protect(self, seen: Seen, rows: Rows, quota: int) -> Tensor | None:
        return self._mask("protect", self.method.protect, seen, rows, quota)

    def score(self, seen: Seen, rows: Rows, state: State) -> Tensor:
        handed = self.guard.handed_rows(seen, rows)
        found = self.guard.call(self.owner, "score", handed, lambda: self.method.score(seen, rows, state))
        self.guard.expect(self.owner, "score", found, rows.mass.shape, "float", rows.mass.device)
        self._not_nan("score", found, rows.present)
        return found

    def allot(self, quota: int, seen: Seen, state: State, heads: int) -> Tensor:
        handed = self.guard.handed_rows(seen, None)
        found = self.guard.call(self.owner, "allot", handed, lambda: self.method.allot(quota, seen, state))
        per_sample = isinstance(found, Tensor) and found.dim() == 2
        shape = (seen.queries.shape[0], heads) if per_sample else (heads,)
        self.guard.expect(self.owner, "allot", found, shape, "int", None)
        self.guard.note(lambda: (found < 1).any(), self._said("allot", "less than one row for a head"))
        return found

    def cut(self, rows: Rows, scores: Tensor, quotas: Tensor, protected: Tensor, each: int | None) -> Rows:
        """Rows that stay: what `cut` of the method returns, or its `merge` of what it selects."""
        if not self.own & {"select", "merge", "cut"}:
            return self.method.cut(rows, scores, quotas, protected, each)
        handed = self.guard.handed(scores=scores, quotas=quotas, protected=protected).add_rows(rows)
        if "cut" not in self.own:
            hook = "merge" if "merge" in self.own else "select"
            kept = self.guard.call(self.owner, "select", handed, lambda: self.method.select(scores, quotas))
            self.guard.expect(self.owner, "select", kept, scores.shape, "bool", scores.device)
            handed.add("kept", kept)
            found = self.guard.call(self.owner, "merge", handed, lambda: self.method.merge(rows, kept))
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
        """`held`: rows of the layer, padded."""
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

    def _mask(self, name: str, hook: Callable[..., Tensor | None], seen: Seen, rows: Rows, quota: int) -> Tensor | None:
        """Rows (B, H, n) that are protected, as a bool tensor."""
        if name not in self.own:
            return None
        handed = self.guard.handed_rows(seen, rows)
        found = self.guard.call(self.owner, name, handed, lambda: hook(seen, rows, quota))
        if found is not None:
            self.guard.expect(self.owner, name, found, rows.mass.shape, "bool", rows.mass.device)
        return found

    def _said(self, hook: str, what: str) -> str:
        return f"{self.owner}: {hook} of layer {self.guard.layer} returned {what}"

    def _not_nan(self, hook: str, found: Tensor, present: Tensor) -> None:
        if found.dtype.is_floating_point:
            self.guard.note(lambda: (found.isnan() & present).any(), self._said(hook, "NaN"))

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
                self.guard.note(lambda own=own: ~own.isfinite().all(), line)
        for name, column in found.columns.items():
            shape = (*before.mass.shape[:2], count)
            self.guard.expect(self.owner, f"{hook}, column {name!r},", column, shape, "number", before.mass.device)
        asked = quotas.to(found.mass.device)
        line = self._said(hook, "more or fewer rows than the quota of a head")
        self.guard.note(lambda: (found.present.sum(-1) != asked).any(), line)
        if self.method.merges:
            line = self._said(hook, "masses of more tokens than there were")
            self.guard.note(
                lambda: ((found.mass.sum(-1) > before.mass.sum(-1) + 0.5) | (found.mass < 0).any(-1)).any(), line
            )


class GuardedAllocator:
    """An allocator's hooks, checked. Arguments and results are those of `kvbench.allocator.Allocator`, whose own hooks
    are called without a check.
    """

    def __init__(self, allocator: Allocator, guard: Guard) -> None:
        self.allocator, self.guard, self.owner = allocator, guard, f"allocator={allocator.name}"
        self.own = {hook for hook in ("layer", "heads", "safe") if allocator.overrides(hook)}

    def layer(self, quota: int, seen: Seen, rows: Callable[[], Rows], shared: dict[str, Any]) -> tuple[int, ...]:
        """Rows per head, one number per sample."""
        batch = seen.queries.shape[0]
        if "layer" not in self.own:
            return (quota,) * batch
        handed = self.guard.handed().add_seen(seen)
        watched = self.guard.handing(handed, rows)
        found = self.guard.call(self.owner, "layer", handed, lambda: self.allocator.layer(quota, seen, watched, shared))
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

    def earlier(self, quota: int, seen: Seen, shared: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        handed = self.guard.handed_rows(seen, None)
        found = self.guard.call(self.owner, "earlier", handed, lambda: self.allocator.earlier(quota, seen, shared))
        if not isinstance(found, Mapping) or not set(found) <= set(seen.cut_layers):
            raise ContractError(self._said("earlier", "no mapping of layers that share the budget to rows"))
        return {layer: self._quotas("earlier", own, seen.queries.shape[0]) for layer, own in found.items()}

    def _quotas(self, hook: str, found: object, batch: int) -> tuple[int, ...]:
        if not isinstance(found, tuple | list) or len(found) != batch or not all(is_whole(own) for own in found):
            raise ContractError(self._said(hook, f"{found!r}, expected a whole number of rows from 1 on per sample"))
        return tuple(found)

    def _said(self, hook: str, what: str) -> str:
        return f"{self.owner}: {hook} of layer {self.guard.layer} returned {what}"


def is_whole(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 1


class GuardedCodec:
    """A codec, checked. What it packs comes as `GuardedRows`."""

    def __init__(self, codec: Codec, guard: Guard) -> None:
        self.codec, self.guard = codec, guard

    @property
    def packs(self) -> bool:
        return self.codec.packs

    def pack(self, keys: Tensor, values: Tensor, lengths: Tensor) -> "GuardedRows":
        owner, guard = f"codec={self.codec.name}", self.guard
        handed = guard.handed(keys=keys, values=values, lengths=lengths)
        found = guard.call(owner, "pack", handed, lambda: self.codec.pack(keys, values, lengths))
        packed = GuardedRows(found, owner, guard, tuple(keys.shape), keys.dtype, keys.device)
        for name, part in zip(("keys", "values"), packed.read(), strict=True):
            line = f"{owner}: pack of layer {guard.layer} gives back {name} that are not finite"
            guard.note(lambda part=part: ~part.isfinite().all(), line)
        return packed


@dataclass(frozen=True)
class GuardedRows:
    """Packed rows (R, d) of one layer, checked whenever they are read or extended."""

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
            handed.add(f"tensors()[{number}]", tensor)  # rows that are packed stay what they were: marks refer to them
        found = self.guard.call(self.owner, "extend", handed, lambda: self.packed.extend(keys, values, lengths))
        shape = (self.shape[0] + len(keys), self.shape[1])
        return GuardedRows(found, self.owner, self.guard, shape, self.dtype, self.device)


def readings(method: Method, ids: Tensor, prefix: int, words: Words, exact: bool = False) -> list[Reading]:
    """What a method that rereads lets the model read about the prompt `ids` (B, n), checked."""
    guard, owner = Guard(0, exact), f"method={method.name}"
    handed = guard.handed(ids=ids)
    found = ask(owner, "readings", lambda: list(method.readings(ids, prefix, words)))
    if handed.written():
        raise ContractError(f"{owner}: readings wrote into ids; it must return new tensors")
    for number, reading in enumerate(found):
        own = reading.ids if isinstance(reading, Reading) else None
        if not isinstance(own, Tensor) or own.dim() != 2 or len(own) != len(ids) or own.is_floating_point():
            raise ContractError(f"{owner}: readings gave no Reading of token ids ({len(ids)}, t) as number {number}")
    return found


def state_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a method's state, however deep in containers and dataclasses, with the way to it."""
    for name, value in values.items():
        yield from _tensors(str(name), value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _tensors(f"{name}[{key!r}]", own)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, own in enumerate(value):
            yield from _tensors(f"{name}[{number}]", own)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for own in fields(value):
            yield from _tensors(f"{name}.{own.name}", getattr(value, own.name, None))


def copy_containers(value: Any) -> Any:
    """The same value with its lists, dicts and sets copied, so that a later change in place leaves this one alone.
    Tensors are not copied.
    """
    if isinstance(value, Mapping):
        return {key: copy_containers(own) for key, own in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy_containers(own) for own in value)
    return value
