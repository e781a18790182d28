"""The bytes of a cache that a token must read."""

from types import SimpleNamespace

import pytest

from kvbench.config.catalogue import build, load_settings
from kvbench.efficiency.caches import KVBenchCache
from kvbench.engine.compressed_cache import choose_cache
from kvbench.interfaces.budget import Budget
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids, tiny

PROMPT, KEPT = 200, 15
FILTER = {"preset": "reference", "filters": [0], "wait": 0}  # the first layer attends to all rows


def read_prompt(name, codec="raw", **more):
    method, allocator, _ = build_policy("omnikv", "uniform", "llama", "raw", **FILTER, **more)
    choice = choose_cache(method, allocator, build("codec", load_settings("codec", codec)))
    run = SimpleNamespace(choice=lambda: choice, seed=0, budget=Budget(KEPT), block_size=None, compile=False)
    cache = KVBenchCache(tiny(name), run, 8)
    cache.read(ids(PROMPT))
    return cache


@pytest.mark.parametrize("codec", ["raw", "kivi"])
def test_a_token_reads_the_rows_that_are_listed_as_they_are_stored(codec):
    cache = read_prompt("llama", codec)
    held = cache.bytes()
    with cache.context.branch():
        cache.context.extend(ids(1))
        first, *others = (layer.bytes().rows for layer in cache.context.own_layers)
    assert (first < (PROMPT + 1) * cache.context.own_layers[0].token_bytes) == (codec == "kivi")
    own = first + sum(others) * (KEPT + 1) / (PROMPT + 1)
    assert cache.bytes_per_token() == round(own) + held.state
    assert cache.bytes() == held


def test_a_token_reads_the_layers_with_a_sliding_window_too():
    cache = read_prompt("gemma3")
    with cache.context.branch():
        cache.context.extend(ids(1))
        own = sum(layer.bytes().rows for layer in cache.context.own_layers)  # the filter layer chooses nothing
    assert cache.context.sliding_bytes() > 0
    assert cache.bytes_per_token() == own + cache.context.sliding_bytes() + cache.bytes().state
