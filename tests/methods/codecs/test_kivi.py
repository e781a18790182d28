"""KIVI against its formula, written out in loops in float64: alone, after eviction, over ragged heads, in decoding."""

from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import kvbench
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.engine.compressed_cache import choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import join, split
from kvbench.kernels.quantize import dequantize, quantize
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head
from tests.support.method_files import budget_for, build_policy, make_tiny_method_args
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, make_double, tiny

SMALL = dict(bits=2, group=8, residual=24)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """One group, read back."""
    return round_group(tuple(x.tolist()), bits)


@cache
def round_group(x: tuple[float, ...], bits: int) -> np.ndarray:
    """Scale and zero in half precision, one code an element. Each step of the oracle rounds all groups again."""
    top = 2**bits - 1
    zero, scale = float(np.float16(min(x))), float(np.float16((max(x) - min(x)) / top))
    if scale == 0:
        return np.full(len(x), zero)
    return np.array([np.rint(min(max((value - zero) / scale, 0), top)) * scale + zero for value in x])


def kivi(rows: Head, bits: int, group: int, residual: int) -> Head:
    """What a head of raw rows is attended as."""
    keys, values, count = rows.keys.copy(), rows.values.copy(), len(rows.places)
    for start in range(0, count - count % residual, group):
        for channel in range(keys.shape[1]):
            keys[start : start + group, channel] = rounded(rows.keys[start : start + group, channel], bits)
    for row in range(max(0, count - residual)):
        for start in range(0, values.shape[1], group):
            values[row, start : start + group] = rounded(rows.values[row, start : start + group], bits)
    return Head(keys, values, rows.places, rows.mass)


@dataclass
class Oracle(DenseEngine):
    """Keeps all raw rows and rounds them anew at every step. `kept`: places that each head keeps of the prompt."""

    prompt: int = 0
    kept: dict[tuple[int, int], list[int]] | None = None
    args: dict = field(default_factory=dict)
    raw: dict[int, list[Head]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cut, self.cuts_decoding = self.write, True

    def write(self, glances):
        layer = glances[0].layer
        if glances[0].tokens < self.prompt:
            return [glance.rows for glance in glances]
        if glances[0].tokens == self.prompt:
            self.raw[layer] = [
                g.rows.take(np.isin(g.rows.places, self.kept[layer, g.head])) if self.kept else g.rows for g in glances
            ]
        else:
            new = [glance.rows.take(slice(-1, None)) for glance in glances]
            self.raw[layer] = [
                Head(*(np.concatenate([getattr(old, f), getattr(one, f)]) for f in vars(old)))
                for old, one in zip(self.raw[layer], new, strict=True)
            ]
        return [kivi(rows, **self.args) for rows in self.raw[layer]]


def bytes_of(lengths: list[int], dim: int, item: int, bits: int, group: int, residual: int) -> int:
    """Bytes of keys and values of heads with so many rows."""
    total = 0
    for count in lengths:
        keys, values = count - count % residual, max(0, count - residual)
        total += keys * dim * bits // 8 + keys // group * dim * 4 + (count - keys) * dim * item
        total += values * dim * bits // 8 + values * dim // group * 4 + (count - values) * dim * item
    return total


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    # the model's norms and angles are float32: now and then a scale falls to the other half-precision neighbour
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.cover
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "phi3"], "llama"))
@pytest.mark.parametrize("tokens, block", [(46, None), (46, 13), (48, None), (17, None)])
@pytest.mark.parametrize("args", [SMALL, dict(bits=4, group=16, residual=16)], ids=["2bit", "4bit"])
def test_the_full_cache_packed(model, tokens, block, args):
    """17 rows: fewer than the residual; 48: no key is left raw. Eight further tokens fill residuals."""
    oracle = Oracle(model, prompt=tokens, args=args)
    expected = oracle.prefill(ids(tokens), block)
    held = kvbench.prefill(make_double(model), ids(tokens), block_size=block, codec="kivi", codec_args=args)
    same(held.logits[0], expected)
    for step, token in enumerate(ids(8, seed=1).split(1, dim=1), start=1):
        same(held.extend(token)[0], oracle.extend(token))
        own = held.contexts[0].layers[0].rows
        lengths = [tokens + step] * (own.shape[0] * own.shape[1])
        assert own.bytes().rows == bytes_of(lengths, 32, 8, **args)


