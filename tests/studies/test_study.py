"""Which layers a study shows."""

from types import SimpleNamespace

import pytest

from kvbench.studies.catalogue import choose_layers
from kvbench.studies.key_geometry import KeyGeometry
from kvbench.validation import SettingError


def test_shown_layers_are_spread_over_those_that_a_study_sees():
    """Most layers of a Gemma 3 have a sliding window, and no study sees them."""
    own = KeyGeometry()
    assert own.list_shown(range(3)) == [0, 1, 2]
    assert own.list_shown(range(31)) == [0, 6, 12, 18, 24, 30]
    assert own.list_shown(range(5, 48, 6)) == [5, 11, 23, 29, 41, 47]
    assert own.list_shown([7]) == [7]
    assert KeyGeometry(shown=(3, 4)).list_shown(range(31)) == (3, 4)


def test_layers_are_chosen_by_index_or_by_depth():
    plain, windowed = SimpleNamespace(layers=32, held=range(32)), SimpleNamespace(layers=6, held=(2, 5))
    assert choose_layers("20,16", plain) == (16, 20)
    assert choose_layers("0.0,0.5,1.0", plain) == (0, 15, 31)
    assert choose_layers("0.2", windowed) == (2,)
    for text, layout, line in (
        ("16,32", plain, "no full cache in layer 32; its layers are 0 to 31"),
        ("0", windowed, "no full cache in layer 0; its layers are 2, 5"),
        ("1.5", plain, "indices such as 0,5"),
        ("last", plain, "indices such as 0,5"),
    ):
        with pytest.raises(SettingError, match=f"layers={text}: .*{line}"):
            choose_layers(text, layout)
