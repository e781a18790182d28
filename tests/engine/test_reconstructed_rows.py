"""A step over rows of DeltaKV, reconstructed from codes and references, gives what the modules give."""

import weakref

import pytest
import torch

from kvbench.cache.layer import Layer
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.sampling import Sampling
from kvbench.engine.streams import Beside
from kvbench.methods.deltakv import ObservationReader
from kvbench.validation import ContractError
from tests.support.answer_paths import (
    LONG,
    assert_same,
    assert_same_answers,
    make_contexts,
)
from tests.support.delta_files import build_delta
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_exact

SELECTS = dict(full_layers=[0], depth=None, sinks=3, recent=8)


def read_prompts(method="deltakv", model="llama", selects=None, budget=0.3, batch=2, prompt=60, **codec):
    """Two contexts, of which the second one answers through the step."""
    more = {} if method == "full" else SELECTS | (selects or {})
    policy = build_policy(method, "uniform", model, **more)[:2]
    choice = choose_cache(*policy, build_delta(model, codec.pop("kind", "drawn"), **codec))
    return make_contexts(make_exact(model), choice, 1.0 if method == "full" else budget, batch, prompt=prompt)


@pytest.mark.cover
@pytest.mark.parametrize("method", ["deltakv", "full"])
@pytest.mark.parametrize("model", ["llama", "qwen3", only_in_full("phi3")])
def test_the_step_gives_what_the_modules_give(model, method):
    modules, step = read_prompts(method, model)
    assert_same_answers(modules, step)
    assert method == "full" or min(step.own_layers[1].attended) < 60
    more = ids(5, 9).repeat(2, 1)
    torch.testing.assert_close(modules.extend(more), step.extend(more), rtol=0, atol=1e-9)


def test_layers_with_a_sliding_window_stand_beside_them():
    """Gemma 3 has rows in the layers 2 and 5. Codes are 0, which multiplies no difference of its norms."""
    modules, step = read_prompts(model="gemma3", kind="zero", full_layers=[2], selects=dict(full_layers=[2]))
    for tokens in (LONG, 9):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert_same(modules, step)
        assert modules.bytes() == step.bytes()


CODECS = {
    "codes in 4 bits": dict(bits=4),
    "codes in 2 bits": dict(bits=2),
    "K and V apart, by two matrices": dict(kind="apart"),
    "K and V apart in 4 bits": dict(kind="apart", bits=4),
    "no residual": dict(remove="residual"),
    "no references": dict(remove="reference"),
    "distances that grow": dict(stride_alpha=0.1),
    "blocks of one": dict(recent=1),
    "more sinks than tokens": dict(sinks=70),
    "a method with other sinks": dict(sinks=2, recent=5),
    "another full layer": dict(full_layers=[0, 2]),
}


@pytest.mark.cover
@pytest.mark.parametrize(
    "name",
    choose_quick(
        CODECS,
        "K and V apart in 4 bits",
        "no residual",
        "no references",
        "more sinks than tokens",
    ),
)
@pytest.mark.parametrize("method", ["deltakv", "full"])
def test_whatever_the_codec_stores(method, name):
    assert_same_answers(*read_prompts(method, **CODECS[name]), lengths=(LONG, 9))


CHOICES = {
    "a number of rows": dict(budget=9),
    "more rows than there are": dict(budget=70),
    "no budget": dict(budget=1.0),
    "more recent rows than wait": dict(selects=dict(recent=30)),
    "more sinks than the codec's": dict(selects=dict(sinks=9)),
    "more sinks than tokens": dict(selects=dict(sinks=200)),
    "two full layers": dict(selects=dict(full_layers=[0, 1]), full_layers=[0, 1]),
    "no observation layer": dict(selects=dict(full_layers=[2])),
    "nothing to choose among": dict(prompt=12),
    "a short prompt": dict(prompt=2),
}


