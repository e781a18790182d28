"""The table of all hooks: what a method, an allocator or a codec is handed, and what must come out.

`HOOKS` has a line for each hook. It names the arguments, whose tensors and fields must stay as they are, and the check
of what the hook returned. `kvbench.cache.guard.Guard.call` calls every hook by its line.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvbench.cache.guard import Call, Guard, Guarded, Hook, Owner, ask
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.captured import Captured
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.further_hooks import REFUSABLE, WANTED
from kvbench.interfaces.hooks import Hooks, overrides_any
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead
from kvbench.interfaces.rows import Rows
from kvbench.validation import ContractError, SettingError

T = TypeVar("T")
Subject = TypeVar("Subject", bound=Method | Allocator | Codec)


def guard_hooks(subject: Subject, guard: Guard | None = None) -> Subject:
    """Return a method, an allocator or a codec, its hooks called through a guard. The default one is of no layer."""
    of: type = type(subject)
    kind, hooks = find_hooks(of)
    return cast(Subject, Guarded(Owner(subject, f"{kind}={subject.name}", guard or Guard(), hooks)))


@cache
def find_hooks(of: type) -> tuple[str, dict[str, Hook]]:
    """Return whether a class is a "method", an "allocator" or a "codec", and its hooks that are not kvbench's own."""
    kind = next(kind for base, kind in KINDS.items() if issubclass(of, base))
    has_defaults = issubclass(of, Hooks)
    table = HOOKS[kind].items()
    return kind, {n: hook for n, hook in table if n in NEEDED or not has_defaults or overrides_any(of, (n,))}


def guard_rows(call: Call, rows: object, kind: str = "packed", **facts: object) -> Guarded:
    """Return what a codec's hook made of rows, whose own hooks are called through the same guard."""
    owner, prefix = call.owner, "growing." if kind == "growing" else ""
    return Guarded(Owner(rows, owner.name, owner.guard, HOOKS[kind], {**owner.facts, **facts}, prefix))


def expecting(guarded: T, **facts: object) -> T:
    """Return the same guarded object, with what the check of a hook must know beside the hook's arguments."""
    owner = cast(Guarded, guarded).owner
    return cast(T, Guarded(Owner(owner.subject, owner.name, owner.guard, owner.hooks, facts)))


def call_captured(method: Method, hook: str, *given: object) -> Any:
    """Call a hook of a guarded method's `captured` through the method's guard."""
    owner = cast(Guarded, method).owner
    hooks = Owner(owner.subject.captured, owner.name, owner.guard, HOOKS["captured"])
    return owner.guard.call(hooks, hook, owner.subject, *given)


def check_declarations(method: Method, codec: Codec) -> None:
    """Check what a method and a codec declare, and that their hooks take the arguments that they are called with.

    Raises:
        ContractError: One of them declares something that does not exist. The message names it.
    """
    named = {"wants": (method.wants, WANTED), "refusals": (method.refusals, REFUSABLE)}
    for title, (declared, allowed) in named.items():
        if isinstance(declared, str) or not all(name in allowed for name in declared):
            raise ContractError(f"method={method.name}: {title} is {declared!r}, allowed are {', '.join(allowed)}")
    if not isinstance(method.captured, Captured | None):
        raise ContractError(f"method={method.name}: captured is {method.captured!r}, expected a Captured or None")
    for name in HOOKS["captured"] if method.captured is not None else ():
        hook = getattr(method.captured, name)
        if hook is not None and getattr(type(method), hook.__name__, hook) is not hook:
            line = f"captured has another {name} than the class, which overrides it; set captured there too"
            raise ContractError(f"method={method.name}: {line}")
    if not isinstance(codec.packing, Packing):
        raise ContractError(f"codec={codec.name}: packing is {codec.packing!r}, expected a Packing")
    subjects: tuple[tuple[Method | Codec, type], ...] = ((method, Method), (codec, Codec))
    for subject, interface in subjects:
        of: type = type(subject)
        wrong = find_wrong_hook(of, interface)
        if wrong is not None:
            raise ContractError(f"{KINDS[interface]}={subject.name}: {wrong}, as kvbench calls it")


