"""The Triton kernels of votes and peaks against float64, on a GPU if there is one, else in Triton's interpreter."""

import math

import pytest
import torch

from kvbench.kernels.accumulated_attention import accumulated_attention
from kvbench.kernels.max_attention import max_attention
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_typed_kernel
from tests.support.kernel_checks import DEVICE, DTYPES, assert_equal_sums, poison_memory

# batch, KV heads, query heads of a group, tokens, rows, dimension
SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 2, 3, 5, 37, 24),
    (1, 1, 4, 33, 33, 64),
    (1, 2, 1, 1, 130, 96),
    (1, 1, 8, 17, 257, 16),
    (1, 1, 3, 150, 203, 32),
    (1, 1, 1, 70, 70, 256),
]


def made(shape, dtype, masses="ones", seed=0):
    """Queries, keys, mass and the log-sum-exps in float64 of what these queries and keys are in `dtype`."""
    batch, heads, group, tokens, rows, dim = shape
    draw = torch.Generator().manual_seed(seed)
    queries = (2 * torch.randn(batch, heads * group, tokens, dim, generator=draw)).to(dtype)
    keys = torch.randn(batch, heads, rows, dim, generator=draw).to(dtype)
    mass = torch.ones(batch, heads, rows)
    if masses == "merged":
        mass[..., : rows - tokens] = torch.randint(1, 900, (batch, heads, rows - tokens), generator=draw).float()
    if masses != "ones":
        absent = torch.randint(0, rows - tokens + 1, (batch, heads, 1), generator=draw)
        mass = mass.masked_fill(torch.arange(rows) < absent, 0)
    logits = queries.double().unflatten(1, (heads, group)) @ keys.double()[:, :, None].mT * scaling(dim)
    logits = logits + mass.double().log()[:, :, None, None]
    later = torch.arange(rows) > torch.arange(rows - tokens, rows)[:, None]
    lse = logits.masked_fill(later, -math.inf).logsumexp(-1).flatten(1, 2)
    return queries.to(DEVICE), keys.to(DEVICE), mass.to(DEVICE), lse.to(DEVICE)


def scaling(dim: int) -> float:
    return 0.7 * dim**-0.5


def close(found, exact, dim):
    """Logits here are up to √d·6 or so and off by 2^-24 of that a few times over; a probability is off by as much of
    itself, however small.
    """
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-20 * (8 + dim), atol=1e-12)


