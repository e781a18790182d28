"""The interval of a difference of which only two intervals are known."""

import numpy as np
import pytest

from kvbench.analysis.known_intervals import subtract_intervals


def test_symmetric_intervals_add_like_standard_errors():
    assert subtract_intervals((50.0, 47.0, 53.0), (40.0, 36.0, 44.0)) == pytest.approx((10.0, 5.0, 15.0))


def test_the_side_of_an_interval_counts_that_moves_the_difference():
    """The difference falls if the first number is lower or the second one higher."""
    difference, low, high = subtract_intervals((50.0, 47.0, 50.0), (40.0, 40.0, 44.0))
    assert (difference, low, high) == pytest.approx((10.0, 5.0, 10.0))


@pytest.mark.parametrize(("shared", "least", "most"), [(0.0, 0.935, 0.965), (0.5, 0.98, 1.0)])
def test_coverage_is_95_percent_for_independent_scores_and_more_for_scores_on_the_same_samples(shared, least, most):
    draw = np.random.default_rng(0)
    common, noise = draw.normal(size=(4000, 1)), draw.normal(size=(4000, 2))
    means = np.sqrt(shared) * common + np.sqrt(1 - shared) * noise  # of variance 1, true difference 0
    ends = [subtract_intervals(*((mean, mean - 1.96, mean + 1.96) for mean in pair)) for pair in means]
    assert least <= np.mean([low <= 0 <= high for _, low, high in ends]) <= most
