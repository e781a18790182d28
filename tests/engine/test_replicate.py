"""A prompt whose cache is copied to every sample of a batch answers in each of them as it does alone."""

import pytest
import torch

from kvbench.cache.policy import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from kvbench.methods.codecs.kivi import Kivi
from tests.support.delta_files import build_delta
from tests.support.method_files import build_policy
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import only_in_full
from tests.support.tiny_models import tiny

CODECS = {
    "raw": lambda: Codec("raw"),
    "kivi": lambda: Kivi("kivi", bits=4, group=8, residual=16),
    "delta": lambda: build_delta("llama", "drawn", bits=2),
    "palu": lambda: build_palu(find_palu("llama"), bits=4),
}
REPLICATED = [
    ("full", "raw", "uniform"),
    ("h2o", "raw", "uniform"),
    ("centroidkv", "raw", "uniform"),
    ("quest", "raw", "uniform"),
    only_in_full("snapkv", "raw", "uniform"),
    only_in_full("keydiff", "raw", "uniform"),
    only_in_full("full", "kivi", "uniform"),
    ("snapkv", "kivi", "uniform"),
    ("full", "delta", "uniform"),
    ("deltakv", "delta", "uniform"),
    ("full", "palu", "uniform"),
    only_in_full("tova", "palu", "uniform"),
    ("h2o", "raw", "cake"),
    only_in_full("tova", "raw", "cake"),
    only_in_full("h2o", "raw", "ada"),
    only_in_full("h2o", "raw", "pyramid"),
]


@pytest.mark.parametrize("method, codec, allocator", REPLICATED)
def test_a_replicated_prompt_decodes_as_it_does_alone(method, codec, allocator):
    model, ids = tiny("llama"), torch.arange(3, 103)[None]
    choice = choose_cache(*build_policy(method, allocator, "llama")[:2], CODECS[codec]())

    def answer(times: int) -> torch.Tensor:
        context = GenerationContext(model, choice, Budget(1.0 if method == "full" else 0.3), None, (0,))
        context.prefill(ids)
        before = context.bytes().rows
        if times > 1:
            replicate(context, times, 5)
            assert context.bytes().rows == times * before
        assert context.seeds == times * (0,)
        list(context.generate(5, Sampling(), frozenset()))
        return context.logits

    alone, several = answer(1), answer(3)
    assert several.shape[0] == 3 and torch.allclose(several, alone.expand_as(several), atol=1e-5)