@pytest.mark.cover
@pytest.mark.parametrize(
    "masses, dtype", [("ones", DTYPES[0]), ("ragged", DTYPES[1]), *(("merged", dtype) for dtype in DTYPES)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_votes(shape, masses, dtype, monkeypatch):
    """Whatever absent rows hold, and whatever was in memory before."""
    queries, keys, mass, lse = made(shape, dtype, masses)
    exact = [x.double() for x in (queries, keys, mass)]
    each = accumulated_attention(*exact, lse, scaling(shape[-1]), implementation="reference")
    keys = keys.masked_fill((mass == 0)[..., None], math.nan)
    poison_memory(monkeypatch)
    found = accumulated_attention(queries, keys, mass, lse.float(), scaling(shape[-1]), implementation="triton")
    assert found.shape == each.shape
    close(found, each, shape[-1])
    mean = accumulated_attention(
        queries, keys, mass, lse.float(), scaling(shape[-1]), group="mean", implementation="triton"
    )
    assert mean.shape == keys.shape[:3]
    close(mean, each.mean(2), shape[-1])
    assert (mean[mass == 0] == 0).all()


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_peaks(shape, dtype, monkeypatch):
    queries, keys, _, _ = made(shape, dtype)
    exact = max_attention(queries.double(), keys.double(), scaling(shape[-1]), implementation="reference")
    poison_memory(monkeypatch)
    found = max_attention(queries, keys, scaling(shape[-1]), implementation="triton")
    assert found.shape == exact.shape
    close(found, exact, shape[-1])
    weight = torch.linspace(0.02, 3, shape[0] * shape[3], device=keys.device).view(shape[0], shape[3])
    more = {"weight": weight, "together": False}
    exact = max_attention(queries.double(), keys.double(), scaling(shape[-1]), **more, implementation="reference")
    found = max_attention(queries, keys, scaling(shape[-1]), **more, implementation="triton")
    assert found.shape == exact.shape
    close(found, exact, shape[-1])


@pytest.mark.parametrize("sinks, cap", [(True, None), (False, 1.5), (True, 1.5)])
def test_sinks_and_caps(sinks, cap):
    queries, keys, mass, lse = made((2, 2, 3, 20, 67, 24), torch.float32, "merged")
    logits = torch.tensor([0.0, 4.0, -4.0, 40.0, 1.0, 2.0], device=DEVICE) if sinks else None
    extras, exact = SoftmaxExtras(logits, cap), [x.double() for x in (queries, keys, mass)]
    expected = accumulated_attention(*exact, lse, 0.2, extras=extras, implementation="reference")
    found = accumulated_attention(queries, keys, mass, lse.float(), 0.2, extras=extras, implementation="triton")
    close(found, expected, 24)
    expected = max_attention(*exact[:2], 0.2, together=False, extras=extras, implementation="reference")
    found = max_attention(queries, keys, 0.2, together=False, extras=extras, implementation="triton")
    close(found, expected, 24)


def test_views_as_models_and_storage_make_them():
    """Heads and tokens swapped, a slice of a tail with room, log-sum-exps and masses of another order."""
    shape = (2, 2, 2, 9, 35, 32)
    queries, keys, mass, lse = made(shape, torch.float32, "merged")
    expected = accumulated_attention(queries, keys, mass, lse.float(), 0.3, implementation="triton")
    largest = max_attention(queries, keys, 0.3, implementation="triton")
    swapped = queries.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((2, 2, 50, 40), math.nan, device=DEVICE)
    room[:, :, :35, :32] = keys
    sliced = room[:, :, :35, :32]
    turned = keys.mT.contiguous().mT
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (mass, lse.float())]
    for own in (sliced, turned):
        assert not own.is_contiguous() and not swapped.is_contiguous()
        assert_equal_sums(accumulated_attention(swapped, own, *other, 0.3, implementation="triton"), expected)
        assert_equal_sums(max_attention(swapped, own, 0.3, implementation="triton"), largest)
    wide = mass[:, :1].expand(2, 2, 35)  # a stride of 0
    found = accumulated_attention(queries, keys, wide, lse.float(), 0.3, implementation="triton")
    exact = accumulated_attention(
        queries.double(), keys.double(), wide.double(), lse.double(), 0.3, implementation="reference"
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-9)


def test_votes_of_one_shot_add_up_to_its_queries():
    queries, keys, mass, lse = made((1, 2, 2, 90, 140, 32), torch.bfloat16, "merged")
    found = accumulated_attention(queries, keys, mass, lse.float(), scaling(32), implementation="triton")
    torch.testing.assert_close(found.sum(-1), torch.full_like(found[..., 0], 90), rtol=3e-5, atol=0)


def test_what_is_refused():
    queries, keys, mass, lse = made((1, 1, 2, 5, 9, 16), torch.float32)
    with pytest.raises(ValueError, match="accumulated_attention: group"):
        accumulated_attention(queries, keys, mass, lse, 1.0, group="max")
    with pytest.raises(ValueError, match="accumulated_attention: keys"):
        accumulated_attention(queries, keys, mass[..., 1:], lse, 1.0)
    for op in (
        lambda x, **how: accumulated_attention(x, keys.to(x.dtype), mass, lse, 1.0, **how),
        lambda x, **how: max_attention(x, keys.to(x.dtype), 1.0, **how),
    ):
        with pytest.raises(ValueError, match="implementation 'cuda'"):
            op(queries, implementation="cuda")
        with pytest.raises(ValueError, match="float64"):
            op(queries.double(), implementation="triton")


def ahead():
    from kvbench.kernels.accumulated_attention.triton import blocks, columns_kernel
    from kvbench.kernels.max_attention.triton import lse_kernel, tiles

    some = [(torch.bfloat16, "bf16", 96), (torch.bfloat16, "bf16", 128), (torch.float16, "fp16", 256)]
    for dtype, name, dim in [*some, (torch.float32, "fp32", 64)]:
        kinds = {"queries": f"*{name}", "keys": f"*{name}", "mass": "*fp32", "lse": "*fp32", "out": "*fp32"}
        kinds |= {"scale": "fp32"}
        same = {"DIM": dim, "BLOCK_D": 1 << (dim - 1).bit_length(), "CAST": False, "PRECISION": "ieee"}
        same["CAP"] = 50.0 if dim == 96 else None
        ways = [(True, False, True), (False, False, True), (True, True, False)]
        for together, maximum, mass in ways if dim == 128 else ways[1:2]:
            more = {"GROUP": 4, "TOGETHER": together, "MAXIMUM": maximum, "HAS_MASS": mass, "UNIT": 1.0}
            yield list_typed_kernel(columns_kernel, kinds, same | more | blocks(dtype, dim, 4096))
        yield list_typed_kernel(lse_kernel, kinds, same | tiles(dtype, dim, 4096))
