"""Guard the engine against a method, an allocator or a codec that breaks its contract.

The engine calls every hook through `Guard.call`, by the table in `kvbench.cache.hook_table`. If a hook raises, returns
something that the table does not allow, writes into a tensor that it was handed, or puts another value into a field of
what it was handed, `Guard.call` raises a `ContractError`. Its one line names the owner, the hook, the layer and the
tensor or field. Without guards, a method that normalises keys in place would change the full cache and every other cell
that reads the same prompt.

PyTorch counts the in-place writes to a tensor (`Tensor._version`), through whichever view or detached alias they go.
Reading that number takes the host a tenth of a microsecond and never waits for a GPU. `torch.inference_mode` has no
such count, so the engine runs `without_gradients`. A field was replaced (`object.__setattr__`, `vars(rows)[name] = …`)
if it holds another object than before, which the host knows without looking at tensors. Writes that bypass PyTorch
(`.data`, NumPy, DLPack, a custom kernel) are not counted. Guards that are `exact` find them too: they copy each tensor
before a hook and compare it afterwards. They also compute anew what a hook left in a cached property, such as
`Rows.present`. The runner does so once for every method, allocator and codec, before a first sample, and
`kvbench.runs.method_checks` does so in all its checks. A method that bypasses PyTorch later, for some prompts only, is
not found.

Some faults can be seen only on the device (NaN, a wrong count). On a CPU the guard raises at once. On a GPU it notes
the fault and raises after the block has passed all layers, when the engine synchronises with the device anyway.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from operator import is_
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from kvbench.interfaces.observation import Observation, ReadRequest, State, StateCapture
from kvbench.interfaces.row_reader import CapturedAnswer
from kvbench.interfaces.rows import Rows
from kvbench.validation import ContractError, SettingError, call_hook

T = TypeVar("T")
Work = TypeVar("Work", bound=Callable[..., Any])
PASSED_ON = (ContractError, SettingError, torch.cuda.OutOfMemoryError)  # their messages already say what is wrong
ABSENT = object()
MAPPINGS = dict, MappingProxyType
WITH_MAPPINGS = Rows, CapturedAnswer  # a `State` has some too, which the method fills
HANDED = Rows, Observation, State, ReadRequest, StateCapture, CapturedAnswer
"""Objects that hooks are handed, whose fields they must leave as they are."""
WATCHED = Tensor, *HANDED
SHARED = "observation", "rows"  # what several hooks are handed, one after the other


def without_gradients(work: Work) -> Work:
    """Decorate a function or generator function so that it runs without gradients but with version counters."""
    return torch.inference_mode(False)(torch.no_grad()(work))


def count_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to, or 0 for a tensor made under inference_mode, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def ask(owner: str, hook: str, work: Callable[[], T], where: str = "") -> T:
    """Call a hook.

    Args:
        owner: Who has the hook, such as "method=snapkv".
        hook: The hook's name.
        work: Calls the hook.
        where: Follows the hook's name in the message, such as " of layer 3".

    Raises:
        ContractError: The hook raised. The message names the last line that is not in an installed package.
    """
    return call_hook(owner, hook, work, where, PASSED_ON)


class Handed:
    """What a hook is handed: tensors with their versions, and objects with their fields, each by name.

    An exact guard also keeps copies of the tensors.
    """

    __slots__ = "copies", "exact", "groups", "tensors", "versions"

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.groups: list[tuple[Any, Mapping[Any, Any], str]] = []  # object or None, what it holds, form of names
        self.tensors: list[Tensor] = []  # of all groups
        self.versions: list[int] = []
        self.copies: list[Tensor] = []

    def add(self, name: str, given: object) -> "Handed":
        """Watch a tensor, or the fields of an object and the tensors in them. Anything else adds nothing."""
        if isinstance(given, Tensor):
            self.hold(None, {name: given}, "{}")
        elif isinstance(given, HANDED):
            attributes = dict(vars(given))
            self.hold(given, attributes, name + ".{}")
            if isinstance(given, WITH_MAPPINGS):
                for key, one in attributes.items():
                    if isinstance(one, MAPPINGS):
                        self.hold(one, dict(one), f"{name}.{key}[{{!r}}]")
        return self

    def hold(self, given: object, held: Mapping[Any, Any], form: str) -> None:
        """Watch what an object or mapping holds, and the tensors in it. If `given` is None, watch only the tensors."""
        self.groups.append((given, held, form))
        tensors = [one for one in held.values() if isinstance(one, Tensor)]
        try:
            self.versions += [tensor._version for tensor in tensors]
        except RuntimeError:  # those made under inference_mode have no versions
            tensors = [tensor for tensor in tensors if self.exact or not tensor.is_inference()]
            self.versions += map(count_writes, tensors)
        self.tensors += tensors
        if self.exact:
            self.copies += [tensor.clone() for tensor in tensors]

    def renew(self) -> None:
        """Watch the tensors from now on, because the engine wrote to them."""
        groups, self.groups, self.tensors, self.versions, self.copies = self.groups, [], [], [], []
        for group in groups:
            self.hold(*group)

    def is_changed(self) -> bool:
        """Return whether a tensor or a field may have changed; always True for exact guards, which compare copies."""
        if self.exact or [tensor._version for tensor in self.tensors] != self.versions:
            return True
        for given, held, _ in self.groups:
            if given is not None:
                now = given if isinstance(given, MAPPINGS) else vars(given)
                more = len(now) - len(held)  # objects get cached properties
                if more < 0 or (more and now is given) or not all(map(is_, now.values(), held.values())):
                    return True
        return False

    def written(self) -> list[str]:
        """Return the names of the tensors that were written to."""
        named = ((form.format(key), one) for _, held, form in self.groups for key, one in held.items())
        names = [name for name, one in named if isinstance(one, Tensor) and (self.exact or not one.is_inference())]
        changed = [count_writes(tensor) != before for tensor, before in zip(self.tensors, self.versions, strict=True)]
        if self.exact:
            copied = zip(changed, self.tensors, self.copies, strict=True)
            changed = [counted or not same_bits(tensor, copy) for counted, tensor, copy in copied]
        return [name for name, is_written in zip(names, changed, strict=True) if is_written]

    def put_back(self) -> list[str]:
        """Restore the fields that hold another object than before, and return their names.

        A new field of an object is a cached property, which only an exact guard computes anew.
        """
        names: list[str] = []
        for given, held, form in self.groups:
            now = held if given is None else given if isinstance(given, MAPPINGS) else vars(given)
            wrong = [key for key, one in held.items() if now.get(key, ABSENT) is not one]
            added = now.keys() - held.keys()
            wrong += [key for key in added if now is given or (self.exact and not is_as_computed(given, key))]
            if wrong and isinstance(now, dict):
                now.clear()
                now.update(held)
            names += map(form.format, wrong)
        return names


def is_as_computed(owner: object, name: str) -> bool:
    """Return whether a cached property of an object holds what it computes; True for any other name."""
    computed = getattr(type(owner), name, None)
    if not isinstance(computed, cached_property):
        return True
    stored, expected = vars(owner)[name], computed.func(owner)
    if isinstance(expected, Tensor):
        return isinstance(stored, Tensor) and same_bits(stored, expected)
    return bool(stored == expected)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bits (NaN equals itself)."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return tensor.contiguous().flatten().view(torch.uint8)


@dataclass(frozen=True)
class Hook:
    """How a hook is called: a line of the table in `kvbench.cache.hook_table`."""

    given: str = ""
    """The names of the arguments that are watched: tensors and `HANDED` must stay as they are."""
    check: Callable[["Call", Any], Any] = lambda call, returned: returned
    """Gets the call and what the hook returned. Returns what the engine gets, or raises a ContractError."""
    convert: Callable[[Any], Any] = lambda returned: returned
    """Applied to the result inside the guarded call, such as `list` if the hook may be a generator."""
    holds: bool = False
    """Whether the hook must also leave the tensors as they are that its object holds (`tensors`)."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.given.split())


