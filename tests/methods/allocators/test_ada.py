"""Ada as the two repositories write it, where no bound is met."""

import pytest

from tests.support.oracle_scores import votes
from tests.support.oracle_shares import interpolate, safeguard
from tests.support.oracles import agree, keeps, newest


@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("mode", [interpolate, safeguard])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_ada(model, mode, alpha, block):
    args = dict(window=6, kernel=5, pooling="max", group="before")
    cut = keeps(votes(**args), 17, newest(6), mode(alpha))
    held = agree(model, cut, "snapkv", 17, block, allocator=("ada", {"mode": mode.__name__, "alpha": alpha}), **args)
    lengths = {len(held.places(1, head)) for head in range(2)}
    assert (len(lengths) == 1) or alpha < 1
