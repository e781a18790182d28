"""DropKV's theory, against the same computed query by query, row by row and subset by subset."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from kvbench.studies import removal_cone
from kvbench.studies.passes import StudyPrompt, read_prompt
from kvbench.studies.removal_cone import FEW, QUANTILES, REMOVED, STRATA, RemovalCone
from kvbench.studies.study import draw_positions
from kvbench.validation import SettingError
from tests.support.studies import attend, measure_distance, show_layers, study, values
from tests.support.tiny_models import make_double


@pytest.fixture(scope="module", params=[None, 7], ids=["one block", "blocks"])
def lines(request):
    return study(RemovalCone(), "qwen2", block_size=request.param)


def test_weights_and_constants_of_the_pool(lines):
    weight, cone, factor = [], [], []
    for layer in show_layers("qwen2"):
        p = attend(layer)
        for head in range(len(p)):
            held = layer["values"][0]
            for position in draw_positions(removal_cone.SAMPLED, 150, 0, first=75).tolist():
                before = position - removal_cone.WINDOW + 1
                received = p[head, before : position + 1, :before].sum(0)
                pool = np.argsort(received)[: before // 2]
                residuals = p[head, position] @ held - held[pool]
                weight.append(p[head, position, pool].max())
                cone.append(measure_distance(residuals / np.linalg.norm(residuals, axis=-1, keepdims=True)))
                if len(pool) * weight[-1] < 1:
                    factor.append(1 / (cone[-1] * (1 - weight[-1]) * (1 - len(pool) * weight[-1])))
    assert min(cone) > 0.001
    upper = np.array([0.5, 0.95, 1])
    for quantity, shares, expected in (("cone", QUANTILES, cone), ("weight", upper, weight), ("factor", upper, factor)):
        found = [values(lines, quantity)[(share,)] for share in shares]
        assert found == pytest.approx(np.quantile(expected, shares), rel=1e-3, abs=1e-4), quantity
    above = values(lines, "above")
    assert above == {(limit,): pytest.approx(np.mean(np.array(cone) > limit)) for limit in removal_cone.THRESHOLDS}
    assert values(lines, "finite")[()] == pytest.approx(len(factor) / len(cone))
    assert values(lines, "small_weight")[()] == pytest.approx(np.mean(np.array(weight) <= 0.005))
    assert values(lines, "in_cone")[()] == 1 and values(lines, "undecided")[()] == 0
    assert sum(values(lines, "cone_density").values()) == pytest.approx(1)


def test_theorem_and_lemma_hold(lines):
    assert values(lines, "within_bound")[()] == values(lines, "lemma")[()] == 1
    for stratum in STRATA:
        assert min(values(lines, "ratio_dropkv", stratum).values()) >= 1


def test_a_prompt_of_one_token_has_no_residuals():
    with pytest.raises(SettingError, match="removal_cone: fewer than 20 of the rows"):
        read_prompt(make_double("qwen2"), StudyPrompt("0", (7,) * 130), [RemovalCone()])


@pytest.fixture
def look():
    """Four random queries of 60 rows, of which 40 may go."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(60, 8, generator=draw, dtype=torch.float64)
    logits = 2 * torch.randn(4, 60, generator=draw, dtype=torch.float64)
    anchors = logits.softmax(-1) @ values
    pool = torch.arange(60).expand(4, -1) < 40
    norms = torch.cdist(anchors, values)
    return removal_cone.Look(anchors, logits, logits.log_softmax(-1), norms, pool), values


def test_the_lemma_is_about_all_rows_that_go(look):
    own, values = look
    gone = torch.arange(80).view(4, 20) % 40
    assert removal_cone.check_lemma(own, values, gone).all()
    assert not removal_cone.check_lemma(replace(own, log_p=own.log_p * 1.0001), values, gone).any()


def test_rows_of_the_strata(look):
    own, _ = look
    found = removal_cone.list_strata(own, torch.Generator().manual_seed(0))
    assert found.shape == (4, 4, FEW)
    for query in range(4):
        p = own.log_p[query, :40].exp().numpy()
        score = p / (1 - p) * own.norms[query, :40].numpy()
        ranks = np.abs(np.argsort(np.argsort(p)) - np.argsort(np.argsort(score)))
        drawn, low, near, apart = (set(rows[query].tolist()) for rows in found)
        assert len(drawn) == FEW and max(drawn) < 40
        assert low == set(np.argsort(p)[:FEW].tolist())
        middle = np.sort(score)[19]  # the lower one of the two in the middle
        assert near == set(np.argsort(np.abs(score - middle))[:FEW].tolist())
        assert sorted(ranks[list(apart)]) == sorted(ranks)[-FEW:]


@pytest.mark.parametrize("k", [1, pytest.param(0, marks=pytest.mark.full)], ids=["18 of 20", "10 of 20"])
def test_the_best_subset_is_found(k):
    draw = np.random.default_rng(0)
    p, changes, scores = (
        draw.uniform(0, 0.03, 20),
        draw.normal(size=(20, 5)),
        draw.permuted([np.arange(20.0)] * 3, axis=1),
    )
    found = removal_cone.compare_with_best(*map(torch.from_numpy, (changes @ changes.T, p, scores)))
    rows = np.array(list(combinations(range(20), REMOVED[k])))
    size = np.array([np.linalg.norm(changes[own].sum(0)) / (1 - p[own].sum()) for own in rows])
    for selector, order in enumerate(np.argsort(scores, axis=1)):
        chosen = size[(rows == np.sort(order[: REMOVED[k]])).all(1)]
        assert float(found[k, selector]) == pytest.approx(float(chosen[0] / size.min()))