@cache
def find_wrong_hook(of: type, interface: type) -> str | None:
    """Return which hook of a class takes other arguments than that of its interface, and which it must take."""
    bare: object = object.__new__(of)
    for name in HOOKS[KINDS[interface]]:
        taken, wanted = signature(getattr(bare, name)), [*signature(getattr(interface, name)).parameters][1:]
        try:
            taken.bind(*wanted)
        except TypeError:
            return f"{name}{taken} must take ({', '.join(wanted)})"
    return None


def check_shape(method: Method, codec: Codec, layout: Layout) -> None:
    """Check that a method and a codec can serve a model of this shape (see `Method.check`)."""
    guard_hooks(method).check(layout)
    guard_hooks(codec).check(layout)


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
    if "rope_switch" in method.refusals:
        raise SettingError(
            f"method={method.name}: this model's RoPE changes its frequencies beyond {rope_switch} tokens, and "
            f"{method.name} {method.refusals['rope_switch']}"
        )
    if codec.packing.takes_unrotated_keys:
        raise SettingError(
            f"codec={codec.name}: it stores keys before rotation, and this model's RoPE changes its frequencies beyond "
            f"{rope_switch} tokens; use codec=raw"
        )


def check_widths(codec: Codec, layout: Layout) -> None:
    """Refuse a codec that packs for a model whose values have another width than its keys.

    Raises:
        SettingError: The codec packs keys and values by one shape.
    """
    if codec.packs and layout.value_width is not None:
        raise SettingError(
            f"codec={codec.name}: it packs keys and values of one width, and this model's have dimensions {layout.dim} "
            f"and {layout.value_width}; use codec=raw"
        )


def check_softcap(method: Method, softcap: float | None) -> None:
    """Refuse a method that cannot score rows by capped logits for a model that caps them at `softcap`.

    Raises:
        SettingError: The method cannot. The message has the reason that the method gives.
    """
    if softcap is not None and "softcap" in method.refusals:
        reason = f"{method.name} {method.refusals['softcap']}"
        raise SettingError(
            f"method={method.name}: this model caps the logits of attention at {softcap:g}, and {reason}"
        )


def check_known_rotation(method: Method, codec: Codec, layout: Layout) -> None:
    """Refuse what norms or rotates keys for a model with which kvbench cannot do that.

    Raises:
        SettingError: The method or the codec does. The message says why.
    """
    fault = layout.rotation_fault or layout.rerotation_fault
    if fault is not None and method.takes_rotation:
        raise SettingError(
            f"method={method.name}: it rotates keys, which kvbench cannot do for this model: {fault}; "
            "use another method"
        )
    if not codec.packing.takes_unrotated_keys:
        return
    if layout.rotation_fault is not None:
        raise SettingError(
            f"codec={codec.name}: it stores keys before rotation, and kvbench cannot rotate this model's: "
            f"{layout.rotation_fault}; use codec=raw"
        )
    if layout.joint_norm and method.cuts:
        raise SettingError(
            f"codec={codec.name}: it stores keys before their norm, which this model computes over all heads of a "
            f"token, and {method.name} may keep other tokens in each head; use codec=raw or method=full"
        )


def check_identity(method: Method, codec: Codec, identify: Callable[[], str]) -> None:
    """Check that the files of a method and a codec were made for a model (see `ModelFile.check_identity`)."""
    file = method.file
    if file is not None:
        ask(f"method={method.name}", "file.check_identity", lambda: file.check_identity(identify))
    guard_hooks(codec).check_identity(identify)


# Checks. Each gets the call and what the hook returned, and returns what the engine gets.


def be(wanted: str, is_allowed: Callable[[Any], bool], show: Callable[[Any], str] = repr) -> Callable[[Call, Any], Any]:
    """Return a check of a value that is no tensor. `wanted` says in words what is allowed."""

    def check(call: Call, returned: T) -> T:
        if not is_allowed(returned):
            call.refuse(f"{show(returned)}, expected {wanted}")
        return returned

    return check


