"""turboquant against its formulas in float64, as vLLM has it and in the paper's form."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.methods.codecs.turboquant import draw_normal, draw_rotation, find_levels
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError
from tests.support.rounded_formats import (
    PAIRS,
    check_cross,
    check_logits,
    check_parts,
    check_refusal,
    check_rows,
    list_refused,
    round_e4m3,
)
from tests.support.tiny_models import ids, tiny

ALL = {"raw_layers": 0}
REFUSED = list_refused("turboquant")
CPU = torch.device("cpu")


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def make_matrix(dim: int) -> np.ndarray:
    """The Hadamard matrix over √d: an entry is negative if row and column share an odd number of bits."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / dim**0.5


def read_levels(rows: np.ndarray, bits: int, normed: bool, turn: np.ndarray | None = None) -> np.ndarray:
    """Rows in levels of N(0, 1/d), turned by H or by a given matrix."""
    dim = rows.shape[1]
    turn = make_matrix(dim) if turn is None else turn
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    turned = rows / (norms + 1e-8) @ turn
    levels = np.array(find_levels(bits)) / dim**0.5
    chosen = levels[(turned[..., None] >= (levels[1:] + levels[:-1]) / 2).sum(-1)]
    if normed:
        chosen = chosen / np.linalg.norm(chosen, axis=1, keepdims=True)
    return half(norms) * (chosen @ turn.T)


def read_affine(rows: np.ndarray, bits: int) -> np.ndarray:
    low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-8)
    codes = np.clip(np.floor((rows - low) / step + 0.5), 0, 2**bits - 1)
    return codes * half(step) + half(low)


def read_paper(rows: np.ndarray, bits: int, residual: bool) -> np.ndarray:
    """Algorithm 1, or 2 with b - 1 bits for the levels."""
    dim = rows.shape[1]
    first = read_levels(rows, bits - residual, False, draw_rotation(dim, 0, CPU).double().numpy())
    if not residual:
        return first
    rest, matrix = rows - first, draw_normal(dim, 0, CPU).double().numpy()
    norms = half(np.linalg.norm(rest, axis=1, keepdims=True))
    signs = np.where(rest @ matrix.T >= 0, 1, -1)
    return first + norms * np.sqrt(np.pi / 2) / dim * (signs @ matrix)


CASES = {  # preset: how keys and values are read, and the bytes of a row of 128 channels
    "k8v4": (round_e4m3, partial(read_affine, bits=4), 128 + 68),
    "4bit_nc": (partial(read_levels, bits=4, normed=True), partial(read_affine, bits=4), 66 + 68),
    "k3v4_nc": (partial(read_levels, bits=3, normed=True), partial(read_affine, bits=4), 50 + 68),
    "3bit_nc": (partial(read_levels, bits=3, normed=True), partial(read_affine, bits=3), 50 + 52),
    "paper4": (partial(read_paper, bits=4, residual=True), partial(read_paper, bits=4, residual=False), 68 + 66),
    "paper3": (partial(read_paper, bits=3, residual=True), partial(read_paper, bits=3, residual=False), 52 + 50),
}


@pytest.mark.parametrize("preset", CASES)
def test_rows_are_read_as_the_formula_says(preset):
    check_rows("turboquant", {"preset": preset}, *CASES[preset][:2], 128, CASES[preset][2])


@pytest.mark.parametrize("preset, rounding", [("4bit_nc", "written"), ("3bit_nc", "cut"), ("paper4", "written")])
def test_logits_are_those_of_a_model_with_such_rows(preset, rounding):
    check_logits("turboquant", {"preset": preset, "rounding": rounding} | ALL, *CASES[preset][:2])


