"""hf_quantized against its formulas in float64, and against transformers' own quantized layer with these formulas."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

import kvbench
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.codec import Angles
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError
from tests.support.method_files import budget_for, build_policy, make_tiny_method_args
from tests.support.rounded_formats import PAIRS, check_cross
from tests.support.tiny_models import ids, make_double, tiny

SMALL = {"group": 16, "residual": 6}


def read_quanto(x: np.ndarray, bits: int) -> np.ndarray:
    """Groups (n, G), read back."""
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / (2**bits - 1)
    return np.rint((x - low) / np.where(scale == 0, 1, scale)) * scale + low


def read_hqq(x: np.ndarray, bits: int, optimize: bool = False) -> np.ndarray:
    """Groups (n, G), read back; the solver as hqq's core/optimize.py writes it."""
    low, high, top = x.min(1, keepdims=True), x.max(1, keepdims=True), 2**bits - 1
    with np.errstate(divide="ignore"):
        factor = np.minimum(np.where(high - low <= 1e-4, 1, top / (high - low)), 2e4)
    zero, best = -low * factor, np.inf
    for _ in range(20 * optimize):
        codes = np.clip(np.rint(x * factor + zero), 0, top)
        error = x - (codes - zero) / factor
        with np.errstate(divide="ignore"):
            shrunk = np.sign(error) * np.maximum(np.abs(error) - np.abs(error) ** (0.7 - 1) / 10, 0)
        zero = (codes - (x - shrunk) * factor).mean(1, keepdims=True)
        if np.abs(error).mean() >= best:
            break
        best = np.abs(error).mean()
    return (np.clip(np.rint(x * factor + zero), 0, top) - zero) / factor


CASES = {
    "quanto4": (read_quanto, {"preset": "quanto4"}, 4),
    "quanto2": (read_quanto, {"preset": "quanto2"}, 2),
    "hqq4": (read_hqq, {"preset": "hqq4", "optimize": False}, 4),
    "hqq2": (read_hqq, {"preset": "hqq2", "optimize": False}, 2),
    "hqq8": (read_hqq, {"preset": "hqq8", "optimize": False}, 8),
    "hqq4 optimized": (lambda x, bits: read_hqq(x, bits, True), {"preset": "hqq4"}, 4),
    "hqq2 optimized": (lambda x, bits: read_hqq(x, bits, True), {"preset": "hqq2"}, 2),
}


def make(**args: object) -> object:
    return build("codec", load_settings("codec", "hf_quantized", args))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_as_the_formula_says(case):
    oracle, args, bits = CASES[case]
    rows = torch.randn(2, 24, 128, generator=torch.Generator().manual_seed(0)) * 3 + 1
    packed = make(**args).pack(*rows, torch.tensor([[20, 4]]))
    for raw, read in zip(rows, packed.read(), strict=True):
        expected = oracle(raw.double().reshape(-1, 64).numpy(), bits).reshape(24, 128)
        np.testing.assert_allclose(read, expected, atol=1e-4 if "optimized" in case else 1e-5)
    assert sum(part.nbytes for part in packed.tensors()) == 2 * 24 * (128 * bits // 8 + 2 * 2 * 4)
    short = make(**args).pack(*rows.bfloat16(), torch.tensor([[20, 4]]))
    assert sum(part.nbytes for part in short.tensors()) == 2 * 24 * (128 * bits // 8 + 2 * 2 * 2)


@pytest.mark.parametrize("preset", ["quanto4", "hqq2", "hqq8"])
def test_keys_and_values_are_rounded_together_as_apart(preset):
    """Rounds of HQQ's solver end for each side on its own: values of other sizes do not change keys."""
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(9, 128, generator=draw), 40 * torch.rand(9, 128, generator=draw) ** 9
    both = make(preset=preset).encode_both(keys, values)
    for side, rows in zip(both, (keys, values), strict=True):
        torch.testing.assert_close(side, make(preset=preset).encode(rows))


class OracleLayer(QuantizedLayer):
    """transformers' layer: when rows are rounded is its code, how they are is the oracle's."""

    def __init__(self, case: str) -> None:
        super().__init__(q_group_size=16, residual_length=6)
        self.case = case

    def _quantize(self, tensor, axis):
        oracle, _, bits = CASES[self.case]
        return torch.from_numpy(oracle(tensor.reshape(-1, 16).numpy(), bits)).view_as(tensor)

    def _dequantize(self, q_tensor):
        return q_tensor


@pytest.mark.parametrize("case", ["quanto4", "hqq2"])
def test_logits_are_those_of_transformers(case):
    """Through several residuals. In float64 rows that transformers rounds anew stay the same."""
    double, cached = make_double("llama"), Cache(layers=[OracleLayer(case) for _ in range(3)])
    with torch.no_grad():
        expected = double(ids(40), past_key_values=cached).logits[0, -1]
    held = kvbench.prefill(double, ids(40), codec="hf_quantized", codec_args=CASES[case][1] | SMALL)
    torch.testing.assert_close(held.logits[0], expected)
    for token in ids(15, seed=1).split(1, dim=1):
        with torch.no_grad():
            expected = double(token, past_key_values=cached).logits[0]
        torch.testing.assert_close(held.extend(token)[0], expected, atol=2e-4, rtol=0)
    rows = held.contexts[0].layers[0].rows.stored
    assert rows.waiting == cached.layers[0].keys.shape[2] == 3


def test_several_tokens_are_read_one_by_one():
    first, second = (kvbench.prefill(tiny("llama"), ids(46), codec="hf_quantized", codec_args=SMALL) for _ in range(2))
    at_once = first.extend(ids(8, seed=1))
    assert torch.equal(at_once, torch.cat([second.extend(token) for token in ids(8, seed=1).split(1, dim=1)], 1))


def test_rows_in_parts():
    """Heads of several lengths: the prompt is rounded at once, later rows six at a time, the last two are raw."""
    codec, counts = make(**SMALL), torch.tensor([[3, 0], [5, 2]])
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, count + 14, 32, generator=draw) for count in counts.flatten().tolist()]

    def take(first: int, stop: int) -> list[torch.Tensor]:
        """Rows of all heads, counted from the end of the prompt; first=-9 for those of the prompt too."""
        ends = counts.flatten().tolist()
        return [
            torch.cat([head[side, max(0, n + first) : n + stop] for head, n in zip(heads, ends, strict=True)])
            for side in range(2)
        ]

    grown = codec.pack(*take(-9, 0), counts)
    for first, stop in ((0, 1), (1, 5), (5, 14)):
        grown = grown.extend(*take(first, stop), counts + stop)
    whole = codec.pack(*take(-9, 0), counts)
    for number in range(14):
        whole = whole.extend(*take(number, number + 1), counts + number + 1)
    assert all(torch.equal(one, other) for one, other in zip(grown.tensors(), whole.tensors(), strict=True))
    for side, read in enumerate(grown.read()):
        expected = []
        for head in heads:
            rounded = read_quanto(head[side, :-2].double().reshape(-1, 16).numpy(), 4).reshape(-1, 32)
            expected += [rounded, head[side, -2:].double().numpy()]
        np.testing.assert_allclose(read, np.concatenate(expected), atol=1e-5)
    one = codec.pack(*take(-9, 0), counts[:1] * 0 + torch.tensor([[5, 5]])).replicate(3, torch.full((3, 2), 5))
    assert torch.equal(one.read()[0], codec.pack(*take(-9, 0), counts).read()[0].repeat(3, 1))


