"""fp8 against its formula in float64: floats of 8 bits, by a given scale or one of each row."""

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.validation import NumericalError, SettingError
from tests.support.rounded_codecs import (
    MODELS,
    Rounded,
    check_pair,
    check_refusal,
    check_rows_that_stay,
    check_samples_branches_and_shared_prefills,
    check_the_captured_step,
    check_the_full_cache,
    cross,
    cross_refused,
    divide,
    list_cuts,
)
from tests.support.tiny_models import ids, make_fresh

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits of the mantissa, the smallest normal power, the largest number


def to_float(x: np.ndarray, mantissa: int, lowest: int, largest: float) -> np.ndarray:
    """The nearest floats, of two the one with an even mantissa; beyond the largest one that."""
    size = np.minimum(np.abs(x), largest)
    power = np.maximum(np.frexp(size)[1] - 1, lowest)
    step = 2.0 ** (power - mantissa)
    return np.copysign(np.rint(size / step) * step, x)


def by_scale(scale: float, form=E4M3):
    return lambda x: to_float(divide(x, scale), *form) * scale


def by_row(x: np.ndarray, form=E4M3) -> np.ndarray:
    scale = max(divide(np.abs(x).max(), form[2]), np.float32(1e-6))
    return to_float(divide(x, scale), *form) * scale


GIVEN = dict(key_scale=0.02, value_scale=0.3)
CASES = {
    "tensor": Rounded("fp8", {}, by_scale(1), by_scale(1), 64),
    "given": Rounded("fp8", GIVEN, by_scale(0.02), by_scale(0.3), 64),
    "row": Rounded("fp8", {"preset": "row"}, by_row, by_row, 72),
    "e5m2": Rounded("fp8", {"preset": "e5m2"}, by_scale(1, E5M2), by_scale(1, E5M2), 64),
    "cut": Rounded("fp8", {"preset": "row", "rounding": "cut"}, by_row, by_row, 72),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model, block", MODELS)
def test_a_model_attends_to_what_the_formula_says(case, model, block):
    check_the_full_cache(CASES[case], model, block)


@pytest.mark.parametrize("case, method", list_cuts(("tensor", "row"), ("row", "tova")))
def test_rows_are_cut_while_decoding(case, method):
    check_rows_that_stay(CASES[case], method)


@pytest.mark.parametrize("case", ["tensor", "cut"])
def test_heads_of_different_lengths(case):
    check_rows_that_stay(CASES[case], "snapkv", "ada", window=4)


def test_samples_branches_and_shared_prefills_are_apart():
    check_samples_branches_and_shared_prefills(CASES["row"])


@pytest.mark.parametrize("case, allocator", [("given", "ada"), ("cut", "uniform")])
def test_the_captured_step_gives_what_the_modules_give(case, allocator):
    check_the_captured_step(CASES[case], allocator)


@cross("fp8")
def test_every_method_and_allocator(method, allocator):
    check_pair(CASES["row"], method, allocator, 0.3)


@cross_refused("fp8")
def test_what_cannot_be_packed_is_refused(method, allocator):
    check_refusal("fp8", method, allocator)


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
        ({"key_scale": 0}, "codec.key_scale=0: a number above 0"),
        (
            {"scope": "row", "value_scale": 0.5},
            "codec.value_scale=0.5: each row has its own with codec.scope=row; use 1",
        ),
        ({"rounding": "late"}, "codec.rounding=late: choose one of written, cut"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "fp8", args))