@pytest.mark.cover
@pytest.mark.parametrize("allocator", ["uniform", "ada"])
@pytest.mark.parametrize("block", [None, 20])
def test_the_rows_that_stayed_are_packed(allocator, block):
    """Per head; with ada heads differ in length, and so in when their keys are packed."""
    setup = dict(method="snapkv", budget=0.5, block_size=block, allocator=allocator, method_args={"window": 4})
    raw = kvbench.prefill(make_double("llama"), ids(92), **setup)
    kept = {(layer, head): raw.places(layer, head).tolist() for layer in range(3) for head in range(2)}
    assert allocator == "uniform" or len(set(map(len, kept.values()))) > 2
    held = kvbench.prefill(make_double("llama"), ids(92), **setup, codec="kivi", codec_args=SMALL)
    assert torch.equal(held.logits, raw.logits)  # packed after the last cut: the prefill is exact
    cut = dict(kept)
    if block is None:
        oracle = Oracle("llama", prompt=92, kept=kept, args=SMALL)
        oracle.prefill(ids(92), None)
    for step, token in enumerate(ids(8, seed=1).split(1, dim=1), start=1):
        found = held.extend(token)[0]
        if block is None:
            same(found, oracle.extend(token))
        for layer, head in cut:
            assert held.places(layer, head).tolist() == cut[layer, head] + list(range(92, 92 + step))
        lengths = [len(places) + step for places in cut.values()]
        assert held.resident_bytes == bytes_of(lengths, 32, 8, **SMALL)
    assert held.evicted(0, 0) == raw.evicted(0, 0)


def test_merged_rows_keep_their_masses():
    setup = dict(method="centroidkv", budget=0.5, method_args={"decoding": False, "sinks": 4, "recents": 8})
    raw = kvbench.prefill(tiny("llama"), ids(110), **setup)
    held = kvbench.prefill(tiny("llama"), ids(110), **setup, codec="kivi", codec_args=SMALL)
    held.extend(ids(5))
    assert raw.masses(1, 1).max() > 1
    assert held.masses(1, 1).tolist() == raw.masses(1, 1).tolist() + [1] * 5


@cache
def appends(method: str) -> dict:
    """Settings with which a method does not cut while decoding: packed rows are never repacked."""
    return {"decoding": False} if build_policy(method, "uniform", "llama")[0].decoding else {}


PAIRS = list(product(methods_available(), list_choices("allocator")))
REFUSED = [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama", "kivi", **appends(pair[0])))]


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    """The same rows as raw, smaller."""
    args = make_tiny_method_args(method, "llama") | appends(method)
    size = budget_for(method, 100)
    raw = kvbench.prefill(tiny("llama"), ids(140), method, size, None, allocator, method_args=args)
    held = kvbench.prefill(tiny("llama"), ids(140), method, size, None, allocator, "kivi", args, codec_args=SMALL)
    assert held.resident_bytes < 0.65 * raw.resident_bytes
    for layer in range(3):
        for head in range(2):
            assert torch.equal(held.places(layer, head), raw.places(layer, head))
    assert torch.isfinite(held.extend(ids(3))).all()


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair in REFUSED or appends(pair[0])])
def test_what_cannot_be_packed_is_refused(method, allocator):
    """A method that cuts while decoding, and what it refuses besides, with the reason."""
    args = make_tiny_method_args(method, "llama")
    reasons = {method: appends(method)} if (method, allocator) in REFUSED else {}
    if appends(method):
        reasons |= {f"codec=kivi: {method} cuts.*never repacked|allocator=": {}}
    for reason, more in reasons.items():
        with pytest.raises(SettingError, match=reason):
            kvbench.prefill(
                tiny("llama"), ids(140), method, budget_for(method, 100), None, allocator, "kivi", args | more
            )


def test_a_batch_gives_what_its_samples_give_alone():
    choice = choose_cache(
        build("method", load_settings("method", "snapkv", {"window": 4})),
        build("allocator", load_settings("allocator", "ada")),
        build("codec", load_settings("codec", "kivi", SMALL)),
    )
    prompts, more = torch.cat([ids(90, 1), ids(90, 2)]), ids(8, 3, batch=2)

    def read(prompts, more):
        context = GenerationContext(make_double("llama"), choice, Budget(0.5), None, (0,) * len(prompts))
        context.prefill(prompts)
        return context, context.extend(more)

    together, at_once = read(prompts, more)
    parts = [read(prompts[i : i + 1], more[i : i + 1]) for i in range(2)]
    same(at_once, torch.cat([logits for _, logits in parts]))
    assert together.bytes().rows == sum(context.bytes().rows for context, _ in parts)


