"""A decode step over the modules' weights gives what the modules give, on rows held in every way."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvbench.config.catalogue import build, load_settings
from kvbench.engine.answer_quotas import find_answer_quotas
from kvbench.engine.appended_rows import AppendedRows, only_appends
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.fixed_quota_rows import FixedQuotaRows
from kvbench.engine.generation import WORTH
from kvbench.engine.graph_decoding import GraphDecoder
from kvbench.engine.joint_decoding import run_alone
from kvbench.engine.read_rows import ReadRows, make_reader
from kvbench.engine.replaced_rows import ReplacedRows
from kvbench.engine.sampling import Sampling
from kvbench.engine.streams import Beside
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Captured, Method
from kvbench.kernels.row_replacement import NEVER
from kvbench.methods import deltakv
from kvbench.methods.expected_attention import ExpectedAttention
from kvbench.methods.snapkv import SnapKV
from kvbench.models.decoder_weights import collect_weights
from kvbench.validation import ContractError, NumericalError
from tests.support.answer_paths import CHUNK, assert_same, forget, make_contexts
from tests.support.interrupted_answers import (
    answer_with_interruptions,
)
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, make_exact, make_fresh, tiny

APPENDING = {"method": "snapkv"}
CUTTING = {"method": "keydiff"}  # at every token
CUTTING_FIVES = {"method": "tova", "decode_interval": 5}
WATCHING = {"method": "h2o", "decode_interval": 5}  # every token, and cuts after five
STREAMING = {"method": "duo_attention", "decoding": True, "sparsity": 0.3}
FILLING = {"method": "h2o", "decoding": True, "decode_size": 30}  # grows by a row at a token, and then is cut
SETUPS = [("full", "uniform"), ("snapkv", "ada"), ("kvzip", "uniform")]
MORE_SETUPS = [
    ("snapkv", "uniform"),
    ("criticalkv", "ada"),
    ("kvzap", "uniform"),
    ("kvzap", "ada"),
    ("kvgrad", "uniform"),
]


def choice_of(method, allocator="uniform", codec="raw", model="short", **more):
    """`allocator` is a name, or what `build_allocator` returns."""
    name = allocator if isinstance(allocator, str) else "uniform"
    own, of_name, packing = build_policy(method, name, model, codec, **more)
    return choose_cache(own, of_name if name == allocator else allocator, packing)


def build_allocator(name, **more):
    return build("allocator", load_settings("allocator", name, more))


def qwen2(heads=2, **more):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=heads, max_position_embeddings=512, **more,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("method", "allocator"), [*SETUPS, *(only_in_full(*own) for own in MORE_SETUPS)])
def test_the_step_gives_what_the_modules_give(method, allocator):
    budget = 1.0 if method == "full" else 0.3
    modules, step = make_contexts(tiny("llama"), choice_of(method, allocator, model="llama"), budget)
    answers = [list(context.generate(CHUNK + 9, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert (modules.decoding, step.decoding) == ("modules", "graph")
    assert len(step.stamps) >= CHUNK + 9 and step.stamps == sorted(step.stamps)
    assert_same(modules, step)
    more = ids(5, 9)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-5)


@pytest.mark.cover
@pytest.mark.parametrize("method", ["snapkv", "keydiff", "sink", "quest"])
@pytest.mark.parametrize("name", ["mistral", "qwen3", "qwen2", "phi3", "gemma3"])
def test_biases_norms_and_rotations_are_the_models(name, method):
    model = qwen2() if name == "qwen2" else tiny(name)
    modules, step = make_contexts(model, choice_of(method), batch=2)
    answers = [list(context.generate(CHUNK + 5, Sampling(), frozenset())) for context in (modules, step)]
    assert step.decoding == "graph" and torch.equal(*map(torch.stack, answers))
    assert torch.allclose(modules.logits, step.logits, atol=1e-5)


METHODS = ("cake", "dropkv", "keydiff", "knorm", "qfilters", "sink", "snapkv", "tova", "triattention")
CUTTERS = [(name, interval) for name in METHODS for interval in (1, 4)]
CUTTERS += [("h2o", 1), ("h2o", 4), ("h2o max", 1), ("h2o max", 7), ("h2o", 40), ("sink original", 1)]
CUTTERS += [("triattention paper", 4)]
MERGING = {"sinks": 2, "recents": 4, "chunk": 8}
CRITICAL_H2O = {"base": "h2o", "base_args": {"preset": "paper_max"}}
OTHERS = {
    "centroidkv": ("centroidkv", MERGING),
    "centroidkv, one chunk": ("centroidkv", MERGING | {"chunk": None}),
    "centroidkv, as published": ("centroidkv", {}),  # more sinks and recent rows than the quota
    "criticalkv": ("criticalkv", {}),
    "criticalkv over h2o": ("criticalkv", CRITICAL_H2O),
    "andpro": ("andpro", {}),
    "andpro official_code": ("andpro", {"preset": "official_code"}),
    "random": ("random", {}),
}
"""Methods that merge rows, select in two stages, count rows in the order of the text, or ask for seeds."""
CUTTERS += [(name, interval) for name in OTHERS for interval in (1, 7)]
QUICK_CUTTERS = [
    ("centroidkv", 7),
    ("criticalkv over h2o", 7),
    ("cake", 4),
    ("keydiff", 1),
    ("snapkv", 4),
    ("h2o max", 7),
    ("h2o", 40),
    ("sink original", 1),
]
QUICK_CUTTERS += [("triattention paper", 4)]


@pytest.mark.parametrize(
    ("method", "interval"), [own if own in QUICK_CUTTERS else only_in_full(*own) for own in CUTTERS]
)
def test_a_step_that_cuts_gives_what_the_modules_give(method, interval):
    answer_across_cuts(tiny("short"), method, "uniform", interval)


def answer_across_cuts(model, method, allocator, interval, budget=0.3):
    if method in OTHERS:
        method, more = OTHERS[method]
    else:
        method, _, preset = method.partition(" ")
        more = {"preset": {"max": "paper_max"}.get(preset, preset)} if preset else {}
    if allocator == "ada" and method == "tova":
        more = {"scope": "group"}  # by default all heads have the same scores
    choice = choice_of(method, allocator, decoding=True, decode_interval=interval, **more)
    modules, step = make_contexts(model, choice, budget, batch=2)
    for tokens, by_step in ((CHUNK + 6, True), (2, False), (9, True)):  # the second is too short for a graph
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert (modules.decoding, step.decoding) == ("modules", "graph" if by_step else "modules")
        assert_same(modules, step)
        assert torch.allclose(modules.logits, step.logits, atol=1e-4)
    more = ids(5, 9).repeat(2, 1)
    assert torch.allclose(modules.extend(more), step.extend(more), atol=1e-4)


SHARING = [own for own in CUTTERS if own[0] != "sink" and "centroidkv" not in own[0] and own[1] != 40]
"""Cutters whose heads can share a layer's rows: those that rotate by slots or have no scores cannot."""


