"""Saboteurs: whatever a hook does wrong ends its own cell with one line, writes no record, and changes nothing else."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.cache.guard import Guard, Handed, same_bits, without_gradients
from kvbench.cache.hook_table import call_captured, guard_hooks
from kvbench.cache.policy import CachePolicy
from kvbench.config import catalogue
from kvbench.config.compose import compose_config
from kvbench.engine import rehearsal, shared_prefill
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Plain
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import ExtraRead, Observation, PromptEncoder, ReadRequest, State, StateCapture
from kvbench.interfaces.row_reader import CapturedAnswer
from kvbench.interfaces.task import Graded
from kvbench.methods.codecs.kivi import Kivi
from kvbench.runs.resources import Resources
from kvbench.runs.runner import execute_run, execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.stops import refuse_exits
from kvbench.validation import ContractError, SettingError
from tests.support.method_files import build_policy
from tests.support.recorded_runs import strip_circumstances
from tests.support.selection import only_in_full
from tests.support.tiny_models import distinct, ids, tiny

OURS = (
    "update",
    "protect_sinks",
    "protect",
    "score",
    "select",
    "merge",
    "cut",
    "head_quotas",
    "read",
    "extra_reads",
    "forget",
)
PROMPT = 40
CHECKPOINT = dict(layers=4)


@dataclass(frozen=True)
class Honest(Method):
    """A method that has every hook, asks for all tensors and does nothing wrong: rows with the largest keys stay."""

    wants = ("unrotated_keys", "hidden", "normed_hidden")

    def update(self, observation, rows, state):
        return {"norm": rows.keys.norm(dim=-1)}

    def protect_sinks(self, observation, rows, quota):
        return rows.places < 1

    def protect(self, observation, rows, quota):
        return rows.places >= observation.tokens - 2

    def score(self, observation, rows, state):
        return rows.columns["norm"] + observation.outputs.sum() * 0

    def select(self, scores, quotas):
        return super().select(scores, quotas)

    def merge(self, observation, rows, kept, state):
        return rows.without(~kept)

    def forget(self, state):
        state.layer.pop("noted", None)


class Cuts(Honest):
    def cut(self, rows, scores, quotas, protected, each=None):
        return rows.without(~self.select(scores, quotas))


class Allots(Honest):
    def head_quotas(self, quota, observation, state):
        return torch.full((2,), quota)


class Reads(Honest):
    def read(self, request, rows, state):
        return torch.ones(*request.queries.shape[:2], len(rows()), dtype=torch.bool)


class Rereads(Honest):
    def extra_reads(self, ids, prefix, words):
        return [ExtraRead(ids[:, :5].clone(), 0, 5)]


BASES = {"cut": Cuts, "head_quotas": Allots, "read": Reads, "extra_reads": Rereads}


@dataclass(frozen=True)
class Packs(Codec):
    """Keeps rows as they are, but through the interface of codecs that pack."""

    def pack(self, keys, values, lengths):
        return PackedRows(self, keys.clone(), values.clone(), lengths)


@dataclass(frozen=True)
class PackedRows(Plain):
    """Rows of `Packs`."""

    codec: Packs = field(init=False)
    lengths: Tensor = field(init=False)

    def __init__(self, codec, keys, values, lengths):
        for name, own in (("codec", codec), ("keys", keys), ("values", values), ("lengths", lengths)):
            object.__setattr__(self, name, own)

    def extend(self, keys, values, lengths):
        parts = []
        for old, new in ((self.keys, keys), (self.values, values)):
            heads, more = self.lengths.numel(), len(keys) // self.lengths.numel()
            both = [old.view(heads, -1, old.shape[-1]), new.view(heads, more, new.shape[-1])]
            parts.append(torch.cat(both, 1).flatten(0, 1))
        return type(self)(self.codec, *parts, lengths)


def tensors_in(thing: object) -> list[Tensor]:
    """Tensors that a hook is handed, those of rows and of what is seen too."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        return [own for value in thing.values() for own in tensors_in(value)]
    if isinstance(thing, ReadRequest):
        return [thing.queries]
    if isinstance(thing, Observation):
        inputs = thing.unrotated_keys, thing.hidden, thing.normed_hidden
        asked = [own for own in inputs if own is not None]  # a later cut shows none
        return [thing.queries, thing.outputs, thing.output_weight, *asked]
    if hasattr(thing, "keys") and hasattr(thing, "mass"):
        return [thing.keys, thing.values, thing.places, thing.mass, *thing.columns.values()]
    return []


def handed(arguments: tuple) -> list[Tensor]:
    return [own for thing in arguments for own in tensors_in(thing() if callable(thing) else thing)]


def write(tensor: Tensor) -> None:
    row = tensor[(0,) * (tensor.dim() - 1)]  # some are expanded and can't be written as a whole
    row.copy_(~row if row.dtype == torch.bool else row + 1)


def through_detach(tensor: Tensor) -> None:
    write(tensor.detach())


