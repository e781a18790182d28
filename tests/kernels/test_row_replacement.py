"""One row of each head leaves: Triton against the reference, and the reference against a sorted list."""

import pytest
import torch

from kvbench.kernels import cut_order
from kvbench.kernels.row_replacement import NEVER, replace_row
from tests.support.cut_orders import ORDERS

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


def leave(given, tables, implementation, growth=None):
    """Replace a row and return everything that was written."""
    tables = [own.clone() for own in tables]
    growth = growth and tuple(own.clone() for own in growth)
    free = torch.full((2, 3), -1, dtype=torch.int64, device=DEVICE)
    position = tables[0].amax((1, 2), keepdim=True) + torch.tensor([5, 9], device=DEVICE)[:, None, None]  # of samples
    invalid = torch.zeros((), dtype=torch.bool, device=DEVICE)
    tally = torch.ones(3, 4, 3, dtype=torch.int64, device=DEVICE)[:, 1:3]  # samples of a larger batch
    given = *given, *tables, free, position, invalid, tally
    replace_row(*given, growth=growth, implementation=implementation)
    return [*tables, free, position, invalid, tally, *(growth or ())]


def check_head(given, before, after, used, quota, place):
    """One head against a sorted list. `given` are scores and masks, `before` and `after` places, ranks and order."""
    scores, sinks, recents = given
    free, tally = after[3], after[4].tolist()
    head = sorted(range(used), key=lambda slot: before[0][slot])  # in the order of the text
    marked = [] if sinks is None else [slot for slot in head if sinks[slot]]
    newest = [] if recents is None else [slot for slot in head[::-1] if recents[slot] and slot not in marked]
    room = max(1, quota - 1)
    safe = [*marked, *newest][:room]
    if quota < NEVER:
        lost = len(marked) - room, len(newest) - max(0, room - len(marked))
        assert tally == [len(safe), *(max(1, own) for own in lost)]
    else:
        assert tally == [1, 1, 1]
    victim = used
    if used > quota:
        victim = min((slot for slot in head[::-1] if slot not in safe), key=lambda slot: scores[slot])
        head.remove(victim)
    assert free == victim and after[0][victim] == place
    held = [*head, victim]
    assert after[2].tolist() == [*held, *range(len(held), len(scores))]
    assert [int(after[1][slot]) for slot in held] == list(range(len(held)))


