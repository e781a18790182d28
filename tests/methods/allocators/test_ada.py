"""Ada as the two repositories write it, where no bound is met."""

import pytest

from tests.support.oracle_scores import score_votes
from tests.support.oracle_shares import MODES
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_newest


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(("mode", "share"), MODES)
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_ada(model, mode, share, alpha, block):
    args = dict(window=6, kernel=5, pooling="max", group="before")
    cut = keep_by_score(score_votes(**args), 17, protect_newest(6), share(alpha))
    held = assert_engines_agree(
        model, cut, "snapkv", 17, block, allocator=("ada", {"mode": mode, "alpha": alpha}), **args
    )
    lengths = {len(held.places(1, head)) for head in range(2)}
    assert (len(lengths) == 1) or alpha < 1
