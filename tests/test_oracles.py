"""Every method's choice against its formula: written out in loops, in float64, on queries, keys and values that the
dense engine of tests/models.py takes from transformers' own layers. One-shot and block by block.
"""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
import yaml
from hydra.utils import get_class

import kvbench
from kvbench.budget import Budget
from kvbench.catalogue import CONF, build, names, settings
from kvbench.engine import Context
from kvbench.held import choose_cache
from kvbench.method import Seen, State
from kvbench.rows import Rows
from tests.support.dense_engine import Dense, Glance, Head
from tests.support.method_files import needed
from tests.support.oracle_scores import (
    ANCHORS,
    SIMILAR,
    centroids,
    residual,
    unlike,
    votes,
)
from tests.support.oracle_shares import interpolate, safeguard
from tests.support.oracles import CLOSE, agree, first, keeps, newest, same_rows
from tests.support.tiny_models import distinct, ids, tiny

# What is common to all: protected rows, the choice of rows, whole engines side by side.


# knorm


def small_norm(glance: Glance) -> np.ndarray:
    return np.array([-math.sqrt(sum(x * x for x in key)) for key in glance.rows.keys])


@pytest.mark.parametrize("block", [None, 1, 9])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3", "phi3"])
def test_knorm(model, block):
    agree(model, keeps(small_norm, 17), "knorm", 17, block, decoding=True)
    agree(model, keeps(small_norm, 17), "knorm", 17, block, preset="kvpress")


def test_knorm_skips_layers():
    held = kvbench.prefill(tiny("llama"), ids(60), "knorm", 17, 9, method_args={"preset": "l2compress_readme"})
    assert [len(held.places(layer, 0)) for layer in range(3)] == [60, 60, 17]


# keydiff


@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("metric", SIMILAR)
@pytest.mark.parametrize("anchor", [*ANCHORS, "pairwise"])
def test_keydiff(anchor, metric, block):
    for model in ("llama", "qwen3") if anchor != "pairwise" else ("qwen3",):
        cut = keeps(unlike(anchor, metric), 17)
        agree(model, cut, "keydiff", 17, block, decoding=True, anchor=anchor, metric=metric)


@pytest.mark.parametrize("block", [None, 1, 9])
def test_keydiff_keeps_its_recents(block):
    score = unlike("mean_normalised", "cosine")
    held = agree("llama", keeps(score, 20, newest(4)), "keydiff", 20, block, decoding=True, preset="paper_window")
    assert all(held.places(layer, head).tolist()[-4:] == [63, 64, 65, 66] for layer in range(3) for head in range(2))
    agree("llama", keeps(score, 20), "keydiff", 20, block, preset="kvpress")


def test_keydiff_anchor_ignores_absent_rows():
    """Heads of other lengths beside it change nothing: the anchor is over the rows that a head has."""
    score = unlike("mean_raw", "cosine")
    for alpha in (0.0, 0.5):
        cut = keeps(score, 12, share=safeguard(alpha))
        ada = ("ada", {"mode": "safeguard", "alpha": alpha})
        agree("llama", cut, "keydiff", 12, 9, allocator=ada, decoding=True, anchor="mean_raw")
        cut = keeps(unlike("mean_normalised", "euclidean"), 12, share=safeguard(alpha))
        agree("llama", cut, "keydiff", 12, 9, allocator=ada, decoding=True, metric="euclidean")
        cut = keeps(unlike("median", "euclidean"), 12, share=safeguard(alpha))
        agree("llama", cut, "keydiff", 12, 9, allocator=ada, decoding=True, anchor="median", metric="euclidean")
        cut = keeps(unlike("pairwise", "dot"), 12, share=safeguard(alpha))
        agree("llama", cut, "keydiff", 12, 9, allocator=ada, decoding=True, anchor="pairwise", metric="dot")


# snapkv


