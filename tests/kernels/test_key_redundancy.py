"""The redundancy of keys: the reference against loops in float64, and Triton against the reference."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from kvbench.kernels.key_redundancy import key_redundancy, reference
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import DEVICE, DTYPES, assert_equal_sums, poison_memory

SHAPES = [(1, 1, 1, 16), (2, 3, 37, 24), (1, 2, 130, 96), (1, 1, 300, 128), (1, 1, 90, 256)]
SHORT = 128  # rows of a span, so that few rows are several spans
SIMILAR = (0.0, 0.5)


def draw_keys(shape, dtype):
    """Keys in groups that resemble each other, which repeat each other at once or after many rows, and absent rows."""
    batch, heads, rows, dim = shape
    draw = torch.Generator().manual_seed(rows)
    kinds = torch.randn(batch, heads, 5, dim, generator=draw)
    kind = torch.randint(0, 7, (batch, heads, rows), generator=draw)  # the last two are no kind's
    near = kinds.gather(2, kind.clamp(max=4)[..., None].expand(*kind.shape, dim)) * (kind < 5)[..., None]
    keys = near + torch.randn(shape, generator=draw) * torch.rand(*kind.shape, 1, generator=draw)
    absent = torch.randint(0, rows, (batch, heads, 1), generator=draw)
    return keys.to(dtype).to(DEVICE), (torch.arange(rows) >= absent).to(DEVICE)


def find_gap(keys, present, similar):
    """The first threshold from `similar` on that rounding does not bring to the cosine of any pair."""
    units = normalize(keys.double(), dim=-1) * present[..., None]
    cosines = (units @ units.mT).flatten()
    edges = torch.cat([cosines.new_tensor([similar]), cosines[cosines > similar].sort().values, cosines.new_ones(1)])
    wide = (edges.diff() > 4e-6).nonzero()[0, 0]
    return float(edges[wide : wide + 2].mean())


@pytest.mark.parametrize("chunk", [5, 64])
def test_reference_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    keys, present = draw_keys((1, 2, 17, 4), torch.float64)
    found = key_redundancy(keys, present, 0.5, implementation="reference")
    for head in range(2):
        units = normalize(keys[0, head][present[0, head]], dim=-1)
        cosines = units @ units.mT
        cosines.fill_diagonal_(0)
        for own in cosines:
            repeats = (own > 0.5).nonzero()
            if len(repeats):
                own[repeats[-1]] = 0
        torch.testing.assert_close(found[0, head][present[0, head]], cosines.mean(0).softmax(0))
    assert (found[~present] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter, in products with infinity
@pytest.mark.cover
@pytest.mark.parametrize("similar", SIMILAR)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_agrees_with_the_reference(shape, dtype, similar, monkeypatch):
    """Whatever absent rows hold, and whatever was in memory before."""
    monkeypatch.setattr("kvbench.kernels.key_redundancy.triton.SPAN", SHORT)
    keys, present = draw_keys(shape, dtype)
    similar = find_gap(keys, present, similar)
    exact = key_redundancy(keys.double(), present, similar, implementation="reference")
    for hole in (math.nan, math.inf):
        with monkeypatch.context() as patch:
            poison_memory(patch)
            found = key_redundancy(
                keys.masked_fill(~present[..., None], hole), present, similar, implementation="triton"
            )
        assert found.dtype == torch.float32 and (found[~present] == 0).all()
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_and_opposite_keys_and_keys_of_no_length(dtype):
    keys = torch.eye(32).repeat(1, 2, 3, 1)[:, :, :70] * 3
    keys[:, 0, 20:50] = 0
    keys[:, 1, ::2] *= -1
    keys, present = keys.to(dtype).to(DEVICE), torch.ones(1, 2, 70, dtype=torch.bool, device=DEVICE)
    found = key_redundancy(keys, present, 0.5, implementation="triton")
    exact = key_redundancy(keys.double(), present, 0.5, implementation="reference")
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_cosines_around_the_threshold(dtype, apart):
    """Keys in pairs of their own, of any lengths, whose cosines lie in turn above and below it."""
    cosines = 0.5 + apart * torch.tensor([1.0, -1.0]).repeat(8)
    first, second = torch.eye(32)[::2], torch.eye(32)[1::2]
    twins = cosines[:, None] * first + (1 - cosines**2).sqrt()[:, None] * second
    keys = (torch.cat([first, twins]) * torch.linspace(0.1, 9, 32)[:, None]).to(dtype)[None, None].to(DEVICE)
    present = torch.ones(1, 1, 32, dtype=torch.bool, device=DEVICE)
    found = key_redundancy(keys, present, 0.5, implementation="triton")
    exact = key_redundancy(keys.double(), present, 0.5, implementation="reference")
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)
    assert ((found - found[..., :1]).abs() > 1e-4).sum() == 16  # those that are similar count less


def test_a_key_that_is_nan_makes_its_head_nan():
    keys, present = draw_keys((1, 2, 40, 16), torch.float32)
    keys[0, 1, 39] = math.nan
    for implementation in ("reference", "triton"):
        found = key_redundancy(keys, present, 0.5, implementation=implementation)
        assert found[0, 0].isfinite().all() and found[0, 1][present[0, 1]].isnan().all()


def test_views_as_models_and_storage_make_them():
    keys, present = draw_keys((2, 2, 70, 32), torch.bfloat16)
    expected = key_redundancy(keys, present, 0.5, implementation="triton")
    room = torch.full((2, 2, 90, 40), math.nan, dtype=keys.dtype, device=DEVICE)
    room[:, :, :70, :32] = keys
    flags = present.transpose(1, 2).contiguous().transpose(1, 2)
    for view in (room[:, :, :70, :32], keys.transpose(1, 2).contiguous().transpose(1, 2), keys.mT.contiguous().mT):
        assert not view.is_contiguous()
        assert_equal_sums(key_redundancy(view, flags, 0.5, implementation="triton"), expected)


def test_what_is_refused():
    keys, present = draw_keys((1, 2, 20, 32), torch.float32)
    with pytest.raises(ValueError, match="^key_redundancy: keys"):
        key_redundancy(keys, present[:, :1], 0.5)
    with pytest.raises(ValueError, match=r"^key_redundancy: similar -0.5; at least 0"):
        key_redundancy(keys, present, -0.5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("kinds", [1, 4096])
def test_many_rows_with_one_newest_and_with_none(kinds):
    """Every call gives the same bits, and no call has memory for the cosines of all pairs."""
    draw = torch.Generator().manual_seed(kinds)
    alike = torch.randn(kinds, 128, generator=draw).repeat(16384 // kinds, 1)
    keys = (alike + 0.1 * torch.randn(16384, 128, generator=draw)).to(DEVICE, torch.bfloat16)[None, None]
    present = torch.ones(1, 1, 16384, dtype=torch.bool, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = key_redundancy(keys, present, 0.5)
    assert torch.cuda.max_memory_allocated() - before < 16 << 20
    for _ in range(3):
        assert torch.equal(key_redundancy(keys, present, 0.5), found)
    exact = key_redundancy(keys.double(), present, 0.5, implementation="reference")
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0)  # a cosine may lie at the threshold


def ahead():
    from kvbench.kernels.key_redundancy.triton import ONE, SPAN, repeats_kernel, tiles

    for dtype, dim in ((torch.bfloat16, 128), (torch.float32, 96), (torch.float16, 256)):
        name = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}[dtype]
        kinds = {"keys": f"*{name}", "inverse": "*fp32", "repeated": "*i64", "similar": "fp32"}
        wide = 128 if dim == 96 else dim
        constants = {"ONE": ONE, "SPAN": SPAN, "DIM": dim, "BLOCK_D": wide, "CAST": False, **tiles(dtype, dim)}
        yield list_typed_kernel(repeats_kernel, kinds, constants)