def test_several_tokens_are_read_one_by_one():
    """Exactly: the residual fills in the middle of them."""
    first, second = (kvbench.prefill(tiny("llama"), ids(46), codec="kivi", codec_args=SMALL) for _ in range(2))
    at_once = first.extend(ids(6, seed=1))
    one_by_one = torch.cat([second.extend(token) for token in ids(6, seed=1).split(1, dim=1)], 1)
    assert torch.equal(at_once, one_by_one)
    stored = [held.contexts[0].layers[1].rows.stored for held in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*(x.tensors() for x in stored), strict=True))


@pytest.mark.parametrize("parts", [[71], [1] * 71, [30, 1, 40]])
def test_rows_packed_in_parts_are_the_rows_packed_at_once_and_the_formula(parts):
    codec = build("codec", load_settings("codec", "kivi", SMALL))
    lengths = torch.tensor([[3, 24], [50, 47]])
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, length + 71, 16, generator=draw, dtype=torch.float64) for length in lengths.flatten()]
    whole = codec.pack(*(torch.cat([head[i] for head in heads]) for i in range(2)), lengths + 71)
    grown = codec.pack(
        *(torch.cat([head[i][:n] for head, n in zip(heads, lengths.flatten(), strict=True)]) for i in range(2)), lengths
    )
    done = lengths.flatten()
    for part in parts:
        rows = [torch.cat([head[i][n : n + part] for head, n in zip(heads, done, strict=True)]) for i in range(2)]
        done = done + part
        grown = grown.extend(*rows, done.view(2, 2))
    assert all(torch.equal(a, b) for a, b in zip(grown.tensors(), whole.tensors(), strict=True))
    exact = [kivi(Head(*head.numpy(), np.arange(head.shape[1]), None), **SMALL) for head in heads]
    for found, column in zip(grown.read(), ("keys", "values"), strict=True):
        np.testing.assert_allclose(found, np.concatenate([getattr(head, column) for head in exact]), atol=1e-12)


def test_decoding_loses_precision_and_what_is_packed_stays():
    """A key is exact until its residual fills, then rounded, once; a value until R newer ones came."""
    held = kvbench.prefill(tiny("llama"), ids(46), codec="kivi", codec_args=SMALL)
    raw = kvbench.prefill(tiny("llama"), ids(46))
    layer = held.contexts[0].layers[0]  # the first layer's keys do not depend on any cache
    earlier = None
    for count, token in enumerate(ids(28, seed=1).split(1, dim=1), start=47):
        held.extend(token)
        raw.extend(token)
        exact = raw.contexts[0].layers[0].rows.view()
        found = layer.rows.view()
        key_exact = (found.keys == exact.keys)[0, 0].all(-1)
        value_exact = (found.values == exact.values)[0, 0].all(-1)
        assert key_exact.tolist() == [row >= count - count % 24 for row in range(count)]
        assert value_exact.tolist() == [row >= count - 24 for row in range(count)]
        if earlier is not None:
            packed = ~earlier[0]
            assert torch.equal(found.keys[0, 0, : count - 1][packed], earlier[1][packed])
        earlier = key_exact, found.keys[0, 0]


def test_a_branch_is_forgotten():
    """Keys are packed in the branch within it, after 48 rows, and in the outer one behind it."""
    held = kvbench.prefill(tiny("llama"), ids(60), "snapkv", 44, codec="kivi", codec_args=SMALL)
    before = held.bytes, held.places(0, 0).tolist()
    answers = []
    for _ in range(2):
        with held.branch():
            answers.append(held.extend(ids(6, seed=1)))
            with held.branch():
                held.extend(ids(4, seed=2))
            answers[-1] = torch.cat([answers[-1], held.extend(ids(3, seed=3))], 1)
        assert (held.bytes, held.places(0, 0).tolist()) == before
    assert torch.equal(*answers)


def test_variants_differ():
    """Fewer bits, wider groups and shorter residuals each lose more of the same answer."""

    def loss(method: str = "full", **args) -> float:
        held = kvbench.prefill(tiny("llama"), ids(140), method, codec="kivi", codec_args=args)
        own = kvbench.prefill(tiny("llama"), ids(140), method)
        return (held.extend(ids(1, seed=1)) - own.extend(ids(1, seed=1))).abs().mean().item()

    two, four, short = (loss(preset=preset) for preset in ("paper", "bits4", "scbench"))
    assert 0 < four < two < short
    assert loss(bits=4, group=8, residual=128) < four


