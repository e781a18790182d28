"""A step whose layers rotate in different ways gives what the modules give."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import has_plain_keys
from kvbench.engine.graph_decoding import change_tables, find_layer_angles
from kvbench.engine.repeated_cuts import CutGraph
from kvbench.engine.sampling import Sampling
from kvbench.models.decoder_weights import collect_weights, reorder_block
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.transformers_port import read_layout
from tests.support.answer_paths import CHUNK, assert_same, make_contexts
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick
from tests.support.tiny_models import SLIDING, VOCAB, make_double

TYPES = {
    "smollm3": dict(no_rope_layers=[1, 0, 1], num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "ernie4_5": dict(num_hidden_layers=2),
    "helium": dict(num_hidden_layers=2),
}
METHODS = {  # each takes another kind of rows
    "full": {},
    "knorm": {"decoding": True, "decode_interval": 5},
    "keydiff": {},
    "sink": {"sinks": 2},
    "expected_attention": {"preset": "decode", "buffer": 6, "decode_interval": 5},
}
QUICK = [("smollm3", "sink"), ("smollm3", "expected_attention"), ("ernie4_5", "sink"), ("smollm3", "full")]
EVERY = [(name, method) for name in TYPES for method in METHODS]


@cache
def make_model(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    small = shrink(CONFIG_MAPPING[name](**TYPES[name]))
    small.vocab_size = VOCAB  # of `ids`
    return draw_miniature(small).double()


def answer(*contexts):
    for tokens in (CHUNK + 6, 9):
        answers = [list(context.generate(tokens, Sampling(), frozenset(), True)) for context in contexts]
        assert torch.equal(*map(torch.stack, answers))
        assert [context.decoding for context in contexts] == ["modules", "graph"]
        assert_same(*contexts)


@pytest.mark.parametrize("case", choose_quick(EVERY, *QUICK), ids="-".join)
def test_the_step_gives_what_the_modules_give(case):
    name, method = case
    choice = choose_cache(*build_policy(method, "uniform", "llama", **METHODS[method]))
    contexts = make_contexts(make_model(name), choice, 1.0 if method == "full" else 0.4)
    answer(*contexts)


def test_layers_that_rotate_alike_share_tables():
    weights = collect_weights(make_model("smollm3"))
    first, second, third = find_layer_angles(weights, range(3), 4, 9, torch.zeros(1).double())
    assert first is third and first[0].shape == second[0].shape == (5, 16)
    assert bool((second[0] == 1).all()) and not second[1].any()
    changed = change_tables([first, second, third], torch.neg)
    assert changed[0] is changed[2] and torch.equal(changed[1][0], -second[0])


def test_windows_are_held_in_the_order_of_the_model():
    """A step that has other dimensions first hands transformers' layers its windows, and takes them, in theirs."""
    model = make_double("gemma3")
    contexts = make_contexts(model, choose_cache(*build_policy("full", "uniform", "llama")), 1.0, prompt=2 * SLIDING)
    weights = contexts[1].weights
    half = read_layout(model).dim // 2
    order = torch.cat([torch.arange(half).roll(1), torch.arange(half).roll(1) + half])  # not its own inverse

    def rotate(places, plain):
        return tuple(part[..., order] for part in plain(places))

    orders, blocks, turns = list(weights.orders), list(weights.blocks), list(weights.rotations)
    for index in weights.sliding.layers:
        turn = turns[index]
        orders[index], blocks[index] = order, reorder_block(blocks[index], order)
        turns[index] = lambda places, turn=turn: rotate(places, turn)
    changed = {"orders": tuple(orders), "blocks": tuple(blocks), "rotations": tuple(turns)}
    contexts[1].weights = replace(weights, **changed)
    answer(*contexts)


def test_codecs_of_keys_before_rotation_leave_other_orders_to_the_modules():
    for name, plain in (("smollm3", True), ("ernie4_5", False)):
        weights, layout = collect_weights(make_model(name)), read_layout(make_model(name))
        assert has_plain_keys(weights, layout) == plain
        assert not has_plain_keys(weights, replace(layout, joint_norm=True))


def test_cuts_are_not_repeated_for_layers_that_rotate_otherwise():
    class Block:
        tensors, extras = (), None

        def __init__(self, rotation):
            self.rotation = rotation

    graph = object.__new__(CutGraph)
    graph.block, graph.sources, graph.rows = Block(len), {}, {}
    assert graph.fits([], Block(len)) and not graph.fits([], Block(abs))