def through_a_view(tensor: Tensor) -> None:
    write(tensor[..., :1])


def inside_inference_mode(tensor: Tensor) -> None:
    with torch.inference_mode():
        write(tensor)


def through_data(tensor: Tensor) -> None:
    write(tensor.data)


def through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[0] += 1


COUNTED = (write, through_detach, through_a_view, inside_inference_mode)
UNCOUNTED = (through_data, through_numpy)


def saboteur(base: type, hook: str, deed: Callable[..., Any]) -> type:
    """`base` with a hook that does `deed(honest hook, *arguments)`."""
    honest = getattr(base, hook)

    def sabotaged(self, *arguments):
        return deed(lambda *own: honest(self, *(own or arguments)), *arguments)

    return dataclass(frozen=True)(type("Saboteur", (base,), {hook: sabotaged, "__doc__": "A saboteur."}))


def run_alone(
    method: Method, allocator: Allocator | None = None, codec: Codec | None = None, **more: Any
) -> GenerationContext:
    """Read a prompt in two blocks, go on from it and decode a few tokens."""
    choice = CachePolicy(method, allocator or Allocator("uniform"), codec or Codec("raw"), **more)
    block = None if method.needs_extra_reads else 25
    context = GenerationContext(tiny("llama"), choice, Budget(0.5), block, (0,))
    context.prefill(distinct(PROMPT, seed=1))
    with context.branch():
        context.extend(ids(3, seed=2))
        list(context.generate(3, Sampling(), frozenset()))
    return context


@pytest.fixture(autouse=True)
def the_model_stays_as_it_was():
    """A tiny model is shared by all tests of a process: put its weights back, whatever a saboteur did to them."""
    before = {name: own.clone() for name, own in tiny("llama").state_dict().items()}
    yield
    with torch.no_grad():
        for name, own in tiny("llama").state_dict().items():
            own.copy_(before[name])


@pytest.mark.parametrize("base", [Honest, *BASES.values()])
def test_who_does_nothing_wrong_is_not_blamed(base):
    """Exact guards too: otherwise the laws below would hold for any method."""
    for exact in (False, True):
        run_alone(base("honest"), exact=exact)


@pytest.mark.parametrize("decoding, codec", [(True, Codec("raw")), (False, Packs("packs"))])
def test_who_cuts_while_decoding_or_is_packed_is_not_blamed(decoding, codec):
    run_alone(Honest("honest", decoding=decoding), codec=codec, exact=True)


@pytest.mark.cover
@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize("hook", [own for own in OURS if own != "forget"])
def test_a_hook_that_writes_into_what_it_is_handed_is_named(hook, way):
    """Each tensor of each hook in turn; how many there are is found by trying."""
    which, named = 0, set()
    while True:
        last = False

        def deed(honest, *arguments, which=which):
            nonlocal last
            own = [tensor for tensor in handed(arguments) if tensor.numel()]
            last = which >= len(own)
            if not last:
                way(own[which])
            return honest()

        method = saboteur(BASES.get(hook, Honest), hook, deed)("saboteur")
        if hook == "head_quotas" and which == 0 or not last:
            try:
                run_alone(method)
            except ContractError as error:
                line = str(error)
                assert re.fullmatch(rf"method=saboteur: {hook}( of layer \d)? wrote into .*", line), line
                named.add(line.partition(" wrote into ")[2])
                which += 1
                continue
        break
    assert last and len(named) >= 1


