"""Norms of projected values: Triton against the equation in float64."""

import pytest
import torch

from kvbench.kernels.projected_norms import projected_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "rows", "dim", "hidden"),
    [(1, 1, 1, 1, 16, 8), (2, 2, 3, 37, 24, 40), (1, 1, 4, 150, 64, 130)],
)
def test_triton_agrees_with_the_equation(batch, heads, group, rows, dim, hidden, dtype, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(batch, heads, rows + 3, dim, generator=generator).to(DEVICE, dtype)[:, :, :rows]
    weight = torch.randn(hidden, heads * group * dim, generator=generator).to(DEVICE, dtype)
    apart = weight.double().view(hidden, heads, group, dim)
    exact = torch.einsum("bhnd,ehgd->bhnge", values.double(), apart).abs().sum(-1).mean(-1)
    found = projected_norms(values, weight, heads * group, implementation="triton")
    assert found.dtype == torch.float32 and (found - exact).abs().max() <= 1e-5 * exact.max()
    plain = projected_norms(values, weight, heads * group, implementation="reference")
    assert (plain - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-8) * exact.max()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="of 4 heads"):
        projected_norms(torch.zeros(1, 2, 5, 16), torch.zeros(8, 48), 4)


def ahead():
    from kvbench.kernels.projected_norms.triton import _norms

    real = {"values": "*bf16", "weight": "*bf16", "out": "*fp32"}
    constants = {"N": 128, "M": 128, "D": 128, "CAST": False}
    types = {name: real.get(name, "constexpr" if name in constants else "i32") for name in _norms.arg_names}
    yield _norms, types, constants, {"num_warps": 8, "num_stages": 3}
