"""Rotating rows to other positions: Triton against the equation in float64."""

import pytest
import torch

from kvbench.kernels.rerotation import rerotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def angles_of(positions, turning):
    own = positions[..., None].double() * 100.0 ** -(torch.arange(turning // 2) / (turning // 2)).double()
    own = torch.cat([own, own], -1)
    return tuple(part.float().to(DEVICE) for part in (1.2 * own.cos(), 1.2 * own.sin()))  # scaled, as YaRN's are


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "turning", "slots"), [((2, 3, 37, 16), 16, (37,)), ((1, 2, 2, 5, 24), 12, (1, 2, 1, 5))]
)
def test_triton_agrees_with_the_equation(shape, turning, slots, dtype, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    generator = torch.Generator().manual_seed(turning)
    x = torch.randn(*shape[:-2], shape[-2] + 3, shape[-1], generator=generator).to(DEVICE, dtype)[..., 3:, :]
    before = angles_of(torch.randint(0, 500, shape[:-1] if len(shape) == 4 else slots, generator=generator), turning)
    after = angles_of(torch.randint(0, 50, slots, generator=generator), turning)
    exact = rerotate(x.double(), *(tuple(part.double() for part in pair) for pair in (before, after)))
    found = rerotate(x, before, after, implementation="triton")
    assert found.dtype == dtype and found.shape == x.shape
    close = 2e-6 if dtype == torch.float32 else 2**-7  # the interpreter rounds bfloat16 down
    assert (found - exact).abs().max() <= close * exact.abs().max()
    assert torch.equal(found[..., turning:], x[..., turning:])
    same = rerotate(x, after, after, implementation="triton")
    assert (same - x).abs().max() <= close * x.abs().max()


def ahead():
    from kvbench.kernels.rerotation.triton import _rerotate

    real = dict.fromkeys(("cos", "sin", "new_cos", "new_sin"), "*fp32") | {"x": "*bf16", "out": "*bf16"}
    constants = {"ROWS": 16, "D": 128}
    types = {name: real.get(name, "constexpr" if name in constants else "i32") for name in _rerotate.arg_names}
    yield _rerotate, types, constants, {}