@pytest.mark.parametrize("rows", [2, 3, 17, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_takes_the_worst_row_that_may_leave(kind, rows):
    given, tables = case(kind, rows)
    places, ranks, order, free, position, invalid, tally = leave(given, tables, "reference")
    assert not invalid
    for b in range(2):
        for h in range(3):
            own = [None if mask is None else mask[b, h] for mask in given]
            after = places[b, h], ranks[b, h], order[b, h], free[b, h], tally[:, b, h]
            check_head(own, [table[b, h] for table in tables], after, rows, rows - 1, position[b] + 1)


@pytest.mark.parametrize("change", ORDERS)
def test_both_implementations_follow_the_order_of_a_cut(change, monkeypatch):
    (scores, sinks, recents), tables = case("too many", 40)
    ranks = tables[1]
    if change not in ("kinds", "sinks"):  # too many recent rows, or few of both kinds
        sinks, recents = ranks < 4, ranks >= (3 if change == "recents" else 34)
    if change == "rows left to the scores":
        recents = ranks >= 2  # the row with the smallest score leaves, so it must be one of those that lose their place
        scores = ranks.float()
    given = [scores.round(), sinks, recents]
    usual = leave(given, tables, "reference")
    monkeypatch.setattr(cut_order, "ORDER", ORDERS[change])
    reference, triton = (leave(given, tables, own) for own in ("reference", "triton"))
    assert all(map(torch.equal, reference, triton)) and not all(map(torch.equal, reference, usual))


def growing(kind, rows, seed=0):
    """Heads that use 1 to `rows` - 1 of their slots, of which some lose a row, some grow and some are not cut."""
    given, _ = case(kind, rows, seed)
    draw = torch.Generator().manual_seed(seed)
    used = torch.randint(1, rows, (2, 3), generator=draw)
    used[0, :2] = torch.tensor([rows - 1, max(2, rows // 2)])
    quotas = torch.tensor([[1, -1, 0], [3, NEVER, 0]])
    quotas = torch.where(quotas < 5, (used + quotas).clamp(min=1), quotas)
    quotas[0, 1] = max(1, int(used[0, 1]) - 1)
    tables = [torch.arange(rows).repeat(2, 3, 1) for _ in range(3)]
    tables[0][:] = -1
    for b in range(2):
        for h in range(3):
            count = int(used[b, h])
            tables[1][b, h, :count] = torch.randperm(count, generator=draw)
            tables[2][b, h, :count] = tables[1][b, h, :count].argsort()
            ascending = torch.randperm(4 * rows, generator=draw)[:count].sort().values
            tables[0][b, h, :count] = ascending[tables[1][b, h, :count]]
    scores, sinks, recents = given
    scores.masked_fill_(tables[0].to(DEVICE) < 0, torch.nan)  # nobody reads what unused slots hold
    few, most = max(1, rows // 5), rows
    first = {"sinks": few, "both": few, "too many sinks": most, "too many": most}.get(kind)
    last = {"recents": few, "both": few, "too many recents": most, "too many": 3}.get(kind)
    masks = None if first is None else tables[1] < first, None if last is None else tables[1] >= used[..., None] - last
    given = [scores, *(None if mask is None else mask.to(DEVICE) for mask in masks)]
    mass = (tables[0] >= 0).float()
    return given, [own.to(DEVICE) for own in tables], tuple(own.to(DEVICE) for own in (used, quotas, mass))


@pytest.mark.parametrize("rows", [3, 17, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_below_its_quota_keeps_its_rows(kind, rows):
    given, tables, growth = growing(kind, rows)
    used, quotas, mass = growth
    places, ranks, order, free, position, invalid, tally, lengths, _, after_mass = leave(
        given, tables, "reference", growth
    )
    assert not invalid
    for b in range(2):
        for h in range(3):
            count, quota = int(used[b, h]), int(quotas[b, h])
            own = [None if mask is None else mask[b, h] for mask in given]
            after = places[b, h], ranks[b, h], order[b, h], free[b, h], tally[:, b, h]
            check_head(own, [table[b, h] for table in tables], after, count, quota, position[b] + 1)
            assert lengths[b, h] == count + (count <= quota)
            assert after_mass[b, h].tolist() == [1.0] * int(lengths[b, h]) + [0.0] * (rows - int(lengths[b, h]))
    assert {int(own) for own in (used > quotas).flatten()} == {0, 1}


@pytest.mark.cover
@pytest.mark.parametrize("rows", [2, 17, 2100])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_agrees_with_the_reference(kind, rows):
    given, tables = case(kind, rows, seed=1)
    for one, other in zip(leave(given, tables, "triton"), leave(given, tables, "reference"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cover
@pytest.mark.parametrize("rows", [3, 17, 2100])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_grows_as_the_reference_does(kind, rows):
    given, tables, growth = growing(kind, rows, seed=1)
    found = [leave(given, tables, implementation, growth) for implementation in ("triton", "reference")]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    one_quota = growth[0], growth[1][:, :1], growth[2]  # the same for all heads of a sample
    found = [leave(given, tables, implementation, one_quota) for implementation in ("triton", "reference")]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_nan_is_noted_and_infinite_scores_are_numbers():
    given, tables = case("plain", 9)
    given[0][1, 2, 4] = torch.inf
    given[0][0, 1, 3] = -torch.inf
    for implementation in ("reference", "triton"):
        *_, free, _, invalid, _ = leave(given, tables, implementation)
        assert not invalid and free[0, 1] == 3
    given[0][1, 0, 2] = torch.nan
    assert all(leave(given, tables, implementation)[5] for implementation in ("reference", "triton"))


def test_nan_of_a_head_that_is_not_cut_is_not_looked_at():
    given, tables, growth = growing("plain", 17)
    given[0][1, 1] = torch.nan
    assert not any(leave(given, tables, implementation, growth)[5] for implementation in ("reference", "triton"))


def test_what_does_not_fit_is_refused():
    given, tables = case("plain", 5)
    with pytest.raises(ValueError, match="^replace_row: scores, places, ranks, order, free"):
        leave([given[0][..., :1], None, None], tables, "reference")
    with pytest.raises(ValueError, match="^replace_row: ranks, order, free, tally, growth, invalid torch.int32"):
        leave(given, [tables[0], tables[1].int(), tables[2]], "reference")
    given, tables, (used, quotas, mass) = growing("plain", 5)
    with pytest.raises(ValueError, match="^replace_row: scores"):
        leave(given, tables, "reference", (used, quotas, mass[..., :3]))


def ahead():
    from kvbench.kernels.row_replacement.triton import _replace

    real = dict.fromkeys(("first_kind", "second_kind", "invalid"), "*u8")
    real |= dict.fromkeys(("places", "position", "ranks", "order", "free", "tally", "lengths", "quotas"), "*i64")
    real |= {"scores": "*fp32", "mass": "*fp32", "first_most": "*i64", "second_most": "*i64"}
    rules = {"FIRST_NEWEST": False, "SECOND_NEWEST": True, "SCORED": 1, "LARGEST": True, "EARLIEST": True}
    for both, grows in ((False, False), (True, False), (True, True)):
        constants = {"FIRST_KIND": both, "SECOND_KIND": both, "GROWS": grows, "TILE": 2048} | rules
        types = {name: real.get(name, "constexpr" if name in constants else "i32") for name in _replace.arg_names}
        yield _replace, types, constants, {"num_warps": 8}
