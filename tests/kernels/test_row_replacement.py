"""One row of each head leaves: Triton against the reference, and the reference against a sorted list."""

import pytest
import torch

from kvbench.kernels.row_replacement import replace_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["plain", "ties", "sinks", "recents", "both", "too many sinks", "too many recents", "too many"]


def case(kind, rows, seed=0):
    """Scores, masks and tables of 2 x 3 heads whose rows lie in any order."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, 3, rows)
    scores = torch.randn(shape, generator=draw)
    if kind == "ties":
        scores = scores.round()
    ranks = torch.stack([torch.randperm(rows, generator=draw) for _ in range(6)]).view(shape)
    ascending = torch.stack([torch.randperm(4 * rows, generator=draw)[:rows].sort().values for _ in range(6)])
    places = ascending.view(shape).gather(-1, ranks)
    few, most = max(1, rows // 5), rows
    sinks = {"sinks": few, "both": few, "too many sinks": most, "too many": most}.get(kind)
    recents = {"recents": few, "both": few, "too many recents": most, "too many": 3}.get(kind)
    tables = places, ranks, ranks.argsort(-1)
    masks = None if sinks is None else ranks < sinks, None if recents is None else ranks >= rows - recents
    return [scores.to(DEVICE), *(None if mask is None else mask.to(DEVICE) for mask in masks)], [
        own.to(DEVICE).contiguous() for own in tables
    ]


def leave(given, tables, implementation):
    """Replace a row and return everything that was written."""
    tables = [own.clone() for own in tables]
    free = torch.full((2, 3), -1, dtype=torch.int64, device=DEVICE)
    position = torch.tensor(int(tables[0].max()) + 5, dtype=torch.int64, device=DEVICE)
    invalid = torch.zeros((), dtype=torch.bool, device=DEVICE)
    replace_row(*given, *tables, free, position, invalid, implementation=implementation)
    return [*tables, free, position, invalid]


@pytest.mark.parametrize("rows", [2, 3, 17, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_takes_the_worst_row_that_may_leave(kind, rows):
    (scores, sinks, recents), tables = case(kind, rows)
    places, ranks, order, free, position, invalid = leave((scores, sinks, recents), tables, "reference")
    assert not invalid
    for b in range(2):
        for h in range(3):
            head = sorted(range(rows), key=lambda slot: tables[0][b, h, slot])  # in the order of the text
            marked = [] if sinks is None else [slot for slot in head if sinks[b, h, slot]]
            newest = [] if recents is None else [slot for slot in head[::-1] if recents[b, h, slot]]
            safe = list(dict.fromkeys([*marked[: max(1, rows - 2)], *newest]))[: max(1, rows - 2)]
            victim = min((slot for slot in head[::-1] if slot not in safe), key=lambda slot: scores[b, h, slot])
            assert free[b, h] == victim and places[b, h, victim] == position + 1
            head.remove(victim)
            assert order[b, h].tolist() == [*head, victim]
            assert [int(ranks[b, h, slot]) for slot in [*head, victim]] == list(range(rows))


@pytest.mark.cover
@pytest.mark.parametrize("rows", [2, 17, 2100])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_with_the_reference(kind, rows):
    given, tables = case(kind, rows, seed=1)
    for one, other in zip(leave(given, tables, "triton"), leave(given, tables, "reference"), strict=True):
        assert torch.equal(one, other)


def test_nan_is_noted_and_infinite_scores_are_numbers():
    given, tables = case("plain", 9)
    given[0][1, 2, 4] = torch.inf
    given[0][0, 1, 3] = -torch.inf
    for implementation in ("reference", "triton"):
        *_, free, _, invalid = leave(given, tables, implementation)
        assert not invalid and free[0, 1] == 3
    given[0][1, 0, 2] = torch.nan
    assert all(leave(given, tables, implementation)[-1] for implementation in ("reference", "triton"))


def test_what_does_not_fit_is_refused():
    given, tables = case("plain", 5)
    with pytest.raises(ValueError, match="^replace_row: scores, places, ranks, order, free"):
        leave([given[0][..., :1], None, None], tables, "reference")
    with pytest.raises(ValueError, match="^replace_row: torch.int32"):
        leave(given, [tables[0], tables[1].int(), tables[2]], "reference")


def ahead():
    from kvbench.kernels.row_replacement.triton import _replace

    real = dict.fromkeys(("sinks", "recents", "invalid"), "*u8") | dict.fromkeys(("ranks", "order", "free"), "*i64")
    real |= {"scores": "*fp32", "places": "*i64", "position": "*i64"}
    for both in (False, True):
        constants = {"SINKS": both, "RECENTS": both, "TILE": 2048}
        types = {name: real.get(name, "constexpr" if name in constants else "i32") for name in _replace.arg_names}
        yield _replace, types, constants, {"num_warps": 8}