@pytest.mark.parametrize("cutter", choose_quick(SHARING, ("criticalkv over h2o", 7), ("keydiff", 1)), ids=str)
def test_heads_that_share_a_layer_unevenly_give_what_the_modules_give(cutter):
    method, interval = cutter
    answer_across_cuts(make_exact("short"), method, "ada", interval)


@pytest.mark.parametrize("more", [{"preset": "kvpress"}, *map(only_in_full, ({"alpha": 0}, {"alpha": 1.0}))])
@pytest.mark.parametrize("budget", [0.1, *map(only_in_full, (2, 5, 0.9))])  # less than is protected, one row a head
def test_rows_are_shared_where_hardly_any_head_has_what_it_protects(budget, more):
    choice = choice_of("snapkv", build_allocator("ada", **more), decoding=True, decode_interval=3, window=16)
    modules, step = make_contexts(make_exact("short"), choice, budget, batch=2)
    for tokens in (CHUNK + 6, 9):
        answers = [list(context.generate(tokens, Sampling(), frozenset())) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert_same(modules, step)


def test_samples_that_share_rows_among_layers_differently_give_what_the_modules_give():
    choice = choice_of("snapkv", build_allocator("cake", window=4), model="llama", decoding=True, decode_interval=5)
    modules, step = make_contexts(make_exact("llama"), choice, batch=2)
    assert any(len(set(layer.rows.counts().flatten().tolist())) > 1 for layer in step.own_layers)
    answers = [list(context.generate(CHUNK + 9, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
    assert_same(modules, step)


KVPRESS = {"preset": "decode_kvpress", "decode_size": 18}
CRITICAL = {"decoding": True, "decode_interval": 6}
WATCHERS = {
    "h2o": {"decode_interval": 6},
    "h2o, of each query head": {"preset": "paper_max", "decode_interval": 21},
    "criticalkv": CRITICAL,
    "criticalkv, over h2o": {"decoding": True, "decode_interval": 7} | CRITICAL_H2O,
    "criticalkv, over expected_attention": CRITICAL
    | {"base": "expected_attention", "base_args": {"preset": "decode", "buffer": 20, "use_vnorm": False}},
    "criticalkv, over expected_attention as kvpress": CRITICAL
    | {"base": "expected_attention", "base_args": {"preset": "decode_kvpress", "buffer": 5, "use_vnorm": False}},
    "criticalkv, over rkv": CRITICAL | {"base": "rkv", "base_args": {"window": 6}},
    "expected_attention": {"preset": "decode", "buffer": 20, "decode_interval": 5},
    "expected_attention, the prompt's queries leave": {"preset": "decode", "buffer": 7, "decode_interval": 21},
    "expected_attention, all queries": {"preset": "decode", "buffer": 60, "decode_interval": 9},
    "expected_attention, few queries yet": {"preset": "decode", "buffer": 76, "decode_interval": 5},
    "expected_attention at every token": {"preset": "decode", "buffer": 8, "decode_interval": 1},
    "expected_attention as kvpress": KVPRESS | {"buffer": 5, "decode_interval": 13},
    "expected_attention as kvpress, all passes": KVPRESS | {"buffer": 50, "decode_interval": 9},
    "expected_attention as kvpress, more rows": KVPRESS | {"buffer": 5, "decode_interval": 6, "decode_size": 22},
    "expected_attention as kvpress, few passes": KVPRESS | {"buffer": 5, "decode_interval": 3},
    "rkv": {"window": 6, "decode_interval": 5},
    "rkv, queries from before the last cut": {"window": 8, "decode_interval": 3},
    "rkv, the answer's queries leave": {"window": 4, "decode_interval": 21},
    "rkv at every token": {"window": 4, "decode_interval": 1},
    "rkv, few queries yet": {"window": 76, "decode_interval": 5},
}
OFTEN = ("h2o", "criticalkv, over rkv", "expected_attention", "expected_attention as kvpress")


@pytest.fixture
def captured(monkeypatch):
    """Let each kind of step be taken once before the first one that counts, as capturing does on a GPU."""
    own = GraphDecoder.back

    def back(decoder, step):
        if not decoder.read and not decoder.ahead:
            for cuts in {decoder.rows.cuts(number) for number in range(decoder.left)}:
                own(decoder, 0)
                decoder.one(cuts)
        return own(decoder, step)

    monkeypatch.setattr(GraphDecoder, "back", back)


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("name", choose_quick(WATCHERS, *OFTEN))
def test_a_method_that_watches_sees_every_token(name, block, captured):
    answer_watched(make_double("short"), name, "uniform", block)


@pytest.mark.full
@pytest.mark.parametrize("name", [own for own in WATCHERS if "as kvpress, more rows" not in own])
def test_a_method_that_watches_sees_every_token_of_heads_that_share_rows(name, captured):
    answer_watched(make_exact("short"), name, "ada")


def answer_watched(model, name, allocator, block=None):
    """Answers begin between two cuts too, and are stopped where the graph has read ahead."""
    choice = choice_of(name.partition(" ")[0].strip(","), allocator, **WATCHERS[name])
    modules, step = make_contexts(model, choice, batch=2, block=block)
    assert choice.method.watches
    quick = name in OFTEN
    for tokens, path in ((CHUNK + (9 if quick else 18), "graph"), (3, "modules"), (9 if quick else 12, "graph")):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == path
        assert_same(modules, step)
    for end in (1, CHUNK + 8):
        answers = [context.generate(40, Sampling(), frozenset()) for context in (modules, step)]
        assert torch.equal(*(torch.stack([next(answer) for _ in range(end)]) for answer in answers))
        for answer in answers:
            answer.close()
        assert step.decoding == ("graph" if end > 1 else "modules")
        assert_same(modules, step)
    found = [context.extend(ids(4, 9).repeat(2, 1)) for context in (modules, step)]  # one pass of four tokens
    answers = [
        list(context.generate(CHUNK + (5 if quick else 8), Sampling(), frozenset(), True))
        for context in (modules, step)
    ]
    assert torch.allclose(*found, atol=1e-4) and torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
    assert_same(modules, step)


@pytest.mark.parametrize("sinks", [0, only_in_full(4), 14])
def test_protected_rows_that_have_no_room_are_counted(sinks, monkeypatch):
    """A cut while decoding gives up more than the cut of the prompt. Tokens decoded ahead do not count."""
    monkeypatch.setattr(SnapKV, "protect_sinks", lambda own, seen, rows, quota: rows.places < sinks if sinks else None)
    choice = choice_of("snapkv", window=90, decoding=True, decode_interval=55)
    modules, step = make_contexts(tiny("short"), choice, 10, batch=2)
    before = [dict(layer.tally.given_up) for layer in step.own_layers]
    for end, more in ((54, False), (3, True)):
        answers = [context.generate(65, Sampling(), frozenset()) for context in (modules, step)]
        assert torch.equal(*(torch.stack([next(answer) for _ in range(end)]) for answer in answers))
        for answer in answers:
            answer.close()
        assert_same(modules, step)
        now = [dict(layer.tally.given_up) for layer in step.own_layers]
        assert (now != before) == more


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize(
    "name",
    [
        "h2o",
        *map(only_in_full, ("criticalkv", "criticalkv, over rkv", "expected_attention", "rkv")),
        "expected_attention as kvpress",
    ],
)
def test_a_method_that_watches_sees_the_tokens_before_the_first_cut(name, block, captured):
    """Answers that end before it, and one that goes on behind it, between cuts that evict nothing."""
    settings = WATCHERS[name] | {"decode_interval": 9, "decode_size": 106}
    choice = choice_of(name.partition(" ")[0].strip(","), **settings)
    modules, step = make_contexts(make_double("short"), choice, 1.0, batch=2, block=block)
    for tokens, path in ((CHUNK + 6, "graph"), (3, "modules"), (12, "graph"), (32, "graph")):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == path
        assert_same(modules, step)
        assert modules.bytes().state == step.bytes().state
        if tokens == 3:
            undone = [context.generate(30, Sampling(), frozenset()) for context in (modules, step)]
            assert torch.equal(*(torch.stack([next(answer) for _ in range(5)]) for answer in undone))
            for answer in undone:
                answer.close()
            assert step.decoding == "graph"
            assert_same(modules, step)
    assert all(layer.tally.evicted is not None for layer in step.own_layers)


class Sparing(ExpectedAttention):
    """Never cuts the first layer, and remembers its queries since the last cut as those of the others."""

    def skips_layer(self, layer: int, layers: int) -> bool:
        return layer == 0


def test_a_method_remembers_of_a_spared_layer_what_came_since_the_last_cut_of_the_others():
    """Also if an answer begins between two cuts."""
    settings = load_settings("method", "expected_attention", KVPRESS | {"buffer": 5, "decode_interval": 6})
    method, rest = Sparing(**vars(build("method", settings))), choice_of("full")
    modules, step = make_contexts(make_double("short"), choose_cache(method, rest.allocator, rest.codec))
    for tokens, since in ((9, 3), (10, 1)):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert [layer.state.layer["passes"] for layer in step.own_layers] == [(1,) * since] * 2
        assert_same(modules, step)
    assert [layer.rows.longest_head for layer in step.own_layers] == [60 + 19, 18 + 1]


def test_a_method_that_does_not_cut_an_answer_remembers_none_of_its_queries():
    choice = choice_of("expected_attention", preset="decode_kvpress", decoding=False, decode_size=None)
    modules, step = make_contexts(tiny("short"), choice)
    before = modules.bytes().state
    answers = [list(context.generate(20, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers)) and (modules.decoding, step.decoding) == ("modules", "graph")
    assert modules.bytes().state == step.bytes().state == before
    assert_same(modules, step)


READERS = {
    "pages": ("quest", {"page": 4, "dense_layers": 1}),
    "the newest page": ("quest", {"page": 4, "preset": "cuda", "dense_layers": 0}),
    "last": ("omnikv", {"preset": "reference", "filters": [0], "wait": 0}),
    "softmax": ("omnikv", {"preset": "reference", "filters": [0, 1], "wait": 1, "selector": "softmax_last"}),
    "window": ("omnikv", {"preset": "reference", "filters": [0], "wait": 0, "selector": "exp", "window": 5}),
    "codes": ("pqcache", {"sinks": 3, "least": 0, "bits": 4}),
    "a growing number of rows": ("deltakv", {"full_layers": [0], "depth": None, "sinks": 3, "recent": 8}),
    "two observation layers": ("deltakv", {"full_layers": [0, 1], "depth": None, "sinks": 3, "recent": 8}),
}


@pytest.mark.parametrize(
    "name", choose_quick(READERS, "the newest page", "softmax", "window", "codes", "a growing number of rows")
)
def test_a_step_that_attends_to_few_rows_gives_what_the_modules_give(name):
    method, more = READERS[name]
    modules, step = make_contexts(tiny("short"), choice_of(method, **more), batch=2)
    for tokens, read_last in ((CHUNK + 9, True), (7, False), (CHUNK + 4, True)):  # the second is too short for a graph
        answers = [list(context.generate(tokens, Sampling(), frozenset(), read_last)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert step.decoding == ("modules" if tokens == 7 else "graph")
        assert_same(modules, step)
        assert torch.allclose(modules.logits, step.logits, atol=1e-4)
    assert any(rows % 1 or rows < step.seen for layer in step.own_layers for rows in layer.attended)  # not all rows
    stop = next(token for token in answers[0][CHUNK + 3].tolist() if token >= 0)
    answers = [list(context.generate(16, Sampling(), frozenset([stop]), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert_same(modules, step)
    more_ids = ids(5, 9).repeat(2, 1)
    assert torch.allclose(modules.extend(more_ids), step.extend(more_ids), atol=1e-4)


@pytest.mark.parametrize("behind", [{"method": "keydiff"}, only_in_full({"method": "h2o", "decode_interval": 34})])
def test_an_answer_that_will_be_forgotten_goes_on_where_the_rows_of_a_graph_end(behind):
    """Behind the first cut the modules, or other rows, read what follows from all rows and windows of the first part.

    The answer is not one whose rows are needed when it is over.
    """
    tokens = 44
    both = make_contexts(make_double("gemma3"), choice_of(**behind), 60 + 33)
    (answer, counts), (other, others) = (run_alone(forget(context, tokens)) for context in both)
    assert torch.equal(answer, other) and counts == others and both[1].decoding == "graph"


def test_queries_are_remembered_even_if_a_quota_holds_the_whole_prompt():
    modules, step = make_contexts(tiny("short"), choice_of(READERS["window"][0], **READERS["window"][1]), 60)
    answers = [list(context.generate(20, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
    known, found = (context.own_layers[0].state.layer["queries"] for context in (modules, step))
    assert torch.allclose(known, found, atol=1e-4)


GROWING = Budget(0.3, "seen")
FOURS = {"decoding": True, "decode_interval": 4}
VARYING = {
    "a growing quota": ({"method": "keydiff", "recent": 0.2}, GROWING),
    "a growing quota, rows per query head": ({"method": "h2o", "preset": "paper_max"}, GROWING),
    "a growing quota, slots as positions": ({"method": "sink"}, GROWING),
    "a growing quota, neighbours in the text": ({"method": "cake", "decoding": True}, GROWING),
    "a cache that fills": ({"method": "sink", "preset": "original", "decode_size": 67}, 0.9),
    "a cache that fills and is protected too much": (FILLING | {"recent": 40}, 0.3),
    "layers of a pyramid": ({"method": "tova", "allocator": "pyramid"}, 0.3),
    "layers of a growing pyramid": ({"method": "snapkv", "allocator": "pyramid", "decoding": True}, GROWING),
    "layers that differ by sample": ({"method": "cake", "allocator": "cake", "decoding": True}, 0.3),
    "layers that differ by sample and grow": ({"method": "h2o", "allocator": "cake"}, GROWING),
    "heads that stream and heads that keep everything": ({"method": "duo_attention", "decoding": True}, 0.7),
    "heads that stream once they have 66 rows": (STREAMING | {"sinks": 4, "recent": 62}, 0.5),
    "heads of which all stream": ({"method": "duo_attention", "decoding": True}, 6),
    # not the first layer alone, in which keys of equal tokens have equal norms but for rounding
    "a layer that is spared": ({"method": "knorm", "skip_layers": [0], "decoding": True}, 0.3),
    "a pyramid, cut after four tokens": ({"method": "snapkv", "allocator": "pyramid", **FOURS}, 0.3),
    "a watched pyramid, cut after four tokens": ({"method": "h2o", "allocator": "pyramid", **FOURS}, 0.3),
    "a spared layer, the others cut after four tokens": ({"method": "knorm", "skip_layers": [0], **FOURS}, 0.3),
    "a growing quota, cut after four tokens": ({"method": "keydiff", "recent": 0.2, **FOURS}, GROWING),
    "a growing quota, seen at every token": ({"method": "criticalkv", **FOURS}, GROWING),
    "a growing pyramid, cut after four tokens": ({"method": "snapkv", "allocator": "pyramid", **FOURS}, GROWING),
    "layers that differ by sample, cut after four tokens": ({"method": "h2o", "allocator": "cake", **FOURS}, 0.3),
    "layers that differ by sample and grow, cut after four tokens": (
        {"method": "h2o", "allocator": build_allocator("cake", window=4), **FOURS},
        GROWING,
    ),
    "heads that share a growing quota": ({"method": "h2o", "allocator": "ada", **FOURS}, GROWING),
    "heads that share a growing quota, cut at every token": (
        {"method": "snapkv", "allocator": "ada", "decoding": True},
        GROWING,
    ),
    "heads that share a growing quota, safe rows": (
        {"method": "snapkv", "allocator": build_allocator("ada", preset="kvpress"), **FOURS},
        GROWING,
    ),
    "spared layers and heads that share": (
        {"method": "knorm", "skip_layers": [0], "allocator": "ada", **FOURS},
        0.3,
    ),
    "spared layers and a growing quota": ({"method": "knorm", "skip_layers": [0, 2], "decoding": True}, GROWING),
}


QUICK = (
    "a growing quota, slots as positions", "a cache that fills and is protected too much",
    "layers that differ by sample and grow",
    "heads that stream once they have 66 rows", "spared layers and a growing quota",
    "a growing quota, cut after four tokens", "heads that share a growing quota, safe rows",
    "a watched pyramid, cut after four tokens", "a spared layer, the others cut after four tokens",
)  # fmt: skip


def assert_same_to_the_last_count(one, other):
    """Two contexts hold the same, in the same parts, and their records say so."""
    assert_same(one, other)
    for layer, another in zip(one.own_layers, other.own_layers, strict=True):
        known, found = layer.rows, another.rows
        for name in ("even", "tail", "longest", "shape"):
            assert getattr(known, name) == getattr(found, name), name
        assert (known.lengths is None) == (found.lengths is None)
        assert known.lengths is None or torch.equal(known.lengths, found.lengths)
        columns, others = known.view().columns, found.view().columns
        assert all(torch.allclose(own, others[name], atol=1e-4) for name, own in columns.items())
        assert (layer.bytes().rows, layer.bytes().metadata) == (another.bytes().rows, another.bytes().metadata)
        assert int(layer.tally.protected) == int(another.tally.protected)
        assert {kind: int(own) for kind, own in layer.tally.given_up.items()} == {
            kind: int(own) for kind, own in another.tally.given_up.items()
        }


@pytest.mark.parametrize("name", choose_quick(VARYING, *QUICK))
def test_heads_layers_and_tokens_may_have_quotas_of_their_own(name):
    chosen, budget = VARYING[name]
    modules, step = make_contexts(make_double("llama"), choice_of(**chosen, model="llama"), budget, batch=2)
    lengths = (CHUNK + 4, 3) if name in QUICK else (CHUNK + 9, 7, 12)
    for tokens in lengths:
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers))
        assert step.decoding == ("graph" if tokens >= WORTH else "modules")
        assert_same_to_the_last_count(modules, step)
        assert torch.allclose(modules.logits, step.logits, atol=1e-4)
    found = [(*answer_with_interruptions(context, CHUNK + 2, 2), context.logits) for context in (modules, step)]
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(found[0][1:], found[1][1:], strict=True))
    assert_same_to_the_last_count(modules, step)


def test_heads_that_stream_take_no_room_for_the_answer(monkeypatch):
    """Neither do layers in which no head streams, whose rows are not copied."""
    made = []
    own = GraphDecoder.__init__
    monkeypatch.setattr(GraphDecoder, "__init__", lambda *args: (made.append(args[2]), own(*args))[1])
    _, step = make_contexts(tiny("llama"), choice_of(**STREAMING, model="llama"), 0.5)
    list(step.generate(20, Sampling(), frozenset()))
    replaced, appended = made[0].kinds
    alpha = torch.tensor(step.choice.method.pattern.alpha)
    streaming = (alpha <= alpha.flatten().sort().values[1]).sum(1)  # of each layer's two heads
    assert set(streaming.tolist()) == {0, 1}
    assert {own.shape[1] for own in replaced.rows} == {10 + 80}  # each with the next token's
    assert replaced.indices == streaming.nonzero().flatten().tolist()
    assert appended.indices == (streaming == 0).nonzero().flatten().tolist()


def test_quotas_are_those_of_a_loop_over_tokens():
    """Also where a quota falls by a row, which ends what a graph can read."""
    _, context = make_contexts(tiny("llama"), choice_of("tova", "pyramid"), batch=2)
    layers = context.own_layers
    for nominal in ([18] * 9, [*range(18, 30)], [18, 19, 19, 25, 25, 25, 25, 25, 25], [19, 19, 20, 20, 18, 18]):
        plan = find_answer_quotas(layers, nominal)
        rows = [layer.rows.longest_head for layer in layers]
        for token, mean in enumerate(nominal):
            quotas = [layer.find_quota_ahead(mean) for layer in layers]
            assert all(sum(own) == 3 * mean for own in zip(*quotas, strict=True))
            before, rows = rows, [min(held + 1, own[0]) for held, own in zip(rows, quotas, strict=True)]
            if any(held < own for held, own in zip(rows, before, strict=True)):
                assert plan.tokens == token
                break
            assert plan.rows[token + 1].flatten().tolist() == rows
            cut = [held + 1 > own[0] for held, own in zip(before, quotas, strict=True)]
            expected = [own[0] if is_cut else NEVER for own, is_cut in zip(quotas, cut, strict=True)]
            assert plan.quotas[token].flatten().tolist() == expected
        else:
            assert plan.tokens == len(nominal)


GROWING_READERS = {name: READERS[name] for name in ("pages", "softmax", "codes", "a growing number of rows")}


@pytest.mark.parametrize("name", choose_quick(GROWING_READERS, "pages"))
def test_a_growing_quota_of_rows_to_read_has_a_graph_for_each_of_its_numbers(name):
    """Of 60 tokens and an answer a tenth grows every ten tokens, and 30 % too soon for a graph."""
    method, more = GROWING_READERS[name]
    for share, path in ((0.1, "graph"), (0.3, "modules")):
        contexts = make_contexts(make_double("short"), choice_of(method, **more), Budget(share, "seen"), 2)
        for tokens in (25, 12):
            answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in contexts]
            assert torch.equal(*map(torch.stack, answers)) and contexts[1].decoding == path
            assert_same(*contexts)


def test_a_full_budget_attends_to_all_rows_and_one_that_grows_fast_is_the_modules_affair():
    for budget, path in ((Budget(1.0), "graph"), (Budget(0.3, "seen"), "modules")):
        modules, step = make_contexts(tiny("short"), choice_of("quest", page=4))
        for context in (modules, step):
            context.budget = budget
        answers = [list(context.generate(20, Sampling(), frozenset())) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == path
        assert_same(modules, step)
        assert torch.allclose(modules.extend(ids(5, 9)), step.extend(ids(5, 9)), atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "budget"), [(60, 1.0), (60, 9), (60, 63), (5, 0.5), (20, 0.02)],
    ids=["no budget", "a number of rows", "as many as candidates", "no candidates at first", "none of them at first"],
)  # fmt: skip
def test_few_candidates_are_chosen_among_as_by_the_modules(prompt, budget):
    more = {"full_layers": [0], "depth": None, "sinks": 3, "recent": 8}
    modules, step = make_contexts(make_double("short"), choice_of("deltakv", **more), budget, 2, prompt=prompt)
    for tokens in (CHUNK + 6, 30 if budget == 0.02 else 12):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert_same(modules, step)


def test_counts_of_rows_attended_to_are_exact():
    """A batch of 32 heads reads 2^24 rows together at 524,288 rows a head, and float32 counts no further."""
    _, step = make_contexts(tiny("short"), choice_of("quest", page=4, dense_layers=0))
    with torch.no_grad():
        reader = make_reader(step.weights, step.own_layers, 8, 20, None)
        rows = ReadRows(step.weights, [step.own_layers], 8, reader)
        rows.listing.add(1)
        rows.counts[1, 0] = (1 << 24) + 5  # of six query heads
        rows.keep(1)
    assert step.own_layers[1].attended == [2796203.5]


@pytest.mark.parametrize("interval", [1, only_in_full(8)])
def test_rows_grow_to_the_size_that_an_answer_is_cut_to(interval, monkeypatch):
    """By a step that appends, one token of the modules' with the first cut, and by a step that cuts."""
    made = []
    own = GraphDecoder.__init__
    monkeypatch.setattr(GraphDecoder, "__init__", lambda *args: (made.append(*map(type, args[2].kinds)), own(*args))[1])
    choice = choice_of("keydiff", decoding=True, decode_interval=interval, decode_size=95)
    modules, step = make_contexts(tiny("short"), choice, 1.0)
    answers = [list(context.generate(50, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert made == [AppendedRows, ReplacedRows if interval == 1 else FixedQuotaRows]
    assert_same(modules, step)
    modules, step = make_contexts(tiny("short"), choice, 1.0)
    for context in (modules, step):  # ended before the first cut that takes anything
        list(context.generate(33, Sampling(), frozenset()))
    assert_same(modules, step)


def test_nothing_is_cut_at_a_full_budget():
    modules, step = make_contexts(tiny("short"), choice_of("keydiff"), 1.0)
    answers = [list(context.generate(20, Sampling(), frozenset())) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
    assert_same(modules, step)


@pytest.mark.parametrize("allocator", ["uniform", only_in_full("ada")])
def test_scores_that_are_no_numbers_raise_at_their_token(allocator, monkeypatch):
    choice = choice_of("keydiff", allocator)
    _, step = make_contexts(tiny("short"), choice)
    score, calls = type(choice.method).score, []

    def broken(self, *args):
        calls.append(args)
        found = score(self, *args)
        return found * torch.nan if len(calls) > 6 * len(step.own_layers) else found

    monkeypatch.setattr(type(choice.method), "score", broken)
    answer = step.generate(40, Sampling(), frozenset())
    assert len([next(answer) for _ in range(7)]) == 7
    with pytest.raises(ContractError, match="method=keydiff: score returned NaN"):
        next(answer)
    assert {layer.rows.seen for layer in step.own_layers} == {
        step.seen
    }  # the token at fault counts in both, or in none


@pytest.mark.parametrize(
    ("settings", "budget"),
    [(MERGING, 0.02), only_in_full(MERGING | {"sinks": 40}, 0.3), only_in_full(MERGING | {"sinks": 0}, 4)],
    ids=["one row", "fewer rows than sinks", "as many rows as recent ones"],
)
def test_rows_are_merged_where_hardly_any_is_left(settings, budget):
    modules, step = make_contexts(make_double("short"), choice_of("centroidkv", **settings, decode_interval=5), budget)
    for tokens in (CHUNK + 6, 9):  # each ends between two cuts
        answers = [list(context.generate(tokens, Sampling(), frozenset())) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert_same(modules, step)
    held = [layer.rows for layer in step.own_layers]
    assert all(int(own.mass.sum()) + 2 * own.tail == 2 * own.seen for own in held)  # of two heads, and no token is lost


def test_keys_that_are_no_numbers_raise_what_the_modules_raise():
    model, errors = make_fresh("short"), []
    both = make_contexts(model, choice_of("centroidkv", decode_interval=5, **MERGING))
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(torch.nan)
    for context in both:
        with pytest.raises(NumericalError) as raised:
            list(context.generate(12, Sampling(), frozenset()))
        errors.append((str(raised.value), context.seen))
    assert errors[0] == errors[1]


@dataclass(frozen=True)
class Miscounting(Method):
    """Keeps the newest rows, and from some position on a row more or less than its quota."""

    more: int = 0

    captured = Captured()

    def score(self, observation, rows, state):
        return rows.places.to(rows.mass.dtype)

    def cut(self, rows, scores, quotas, protected, each=None):
        wrong = rows.places.amax(-1) >= 72
        return rows.without(~self.select(scores, quotas + self.more * wrong))


@pytest.mark.parametrize(
    ("more", "allocator"), [(1, "uniform"), *(only_in_full(*own) for own in ((-1, "uniform"), (1, "ada"), (-1, "ada")))]
)
def test_a_cut_that_leaves_a_wrong_number_of_rows_raises_as_in_the_modules(more, allocator):
    method = Miscounting("miscounting", decoding=True, decode_interval=5, more=more)
    rest = choice_of("knorm", allocator)
    found = []
    for context in make_contexts(tiny("short"), choose_cache(method, rest.allocator, rest.codec)):
        answer, tokens = context.generate(30, Sampling(), frozenset()), []
        with pytest.raises(ContractError, match="a number of rows that differs from the quota of a head"):
            for token in answer:
                tokens.append(token)
        found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 15


@pytest.mark.parametrize("chosen", [APPENDING, CUTTING, *map(only_in_full, (CUTTING_FIVES, WATCHING)), FILLING])
def test_sampled_tokens_are_the_same_too_and_a_second_answer_continues_the_draws(chosen):
    both = make_contexts(tiny("short"), choice_of(**chosen), batch=2)
    sampling, answers = Sampling(0.9, 0.95), []
    for context in both:
        with context.branch():
            whole = torch.stack(list(context.generate(20, sampling, frozenset())))
        parts = [*context.generate(9, sampling, frozenset(), True), *context.generate(11, sampling, frozenset())]
        assert torch.equal(whole, torch.stack(parts))
        answers.append(whole)
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    "chosen", [only_in_full({"method": "keydiff"}), {"method": "h2o"}, {"method": "snapkv", "decoding": True}]
)
def test_what_is_done_again_gives_the_same_bits(chosen):
    """Rows return to the slots in which they lay, so sums are done in the same order."""
    found = []
    for planned in (CHUNK + 5, 3 * CHUNK):  # the second decodes beyond what is read of it
        _, step = make_contexts(tiny("short"), choice_of(**chosen), batch=2)
        answer = step.generate(planned, Sampling(), frozenset())
        tokens = torch.stack([next(answer) for _ in range(CHUNK + 5)])
        answer.close()
        assert step.seen == 60 + CHUNK + 4 and step.decoding == "graph"
        found.append((tokens, step.logits, *(layer.rows.view().places for layer in step.own_layers)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("heads", "budget"), [(2, 0.02), (1, 0.3)], ids=["one row", "one head"])
@pytest.mark.parametrize("method", ["tova", only_in_full("centroidkv")])
def test_what_layers_got_stays_when_later_tokens_are_undone(method, heads, budget):
    """Also where the rows to hand over lie together, as those of one head do, or one row of each."""
    more = MERGING if method == "centroidkv" else {}
    choice = choice_of(method, decoding=True, decode_interval=5, **more)
    modules, step = make_contexts(qwen2(heads), choice, budget)
    found = []
    for context in (modules, step):
        answer = context.generate(3 * CHUNK, Sampling(), frozenset())
        found.append(torch.stack([next(answer) for _ in range(CHUNK + 5)]))
        answer.close()
    assert torch.equal(*found) and step.decoding == "graph"
    assert_same(modules, step)
    assert torch.allclose(modules.logits, step.logits, atol=1e-4)
    assert modules.bytes().rows == step.bytes().rows


def test_between_two_cuts_a_graph_reads():
    """Of heads of several lengths, which no step cuts. An answer may begin between two cuts too."""
    choice = choice_of("knorm", "ada", decoding=True, decode_interval=34)
    modules, step = make_contexts(tiny("short"), choice)
    for tokens, cuts in ((70, 2), (34, 3)):  # the last token of an answer is not read: 2 * 34 + 1 tokens, then 33 more
        answers = [list(context.generate(tokens, Sampling(), frozenset())) for context in (modules, step)]
        assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
        assert all(layer.tally.evicted.double().mean() == (60 - 18) + 34 * cuts for layer in step.own_layers)
        assert_same(modules, step)


@pytest.mark.parametrize(("chosen", "rows"), [(APPENDING, 19), (CUTTING, 1), (CUTTING_FIVES, 5), (WATCHING, 5)])
def test_room_for_an_answer_is_counted_before_it_begins(chosen, rows):
    for context in make_contexts(tiny("short"), choice_of(**chosen)):
        context.reserve(20)
        assert context.bytes().headroom == rows * sum(layer.token_bytes for layer in context.own_layers)
        assert len(list(context.generate(20, Sampling(), frozenset()))) == 20
        assert context.bytes().headroom == 0  # all of it was used, or cut, and no more was made


def test_what_more_than_appends_may_decode_in_a_graph_of_its_own():
    for method, more in (("quest", {}), ("sink", {}), ("h2o", {"decoding": True})):
        assert not only_appends(choice_of(method, **more)) and decodes_in_graph(choice_of(method, **more))
    assert not decodes_in_graph(choice_of("quest", codec="kivi"))
    assert only_appends(choice_of("h2o", decoding=False)) and only_appends(choice_of("tova"))


def test_models_that_are_not_plain_have_no_weights_for_a_step():
    model = qwen2()
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert collect_weights(model) is None
    model = qwen2()
    weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight.data.mT.contiguous().mT)
    assert collect_weights(model) is None


def test_phi_3_gives_rows_of_its_own_parameters():
    model = tiny("phi3")
    for layer, block in zip(model.model.layers, collect_weights(model).blocks, strict=True):
        for whole, parts in (
            (layer.self_attn.qkv_proj.weight, [linear.weight for linear in block.attention.project]),
            (layer.mlp.gate_up_proj.weight, (block.mlp.gate.weight, block.mlp.up.weight)),
        ):
            assert torch.equal(torch.cat(parts), whole) and all(part.is_contiguous() for part in parts)
            assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)


def test_frequencies_that_follow_the_longest_place_are_left_to_the_modules():
    """The step turns all places of an answer at once, also those that it ends before."""
    for kind in (
        {"rope_type": "dynamic"},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ):
        rope = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, **kind}
        assert collect_weights(qwen2(rope_parameters=rope)) is None
    assert collect_weights(qwen2()) is not None


def test_rows_in_the_order_of_the_text_are_copied_as_any_others(monkeypatch):
    """`take_in_order` leaves what `take_rows` leaves, each called twice."""
    [_, context] = make_contexts(make_double("short"), choice_of(method="keydiff", decoding=True))
    plan = find_answer_quotas(context.own_layers, [18, 18])
    found = []
    for fast in (True, False):
        rows = ReplacedRows(context.weights, [context.own_layers], 2, [plan])
        assert all(rows.takes_in_order(index, layer, 18) for index, layer in enumerate(rows.layers))
        with monkeypatch.context() as patch:
            if not fast:
                patch.setattr(ReplacedRows, "takes_in_order", lambda *_: False)
            for _ in range(2):
                rows.back(0)
        held = [rows.padded(index)[:, :, :, :18] for index in range(len(rows.layers))]
        found.append([*held, *rows.places, *rows.ranks, *rows.mass, rows.free, rows.lengths])
    assert all(map(torch.equal, *found))


def test_what_a_reader_reads_beside_attention_lasts_until_it_is_read(monkeypatch):
    """A watcher's numbers: their memory may get no other use before the stream waits for the watcher."""
    tables, alive = [], []
    top_k, settle = deltakv.top_k_of_heads, Beside.settle

    def watch(products, k, *, window, counts, into):
        tables.append(weakref.ref(counts))
        return top_k(products, k, window=window, counts=counts, into=into)

    def look(self):
        alive.extend(table() is not None for table in tables)
        tables.clear()
        settle(self)

    monkeypatch.setattr(deltakv, "top_k_of_heads", watch)
    monkeypatch.setattr(Beside, "settle", look)
    more = {"full_layers": [0], "depth": None, "sinks": 3, "recent": 8}
    _, step = make_contexts(make_double("short"), choice_of("deltakv", **more), 0.3, 2, prompt=60)
    list(step.generate(9, Sampling(), frozenset(), True))
    assert len(alive) >= 8 and all(alive)
