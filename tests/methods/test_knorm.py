"""Knorm: norms of keys in loops and float64."""

import math

import numpy as np
import pytest

import kvbench
from tests.support.dense_engine import HeadView
from tests.support.oracles import assert_engines_agree, keep_by_score
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, tiny


def small_norm(glance: HeadView) -> np.ndarray:
    return np.array([-math.sqrt(sum(x * x for x in key)) for key in glance.rows.keys])


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3", "phi3"], "llama"))
def test_knorm(model, block):
    assert_engines_agree(model, keep_by_score(small_norm, 17), "knorm", 17, block, dense_cuts=True)
    assert_engines_agree(model, keep_by_score(small_norm, 17), "knorm", 17, block, preset="kvpress")


def test_knorm_skips_layers():
    held = kvbench.prefill(tiny("llama"), ids(60), "knorm", 17, 9, method_args={"preset": "l2compress_readme"})
    assert [len(held.places(layer, 0)) for layer in range(3)] == [60, 60, 17]
