"""KVQuant against its formula, written out in loops in float64: in the whole model, after eviction, and its bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvbench
from kvbench.cache.policy import choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, list_choices, load_settings, methods_available
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.methods.codecs.kvquant import KVQuant, pack_codes, store_outliers, unpack_codes
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError
from tests.support.kvquant_files import build_kvquant, find_kvquant
from tests.support.method_files import budget_for, build_policy
from tests.support.tiny_models import ids, make_double, tiny

DIM, TAKEN = 32, ceil(0.05 * 32)  # channels, outliers
ROW_RAW, ROW = 2 * DIM * 8, 2 * (DIM * 4 // 8 + TAKEN * 9) + 4  # bytes of a row with 4 bits
LOGITS = dict(rtol=1e-6, atol=1e-6)  # transformers computes norms in float32


# The definition, in loops in float64


@cache
def read_file(path: str) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}


def find_nearest(z: float, levels: np.ndarray, norm: np.ndarray | None) -> float:
    level = levels[np.abs(levels - z).argmin()]
    return level if norm is None else level * norm[0] + norm[1]


def round_key(x: np.ndarray, low: np.ndarray, high: np.ndarray, levels, norm, share: float) -> np.ndarray:
    """A key of a head, by the ranges of its channels."""
    z = (x - (high + low) / 2) / ((high - low) / 2)
    read = [find_nearest(own, levels, norm) for own in z] * ((high - low) / 2) + (high + low) / 2
    furthest = np.argsort(-np.abs(z))[: ceil(share * len(x))]
    read[furthest] = x[furthest]
    return read


def round_value(x: np.ndarray, levels, norm, share: float) -> np.ndarray:
    """A value of a head, by the range of the numbers that are no outliers."""
    distance = np.abs(x - np.sort(x)[(len(x) - 1) // 2])
    furthest = np.argsort(-distance)[: ceil(share * len(x))]
    rest = np.delete(x, furthest)
    middle, half = (float(np.float16((rest.max() + sign * rest.min()) / 2)) for sign in (1, -1))
    read = np.array([find_nearest((own - middle) / half, levels, norm) * half + middle for own in x])
    read[furthest] = x[furthest]
    return read


def replace_rows(codec: KVQuant, layer: int, side: str, rows: np.ndarray, raw: int) -> np.ndarray:
    """What the rows of a side, (tokens, H, d), are attended as."""
    file, out = read_file(codec.path), rows.copy()
    levels = file[f"{side}_levels_{codec.bits}"][layer]
    norm = file[f"{side}_norms_{codec.bits}"][layer] if codec.norm else None
    for token, head in product(range(raw, len(rows)), range(rows.shape[1])):
        if side == "key":
            ends = file["key_low"][layer, head], file["key_high"][layer, head]
            out[token, head] = round_key(rows[token, head], *ends, levels, norm, file["outliers"][0])
        else:
            out[token, head] = round_value(rows[token, head], levels, norm, file["outliers"][0])
    return out


@contextmanager
def replaced(model: torch.nn.Module, codec: KVQuant) -> Iterator[None]:
    """Let a model's own forward, of one sample, compute with rounded keys and values."""
    handles, layout = [], read_layout(model)
    for index, layer in enumerate(model.model.layers):
        for side, module in (("key", layer.self_attn.k_proj), ("value", layer.self_attn.v_proj)):

            def hook(_m, _a, out, index=index, side=side):
                rows = out[0].view(-1, layout.heads, layout.dim).numpy()
                return torch.from_numpy(replace_rows(codec, index, side, rows, codec.sinks)).view(out.shape)

            if index not in layout.sliding:
                handles.append(module.register_forward_hook(hook))
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "name, args",
    [
        ("llama", dict(bits=4)),
        ("qwen3", dict(preset="nuq2", sinks=3)),
        ("gemma3", dict(bits=3, sinks=0)),
        ("qwen2", dict(bits=4, outliers=0.0)),
    ],
)
def test_a_model_attends_to_what_is_defined(name, args):
    """In the prefill, whatever its blocks, and while decoding: as if k_proj and v_proj gave other rows."""
    model, codec = make_double(name), build_kvquant(name, **args)
    with replaced(model, codec), torch.no_grad():
        expected = model(input_ids=torch.cat([ids(20), ids(4, seed=1)], 1)).logits[0, 19:]
    for block in (None, 2):
        held = kvbench.prefill(model, ids(20), block_size=block, codec=codec)
        found = [held.logits[:, None], *(held.extend(part) for part in ids(4, seed=1).split([3, 1], dim=1))]
        torch.testing.assert_close(torch.cat(found, 1)[0], expected, **LOGITS)
    raw = kvbench.prefill(model, ids(20))
    assert (raw.logits[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("rounding, sinks, bits", [("written", 1, 4), ("cut", 2, 3)])
def test_rows_that_stay_are_those_of_the_definition(rounding, sinks, bits):
    """Of the first layer, whose rows depend on no other, in heads of several lengths; with their bytes."""
    codec = build_kvquant("llama", rounding=rounding, sinks=sinks, bits=bits)
    held = kvbench.prefill(make_double("llama"), ids(40), "snapkv", 0.4, None, "ada", codec, dict(window=4))
    raw = kvbench.prefill(make_double("llama"), ids(40))
    assert torch.equal(held.logits, raw.logits) == (rounding == "cut")
    held.extend(ids(1, seed=1))
    raw.extend(ids(1, seed=1))
    layer = held.contexts[0].layers[0]
    exact = raw.contexts[0].layers[0].rows.attention_view()[1][0].numpy()
    total = 0
    for head in range(2):
        places = layer.rows.head_places(0, head)
        rows = exact[head][places.numpy()]
        first = min(sinks, len(places)) if rounding == "cut" else int((places < sinks).sum())
        expected = replace_rows(codec, 0, "value", np.stack([rows] * 2, 1), first)[:, 0]
        found = layer.rows.attention_view()[1][0, head, -len(places) :]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        total += first * ROW_RAW + (len(places) - first) * (ROW - 2 * DIM * (4 - bits) // 8)
    stored = sum(tensor.nbytes for tensor in layer.rows.stored.tensors())
    assert stored == total + 2 * 8  # and the number of raw rows of each head
    assert len({len(layer.rows.head_places(0, head)) for head in range(2)}) == 2


# Eviction, and everything that rows go through


PAIRS = list(product(methods_available(), list_choices("allocator")))
CODEC = build_kvquant("llama")
REFUSED = [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama")[:2], CODEC)]


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    """Two samples in one cache, after a prompt and a question: some rows leave, and each has its exact bytes."""
    own = build_policy(method, allocator, "llama")
    budget = 1.0 if method == "full" else budget_for(method, 0.4)
    block = None if own[0].one_block else 25
    context = GenerationContext(make_double("llama"), choose_cache(*own[:2], CODEC), Budget(budget), block, (0, 1))
    context.prefill(ids(45, batch=2))
    assert torch.isfinite(context.extend(ids(2, seed=3, batch=2))).all()
    count = raw = 0
    for layer in context.own_layers:
        heads = [*product(range(2), range(2))]
        places = [layer.rows.head_places(*head) for head in heads]
        assert layer.rows.stored.raw.flatten().tolist() == [int((own == 0).sum()) for own in places]
        count, raw = count + sum(map(len, places)), raw + int(layer.rows.stored.raw.sum())
    assert context.bytes().rows == raw * ROW_RAW + (count - raw) * ROW + 3 * 4 * 8
    assert own[0].budget_setting or count == 12 * 47 or count < 12 * 47 * 0.6


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", REFUSED)
def test_what_cannot_be_packed_is_refused(method, allocator):
    with pytest.raises(SettingError, match=f"^codec=kvquant: it stores keys before rotation, and {method}|^allocator="):
        choose_cache(*build_policy(method, allocator, "llama")[:2], CODEC)


@pytest.mark.parametrize(
    "rounding, method, settings",
    [
        ("written", "snapkv", {"window": 4}),
        ("cut", "snapkv", {"window": 4}),
        ("cut", "tova", {"decoding": True, "scope": "group"}),
    ],
)
def test_a_batch_gives_what_its_samples_give_alone(rounding, method, settings):
    """With heads of several lengths, which are cut after the prompt, or while decoding too."""
    own = build_policy(method, "ada", "llama", **settings)[:2]
    choice = choose_cache(*own, build_kvquant("llama", rounding=rounding, sinks=2))
    prompts, more = torch.cat([ids(40, 1), ids(40, 2)]), ids(4, 3, batch=2)

    def answer(prompts: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, int]:
        context = GenerationContext(make_double("llama"), choice, Budget(0.5), 15, (0,) * len(prompts))
        context.prefill(prompts)
        return context.extend(more), context.bytes().rows

    together = answer(prompts, more)
    alone = [answer(prompts[i : i + 1], more[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(together[0], torch.cat([logits for logits, _ in alone]), **LOGITS)
    assert together[1] == sum(size for _, size in alone)


def test_samples_are_replicated():
    codec = build_kvquant("llama", sinks=1).of_layer(1, 3)
    keys, values = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    packed = codec.pack(keys, values, torch.tensor([[4, 5]]))
    copies = packed.replicate(3, torch.tensor([[4, 5]] * 3))
    for rows, once in zip(copies.read(), packed.read(), strict=True):
        assert torch.equal(rows, once.repeat(3, 1))
    keep = torch.arange(27) % 9 != 4  # the raw row of the second head
    kept = copies.keep(keep)
    assert kept.raw.tolist() == [[1, 0]] * 3 and kept.lengths.tolist() == [[4, 4]] * 3
    assert all(torch.equal(*pair) for pair in zip(kept.read(), (part[keep] for part in copies.read()), strict=True))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_take_their_bits(bits):
    codes = torch.randint(2**bits, (5, 24), generator=torch.Generator().manual_seed(0))
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, 24 * bits // 8) and torch.equal(unpack_codes(packed, bits), codes)


def test_equal_numbers_are_read_exactly(tmp_path):
    """Of a value whose numbers are equal, and of a channel whose keys were equal in the texts."""
    ends = {name: torch.full((3, 2, 32), 1.5) for name in ("key_low", "key_high")}
    codec = build_kvquant("llama", path=spoil(tmp_path / "file", **ends), sinks=0).of_layer(0, 3)
    rows = torch.full((3, 32), 1.5)
    for found in codec.pack(rows, rows, torch.tensor([[0, 3]])).read():
        assert torch.equal(found, rows)


def test_channels_of_wide_heads_take_two_bytes():
    index, outliers = store_outliers(torch.arange(600.0).view(2, 300), torch.tensor([[299, 3], [256, 0]]))
    assert index.dtype == torch.int16 and index.tolist() == [[299, 3], [256, 0]]
    assert outliers.tolist() == [[299, 3], [556, 300]]


def spoil(path: Path, **changes: torch.Tensor) -> str:
    save_file(load_file(find_kvquant("llama")) | changes, str(path), {"model": "mine"})
    return str(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(key_low=torch.full((3, 2, 32), torch.nan)), r"key_low must be a finite tensor \(layers, KV heads, dim"),
        (dict(key_low=torch.zeros(4, 2, 32)), r"key_low has \(4, 2, 32\) numbers, the model needs \(3, 2, 32\)$"),
        (dict(value_levels_4=torch.zeros(3, 8)), r"value_levels_4 has \(3, 8\) numbers, the model needs \(3, 16\)$"),
        (
            dict(key_low=torch.full((3, 2, 32), 99.0)),
            "the ends of a range, or the numbers of a code book, do not ascend",
        ),
        (dict(outliers=torch.ones(1)), r"outliers is 1.0, no share in \[0, 1\)$"),
    ],
)
def test_wrong_files_are_refused(tmp_path, changes, message):
    with pytest.raises(SettingError, match=rf"^codec.path=\S+: {message}"):
        build_kvquant("llama", path=spoil(tmp_path / "file", **changes)).check(read_layout(tiny("llama")))


def test_a_file_is_needed_and_is_of_one_model(tmp_path):
    with pytest.raises(SettingError, match="^codec.path=null: .* kvbench calibrate kvquant"):
        build("codec", load_settings("codec", "kvquant"))
    codec = build_kvquant("llama", path=spoil(tmp_path / "file"))
    codec.check_identity(lambda: "mine")
    with pytest.raises(
        SettingError, match=r"^codec.path=\S+: the file was made for the model mine, this one is other$"
    ):
        codec.check_identity(lambda: "other")
