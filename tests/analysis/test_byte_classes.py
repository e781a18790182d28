"""Classes of a column: cells of similar bytes, and methods that read few rows apart from them."""

from types import SimpleNamespace

import pytest

from kvbench.analysis.byte_classes import split_column


def make_cell(name, held, kept=None, attended=None):
    kept = held if kept is None else kept
    return SimpleNamespace(name=name, held=held, kept=kept, attended=kept if attended is None else attended)


def split(*cells):
    return {what: [cell.name for cell in alike] for what, alike in split_column(cells)}


def test_codecs_evictions_and_readers_are_apart():
    cells = [
        make_cell("snapkv", 0.5),
        make_cell("quest", 1.0, attended=0.53),
        make_cell("snapkv · kivi", 0.113, kept=0.5),
        make_cell("tova", 0.52),
        make_cell("omnikv", 1.0, attended=0.62),
        make_cell("pqcache", 1.0, attended=0.55),
        make_cell("full · fp8", 1.0),
    ]
    assert split(*cells) == {
        "11.3% of the bytes": ["snapkv · kivi"],
        "50.0% to 52.0% of the bytes": ["snapkv", "tova"],
        "100.0% of the bytes": ["full · fp8"],
        "53.0% to 55.0% of the rows read": ["quest", "pqcache"],
        "62.0% of the rows read": ["omnikv"],
    }
    assert sorted(split(*reversed(cells))) == sorted(split(*cells))


def test_a_class_does_not_creep_upwards():
    """Each cell holds 8 % more than the one before it; a class ends a tenth above its first one."""
    held = [0.1 * 1.08**place for place in range(5)]
    assert list(split(*(make_cell(str(place), share) for place, share in enumerate(held))).values()) == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
    ]


def test_no_two_classes_have_one_name():
    names = list(split(make_cell("one", 0.0026), make_cell("other", 0.00296), make_cell("like", 0.0027)))
    assert names == ["0.26% to 0.27% of the bytes", "0.30% of the bytes"]


@pytest.mark.parametrize(("held", "kept", "attended"), [(None, None, None), (None, 0.5, 0.5)])
def test_unknown_bytes_are_a_class(held, kept, attended):
    unknown = SimpleNamespace(name="old", held=held, kept=kept, attended=attended)
    assert split(unknown, make_cell("snapkv", 0.5)) == {"50.0% of the bytes": ["snapkv"], "unknown bytes": ["old"]}
    assert split() == {}
