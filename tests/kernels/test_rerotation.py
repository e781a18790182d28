"""Rotating rows to other positions: Triton against the equation in float64."""

import pytest
import torch

from kvbench.kernels.rerotation import rotate_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "dim", "turning", "alike"), [(37, 16, 16, True), (5, 24, 12, False)])
def test_triton_agrees_with_the_equation(rows, dim, turning, alike, dtype, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    draw = torch.Generator().manual_seed(turning)
    x = torch.randn(2, 3, rows + 3, dim, generator=draw).to(DEVICE, dtype)[:, :, 3:]
    angles = torch.arange(500)[:, None].double() * 100.0 ** -(torch.arange(turning // 2) / (turning // 2)).double()
    cos, sin = (1.2 * torch.cat([own, own], -1).float().to(DEVICE) for own in (angles.cos(), angles.sin()))  # as YaRN's
    places = torch.randint(0, 500, (2, 3, rows), generator=draw).to(DEVICE)
    slots = torch.arange(rows, device=DEVICE) if alike else (places + 3).int() % 500
    exact = rotate_rows(x.double(), cos.double(), sin.double(), places, slots)
    found = rotate_rows(x, cos, sin, places, slots, implementation="triton")
    close = 2e-6 if dtype == torch.float32 else 2**-7  # the interpreter rounds bfloat16 down
    assert found.dtype == dtype and found.shape == x.shape
    assert (found - exact).abs().max() <= close * exact.abs().max()
    assert torch.equal(found[..., turning:], x[..., turning:])
    same = rotate_rows(x, cos, sin, places, places, implementation="triton")
    assert (same - x).abs().max() <= close * x.abs().max()


def test_rows_that_do_not_exist_are_as_good_as_any():
    x, angles = torch.ones(1, 1, 3, 8, device=DEVICE), [torch.ones(9, 8, device=DEVICE)] * 2
    places = torch.tensor([4, -1, 2], device=DEVICE)
    found = rotate_rows(x, *angles, places, torch.arange(3, device=DEVICE), implementation="triton")
    assert found.isfinite().all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="^rotate_rows"):
        rotate_rows(torch.ones(1, 1, 2, 4), *(torch.ones(9, 6),) * 2, *(torch.arange(2),) * 2)


def ahead():
    from kvbench.kernels.rerotation.triton import _rotate

    real = {"cos": "*fp32", "sin": "*fp32", "x": "*bf16", "out": "*bf16", "places": "*i64", "slots": "*i32"}
    constants = {"ROWS": 16, "D": 128}
    types = {name: real.get(name, "constexpr" if name in constants else "i32") for name in _rotate.arg_names}
    yield _rotate, types, constants, {}