@dataclass
class Owner:
    """A method, an allocator, a codec or what a codec made, with the guard and the table of its hooks."""

    subject: Any
    name: str
    """Its name in messages, such as "method=snapkv"."""
    guard: "Guard"
    hooks: Mapping[str, Hook]
    """The hooks that are called through the guard."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What checks must know beside a hook's arguments."""
    prefix: str = ""
    """Precedes the name of a hook in messages."""


class Guarded:
    """Has the hooks of an owner, which are called through its guard, and everything else that the owner has.

    Hooks that a method or an allocator does not override are kvbench's own and are called without a check.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        owner: Owner = vars(self)["owner"]
        guarded = name in owner.hooks  # `partial` makes no cycle of references, so memory is freed at once
        attribute = partial(owner.guard.call, owner, name) if guarded else getattr(owner.subject, name)
        vars(self)[name] = attribute  # what an owner has does not change
        return attribute


@dataclass(slots=True)
class Call:
    """A call of a hook, for the check of what it returned."""

    owner: Owner
    name: str
    arguments: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        """Return an argument by the name that the table gives it."""
        return self.arguments[self.owner.hooks[self.name].names.index(name)]

    def describe(self, part: str, what: str) -> str:
        """Return the line that says what the hook returned, as a whole or in a part such as ", keys,"."""
        return f"{self.owner.name}: {self.owner.prefix}{self.name}{part}{self.owner.guard.where} returned {what}"

    def refuse(self, what: str, part: str = "") -> NoReturn:
        """Raise a ContractError because of what the hook returned."""
        raise ContractError(self.describe(part, what))

    def note(self, make: Callable[[], Tensor], what: str, part: str = "") -> None:
        """Note that the hook returned something wrong if a flag is true (`Guard.note`)."""
        self.owner.guard.note(make, self.describe(part, what))

    def expect(
        self, returned: object, shape: tuple[int, ...], kind: str, device: torch.device | None, part: str = ""
    ) -> Tensor:
        """Check a tensor that the hook returned, and return it.

        Raises:
            ContractError: `returned` is not a tensor of this shape, kind of dtype and device.
        """
        if not isinstance(returned, Tensor):
            wrong = type(returned).__name__
        elif returned.shape != shape:
            wrong = f"a tensor of shape {tuple(returned.shape)}"
        elif not KINDS[kind](returned.dtype):
            wrong = f"a tensor of {str(returned.dtype).removeprefix('torch.')}"
        elif device is not None and returned.device != device:
            wrong = f"a tensor on {returned.device}"
        else:
            return returned
        wanted = f"expected a {kind} tensor of shape {tuple(shape)}{f' on {device}' if device is not None else ''}"
        self.refuse(f"{wrong}, {wanted}", part)


KINDS: Mapping[str, Callable[[torch.dtype], bool]] = {
    "float": lambda dtype: dtype.is_floating_point,
    "bool": lambda dtype: dtype == torch.bool,
    "int": lambda dtype: not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool,
    "number": lambda dtype: not dtype.is_complex,
}


class Guard:
    """Calls the hooks of one layer, or of none, and notes faults that only the device can see."""

    def __init__(self, layer: int | None = None, exact: bool = False) -> None:
        self.exact, self.where = exact, "" if layer is None else f" of layer {layer}"
        self.faults: dict[str, Tensor] = {}  # message -> flag on the device
        self.noting = True
        self.watched: dict[str, tuple[object, Handed]] = {}  # what the last hooks were handed

    def handed(self, **tensors: Tensor) -> Handed:
        """Return these tensors, watched by their names."""
        watched = Handed(self.exact)
        watched.hold(None, tensors, "{}")
        return watched

    def release(self) -> None:
        """Release what hooks were handed."""
        self.watched = {}

    def call(self, owner: Owner, name: str, *given: object) -> Any:
        """Call a hook by the table, and return its result as its check leaves it.

        Raises:
            ContractError: The hook raised, changed what it was handed, or returned something that is not allowed.
        """
        hook, label, arguments = owner.hooks[name], owner.prefix + name, given
        handed: list[Handed] = []
        for place, title in enumerate(hook.names):
            argument = given[place]
            if title in SHARED:
                if callable(argument):
                    argument = self._hand_over(title, argument, handed)
                    arguments = (*given[:place], argument, *given[place + 1 :])
                else:
                    handed.append(self.watch(title, argument))
            elif isinstance(argument, WATCHED):
                handed.append(Handed(self.exact).add(title, argument))
        if hook.holds:
            held = enumerate(self.call(owner, "tensors"))
            handed.append(self.handed(**{f"tensors()[{number}]": tensor for number, tensor in held}))
        try:
            returned = ask(
                owner.name, label, lambda: hook.convert(getattr(owner.subject, name)(*arguments)), self.where
            )
        except ContractError:
            self.check(owner.name, label, handed)
            raise
        self.check(owner.name, label, handed)
        return hook.check(Call(owner, name, given), returned)

    def watch(self, name: str, given: object) -> Handed:
        """Return an observation or rows, watched. Consecutive hooks that get the same ones share what is noted."""
        known = self.watched.get(name)
        if known is None or known[0] is not given:
            known = self.watched[name] = given, Handed(self.exact).add(name, given)
        return known[1]

    def _hand_over(self, name: str, make_rows: Callable[[], Rows], handed: list[Handed]) -> Callable[[], Rows]:
        """Return a function like `make_rows` that a hook may call. It watches the rows from the first call on."""

        def hand_over() -> Rows:
            rows = make_rows()
            if (watched := self.watch(name, rows)) not in handed:
                handed.append(watched)
            return rows

        return hand_over

    def check(self, owner: str, hook: str, handed: Iterable[Handed]) -> None:
        """Check that what a hook was handed is as it was.

        Raises:
            ContractError: The hook wrote into tensors, or replaced fields. The message names them.
        """
        for watched in handed:
            if watched.is_changed():
                break
        else:
            return
        written = [name for watched in handed for name in watched.written()]
        replaced = [name for watched in handed for name in watched.put_back()]
        if written or replaced:
            deeds = {"wrote into": written, "replaced": replaced}
            done = " and ".join(f"{deed} {', '.join(names)}" for deed, names in deeds.items() if names)
            rule = "it must return new tensors" if written else "it must leave what it is handed as it is"
            weights = "observation.output_weight" in written
            lost = "; the model's weights have changed, so load the model again" if weights else ""
            raise ContractError(f"{owner}: {hook}{self.where} {done}; {rule}{lost}", spoils_model=weights)

    def note(self, make: Callable[[], Tensor], line: str) -> None:
        """Note a fault if a flag is true.

        Args:
            make: Returns the flag, a bool tensor without dimensions.
            line: The message of the ContractError.
        """
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
        """Note no faults inside the `with` block."""
        self.noting = False
        try:
            yield
        finally:
            self.noting = True


def find_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a method's state with its path, also inside containers and dataclasses."""
    for name, value in values.items():
        yield from _tensors(str(name), value)


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _tensors(f"{name}[{key!r}]", member)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, member in enumerate(value):
            yield from _tensors(f"{name}[{number}]", member)
    elif is_dataclass(value) and not isinstance(value, type):
        for attribute in fields(value):
            yield from _tensors(f"{name}.{attribute.name}", getattr(value, attribute.name, None))


def copy_containers(value: Any) -> Any:
    """Copy the lists, dictionaries and sets of a value, so that a later change in place does not change the copy.

    Tensors are not copied.
    """
    if isinstance(value, Mapping):
        return {key: copy_containers(member) for key, member in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy_containers(member) for member in value)
    return value
