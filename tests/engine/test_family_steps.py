"""Answers of families whose layers are not Llama's: the step gives what the modules give."""

from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.context import has_plain_keys
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.layout import Probe
from kvbench.models.decoder_weights import collect_weights
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.transformers_port import PROBED, read_layout
from tests.support.answer_paths import CHUNK, assert_same, make_contexts
from tests.support.method_files import build_policy
from tests.support.tiny_models import VOCAB

FAMILIES = {
    "granite": dict(residual_multiplier=0.3, embedding_multiplier=12.0, logits_scaling=4.0),
    "olmo2": {},
    "starcoder2": {},
    "apertus": {},
}


@cache
def draw_model(name: str) -> torch.nn.Module:
    config = shrink(CONFIG_MAPPING[name](**FAMILIES[name]))
    config.vocab_size = VOCAB
    model = draw_miniature(config).double()
    PROBED[model] = Probe(name, None, graphs=True)
    return model


@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("method", ["snapkv", "keydiff"])  # which append, and cut at every token
@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_gives_what_the_modules_give(name, method, block):
    modules, step = make_contexts(
        draw_model(name), choose_cache(*build_policy(method, "uniform", "llama")), 0.5, batch=2, block=block
    )
    answers = [list(context.generate(CHUNK + 6, Sampling(), frozenset(), True)) for context in (modules, step)]
    assert torch.equal(*map(torch.stack, answers))
    assert (modules.decoding, step.decoding) == ("modules", "graph")
    assert_same(modules, step)


def test_keys_that_are_normed_together_are_not_those_that_codecs_ask_for():
    for name, plain in (("olmo2", False), ("granite", True)):
        model = draw_model(name)
        assert has_plain_keys(collect_weights(model), read_layout(model)) == plain
