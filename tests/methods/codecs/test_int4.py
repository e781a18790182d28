"""int4 against its formulas in float64: QuaRot's and vLLM's rotations, zeros and groups."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
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
from tests.support.selection import choose_quick
from tests.support.tiny_models import COMMON, draw_model, heads, ids, tiny


@dataclass(frozen=True)
class QuaRot:
    """Between the smallest and the largest number of each group of a row, which is turned before."""

    turned: bool = True
    group: int = 32
    clip: float = 1.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        matrix = hadamard(len(x)) / len(x) ** 0.5 if self.turned else np.eye(len(x))
        y = matrix @ x
        for start in range(0, len(x), self.group):
            part = y[start : start + self.group]
            low, high = self.clip * part.min(), self.clip * part.max()
            scale, zero = float(np.float16(divide(max(high - low, 1e-5), 15))), float(np.float16(low))
            part[:] = np.clip(np.rint(divide(part - zero, scale)), 0, 15) * scale + zero
        return matrix.T @ y


def round_as_vllm(x: np.ndarray) -> np.ndarray:
    """y = H D x, and a zero that is a code, in the lowest bits of the scale."""
    half = torch.full((len(x),), 0.5)
    signs = 2 * torch.bernoulli(half, generator=torch.Generator().manual_seed(0x9E3779B9)).numpy() - 1
    y = hadamard(len(x)) @ (signs * x)
    scale = max((y.max() - y.min()) / 15, 1e-6)
    zero = np.clip(np.floor(-y.min() / scale + 0.5), 0, 15)
    codes = np.clip(np.floor(y / scale + zero + 0.5), 0, 15)
    stored = (np.float32(scale).view(np.int32) & np.int32(-16)).view(np.float32)
    return signs * (hadamard(len(x)) @ ((codes - zero) * float(stored))) / len(x)


PLAIN = QuaRot(turned=False)
CASES = {
    "quarot": Rounded("int4", {}, QuaRot(), PLAIN, 40),
    "quarot, written": Rounded("int4", {"rounding": "written"}, QuaRot(), PLAIN, 40),
    "vllm": Rounded("int4", {"preset": "vllm"}, round_as_vllm, round_as_vllm, 40),
    "vllm, cut": Rounded("int4", {"preset": "vllm", "rounding": "cut"}, round_as_vllm, round_as_vllm, 40),
    "plain": Rounded("int4", {"preset": "plain"}, PLAIN, PLAIN, 40),
    "groups": Rounded("int4", dict(hadamard="both", group=8, clip=0.9), *[QuaRot(True, 8, 0.9)] * 2, 64),
}


@pytest.mark.parametrize("case", choose_quick(CASES, "quarot", "vllm", "plain", "groups"))
@pytest.mark.parametrize("model, block", MODELS)
def test_a_model_attends_to_what_the_formula_says(case, model, block):
    check_the_full_cache(CASES[case], model, block)


@pytest.mark.parametrize("case, method", list_cuts(("quarot, written", "vllm"), ("vllm", "keydiff")))
def test_rows_are_cut_while_decoding(case, method):
    check_rows_that_stay(CASES[case], method)


@pytest.mark.parametrize("case", ["quarot", "vllm"])
def test_heads_of_different_lengths(case):
    check_rows_that_stay(CASES[case], "snapkv", "ada", window=4)


def test_samples_branches_and_shared_prefills_are_apart():
    check_samples_branches_and_shared_prefills(CASES["vllm"])


@pytest.mark.parametrize("case, allocator", [("quarot", "ada"), ("vllm", "uniform")])
def test_the_captured_step_gives_what_the_modules_give(case, allocator):
    check_the_captured_step(CASES[case], allocator)


@cross("int4")
def test_every_method_and_allocator(method, allocator):
    check_pair(CASES["vllm"], method, allocator, 0.17)


@cross_refused("int4")
def test_what_cannot_be_packed_is_refused(method, allocator):
    check_refusal("int4", method, allocator)


def read_back(rows: torch.Tensor, **args: object) -> torch.Tensor:
    """Keys as they are read."""
    codec = build("codec", load_settings("codec", "int4", args))
    return codec.pack(rows, rows, torch.tensor([[len(rows)]])).read()[0]


def test_zeros_constants_and_nan():
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-9] * 8, [6e4, *[-1.0] * 7]])
    for args in ({"preset": "plain"}, {"preset": "vllm"}, {"group": 4}):
        assert torch.isfinite(read_back(rows, **args)).all() and not read_back(rows[:1], **args).any()
        broken = rows.clone()
        broken[1, 2] = torch.nan
        assert read_back(broken, **args).isnan().any(1).tolist() == [False, True, False, False]
    expected = np.stack([round_as_vllm(row) for row in rows.double().numpy()])
    torch.testing.assert_close(
        read_back(rows, preset="vllm").double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6
    )


def test_a_point_hides_in_the_lowest_bits_of_the_scale():
    """Exactly: what is read is (code - point)·scale, with 0 in place of the point's bits."""
    rows = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    codec = build("codec", load_settings("codec", "int4", {"preset": "plain", "zero": "point"}))
    packed = codec.pack(rows, rows, torch.tensor([[50]]))
    codes, stored = packed.keys[0].numpy(), packed.keys[1].numpy()
    assert stored.dtype == np.float32 and codes.nbytes + stored.nbytes == 50 * (16 + 4)
    points, scale = stored.view(np.int32) & 15, (stored.view(np.int32) & -16).view(np.float32)
    low, high = rows.numpy().min(1, keepdims=True), rows.numpy().max(1, keepdims=True)
    assert np.array_equal(points, np.floor(-low / ((high - low) / 15) + 0.5))
    np.testing.assert_allclose(scale, (high - low) / 15, rtol=2.0**-19)
    even_and_odd = np.stack([codes & 15, codes >> 4], -1).reshape(50, 32).astype(np.int32)
    assert np.array_equal(packed.read()[0].numpy(), (even_and_odd - points).astype(np.float32) * scale)


def test_settings_are_checked():
    for args, message in (
        ({"preset": "paper"}, "codec.preset=paper: choose one of quarot, vllm, plain"),
        ({"group": 12}, "codec.group=12: a power of two of at least 2, or null"),
        ({"group": 1}, "codec.group=1: a whole number of at least 2"),
        ({"clip": 1.5}, r"codec.clip=1.5: a share in \(0.0, 1.0\]|codec.clip=1.5: a share in \(0, 1\]"),
        ({"signs": True, "hadamard": "none"}, "codec.signs=true: signs alone change nothing"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "int4", args))


def test_models_that_do_not_fit_are_refused_before_a_prompt_is_read():
    with pytest.raises(SettingError, match="^codec.group=64: 32 channels per head do not divide into groups of 64"):
        kvbench.prefill(tiny("llama"), ids(9), codec="int4", codec_args={"group": 64})
    odd = draw_model(lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **heads(2, 1, 24), num_hidden_layers=1)), 0)
    reason = "^codec.hadamard=keys: heads of 24 channels, and the matrix needs a power of two; use codec.hadamard=none"
    with pytest.raises(SettingError, match=reason):
        kvbench.prefill(odd, ids(9), codec="int4")
    held = kvbench.prefill(odd, ids(9), codec="int4", codec_args={"preset": "plain"})
    assert held.resident_bytes == 9 * 2 * (12 + 4)
