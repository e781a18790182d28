"""fp8: what floats of 8 bits are, numbers beyond them, and settings. test_rounded_rows.py compares whole answers."""

import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.methods.codecs.fp8 import LEAST, MOST
from kvbench.validation import NumericalError, SettingError
from tests.support.row_formulas import E4M3, E5M2, to_float
from tests.support.tiny_models import ids, make_fresh


def read_back(rows: torch.Tensor, **args: object) -> torch.Tensor:
    """Rows as they are read."""
    codec = build("codec", load_settings("codec", "fp8", args))
    return codec.pack(rows, rows, torch.tensor([[len(rows)]])).read()[0]


@pytest.mark.parametrize("name, form", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_are_those_of_torch(name, form):
    """Codes but NaN and infinity are read as what torch reads, and numbers between them are rounded as torch does."""
    floats = torch.arange(256, dtype=torch.uint8).view(form).double()
    floats = floats[floats.isfinite()].sort().values
    rows = torch.cat([floats, (floats[1:] + floats[:-1]) / 2])[:, None].expand(-1, 8)
    assert torch.equal(read_back(rows, format=name), rows.to(form).double())
    expected = to_float(rows.numpy(), *(E4M3 if name == "e4m3" else E5M2))
    assert torch.equal(read_back(rows, format=name), torch.from_numpy(expected))


def test_numbers_beyond_the_largest_float_become_it():
    rows = torch.tensor([[1e3, -1e30, 448.0, 465.0, torch.inf, -torch.inf, 0.0, 1e-9]])
    expected = torch.tensor([[448.0, -448, 448, 448, 448, -448, 0, 0]])
    assert torch.equal(read_back(rows), expected)
    assert torch.equal(read_back(rows, key_scale=2.0)[:, :4], torch.tensor([[896.0, -896, 448, 480]]))
    largest = read_back(rows[:, :4], scope="row")  # the row's own scale fits its largest number
    assert largest[0, 1] == pytest.approx(-1e30) and largest[0, 0] == 0


@pytest.mark.parametrize("name, largest", [("e4m3", 448), ("e5m2", 57344)])
@pytest.mark.parametrize("scale", [LEAST, MOST])
def test_scales_at_their_ends_are_exact(name, largest, scale):
    rows = torch.tensor([[scale, -scale * 1.5, scale * largest, 0, 1e38, -1e38, 2 * scale, 7 * scale]])
    end = min(scale * largest, 1e38)
    read = read_back(rows, format=name, key_scale=scale)
    assert torch.equal(read[:, :4], rows[:, :4]) and torch.equal(read[:, 6:], rows[:, 6:])
    torch.testing.assert_close(read[:, 4:6], torch.tensor([[end, -end]]), rtol=2.0**-3, atol=0)


def test_zeros_stay_and_nan_ends_the_run():
    for args in ({}, {"scope": "row"}):
        assert not read_back(torch.zeros(2, 8), **args).any()
        rows = torch.ones(3, 8)
        rows[1, 2] = torch.nan
        assert read_back(rows, **args).isnan().any(1).tolist() == [False, True, False]
    model = make_fresh("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 3] = torch.nan
    with pytest.raises((NumericalError, SettingError), match="not finite"):
        kvbench.prefill(model, ids(9), codec="fp8").generate(2)


def test_settings_are_checked():
    for args, message in (
        ({"format": "e3m4"}, "codec.format=e3m4: choose one of e4m3, e5m2"),
        ({"scope": "layer"}, "codec.scope=layer: choose one of tensor, head, row"),
        ({"key_scale": 0}, r"codec.key_scale=0: a number in \[1.18e-38, 5.19e\+33\]"),
        ({"value_scale": 1e-39}, "codec.value_scale=1e-39: a number in "),  # in float32 with fewer digits
        ({"key_scale": 1e34}, r"codec.key_scale=1e\+34: a number in "),  # times 57344 no float32
        (
            {"scope": "row", "value_scale": 0.5},
            "codec.value_scale=0.5: each row has its own with codec.scope=row; use 1",
        ),
        ({"rounding": "late"}, "codec.rounding=late: choose one of written, cut"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "fp8", args))
