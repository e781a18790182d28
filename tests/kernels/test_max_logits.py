"""The largest logits of rows: Triton against the equation in float64."""

import pytest
import torch

from kvbench.kernels.max_logits import max_logits
from tests.support.compile_kernels import list_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "group", "rows", "dim"), [(2, 3, 4, 77, 16), (1, 2, 1, 1, 24)])
def test_triton_agrees_with_the_equation(batch, heads, group, rows, dim, dtype):
    draw = torch.Generator().manual_seed(rows)
    queries = torch.randn(batch, heads * group, dim, generator=draw).to(DEVICE, dtype)
    keys = torch.randn(batch, heads, rows + 4, dim, generator=draw).to(DEVICE, dtype)[:, :, :rows]
    exact = max_logits(queries.double(), keys.double(), 0.4)
    loop = [
        (queries[:, head].double()[:, None] * keys[:, head // group].double()).sum(-1) for head in range(heads * group)
    ]
    assert torch.allclose(exact, 0.4 * torch.stack(loop).amax(0))
    found = max_logits(queries, keys, 0.4, implementation="triton")
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="^max_logits"):
        max_logits(torch.zeros(1, 3, 8), torch.zeros(1, 2, 5, 8), 1.0)


def ahead():
    from kvbench.kernels.max_logits.triton import _largest

    constants = {"M": 16, "N": 64, "D": 128, "CAST": False, "q_d": 1, "k_d": 1}
    kinds = {"queries": "*bf16", "keys": "*bf16", "out": "*fp32", "scale": "fp32"}
    yield list_kernel(_largest, kinds, constants, num_warps=4, num_stages=3)
