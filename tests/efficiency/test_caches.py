"""The bytes of a cache that a token must read."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.efficiency.caches import KVBenchCache, force_scoring
from kvbench.engine.compressed_cache import choose_cache
from kvbench.interfaces.budget import Budget
from kvbench.kernels import dispatch
from kvbench.methods.dropkv import DropKV
from tests.support.delta_files import build_delta
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids, tiny

PROMPT, KEPT = 200, 15
FILTER = {"preset": "reference", "filters": [0], "wait": 0}  # the first layer attends to all rows


def read_prompt(name, codec="raw", budget=KEPT, method="omnikv", **more):
    more = more or (FILTER if method == "omnikv" else {})
    method, allocator, _ = build_policy(method, "uniform", "llama", "raw", **more)
    own = build("codec", load_settings("codec", codec)) if isinstance(codec, str) else codec
    choice = choose_cache(method, allocator, own)
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


@pytest.mark.parametrize("method", ["deltakv", "full"])
@pytest.mark.parametrize(("bits", "remove"), [(None, None), (4, None), (None, "residual"), (None, "reference")])
def test_a_token_reads_what_its_rows_are_made_of(bits, remove, method):
    """Two of three layers are compressed. In float32, w = 128, d_c = 12, 3 sinks, blocks of 8, a stride of 4, k = 2."""
    codec = build_delta("llama", "drawn", bits=bits, remove=remove)
    own = {} if method == "full" else dict(full_layers=[0], depth=None, sinks=3, recent=8)
    cache = read_prompt("llama", codec, 1.0 if method == "full" else 20, method, **own)
    waits, compressed = 201 - 3 - 184, 184
    made = compressed if method == "full" else 20
    code = {None: 12 * 4, 4: 12 // 2 + 2 + 2}[bits] if remove != "residual" else 0
    bases = 3 if remove == "reference" else min(3 + compressed // 4, 3 + 2 * made)
    read = made * (code + (0 if remove == "reference" else 2 * 2)) + 4 * 128 * (bases + waits)
    weights = 0 if remove == "residual" else 12 * 128
    first = cache.context.own_layers[0].bytes().rows + 4 * 128
    state = cache.bytes().state
    assert cache.bytes_per_token() == first + 2 * (read + 4 * weights) + state
    assert cache.operations_per_token() == 2 * 2 * made * weights // 2  # for keys; codes are summed for values


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


def test_only_the_score_of_a_prefill_takes_the_forced_implementation():
    seen = []

    class Spy(DropKV):
        def score(self, observation, rows, state):
            seen.append(("score", dispatch.WITHIN.get()))
            return super().score(observation, rows, state)

        def select(self, scores, quotas):
            seen.append(("select", dispatch.WITHIN.get()))
            return super().select(scores, quotas)

    method, allocator, codec = build_policy("dropkv", "uniform", "llama", "raw")
    spy = object.__new__(Spy)
    vars(spy).update(vars(method))
    kept = []
    for own in (spy, force_scoring(spy, "reference")):
        choice = choose_cache(own, allocator, codec)
        run = SimpleNamespace(
            choice=lambda choice=choice: choice, seed=0, budget=Budget(KEPT), block_size=None, compile=False
        )
        cache = KVBenchCache(tiny("llama"), run, 8)
        cache.read(ids(PROMPT))
        kept.append([layer.rows.view().places for layer in cache.context.own_layers])
    half = len(seen) // 2
    assert set(seen[:half]) == {("score", None), ("select", None)}
    assert set(seen[half:]) == {("score", "reference"), ("select", None)}
    assert all(torch.equal(*both) for both in zip(*kept, strict=True))
    assert [force_scoring(spy, "triton").overrides(name) for name in ("update", "score")] == [False, True]
