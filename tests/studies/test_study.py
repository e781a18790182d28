"""What studies share."""

from kvbench.studies.study import list_shown


def test_shown_layers_are_spread_over_those_that_a_study_sees():
    """Most layers of a Gemma 3 have a sliding window, and no study sees them."""
    assert list_shown(range(3)) == [0, 1, 2]
    assert list_shown(range(31)) == [0, 6, 12, 18, 24, 30]
    assert list_shown(range(5, 48, 6)) == [5, 11, 23, 29, 41, 47]
    assert list_shown([7]) == [7]
