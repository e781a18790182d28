"""Matching and merging in Triton against float64, over odd sizes, chunks, dimensions, ties and views."""

import math

import pytest
import torch

import kvbench.kernels.row_selection
import kvbench.kernels.soft_matching
from kvbench.interfaces.rows import Rows
from kvbench.kernels.soft_matching import edge_count, even_rows, join, match
from kvbench.methods.centroidkv import CentroidKV
from tests.support.compile_kernels import list_kernel
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def keys_of(rows, dim, dtype, seed=0):
    """(2, 2, rows, dim) keys that resemble their neighbours, a slice of a longer tail that is NaN behind them."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, rows + 3, dim, generator=draw) + torch.randn(2, 2, 1, dim, generator=draw)
    keys[:, :, rows:] = math.nan
    return keys.to(DEVICE, dtype)[:, :, :rows]


def check_match(keys, chunk):
    """Similarities to float32 rounding, and partners whose exact cosine is as good as the best."""
    rows, size = keys.shape[2], chunk or keys.shape[2]
    similar, partner = match(keys, chunk, implementation="triton")
    exact, _ = match(keys.double(), chunk, implementation="reference")
    assert similar.dtype == torch.float32 and partner.dtype == torch.int64
    near = 2.0**-23 * (keys.shape[3] / 8 + 16)  # tensor cores add up in float32 without rounding to the nearest
    torch.testing.assert_close(similar.double(), exact, rtol=0, atol=near)
    even = even_rows(rows, chunk, keys.device).expand_as(partner)
    paired = exact > -math.inf
    assert int(paired[0, 0].sum()) == edge_count(rows, chunk)
    partner = torch.where(paired, partner, 0)
    assert (partner < rows).all() and (partner[paired] // size == even[paired] // size).all()
    assert (partner[paired] % size % 2 == 1).all()
    units = torch.nn.functional.normalize(keys.double(), dim=-1)

    def at(index):
        return units.gather(2, index[..., None].expand(*index.shape, keys.shape[3]))

    found = (at(even) * at(partner)).sum(-1)
    torch.testing.assert_close(found[paired], exact[paired], rtol=0, atol=2 * near)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, chunk", [(1, None), (2, 2), (9, 4), (29, 7), (130, 256), (300, 256), (140, None)])
def test_match(rows, chunk, dtype):
    check_match(keys_of(rows, 24, dtype, rows), chunk)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 96, 256])
def test_match_in_every_dimension(dim, dtype):
    check_match(keys_of(41, dim, dtype, dim), 16)
    check_match(keys_of(41, dim, dtype, dim).transpose(0, 1), 16)  # other strides


def test_equal_cosines_go_to_the_lower_row():
    """Whole tiles of equal rows and, of -1, of opposite ones; a key of zeros resembles nothing."""
    keys = torch.ones(1, 1, 300, 16, device=DEVICE)
    keys[:, :, 0::2] *= torch.where(torch.arange(150, device=DEVICE) % 2 == 0, 1.0, -1.0)[:, None]
    keys[0, 0, 6] = 0
    similar, partner = match(keys, None, implementation="triton")
    assert (partner == 1).all()
    expected = torch.tensor([1.0, -1.0] * 75)
    expected[3] = 0
    torch.testing.assert_close(similar[0, 0].cpu(), expected)


def made(rows, dim, dtype, chunk, joined, seed=0):
    """Keys, masses, and even rows that join others, every head as many of them: about the share `joined`, many into
    few.
    """
    draw = torch.Generator().manual_seed(seed)
    mass = torch.randint(1, 900, (2, 2, rows), generator=draw).float()
    size, even = chunk or rows, even_rows(rows, chunk, torch.device("cpu"))
    room = (even + 1 < rows) & (even % size + 1 < size)
    start, odd = even // size * size, torch.minimum(torch.tensor(size), rows - even // size * size) // 2
    pick = (torch.rand(2, 2, len(even), generator=draw) * odd / 3).long()
    partner = torch.where(room, start + 1 + 2 * pick, 0)
    count = int(joined * room.sum())
    order = torch.rand(2, 2, len(even), generator=draw).masked_fill(~room, -1).argsort(-1, descending=True)
    chosen = torch.zeros(2, 2, len(even), dtype=torch.bool).scatter(2, order[..., :count], True)
    return keys_of(rows, dim, dtype, seed), mass.to(DEVICE), chosen.to(DEVICE), partner.to(DEVICE), count


def close(found, exact, dtype):
    # a mean of n in float32, rounded once to dtype; inputs are a few units at most
    near = torch.finfo(dtype).eps + 2.0**-18
    torch.testing.assert_close(found.double(), exact.double(), rtol=near, atol=8 * near)


def by_loops(rows, mass, chosen, partner, chunk):
    """Row by row: what stays and where, means and masses, of float64 rows."""
    even = even_rows(rows.shape[2], chunk, torch.device("cpu")).tolist()
    places, means, masses = [], [], []
    for line, (x, m, c, p) in enumerate(
        zip(*(v.flatten(0, 1).cpu() for v in (rows, mass, chosen, partner)), strict=True)
    ):
        into = {e: int(to) for e, own, to in zip(even, c.tolist(), p, strict=True) if own}
        for row in range(len(x)):
            if row not in into:
                members = [row, *(e for e, to in into.items() if to == row)]
                places.append(line * len(x) + row)
                masses.append(m[members].sum())
                means.append((x[members] * m[members, None]).sum(0) / m[members].sum() if len(members) > 1 else x[row])
    return torch.tensor(places), torch.stack(means), torch.stack(masses)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rows, chunk, dim, joined",
    [(1, None, 16, 1), (2, 2, 24, 1), (37, 7, 96, 0.8), (90, None, 16, 1), (70, 64, 256, 0.3), (20, 64, 128, 0)],
)
def test_join(rows, chunk, dim, joined, dtype):
    keys, mass, chosen, partner, count = made(rows, dim, dtype, chunk, joined)
    places, means, masses = by_loops(keys.double(), mass.double(), chosen, partner, chunk)
    for name in ("reference", "triton"):
        found = join(mass, chosen, partner, chunk, count, implementation=name)
        assert torch.equal(found.index.cpu(), places)
        own, total = found.centroids(keys)
        assert own.dtype == dtype and own.shape == (2, 2, rows - count, dim) and total.shape == own.shape[:3]
        close(own.flatten(0, 2).cpu(), means, dtype)
        assert torch.equal(total.flatten().double().cpu(), masses)
        alone = total.flatten() == mass.flatten()[found.index]
        assert torch.equal(own.flatten(0, 2)[alone], keys.flatten(0, 2)[found.index][alone])
    again = join(mass, chosen, partner, chunk, count, implementation="triton").centroids(keys.mT.contiguous().mT)
    assert torch.equal(own, again[0]) and torch.equal(total, again[1])


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_rows_of_mass_nothing_add_nothing(name):
    """To the last bits, which the reference on a GPU adds up in any order."""
    keys, mass, chosen, partner, count = made(40, 16, torch.float32, 8, 0.9)
    gone = torch.zeros_like(mass, dtype=torch.bool)
    gone[..., even_rows(40, 8, mass.device)] = chosen & (torch.arange(chosen.shape[2], device=DEVICE) % 3 == 1)
    found = []
    for fill in (0.0, math.nan):
        rows = keys.masked_fill(gone[..., None], fill)
        found.append(join(mass.masked_fill(gone, 0), chosen, partner, 8, count, implementation=name).centroids(rows))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "rows, chunk, quota",
    [(50, 16, 20), *(only_in_full(*own) for own in [(100, 32, 40), (60, 7, 31), (50, 8, 7), (50, 8, 3), (50, 8, 1)])],
)
def test_centroids_are_those_of_the_reference(rows, chunk, quota, monkeypatch):
    """A whole cut in Triton, several rounds of it, of rows that protect both ends, a head at a time; at quota 7
    recents give way, at quota 3 sinks too.
    """
    keys, values = (keys_of(rows, 16, torch.float32, seed) for seed in (1, 2))
    place = torch.arange(rows, device=DEVICE).expand(2, 2, -1)
    mass = torch.randint(1, 9, (2, 2, rows), generator=torch.Generator().manual_seed(3)).float().to(DEVICE)
    held, safe = Rows(keys, values, place * 3, mass), (place < 3) | (place >= rows - 5)
    monkeypatch.setattr("kvbench.methods.centroidkv.SCRATCH", 1)
    method = CentroidKV("centroidkv", sinks=3, recents=5, chunk=chunk, r=0.8)
    cuts = []
    for implementation in ("reference", "triton"):
        for op in (kvbench.kernels.soft_matching, kvbench.kernels.row_selection):
            monkeypatch.setattr(op, "choose_implementation", lambda *_, chosen=implementation: chosen)
        cuts.append(method.cut(held, mass, torch.full((2, 2), quota, device=DEVICE), safe, quota))
    monkeypatch.setattr("kvbench.methods.centroidkv.SCRATCH", 10**9)
    together = method.cut(held, mass, torch.full((2, 2), quota, device=DEVICE), safe)
    assert all(torch.equal(getattr(together, x), getattr(cuts[1], x)) for x in ("keys", "values", "places", "mass"))
    assert len(cuts[0]) == quota and torch.equal(cuts[0].mass.sum(-1), mass.sum(-1))
    assert (cuts[0].places.diff(dim=-1) > 0).all()
    first = min(3, quota - 1)
    ends = [*range(first), *range(rows - min(5, quota - 1 - first), rows)]
    assert all((cuts[0].places == 3 * row).any(-1).all() for row in ends)
    assert torch.equal(cuts[0].places, cuts[1].places) and torch.equal(cuts[0].mass, cuts[1].mass)
    for one, other in ((cuts[0].keys, cuts[1].keys), (cuts[0].values, cuts[1].values)):
        torch.testing.assert_close(one, other)


def test_inputs_that_do_not_fit():
    keys, mass = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)
    for message, call in (
        ("match: ", lambda: match(keys[:, :, :0], 2)),
        ("match: ", lambda: match(keys, 1)),
        ("join: ", lambda: join(mass, mass[..., :2] > 0, mass[..., :1].long(), 4, 0)),
        ("join: ", lambda: join(mass, mass > 0, mass.long(), 4, 0)),
        ("match: .* not torch.float64", lambda: match(keys.double(), 2, implementation="triton")),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.soft_matching import triton as own

    for dtype, dim, size in (("bf16", 128, 64), ("bf16", 256, 64), ("fp32", 256, 64), ("fp16", 16, 16)):
        rows = dict.fromkeys(("keys", "old", "new"), f"*{dtype}")
        found = {**rows, "similar": "*fp32", "partner": "*i64"}
        shape = {"M": size, "N": size, "D": dim, "K": 32 if dtype == "fp32" else dim, "CAST": False, "k_d": 1}
        yield list_kernel(own._match, found, shape, num_warps=4, num_stages=1)
        flat = {"index": "*i64", "mass": "*fp32", "chain": "*i32", "new_mass": "*fp32"}
        yield list_kernel(own._centroids, {**rows, **flat}, {"ROWS": min(64, 2048 // dim), "D": dim})
    yield list_kernel(
        own._link, {"chosen": "*u8", "partner": "*i64", "chain": "*i32", "stays": "*u8"}, {"TILE": own.TILE}
    )
