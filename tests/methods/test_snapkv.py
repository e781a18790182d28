"""SnapKV: the votes of the newest queries in loops and float64, one-shot and block by block."""

import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from tests.support.oracle_scores import score_votes
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_newest
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, ids, tiny


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9, 24])
@pytest.mark.parametrize("group", ["after", "before"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("model", choose_quick(["llama", "mistral", "gemma3"], "llama"))
def test_snapkv(model, pooling, group, block):
    args = dict(window=6, kernel=5, pooling=pooling, group=group)
    assert_engines_agree(model, keep_by_score(score_votes(**args), 17, protect_newest(6)), "snapkv", 17, block, **args)


@pytest.mark.parametrize("model", choose_quick(["llama", "mistral"], "llama"))
def test_the_pyramidkv_preset_takes_the_groups_mean_before_pooling(model):
    """KVCache-Factory's kv_head mode; the mean after pooling, as in the preset `paper`, keeps other rows."""
    rule = dict(window=8, kernel=7, pooling="max")
    held = assert_engines_agree(
        model,
        keep_by_score(score_votes(**rule, group="before"), 25, protect_newest(8)),
        "snapkv",
        25,
        preset="pyramidkv",
    )
    other = assert_engines_agree(
        model,
        keep_by_score(score_votes(**rule, group="after"), 25, protect_newest(8)),
        "snapkv",
        25,
        **rule,
        group="after",
    )
    assert any(held.places(0, head).tolist() != other.places(0, head).tolist() for head in range(2))


@pytest.mark.parametrize(
    "window, kernel, block", [(1, 1, None), only_in_full(1, 3, 1), (13, 7, 9), (13, 21, None), (5, 3, 3)]
)
def test_snapkv_windows_and_kernels(window, kernel, block):
    """Also a block shorter than the window: then the whole block votes, and the window's rows stay."""
    args = dict(window=window, kernel=kernel, pooling="max", group="after")
    held = assert_engines_agree(
        "qwen3", keep_by_score(score_votes(**args), 20, protect_newest(window)), "snapkv", 20, block, **args
    )
    kept = set(held.places(1, 2).tolist())
    seen = held.contexts[0].seen
    assert set(range(seen - 7 - window, seen)) <= kept


@pytest.mark.parametrize("block", [4, 8, only_in_full(1)])
def test_snapkv_votes_where_the_window_covers_all_that_is_held(block):
    """Then what was held before the block still competes, by the block's votes."""
    args = dict(window=50, kernel=3, pooling="max", group="after")
    held = assert_engines_agree(
        "llama", keep_by_score(score_votes(**args), 10, protect_newest(50)), "snapkv", 10, block, tokens=80, **args
    )
    free = {held.places(layer, head)[0].item() for layer in range(3) for head in range(2)}
    assert len(free) > 1


def test_snapkv_does_not_depend_on_the_longest_head_of_a_batch():
    settings_of = {"method": {"window": 14, "kernel": 3}, "allocator": {"alpha": 0.0}, "codec": None}
    names_of = {"method": "snapkv", "allocator": "ada", "codec": "raw"}
    choice = choose_cache(
        *(build(group, load_settings(group, names_of[group], settings_of[group])) for group in names_of)
    )
    prompts = torch.cat([distinct(40, 0), distinct(40, 50)])
    both = GenerationContext(tiny("llama"), choice, Budget(10), 4, (0, 0))
    both.prefill(prompts)
    for sample, prompt in enumerate(prompts):
        alone = GenerationContext(tiny("llama"), choice, Budget(10), 4, (0,))
        alone.prefill(prompt[None])
        for own, its in zip(alone.layers, both.layers, strict=True):
            for head in range(2):
                assert torch.equal(own.rows.head_places(0, head), its.rows.head_places(sample, head))


def test_snapkv_orders_of_group_and_pooling_differ_for_max_only():
    def places(**args):
        held = kvbench.prefill(tiny("llama"), ids(90), "snapkv", 20, method_args={"window": 8, "kernel": 7, **args})
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    assert places(pooling="max", group="after") != places(pooling="max", group="before")
    assert places(pooling="avg", group="after") == places(pooling="avg", group="before")
    assert places(pooling="avg", group="after") != places(pooling="max", group="after")
