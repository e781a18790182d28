"""The Triton kernels of keydiff against float64, on a GPU if there is one, else in Triton's interpreter."""

import math

import pytest
import torch

from kvbench.kernels.key_similarity import METRICS, anchor, norms, similarity
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import DEVICE, DTYPES, assert_equal_sums, poison_memory

SHAPES = [(1, 1, 1, 16), (2, 3, 37, 24), (1, 2, 130, 96), (1, 8, 257, 64), (2, 1, 1031, 128), (1, 1, 90, 256)]
CLOSE = dict(rtol=2e-6, atol=2e-6)  # 2^-24 times a few, of sums of at most 256 products of unit size


def made(shape, dtype, seed=0):
    """Keys with a mean of their own, and masses of absent and merged rows, the last row present."""
    batch, heads, rows, dim = shape
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, rows, dim, generator=draw) + torch.randn(batch, heads, 1, dim, generator=draw)
    mass = torch.randint(1, 9, (batch, heads, rows), generator=draw).float()
    absent = torch.randint(0, rows, (batch, heads, 1), generator=draw)
    mass = mass.masked_fill(torch.arange(rows) < absent, 0)
    return keys.to(dtype).to(DEVICE), mass.to(DEVICE)


@pytest.mark.cover
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_anchor(shape, dtype, normalised, monkeypatch):
    """Whatever absent rows hold, and whatever was in memory before."""
    keys, mass = made(shape, dtype)
    exact = anchor(keys.double(), mass.double(), normalised, implementation="reference")
    for hole in (math.nan, math.inf):
        with monkeypatch.context() as patch:
            poison_memory(patch)
            holes = keys.masked_fill((mass == 0)[..., None], hole)
            found = anchor(holes, mass, normalised, implementation="triton")
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, **CLOSE)


@pytest.mark.cover
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_similarity(shape, dtype, metric, monkeypatch):
    """To an anchor of another size than 1; NaN in one row stays there."""
    keys, mass = made(shape, dtype)
    to = 3 * anchor(keys.double(), mass.double(), True, implementation="reference").float()
    exact = similarity(keys.double(), to.double(), metric, implementation="reference")
    keys = keys.masked_fill((mass == 0)[..., None], math.nan)
    poison_memory(monkeypatch)
    found = similarity(keys, to, metric, implementation="triton")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double()[mass > 0], exact[mass > 0], rtol=5e-6, atol=2e-5)
    assert found[mass == 0].isnan().all()


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape, dtype, monkeypatch):
    keys, _ = made(shape, dtype)
    poison_memory(monkeypatch)
    found = norms(keys, implementation="triton")
    torch.testing.assert_close(found.double(), keys.double().norm(dim=-1), rtol=1e-6, atol=0)


def test_keys_of_no_length():
    """A key of zeros has similarity 0 and pulls the anchor nowhere; so it is with torch."""
    keys, mass = made((1, 2, 20, 32), torch.float32)
    keys[:, :, 3:] = 0
    mass[:] = 1
    found = anchor(keys, mass, True, implementation="triton")
    torch.testing.assert_close(found, anchor(keys, mass, True, implementation="reference"), **CLOSE)
    cosine = similarity(keys, found, "cosine", implementation="triton")
    torch.testing.assert_close(cosine, similarity(keys, found, "cosine", implementation="reference"), **CLOSE)
    none = similarity(keys, torch.zeros_like(found), "cosine", implementation="triton")
    assert (cosine[..., 3:] == 0).all() and (none == 0).all()


def test_views_as_models_and_storage_make_them():
    keys, mass = made((2, 2, 70, 32), torch.bfloat16)
    to = anchor(keys, mass, True, implementation="triton")
    room = torch.full((2, 2, 90, 40), math.nan, dtype=keys.dtype, device=DEVICE)
    room[:, :, :70, :32] = keys
    views = [room[:, :, :70, :32], keys.transpose(1, 2).contiguous().transpose(1, 2), keys.mT.contiguous().mT]
    wide = to[:, :1].expand(2, 2, 32)
    masses = mass.transpose(1, 2).contiguous().transpose(1, 2)
    for view in views:
        assert not view.is_contiguous()
        assert_equal_sums(anchor(view, masses, True, implementation="triton"), to)
        assert_equal_sums(norms(view, implementation="triton"), norms(keys, implementation="triton"))
        for metric in METRICS:
            expected = similarity(keys, wide.contiguous(), metric, implementation="triton")
            assert_equal_sums(similarity(view, wide, metric, implementation="triton"), expected)


def test_what_is_refused():
    keys, mass = made((1, 2, 20, 32), torch.float32)
    with pytest.raises(ValueError, match="^anchor: keys"):
        anchor(keys, mass[:, :1], True)
    with pytest.raises(ValueError, match="^similarity: keys"):
        similarity(keys, keys[:, :, 0, :16], "dot")
    with pytest.raises(ValueError, match="^similarity: metric 'l1'; one of cosine, dot, euclidean"):
        similarity(keys, keys[:, :, 0], "l1")
    with pytest.raises(ValueError, match="^norms: rows"):
        norms(keys[0])
    with pytest.raises(ValueError, match="float64"):
        norms(keys.double(), implementation="triton")


def ahead():
    from kvbench.kernels.key_similarity.triton import compare_kernel, sums_kernel, tile

    floats = dict.fromkeys(("mass", "sums", "weights", "anchor", "out"), "*fp32")
    for dtype, dim in (("bf16", 128), ("fp32", 96), ("fp16", 256)):
        kinds = {**floats, "keys": f"*{dtype}"}
        same = {"DIM": dim, **tile(dim), "num_stages": 3}
        for normalised in (True, False):
            yield list_typed_kernel(sums_kernel, kinds, {**same, "NORMALISED": normalised, "UNIT": 1e-12})
        for metric in (*METRICS, "norm"):
            yield list_typed_kernel(compare_kernel, kinds, {**same, "METRIC": metric, "COSINE": 1e-8})