@pytest.mark.parametrize("bits", [2, 3])
def test_levels_are_those_of_the_source(bits):
    """Written out as vLLM computes them, for 64 channels; near those of the exact integrals."""
    sigma = 1 / 8
    levels = [sigma * (-3.5 + 7 * (i + 0.5) / 2**bits) for i in range(2**bits)]
    for _ in range(200):
        borders = [-10.5 * sigma, *((a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)), 10.5 * sigma]
        moved = []
        for low, high in zip(borders, borders[1:], strict=False):
            x = low + (high - low) / 200 * np.arange(201)
            weights = np.exp(-(x**2) / (2 * sigma**2)) * np.array([0.5, *[1] * 199, 0.5])
            moved.append((x * weights).sum() / weights.sum())
        if max(abs(a - b) for a, b in zip(moved, levels, strict=True)) < 1e-10:
            break
        levels = moved
    np.testing.assert_allclose(np.array(find_levels(bits)) / 8, levels, atol=2e-8)
    exact = {2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520]}[bits]
    np.testing.assert_allclose(find_levels(bits)[2 ** (bits - 1) :], exact, atol=2e-3)


def test_the_residual_makes_products_right_in_the_mean():
    """A row's product with what it is read as; the levels alone give less, by their distortion (0.034 at 3 bits)."""
    rows = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
    rows /= rows.norm(dim=1, keepdim=True)
    means = {}
    for residual in (True, False):
        args = {"preset": "paper3", "residual": residual} | ALL
        keys = (
            build("codec", load_settings("codec", "turboquant", args)).pack(rows, rows, torch.tensor([[400]])).read()[0]
        )
        means[residual] = (rows * keys).sum(1).mean().item()
    assert abs(means[True] - 1) < 0.01 and abs(means[False] - 0.966) < 0.005


def test_random_rotations_are_orthogonal_and_drawn_by_the_seed():
    turn = draw_rotation(24, 3, CPU).double()
    torch.testing.assert_close(turn @ turn.T, torch.eye(24, dtype=torch.float64), atol=1e-6, rtol=0)
    assert not torch.allclose(turn, draw_rotation(24, 4, CPU).double())


def test_first_and_last_layers_stay_raw():
    """In the prompt and in the answer; the bytes say how many."""
    held = kvbench.prefill(
        tiny("llama"),
        ids(60),
        "snapkv",
        40,
        codec="turboquant",
        codec_args={"raw_layers": 1},
        method_args={"window": 4},
    )
    held.extend(ids(3))
    raw, codes = 2 * 43 * 2 * 32 * 4, 2 * 43 * (18 + 20)
    assert [layer.rows.bytes().rows for layer in held.contexts[0].layers] == [raw, codes, raw]


@pytest.mark.parametrize("args", [{}, {"preset": "k8v4"}, {"preset": "paper3"}, {"rounding": "cut"}], ids=str)
def test_rows_in_parts_and_cuts(args):
    check_parts("turboquant", args)


def test_nan_and_equal_numbers():
    rows = torch.full((3, 32), 2.5)
    rows[1, 4], rows[2] = torch.nan, 0.0
    for preset in CASES:
        packed = build("codec", load_settings("codec", "turboquant", {"preset": preset})).pack(
            rows, rows, torch.tensor([[3]])
        )
        keys, values = packed.read()
        assert keys[1].isnan().any() and values[1].isnan().all()
        assert (keys[2] == 0).all() and (values[2] == 0).all()
        if "paper" not in preset:
            assert (values[0] == 2.5).all()


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    check_cross("turboquant", ALL, 38, method, allocator)


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", REFUSED)
def test_what_cannot_be_packed_is_refused(method, allocator):
    check_refusal("turboquant", ALL, method, allocator)


def test_settings_are_checked():
    for args, message in (
        ({"key_bits": 2}, "codec.key_bits=2: choose one of 3, 4, 8"),
        ({"key_bits": 8, "norm_correction": False, "residual": True}, "codec.residual=true: not with codec.key_bits=8"),
        ({"residual": True}, "codec.residual=true: not with codec.norm_correction=true"),
        ({"preset": "paper3", "seed": 2**64}, r"codec.seed=18446744073709551616: a whole number in \[0, 4294967295\]"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "turboquant", args))
    layout = read_layout(tiny("llama"))
    for args, dim, message in (
        (ALL, 24, "codec.rotation=hadamard: heads of 24 channels, and the matrix needs a power of two; random"),
        ({"preset": "paper3"}, 20, "codec=turboquant: 20 channels per head do not fill whole bytes"),
        ({}, 32, "codec.raw_layers=2: the model has 3 layers, and all would stay raw"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "turboquant", args)).check(replace(layout, dim=dim))
