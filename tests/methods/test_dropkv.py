"""DropKV: what removing a row changes, in loops and float64 and by brute force."""

import numpy as np
import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracle_scores import score_residual
from tests.support.oracles import assert_engines_agree, keep_by_score, protect_newest
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 9])
@pytest.mark.parametrize("p_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("model", choose_quick(["llama", "gemma3"], "llama"))
def test_dropkv(model, pooling, p_dtype, block):
    args = dict(window=5, kernel=3, pooling=pooling, epsilon=1e-6, p_dtype=p_dtype)
    assert_engines_agree(
        model, keep_by_score(score_residual(**args), 17, protect_newest(5)), "dropkv", 17, block, tokens=45, **args
    )


@pytest.mark.parametrize("block", [4, only_in_full(1)])
def test_dropkv_where_one_row_has_nearly_all_attention(block):
    args = dict(window=8, kernel=11, pooling="max", epsilon=1e-6, p_dtype="fp32")
    assert_engines_agree(
        "mistral", keep_by_score(score_residual(**args), 13, protect_newest(8)), "dropkv", 13, block, tokens=40, **args
    )


@pytest.mark.parametrize("block", [None, 4, only_in_full(1)])
def test_dropkv_windows_and_kernels(block):
    args = dict(window=8, kernel=11, pooling="max", epsilon=1e-6, p_dtype="fp32")
    assert_engines_agree(
        "qwen3", keep_by_score(score_residual(**args), 13, protect_newest(8)), "dropkv", 13, block, tokens=40, **args
    )


def test_dropkv_is_the_change_of_the_output_when_a_row_is_removed():
    """Brute force: remove row j, normalise again; the output moves by p/(1-p)·(a - v)."""
    glances = []
    DenseEngine("llama", lambda own: glances.extend(own) or [g.rows for g in own]).prefill(ids(30), None)
    for glance in glances:
        rows, w = glance.rows, 4
        by_formula = score_residual(w, 1, "avg", 1e-300, "fp32")(glance)
        for j in range(30):
            moved = 0.0
            for queries, outputs in zip(glance.queries, glance.outputs, strict=True):
                less = rows.take(np.arange(30) != j)
                places = np.arange(30 - w, 30)
                visible = [t for t in range(w) if places[t] > 0]
                without = DenseEngine.attend(queries[-w:], less, places, glance.scaling, None)
                moved += ((without - outputs[-w:])[visible] ** 2).sum()
            assert by_formula[j] == pytest.approx(moved / len(glance.queries), rel=1e-5)


def shown(queries, keys, values, outputs) -> tuple[Observation, Rows]:
    """One KV head of one layer: the last tokens' `queries` and `outputs` (G, T, d), keys and values (n, d)."""
    n, mass = len(keys), torch.ones(1, 1, len(keys), dtype=keys.dtype)
    observation = Observation(
        queries[None], outputs[None], None, 1.0, None, None, 0, 1, n - queries.shape[1], n, True, False
    )
    return observation, Rows(keys[None, None], values[None, None], torch.arange(n)[None, None], mass)


def test_dropkv_rounding_decides_on_sinks():
    """A row with p = 0.9985 whose removal moves the output by 0.1 only: p rounds to 1 and its score becomes huge."""
    p = torch.tensor([0.9985, 0.0010, 0.0005])
    keys = torch.cat([p.log()[:, None], torch.zeros(3, 1)], 1)
    values = torch.tensor([[0.0, 0.0], [1000.0, 0.0], [-2000.0, 0.3]])
    seen, rows = shown(torch.tensor([[[1.0, 0.0]]]), keys, values, (p @ values)[None, None])
    best = {}
    for p_dtype in ("bf16", "fp32"):
        method = build("method", load_settings("method", "dropkv", {"window": 1, "kernel": 1, "p_dtype": p_dtype}))
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
    method = build("method", load_settings("method", "dropkv", {"window": 1, "kernel": 1, "p_dtype": p_dtype}))
    scores = []
    for dtype in (torch.float32, torch.float64):
        seen, rows = shown(*(x.to(dtype) for x in (query, keys, values, p @ values)))
        scores.append(method.score(seen, rows, State((0,)))[0, 0].double())
    glance = HeadView(0, 0, query.numpy(), (p @ values).numpy(), head_of(rows), 1.0, 40)
    expected = torch.from_numpy(score_residual(1, 1, "avg", 1e-6, p_dtype)(glance))
    torch.testing.assert_close(scores[1], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores[0], expected, rtol=0.01, atol=0)


def head_of(rows: Rows) -> Head:
    return Head(*(column[0, 0].double().numpy() for column in (rows.keys, rows.values, rows.places, rows.mass)))
