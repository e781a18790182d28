"""Matching and merging in Triton against float64, over odd sizes, chunks, dimensions, ties and views."""

import math

import pytest
import torch
from ahead import compile_all, typed

import kvbench.kernels.compact
import kvbench.kernels.match
from kvbench.kernels.compact import find
from kvbench.kernels.match import edge_count, even_rows, match, merge
from kvbench.methods.centroidkv import CentroidKV
from kvbench.rows import Rows

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, chunk", [(1, None), (2, 2), (9, 4), (29, 7), (130, 256), (300, 256), (140, None)])
def test_match(rows, chunk, dtype):
    check_match(keys_of(rows, 24, dtype, rows), chunk)


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
    """Keys and values, masses, and rows that join others: `joined` of the even ones, many into few."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = keys_of(rows, dim, dtype, seed), keys_of(rows, dim, dtype, seed + 1)
    mass = torch.randint(1, 900, (2, 2, rows), generator=draw).float()
    into = torch.arange(rows).expand(2, 2, -1).clone()
    size = chunk or rows
    for line in into.view(4, rows):
        for row in range(rows):
            odd = [j for j in range(row // size * size, min(row // size * size + size, rows)) if j % size % 2 == 1]
            if row % size % 2 == 0 and odd and torch.rand(1, generator=draw) < joined:
                line[row] = odd[int(torch.randint(0, len(odd), (1,), generator=draw)) // 3]
    return keys, values, mass.to(DEVICE), into.to(DEVICE)


def close(found, exact, dtype):
    # a mean of n in float32, rounded once to dtype; inputs are a few units at most
    near = torch.finfo(dtype).eps + 2.0**-18
    torch.testing.assert_close(found.double(), exact.double(), rtol=near, atol=8 * near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rows, chunk, dim, joined",
    [(1, None, 16, 1), (2, 2, 24, 1), (37, 7, 96, 0.8), (90, None, 16, 1), (70, 64, 256, 0.3), (20, 64, 128, 0)],
)
def test_merge(rows, chunk, dim, joined, dtype):
    keys, values, mass, into = made(rows, dim, dtype, chunk, joined)
    exact = merge(keys.double(), values.double(), mass.double(), into, implementation="reference")
    found = merge(keys, values, mass, into, chunk, implementation="triton")
    for one, other in zip(found[:2], exact[:2], strict=True):
        assert one.dtype == dtype
        close(one, other, dtype)
    assert torch.equal(found[2].double(), exact[2])
    alone = found[2] == mass
    assert torch.equal(found[0][alone], keys[alone]) and torch.equal(found[1][alone], values[alone])
    again = merge(keys, values, mass, into, chunk, implementation="triton")
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    index = find(exact[2] > 0)
    left = merge(keys, values, mass, into, chunk, index, implementation="triton")
    plain = merge(keys, values, mass, into, chunk, index, implementation="reference")
    for one, other, whole in zip(left, plain, found, strict=True):
        assert torch.equal(one, whole.flatten(0, 2)[index] if whole.dim() == 4 else whole.flatten()[index])
        assert one.shape == other.shape


def test_rows_of_mass_nothing_add_nothing():
    keys, values, mass, into = made(40, 16, torch.float32, 8, 0.9)
    clean = merge(keys, values, mass.masked_fill(into % 3 == 1, 0), into, 8, implementation="triton")
    gone = (into % 3 == 1) & (into != torch.arange(40, device=DEVICE))
    mass = mass.masked_fill(gone, 0)
    into = torch.where(into % 3 == 1, 1, into)  # several of them join the same row
    into = torch.where(torch.arange(40, device=DEVICE) % 8 == 1, torch.arange(40, device=DEVICE), into)
    expected = merge(keys, values, mass, into, None, implementation="triton")
    for rows in (keys, values):
        rows.masked_fill_(gone[..., None], math.nan)
    found = merge(keys, values, mass, into, None, implementation="triton")
    stays = into == torch.arange(40, device=DEVICE)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[stays], other[stays]) and torch.isfinite(one[stays]).all()
    assert torch.isfinite(clean[2]).all()


@pytest.mark.parametrize("rows, chunk, quota", [(100, 32, 40), (60, 7, 31)])
def test_centroids_are_those_of_the_reference(rows, chunk, quota, monkeypatch):
    """A whole cut in Triton, several rounds of it, of rows that protect both ends."""
    keys, values = (keys_of(rows, 16, torch.float32, seed) for seed in (1, 2))
    place = torch.arange(rows, device=DEVICE).expand(2, 2, -1)
    mass = torch.randint(1, 9, (2, 2, rows), generator=torch.Generator().manual_seed(3)).float().to(DEVICE)
    held, safe = Rows(keys, values, place * 3, mass), (place < 3) | (place >= rows - 5)
    method = CentroidKV("centroidkv", sinks=3, recents=5, chunk=chunk, r=0.8)
    cuts = []
    for implementation in ("reference", "triton"):
        for op in (kvbench.kernels.match, kvbench.kernels.compact):
            monkeypatch.setattr(op, "choose", lambda *_, chosen=implementation: chosen)
        cuts.append(method.cut(held, mass, torch.full((2, 2), quota, device=DEVICE), safe))
    assert len(cuts[0]) == quota and torch.equal(cuts[0].mass.sum(-1), mass.sum(-1))
    assert torch.equal(cuts[0].places, cuts[1].places) and torch.equal(cuts[0].mass, cuts[1].mass)
    for one, other in ((cuts[0].keys, cuts[1].keys), (cuts[0].values, cuts[1].values)):
        torch.testing.assert_close(one, other)


def test_inputs_that_do_not_fit():
    keys, mass = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)
    for message, call in (
        ("match: ", lambda: match(keys[:, :, :0], 2)),
        ("match: ", lambda: match(keys, 1)),
        ("merge: ", lambda: merge(keys, keys[..., :1], mass, mass.long())),
        ("merge: ", lambda: merge(keys, keys, mass, mass[..., :2].long())),
        ("match: .* not torch.float64", lambda: match(keys.double(), 2, implementation="triton")),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.match import triton as own

    for dtype, dim, size in (("bf16", 128, 64), ("bf16", 256, 64), ("fp32", 256, 64), ("fp16", 16, 16)):
        rows = dict.fromkeys(("keys", "values", "new_keys", "new_values"), f"*{dtype}")
        found = {**rows, "similar": "*fp32", "partner": "*i64"}
        shape = {"M": size, "N": size, "D": dim, "K": 32 if dtype == "fp32" else dim, "CAST": False, "k_d": 1}
        yield typed(own._match, found, shape, num_warps=4, num_stages=1)
        flat = {"index": "*i64", "mass": "*fp32", "into": "*i64", "chain": "*i32", "new_mass": "*fp32"}
        copy = {"ROWS": min(64, 2048 // dim), "D": dim, "ALL": False, "k_d": 1, "v_d": 1}
        yield typed(own._merge, {**rows, **flat}, copy)
    yield typed(own._chain, {"into": "*i64", "chain": "*i32"}, {"TILE": own.TILE})


def test_the_kernels_compile_for_hopper():
    assert compile_all("test_match_kernels").count("_match") == 4