def be_of(wanted: str, types: type) -> Callable[[Call, Any], Any]:
    """Return a check of a value's type."""
    return be(wanted, lambda returned: isinstance(returned, types), lambda returned: type(returned).__name__)


def be_like(argument: str, kind: str, dims: int | None = None, optional: bool = False) -> Callable[[Call, Any], Any]:
    """Return a check of a tensor that has the first `dims` dimensions and the device of an argument, or of its rows."""

    def check(call: Call, returned: T) -> T:
        if not (optional and returned is None):
            like = call[argument]
            like = like.mass if isinstance(like, Rows) else like
            call.expect(returned, like.shape[:dims], kind, like.device)
        return returned

    return check


def is_whole(number: object, least: int = 1) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def is_not_finite(tensor: Tensor) -> Tensor:
    """Return whether a tensor has a number that is not finite, as a bool tensor without dimensions."""
    return ~tensor.isfinite().all()


def note_nan(call: Call, tensor: Tensor, part: str = "") -> None:
    """Note NaN at a row that exists."""
    observation, rows = call["observation"], call["rows"]

    def is_wrong() -> Tensor:
        wrong = tensor.isnan()
        return (wrong if observation.each == len(rows) else wrong & rows.present).any()  # none of `each` is absent

    if tensor.dtype.is_floating_point:
        call.note(is_wrong, "NaN", part)


def check_extra_reads(call: Call, reads: list[ExtraRead]) -> list[ExtraRead]:
    ids = call["ids"]
    for number, reading in enumerate(reads):
        token_ids = reading.ids if isinstance(reading, ExtraRead) else None
        if (
            not isinstance(token_ids, Tensor)
            or token_ids.dim() != 2
            or len(token_ids) != len(ids)
            or token_ids.is_floating_point()
        ):
            line = f"{call.owner.name}: extra_reads must give an ExtraRead of token ids ({len(ids)}, t)"
            raise ContractError(f"{line} as number {number}")
    return reads


def check_objective(call: Call, objective: object) -> Tensor:
    if not isinstance(objective, Tensor) or objective.dim() or not objective.requires_grad:
        line = "objective must return one number, a tensor that depends on the hidden states"
        raise ContractError(f"{call.owner.name}: {line}")
    return objective


def check_columns(call: Call, columns: object) -> Mapping[str, Tensor]:
    if not isinstance(columns, Mapping):
        call.refuse(f"{type(columns).__name__}, expected a mapping of names to tensors")
    rows = call["rows"]
    for name, column in columns.items():
        if name not in rows.columns or column is not rows.columns[name]:
            part = f", column {name!r},"
            call.expect(column, rows.mass.shape, "number", rows.mass.device, part)
            note_nan(call, column, part)
    return columns


def check_score(call: Call, returned: object) -> Tensor:
    rows = call["rows"]
    scores = call.expect(returned, rows.mass.shape, "float", rows.mass.device)
    note_nan(call, scores)
    return scores


def check_head_quotas(call: Call, returned: object) -> Tensor:
    per_sample = isinstance(returned, Tensor) and returned.dim() == 2
    samples = call["observation"].queries.shape[:1] if per_sample else ()
    quotas = call.expect(returned, (*samples, call.owner.facts["heads"]), "int", None)
    call.note(lambda: (quotas < 1).any(), "less than one row for a head")
    return quotas


def check_select(call: Call, returned: object) -> Tensor:
    scores, quotas = call["scores"], call["quotas"]
    selected = call.expect(returned, scores.shape, "bool", scores.device)
    note_counts(call, lambda: selected & (scores > -torch.inf), quotas)
    return selected


def note_counts(call: Call, kept: Callable[[], Tensor], quotas: Tensor) -> None:
    """Note that a cut leaves a head another number of rows than its quota."""
    line = "a number of rows that differs from the quota of a head"
    call.note(lambda: ((mask := kept()).sum(-1) != quotas.to(mask.device)).any(), line)


