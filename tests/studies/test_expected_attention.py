"""expected_attention: correlations beside the paper's formula, written out head by head."""

from math import log

import numpy as np
import pytest
import torch
from scipy import stats

from kvbench.studies.expected_attention import SINKS, ExpectedAttentionStudy
from kvbench.studies.study import correlate, rank
from tests.support.layer_states import attend, read_layers, rotation
from tests.support.studies import find_values, study
from tests.support.tiny_models import ids

TOKENS, KNOWN = 62, 12


@pytest.mark.parametrize("model, block", [("llama", None), ("qwen3", 7)])
def test_correlations_are_those_of_the_formula(model, block):
    text, positive = ids(TOKENS), []
    lines = study(ExpectedAttentionStudy(), model, TOKENS, block)
    for layer, own in enumerate(read_layers(model, text)):
        dim, group = own.keys.shape[2], len(own.queries) // len(own.keys)
        mean_turn = np.mean([rotation(model, t, dim) for t in range(KNOWN, TOKENS)], 0)
        for head, queries in enumerate(own.queries):
            known = queries[SINKS:KNOWN]
            mean = mean_turn @ known.mean(0)
            covariance = mean_turn @ np.cov(known.T, bias=True) @ mean_turn.T
            keys = own.keys[head // group]
            expected = [mean @ k / dim**0.5 + k @ covariance @ k / (2 * dim) for k in keys[:KNOWN]]
            observed = np.log(attend(own.rotated[head], keys)[KNOWN:, :KNOWN].mean(0))
            for quantity, oracle in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
                [found] = find_values(lines, quantity=quantity, layer=layer, head=head)
                assert found == pytest.approx(oracle(expected, observed).statistic, abs=1e-5)
            positive.append(stats.spearmanr(expected, observed).statistic > 0)
            if head == 0:
                points = [(line.x, line.value) for line in lines if line.quantity == "heads" and line.layer == layer]
                chances = np.array(expected) - np.log(np.exp(expected).sum())
                np.testing.assert_allclose(points, np.stack([chances, observed], 1) / log(10), atol=1e-4)
    [found] = find_values(lines, quantity="correlated", series="holds")
    assert found == pytest.approx(np.mean(positive))


def test_equal_numbers_share_their_rank():
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0]])
    assert rank(x)[0].tolist() == stats.rankdata(x[0]).tolist()
    assert correlate(x, torch.ones(1, 5)).tolist() == [0]
