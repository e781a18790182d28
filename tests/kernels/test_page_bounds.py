"""Page bounds in Triton against the reference, over odd sizes, groups, dimensions, dtypes and views."""

import math

import pytest
import torch

from kvbench.kernels.page_bounds import page_bounds, page_upper_bounds, update_page_bounds
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def tail(rows, dim, dtype, seed=0):
    """(2, 3, rows, dim): the front of a longer tail that is NaN behind them."""
    keys = drawn(2, 3, rows + 5, dim, dtype=dtype, seed=seed)
    keys[:, :, rows:] = math.nan
    return keys[:, :, :rows]


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, page, dim", [(1, 1, 16), (1, 16, 96), (37, 16, 24), (130, 5, 16), (60, 100, 256)])
def test_bounds(rows, page, dim, dtype):
    keys = tail(rows, dim, dtype, rows)
    for view in (keys, keys.transpose(0, 1), keys[:, 1:2, rows // 2 :]):
        found, expected = (page_bounds(view, page, implementation=name) for name in ("triton", "reference"))
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype and torch.equal(one, other)


def test_long_pages_are_read_in_parts():
    keys = drawn(1, 1, 700, 16)
    found, expected = (page_bounds(keys, 600, implementation=name) for name in ("triton", "reference"))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages, group, dim", [(1, 1, 16), (33, 4, 96), (7, 3, 256), (40, 2, 24)])
def test_upper(pages, group, dim, dtype):
    queries = drawn(2, group * 3, dim, dtype=dtype, seed=1)
    queries[0, 0, : dim // 2] = 0
    both = torch.stack([drawn(2, 3, pages + 2, dim, dtype=dtype, seed=seed) for seed in (2, 3)])
    low, high = both.amin(0)[:, :, :pages], both.amax(0)[:, :, :pages]
    found = page_upper_bounds(queries, low, high, implementation="triton")
    exact = page_upper_bounds(queries.double(), low.double(), high.double(), implementation="reference")
    assert found.dtype == torch.float32 and found.shape == (2, group * 3, pages)
    size = queries.double().abs().sum(-1, keepdim=True) * torch.maximum(low.abs(), high.abs()).double().amax()
    assert ((found.double() - exact).abs() <= 2.0**-24 * dim * size).all()
    for name in ("triton", "reference"):
        last = torch.tensor(pages // 2, device=DEVICE)
        some = page_upper_bounds(queries, low, high, newest=last, implementation=name)
        assert (some[..., pages // 2 + 1 :] == -math.inf).all()
        assert torch.allclose(some[..., : pages // 2 + 1], found[..., : pages // 2 + 1], rtol=1e-3, atol=1e-3)
        forced = page_upper_bounds(queries, low, high, newest=last, force_newest=True, implementation=name)
        some[..., pages // 2] = math.inf
        assert torch.equal(forced, some)
    swapped = queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(page_upper_bounds(swapped, low.contiguous(), high, implementation="triton"), found)


@BOTH
@pytest.mark.parametrize("last, page", [(0, 4), (5, 4), (35, 4), (35, 100)])
def test_the_newest_page_alone_is_computed(last, page, implementation):
    keys = tail(36, 24, torch.bfloat16)
    whole = page_bounds(keys[:, :, : last + 1], page, implementation="reference")
    found = [torch.full((2, 3, -(-40 // page), 24), math.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    update_page_bounds(keys, *found, torch.tensor(last, device=DEVICE), page, implementation=implementation)
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one[:, :, last // page], other[:, :, -1])
        assert one.isnan().any(-1).sum() == 2 * 3 * (one.shape[2] - 1)


def test_no_row_is_above_its_page():
    keys, queries = drawn(1, 2, 50, 32, seed=4), drawn(1, 6, 32, seed=5)
    above = page_upper_bounds(queries, *page_bounds(keys, 8, implementation="triton"), implementation="triton")
    logits = queries.unflatten(1, (2, 3)) @ keys.mT
    assert (logits.flatten(1, 2) <= above.repeat_interleave(8, -1)[..., :50] + 1e-4).all()


def test_inputs_that_do_not_fit():
    keys, queries = torch.zeros(1, 2, 3, 4), torch.zeros(1, 4, 4)
    for message, call in (
        ("page_bounds: keys", lambda: page_bounds(keys, 0)),
        ("page_bounds: keys", lambda: page_bounds(keys[:, :, :0], 4)),
        ("page_bounds: .* not torch.float64", lambda: page_bounds(keys.double(), 4, implementation="triton")),
        ("page_upper_bounds: queries", lambda: page_upper_bounds(queries[:, :3], keys, keys)),
        ("page_upper_bounds: queries", lambda: page_upper_bounds(queries[..., :3], keys, keys)),
        ("page_upper_bounds: force_newest needs", lambda: page_upper_bounds(queries, keys, keys, force_newest=True)),
        ("page_upper_bounds: implementation", lambda: page_upper_bounds(queries, keys, keys, implementation="fast")),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.page_bounds import triton as own

    for dtype, dim, page in (("bf16", 128, 16), ("fp32", 256, 16), ("fp16", 64, 64)):
        rows = dict.fromkeys(("keys", "low", "high", "queries"), f"*{dtype}")
        size = own.ELEMENTS // dim // page
        yield list_kernel(own._bounds, rows, {"PAGES": size, "ROWS": page, "D": dim, "k_d": 1})
        small = {"ROWS": 16, "D": dim, "k_d": 1}
        yield list_kernel(own._newest, {**rows, "last": "*i64"}, small)
        size = own.BYTES // dim // 4
        more = {"NEWEST": True, "FORCE": True, "PAGES": size, "M": 16, "CAST": False, "q_d": 1, "l_d": 1, "h_d": 1}
        yield list_kernel(own._upper, {**rows, "above": "*fp32", "newest": "*i64"}, {**more, "D": dim})
