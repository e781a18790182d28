"""int4: single rows, stored zeros, settings, misfitting models. test_rounded_rows.py compares whole answers."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.config.catalogue import build, load_settings
from kvbench.validation import SettingError
from tests.support.row_formulas import round_as_vllm
from tests.support.tiny_models import COMMON, draw_model, heads, ids, tiny


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


def test_a_method_that_merges_rows_while_decoding_is_refused():
    """The default preset rounds rows after the last cut of the prompt. Others may then cut them."""
    reason = "^codec=int4: centroidkv merges rows while decoding, .*; use method.decoding=false or codec=raw$"
    with pytest.raises(SettingError, match=reason):
        kvbench.prefill(tiny("llama"), ids(9), "centroidkv", 0.5, codec="int4", method_args={"decoding": True})
