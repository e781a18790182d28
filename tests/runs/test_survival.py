"""Which rows survived, and where the targets stand: by hand, against a loop over places, and in records."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench.cache.policy import CachePolicy
from kvbench.cache.refusals import find_refusal
from kvbench.cache.storage import StoredRows
from kvbench.config.catalogue import list_choices
from kvbench.config.compose import compose_config
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.task import Sample
from kvbench.runs import responder, survival
from kvbench.runs import survival as kvbench_survival
from kvbench.runs.prompt import encode_all
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, shorten
from kvbench.runs.runner import execute_run
from kvbench.runs.spec import RunSpec
from kvbench.runs.survival import BINS, find_evidence, measure_survival
from tests.support.conversations import make_turns
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, tiny

KINDS = ("full", "snapkv", "kvzip", "centroidkv", "quest", "omnikv", "pqcache", "deltakv")  # of what is held


def layer(kept: list[list[list[int]]] | None, read: int, tail: int, dim: int = 2) -> StoredRows:
    """A layer that read `read` tokens, kept these places of each sample and head, and read `tail` more."""
    rows = StoredRows()
    shape = (len(kept), len(kept[0])) if kept else (1, 2)
    rows = rows.append(torch.zeros(*shape, read, dim), torch.zeros(*shape, read, dim))
    if kept:
        view = rows.view()
        gone = torch.ones(*shape, read, dtype=torch.bool)
        for sample, heads in enumerate(kept):
            for head, places in enumerate(heads):
                gone[sample, head, places] = False
        lengths = {len(places) for heads in kept for places in heads}
        rows = rows.keep(view.without(gone), even=len(lengths) == 1, merged=False)
    if tail:
        rows = rows.append(torch.zeros(*shape, tail, dim), torch.zeros(*shape, tail, dim))
    return rows


def percents(found: list[str]) -> list[list[int]]:
    return [list(bytes.fromhex(own)) for own in found]


def looped(places: list[list[list[list[int]]]], tokens: int, bins: int) -> list[list[int]]:
    """The same of places by layer, sample and head, one after the other."""
    found = []
    for sample in range(len(places[0])):
        heads = [set(own) for layer in places for own in layer[sample]]
        held = [[0, 0] for _ in range(bins)]
        for place in range(tokens):
            held[place * bins // tokens][0] += sum(place in own for own in heads)
            held[place * bins // tokens][1] += len(heads)
        found.append([int(100 * own / of + 0.5) for own, of in held])
    return found


def test_ragged_rows_by_hand(monkeypatch):
    monkeypatch.setattr(survival, "BINS", 4)
    rows = layer([[[0, 1, 2, 7], [8]]], read=10, tail=2)  # both heads hold 10 and 11
    places = torch.tensor([0, 3, 8, 10, 12], dtype=torch.int32)
    assert rows.rank_of(places).tolist() == [[[0, 3, 4, 4, 6], [0, 0, 0, 1, 3]]]
    assert percents(measure_survival([rows], 12)) == [[50, 0, 33, 67]]  # 3, 0, 2 and 4 of six rows
    assert measure_survival([rows, layer(None, read=12, tail=0)], 12) == ["4b324353"]  # 9, 6, 8 and 10 of twelve
    assert measure_survival([layer(None, read=3, tail=0)], 3) == ["646464"]  # fewer tokens than bins
    both = layer([[[0], [5]], [[1, 2], [6, 7]]], read=8, tail=0)
    assert percents(measure_survival([both], 8)) == [[25, 0, 25, 0], [25, 25, 0, 50]]


@given(st.data())
def test_bins_are_those_of_a_loop_over_places(data):
    read, tail = data.draw(st.integers(1, 150)), data.draw(st.integers(0, 20))
    samples, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    some = st.sets(st.integers(0, read - 1), min_size=1).map(sorted)
    layers = data.draw(
        st.lists(
            st.lists(st.lists(some, min_size=heads, max_size=heads), min_size=samples, max_size=samples),
            min_size=1,
            max_size=3,
        )
    )
    last = list(range(read, read + tail))
    places = [[[own + last for own in sample] for sample in one] for one in layers]
    found = percents(measure_survival([layer(own, read, tail) for own in layers], read + tail))
    assert found == looped(places, read + tail, min(BINS, read + tail))


def held_places(context: GenerationContext) -> list[list[list[list[int]]]]:
    """By layer, sample and head."""
    samples, heads = context.own_layers[0].rows.shape
    return [
        [[own.rows.head_places(sample, head).tolist() for head in range(heads)] for sample in range(samples)]
        for own in context.own_layers
    ]


@pytest.mark.cover
@pytest.mark.parametrize(("name", "block_size"), [("llama", None), ("llama", 40), ("gemma3", 40)])
@pytest.mark.parametrize("method", choose_quick(list_choices("method"), *KINDS))
def test_what_every_method_holds_of_a_batch(method, name, block_size):
    """With codecs and ragged allocators that it goes with, after the prompt and after more tokens."""
    prompts = torch.cat([ids(150, 1), ids(150, 2)])
    for allocator, codec in (("uniform", "raw"), ("ada", "raw"), ("cake", "raw"), ("uniform", "kivi")):
        choice = CachePolicy(*build_policy(method, allocator, name, codec))
        if find_refusal(choice.method, choice.allocator, choice.codec) or (choice.method.one_block and block_size):
            continue
        budget = Budget(1.0 if method == "full" else 0.3)
        context = GenerationContext(tiny(name), choice, budget, block_size, (7, 8), 2)
        context.prefill(prompts)
        for more in (0, 3):
            if more:
                context.extend(prompts[:, :more])
            found = percents(measure_survival([own.rows for own in context.own_layers], context.seen))
            assert found == looped(held_places(context), context.seen, BINS)
            resident = choice.method.attends_subset or method == "full"
            assert ({own for sample in found for own in sample} == {100}) == resident


SMALL = ("task.subtasks=niah_single_1", "task.length=512", "task.samples=1")


@pytest.fixture(scope="module")
def run_of(checkpoint) -> Callable[..., RunSpec]:
    model = ("model=hf", f"model.path={checkpoint}", "device=cpu")
    return cache(lambda *own: RunSpec.from_config(compose_config([*model, *own])))


@pytest.fixture(scope="module")
def bench(run_of):
    return Resources(run_of("method=full", *SMALL))


@pytest.mark.cover
@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize(
    "settings",
    [
        ("method=snapkv", "block_size=100"),
        ("method=knorm", "allocator=ada"),
        ("method=centroidkv",),
        ("method=kvzip",),
        ("method=tova", "codec=raw"),
        ("method=full",),
    ],
    ids=" ".join,
)
def test_records_say_what_the_python_interface_shows(run_of, bench, settings, question, tmp_path):
    run = run_of(*settings, *SMALL, "budget=0.2", f"question={question}")
    records = execute_run(run, tmp_path, bench)
    for sample, prompt in bench.prompts.values():
        record, chosen_ = records[sample.uid], run.groups
        first = prompt.context + (prompt.rest if question == "visible" else ())
        own = {
            "seed": responder.derive_seed(0, sample.group or sample.uid),
            "tokenizer": bench.tokenizer,
            "prefix": prompt.prefix,
        }
        held = kvbench.prefill(
            bench.model,
            torch.tensor([first]),
            chosen_["method"]["name"],
            0.2,
            run.block_size,
            chosen_["allocator"]["name"],
            **own,
        )
        if question == "hidden":
            held.extend(torch.tensor([prompt.rest]))
        tokens, [context] = record["rows_seen"], held.contexts
        assert tokens == len(prompt.ids) and [list(bytes.fromhex(record["survived"]))] == looped(
            held_places(context), tokens, BINS
        )
        assert record["asked"] == sample.question + sample.answer_prefix and "magic number" in record["asked"]
        [number] = sample.answers
        assert 1 <= len(record["evidence"]) <= 2
        inside = [own for place, own in enumerate(prompt.ids) if place * BINS // tokens in record["evidence"]]
        assert number in bench.tokenizer.decode(inside)


def test_the_place_of_the_evidence_is_that_of_the_tasks(run_of, bench):
    """Of `niah` records, which know the needle's depth."""
    run = run_of("task=niah", "task.lengths=[1024]", "task.depths=[0,50,100]", "task.trials=1", "method=full")
    for sample, prompt in Resources(run, {"tokenizer": bench.tokenizer}).prompts.values():
        found = find_evidence(sample, prompt, len(prompt.ids))
        assert len(found) in (1, 2) and abs(100 * found[0] / BINS - sample.meta["place"]) < 8