def check_rows(call: Call, after: object) -> Rows:
    """Check the rows that a cut leaves."""
    if not isinstance(after, Rows):
        call.refuse(f"{type(after).__name__}, expected Rows")
    before, method = call["rows"], call.owner.subject
    count = after.mass.shape[-1] if isinstance(after.mass, Tensor) and after.mass.dim() else 0
    for name in ("keys", "values", "places", "mass"):
        old, new, part = getattr(before, name), getattr(after, name), f", {name},"
        kind = "float" if old.dtype.is_floating_point else "int"
        call.expect(new, (*old.shape[:2], count, *old.shape[3:]), kind, old.device, part)
        if new.dtype != old.dtype:
            call.refuse(f"{new.dtype}, expected {old.dtype}", part)
        if new is not old and kind == "float":
            call.note(partial(is_not_finite, new), "numbers that are not finite", part)
    for name, column in after.columns.items():
        call.expect(column, after.mass.shape, "number", before.mass.device, f", column {name!r},")
    note_counts(call, lambda: after.present, call["quotas"] if call.name == "cut" else call.owner.facts["quotas"])
    if method.merges and not method.weighs_rows:
        call.note(
            lambda: ((after.mass.sum(-1) > before.mass.sum(-1) + 0.5) | (after.mass < 0).any(-1)).any(),
            "masses that stand for more tokens than before",
        )
    return after


def check_read(call: Call, mask: object) -> Tensor | None:
    if mask is None:
        return None
    queries = call["request"].queries
    return call.expect(mask, (*queries.shape[:2], call.owner.facts["held"]), "bool", queries.device)


def check_layer(call: Call, quotas: object) -> tuple[int, ...]:
    batch = call["observation"].queries.shape[0]
    return check_quotas(call, (quotas,) * batch if is_whole(quotas) else quotas)


def check_earlier(call: Call, quotas: object) -> Mapping[int, tuple[int, ...]]:
    if not isinstance(quotas, Mapping) or not set(quotas) <= set(call["observation"].cut_layers):
        call.refuse("no mapping of layers that share the budget to rows")
    return {layer: check_quotas(call, per_sample) for layer, per_sample in quotas.items()}


def check_quotas(call: Call, quotas: object) -> tuple[int, ...]:
    batch = call["observation"].queries.shape[0]
    if not isinstance(quotas, tuple | list) or len(quotas) != batch or not all(map(is_whole, quotas)):
        call.refuse(f"{quotas!r}, expected a whole number of rows from 1 on per sample")
    return tuple(quotas)


def check_heads(call: Call, returned: object) -> Tensor:
    scores, quota = call["scores"], call["quota"]
    counts = call.expect(returned, scores.shape[:2], "int", scores.device)

    def is_wrong() -> Tensor:
        held, total = (scores > -torch.inf).sum(-1), counts.sum(-1, keepdim=True)
        return ((counts < 1) | (counts > held) | (total > counts.shape[1] * quota)).any()

    call.note(is_wrong, f"counts that are not from 1 to the rows of a head and at most {quota} on average")
    return counts


def check_pack(call: Call, rows: object) -> Guarded:
    keys, packing = call["keys"], call.owner.subject.packing
    for promise, hook in PROMISED.items():
        if getattr(packing, promise) and not hasattr(rows, hook):
            call.refuse(f"{type(rows).__name__} without {hook}, which packing promises by {promise}")
    packed = guard_rows(call, rows, shape=tuple(keys.shape), dtype=keys.dtype, device=keys.device)
    for name, part in zip(("keys", "values"), packed.read(), strict=True):
        call.note(partial(is_not_finite, part), f"{name} that are not finite")
    return packed


def pack_again(count: Callable[..., int]) -> Callable[[Call, Any], Any]:
    """Return a check of packed rows that follow others. `count` gets the number of those and the hook's arguments."""

    def check(call: Call, packed: object) -> Guarded:
        rows, dim = call.owner.facts["shape"]
        return guard_rows(call, packed, shape=(count(rows, *call.arguments), dim))

    return check


