"""Sink: the first rows and the newest stay."""

import pytest

import kvbench
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_first
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, tiny


@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
def test_sink(block):
    held = kvbench.prefill(tiny("gemma3"), ids(60), "sink", 17, block)
    assert held.places(2, 0).tolist() == [0, 1, 2, 3, *range(47, 60)]
    held.extend(ids(3))
    assert held.places(5, 1).tolist() == [0, 1, 2, 3, *range(50, 63)]
    held = kvbench.prefill(tiny("gemma3"), ids(60), "sink", 17, block, method_args={"preset": "kvpress"})
    held.extend(ids(3))
    assert held.places(5, 1).tolist() == [0, 1, 2, 3, *range(47, 63)]
    held = kvbench.prefill(tiny("llama"), ids(60), "sink", 17, block, method_args={"sinks": 0})
    assert held.places(0, 0).tolist() == list(range(43, 60))


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("model", choose_quick(["llama3", "yarn", "phi3"], "yarn"))
def test_sink_logits(model, block):
    score = lambda glance: glance.rows.places.astype(float)  # noqa: E731
    assert_engines_agree(
        model, keep_by_score(score, 17, protect_first(4)), "sink", 17, block, dense_cuts=True, positions="original"
    )
