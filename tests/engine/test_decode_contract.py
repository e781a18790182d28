"""What every kind of rows owes to an answer, whether the rows grow, are cut, read in part, packed or rebuilt.

Two contexts read the same prompt. The model's modules answer in the first one, kvbench's own step in the second one.
The step reads ahead of what its answer asks for, so an answer that ends, is left or is interrupted must leave what the
modules leave. That a step gives what the modules give is tested for each kind in a file of its own.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.batch_rows import BatchRows
from kvbench.engine.generation import WORTH, GenerationContext, plan_rows
from kvbench.engine.graph_decoding import GraphDecoder
from kvbench.engine.graph_path import make_rows
from kvbench.engine.joint_decoding import run_alone
from kvbench.engine.sampling import Sampling
from tests.support.answer_paths import (
    CHUNK,
    assert_near_storage,
    assert_same,
    assert_same_storage,
    forget,
    make_contexts,
)
from tests.support.delta_files import build_delta
from tests.support.interrupted_answers import answer_both, answer_with_interruptions
from tests.support.method_files import build_policy
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import choose_quick
from tests.support.tiny_models import make_double, make_exact, make_fresh, make_small_gemma3, tiny

GREEDY = Sampling()
LISTS = {"full_layers": [0], "depth": None, "sinks": 3, "recent": 8}


@dataclass(frozen=True)
class Kind:
    """Rows, and how near a step over them is to the modules."""

    method: str
    settings: dict = field(default_factory=dict)
    allocator: str = "uniform"
    model: Callable[[], torch.nn.Module] = lambda: tiny("short")
    small: Callable[[], torch.nn.Module] = lambda: make_fresh("short")  # for the kernels, in float32
    architecture: str = "short"
    codec: Callable[[], object] = lambda: None
    budget: float = 0.3
    prompt: int = 60
    compare: Callable[[GenerationContext, GenerationContext], None] = assert_same
    tolerance: float = 1e-5
    step_tolerance: float = 1e-4  # between two implementations of the kernels

    def choose(self, **more: object) -> CachePolicy:
        policy = build_policy(self.method, self.allocator, self.architecture, **{**self.settings, **more})
        return choose_cache(*policy[:2], self.codec() or policy[2])

    def make(self) -> list[GenerationContext]:
        return make_contexts(self.model(), self.choose(), self.budget, prompt=self.prompt)


def packed() -> Kind:
    def kivi():
        return build("codec", load_settings("codec", "kivi", dict(bits=2, group=8, residual=24)))

    return Kind(
        "snapkv", allocator="ada", model=lambda: make_double("short"), small=lambda: make_fresh("wide"), codec=kivi,
        budget=0.5, prompt=90, compare=assert_near_storage, tolerance=1e-3,
    )  # fmt: skip


def coded(codec: str, method: str = "snapkv", allocator: str = "uniform", **settings: object) -> Kind:
    """Codes of 8 or 4 bits: modules and step round numbers that differ in their last bits, so some codes are others."""
    return Kind(
        method, allocator=allocator, model=lambda: make_double("short"), small=lambda: make_fresh("wide"),
        codec=lambda: build("codec", load_settings("codec", codec, settings)), compare=assert_near_storage,
        tolerance=1e-2,
    )  # fmt: skip


def waiting() -> Kind:
    """Rows that are rounded six at once, which HQQ's solver must see together."""

    def build_hqq():
        settings = {"preset": "hqq4", "group": 16, "residual": 6}
        return build("codec", load_settings("codec", "hf_quantized", settings))

    return Kind(
        "snapkv", allocator="ada", model=lambda: make_double("short"), small=lambda: make_fresh("wide"),
        codec=build_hqq, compare=assert_near_storage, tolerance=1e-3,
    )  # fmt: skip


def rebuilt(method: str = "deltakv", kind: str = "drawn") -> Kind:
    return Kind(
        method, LISTS if method == "deltakv" else {}, model=lambda: make_exact("short"),
        codec=lambda: build_delta("short", kind), budget=0.3 if method == "deltakv" else 1.0, prompt=66,
        compare=assert_same_storage, tolerance=1e-9, step_tolerance=1e-3,
    )  # fmt: skip


