"""Which rows stay and where they lie, in Triton: exactly what a stable sort and indexing give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels.row_selection import gather_rows, kept_indices, top_k_indices, top_k_mask, top_k_of_heads
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_sorting(scores, quotas):
    """A Python sort of each head: NaN first, then by falling score, then by row."""
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for b, heads in enumerate(scores.double().tolist()):
        for h, row in enumerate(heads):
            order = sorted(range(len(row)), key=lambda j: (0, 0, j) if math.isnan(row[j]) else (1, -row[j], j))
            chosen[b, h, order[: max(int(quotas[b, h]), 0)]] = True
    return chosen


def same(scores, quotas):
    expected = by_sorting(scores.cpu(), quotas)
    for implementation, own in (("reference", scores.cpu()), ("triton", scores)):  # a GPU's sort puts NaN elsewhere
        found = top_k_mask(own, quotas.to(own.device), implementation=implementation)
        assert found.dtype == torch.bool and torch.equal(found.cpu(), expected), implementation


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 37, 2100, only_in_full(2048), only_in_full(4500)])
def test_top(rows, dtype):
    """Absent rows on the left, protected ones on the right, ties in bfloat16, quotas from none to too many."""
    scores = torch.randn(2, 3, rows, generator=torch.Generator().manual_seed(rows)).to(dtype)
    scores[0, 1, : rows // 3] = -torch.inf
    scores[1, :, rows - rows // 5 :] = torch.inf
    scores[1, 2] = 0.25
    same(scores.to(DEVICE), torch.tensor([[0, rows // 2, rows], [rows + 5, max(1, rows // 7), rows // 3]]))
    same(scores.to(DEVICE), torch.full((2, 3), 1))
    whole = top_k_mask(scores.to(DEVICE), 3, implementation="triton")
    assert torch.equal(whole.cpu(), by_sorting(scores, torch.full((2, 3), 3)))


VALUES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0000001, math.inf, -math.inf, math.nan]


@settings(max_examples=10)
@given(st.data())
def test_top_of_any_scores_and_quotas(data):
    heads, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 60))
    number = st.sampled_from(VALUES) | st.floats(width=32)
    scores = data.draw(st.lists(number, min_size=heads * rows, max_size=heads * rows))
    quotas = data.draw(st.lists(st.integers(-1, rows + 2), min_size=heads, max_size=heads))
    same(torch.tensor(scores).view(1, heads, rows).to(DEVICE), torch.tensor(quotas)[None])


def test_top_takes_views():
    scores = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    same(scores.transpose(1, 2)[..., 3:40], torch.tensor([[5, 6, 7], [1, 2, 36]]))
    same(scores[:, :1].transpose(1, 2).expand(-1, -1, 9), torch.full((2, 3), 4))


@settings(max_examples=15)
@given(st.data())
def test_find_and_take_any_rows(data):
    """Of slices of a larger tail, rows that are gone being NaN; each value is an own number."""
    heads, rows, dim = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (0, 40), (1, 20)))
    marks = data.draw(st.lists(st.booleans(), min_size=2 * heads * rows, max_size=2 * heads * rows))
    kept = torch.tensor(marks, dtype=torch.bool).view(2, heads, rows).to(DEVICE)
    tail = torch.arange(2.0 * heads * (rows + 3) * dim, device=DEVICE).view(2, heads, rows + 3, dim)
    keys = tail[:, :, :rows].masked_fill(~kept[..., None], math.nan)
    values = (tail + 0.5)[:, :, :rows]
    expected = keys[kept], values[kept]
    for implementation in ("reference", "triton"):
        index = kept_indices(kept, implementation=implementation)
        assert index.dtype == torch.int64 and torch.equal(index, kept.flatten().nonzero()[:, 0])
        assert torch.equal(kept_indices(kept, len(index), implementation=implementation), index)
        for found, exact in zip(gather_rows(index, keys, values, implementation=implementation), expected, strict=True):
            assert torch.equal(found, exact)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 96, 256])
def test_take_copies_bits(dim, dtype):
    """Also where heads and rows were swapped, and every slot of memory that was NaN."""
    keys, values = torch.randn(2, 1, 70, 3, dim, generator=torch.Generator().manual_seed(dim)).to(DEVICE, dtype)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    kept = torch.rand(1, 3, 70, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.4
    index = kept_indices(kept, implementation="triton")
    for found, rows in zip(gather_rows(index, keys, values, implementation="triton"), (keys, values), strict=True):
        assert found.is_contiguous() and torch.equal(found, rows[kept])


def test_many_tiles():
    kept = torch.rand(2, 2, 5000, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.1
    assert torch.equal(kept_indices(kept, implementation="triton"), kept.flatten().nonzero()[:, 0])


def test_take_writes_where_it_is_told():
    keys, values = (torch.randn(2, 3, 9, 5, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2))
    kept = top_k_mask(keys[..., 0], 4, implementation="reference")
    heads = kept.flatten(0, 1)
    expected = [torch.stack([some.flatten(0, 1)[h][heads[h]] for h in range(6)]) for some in (keys, values)]
    for name in ("reference", "triton"):
        room = [torch.full((2, 3, 7, 5), torch.nan, device=DEVICE) for _ in range(2)]
        into = tuple(part[:, :, :4] for part in room)
        gather_rows(kept_indices(kept, 24), keys, values, into=into, implementation=name)
        for part, rows in zip(room, expected, strict=True):
            assert torch.equal(part[:, :, :4].flatten(0, 1), rows) and part[:, :, 4:].isnan().all()
    with pytest.raises(ValueError, match="^gather_rows: 24 rows into"):
        gather_rows(kept_indices(kept, 24), keys, values, into=(into[0][:, :, :3], into[1][:, :, :3]))


@pytest.mark.cover
@pytest.mark.parametrize(
    "rows, k",
    [(1, 1), (40, 7), (40, 40), only_in_full(400, 300), (2100, 300), (2112, 4), (8205, 409), only_in_full(16384, 8)],
)
@pytest.mark.parametrize("ties", [False, True])
def test_indices_of_the_largest(rows, k, ties):
    scores = torch.randn(2, 3, rows + 2, generator=torch.Generator().manual_seed(rows)).to(DEVICE)[..., :rows]
    scores = scores.round() if ties else scores
    expected = top_k_mask(scores, k, implementation="reference").nonzero()[:, 2].view(2, 3, k)
    flat = expected + torch.arange(6, device=DEVICE).view(2, 3, 1) * rows
    for implementation in ("reference", "triton"):
        assert torch.equal(top_k_indices(scores, k, implementation=implementation), expected)
        assert torch.equal(top_k_indices(scores, k, flat=True, implementation=implementation), flat.flatten())


@pytest.mark.parametrize("k, times", [(1, 3), (3, 3), (5, 3), (20, 3), (30, 40), (350, 40)])
def test_indices_of_scores_that_are_not_finite(k, times):
    scores = torch.tensor([0.0, -torch.inf, 2.0, torch.inf, -0.0, torch.nan, -torch.inf, 1e-45, -3.0]).to(DEVICE)
    lowest, highest = (torch.full((9 * times,), own, device=DEVICE) for own in (-torch.inf, torch.nan))
    scores = torch.stack([scores.repeat(times), lowest, highest])[None]
    expected = top_k_mask(scores, k, implementation="triton").nonzero()[:, 2].view(1, 3, k)
    assert torch.equal(top_k_indices(scores, k, implementation="triton"), expected)


@pytest.mark.cover
@pytest.mark.parametrize(
    "rows, k", [(50, 9), (50, 50), (4097, 1), (5000, 1999), only_in_full(9000, 2999), only_in_full(70000, 3500)]
)
@pytest.mark.parametrize("kind", ["different", "ties", "not finite", "equal"])
def test_indices_of_more_scores_than_one_program_takes(rows, k, kind, monkeypatch):
    """Programs of several splits write next to each other."""
    monkeypatch.setattr("kvbench.kernels.row_selection.triton.SINGLE", 10)
    scores = torch.randn(2, 2, rows + 2, generator=torch.Generator().manual_seed(rows))[..., :rows]
    if kind == "ties":
        scores = scores.round()
    elif kind == "not finite":
        scores[..., rows // 3 :] = -torch.inf
        scores[:, 1, ::7] = torch.inf
    elif kind == "equal":
        scores[:] = -0.5
    expected = top_k_mask(scores, k, implementation="reference").nonzero()[:, 2].view(2, 2, k)
    flat = expected + torch.arange(4).view(2, 2, 1) * rows
    scores = scores.to(DEVICE)
    assert torch.equal(top_k_indices(scores, k, implementation="triton").cpu(), expected)
    assert torch.equal(top_k_indices(scores, k, flat=True, implementation="triton").cpu(), flat.flatten())


@pytest.mark.parametrize("kind", [only_in_full("different"), "ties"])
def test_programs_may_read_their_scores_again_and_again(kind, monkeypatch):
    """More rows than all programs of a head read at once, of which the last program has some."""
    monkeypatch.setattr("kvbench.kernels.row_selection.triton.HEAD", 512)
    monkeypatch.setattr("kvbench.kernels.row_selection.triton.SPLITS", (1, 4))
    scores = torch.randn(1, 2, 3700, generator=torch.Generator().manual_seed(4))
    scores = (scores.round() if kind == "ties" else scores).to(DEVICE)
    same(scores, torch.tensor([[1000, 3]]))
    expected = top_k_mask(scores, 1500, implementation="reference").nonzero()[:, 2].view(1, 2, 1500)
    monkeypatch.setattr("kvbench.kernels.row_selection.triton.SINGLE", 10)
    assert torch.equal(top_k_indices(scores, 1500, implementation="triton"), expected)


@BOTH
@pytest.mark.parametrize("rows", [300, 5000])
def test_heads_take_as_many_as_they_are_told(implementation, rows):
    scores = torch.randn(2, 2, rows, generator=torch.Generator().manual_seed(1)).round(decimals=1).to(DEVICE)
    counts = torch.tensor([[0, 1], [17, 41]], device=DEVICE)
    found = top_k_indices(scores, 40, counts=counts, implementation=implementation)
    for own, count, listed in zip(scores.flatten(0, 1), counts.flatten().tolist(), found.flatten(0, 1), strict=True):
        expected = own.sort(descending=True, stable=True).indices[: min(count, 40)].sort().values
        assert torch.equal(listed[listed >= 0], expected) and listed.min() >= -1


@pytest.mark.cover
@pytest.mark.parametrize("counts", [None, [[0], [30]], [[9], [200]]])
@pytest.mark.parametrize("window", [None, (3, 117)])
@pytest.mark.parametrize(
    "rows, heads", [(120, 1), only_in_full(2500, 5), (5000, 3), only_in_full(20000, 3), (2500, 11)]
)
def test_rows_whose_largest_product_counts(rows, heads, window, counts, monkeypatch):
    """Nothing outside of the window is listed, and nothing outside of the list is written."""
    if rows == 5000:  # two programs, where 20000 have eight
        monkeypatch.setattr("kvbench.kernels.row_selection.triton.SINGLE", 10)
        monkeypatch.setattr("kvbench.kernels.row_selection.triton.SPLITS", (1, 2))
    products = torch.randn(2, rows, heads, generator=torch.Generator().manual_seed(rows)).to(DEVICE).mT
    if window:
        products[:, :, window[1] :] = torch.nan
    scores = products[..., slice(*window) if window else slice(None)].amax(1, keepdim=True)
    count = 40
    order = (scores.argsort(stable=True, dim=2, descending=True) + (window[0] if window else 0))[..., :count]
    for name in ("reference", "triton"):
        room = torch.full((2, 1, count + 9), -7, device=DEVICE)
        given = {
            "window": None if window is None else torch.tensor([window, (0, 0)], device=DEVICE).T[:, 0],
            "counts": None if counts is None else torch.tensor(counts, device=DEVICE),
        }
        found = top_k_of_heads(products, count, into=room[..., 4 : count + 4], implementation=name, **given)
        fresh = top_k_of_heads(products, count, implementation=name, **given)
        for b in range(2):
            taken = count if counts is None else min(counts[b][0], count)
            expected = sorted(order[b, 0, :taken].tolist())
            for own, other in ((found, -7), (fresh, -1)):
                assert own[b, 0][own[b, 0] != other].tolist() == expected
        assert (room[..., :4] == -7).all() and (room[..., count + 4 :] == -7).all()


def test_inputs_that_do_not_fit():
    scores, rows = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4)
    for message, call in (
        ("top_k_mask: ", lambda: top_k_mask(scores, torch.zeros(2, dtype=torch.int64))),
        ("top_k_mask: ", lambda: top_k_mask(scores, torch.zeros(1, 2))),
        ("top_k_mask: ", lambda: top_k_mask(scores[0], 2)),
        ("top_k_mask: implementation 'cuda'", lambda: top_k_mask(scores, 1, implementation="cuda")),
        ("top_k_mask: .* not torch.float64", lambda: top_k_mask(scores.double(), 1, implementation="triton")),
        ("top_k_indices: 4 of ", lambda: top_k_indices(scores, 4)),
        ("top_k_indices: counts", lambda: top_k_indices(scores, 2, counts=torch.ones(2, 2).long())),
        ("top_k_indices: counts", lambda: top_k_indices(scores, 2, counts=torch.ones(1, 2))),
        ("top_k_indices: counts", lambda: top_k_indices(scores, 2, counts=torch.ones(1, 2).long(), flat=True)),
        ("top_k_indices: into", lambda: top_k_indices(scores, 2, into=torch.zeros(1, 2, 2))),
        ("top_k_indices: into", lambda: top_k_indices(scores, 2, into=torch.zeros(1, 2, 3).long())),
        ("top_k_indices: into", lambda: top_k_indices(scores, 1, flat=True, into=torch.zeros(1, 2, 1).long())),
        ("top_k_of_heads: 4 of ", lambda: top_k_of_heads(scores, 4)),
        ("top_k_of_heads: window", lambda: top_k_of_heads(scores, 1, window=torch.zeros(3).long())),
        ("kept_indices: ", lambda: kept_indices(scores)),
        ("kept_indices: 3 rows of ", lambda: kept_indices(scores > 0, 3)),
        ("gather_rows: ", lambda: gather_rows(torch.zeros(1, dtype=torch.int64), rows, rows[:, :, :2])),
        ("gather_rows: ", lambda: gather_rows(torch.zeros(2).long(), rows, rows[..., :2], into=(rows, rows))),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.row_selection import triton as own

    work = {"quotas": "*i64", "work": "*i32", "tallies": "*i32", "known": "*i64", "chosen": "*u8"}
    marks = {"LIST": False, "FLAT": False, "TILE": own.HEAD, "BEGIN": 0, "END": own.PHASES.value, "ONE": True}
    listed = {**marks, "LIST": True, "FLAT": True, "BEGIN": 1}
    for splits in own.SPLITS:
        yield list_kernel(own._choose, {**work, "scores": "*bf16"}, {**marks, "SPLITS": splits}, num_warps=8)
        given = {**work, "chosen": "*i64", "scores": "*fp32"}
        yield list_kernel(own._choose, given, {**listed, "SPLITS": splits}, num_warps=8)
    del given["quotas"]  # all heads keep as many rows
    yield list_kernel(own._choose, given, {**listed, "quotas": None, "SPLITS": 32, "ONE": False}, num_warps=8)
    joined = {"products": "*fp32", "window": "*i64", "out": "*fp32", "work": "*i32"}
    for window in (False, True):
        yield list_kernel(own._join_heads, joined, {"WINDOW": window, "N": own.JOINED, "HEADS": own.HEADS})
    top = {"scores": "*fp32", "index": "*i64"}
    for flat in (False, True):
        sizes = dict(zip(("TILE", "MORE"), own.SIZES[-1], strict=True))
        yield list_kernel(own._list_top, top, {"FLAT": flat, **sizes}, num_warps=8)
        for tile in (own.HELD, own.SIZES[-1][0]):
            yield list_kernel(
                own._list_few, top, {"K": own.FEW, "FLAT": flat, "TILE": tile}, num_warps=tile // own.HELD
            )
    marks = {"marks": "*u8", "counts": "*i32", "places": "*i64", "size": "i64", "total": "i64"}
    yield list_kernel(own._count_marks, marks, {"TILE": own.TILE})
    yield list_kernel(own._write_places, marks, {"TILE": own.TILE})
    rows = dict.fromkeys(("keys", "values", "new_keys", "new_values"), "*bf16")
    yield list_kernel(
        own._copy, {**rows, "index": "*i64", "k_b": "i64", "new_h": "i64"}, {"ROWS": own.ROWS, "DIM": 128}
    )
