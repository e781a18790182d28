"""Every score on the rotations, groups of query heads and norms that its own tests leave out, against the same oracles.

Groups of 1 (llama3), 2 (yarn, phi3), 3 (llama, qwen2) and 4 query heads (mistral); YaRN scales its angles, Llama 3
stretches them, Phi-3 rotates a half of each head; Gemma 3 and Qwen 3 norm queries and keys.
"""

from collections.abc import Sequence

import pytest

from tests.support.oracle_scores import (
    SNAPKV,
    HeavyHitters,
    cut_in_two_stages,
    cut_to_centroids,
    protect_chunks,
    score_along_output,
    score_chunks,
    score_mean_votes,
    score_residual,
    score_unlike,
    score_votes,
)
from tests.support.oracle_shares import MODES, assert_cake_agrees
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_first, protect_newest
from tests.support.selection import choose_quick
from tests.support.tiny_models import tiny

ROTATIONS = ("llama3", "yarn", "phi3", "mistral", "qwen2")
MODELS = (*ROTATIONS, "gemma3")
WINDOW = dict(window=6, kernel=5, pooling="max", group="after")
DROPKV = dict(window=5, kernel=3, pooling="max", epsilon=1e-6, p_dtype="fp32")
CODED = dict(window=8, kernel=7, chunk=4, first=1)
MERGING = dict(sinks=2, recents=5, chunk=8, r=0.8)


def each_model(*chosen: str, of: Sequence[str] = ROTATIONS) -> pytest.MarkDecorator:
    """Models of a score. `make test` runs the chosen ones: two for a score, so that every model has several scores."""
    return pytest.mark.parametrize("model", choose_quick(of, *chosen))


@each_model("llama3", "phi3")
def test_snapkv(model):
    assert_engines_agree(model, keep_by_score(score_votes(**WINDOW), 17, protect_newest(6)), "snapkv", 17, 9, **WINDOW)


@each_model("yarn", "mistral")
def test_dropkv(model):
    assert_engines_agree(
        model, keep_by_score(score_residual(**DROPKV), 17, protect_newest(5)), "dropkv", 17, 9, tokens=45, **DROPKV
    )


@pytest.mark.cover
@each_model("phi3", "gemma3", of=MODELS)
@pytest.mark.parametrize("anchor", ["mean_normalised", "mean_raw"])
def test_keydiff(model, anchor):
    assert_engines_agree(
        model, keep_by_score(score_unlike(anchor, "cosine"), 17), "keydiff", 17, 9, dense_cuts=True, anchor=anchor
    )


@each_model("qwen2", "llama3")
def test_centroidkv(model):
    assert_engines_agree(model, cut_to_centroids(15, **MERGING), "centroidkv", 15, 9, **MERGING | {"decoding": False})


@pytest.mark.cover
@each_model("llama3", "mistral")
@pytest.mark.parametrize("norm, gqa", [("none", "mean"), ("count", "max")])
def test_h2o(model, norm, gqa):
    args = dict(recent=0.5, norm=norm, gqa=gqa)
    assert_engines_agree(
        model, HeavyHitters(norm, gqa).keeps(13, protect_newest(6)), "h2o", 13, 9, 45, dense_cuts=True, **args
    )


@each_model("gemma3", "phi3", of=MODELS)
def test_andpro_as_coded(model):
    score, protect = score_chunks(**CODED), protect_chunks(8, 4, 1)
    assert_engines_agree(
        model, keep_by_score(score, 19, protect), "andpro", 19, 9, 45, **CODED | {"anchor": "droppable"}
    )


@each_model("yarn", "qwen2", of=("yarn", "phi3", "qwen2"))
def test_andpro(model):
    assert_engines_agree(
        model, keep_by_score(score_along_output(6), 17, protect_newest(6)), "andpro", 17, 9, 45, window=6
    )


@each_model("mistral", "yarn")
def test_criticalkv(model):
    cut = cut_in_two_stages(model, score_mean_votes(**SNAPKV), 13, 0.5, 1e-4, protect_newest(4))
    assert_engines_agree(model, cut, "criticalkv", 13, 9, 45, alpha=0.5, epsilon=1e-4, base_args=SNAPKV)


@pytest.mark.cover
@each_model("yarn", "qwen2")
@pytest.mark.parametrize("cascade", [True, False])
def test_cake(model, cascade):
    assert_cake_agrees(model, cascade, 9)


@pytest.mark.cover
@each_model("llama3", "phi3", "gemma3", of=("llama3", "yarn", "phi3", "mistral", "gemma3"))
@pytest.mark.parametrize(("mode", "share"), MODES)
def test_ada(model, mode, share):
    cut = keep_by_score(score_votes(**WINDOW), 17, protect_newest(6), share(0.2))
    assert_engines_agree(model, cut, "snapkv", 17, 9, allocator=("ada", {"mode": mode, "alpha": 0.2}), **WINDOW)


@each_model("qwen2", "gemma3", of=MODELS)
def test_sink_at_original_positions(model):
    score = lambda glance: glance.rows.places.astype(float)  # noqa: E731
    assert_engines_agree(
        model, keep_by_score(score, 17, protect_first(4)), "sink", 17, 9, dense_cuts=True, positions="original"
    )


def test_every_group_size_is_here():
    configs = [tiny(model).config for model in (*ROTATIONS, "llama", "gemma3", "qwen3")]
    groups = {config.num_attention_heads // config.num_key_value_heads for config in configs}
    assert groups == {1, 2, 3, 4}