def latent(method: str = "snapkv", bits: int | None = None, **settings: object) -> Kind:
    return Kind(
        method, settings, allocator="ada" if method == "snapkv" else "uniform", model=lambda: make_exact("llama3"),
        small=lambda: make_fresh("llama3"), architecture="llama3",
        codec=lambda: build_palu(find_palu("llama3", removed=0.7), bits=bits),
        budget=1.0 if method == "full" else 0.3, compare=assert_same_storage, tolerance=1e-9, step_tolerance=1e-3,
    )  # fmt: skip


def windowed(method: str, settings: dict, budget: float, prompt: int) -> Kind:
    return Kind(
        method, settings, model=lambda: make_double("gemma3"), small=make_small_gemma3, budget=budget, prompt=prompt
    )  # fmt: skip


KINDS = {
    "appended": Kind("snapkv"),
    "cut at every token": Kind("keydiff"),
    "cut after five tokens": Kind("tova", {"decode_interval": 5}),
    "merged after five tokens": Kind("centroidkv", {"decode_interval": 5, "sinks": 2, "recents": 4, "chunk": 8}),
    "selected in two stages": Kind("criticalkv", {"decoding": True, "decode_interval": 5}),
    "watched": Kind("h2o", {"decode_interval": 5}),
    "shared unevenly": Kind("h2o", {"decode_interval": 5}, allocator="ada"),
    "shared unevenly, in two stages": Kind("criticalkv", {"decoding": True, "decode_interval": 5}, allocator="ada"),
    "shared unevenly, unseen": Kind("keydiff", {"decode_interval": 5}, allocator="ada"),
    "filled, then cut": Kind("h2o", {"decoding": True, "decode_size": 30}),
    "packed": packed(),
    "codes": coded("int4", allocator="ada", preset="quarot"),
    "codes, rounded as they are read": coded("fp8", preset="row"),
    "codes, cut at every token": coded("int4", "keydiff", preset="vllm"),
    "rounded six at once": waiting(),
    "rebuilt": rebuilt(),
    "latent": latent(),
    "latent, cut at every token": latent("keydiff"),
    "latent, cut after five tokens": latent("criticalkv", 4, decoding=True, decode_interval=5),
    "appended, beside windows": windowed("snapkv", {}, 5, 9),
    "cut after five tokens, beside windows": windowed("tova", {"decoding": True, "decode_interval": 5}, 5, 9),
    "listed, beside windows": windowed("quest", {"page": 4, "dense_layers": 1}, 0.5, 53),  # a short text is one page
}
AGAIN = (
    "codes, rounded as they are read",
    "cut after five tokens",
    "selected in two stages",
    "shared unevenly, in two stages",
    "shared unevenly, unseen",
    "appended, beside windows",
    "latent, cut at every token",
    "latent, cut after five tokens",
)
"""Kinds whose rows, windows and codecs stand among the others in another pair."""
UNDONE = (*AGAIN, "merged after five tokens", "filled, then cut", "cut after five tokens, beside windows")
"""Kinds that undo and append tokens as others do."""
EVERY = pytest.mark.parametrize("kind", choose_quick(KINDS, *(own for own in KINDS if own not in AGAIN)))


@pytest.mark.cover
@EVERY
@pytest.mark.parametrize("read_last", [False, True])
@pytest.mark.parametrize("end", [4, CHUNK, CHUNK + 3])
def test_what_was_decoded_beyond_the_end_is_as_if_it_never_was(end, read_last, kind):
    modules, step = KINDS[kind].make()
    answer_both((modules, step), end, read_last)
    assert step.decoding == "graph"
    KINDS[kind].compare(modules, step)
    torch.testing.assert_close(modules.logits, step.logits, rtol=0, atol=KINDS[kind].tolerance)
    again = [list(context.generate(9, GREEDY, frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, again))
    KINDS[kind].compare(modules, step)


@pytest.mark.cover
@pytest.mark.parametrize("kind", choose_quick(KINDS, *(own for own in KINDS if own not in UNDONE)))
@pytest.mark.parametrize("first", [5, CHUNK + 2])
def test_what_is_read_while_an_answer_is_under_way_comes_behind_what_it_has_read(first, kind):
    both = KINDS[kind].make()
    found = [(*answer_with_interruptions(context, first), context.logits) for context in both]
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=KINDS[kind].tolerance)
    KINDS[kind].compare(*both)


