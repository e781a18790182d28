"""Guard the engine against a method, an allocator or a codec that breaks its contract.

The engine calls every hook through a guard. If a hook raises, returns something that the interface does not allow, or
writes into a tensor that it was given, the guard raises a `ContractError`. Its one line names the owner, the hook, the
layer and the tensor. Without guards, a method that normalises keys in place would change the full cache and every other
cell that reads the same prompt.

PyTorch counts the in-place writes to a tensor (`Tensor._version`), through whichever view or detached alias they go.
Reading that number takes the host a tenth of a microsecond and never waits for a GPU. `torch.inference_mode` has no
such count, so the engine runs `without_gradients`. Writes that bypass PyTorch (`.data`, NumPy, DLPack, a custom kernel)
are not counted. Guards that are `exact` find them too: they copy each tensor before a hook and compare it afterwards.
They also find that a hook gave frozen rows or observations another tensor (`object.__setattr__`).
The runner does so once for every method, allocator and codec, before a first sample, and `kvbench.runs.method_checks`
does so in all its checks. A method that bypasses PyTorch later, for some prompts only, is not found.

Some faults can be seen only on the device (NaN, a wrong count). On a CPU the guard raises at once. On a GPU it notes
the fault and raises after the block has passed all layers, when the engine synchronises with the device anyway.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder
from kvbench.interfaces.rows import Rows
from kvbench.validation import ContractError, SettingError

T = TypeVar("T")
Work = TypeVar("Work", bound=Callable[..., Any])
PASSED_ON = (ContractError, SettingError, torch.cuda.OutOfMemoryError)  # their messages already say what is wrong
ROWS = ("keys", "values", "places", "mass")
SHOWN = ("queries", "outputs", "lse", "output_weight", "unrotated_keys", "hidden", "normed_hidden", "gradient")
NAMED_ROWS = [(name, f"rows.{name}") for name in ROWS]  # formatted once, not at every hook
NAMED_SHOWN = [(name, f"observation.{name}") for name in SHOWN]


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


def check_shape(method: Method, codec: Codec, layout: Layout) -> None:
    """Check that a method and a codec can serve a model of this shape (see `Method.check`)."""
    ask(f"method={method.name}", "check", lambda: method.check(layout))
    ask(f"codec={codec.name}", "check", lambda: codec.check(layout))


def check_rotation(method: Method, codec: Codec, rope_switch: int | None) -> None:
    """Refuse what needs fixed rotary frequencies for a model whose frequencies change with the length of the text.

    A codec that stores keys before rotation would rotate them by the frequencies of the time when they are read back.

    Args:
        method: The method.
        codec: The codec.
        rope_switch: The length beyond which the model's RoPE changes its frequencies, or None.
    """
    if rope_switch is None:
        return
    if method.needs_fixed_rotation:
        raise SettingError(
            f"method={method.name}: it needs fixed rotary frequencies, and this model's RoPE changes them beyond "
            f"{rope_switch} tokens; use another method or another model"
        )
    if codec.takes_unrotated_keys:
        raise SettingError(
            f"codec={codec.name}: it stores keys before rotation, and this model's RoPE changes its frequencies beyond "
            f"{rope_switch} tokens; use codec=raw"
        )


def check_identity(method: Method, codec: Codec, identify: Callable[[], str]) -> None:
    """Check that the files of a method and a codec were made for a model (see `Method.check_identity`)."""
    ask(f"method={method.name}", "check_identity", lambda: method.check_identity(identify))
    ask(f"codec={codec.name}", "check_identity", lambda: codec.check_identity(identify))


def find_codec_of_layer(codec: Codec, layer: int, layers: int) -> Codec:
    """Return the codec of one layer (see `Codec.of_layer`)."""
    owner = f"codec={codec.name}"
    found = ask(owner, "of_layer", lambda: codec.of_layer(layer, layers), f" of layer {layer}")
    if not isinstance(found, Codec):
        raise ContractError(f"{owner}: of_layer of layer {layer} returned {type(found).__name__}, expected a Codec")
    return found


def reason_against(method: Method, allocator: Allocator, codec: Codec) -> str | None:
    """Return why the three cannot work together, or None if they can (see `Method.refuses`)."""
    owner = f"method={method.name}"
    found = ask(owner, "refuses", lambda: method.refuses(allocator, codec))
    if found is not None and not isinstance(found, str):
        raise ContractError(f"{owner}: refuses returned {type(found).__name__}, expected a text or None")
    return found


def is_spared(method: Method, layer: int, layers: int) -> bool:
    """Whether a layer is never cut (see `Method.skips_layer`)."""
    owner = f"method={method.name}"
    found = ask(owner, "skips_layer", lambda: method.skips_layer(layer, layers), f" of layer {layer}")
    if not isinstance(found, bool):
        raise ContractError(f"{owner}: skips_layer of layer {layer} returned {type(found).__name__}, expected a bool")
    return found


def count_steps(method: Method, tokens: int, quota: int | None) -> int:
    """Return how many steps it counts to read `tokens` tokens at once (see `Method.steps`)."""
    owner = f"method={method.name}"
    found = ask(owner, "steps", lambda: method.steps(tokens, quota))
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ContractError(f"{owner}: steps returned {found!r}, expected a whole number from 0 on")
    return found


class Handed:
    """Tensors that a hook is given, by name, with their versions. An exact guard also keeps copies."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []
        self.copies: list[Tensor] = []
        self.attributes: list[tuple[str, object, str, object]] = []  # name, whose, field, value

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Watch a tensor; None adds nothing."""
        if tensor is not None and (self.exact or not tensor.is_inference()):  # inference tensors have no versions
            self.names.append(name)
            self.tensors.append(tensor)
            self.versions.append(count_writes(tensor) if self.exact else tensor._version)
            if self.exact:
                self.copies.append(tensor.clone())

    def add_seen(self, observation: Observation) -> "Handed":
        """Watch the tensors of an observation."""
        self._add_fields(observation, NAMED_SHOWN)
        return self

    def add_rows(self, rows: Rows) -> "Handed":
        """Watch the tensors of rows."""
        self._add_fields(rows, NAMED_ROWS)
        for name, column in rows.columns.items():
            self.add(f"rows.columns[{name!r}]", column)
        return self

    def _add_fields(self, owner: Observation | Rows, fields: Sequence[tuple[str, str]]) -> None:
        for field, name in fields:
            value = getattr(owner, field)
            self.add(name, value)
            if self.exact:
                self.attributes.append((name, owner, field, value))

    def renew(self) -> None:
        """Watch the tensors from now on, because the engine wrote to them."""
        self.versions = [count_writes(tensor) for tensor in self.tensors]
        if self.exact:
            self.copies = [tensor.clone() for tensor in self.tensors]

    def written(self) -> list[str]:
        """Return the names of the tensors that were written to, each once."""
        if not self.exact and [tensor._version for tensor in self.tensors] == self.versions:
            return []  # the usual case: compare two lists without a loop in Python
        changed = [count_writes(tensor) != before for tensor, before in zip(self.tensors, self.versions, strict=True)]
        if self.exact:
            pairs = zip(changed, self.tensors, self.copies, strict=True)
            changed = [counted or not same_bits(tensor, copy) for counted, tensor, copy in pairs]
        names = [name for name, own in zip(self.names, changed, strict=True) if own]
        names += [name for name, owner, field, value in self.attributes if getattr(owner, field, None) is not value]
        return list(dict.fromkeys(names))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype hold the same bits (NaN equals itself)."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return tensor.contiguous().flatten().view(torch.uint8)


class Guard:
    """Calls the hooks of one layer and notes faults that only the device can see."""

    def __init__(self, layer: int, exact: bool = False) -> None:
        self.layer, self.exact = layer, exact
        self.faults: dict[str, Tensor] = {}  # message -> flag on the device
        self.noting = True
        self.watched: tuple[Observation | None, Rows | None, Handed] = (None, None, Handed())

    def handed(self, **tensors: Tensor) -> Handed:
        """Return these tensors, watched by their names."""
        found = Handed(self.exact)
        for name, tensor in tensors.items():
            found.add(name, tensor)
        return found

    def handed_rows(self, observation: Observation | None, rows: Rows | None) -> Handed:
        """Return an observation and rows, watched. Consecutive hooks that get the same ones share one list."""
        if self.watched[0] is not observation or self.watched[1] is not rows:
            found = Handed(self.exact)
            if observation is not None:
                found.add_seen(observation)
            if rows is not None:
                found.add_rows(rows)
            self.watched = observation, rows, found
        return self.watched[2]

    def release(self) -> None:
        """Release the tensors that hooks were given."""
        self.watched = (None, None, Handed())

    def call(self, owner: str, hook: str, handed: Handed, work: Callable[[], T]) -> T:
        """Call a hook and return its result.

        Raises:
            ContractError: The hook raised, or it wrote into a tensor that it was given.
        """
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
        """Return a function like `rows` that a hook may call. It watches the rows from the first call on."""
        given: list[Rows] = []

        def hand_over() -> Rows:
            found = rows()
            if not given:
                given.append(found)
                handed.add_rows(found)
            return found

        return hand_over

    def report(self, owner: str, hook: str, names: Sequence[str]) -> NoReturn:
        """Raise a ContractError because a hook wrote into the tensors with these names."""
        weights = "observation.output_weight" in names
        lost = "; the model's weights have changed, so load the model again" if weights else ""
        line = f"{owner}: {hook} of layer {self.layer} wrote into {', '.join(names)}; it must return new tensors{lost}"
        raise ContractError(line, spoils_model=weights)

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

    def expect(self, owner: str, hook: str, found: object, shape: tuple[int, ...], kind: str, device: Any) -> None:
        """Check the result of a hook.

        Raises:
            ContractError: `found` is not a tensor of this shape, kind of dtype and device.
        """
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


KINDS: Mapping[str, Callable[[torch.dtype], bool]] = {
    "float": lambda dtype: dtype.is_floating_point,
    "bool": lambda dtype: dtype == torch.bool,
    "int": lambda dtype: not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool,
    "number": lambda dtype: not dtype.is_complex,
}


def extra_reads(method: Method, ids: Tensor, prefix: int, words: PromptEncoder, exact: bool = False) -> list[ExtraRead]:
    """Return what the model must read about the prompt `ids` (B, n), checked (see `Method.extra_reads`)."""
    guard, owner = Guard(0, exact), f"method={method.name}"
    handed = guard.handed(ids=ids)
    found = ask(owner, "extra_reads", lambda: list(method.extra_reads(ids, prefix, words)))
    if handed.written():
        raise ContractError(f"{owner}: extra_reads wrote into ids; it must return new tensors")
    for number, reading in enumerate(found):
        own = reading.ids if isinstance(reading, ExtraRead) else None
        if not isinstance(own, Tensor) or own.dim() != 2 or len(own) != len(ids) or own.is_floating_point():
            raise ContractError(
                f"{owner}: extra_reads must give an ExtraRead of token ids ({len(ids)}, t) as number {number}"
            )
    return found


def objective(method: Method, hidden: Tensor) -> Tensor:
    """Return what `Method.objective` makes of hidden states, checked."""
    owner = f"method={method.name}"
    found = ask(owner, "objective", lambda: method.objective(hidden))
    if not isinstance(found, Tensor) or found.dim() or not found.requires_grad:
        raise ContractError(f"{owner}: objective must return one number, a tensor that depends on the hidden states")
    return found


def find_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a method's state with its path, also inside containers and dataclasses."""
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
    """Copy the lists, dictionaries and sets of a value, so that a later change in place does not change the copy.

    Tensors are not copied.
    """
    if isinstance(value, Mapping):
        return {key: copy_containers(own) for key, own in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy_containers(own) for own in value)
    return value
