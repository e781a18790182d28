"""A decoded token's projections: Triton against the modules' equation, and what rounding may change."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from kvbench.kernels.fused_linear import rms_norm, rms_norm_glu, rms_norm_linear
from tests.support.kernel_checks import BOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
STEP = 2**-8 if DEVICE == "cuda" else 2**-7  # of rounding to bfloat16; the interpreter cuts off instead


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nothing was written to holds NaN."""
    for name in ("empty", "empty_like"):
        own = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, own=own, **k: own(*a, **k).fill_(float("nan")))


def made(*size, dtype, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).to(DEVICE, dtype)


def close(found, exact, dtype, steps=3):  # the norm's two and the result's
    """Within the rounding of `steps` results of about the size of the largest, beside float32's own."""
    largest = exact.abs().max()
    assert found.dtype == dtype and not found.isnan().any()
    assert (found.double() - exact).abs().max() <= largest * (1e-5 if dtype == torch.float32 else steps * STEP)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("columns", "sizes"), [(24, (5,)), (1500, (16, 8, 8)), (96, (33, 7))], ids=str)
def test_projections_agree_with_the_equation(columns, sizes, rows, dtype):
    x, scale = made(rows, columns, dtype=dtype), made(columns, dtype=dtype)
    weights = [made(size, columns, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    biases = [made(size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    for own in (None, biases):
        for norm in (None, (scale, 1e-5)):
            rounded = x if norm is None else rms_norm(x, *norm, implementation="reference")
            found = rms_norm_linear(x, weights, biases=own, norm=norm, implementation="triton")
            for i, size in enumerate(sizes):
                exact = rounded.double() @ weights[i].double().T + (0 if own is None else own[i].double())
                assert found[i].shape == (rows, size)
                close(found[i], exact, dtype)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_residual_is_added(rows, dtype):
    x, weight, residual = made(rows, 40, dtype=dtype), made(24, 40, dtype=dtype), made(rows, 24, dtype=dtype)
    (found,) = rms_norm_linear(x, [weight], residual=residual, implementation="triton")
    close(found, x.double() @ weight.double().T + residual.double(), dtype, steps=2)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("activation", "module"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
@pytest.mark.parametrize("normed", [True, False])
def test_the_gated_product_agrees_with_the_modules(normed, activation, module, rows, dtype):
    x, scale = made(rows, 1100, dtype=dtype), made(1100, dtype=dtype)
    gate, up = (made(19, 1100, dtype=dtype, seed=i) / 8 for i in range(2))
    given = x, gate, up, (scale, 1e-6) if normed else None
    found = rms_norm_glu(*given, activation=activation, implementation="triton")
    rounded = (rms_norm(x, scale, 1e-6, implementation="reference") if normed else x).double()
    exact = ACT2FN[module](rounded @ gate.double().T) * (rounded @ up.double().T)
    close(found, exact, dtype, steps=6)
    expected = rms_norm_glu(*given, activation=activation, implementation="reference")
    assert torch.allclose(found, expected, rtol=0.1, atol=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_rounds_as_the_modules_do(dtype):
    x, scale = made(3, 1300, dtype=dtype), made(1300, dtype=dtype)
    found, expected = (rms_norm(x, scale, 1e-5, implementation=name) for name in ("triton", "reference"))
    assert torch.allclose(found, expected, rtol=1e-6 if dtype == torch.float32 else 3 * STEP, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
def test_a_weight_in_float32_is_multiplied_before_rounding(implementation, dtype):
    """As Gemma multiplies by 1 + weight."""
    x, residual, module = (*(made(3, 700, dtype=dtype, seed=i) for i in range(2)), Gemma3RMSNorm(700, 1e-5))
    module.to(DEVICE, dtype).weight.data = made(700, dtype=dtype, seed=9) / 3
    scale, expected = 1.0 + module.weight.detach().float(), module(x).detach()
    bound = {"rtol": 1e-5 if dtype == torch.float32 else STEP, "atol": 0}  # of a single rounding
    assert torch.allclose(rms_norm(x, scale, 1e-5, implementation=implementation), expected, **bound)
    found = rms_norm(x, scale, 1e-5, residual=residual, implementation=implementation)
    close(found, expected.double() + residual.double(), dtype, steps=2)
    (found,) = rms_norm_linear(x[:1], [residual], norm=(scale, 1e-5), implementation=implementation)
    close(found, expected[:1].double() @ residual.double().T, dtype)


def test_what_does_not_fit_is_refused():
    x, weight = made(1, 8, dtype=torch.float32), made(4, 9, dtype=torch.float32)
    with pytest.raises(ValueError, match="weights"):
        rms_norm_linear(x, [weight])
    with pytest.raises(ValueError, match="residual"):
        rms_norm_linear(x, [weight[:, :8]], residual=x)
    with pytest.raises(ValueError, match="gate"):
        rms_norm_glu(x, weight, weight, (x[0], 1e-5))
    with pytest.raises(ValueError, match="activation 'relu'"):
        rms_norm_glu(x, weight[:, :8], weight[:, :8], (x[0], 1e-5), activation="relu")


def ahead():
    from kvbench.kernels.fused_linear import triton as own

    constants = dict.fromkeys(("NORM", "BIAS", "RESIDUAL", "GELU"), True)
    constants |= {"WEIGHTS": 3, "N": 8, "K": 1024, "STAGES": 2}
    for kernel in (own._project, own._gated, own._product, own._normed):
        whole = ("columns", "n0", "n1", "n2", "rows", "count")
        types = {
            name: "constexpr"
            if name in constants
            else "i32"
            if name in whole
            else "fp32"
            if name == "epsilon"
            else "*fp32"
            if name == "scale"
            else "*bf16"
            for name in kernel.arg_names
        }
        yield kernel, types, {k: v for k, v in constants.items() if k in kernel.arg_names}, {"num_warps": 8}