@pytest.mark.cover
@pytest.mark.parametrize("way", UNCOUNTED)
@pytest.mark.parametrize(
    "hook", ["update", "protect_sinks", "protect", "score", "select", "merge", "cut", "read", "head_quotas"]
)
def test_exact_guards_find_writes_that_are_not_counted(hook, way):
    def deed(honest, *arguments):
        way(next(own for own in handed(arguments) if own.is_floating_point()))
        return honest()

    method = saboteur(BASES.get(hook, Honest), hook, deed)("saboteur")
    with pytest.raises(ContractError, match=f"method=saboteur: {hook} of layer 0 wrote into"):
        run_alone(method, exact=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("when", ["another layer", "the next block", "decoding"])
def test_a_kept_reference_is_found_when_it_is_written_to(when, exact):
    kept: list[Tensor] = []

    def deed(honest, observation, rows, state):
        late = {
            "another layer": observation.layer == 2,
            "the next block": observation.first > 0,
            "decoding": observation.decoding,
        }[when]
        if kept and late:
            kept.pop().detach().mul_(2)
        elif observation.layer == 0:
            kept[:] = [rows.keys]
        return honest()

    choice = CachePolicy(saboteur(Honest, "update", deed)("saboteur"), Allocator("uniform"), Codec("raw"), exact)
    context = GenerationContext(
        tiny("llama"), choice, Budget(1.0), 25, (0,), answer=5
    )  # all rows stay: they are still held
    with pytest.raises(ContractError, match="method=saboteur: .* of layer 0 wrote into .*(keys|values)"):
        context.prefill(distinct(PROMPT, seed=1))
        context.extend(ids(1, seed=2))


def test_a_kept_reference_is_found_when_read_writes_to_it():
    """`read` is asked between the writing of the token's row and the other hooks."""
    kept: list[Tensor] = []

    def deed(honest, request, rows, state):
        if request.layer == 0:
            kept[:] = [rows().keys]
        elif request.layer == 1:
            kept.pop().detach().mul_(2)
        return honest()

    with pytest.raises(ContractError, match="method=saboteur: a hook that kept a reference .* of layer 0 wrote into"):
        run_alone(saboteur(Reads, "read", deed)("saboteur"))


def test_a_row_of_the_same_layer_that_read_writes_to_is_found():
    kept: list[Tensor] = []

    def update(self, observation, rows, state):
        if observation.layer == 0 and not observation.decoding:
            kept[:] = [rows.keys]
        return {}

    def deed(honest, request, rows, state):
        if request.layer == 0 and kept:
            kept.pop().detach().mul_(2)
        return honest()

    base = type("Keeps", (Reads,), {"update": update})
    choice = CachePolicy(saboteur(base, "read", deed)("saboteur"), Allocator("uniform"), Codec("raw"))
    context = GenerationContext(
        tiny("llama"), choice, Budget(0.5), None, (0,), answer=5
    )  # with room: the storage stays the same
    context.prefill(distinct(PROMPT, seed=1))
    with pytest.raises(ContractError, match="method=saboteur: .* of layer 0 wrote into keys"):
        context.extend(ids(1, seed=2))


def test_state_written_in_place_between_two_questions_is_found():
    """It would not be forgotten: the answer to the next question would be another one."""

    def deed(honest, observation, rows, state):
        if observation.decoding:
            state.layer["count"].add_(1)
        else:
            state.layer["count"] = rows.mass.new_zeros(1)
        return honest()

    with pytest.raises(ContractError, match=r"method=saboteur: a hook of layer 0 wrote into state\['count'\]"):
        run_alone(saboteur(Honest, "update", deed)("saboteur"))


def test_lists_in_a_state_are_forgotten_with_the_branch():
    def deed(honest, observation, rows, state):
        state.layer.setdefault("tokens", []).append(observation.tokens)
        return honest()

    context = run_alone(saboteur(Honest, "update", deed)("saboteur"))
    assert context.own_layers[0].state.layer["tokens"] == [25, 40]


WRONG = {
    "(B, n)": lambda found: found[:, 0],
    "(B, 1, n)": lambda found: found[:, :1],
    "scalar": lambda found: found.flatten()[0],
    "dtype": lambda found: found.to(torch.complex64),
    "bool or float": lambda found: found.bool() if found.dtype != torch.bool else found.float(),
    "device": lambda found: found.to("meta"),
    "None": lambda found: None,
    "numpy": lambda found: found.numpy(),
    "text": lambda found: "rows",
}
ALLOWED = {("protect_sinks", "None"), ("protect", "None"), ("read", "None"), ("head_quotas", "device")}
ALLOWED |= {("head_quotas", wrong) for wrong in WRONG if "n" in wrong and wrong != "None"}  # it has no rows
ALLOWED |= {("update", "bool or float")}  # a column may be of any real type
RETURNED = product(["update", "protect_sinks", "protect", "score", "select", "head_quotas", "read"], WRONG)


@pytest.mark.cover
@pytest.mark.parametrize("hook, wrong", [pair for pair in RETURNED if pair not in ALLOWED])
def test_what_a_hook_returns_is_checked(hook, wrong):
    def deed(honest, *arguments):
        found = honest()
        return {"norm": WRONG[wrong](found["norm"])} if hook == "update" else WRONG[wrong](found)

    with pytest.raises(ContractError, match=rf"method=saboteur: {hook}.* of layer 0 returned .*expected") as found:
        run_alone(saboteur(BASES.get(hook, Honest), hook, deed)("saboteur"))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("hook", ["update", "extra_reads"])
def test_what_is_no_mapping_and_no_reading_is_refused(hook):
    for wrong in (None, 3, [1]):
        method = saboteur(BASES.get(hook, Honest), hook, lambda honest, *own, wrong=wrong: wrong)("saboteur")
        with pytest.raises(ContractError, match=f"method=saboteur: {hook}"):
            run_alone(method)


@pytest.mark.parametrize("hook", ["merge", "cut"])
def test_rows_that_a_cut_leaves_are_checked(hook):
    rows = {
        "None, expected|NoneType, expected Rows": lambda found: None,
        "keys, .* of shape": lambda found: replace(found, keys=found.keys[:, :1]),
        "mass, .* float": lambda found: replace(found, mass=found.mass.long()),
        "keys, .* expected torch.float32": lambda found: replace(found, keys=found.keys.double()),
        "values, .* not finite": lambda found: replace(found, values=found.values / 0),
        "a number of rows that differs": lambda found: replace(found, mass=torch.ones_like(found.mass)),
    }
    for line, wrong in rows.items():
        method = saboteur(BASES.get(hook, Honest), hook, lambda honest, *own, wrong=wrong: wrong(honest()))("saboteur")
        with pytest.raises(ContractError, match=f"method=saboteur: {hook}.* of layer 0 returned .*({line})|{line}"):
            run_alone(method)


@pytest.mark.parametrize("hook", ["update", "score"])
def test_nan_is_named(hook):
    def deed(honest, *arguments):
        found = honest()
        return {"norm": found["norm"] * torch.nan} if hook == "update" else found * torch.nan

    with pytest.raises(ContractError, match=f"method=saboteur: {hook}.* of layer 0 returned NaN"):
        run_alone(saboteur(Honest, hook, deed)("saboteur"))


def set_attribute(given: object, field: str, value: object) -> None:
    object.__setattr__(given, field, value)


def set_in_dictionary(given: object, field: str, value: object) -> None:
    given.__dict__[field] = value


def set_dictionary(given: object, field: str, value: object) -> None:
    object.__setattr__(given, "__dict__", {**vars(given), field: value})


REPLACED = [
    ("update", 0, "observation.queries"),
    ("update", 2, "state.layer"),
    ("protect", 1, "rows.values"),
    ("score", 0, "observation.first"),
    ("score", 1, "rows.keys"),
    ("score", 2, "state.shared"),
    ("merge", 1, "rows.mass"),
    ("cut", 0, "rows.places"),
    ("read", 0, "request.scaling"),
    ("read", 1, "rows.keys"),
    ("read", 2, "state.seeds"),
    ("layer", 1, "observation.share"),
    ("layer", 2, "rows.places"),
]


@pytest.mark.cover
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("way", [set_attribute, set_in_dictionary, set_dictionary])
@pytest.mark.parametrize("hook, place, field", REPLACED)
def test_a_hook_that_replaces_a_field_of_what_it_is_handed_is_named(hook, place, field, way, decoding):
    """In a prefill, or at a decoded token."""

    def deed(honest, *arguments):
        found, given = honest(), arguments[place]
        given = given() if callable(given) else given
        observed = [own.decoding for own in arguments if isinstance(own, Observation)]
        if hook in ("read", "cut") or observed == [decoding]:
            way(given, field.partition(".")[2], "another value")
        return found

    allocator = saboteur(Allocator, hook, deed)("saboteur") if hook == "layer" else None
    method = Honest if allocator else saboteur(BASES.get(hook, Honest), hook, deed)
    with pytest.raises(ContractError) as found:
        run_alone(method("saboteur", decoding=decoding and hook != "read"), allocator)
    who = "allocator" if allocator else "method"
    line = f"{who}=saboteur: {hook} of layer 0 replaced {field}; it must leave what it is handed as it is"
    assert str(found.value) == line


@pytest.mark.parametrize("given", [StateCapture, CapturedAnswer])
def test_what_hooks_of_a_graph_are_handed_is_watched(given):
    """These hooks are called before a graph is captured; their arguments are made up here."""
    names = [own.name for own in fields(given)]
    handed = given(**{name: {0: torch.ones(1)} if name == "keys" else torch.ones(1) for name in names})
    hook, more = ("capture_state", [State((0,))]) if given is StateCapture else ("row_reader", [])
    title = "capture" if more else "answer"

    def call(work, *given):
        class Saboteur(Honest):
            captured = Captured(**{"release_state": print if more else None, hook: lambda *own: work(own[-1])})

        call_captured(guard_hooks(Saboteur("saboteur"), Guard(3)), hook, *given)

    for name in names:
        with pytest.raises(ContractError, match=f"^method=saboteur: {hook} of layer 3 replaced {title}.{name};"):
            call(lambda own, name=name: object.__setattr__(own, name, None), *more, replace(handed))
    if given is CapturedAnswer:
        with pytest.raises(ContractError, match=r"row_reader of layer 3 wrote into answer.keys\[0\];"):
            call(lambda own: own.keys[0].mul_(2), handed)
        for key in (0, 1):  # replaced, or added
            with pytest.raises(ContractError, match=rf"row_reader of layer 3 replaced answer.keys\[{key}\];"):
                call(lambda own, key=key: own.keys.update({key: None}), handed)
        assert list(handed.keys) == [0] and handed.keys[0] is not None  # they are put back


@pytest.mark.parametrize("hook", ["update", "score"])
def test_exact_guards_compute_anew_what_a_hook_left_in_a_cached_property(hook):
    def deed(honest, observation, rows, *more):
        found = honest()
        vars(rows)["present"] = rows.mass < 0
        return found

    with pytest.raises(ContractError, match=f"method=saboteur: {hook} of layer 0 replaced rows.present;"):
        run_alone(saboteur(Honest, hook, deed)("saboteur"), exact=True)


def test_a_hook_cannot_end_the_process():
    def deed(honest, *arguments):
        os._exit(0)

    line = "method=saboteur: score of layer 0 raised SystemExit: os._exit would end the process"
    with refuse_exits(), pytest.raises(ContractError, match=line):
        run_alone(saboteur(Honest, "score", deed)("saboteur"))


@pytest.mark.parametrize("hook", OURS)
def test_a_hook_that_raises_is_named_with_its_line(hook):
    def deed(honest, *arguments):
        raise ZeroDivisionError("division\nby zero")

    with pytest.raises(ContractError) as found:
        run_alone(saboteur(BASES.get(hook, Honest), hook, deed)("saboteur"))
    line = str(found.value)
    where = "" if hook == "extra_reads" else r" of layer \d"
    pattern = rf"method=saboteur: {hook}{where} raised ZeroDivisionError: division by zero \(test_guard.py:\d+\)"
    assert re.fullmatch(pattern, line), line


ASKED = {"check": None, "skips_layer": "no", "steps": 1.5}


@pytest.mark.parametrize("hook", ASKED)
def test_hooks_that_are_asked_about_a_set_up_are_checked(hook):
    def raises(honest, *own):
        raise ValueError("no")

    for deed in (raises, lambda honest, *own: ASKED[hook]):
        method = saboteur(Honest, hook, deed)("saboteur", decoding=True)
        if deed is raises or ASKED[hook] is not None:
            with pytest.raises(ContractError, match=f"method=saboteur: {hook}.* (raised ValueError: no|expected)"):
                choose_cache(method, Allocator("uniform"), Codec("raw"))
                run_alone(method)


@dataclass(frozen=True)
class Uneven(Allocator):
    """Heads of a layer may differ, and layers may be cut again."""

    even = False
    cascades = True

    def earlier(self, quota, observation, shared):
        return {layer: (quota,) for layer in observation.cut_layers if layer < observation.layer}


ALLOCATED = {
    "layer": [lambda found: 0, lambda found: 3.0, lambda found: None, lambda found: (5, 5), lambda found: True],
    "heads": [
        lambda found: found + 2, lambda found: found * 0, lambda found: found.float(), lambda found: found[0],
        lambda found: None,
    ],
    "safe": [lambda found: found.float(), lambda found: found[:, :1], lambda found: None],
    "earlier": [lambda found: None, lambda found: {7: (3,)}, lambda found: {0: (0,)}],
}  # fmt: skip


@pytest.mark.parametrize("hook", ALLOCATED)
def test_what_an_allocator_gives_is_checked(hook):
    run_alone(Honest("honest"), Uneven("mine"), exact=True)
    for wrong in ALLOCATED[hook]:
        mine = saboteur(Uneven, hook, lambda honest, *own, wrong=wrong: wrong(honest()))("mine")
        with pytest.raises(ContractError, match=rf"allocator=mine: {hook} of layer \d returned"):
            run_alone(Honest("honest"), mine)

    def raises(honest, *own):
        raise KeyError("quota")

    def writes(honest, *own):
        next(tensor for tensor in handed(own) if tensor.is_floating_point()).mul_(2)
        return honest()

    for deed, line in ((raises, "raised KeyError"), (writes, "wrote into")):
        with pytest.raises(ContractError, match=rf"allocator=mine: {hook} of layer \d {line}"):
            run_alone(Honest("honest"), saboteur(Uneven, hook, deed)("mine"))


def test_an_allocator_that_overspends_is_found_out():
    """By a row a head, in a cut of the prompt and while decoding."""
    more = saboteur(Allocator, "layer", lambda honest, *own: honest() + 1)("mine")
    with pytest.raises(ContractError, match="allocator=mine: the layers hold more rows than the budget of 20 per head"):
        run_alone(Honest("honest"), more)
    late = saboteur(Allocator, "layer", lambda honest, quota, observation, *own: honest() + observation.decoding)(
        "mine"
    )
    with pytest.raises(ContractError, match="allocator=mine: the layers hold more rows than the budget of 20 per head"):
        run_alone(Honest("honest", decoding=True), late)


@pytest.mark.parametrize("hook", ["pack", "extend", "read", "tensors"])
def test_a_codec_that_breaks_its_contract_is_named(hook, monkeypatch):
    owner = Packs if hook == "pack" else PackedRows
    honest = getattr(owner, hook)

    def raises(self, *own):
        raise OSError("no room")

    def writes(self, *own):
        own[0].mul_(2)
        return honest(self, *own)

    def itself(self, *own):
        self.keys.mul_(2)
        return honest(self, *own)

    deeds = [(raises, "raised OSError: no room")]
    if hook in ("pack", "extend"):
        deeds += [(writes, "wrote into keys"), (lambda self, *own: None, "")]
    if hook == "extend":
        deeds += [(itself, r"wrote into tensors\(\)\[0\]")]
    if hook == "read":
        wrong = [lambda k, v: (k[1:], v), lambda k, v: (k.double(), v), lambda k, v: (k, None), lambda k, v: (k,)]
        deeds += [(lambda self, own=own: own(self.keys, self.values), "returned") for own in wrong]
        deeds += [(lambda self: (self.keys / 0, self.values), "keys that are not finite")]
    for deed, line in deeds:
        monkeypatch.setattr(owner, hook, deed)
        with pytest.raises(ContractError, match=f"codec=packs: .*{line}"):
            run_alone(Honest("honest"), codec=Packs("packs"))


# In a group of runs: the saboteur leaves, the others are what they are alone.

SMALL = ("task=ledger", "task.steps=[18]", "task.max_new_tokens=16", "limit=1", "device=cpu")


@pytest.fixture(scope="module")
def run_of(checkpoint) -> Callable[..., RunSpec]:
    return lambda *own: RunSpec.from_config(compose_config(["model=hf", f"model.path={checkpoint}", *SMALL, *own]))


@pytest.fixture(scope="module")
def runs(run_of) -> list[RunSpec]:
    own = [run_of(f"method={name}", "budget=0.2") for name in ("tova", "snapkv")]
    return [own[0].baseline(), *own]


@pytest.fixture(scope="module")
def bench(run_of):
    return Resources(run_of("method=full"))


@pytest.fixture(scope="module")
def expected(runs, bench, tmp_path_factory):
    """The records of the honest runs, each made alone."""
    results = tmp_path_factory.mktemp("alone")
    return [strip_circumstances(execute_run(run, results, bench)) for run in (runs[0], runs[2])]


def score_in_place(rows_of: Callable[[Any, Any], Tensor]) -> Callable:
    def score(self, observation, rows, state):
        if observation.prompt > 64:  # not in the warm-up
            rows_of(observation, rows).mul_(2)
        return rows.mass * 1.0

    return score


def nan_at_a_prompt(self, observation, rows, state):
    return rows.mass * (torch.nan if observation.prompt > 64 else 1.0)


def raise_at_a_prompt(self, observation, rows, state):
    return rows.mass / ([][0] if observation.prompt > 64 and observation.layer == 3 else 1)


class Keeps:
    """Keeps what it is handed of a prompt and writes into it when it first cuts while decoding."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, method, observation, rows, state):
        if observation.prompt > 64 and not observation.decoding:
            self.kept.append(rows.keys)
        elif observation.decoding:
            while self.kept:
                self.kept.pop().mul_(2)
        return rows.mass * 1.0


def keeps() -> Callable:
    own = Keeps()
    return lambda self, observation, rows, state: own(self, observation, rows, state)


def in_numpy(self, observation, rows, state):
    observation.outputs.numpy()[...] = 0
    return rows.mass * 1.0


def in_the_weights(self, observation, rows, state):
    observation.output_weight.data.mul_(3)
    return rows.mass * 1.0


@pytest.mark.parametrize(
    "score, line, order",
    [
        (score_in_place(lambda observation, rows: rows.keys), "score of layer 0 wrote into rows.keys", 1),
        only_in_full(score_in_place(lambda observation, rows: rows.keys), "score of layer 0 wrote into rows.keys", -1),
        only_in_full(
            score_in_place(lambda observation, rows: observation.outputs),
            "score of layer 0 wrote into observation.outputs",
            1,
        ),
        only_in_full(
            score_in_place(lambda observation, rows: observation.output_weight),
            "score of layer 0 wrote into observation.output_weight",
            -1,
        ),
        only_in_full(keeps(), None, 1),
        (keeps(), None, -1),
        only_in_full(in_numpy, "score of layer 0 wrote into observation.outputs", 1),
        only_in_full(in_the_weights, "score of layer 0 wrote into observation.output_weight", -1),
        only_in_full(nan_at_a_prompt, "score of layer 0 returned NaN", 1),
        (raise_at_a_prompt, "score of layer 3 raised IndexError", -1),
    ],
)
def test_the_other_cells_of_a_group_are_what_they_are_alone(
    score, line, order, runs, bench, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "rehearsed", set())  # in another case the same class was honest
    monkeypatch.setattr(type(runs[1].choice().method), "score", score)
    folders = execute_runs(runs[::order], tmp_path, bench)[::order]
    err = capsys.readouterr().err
    if line and "output_weight" in line:  # nobody knows since when, so the others are executed alone
        assert "weights, which were loaded again, changed while it ran; 2 records are set aside" in err
        for index in (0, 2):
            execute_run(runs[index], tmp_path, bench)
    else:
        assert "kvbench:" not in err  # the saboteur's own cell says it
    assert not folders[1].records() and not folders[1].finished
    honest = [folders[index] for index in (0, 2)]
    assert all(folder.finished for folder in honest)
    pairs = zip(honest, expected, strict=True)
    assert [differences(strip_circumstances(folder.records()), own) for folder, own in pairs] == [[]] * 2
    if not line:  # alone there is nobody whose rows it could spoil
        return
    with pytest.raises(ContractError, match=f"method=tova: {line}"):
        execute_run(runs[1], tmp_path, bench)
    assert not folders[1].records()


def write_a_weight(model: torch.nn.Module, victim: type) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] *= 3


def replace_a_score(model: torch.nn.Module, victim: type) -> None:
    victim.score = lambda self, observation, rows, state: -rows.places.float()


def replace_code(model: torch.nn.Module, victim: type) -> None:
    Method.select.__code__ = (lambda self, scores, quotas: Allocator.select(self, -scores, quotas)).__code__


DEEDS = {
    write_a_weight: "model.layers.1.mlp.up_proj.weight",
    replace_a_score: "kvbench.methods.snapkv.SnapKV.score",
    replace_code: "kvbench.interfaces.further_hooks.FurtherHooks.select",
}


@pytest.mark.parametrize("deed", DEEDS)
def test_who_changes_weights_or_code_at_a_sample_spoils_no_record(
    deed, runs, bench, expected, tmp_path, monkeypatch, capsys
):
    victim, changed = type(runs[2].choice().method), DEEDS[deed]
    before = victim.score, Method.select.__code__

    def score(self, observation, rows, state):
        if observation.prompt > 64 and not observation.layer:
            deed(bench.model, victim)
        return rows.mass * 1.0

    monkeypatch.setattr(type(runs[1].choice().method), "score", score)
    monkeypatch.setattr(bench, "rehearsed", set())
    monkeypatch.setattr(bench, "accused", {})
    folders = execute_runs(runs, tmp_path, bench)
    line = rf"{changed} changed while it ran; \d records are set aside in untrusted-\*.jsonl"
    suspects = "method=full or method=tova or method=snapkv"
    assert re.search(f"kvbench: {suspects}: {line}; 3 runs are left to", capsys.readouterr().err)
    assert not any(folder.records() or folder.finished for folder in folders)
    assert (victim.score, Method.select.__code__) == before
    for index, own in zip((0, 2), expected, strict=True):  # alone they are what they were
        assert differences(strip_circumstances(execute_run(runs[index], tmp_path, bench)), own) == []
    with pytest.raises(ContractError, match=f"method=tova: {line}"):
        execute_run(runs[1], tmp_path, bench)
    assert not folders[1].records() and len(list(tmp_path.rglob("untrusted-*"))) >= 2


def test_a_record_that_differs_alone_ends_the_group(runs, bench, expected, tmp_path, monkeypatch, capsys):
    """The saboteur leaves its own rows and gives those who come after it others."""

    def score(self, observation, rows, state):
        if observation.prompt > 64:
            rows.keys.data.neg_()  # no version counts this
        return rows.mass * 1.0

    monkeypatch.setattr(type(runs[1].choice().method), "score", score)
    monkeypatch.setattr(bench, "rehearsed", set())
    monkeypatch.setattr(bench, "accused", {})
    monkeypatch.setattr(RunSpec, "is_of_kvbench", property(lambda run: run.groups["method"]["name"] != "tova"))
    folders = execute_runs(runs, tmp_path, bench)
    line = (
        r"method=tova: method=snapkv budget=0\.2: .*survived of ledger/18/0 is not what it is alone; "
        r"3 records are set aside in untrusted-\*\.jsonl"
    )
    assert re.search(f"kvbench: {line}; 3 runs are left to", capsys.readouterr().err)
    assert not any(folder.records() or folder.finished for folder in folders)
    assert differences(strip_circumstances(execute_run(runs[2], tmp_path, bench)), expected[1]) == []
    with pytest.raises(ContractError, match=line):  # alone it does nothing wrong
        execute_run(runs[1], tmp_path, bench)


def differences(found: dict, expected: dict) -> list:
    assert found.keys() == expected.keys()
    return [
        (name, found[uid].get(name), own)
        for uid, record in expected.items()
        for name, own in record.items()
        if found[uid].get(name) != own
    ]


@pytest.mark.parametrize("score", [1000.0, float("nan"), "100", *map(only_in_full, [-1.0, float("inf"), None, True])])
def test_a_score_out_of_range_is_no_record(score, runs, bench, tmp_path, monkeypatch):
    task = type(runs[0].task)
    monkeypatch.setattr(task, "score", lambda self, sample, output: Graded(score, output))
    with pytest.raises(ContractError, match="task=ledger: score of ledger/18/0.* expected a number from 0 to 100"):
        execute_run(runs[0], tmp_path, bench)
    assert not list(tmp_path.rglob("done")) and not "".join(own.read_text() for own in tmp_path.rglob("records*"))


def test_a_task_that_raises_is_named(runs, bench, tmp_path, monkeypatch):
    monkeypatch.setattr(type(runs[0].task), "score", lambda self, sample, output: {}["no"])
    with pytest.raises(ContractError, match=r"task=ledger: score of ledger/18/0\S* raised KeyError: 'no'"):
        execute_run(runs[0], tmp_path, bench)


def test_the_python_interface_finds_it_too(monkeypatch):
    knorm = type(catalogue.build("method", catalogue.load_settings("method", "knorm")))
    monkeypatch.setattr(knorm, "score", lambda self, observation, rows, state: rows.keys.mul_(2).norm(dim=-1))
    with pytest.raises(ContractError, match="method=knorm: score of layer 0 wrote into rows.keys"):
        kvbench.prefill(tiny("llama"), ids(30), "knorm", 0.5)


def test_a_caller_inside_inference_mode_is_guarded_too():
    def deed(honest, observation, rows, state):
        rows.keys.mul_(2)
        return honest()

    with torch.inference_mode(), pytest.raises(ContractError, match="score of layer 0 wrote into rows.keys"):
        run_alone(saboteur(Honest, "score", deed)("saboteur"))


def test_versions_are_counted_in_functions_and_generators():
    @without_gradients
    def steps():
        for _ in range(2):
            yield torch.zeros(1)

    with torch.inference_mode():
        for own in (*steps(), without_gradients(lambda: torch.zeros(1))()):
            assert not own.is_inference() and not own.requires_grad
            own.add_(1)
            assert own._version == 1


def test_copies_are_compared_by_their_bits():
    one = torch.tensor([torch.nan, 0.0, 1.0])
    assert same_bits(one, one.clone()) and not same_bits(one, torch.tensor([0.0, 0.0, 1.0]))
    assert same_bits(one.half(), one.half()) and not same_bits(one, one[:2])
    own = Handed(exact=True)
    own.add("a", one), own.add("none", None)
    one.data[1] = 5.0
    assert own.written() == ["a"]


def test_a_rehearsal_leaves_nothing_behind():
    """It is not part of a sample: the same prompt gives the same afterwards."""
    choice = CachePolicy(Honest("honest"), Allocator("uniform"), Codec("raw"))
    logits = []
    for rehearse in (False, True):
        if rehearse:
            rehearsal.rehearse(tiny("llama"), choice, None, ids(64))
        context = GenerationContext(tiny("llama"), choice, Budget(0.5), None, (0,))
        logits.append(context.prefill(ids(50)))
    assert torch.equal(*logits)


def test_a_rehearsal_of_a_codec_cuts_nothing_of_the_full_cache():
    kivi = Kivi(name="kivi", bits=4, group=8, residual=8)
    rehearsal.rehearse(tiny("llama"), CachePolicy(Method("full"), Allocator("uniform"), kivi), None, ids(64))


@pytest.mark.parametrize("learned", [False, True])
def test_a_rehearsal_reads_with_few_layers_if_the_method_can(monkeypatch, learned):
    seen, whole = set(), len(tiny("llama").model.layers)

    class Noting(Honest):
        def check(self, layout):
            if learned and layout.layers < whole:
                raise SettingError("method.path: learned for each layer")

        def score(self, observation, rows, state):
            seen.add(observation.layer)
            return super().score(observation, rows, state)

    monkeypatch.setattr(rehearsal, "LAYERS", whole - 1)
    choice = CachePolicy(Noting("noting"), Allocator("uniform"), Codec("raw"))
    rehearsal.rehearse(tiny("llama"), choice, None, ids(64))
    assert seen == set(range(whole - (not learned))) and len(tiny("llama").model.layers) == whole


@pytest.mark.parametrize("method", catalogue.list_choices("method"))
def test_every_method_is_tried_on_the_first_layers_of_a_deeper_model(monkeypatch, method):
    """Models of users are deeper than the layers that a rehearsal reads."""
    monkeypatch.setattr(rehearsal, "LAYERS", 2)
    choice = choose_cache(*build_policy(method, "uniform", "llama"))
    rehearsal.rehearse(tiny("llama"), choice, PromptEncoder(lambda text: [5, 6]), ids(96))


def test_storage_that_runs_share_is_not_kept_alive_by_watching_it():
    choice = CachePolicy(Honest("honest"), Allocator("uniform"), Codec("raw"))
    contexts = [GenerationContext(tiny("llama"), choice, Budget(0.5), None, (0,)) for _ in range(2)]
    shared_prefill.prefill(contexts, ids(50))
    assert all(reference() is None for context in contexts for _, reference in context.lent)


def test_the_full_cache_is_tried_with_a_codec():
    """It has no hook that could cut, so it is read uncut, and the codec's hooks are called."""
    called = []

    class Notes(Packs):
        def pack(self, keys, values, lengths):
            called.append(len(keys))
            return super().pack(keys, values, lengths)

    choice = CachePolicy(Method("full"), Allocator("uniform"), Notes("notes"))
    rehearsal.rehearse(tiny("llama"), choice, None, ids(64))
    assert len(called) == 2 * 3  # once in a layer, with one block and with two