def check_unpacked(call: Call, pair: Sequence[Any]) -> Sequence[Tensor]:
    """Check keys and values: of a token whose keys were handed in, or of all rows."""
    if len(pair) != 2:
        call.refuse("no keys and values")
    facts = call.owner.facts
    shape = call.arguments[0].shape if call.arguments else facts["shape"]
    for name, part in zip(("keys", "values"), pair, strict=True):
        call.expect(part, shape, "float", facts["device"], f", {name},")
        if part.dtype != facts["dtype"]:
            call.refuse(f"{part.dtype}, expected {facts['dtype']}", f", {name},")
    return pair


def check_outputs(call: Call, outputs: object) -> Tensor:
    queries, dim = call.arguments[0], call.owner.facts["shape"][1]
    return call.expect(outputs, (len(queries), queries.shape[1] // dim, 1, dim), "float", queries.device)


PROMISED = {"before_attention": "keep", "keeps": "keep", "grows": "growing", "replicates": "replicate"}
"""What packed rows must have, by what `Codec.packing` says."""
NEEDED = "score", "head_quotas", "count_rows", "objective"  # by default they raise an error
SCORED = "scores protected quota"
TWO_NUMBERS = be(
    "two whole numbers",
    lambda returned: (
        returned is None or isinstance(returned, tuple) and [type(number) for number in returned] == [int, int]
    ),
)

HOOKS: dict[str, dict[str, Hook]] = {
    "method": {
        "check": Hook(),
        "skips_layer": Hook("", be_of("a bool", bool)),
        "steps": Hook("", be("a whole number from 0 on", lambda number: is_whole(number, 0))),
        "extra_reads": Hook("ids prefix words", check_extra_reads, convert=list),
        "objective": Hook("hidden", check_objective),
        "update": Hook("observation rows state", check_columns),
        "protect_sinks": Hook("observation rows quota", be_like("rows", "bool", optional=True)),
        "protect": Hook("observation rows quota", be_like("rows", "bool", optional=True)),
        "score": Hook("observation rows state", check_score),
        "head_quotas": Hook("quota observation state", check_head_quotas),
        "count_rows": Hook("scores", be_like("scores", "int", dims=2)),
        "select": Hook("scores quotas", check_select),
        "merge": Hook("observation rows kept state", check_rows),
        "cut": Hook("rows scores quotas protected each", check_rows),
        "read": Hook("request rows state", check_read),
        "forget": Hook("state"),
    },
    "captured": {  # of `Method.captured`
        "capture_state": Hook("method state capture"),
        "release_state": Hook("method captured state seen since"),
        "row_reader": Hook("method answer"),
    },
    "allocator": {
        "layer": Hook("quota observation rows shared", check_layer),
        "heads": Hook(SCORED, check_heads),
        "safe": Hook(SCORED, be_like("scores", "bool")),
        "earlier": Hook("quota observation shared", check_earlier),
    },
    "codec": {
        "check": Hook(),
        "check_identity": Hook(),
        "of_layer": Hook("", be_of("a Codec", Codec)),
        "pack": Hook("keys values lengths", check_pack),
        "find_packed": Hook("", TWO_NUMBERS),
        "count_needs": Hook(),
    },
    "packed": {  # what `Codec.pack` returned
        "read": Hook(check=check_unpacked, convert=tuple),
        "tensors": Hook(convert=list),
        # snapshots refer to the rows before
        "extend": Hook("keys values lengths", pack_again(lambda rows, keys, *_: rows + len(keys)), holds=True),
        "keep": Hook("kept", pack_again(lambda _, kept: int(kept.sum())), holds=True),
        "replicate": Hook("times lengths", pack_again(lambda rows, times, _: rows * times)),
        "growing": Hook("tokens ahead seen places mass", partial(guard_rows, kind="growing"), holds=True),
    },
    "growing": {  # what `Growable.growing` returned; a captured step may write into what the hooks are handed
        "begin": Hook(),
        "attend": Hook(check=check_outputs),
        "append": Hook(check=check_unpacked, convert=tuple),
        "make_rows": Hook(),
        "pack_due": Hook(),
        "finish": Hook("read lengths", pack_again(lambda rows, read, lengths: rows + read * lengths.numel())),
        "tensors": Hook(convert=list),
    },
}
KINDS: dict[type, str] = {Method: "method", Allocator: "allocator", Codec: "codec"}
