"""The Triton kernels of expected against float64, on a GPU if there is one, else in Triton's interpreter."""

import math

import pytest
import torch

from kvbench.kernels.expected_attention import expected_logits, expected_scores, merge, moments
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import DEVICE, DTYPES, assert_equal_sums, poison_memory

SPLIT = 2.0**-16 if DEVICE == "cuda" else 2.0**-14
# batch, KV heads, query heads of a group, tokens, dimension, rotated dimensions
QUERIES = [
    (1, 1, 1, 1, 16, 16),
    (2, 1, 3, 37, 24, 16),
    (1, 2, 1, 300, 32, 0),
    (1, 1, 2, 170, 96, 96),
    (1, 1, 1, 70, 256, 128),
]
# batch, KV heads, query heads of a group, rows, dimension
KEYS = [
    (1, 1, 1, 1, 16),
    (2, 2, 3, 37, 24),
    (1, 1, 4, 290, 32),
    (1, 1, 8, 65, 64),
    (1, 1, 1, 130, 96),
    (1, 1, 1, 67, 256),
]


def asked(shape, dtype, seed=0):
    """Queries far from the origin, and the cos and sin they were turned with, of another length than 1, or None."""
    batch, heads, group, tokens, dim, rotated = shape
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads * group, tokens, dim, generator=draw)
    queries = queries + 4 * torch.randn(batch, heads * group, 1, dim, generator=draw)
    angles = 7 * torch.randn(tokens, rotated // 2, generator=draw)
    turn = [(1.3 * part).to(dtype).to(DEVICE) for part in (angles.cos(), angles.sin())]
    return queries.to(dtype).to(DEVICE), turn if rotated else None


@pytest.mark.cover
@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", QUERIES)
def test_moments(shape, dtype, scatter, monkeypatch):
    """bfloat16 factors are rounded, each by 2^-9 of itself or so and independently of the others, so that a sum of T
    products is off by some 2^-9/√T of the sum of sizes, of squares 2^-7.5/√T; in the interpreter, which cuts digits off
    instead, by 2^-6 at most. Products of others are off by 2^-20.
    """
    queries, turn = asked(shape, dtype)
    exact = moments(queries.double(), scatter, turn, implementation="reference")
    poison_memory(monkeypatch)
    found = moments(queries, scatter, turn, implementation="triton")
    assert found.count == exact.count and found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=2e-6, atol=2e-6)
    if not scatter:
        assert found.scatter is None
        return
    sizes = exact.scatter.diagonal(dim1=-2, dim2=-1).sqrt()
    wide = sizes[..., None] * sizes[..., None, :] + 1e-9
    off = ((found.scatter.double() - exact.scatter) / wide).abs().max()
    rounding = 2.0**-6 if DEVICE == "cpu" else 2.0**-5 * shape[3] ** -0.5  # six times what is likely of squares
    assert off < (rounding if dtype == torch.bfloat16 else 2.0**-18)
    assert torch.equal(found.scatter, found.scatter.mT)


def test_moments_where_the_mean_drifts():
    """Every part is taken about a point of its own, and their means lie far from each other."""
    queries, _ = asked((1, 1, 2, 700, 32, 0), torch.float32)
    queries = queries + torch.linspace(-300, 300, 700, device=DEVICE)[:, None]
    exact = moments(queries.double())
    found = moments(queries, implementation="triton")
    torch.testing.assert_close(found.scatter.double(), exact.scatter, rtol=1e-5, atol=0)
    halves = merge(*(moments(part, implementation="triton") for part in queries.split([123, 577], dim=2)))
    torch.testing.assert_close(halves.scatter.double(), exact.scatter, rtol=1e-5, atol=0)


def expecting(shape, dtype, seed=0):
    """Mean and covariance of query heads, keys, values, and masses with absent and merged rows."""
    batch, heads, group, rows, dim = shape
    draw = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, heads * group, dim, generator=draw)
    root = torch.randn(batch, heads * group, dim, dim, generator=draw) / dim**0.5
    keys, values = torch.randn(2, batch, heads, rows, dim, generator=draw).to(dtype)
    mass = torch.randint(1, 9, (batch, heads, rows), generator=draw).float()
    absent = torch.randint(0, rows, (batch, heads, 1), generator=draw)
    mass = mass.masked_fill(torch.arange(rows) < absent, 0)
    return [x.to(DEVICE) for x in (mean, root @ root.mT, keys, values, mass)]


@pytest.mark.cover
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", KEYS)
def test_expected_logits(shape, dtype, square, monkeypatch):
    """Σ is known to 2^-16 beside bfloat16 keys (2^-14 in the interpreter), to 2^-21 else: so is a logit."""
    mean, covariance, keys, _, _ = expecting(shape, dtype)
    covariance, scaling = covariance if square else None, 2 * shape[-1] ** -0.5
    exact = [None if x is None else x.double() for x in (mean, covariance, keys)]
    exact = expected_logits(*exact, scaling, implementation="reference")
    poison_memory(monkeypatch)
    found = expected_logits(mean, covariance, keys, scaling, implementation="triton")
    assert found.shape == exact.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=SPLIT, atol=2e-5 if DEVICE == "cuda" else 1e-4)


