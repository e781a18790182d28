"""Random: what is kept follows the seed, and every place is kept equally often."""

import numpy as np

import kvbench
from tests.support.tiny_models import ids, tiny


def drawn(seed: int, budget: int = 12, block=None, model="llama") -> dict[tuple[int, int], list[int]]:
    held = kvbench.prefill(tiny(model), ids(40), "random", budget, block, seed=seed)
    return {(layer, head): held.places(layer, head).tolist() for layer in range(2) for head in range(2)}


def test_random_follows_its_seed_only():
    assert drawn(1) == drawn(1) == drawn(1, block=3) == drawn(1, block=9)
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
