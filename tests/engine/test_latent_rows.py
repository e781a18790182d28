"""A step over latents of Palu, which makes no rows of them, gives what the modules give."""

import pytest
import torch

from kvbench.cache.policy import choose_cache
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from tests.support.answer_paths import (
    LONG,
    assert_same,
    assert_same_answers,
    assert_same_storage,
    make_contexts,
)
from tests.support.method_files import build_policy
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_exact


def read_prompts(
    method="full", model="llama3", allocator="uniform", budget=0.3, batch=2, more=None, bits=None, **codec
):
    """Two contexts, of which the second one answers through the step."""
    codec = build_palu(find_palu(model, **(codec or dict(removed=0.7))), bits=bits)
    choice = choose_cache(*build_policy(method, allocator, model, **(more or {}))[:2], codec)
    own = budget if isinstance(budget, Budget) else Budget(1.0 if method == "full" else budget)
    return make_contexts(make_exact(model), choice, own, batch)


@pytest.mark.cover
@pytest.mark.parametrize("model", ["llama3", "qwen2", "qwen3", *map(only_in_full, ("llama", "phi3"))])
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "ada"), ("tova", "uniform")])
def test_the_step_gives_what_the_modules_give(method, allocator, model):
    """All rows; heads of a group that hold different rows; heads that hold the same ones, with gaps."""
    modules, step = read_prompts(method, model, allocator, more={"decoding": False} if method == "tova" else None)
    held = step.own_layers[0].rows.stored.held
    assert (held is None) == (method != "snapkv" or step.own_layers[0].rows.shape[1] == 1)
    assert_same_answers(modules, step)
    more = ids(5, 9).repeat(2, 1)
    torch.testing.assert_close(modules.extend(more), step.extend(more), rtol=0, atol=1e-9)


@pytest.mark.cover
@pytest.mark.parametrize("bits", [4, only_in_full(3), 2])
@pytest.mark.parametrize(("method", "allocator"), [("full", "uniform"), ("snapkv", "ada")])
def test_rounded_latents_are_read_by_the_step_too(method, allocator, bits):
    modules, step = read_prompts(method, allocator=allocator, bits=bits)
    assert_same_answers(modules, step, lengths=(LONG,))
    assert_same_storage(modules, step)


@pytest.mark.cover
@pytest.mark.parametrize("codec", [dict(group=2, search="fisher"), dict(group=1), dict(removed=0.0)], ids=str)
@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_groups_and_ranks_may_differ(method, codec):
    assert_same_answers(*read_prompts(method, **codec), lengths=(LONG,))


def test_layers_with_a_sliding_window_stand_beside_them():
    modules, step = read_prompts("snapkv", "gemma3")
    answers = [list(context.generate(LONG, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers)) and step.decoding == "graph"
    assert_same(modules, step)
    assert modules.bytes() == step.bytes()


EVERY_TOKEN, FIVES = {"decoding": True}, {"decoding": True, "decode_interval": 5}
CUTS = {
    "other rows of each head": dict(method="keydiff"),
    "the same rows of all heads": dict(method="tova", more=EVERY_TOKEN),
    "heads that stream": dict(method="duo_attention", more=EVERY_TOKEN | {"sparsity": 0.3}),
    "rotated by slot": dict(method="sink", more=EVERY_TOKEN | {"preset": "original"}),
    "log-sum-exps": dict(method="h2o", more=EVERY_TOKEN),
    "rows that grow first": dict(method="h2o", more=EVERY_TOKEN | {"decode_size": 30}),
    "rows that were never cut": dict(method="h2o", budget=1.0, more=EVERY_TOKEN | {"decode_size": 80}),
    "rows that grow": dict(method="tova", budget=Budget(0.3, "seen"), more=EVERY_TOKEN),
    "layers that differ": dict(method="tova", allocator="pyramid", more=EVERY_TOKEN),
    "every few tokens": dict(method="snapkv", more=FIVES),
    "every few tokens, layers that differ": dict(method="snapkv", allocator="pyramid", more=FIVES),
    "columns between cuts": dict(method="h2o", more=FIVES),
    "queries between cuts": dict(method="criticalkv", more=FIVES | {"base": "rkv", "base_args": {"window": 6}}),
    "codes": dict(method="keydiff", bits=4),
    "codes, every few tokens": dict(method="tova", more=FIVES, bits=2),
    "each head alone": dict(method="keydiff", group=1),
    "groups of other ranks": dict(method="keydiff", group=2, search="fisher"),
    "normed keys": dict(method="keydiff", model="qwen3"),
    "biases": dict(method="keydiff", model="qwen2"),
}
"""Rows that a step cuts, and what is special about them."""


@pytest.mark.cover
@pytest.mark.parametrize("name", choose_quick(CUTS, "other rows of each head", "codes, every few tokens"))
def test_a_step_cuts_packed_rows_as_the_modules_do(name):
    """It attends to what latents stand for, and the layers get the latents of the rows that are left."""
    modules, step = read_prompts(**CUTS[name])
    assert_same_answers(modules, step)
    if CUTS[name].get("bits"):
        for layer, other in zip(modules.own_layers, step.own_layers, strict=True):
            assert all(map(torch.equal, layer.rows.stored.tensors(), other.rows.stored.tensors()))
    more = ids(5, 9).repeat(2, 1)
    torch.testing.assert_close(modules.extend(more), step.extend(more), rtol=0, atol=1e-9)


@pytest.mark.parametrize("every, tokens, graphs", [(1, 10, False), (34, 44, True)])
def test_where_heads_share_their_rows_the_modules_cut(every, tokens, graphs):
    """Graphs read the tokens between two cuts that are far apart."""
    more = {"decoding": True, "decode_interval": every, "window": 4}
    modules, step = read_prompts("snapkv", allocator="ada", more=more, batch=1)
    answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert (step.decoding == "graph") is graphs
    assert_same_storage(modules, step)


def test_what_is_left_to_the_modules():
    def choose(method):
        return choose_cache(*build_policy(method, "uniform", "llama")[:2], build_palu(find_palu("llama")))

    assert decodes_in_graph(choose("full")) and not decodes_in_graph(choose("quest"))


def test_room_for_an_answer_is_counted_before_it_begins():
    _, step = read_prompts(batch=1)
    before, ranks = step.bytes().headroom, step.choice.codec.file.ranks
    step.reserve(LONG)
    groups = step.choice.codec.file.groups
    latents = sum(max(own) * groups * (LONG - 1) * 8 for own in ranks.values())
    tables = len(step.own_layers) * groups * (8 + 8 + 8 + 96)  # starts twice, two ranks, twelve addresses
    assert step.bytes().headroom - before == latents + tables
    assert len(list(step.generate(LONG, Sampling(), frozenset()))) == LONG and step.bytes().headroom == 0
