"""Rounding and packing in Triton: the reference's bits, over groups, dtypes, odd sizes, views and extremes."""

import math

import pytest
import torch

from kvbench.kernels.quantize import Groups, dequantize, quantize
from tests.support.compile_kernels import list_kernel
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXTREMES = [0.0, -0.0, 3.0, -7.25, 1e-9, 6e4, 65504.0, 7e4, -1e30]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exactly(x, bits, group, scales=torch.float16):
    """The reference's on the CPU: on a GPU PyTorch multiplies by the rounded reciprocal of 2^bits - 1."""
    groups = quantize(x.cpu(), bits, group, scales, implementation="reference")
    return Groups(*(part.to(DEVICE) for part in groups))


def same(x, bits, group):
    """Both ways, to the bit; and what is read back is near what was written."""
    expected = exactly(x, bits, group)
    found = quantize(x, bits, group, implementation="triton")
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.is_contiguous() and torch.equal(one, other)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        exact = dequantize(expected, bits, group, dtype, implementation="reference")
        for turned in (False, True):
            back = dequantize(found, bits, group, dtype, turned, implementation="triton")
            assert back.dtype == dtype
            if dtype == torch.bfloat16 and DEVICE == "cpu":  # where the interpreter truncates
                torch.testing.assert_close(back, exact, rtol=2.0**-7, atol=0)
            else:
                assert torch.equal(back, exact)
    step = found.scale.double().repeat_interleave(group, -1)
    back = dequantize(found, bits, group, torch.float32, implementation="triton").double()
    bound = 0.5 * step + 2.0**-10 * (x.double().abs() + 2**bits * step) + 1e-6
    assert ((back - x.double()).abs() <= bound)[x.abs() < 6e4].all()


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits, group", [(2, 32), (4, 32), (2, 4), (4, 24), (2, 100), (1, 8), (8, 3)])
def test_pack(bits, group, dtype):
    same((4 * drawn(2, 7, 3 * group, seed=bits)).to(dtype), bits, group)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_scales_of_another_dtype(scales):
    x = 4 * drawn(2, 7, 64)
    expected, found = exactly(x, 4, 32, scales), quantize(x, 4, 32, scales, implementation="triton")
    assert found.scale.dtype == found.zero.dtype == scales
    if scales == torch.float32 or DEVICE == "cuda":  # the interpreter truncates to bfloat16
        assert all(map(torch.equal, found, expected))
    for own, kind in ((found, "triton"), (expected, "reference")):
        read = dequantize(own, 4, 32, torch.float32, implementation=kind)
        assert (read - x).abs().max() < 0.7 * own.scale.max()


@pytest.mark.parametrize("shape", [(8,), (1, 8), (0, 16), (3, 0, 8), (2, 3, 5, 16), (300, 16)])
def test_shapes(shape):
    same(drawn(*shape), 2, 8)


@pytest.mark.parametrize("bits", [2, only_in_full(4)])
def test_views(bits):
    """Keys per channel as a transposed view, read back as rows without a copy; slices; every other element."""
    keys = drawn(2, 16, 12).bfloat16()
    same(keys.mT, bits, 16)
    groups = quantize(keys.mT, bits, 16, implementation="triton")
    rows = dequantize(groups, bits, 16, torch.bfloat16, turned=True, implementation="triton").mT
    assert rows.is_contiguous() and rows.shape == keys.shape
    same(drawn(4, 9, 32)[1:3, 3:7, 8:24], bits, 8)
    same(drawn(3, 32)[:, ::2], bits, 8)
    same(drawn(2, 2, 3, 16).transpose(0, 2), bits, 8)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 4·65504 in float16 is infinite, in both
def test_extremes_and_constants():
    x = torch.tensor([[value] * 8 + [value, -value] * 4 for value in EXTREMES], device=DEVICE)
    same(x, 2, 8)
    assert torch.isfinite(dequantize(quantize(x, 4, 8, implementation="triton"), 4, 8, torch.float32)).all()
    ramp = torch.arange(16.0, device=DEVICE)[None].repeat(3, 1)
    codes = quantize(ramp / 4 % 4, 2, 16, implementation="triton").codes  # every fourth is half way between two codes
    assert torch.equal(codes, exactly(ramp / 4 % 4, 2, 16).codes)
    halves = torch.tensor([[0.0, 0.5, 1.5, 2.5, 1.0, 2.0, 3.0, 0.0]], device=DEVICE)
    assert quantize(halves, 2, 8, implementation="triton").codes.tolist() == [[0 | 0 << 2 | 2 << 4 | 2 << 6, 57]]


def test_nothing_is_left_unwritten(monkeypatch):
    empty = torch.empty

    def poisoned(*size, **options):
        new = empty(*size, **options)
        return new.fill_(math.nan if new.is_floating_point() else 0xAB)

    x = drawn(3, 37, 48)
    expected = exactly(x, 2, 12)
    monkeypatch.setattr(torch, "empty", poisoned)
    found = quantize(x, 2, 12, implementation="triton")
    back = dequantize(found, 2, 12, torch.float32, implementation="triton")
    monkeypatch.undo()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(back, dequantize(expected, 2, 12, torch.float32, implementation="reference"))


def test_inputs_that_do_not_fit():
    groups = quantize(torch.ones(2, 16), 2, 8)
    for message, call in (
        ("dequantize: codes", lambda: dequantize(groups, 4, 8, torch.float32)),
        (
            "dequantize: codes",
            lambda: dequantize(Groups(groups.codes, groups.scale, groups.zero[:1]), 2, 8, torch.float32),
        ),
        ("dequantize: implementation", lambda: dequantize(groups, 2, 8, torch.float32, implementation="fast")),
        ("quantize: .* not torch.float64", lambda: quantize(torch.ones(2, 8).double(), 2, 8, implementation="triton")),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.quantize import triton as own

    for dtype, bits, group in (("bf16", 2, 32), ("fp32", 4, 24), ("fp16", 8, 128)):
        groups = {"codes": "*u8", "scale": "*fp16", "zero": "*fp16", "x": f"*{dtype}", "out": f"*{dtype}"}
        size = 1 << (group - 1).bit_length()
        shape = {"BITS": bits, "ROWS": own.ELEMENTS // size}
        bytes_ = 1 << (group * bits // 8 - 1).bit_length()
        yield list_kernel(own._pack, groups, {**shape, "BYTES": bytes_, "x_n": 1})
        yield list_kernel(own._unpack, groups, {**shape, "GROUP": size, "o_b": 1})