@pytest.mark.parametrize(
    "name",
    choose_quick(
        CHOICES,
        "a number of rows",
        "more sinks than the codec's",
        "two full layers",
        "a short prompt",
    ),
)
def test_whatever_the_method_chooses(name):
    assert_same_answers(*read_prompts(**CHOICES[name]), lengths=(LONG, 9))


def test_layers_that_the_codec_packs_in_another_way_grow_too():
    """Full layers in KIVI's bits."""
    modules, step = read_prompts("full", base="kivi", base_args={"bits": 4, "group": 8, "residual": 8})
    assert_same_answers(modules, step, lengths=(LONG, 9))


@pytest.mark.parametrize("more", [dict(base="kivi", base_args={"group": 8}), dict(full_layers=[1])])
def test_observation_layers_without_raw_keys_are_left_to_the_modules(more):
    _, step = read_prompts(**more)
    assert len(list(step.generate(LONG, Sampling(), frozenset()))) == LONG and step.decoding == "modules"


@pytest.mark.parametrize("method", ["quest", "omnikv"])
def test_methods_that_choose_by_keys_of_packed_layers_are_left_to_the_modules(method):
    choice = choose_cache(*build_policy(method, "uniform", "llama")[:2], build_delta("llama"))
    assert not decodes_in_graph(choice)


@pytest.mark.parametrize("method", ["deltakv", "full"])
def test_room_for_an_answer_is_counted_before_it_begins(method):
    _, step = read_prompts(method, batch=1)
    answer = 41
    before = step.bytes().headroom
    step.reserve(answer)
    tokens, wide, layers = answer - 1, 2 * 2 * 32, 2
    waits = 60 - 3 - 48
    blocks = (waits + tokens) // 8 - 1
    packed = 8 * wide * (waits + tokens) + blocks * (8 * wide * 2 + 8 * 12 * 8 + 8 * 2 * 4)  # centres, codes, numbers
    assert step.bytes().headroom == layers * packed + tokens * 8 * wide > before
    assert len(list(step.generate(answer, Sampling(), frozenset()))) == answer and step.bytes().headroom == 0


def test_no_room_is_made_where_the_modules_read():
    _, step = read_prompts(selects=dict(smoothing=0.5), batch=1)
    step.reserve(LONG)
    assert all(layer.rows.growing is None for layer in step.own_layers)


def test_a_reader_may_not_watch_a_layer_whose_rows_are_packed(monkeypatch):
    monkeypatch.setattr(ObservationReader, "choose", lambda *_: lambda layer, *_: None if layer == 0 else print)
    _, step = read_prompts()
    with pytest.raises(ContractError, match="^method=deltakv: row_reader watches layer 1, whose rows are packed$"):
        list(step.generate(LONG, Sampling(), frozenset(), True))


@pytest.mark.parametrize("batch", [1, 2])
def test_products_leave_multiprocessors_beside_a_packed_layer(batch, monkeypatch):
    """Layer 1 comes behind an observation layer and waits for its rows. Those of layer 2 are made beside layer 1."""
    limits, work = [], Beside.work

    def note(self, *used, urgent=False, limited=False):
        limits.append(limited)
        return work(self, *used, urgent=urgent, limited=limited)

    monkeypatch.setattr(Beside, "work", note)
    _, step = read_prompts(batch=batch)
    list(step.generate(LONG, Sampling(), frozenset(), True))
    choosing_and_making = [False, False, False, batch == 1]
    assert limits and limits == choosing_and_making * (len(limits) // 4)


def test_old_rows_of_a_layer_are_freed_before_the_next_layer_copies_its_own(monkeypatch):
    """After an answer the rows of a layer and its new blocks are joined, in new memory."""
    alive, finish = [], Layer.finish_growing

    def look(self, *given):
        alive.append([old() is not None for old in olds])
        olds.append(weakref.ref(self.rows.stored))
        finish(self, *given)

    olds: list = []
    monkeypatch.setattr(Layer, "finish_growing", look)
    _, step = read_prompts(batch=1)
    list(step.generate(LONG, Sampling(), frozenset(), True))
    assert alive[0] == [] and alive[1] == [False]
