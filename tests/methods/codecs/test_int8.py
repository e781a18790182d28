"""int8 against its formulas in float64: vLLM's, its first versions' and SGLang's."""

import numpy as np
import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.validation import SettingError
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


def round_symmetric(x: np.ndarray, to_whole=np.rint) -> np.ndarray:
    scale = max(divide(np.abs(x).max(), 127), np.float32(1e-6))
    codes = np.clip(to_whole(divide(x, scale)), -128, 127)
    return (np.float32(codes) * np.float32(scale)).astype(float)  # the next layer cuts off what depends on it


def round_truncating(x: np.ndarray) -> np.ndarray:
    return round_symmetric(x, np.trunc)


def round_around_the_middle(x: np.ndarray) -> np.ndarray:
    zero, scale = float(np.float16((x.min() + x.max()) / 2)), float(np.float16((x.max() - x.min()) / 255))
    return np.clip(np.rint(divide(x - zero, scale or 1)), -128, 127) * scale + zero


CASES = {
    "vllm": Rounded("int8", {}, round_symmetric, round_symmetric, 72),
    "truncating": Rounded("int8", {"preset": "vllm_truncating"}, round_truncating, round_truncating, 72),
    "sglang": Rounded("int8", {"preset": "sglang"}, round_around_the_middle, round_around_the_middle, 72),
    "cut": Rounded("int8", {"rounding": "cut"}, round_symmetric, round_symmetric, 72),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model, block", MODELS)
def test_a_model_attends_to_what_the_formula_says(case, model, block):
    check_the_full_cache(CASES[case], model, block)


@pytest.mark.parametrize("case, method", list_cuts(("vllm", "sglang"), ("sglang", "h2o")))
def test_rows_are_cut_while_decoding(case, method):
    check_rows_that_stay(CASES[case], method)


@pytest.mark.parametrize("case", ["sglang", "cut"])
def test_heads_of_different_lengths(case):
    check_rows_that_stay(CASES[case], "snapkv", "ada", window=4)


def test_samples_branches_and_shared_prefills_are_apart():
    check_samples_branches_and_shared_prefills(CASES["sglang"])


@pytest.mark.parametrize("case, allocator", [("sglang", "ada"), ("cut", "uniform")])
def test_the_captured_step_gives_what_the_modules_give(case, allocator):
    check_the_captured_step(CASES[case], allocator)


@cross("int8")
def test_every_method_and_allocator(method, allocator):
    check_pair(CASES["vllm"], method, allocator, 0.3)


@cross_refused("int8")
def test_what_cannot_be_packed_is_refused(method, allocator):
    check_refusal("int8", method, allocator)


def read_back(rows: torch.Tensor, preset: str) -> torch.Tensor:
    """Rows as they are read."""
    codec = build("codec", load_settings("codec", "int8", {"preset": preset}))
    return codec.pack(rows, rows, torch.tensor([[len(rows)]])).read()[1]


@pytest.mark.parametrize("preset, formula", [("vllm", round_symmetric), ("sglang", round_around_the_middle)])
def test_zeros_constants_and_extremes(preset, formula):
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-9] * 8, [-5.0, *range(6), 9.0], [6e4, *[-1.0] * 7]])
    expected = torch.from_numpy(np.stack([formula(row) for row in rows.double().numpy()])).float()
    torch.testing.assert_close(read_back(rows, preset), expected)
    assert not read_back(rows[:1], preset).any()
    rows[3, 2] = torch.nan
    assert read_back(rows, preset).isnan().all(1).tolist() == [False, False, False, True, False]


def test_settings_are_checked():
    for args, message in (
        ({"preset": "trt"}, "codec.preset=trt: choose one of vllm, vllm_truncating, sglang"),
        ({"symmetric": "half"}, "codec.symmetric=half: choose one of true, false"),
        ({"rounding": "late"}, "codec.rounding=late: choose one of written, cut"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "int8", args))