@pytest.mark.cover
@pytest.mark.parametrize("valued", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", KEYS)
def test_expected_scores(shape, dtype, valued, monkeypatch):
    mean, covariance, keys, values, mass = expecting(shape, dtype)
    scaling = 2 * shape[-1] ** -0.5
    exact = [x.double() for x in (mean, covariance, keys, mass)]
    own = values.double() if valued else None
    exact = expected_scores(*exact, scaling, own, 0.01, implementation="reference")
    keys, values = (x.masked_fill((mass == 0)[..., None], math.nan) for x in (keys, values))
    poison_memory(monkeypatch)
    own = values if valued else None
    found = expected_scores(mean, covariance, keys, mass, scaling, own, 0.01, implementation="triton")
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-9)
    assert (found[mass == 0] == 0).all()
    if not valued:
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    none = expected_scores(mean, covariance, keys, torch.zeros_like(mass), scaling, own, 0.01, implementation="triton")
    assert (none == 0).all()


def test_views_as_models_and_storage_make_them():
    shape = (2, 2, 1, 35, 32)
    mean, covariance, keys, values, mass = expecting(shape, torch.bfloat16)
    expected = expected_scores(mean, covariance, keys, mass, 0.3, values, implementation="triton")
    room = torch.full((2, 2, 2, 50, 40), math.nan, dtype=keys.dtype, device=DEVICE)
    room[0, :, :, :35, :32], room[1, :, :, :35, :32] = keys, values
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values, mass)]
    found = expected_scores(mean, covariance.mT, swapped[0], swapped[2], 0.3, swapped[1], implementation="triton")
    assert_equal_sums(found, expected)
    sliced = room[:, :, :, :35, :32]
    assert_equal_sums(
        expected_scores(mean, covariance, sliced[0], mass, 0.3, sliced[1], implementation="triton"), expected
    )
    queries, turn = asked((2, 2, 1, 50, 32, 16), torch.bfloat16)
    expected = moments(queries, True, turn, implementation="triton")
    wide = [torch.cat([part, part], 1)[:, : part.shape[1]] for part in turn]  # half of what a model makes
    found = moments(queries.transpose(1, 2).contiguous().transpose(1, 2), True, wide, implementation="triton")
    assert_equal_sums(found.mean, expected.mean)
    assert_equal_sums(found.scatter, expected.scatter)


def test_what_is_refused():
    queries, turn = asked((1, 1, 2, 5, 16, 16), torch.float32)
    mean, covariance, keys, values, mass = expecting((1, 2, 2, 9, 16), torch.float32)
    with pytest.raises(ValueError, match="^moments: queries"):
        moments(queries[:, :, :0])
    with pytest.raises(ValueError, match="^moments: queries .* turned by"):
        moments(queries, True, [part[:4] for part in turn])
    with pytest.raises(ValueError, match="^expected_scores: keys"):
        expected_scores(mean, covariance, keys, mass[..., 1:], 1.0)
    with pytest.raises(ValueError, match="^expected_scores: mean"):
        expected_scores(mean[:, :3], None, keys, mass, 1.0)
    with pytest.raises(ValueError, match="^expected_logits: mean .* covariance"):
        expected_logits(mean, covariance[:, :1], keys, 1.0)
    with pytest.raises(ValueError, match="float64"):
        moments(queries.double(), implementation="triton")


def ahead():
    from kvbench.kernels.expected_attention import triton as kernels

    names = ("sums", "shifts", "scatters", "mass", "mean", "covariance", "logits", "tops", "totals", "out", "scatter")
    for dtype, name, dim in ((torch.bfloat16, "bf16", 128), (torch.float16, "fp16", 96), (torch.bfloat16, "bf16", 256)):
        kinds = dict.fromkeys(names, "*fp32") | dict.fromkeys(("queries", "cos", "sin", "keys", "values"), f"*{name}")
        kinds |= {"epsilon": "fp32", "scale": "fp32"}
        wide = 1 << (dim - 1).bit_length()
        same = {"DIM": dim, "CAST": False, "PRECISION": kernels.PRECISION[dtype]}
        own = {**same, "ROUND": name == "bf16", "SCATTER": True, "HALF": dim // 2, **kernels.query_tiles(dtype, dim)}
        yield list_typed_kernel(kernels.moments_kernel, kinds, own)
        yield list_typed_kernel(
            kernels.join_kernel,
            kinds,
            {"SCATTER": True, "DIM": dim, "ROWS": 16, "BLOCK_D": wide, "num_warps": 4, "num_stages": 3},
        )
        own = {
            **same,
            "SPLIT": name == "bf16",
            "GROUP": 4,
            "QUADRATIC": True,
            "HAS_MASS": True,
            **kernels.key_tiles(dtype, dim),
        }
        yield list_typed_kernel(kernels.logits_kernel, kinds, own)
    own = {"GROUP": 4, "WEIGHED": True, "DIM": dim, "BLOCK_D": wide, "BLOCK_N": 32, "BLOCK_P": 128}
    yield list_typed_kernel(kernels.scores_kernel, kinds, {**own, "num_warps": 4, "num_stages": 3})