@pytest.mark.parametrize("preset", ["quanto2", "hqq4"])
def test_memory_for_further_tokens_holds_what_they_would_be_packed_to(preset):
    """Rows are rounded three times. Some tokens are read again, as in a graph whose last ones do not count."""
    codec, counts, tokens = make(preset=preset, **SMALL), torch.tensor([[3, 0], [5, 2]]), 17
    draw = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 10, 32, generator=draw), torch.randn(2, tokens + 4, 4, 32, generator=draw)
    held = codec.pack(*old, counts)
    for number in range(4):  # that wait
        held = held.extend(*new[:, number], counts + number + 1)
    growing = held.growing(tokens, 7, 9, torch.zeros(26), None)
    angles = Angles(torch.ones(tokens, 32), torch.zeros(tokens, 32), torch.empty(0))
    growing.begin()
    for number in [*range(14), *range(7, tokens)]:
        keys, values = new[:, number + 4].reshape(2, 2, 64)
        growing.attend(keys, keys, values, angles, torch.tensor(number, dtype=torch.int32), 0.2, None, "reference")
        growing.pack_due(number)
    for number in range(tokens):
        held = held.extend(*new[:, number + 4], counts + number + 5)
    done = growing.finish(tokens, counts + 4 + tokens)
    assert done.waiting == held.waiting == 3
    assert all(torch.equal(*pair) for pair in zip(done.tensors(), held.tensors(), strict=True))


def test_equal_numbers_and_nan():
    rows = torch.full((2, 64), 2.5)
    rows[1, 3] = torch.nan
    for case, (_, args, _) in CASES.items():
        read = make(**args).pack(rows, rows, torch.tensor([[2]])).read()[0]
        assert (read[0] == 2.5).all() or ("hqq" in case and (read[0] - 2.5).abs().max() < 0.51)
        assert read[1].isnan().all()


@cache
def appends(method: str) -> dict:
    """Settings with which a method does not cut while decoding: packed rows are never repacked."""
    return {"decoding": False} if build_policy(method, "uniform", "llama")[0].decoding else {}


REFUSED = [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama", "hf_quantized", **appends(pair[0])))]


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    check_cross("hf_quantized", {"group": 32}, 2 * (16 + 8), method, allocator, **appends(method))


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair in REFUSED or appends(pair[0])])
def test_what_cannot_be_packed_is_refused(method, allocator):
    """A method that cuts while decoding, and what it refuses besides, with the reason."""
    args = make_tiny_method_args(method, "llama")
    reasons = {method: appends(method)} if (method, allocator) in REFUSED else {}
    if appends(method):
        reasons |= {f"codec=hf_quantized: {method} cuts.*never repacked|allocator=": {}}
    for reason, more in reasons.items():
        with pytest.raises(SettingError, match=reason):
            kvbench.prefill(
                tiny("llama"), ids(140), method, budget_for(method, 100), None, allocator, "hf_quantized", args | more
            )


def test_groups_that_no_kernel_reads_are_left_to_the_modules():
    assert make(group=32).packing.grows and not make(group=24).packing.grows


def test_settings_are_checked():
    for args, message in (
        ({"bits": 8}, "codec.bits=8: quanto's caches have 2 or 4; use codec.backend=hqq"),
        ({"optimize": True}, "codec.optimize=true: quanto has no solver; false"),
        ({"group": 3}, "codec.group=3: groups of 4 bits must fill whole bytes"),
        ({"residual": 1}, "codec.residual=1: "),
        ({"bits": 3}, "codec.bits=3: choose one of 2, 4, 8"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            make(**args)
    message = "^codec.group=64: 32 channels per head do not divide into such groups"
    with pytest.raises(SettingError, match=message):
        kvbench.prefill(tiny("llama"), ids(60), codec="hf_quantized")
    with pytest.raises(SettingError, match="^codec.group=64: 96 channels"):
        make().check(replace(read_layout(tiny("llama")), dim=96))
