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


def read_prompt(name, codec="raw", budget=KEPT, method="omnikv", **more):
    method, allocator, _ = build_policy(method, "uniform", "llama", "raw", **(more or FILTER))
    choice = choose_cache(method, allocator, build("codec", load_settings("codec", codec)))
    run = SimpleNamespace(choice=lambda: choice, seed=0, budget=Budget(budget), block_size=None, compile=False)
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


@pytest.mark.parametrize("budget", [1.0, PROMPT + 20, 16])
def test_a_token_reads_what_the_method_remembers_only_where_it_chooses(budget):
    cache = read_prompt("llama", budget=budget, method="quest", page=4, dense_layers=0)
    held = cache.bytes()
    with cache.context.branch():
        cache.context.extend(ids(1))
        rows = cache.bytes().rows
    assert held.state > 0
    if budget == 16:
        assert held.state < cache.bytes_per_token() < rows
    else:
        assert cache.bytes_per_token() == rows


def test_a_token_reads_the_layers_with_a_sliding_window_too():
    cache = read_prompt("gemma3")
    with cache.context.branch():
        cache.context.extend(ids(1))
        own = sum(layer.bytes().rows for layer in cache.context.own_layers)  # the filter layer chooses nothing
    assert cache.context.sliding_bytes() > 0
    assert cache.bytes_per_token() == own + cache.context.sliding_bytes() + cache.bytes().state
