"""The correlation and the inequalities, against SciPy and a loop over pairs, in float64."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from kvbench.studies.received_attention import QUERIES, ReceivedAttention
from kvbench.studies.study import draw_positions, rank
from tests.support.studies import attend, cosine, show_layers, study, values


@pytest.fixture(scope="module")
def layers():
    return show_layers()


@pytest.mark.parametrize("block_size", [None, 7])
def test_correlation_with_the_attention_received(layers, block_size):
    lines, means = study(ReceivedAttention(), block_size=block_size), []
    for index, layer in enumerate(layers):
        received = attend(layer).sum(1)
        found = []
        for head, own in enumerate(received):
            keys = layer["keys"][head // 3]
            pairwise = -cosine(keys[:, None], keys[None]).sum(-1)
            found.append([spearmanr(pairwise, part)[0] for part in (own / np.arange(len(own), 0, -1), own)])
        mean, total = np.mean(found, 0)
        assert values(lines, "correlation", "mean")[index,] == pytest.approx(mean)
        assert values(lines, "correlation", "sum")[index,] == pytest.approx(total)
        means.append(mean)
    assert values(lines, "correlation_mean", "mean") == {(): pytest.approx(np.mean(means))}
    assert values(lines, "correlation_deviation", "mean") == {(): pytest.approx(np.std(means))}


def test_inequalities_pair_by_pair(layers):
    lines = study(ReceivedAttention(), block_size=40)
    positions = draw_positions(QUERIES, 150, 0, 1).numpy()
    draws = torch.rand(QUERIES, generator=torch.Generator().manual_seed(0)).numpy()
    lemma, theorem, premise = [], [], 0
    for layer in layers:
        weights = attend(layer)
        for head, queries in enumerate(layer["queries"]):
            for t, draw in zip(positions, draws, strict=True):
                query, keys = queries[t], layer["keys"][head // 3][: t + 1]
                mean = keys.mean(0)
                unit, scaled = query / np.linalg.norm(query), keys * layer["scaling"] * np.linalg.norm(query)
                largest = (scaled**2).sum(-1).max()
                for star in (weights[head, t].argmax(), int(draw * (t + 1))):
                    n, w = t, weights[head, t, star]
                    bound = (np.log(n / (n + 1)) - np.log(1 - w)) / (2 * largest) - 1
                    a, b = cosine(mean, unit), cosine(keys[star], unit)
                    lemma.append(b - bound)
                    if a < 0 < b:
                        premise += 1
                        theorem.append(1 + a * b - a**2 / 2 - b**2 / 2 - cosine(mean, keys[star]))
    assert values(lines, "premise") == {(): pytest.approx(premise / len(lemma))}
    for name, slack in (("lemma", lemma), ("theorem", theorem)):
        assert values(lines, name) == {(): np.mean(np.array(slack) >= -1e-6)}
        found = values(lines, f"{name}_slack")
        assert [found[share,] for share in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(
            np.quantile(slack, [0, 0.25, 0.5, 1])
        )


def test_equal_values_share_the_mean_of_their_ranks():
    assert rank(torch.tensor([[3.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]])).tolist() == [[3.5, 1, 3.5, 2], [2.5] * 4]