def test_keys_are_grouped_per_channel_and_values_per_token():
    """One large channel costs a key nothing and a value its group; one large row the other way round."""
    codec = build("codec", load_settings("codec", "kivi", SMALL))
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 16, generator=draw)
    channel, row = rows.clone(), rows.clone()
    channel[:, 3] += 1000
    row[5] += 1000
    others = [index for index in range(16) if index != 3]

    def losses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple((found - x).abs() for found in codec.pack(x, x, torch.tensor([[48]])).read())

    keys, values = losses(channel)
    assert keys[:, others].max() < 1.2
    assert values[:24, others[:7]].mean() > 0.5 * rows[:24, others[:7]].abs().mean()  # the channel's group is lost
    keys, values = losses(row)
    assert values[[index for index in range(24) if index != 5]].max() < 1.2
    near = [index for index in range(8) if index != 5]
    assert keys[near].mean() > 0.5 * rows[near].abs().mean()  # the row's group is lost


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pack_against_its_formula(bits, dtype):
    group, x = 8, torch.randn(3, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    groups = quantize(x, bits, group)
    assert groups.codes.shape == (3, 5, 24 * bits // 8) and groups.codes.dtype == torch.uint8
    assert groups.scale.shape == groups.zero.shape == (3, 5, 3) and groups.scale.dtype == torch.float16
    back = dequantize(groups, bits, group, dtype)
    wide = x.double().numpy()
    exact = np.array([[np.concatenate([rounded(g, bits) for g in row.reshape(3, group)]) for row in s] for s in wide])
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    off = np.abs(back.double().numpy() - exact) > near
    assert off.mean() <= (0 if dtype == torch.float64 else 0.01)  # a code at .5 may fall to the other side
    step = groups.scale.double().repeat_interleave(group, -1)
    bound = 0.5 * step + 2.0**-10 * (x.double().abs() + 2**bits * step) + near
    assert ((back.double() - x.double()).abs() <= bound).all()


def test_constant_groups_extremes_and_bad_shapes():
    for value in (0.0, 3.0, -7.25, 1e-9, 6e4, 1e6, -1e30):
        back = dequantize(quantize(torch.full((2, 16), value), 2, 8), 2, 8, torch.float32)
        assert torch.isfinite(back).all()
        torch.testing.assert_close(back, torch.full((2, 16), max(min(value, 65504.0), -65504.0)), rtol=1e-3, atol=1e-7)
    assert torch.isfinite(dequantize(quantize(torch.tensor([[-1e30, 1e30] * 4]), 2, 8), 2, 8, torch.float32)).all()
    codes = quantize(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2, 4).codes
    assert codes.tolist() == [[0 | 1 << 2 | 2 << 4 | 3 << 6]]  # the first in the lowest bits
    for x, bits, group in ((torch.ones(2, 9), 2, 8), (torch.ones(2, 9), 3, 3), (torch.ones(2, 6), 2, 3)):
        with pytest.raises(ValueError, match="^quantize: "):
            quantize(x, bits, group)


def test_flat_rows_join_and_split():
    draw = np.random.default_rng(0)
    for _ in range(50):
        heads = [(draw.integers(0, 4), draw.integers(0, 4)) for _ in range(6)]
        flat = [[(h, i, part) for h, counts in enumerate(heads) for i in range(counts[part])] for part in (0, 1)]
        old, new = (torch.tensor(rows).view(-1, 3) for rows in flat)
        counts, more = (torch.tensor([c[part] for c in heads]).view(2, 3) for part in (0, 1))
        both = join(old, counts, new, more)
        assert list(map(tuple, both.tolist())) == sorted(flat[0] + flat[1], key=lambda row: (row[0], row[2], row[1]))
        again = split(both, counts + more, counts)
        assert torch.equal(again[0], old) and torch.equal(again[1], new)


def test_settings_are_checked():
    for args, message in (
        (dict(bits=3), "codec.bits=3: choose one of 2, 4"),
        (dict(group=2, residual=128), "codec.group=2: groups of 2 bits"),
        (dict(residual=100), "codec.residual=100: a multiple of codec.group=32"),
        (dict(group=0), "codec.group=0: a whole number"),
        (dict(preset="foo"), "codec.preset=foo: choose one of paper, bits4, scbench"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "kivi", args))
    with pytest.raises(SettingError, match="codec.group=64: 32 channels per head"):
        kvbench.prefill(tiny("llama"), ids(60), codec="kivi", codec_args=dict(group=64, residual=64))