@pytest.mark.parametrize("kind", choose_quick(KINDS, *(own for own in KINDS if own not in UNDONE)))
def test_a_branch_leaves_nothing_behind(kind):
    """Neither an answer in it, nor one in a branch of it, nor one that is ended.

    An answer whose rows nobody needs counts what it would count if they were needed.
    """
    modules, step = KINDS[kind].make()
    held = [layer.rows for layer in step.own_layers]
    places, size, seen = [rows.view().places.clone() for rows in held], step.bytes(), step.seen
    windows = [(layer.keys, layer.values, layer.cumulative_length) for layer in step.sliding_layers()]
    copies = [(keys.clone(), values.clone()) for keys, values, _ in windows]
    answers = []
    for _ in range(2):
        with step.branch():
            first = list(step.generate(CHUNK + 3, GREEDY, frozenset()))
            with step.branch():
                list(step.generate(8, GREEDY, frozenset()))
            answers.append(torch.stack([*first, *step.generate(8, GREEDY, frozenset())]))
    (ended, counts), (other, others) = (run_alone(forget(own, 40, after=CHUNK + 5)) for own in (modules, step))
    assert torch.equal(ended, other) and len(ended) == CHUNK + 5 and counts == others and step.decoding == "graph"
    assert torch.equal(*answers) and step.bytes() == size and step.seen == seen
    for layer, rows, before in zip(step.own_layers, held, places, strict=True):
        assert layer.rows is rows and torch.equal(rows.view().places, before)
    for layer, (keys, values, length), copied in zip(step.sliding_layers(), windows, copies, strict=True):
        assert layer.keys is keys and layer.values is values and layer.cumulative_length == length
        assert torch.equal(keys, copied[0]) and torch.equal(values, copied[1])


@EVERY
def test_a_context_that_nobody_has_is_freed_at_once(kind):
    """And not when Python next looks for cycles: a GPU would hold the cache of the sample before."""
    contexts = KINDS[kind].make()
    while contexts:
        context = contexts.pop()
        with context.branch():
            list(context.generate(WORTH, GREEDY, frozenset()))
        layer = weakref.ref(context.own_layers[0])
        gc.disable()
        try:
            del context
            assert layer() is None
        finally:
            gc.enable()


STEPS = {
    **KINDS,
    "streaming": Kind("duo_attention", {"decoding": True, "sparsity": 0.3}),
    "all rebuilt": rebuilt("full"),
    "rebuilt, K and V apart": rebuilt(kind="apart"),
    "all latent": latent("full"),
    "latent in 4 bits": latent(bits=4),
}
QUICK = ("packed", "rebuilt, K and V apart", "latent in 4 bits")


@pytest.mark.parametrize("kind", choose_quick(STEPS, *QUICK, "appended, beside windows"))
def test_the_kernels_take_the_same_step(kind):
    """Two tokens, between which rows are cut or packed, through Triton's interpreter or on the GPU."""
    chosen, device = STEPS[kind], "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"decode_interval": 2} if "decode_interval" in chosen.settings else {}
    model = chosen.small().to(device)
    _, context = make_contexts(model, chosen.choose(**settings), chosen.budget, prompt=chosen.prompt)
    planned, weights, found = plan_rows(context, WORTH), context.weights, []
    for name in ("reference", "triton"):
        with torch.no_grad(), context.branch():
            rows = BatchRows([make_rows([context], [planned], name)], [[1]], context.logits.device)
            draws = torch.zeros(1, 3, device=device)
            decoder = GraphDecoder(weights, rows, context.logits.argmax(-1), 2, GREEDY.pick, draws, name)
            tokens = [int(decoder.next()[0]) for _ in range(2)]
            logits = decoder.close()
            held = [own for layer in context.own_layers for own in list_tensors(layer.rows, chosen)]
            found.append((tokens, logits, *held, *(own.keys for own in context.sliding_layers())))
    assert found[0][0] == found[1][0] and len(found[0]) == len(found[1])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=chosen.step_tolerance)
    if "rebuilt" in kind:
        assert (1, 56, 12) in [own.shape for own in found[0][2:]]  # codes of a block that was compressed between them


def list_tensors(rows, kind: Kind) -> list[torch.Tensor]:
    if rows.stored is not None:
        return list(rows.stored.tensors() if kind.compare is assert_same_storage else rows.stored.read())
    held = rows.view()
    return [held.keys, held.values, held.places]
