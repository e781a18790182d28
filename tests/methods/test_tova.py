"""TOVA: the newest query's attention, averaged over a layer or a group, in loops and float64."""

from collections.abc import Callable

import numpy as np
import pytest

import kvbench
from kvbench.validation import SettingError
from tests.support.dense_engine import Head, HeadView
from tests.support.oracle_scores import attention
from tests.support.oracle_shares import share_safeguarded
from tests.support.oracles import (
    assert_engines_agree,
    find_top,
    fit_protected,
    keep_by_score,
    protect_newest,
    protect_nothing,
)
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, tiny


def last_query(glance: HeadView) -> np.ndarray:
    return attention(glance, 1)[:, 0].mean(0)


def one_set(quota: int, recent: int = 0) -> Callable[[list[HeadView]], list[Head]]:
    """All KV heads keep the same rows: the mean is over all query heads."""

    def cut(glances: list[HeadView]) -> list[Head]:
        if len(glances[0].rows.places) <= quota:
            return [glance.rows for glance in glances]
        everything = np.concatenate([attention(glance, 1)[:, 0] for glance in glances])
        safe = fit_protected(protect_newest(recent)(glances[0], quota), quota)
        best = find_top(np.where(safe, np.inf, sum(everything) / len(everything)), quota)
        return [glance.rows.take(best) for glance in glances]

    return cut


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
@pytest.mark.parametrize(
    "model", choose_quick(["llama", "qwen3", "mistral", "gemma3", "phi3", "llama3", "yarn"], "llama")
)
def test_tova(model, block):
    held = assert_engines_agree(model, one_set(13), "tova", 13, block, 24, dense_cuts=True)
    layer = max(set(range(2)) - set(held.sliding_layers), default=2)
    assert held.places(layer, 0).tolist() == held.places(layer, 1).tolist()
    assert_engines_agree(
        model,
        keep_by_score(last_query, 13, protect_nothing),
        "tova",
        13,
        block,
        24,
        dense_cuts=True,
        preset="keydiff_paper",
    )
    assert_engines_agree(model, one_set(13, 1), "tova", 13, block, 24, preset="kvpress")


def test_scopes_differ_where_a_layer_has_several_groups():
    def places(model, scope):
        held = kvbench.prefill(tiny(model), ids(60), "tova", 9, method_args={"scope": scope})
        return [
            held.places(layer, head).tolist()
            for layer in range(2)
            for head in range(tiny(model).config.num_key_value_heads)
        ]

    assert places("llama", "layer") != places("llama", "group")
    assert places("qwen2", "layer") == places("qwen2", "group")  # one KV head


def test_the_newest_row_may_go():
    """Its author on a port that protected it: TOVA protects nothing."""
    gone = kept = 0
    for seed in range(4):
        for recent in (0, 1):
            held = kvbench.prefill(tiny("llama"), ids(60, seed), "tova", 5, method_args={"recent": recent})
            last = [59 in held.places(layer, 0).tolist() for layer in range(3)]
            gone, kept = gone + (not all(last) and recent == 0), kept + (all(last) and recent == 1)
    assert gone > 0 and kept == 4


@pytest.mark.parametrize("block", [None, 9])
def test_groups_may_share_rows_layers_may_not(block):
    ada = {"mode": "safeguard", "alpha": 0.2}
    cut = keep_by_score(last_query, 13, protect_nothing, share_safeguarded(0.2), prompt=40)
    assert_engines_agree(
        "llama", cut, "tova", 13, block, 40, allocator=("ada", ada), dense_cuts=True, preset="keydiff_paper"
    )
    with pytest.raises(SettingError, match="^allocator=ada: tova .*method.scope=group"):
        kvbench.prefill(tiny("llama"), ids(20), "tova", 5, allocator="ada")