@pytest.mark.parametrize("block", [None, 9, 24])
@pytest.mark.parametrize("group", ["after", "before"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3"])
def test_snapkv(model, pooling, group, block):
    args = dict(window=6, kernel=5, pooling=pooling, group=group)
    agree(model, keeps(votes(**args), 17, newest(6)), "snapkv", 17, block, **args)


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_the_pyramidkv_preset_takes_the_groups_mean_before_pooling(model):
    """KVCache-Factory's kv_head mode; the mean after pooling, as in the preset `paper`, keeps other rows."""
    rule = dict(window=8, kernel=7, pooling="max")
    held = agree(model, keeps(votes(**rule, group="before"), 25, newest(8)), "snapkv", 25, preset="pyramidkv")
    other = agree(model, keeps(votes(**rule, group="after"), 25, newest(8)), "snapkv", 25, **rule, group="after")
    assert any(held.places(0, head).tolist() != other.places(0, head).tolist() for head in range(2))


@pytest.mark.parametrize("window, kernel, block", [(1, 1, None), (1, 3, 1), (13, 7, 9), (13, 21, None), (5, 3, 3)])
def test_snapkv_windows_and_kernels(window, kernel, block):
    """Also a block shorter than the window: then the whole block votes, and the window's rows stay."""
    args = dict(window=window, kernel=kernel, pooling="max", group="after")
    held = agree("qwen3", keeps(votes(**args), 20, newest(window)), "snapkv", 20, block, **args)
    kept = set(held.places(1, 2).tolist())
    assert set(range(60 - window, 67)) <= kept


@pytest.mark.parametrize("block", [4, 8, 1])
def test_snapkv_votes_where_the_window_covers_all_that_is_held(block):
    """Then what was held before the block still competes, by the block's votes."""
    args = dict(window=50, kernel=3, pooling="max", group="after")
    held = agree("llama", keeps(votes(**args), 10, newest(50)), "snapkv", 10, block, tokens=80, **args)
    free = {held.places(layer, head)[0].item() for layer in range(3) for head in range(2)}
    assert len(free) > 1


def test_snapkv_does_not_depend_on_the_longest_head_of_a_batch():
    settings_of = {"method": {"window": 14, "kernel": 3}, "allocator": {"alpha": 0.0}, "codec": None}
    names_of = {"method": "snapkv", "allocator": "ada", "codec": "raw"}
    choice = choose_cache(*(build(group, settings(group, names_of[group], settings_of[group])) for group in names_of))
    for seed in range(4):
        prompts = torch.cat([distinct(60, seed), distinct(60, seed + 50)])
        both = Context(tiny("llama"), choice, Budget(10), 4, (0, 0))
        both.prefill(prompts)
        for sample, prompt in enumerate(prompts):
            alone = Context(tiny("llama"), choice, Budget(10), 4, (0,))
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


# dropkv


@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("p_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_dropkv(model, pooling, p_dtype, block):
    args = dict(window=5, kernel=3, pooling=pooling, epsilon=1e-6, p_dtype=p_dtype)
    agree(model, keeps(residual(**args), 17, newest(5)), "dropkv", 17, block, tokens=45, **args)


@pytest.mark.parametrize("block", [4, 1])
def test_dropkv_where_one_row_has_nearly_all_attention(block):
    args = dict(window=8, kernel=11, pooling="max", epsilon=1e-6, p_dtype="fp32")
    agree("mistral", keeps(residual(**args), 13, newest(8)), "dropkv", 13, block, tokens=40, **args)


@pytest.mark.parametrize("block", [None, 4, 1])
def test_dropkv_windows_and_kernels(block):
    args = dict(window=8, kernel=11, pooling="max", epsilon=1e-6, p_dtype="fp32")
    agree("qwen3", keeps(residual(**args), 13, newest(8)), "dropkv", 13, block, tokens=40, **args)


def test_dropkv_is_the_change_of_the_output_when_a_row_is_removed():
    """Brute force: remove row j, normalise again; the output moves by p/(1-p)·(a - v)."""
    glances = []
    Dense("llama", lambda own: glances.extend(own) or [g.rows for g in own]).prefill(ids(30), None)
    for glance in glances:
        rows, w = glance.rows, 4
        by_formula = residual(w, 1, "avg", 1e-300, "fp32")(glance)
        for j in range(30):
            moved = 0.0
            for queries, outputs in zip(glance.queries, glance.outputs, strict=True):
                less = rows.take(np.arange(30) != j)
                places = np.arange(30 - w, 30)
                visible = [t for t in range(w) if places[t] > 0]
                without = Dense.attend(queries[-w:], less, places, glance.scaling, None)
                moved += ((without - outputs[-w:])[visible] ** 2).sum()
            assert by_formula[j] == pytest.approx(moved / len(glance.queries), rel=1e-5)


def shown(queries, keys, values, outputs) -> tuple[Seen, Rows]:
    """One KV head of one layer: the last tokens' `queries` and `outputs` (G, T, d), keys and values (n, d)."""
    n, mass = len(keys), torch.ones(1, 1, len(keys), dtype=keys.dtype)
    seen = Seen(queries[None], outputs[None], None, 1.0, None, None, 0, 1, n - queries.shape[1], n, True, False)
    return seen, Rows(keys[None, None], values[None, None], torch.arange(n)[None, None], mass)


def test_dropkv_rounding_decides_on_sinks():
    """A row with p = 0.9985 whose removal moves the output by 0.1 only: p rounds to 1 and its score becomes huge."""
    p = torch.tensor([0.9985, 0.0010, 0.0005])
    keys = torch.cat([p.log()[:, None], torch.zeros(3, 1)], 1)
    values = torch.tensor([[0.0, 0.0], [1000.0, 0.0], [-2000.0, 0.3]])
    seen, rows = shown(torch.tensor([[[1.0, 0.0]]]), keys, values, (p @ values)[None, None])
    best = {}
    for p_dtype in ("bf16", "fp32"):
        method = build("method", settings("method", "dropkv", {"window": 1, "kernel": 1, "p_dtype": p_dtype}))
        best[p_dtype] = method.score(seen, rows, State((0,)))[0, 0].tolist()
    assert best["fp32"][0] < 0.1 < 0.9 < best["fp32"][1] < 1.1
    assert best["bf16"][1] < 1.1 < 1e3 < best["bf16"][0]


@pytest.mark.parametrize("p_dtype", ["fp32", "bf16"])
def test_dropkv_scores_of_dominant_rows_are_accurate(p_dtype):
    """p = 1 - 1e-4 on one row: in float32 the score must still be that of float64, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.stack([keys[3] * 15 / keys[3].square().sum(), keys[8] / 4])[:, None]  # two of a group
    p = (query @ keys.T).softmax(-1)
    assert 1e-5 < 1 - p.max() < 1e-3
    method = build("method", settings("method", "dropkv", {"window": 1, "kernel": 1, "p_dtype": p_dtype}))
    scores = []
    for dtype in (torch.float32, torch.float64):
        seen, rows = shown(*(x.to(dtype) for x in (query, keys, values, p @ values)))
        scores.append(method.score(seen, rows, State((0,)))[0, 0].double())
    glance = Glance(0, 0, query.numpy(), (p @ values).numpy(), head_of(rows), 1.0, 40)
    expected = torch.from_numpy(residual(1, 1, "avg", 1e-6, p_dtype)(glance))
    torch.testing.assert_close(scores[1], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores[0], expected, rtol=0.01, atol=0)


def head_of(rows: Rows) -> Head:
    return Head(*(column[0, 0].double().numpy() for column in (rows.keys, rows.values, rows.places, rows.mass)))


# sink


@pytest.mark.parametrize("block", [None, 1, 9])
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


@pytest.mark.parametrize("block", [None, 9])
def test_sink_logits(block):
    score = lambda glance: glance.rows.places.astype(float)  # noqa: E731
    agree("llama3", keeps(score, 17, first(4)), "sink", 17, block, decoding=True, positions="original")
    agree("yarn", keeps(score, 17, first(4)), "sink", 17, block, decoding=True, positions="original")
    agree("phi3", keeps(score, 17, first(4)), "sink", 17, block, decoding=True, positions="original")


# random


def drawn(seed: int, budget: int = 12, block=None, model="llama") -> dict[tuple[int, int], list[int]]:
    held = kvbench.prefill(tiny(model), ids(40), "random", budget, block, seed=seed)
    return {(layer, head): held.places(layer, head).tolist() for layer in range(2) for head in range(2)}


def test_random_follows_its_seed_only():
    assert drawn(1) == drawn(1) == drawn(1, block=1) == drawn(1, block=9)
    assert drawn(1) == drawn(1, model="mistral")
    assert drawn(1) != drawn(2)
    for place in drawn(1):
        assert set(drawn(1, 5)[place]) < set(drawn(1, 12)[place])
    assert len({tuple(rows) for rows in drawn(1).values()}) == 4


def test_random_keeps_every_place_equally_often():
    counts, runs = np.zeros(40), 60
    for seed in range(runs):
        for rows in drawn(seed, model="wide").values():
            counts[rows] += 1
    expected = runs * 4 * 12 / 40
    statistic = ((counts - expected) ** 2 / expected).sum() / (1 - 12 / 40)
    assert 15 < statistic < 75  # χ² with 39 degrees of freedom: 0.02 % on either side


# centroidkv


@pytest.mark.parametrize("block", [None, 9, 25])
@pytest.mark.parametrize("chunk, r", [(8, 0.8), (None, 0.5), (7, 1.0), (2, 0.8)])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_centroidkv(model, chunk, r, block):
    args = dict(sinks=2, recents=5, chunk=chunk, r=r)
    rounds = []
    held = agree(model, centroids(15, **args, rounds=rounds), "centroidkv", 15, block, decoding=False, **args)
    assert max(rounds) >= (3 if block is None else 1)
    assert held.masses(2, 0).sum() == 67 and held.masses(2, 0).max() > 1


@pytest.mark.parametrize("quota", [2, 3, 8, 40, 59, 60])
def test_centroidkv_is_exact_at_every_size(quota):
    args = dict(sinks=4, recents=6, chunk=16, r=0.8)
    agree("qwen3", centroids(quota, **args), "centroidkv", quota, **args)


def test_centroidkv_can_hold_one_row():
    args = dict(sinks=4, recents=6, chunk=16, r=0.8)
    held = agree("llama", centroids(1, **args), "centroidkv", 0.02, None, **args)
    assert held.masses(0, 0).tolist() == [60] + [1] * 7


@pytest.mark.parametrize("interval", [1, 3])
def test_centroidkv_clusters_again_while_decoding(interval):
    args = dict(sinks=2, recents=5, chunk=8, r=0.8)
    prompt, model = ids(60), "llama"
    dense = Dense(model, centroids(15, **args))
    dense.prefill(prompt, None)
    held = kvbench.prefill(tiny(model), prompt, "centroidkv", 15, method_args={**args, "decode_interval": interval})
    for step in range(1, 8):
        dense.cuts_decoding = step % interval == 0
        token = ids(1, seed=step)
        torch.testing.assert_close(held.extend(token)[0].double(), dense.extend(token), **CLOSE)
        same_rows(held, dense)
    assert len(held.places(0, 0)) == 15 + 7 % interval


def test_centroidkv_matches_in_single_precision():
    """Keys in bfloat16: cosines that are rounded to it tie everywhere, and which rows merge hangs on their order."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 400, 32, generator=draw).bfloat16()
    places, mass = torch.arange(400).expand(1, 2, -1), torch.ones(1, 2, 400)
    method = build("method", settings("method", "centroidkv"))
    found = method.centroids([keys, keys, places, mass], 340)
    exact = method.centroids([keys.double(), keys.double(), places, mass.double()], 340)
    assert torch.equal(found[2], exact[2]) and torch.equal(found[3].double(), exact[3])
    assert found[0].dtype == torch.bfloat16


def test_centroidkv_merges_equal_rows_without_changing_attention():
    """A prompt of one token repeated, without position: all keys of a head are equal, and so is every output."""
    from tests.support.tiny_models import make

    model = make("llama")
    model.model.rotary_emb.register_buffer("inv_freq", torch.zeros_like(model.model.rotary_emb.inv_freq))
    prompt = torch.full((1, 50), 7)
    full = kvbench.prefill(model, prompt)
    held = kvbench.prefill(
        model, prompt, "centroidkv", 9, method_args={"sinks": 2, "recents": 2, "chunk": 8, "decoding": False}
    )
    assert held.masses(0, 0).sum() == 50 and len(held.masses(0, 0)) == 9
    more = ids(5)
    torch.testing.assert_close(held.extend(more), full.extend(more), rtol=1e-5, atol=1e-5)
    evicting = kvbench.prefill(model, prompt, "knorm", 9)
    assert not torch.allclose(evicting.extend(more), full.extend(more), rtol=1e-3, atol=1e-3)


# ada, as the two repositories write it, where no bound is met


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


# presets


def behaviour(name: str, preset: str, seed: int) -> tuple:
    """Rows held after a prompt and after more tokens, with uniform shares; a size while decoding that no prompt here
    reaches is taken smaller.
    """
    args = needed(name, "llama") | {"preset": preset}
    if settings("method", name, args).get("decode_size"):
        args["decode_size"] = 100
    held = kvbench.prefill(tiny("llama"), ids(420, seed), name, 120, method_args=args, prefix=6)
    found = []
    for more in (1, 2, 512):
        found.append([held.places(layer, head).tolist() for layer in range(3) for head in range(2)])
        found.append(held.extend(ids(more, seed=77)).tolist())
    return (*found, [held.places(layer, head).tolist() for layer in range(3) for head in range(2)])


def presets(name: str) -> list[str]:
    return list(yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text()).get("presets", {}))


CUTS = [name for name in names("method") if not get_class(settings("method", name)["_target_"]).reads]
PAIRS = [(name, *pair) for name in CUTS for pair in combinations(presets(name), 2)]  # readers: their own tests


@pytest.mark.parametrize("name, one, other", PAIRS)
def test_presets_differ_where_their_settings_do(name, one, other):
    chosen = [settings("method", name, {"preset": preset}) | {"preset": None} for preset in (one, other)]
    for seed in range(6):
        if behaviour(name, one, seed) != behaviour(name, other, seed):
            assert chosen[0] != chosen[1]
            return
    assert chosen[0] == chosen[1], "two presets that never differ"
