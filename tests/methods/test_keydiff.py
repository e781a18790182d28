"""KeyDiff: every anchor and similarity in loops and float64."""

import pytest

from tests.support.oracle_scores import ANCHORS, SIMILAR, score_unlike
from tests.support.oracle_shares import share_safeguarded
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_newest
from tests.support.selection import only_in_full


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("metric", SIMILAR)
@pytest.mark.parametrize("anchor", [*ANCHORS, "pairwise"])
def test_keydiff(anchor, metric, block):
    for model in ("llama", "qwen3") if anchor != "pairwise" else ("qwen3",):
        cut = keep_by_score(score_unlike(anchor, metric), 17)
        assert_engines_agree(model, cut, "keydiff", 17, block, dense_cuts=True, anchor=anchor, metric=metric)


@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
def test_keydiff_keeps_its_recents(block):
    score = score_unlike("mean_normalised", "cosine")
    held = assert_engines_agree(
        "llama",
        keep_by_score(score, 20, protect_newest(4)),
        "keydiff",
        20,
        block,
        dense_cuts=True,
        preset="paper_window",
    )
    newest = list(range(held.contexts[0].seen))[-4:]
    assert all(held.places(layer, head).tolist()[-4:] == newest for layer in range(3) for head in range(2))
    assert_engines_agree("llama", keep_by_score(score, 20), "keydiff", 20, block, preset="kvpress")


@pytest.mark.cover
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(
    "anchor, metric",
    [("mean_raw", "cosine"), ("mean_normalised", "euclidean"), ("median", "euclidean"), ("pairwise", "dot")],
)
def test_keydiff_anchor_ignores_absent_rows(anchor, metric, alpha):
    """Heads of other lengths beside it change nothing: the anchor is over the rows that a head has."""
    cut = keep_by_score(score_unlike(anchor, metric), 12, share=share_safeguarded(alpha))
    ada = ("ada", {"mode": "safeguard", "alpha": alpha})
    args = {"anchor": anchor, "metric": metric}
    assert_engines_agree("llama", cut, "keydiff", 12, 9, allocator=ada, dense_cuts=True, **args)
