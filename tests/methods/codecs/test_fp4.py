"""fp4 against its formulas in float64: NVFP4, MXFP4 and SGLang's fp4."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
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

SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BORDERS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
REFUSED = list_refused("fp4")


def round_e2m1(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest code; of two the even one, or the one further up in size."""
    code = (np.abs(x)[..., None] >= BORDERS).sum(-1)
    if not up:
        below = (np.abs(x)[..., None] > BORDERS).sum(-1)
        code = np.where(code % 2 == 0, code, below)
    return np.sign(x) * SIZES[code]


def read_nvfp4(rows: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    blocks = rows.reshape(len(rows), -1, 16)
    scale = round_e4m3(np.abs(blocks).max(-1, keepdims=True) / (6 * gamma)) * gamma
    return (round_e2m1(blocks / np.where(scale == 0, 1, scale), up=False) * scale).reshape(rows.shape)


def read_powers(rows: np.ndarray, block: int, above: bool) -> np.ndarray:
    blocks = rows.reshape(len(rows), -1, block)
    largest = np.abs(blocks).max(-1, keepdims=True)
    if above:
        power = np.ceil(np.log2(np.maximum(largest / 6, 1e-10)))
    else:
        power = np.floor(np.log2(np.maximum(largest, 2.0**-124))) - 2
    return (round_e2m1(blocks / 2**power, up=above) * 2**power).reshape(rows.shape)


PRESETS = {
    "nvfp4": read_nvfp4,
    "mx16_sglang": partial(read_powers, block=16, above=True),
    "mxfp4": partial(read_powers, block=32, above=False),
    "mxfp4_ceiling": partial(read_powers, block=32, above=True),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_are_read_as_the_formula_says(preset):
    """For 128 channels: 72 bytes a side in blocks of 16, and 68 in blocks of 32."""
    oracle = PRESETS[preset]
    check_rows("fp4", {"preset": preset}, oracle, oracle, 128, 2 * (68 if "mxfp4" in preset else 72))


@pytest.mark.parametrize("preset, rounding", [("nvfp4", "written"), ("mx16_sglang", "cut"), ("mxfp4", "written")])
def test_logits_are_those_of_a_model_with_such_rows(preset, rounding):
    check_logits("fp4", {"preset": preset, "rounding": rounding}, PRESETS[preset], PRESETS[preset])


@pytest.mark.parametrize("preset", PRESETS)
def test_codes_and_numbers_between_them(preset):
    """With a scale of 1 codes are read as they are. Of two codes the even one is taken, or the larger one."""
    row = torch.tensor([6, -4, 3, 2, -1.5, 1, 0.5, 0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5, -0.25]).repeat(2)[None]
    codec = build("codec", load_settings("codec", "fp4", {"preset": preset}))
    keys = codec.pack(row, row, torch.tensor([[1]])).read()[0]
    ups, evens = [0.5, 1, 1.5, -2, 3, 4, 6, -0.5], [0, 1, 1, -2, 2, 4, 4, 0]
    expected = [6, -4, 3, 2, -1.5, 1, 0.5, 0, *(evens if preset in ("nvfp4", "mxfp4") else ups)]
    assert keys[0].tolist() == expected * 2


@pytest.mark.parametrize("divisor", [448, 2688])
def test_a_scale_for_the_layer(divisor):
    """Each sample has that of its first rows, keys and values each; later rows do not change it."""
    codec = build("codec", load_settings("codec", "fp4", {"global_scale": divisor}))
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(6, 32, generator=draw) * size for size in (0.01, 5000.0))
    keys[4:] *= 1000
    packed = codec.pack(keys, values, torch.tensor([[3, 1], [1, 1]]))
    assert sum(part.nbytes for part in packed.tensors()) == 6 * 2 * 18 + 2 * 8
    later = torch.full((4, 32), 2.0)
    grown = packed.extend(later, later, torch.tensor([[4, 2], [2, 2]]))
    assert torch.equal(grown.tensors()[-1], packed.tensors()[-1])
    for side, read, more in zip((keys, values), packed.read(), grown.read(), strict=True):
        samples = [part.double().numpy() for part in (side[:4], side[4:])]
        expected = np.concatenate([read_nvfp4(rows, np.abs(rows).max() / divisor) for rows in samples])
        np.testing.assert_allclose(read.double(), expected, rtol=2e-6)
        gamma = side[:4].abs().max().item() / divisor
        expected = read_nvfp4(np.full((1, 32), 2.0), gamma)
        np.testing.assert_allclose(more[3:4].double(), np.clip(expected, 0, 448 * 6 * gamma), rtol=2e-6)
    one = codec.pack(keys[:4], values[:4], torch.tensor([[3, 1]])).replicate(2, torch.tensor([[3, 1], [3, 1]]))
    assert torch.equal(one.read()[0], packed.read()[0][:4].repeat(2, 1))


def test_a_prompt_with_a_scale_for_the_layer():
    """Evicted while decoding, in blocks."""
    args = {"codec_args": {"global_scale": 2688}, "method_args": {"recent": 8}}
    held = kvbench.prefill(tiny("llama"), ids(140), "h2o", 50, 60, codec="fp4", **args)
    assert torch.isfinite(held.extend(ids(4))).all()
    assert held.resident_bytes == 3 * (2 * 50 * 2 * 18 + 8)


@pytest.mark.parametrize("args", [{}, {"preset": "mxfp4"}, {"global_scale": 448}, {"rounding": "cut"}], ids=str)
def test_rows_in_parts_and_cuts(args):
    check_parts("fp4", args)


def test_zeros_and_numbers_that_no_code_has():
    """A block of zeros reads as zeros, as does one below the least scale. Infinity is the largest number in NVFP4."""
    rows = torch.zeros(5, 32)
    rows[1], rows[2, 3], rows[3, 5], rows[4] = 1e-9, torch.nan, torch.inf, 1e4
    for preset in PRESETS:
        codec = build("codec", load_settings("codec", "fp4", {"preset": preset}))
        read = codec.pack(rows, rows, torch.tensor([[5]])).read()[1]
        assert (read[0] == 0).all() and (read[1].abs() <= 1.1e-9).all()
        assert read[2, :16].isnan().all()
        assert read[3, 5] == 2688 if preset == "nvfp4" else read[3, :16].isnan().all()
        assert (read[4] == (2688 if preset == "nvfp4" else 8192)).all()


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    check_cross("fp4", {}, 36, method, allocator)


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", REFUSED)
def test_what_cannot_be_packed_is_refused(method, allocator):
    check_refusal("fp4", {}, method, allocator)


def test_settings_are_checked():
    for args, message in (
        ({"block": 8}, "codec.block=8: choose one of 16, 32"),
        ({"preset": "mxfp4", "global_scale": 448}, "codec.global_scale=448: only with codec.scale=e4m3"),
        ({"preset": "fp4"}, "codec.preset=fp4: did you mean nvfp4"),
        ({"rounding": "never"}, "codec.rounding=never: choose one of written, cut"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "fp4", args))
    codec = build("codec", load_settings("codec", "fp4", {}))
    with pytest.raises(SettingError, match=r"^codec.block=16: 24 channels per head do not divide into such blocks"):
        codec.check(replace(read_layout(tiny("llama")), dim=24))