@pytest.mark.parametrize(
    ("context", "answers", "places"),
    [
        ("The mill is old. A miller built the mill.", ("mill",), [2, 11]),  # not in the miller, nor in the question
        ("The mill is old.", ("The mill is", "old."), [1, 2, 3, 4, 5]),  # after <bos>
        ("The mill is old.", ("Mill", "ill", "", " "), []),
        ("The mill (is) old.", (" (is) ",), [4, 5, 6]),
        ("", ("mill",), []),
    ],
)
def test_targets_stand_where_their_words_do(bench, context, answers, places):
    sample = Sample("a", "a", context, " Who built the mill? mill", "", answers, 3)
    [(_, prompt)] = encode_all(bench.tokenizer, [sample]).values()
    assert len(prompt.ids) < BINS  # a bin is a token
    assert find_evidence(sample, prompt, len(prompt.ids)) == places


def test_a_conversations_turns_have_places_of_their_own(bench):
    samples = [
        replace(own, answers=(word,)) for own, word in zip(make_turns(), ("mill", "Nobody", "river"), strict=True)
    ]
    found = [find_evidence(*own, 60) for own in encode_all(bench.tokenizer, samples).values()]
    assert found == [[6, 15], [8], [2]]


def test_a_long_question_says_that_its_middle_is_not_there():
    assert shorten("a" * 1000) == "a" * 1000
    assert shorten("a" * 700 + "b" * 701) == "a" * 500 + " […401 characters…] " + "b" * 500


def test_what_looking_takes_is_no_part_of_the_peak(run_of, bench, monkeypatch):
    """Of a counter as a GPU has it: 50 while the prompt is read, 1000 while somebody looks, 70 in the question."""
    counter = [0]
    run = run_of("method=snapkv", "budget=0.2", *SMALL)
    reader = Responder(run, bench)
    look, prefill = kvbench_survival.measure_survival, GenerationContext.prefill
    monkeypatch.setattr(responder, "peak", lambda device: counter[0])
    monkeypatch.setattr(responder, "forget_peak", lambda device: counter.__setitem__(0, 10))
    monkeypatch.setattr(
        kvbench_survival, "measure_survival", lambda *own: (counter.__setitem__(0, 1000), look(*own))[1]
    )
    monkeypatch.setattr(
        GenerationContext, "prefill", lambda self, own: (counter.__setitem__(0, 50), prefill(self, own))[1]
    )
    batch = [next(iter(bench.prompts.values()))]
    reader.answer(batch)
    assert (reader.peak, counter[0]) == (50, 10)
    counter[0] = 70
    reader.answer(batch)  # on the same context
    assert (reader.peak, counter[0]) == (70, 10)
    reader.drop()
    reader.answer(batch)
    assert reader.peak == 50
