"""DeltaKV's storage against its definition, written out in loops in float64: in the codec alone and in models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvbench
from kvbench.cache.hook_table import check_rotation
from kvbench.cache.policy import choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.cache.storage import count_bytes
from kvbench.config.catalogue import build, identity_settings, list_choices, load_settings, methods_available
from kvbench.engine import shared_prefill
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from kvbench.interfaces.method import Method
from kvbench.methods.codecs import delta
from kvbench.methods.codecs.delta import Delta, DeltaLayer
from kvbench.methods.codecs.delta_compressors import Compressor, name_weights, read_compressors
from kvbench.validation import ContractError, SettingError
from tests.support.branches import read_on_in_branches
from tests.support.delta_files import draw_compressor, make_zero, width_of, write_compressors, write_for
from tests.support.method_files import FOLDER, build_policy, make_tiny_method_args
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids, make_double, tiny

SMALL = dict(full_layers=[0], depth=None, sinks=3, recent=8, stride=4, nearest=2)
EXACT = dict(rtol=1e-9, atol=1e-9)
MODELS = ["llama", "qwen2", "qwen3", "phi3", "gemma3"]
READ_ON = [18, *[1] * 12]
"""A question in one block and single tokens."""


def make_codec(path: str, **args) -> Delta:
    return build("codec", load_settings("codec", "delta", SMALL | {"path": path} | args))


class Oracle:
    """One sample of one layer, token by token and in loops."""

    def __init__(self, codec: Delta, compressor: Compressor) -> None:
        self.codec, self.compressor = codec, compressor
        self.raw: list[np.ndarray] = []
        self.done = 0  # compressed tokens
        self.bases: list[np.ndarray] = []
        self.read_as: list[np.ndarray] = []
        self.references: list[list[int]] = []  # positions
        self.places: list[int] = []  # of the bases
        self.following = codec.sinks

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> np.ndarray:
        return function(torch.from_numpy(x)).numpy()

    def add(self, block: np.ndarray) -> None:
        """Read tokens (n, 2·d_k) at once."""
        codec, recent = self.codec, self.codec.recent
        self.raw += list(block)
        self.bases += self.raw[len(self.bases) : codec.sinks] if self.done == 0 else []
        self.places = list(range(len(self.bases))) if self.done == 0 else self.places
        waiting = len(self.raw) - codec.sinks - self.done
        if waiting < 2 * recent:
            return
        start, count = codec.sinks + self.done, (waiting - recent) // recent * recent
        bases, places = list(self.bases), list(self.places)
        for position in range(start, start + count):
            kv = self.raw[position]
            if codec.stride_alpha:
                if position == self.following:
                    bases, places = [*bases, kv], [*places, position]
                    self.following += codec.stride + int(codec.stride_alpha * (position - codec.sinks))
            elif (position - start) % codec.stride == 0:
                bases, places = [*bases, kv], [*places, position]
            order = sorted(range(len(bases)), key=lambda own: np.linalg.norm(kv - bases[own]))[: codec.nearest]
            self.references.append(sorted(places[own] for own in order))
            self.read_as.append(self.code(kv, np.mean([bases[own] for own in sorted(order)], 0)))
        self.bases, self.places, self.done = bases, places, self.done + count

    def code(self, kv: np.ndarray, reference: np.ndarray) -> np.ndarray:
        """What is read instead of kv."""
        down, codec = self.compressor.compress, self.codec
        if codec.remove == "residual":
            return reference
        z = self.apply(down, kv) - (0 if codec.remove else self.apply(down, reference))
        if codec.bits:
            parts = z.reshape(-1, codec.group or len(z))
            low, high = parts.min(1, keepdims=True), parts.max(1, keepdims=True)
            kind, most = np.float16 if codec.scales == "float16" else z.dtype, 2**codec.bits - 1
            step, low = (x.astype(kind).astype(z.dtype) for x in ((high - low) / most, low))
            z = (((parts - low) / step).clip(0, most).round() * step + low).ravel()
        return self.apply(self.compressor.expand, z) + (0 if codec.remove else reference)

    def read(self) -> np.ndarray:
        """All tokens as they are attended to, (n, 2·d_k)."""
        sinks = self.codec.sinks
        return np.array([*self.raw[:sinks], *self.read_as, *self.raw[sinks + self.done :]])


def to_rows(kv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, flat in the order (sample, head, position), of (B, n, 2·d_k)."""
    keys, values = (x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 2) for x in kv.chunk(2, -1))
    return keys, values


def pack(codec: Delta, kv: torch.Tensor, blocks: Sequence[int], heads: int = 2):
    """Rows of layer 1 after blocks of so many tokens, the first of which is the prompt."""
    layer, rows, seen = codec.of_layer(1, 3), None, 0
    for part in kv.split(list(blocks), 1):
        seen += part.shape[1]
        lengths = torch.full((len(kv), heads), seen)
        keys, values = to_rows(part, heads)
        rows = layer.pack(keys, values, lengths) if rows is None else rows.extend(keys, values, lengths)
    return rows


def draw_kv(tokens: int, width: int = 24, batch: int = 2) -> torch.Tensor:
    """A walk, so that near tokens are alike."""
    steps = torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return steps.cumsum(1) * 0.3


OPTIONS = [{}, {"stride_alpha": 0.3}, {"remove": "residual"}, {"remove": "reference"}, {"bits": 4}, {"bits": 2}]
OPTIONS += [{"bits": 4, "group": 4, "scales": "model"}]


@pytest.mark.cover
@pytest.mark.parametrize("args", [*OPTIONS, {"nearest": 1, "sinks": 1, "stride": 1}], ids=str)
@pytest.mark.parametrize("blocks", [(60,), (2, 60, 5), (30, *[1] * 32), (10, 3, 40, 1, 17)], ids=len)
def test_rows_are_read_as_defined(tmp_path, args, blocks):
    path = write_compressors(tmp_path / "file", [draw_compressor(24, 8, layer) for layer in range(3)])
    codec, kv = make_codec(path, **args), draw_kv(sum(blocks))
    rows = pack(codec, kv, blocks)
    expected = []
    for sample in kv:
        oracle = Oracle(codec, read_compressors(path, 3, 24)[1])
        for part in sample.split(list(blocks)):
            oracle.add(part.numpy())
        expected.append(torch.from_numpy(oracle.read()))
    assert rows.compressed == oracle.done >= 40
    for found, own in zip(rows.read(), to_rows(torch.stack(expected), 2), strict=True):
        torch.testing.assert_close(found, own, **EXACT)
    if rows.references is not None:
        places = torch.tensor(oracle.places)
        assert places[rows.references[-1].long()].tolist() == oracle.references
    assert (rows.references is None) == (args.get("remove") == "reference")
    assert (rows.codes is None) == (args.get("remove") == "residual")


@pytest.mark.parametrize(
    "tokens, more, compressed",
    [(263, 0, 0), (264, 0, 128), (391, 0, 128), (392, 0, 256), (264, 127, 128), (264, 128, 256), (1000, 0, 768)],
)
def test_how_many_tokens_are_compressed(tmp_path, tokens, more, compressed):
    """With the paper's numbers: 8 sinks, at least 128 raw tokens, blocks of 128."""
    path = write_compressors(tmp_path / "file", [draw_compressor(8, 2, layer) for layer in range(3)])
    codec = make_codec(path, sinks=8, recent=128, stride=10, nearest=4)
    rows = pack(codec, draw_kv(tokens + more, 8, 1), [tokens, *[1] * more])
    assert rows.compressed == compressed and rows.waiting.shape[1] == tokens + more - 8 - compressed
    centres = 0 if not compressed else -(-compressed // 10) if not more else 2 * 13
    assert rows.bases.shape[1] == 8 + (26 if more == 128 else 13 if more else centres)


@pytest.mark.parametrize("alpha, count, expected", [(0.0, 41, [0, 10, 20, 30, 40]), (0.5, 80, [0, 10, 25, 47])])
def test_centres(tmp_path, alpha, count, expected):
    """next = p + 10 + int(0.5·(p − 8)): 8, 18, 33, 55, 88, 138, 213. The second block begins at 88."""
    path = write_compressors(tmp_path / "file", [draw_compressor(8, 2, 0)])
    codec = make_codec(path, sinks=8, stride=10, stride_alpha=alpha)
    assert codec.find_centres(8, count, 8) == (expected, 88 if alpha else 49)
    if alpha:
        assert codec.find_centres(88, 60, 88) == ([0, 50], 213)


@pytest.mark.parametrize("remove", [None, "residual"])
def test_without_a_residual_a_token_is_the_mean_of_its_references(tmp_path, remove):
    """A compressor that gives 0, or none at all."""
    path = write_compressors(tmp_path / "file", [make_zero(24, 8) for _ in range(3)])
    kv = draw_kv(60, batch=1)
    rows = pack(make_codec(path, remove=remove), kv, [60])
    oracle = Oracle(make_codec(path, remove="residual"), read_compressors(path, 3, 24)[1])
    oracle.add(kv[0].numpy())
    means = torch.stack([kv[0, own].mean(0) for own in oracle.references])
    expected = torch.cat([kv[0, :3], means, kv[0, 3 + len(means) :]])[None]
    for found, own in zip(rows.read(), to_rows(expected, 2), strict=True):
        torch.testing.assert_close(found, own, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_means_of_references_are_rounded_once(dtype):
    """Here of numbers whose sums of four need no rounding in float32."""
    bases, numbers = torch.randint(-64, 64, (2, 30, 5)).to(dtype), torch.randint(0, 30, (2, 50, 4), dtype=torch.int16)
    expected = [[bases[own, row.long()].double().sum(0) / 4 for row in numbers[own]] for own in range(2)]
    assert torch.equal(delta.mean_of(bases, numbers), torch.stack([*map(torch.stack, expected)]).to(dtype))


class Projections:
    """What a model's projections gave to each layer: [K ‖ V] of every token, before norm and rotation."""

    def __init__(self) -> None:
        self.kv: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[None]:
        handles = []
        for index, layer in enumerate(model.model.layers):
            own, heads = layer.self_attn, model.config.num_key_value_heads
            size = heads * own.head_dim
            parts = self.kv.setdefault(index, [])
            if hasattr(own, "qkv_proj"):
                note = lambda _m, _a, out, parts=parts, size=size: parts.append(out[..., -2 * size :])  # noqa: E731
                handles.append(own.qkv_proj.register_forward_hook(note))
            else:
                for part in (own.k_proj, own.v_proj):
                    note = lambda _m, _a, out, parts=parts: parts.append(out)  # noqa: E731
                    handles.append(part.register_forward_hook(note))
        yield
        for handle in handles:
            handle.remove()

    def blocks(self, layer: int, width: int) -> list[torch.Tensor]:
        """Of each read, (B, T, 2·d_k)."""
        parts = self.kv[layer]
        if parts[0].shape[-1] == width:
            return parts
        return [torch.cat(pair, -1) for pair in zip(parts[::2], parts[1::2], strict=True)]


def attend_as(model: torch.nn.Module, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, normed and rotated by the model, and values of all tokens, (B, H, n, d) each."""
    own = model.model.layers[layer].self_attn
    keys, values = (x.unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for x in kv.chunk(2, -1))
    keys = own.k_norm(keys) if hasattr(own, "k_norm") else keys
    kinds = [model.config.layer_types[layer]] if model.config.model_type.startswith("gemma3") else []
    cos, sin = model.model.rotary_emb(kv, torch.arange(kv.shape[1])[None], *kinds)
    size = cos.shape[-1]
    first, second = keys[..., :size].chunk(2, -1)
    rotated = keys[..., :size] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([rotated, keys[..., size:]], -1), values


@pytest.mark.parametrize("model", choose_quick(MODELS, "llama", "qwen3"))
def test_a_model_attends_to_what_is_defined(tmp_path, model):
    """After a prompt, a question in one block and single tokens: every layer, by what its projections really gave."""
    own, found = make_double(model), Projections()
    path = write_for(tmp_path / "file", own)
    codec = make_codec(path)
    with found.recorded(own), torch.no_grad():
        held = kvbench.prefill(own, ids(50), block_size=20, codec=codec)
        for part in ids(30, seed=1).split(READ_ON, dim=1):
            held.extend(part)
    compressors = read_compressors(path, codec.file.layers, width_of(own))
    for layer in held.contexts[0].own_layers:
        kv = found.blocks(layer.index, width_of(own))
        stream, expected = torch.cat(kv, 1), torch.cat(kv, 1)
        if layer.index != 0:
            oracle = Oracle(codec, compressors[layer.index])
            for part in stream[0].split([50, *READ_ON]):
                oracle.add(part.numpy())
            expected = torch.from_numpy(oracle.read())[None]
            assert oracle.done == 64 and not torch.allclose(stream, expected, atol=0.1)
        rows = layer.rows.view()
        for one, other in zip((rows.keys, rows.values), attend_as(own, layer.index, expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", choose_quick(MODELS, "qwen2", "phi3", "gemma3"))
def test_an_exact_compressor_gives_the_models_own_logits(tmp_path, model):
    own, codec = make_double(model), make_codec(write_for(tmp_path / "file", make_double(model), "identity"))
    held = kvbench.prefill(own, ids(50), codec=codec)
    more = [held.extend(part) for part in ids(30, seed=1).split(READ_ON, dim=1)]
    with torch.no_grad():
        expected = own(input_ids=torch.cat([ids(50), ids(30, seed=1)], 1)).logits
    torch.testing.assert_close(torch.cat([held.logits[:, None], *more][1:], 1), expected[:, 50:], rtol=1e-6, atol=1e-6)
    assert held.contexts[0].own_layers[-1].rows.stored.compressed == 64


def test_blocks_of_a_prompt_change_nothing(tmp_path):
    """A prompt is compressed when it has been read, whatever its blocks."""
    codec, model = make_codec(write_for(tmp_path / "file", tiny("llama"))), make_double("llama")

    def answer(block: int | None) -> torch.Tensor:
        held = kvbench.prefill(model, ids(30), block_size=block, codec=codec)
        return torch.cat([held.extend(token) for token in ids(4, seed=1).split(1, dim=1)], 1)

    expected = answer(None)
    for block in (1, 7):
        torch.testing.assert_close(answer(block), expected, rtol=1e-6, atol=1e-6)
    plain = kvbench.prefill(model, ids(30))
    assert (torch.cat([plain.extend(t) for t in ids(4, seed=1).split(1, dim=1)], 1) - expected).abs().max() > 1e-2


def test_samples_branches_and_shared_prefills_are_apart(tmp_path):
    """A batch gives what its samples give alone, a branch is forgotten, and a shared prefill gives the same bits."""
    codec, model = make_codec(write_for(tmp_path / "file", tiny("llama"))), tiny("llama")
    choice = choose_cache(*build_policy("full", "uniform", "llama")[:2], codec)
    both, *alone = (read_on_in_branches(model, choice, own) for own in (slice(2), slice(1), slice(1, 2)))
    torch.testing.assert_close(both[1], torch.cat([own[1] for own in alone]), rtol=2e-4, atol=2e-4)
    others = [choice, choose_cache(*build_policy("snapkv", "uniform", "llama"))]
    contexts = [
        GenerationContext(model, own, Budget(budget), None, (0,))
        for own, budget in zip(others, (1.0, 0.5), strict=True)
    ]
    shared_prefill.prefill(contexts, ids(60, batch=2)[:1])
    for layer, other in zip(contexts[0].own_layers, alone[0][0].own_layers, strict=True):
        assert torch.equal(layer.rows.view().keys, other.rows.view().keys)


def count_expected(tokens: int, width: int, code: int, item: int, args: dict) -> int:
    """Bytes of a compressed layer after one prompt."""
    sinks, recent = args["sinks"], args["recent"]
    compressed = (tokens - sinks - recent) // recent * recent
    raw = tokens - compressed + -(-compressed // args["stride"])
    return raw * width * item + compressed * (code * item + 2 * args["nearest"])


def test_bytes_are_those_of_the_formula(tmp_path):
    """Of a model exactly; of a long text within 1 % of KR = 1/s + d_c/2d_k and the references, which it leaves out."""
    model, width = tiny("llama"), 128
    codec = make_codec(write_for(tmp_path / "file", model))
    held = kvbench.prefill(model, ids(150), codec=codec)
    one = count_expected(150, width, 12, 4, SMALL)
    assert held.resident_bytes == 150 * width * 4 + 2 * one < 0.7 * held.full_bytes
    assert held.bytes.metadata <= 2 * (150 * 2 * 4 + 16) and held.bytes.state == 0
    assert codec.weights_bytes == 2 * (2 * 12 * 128 + 12 * 12 + 128 * 12) * 8
    path = write_compressors(tmp_path / "long", [draw_compressor(64, 16, layer) for layer in range(3)])
    args = dict(sinks=8, recent=16, stride=10, nearest=4)
    rows = pack(make_codec(path, **args), draw_kv(6000, 64, 1), [6000])
    full = 6000 * 64 * 8
    share = 1 / 10 + 16 / 64 + 2 * 4 / (64 * 8)
    assert count_bytes(rows.tensors()) == count_expected(6000, 64, 16, 8, args)
    assert abs(count_bytes(rows.tensors()) / full - share) < 0.01 * share


@pytest.mark.parametrize(
    "args, size", [((4,), 6 + 4), ((2,), 3 + 4), ((4, 4), 6 + 3 * 4), ((2, 4, "model"), 3 + 3 * 16)]
)
def test_codes_of_few_bits_take_few_bytes(tmp_path, args, size):
    path = write_compressors(tmp_path / "file", [draw_compressor(24, 12, layer) for layer in range(3)])
    names = ("bits", "group", "scales")
    rows = pack(make_codec(path, **dict(zip(names, args, strict=False))), draw_kv(60, batch=1), [60])
    assert sum(own.nbytes for own in rows.codes) == rows.compressed * size


def test_references_are_numbered_in_four_bytes_if_there_are_many(tmp_path):
    path = write_compressors(tmp_path / "file", [draw_compressor(2, 1, layer) for layer in range(3)])
    codec = make_codec(path, sinks=1, nearest=1, stride=1, recent=100, remove="residual")
    kv, layer = draw_kv(40000, 2, 1), codec.of_layer(1, 3)
    few = pack(codec, kv[:, :400], [400], heads=1)
    many = replace(few, bases=kv[:, :32667], codec=layer)
    assert few.references.dtype == torch.int16
    for more, dtype in ((100, torch.int16), (200, torch.int32)):
        found = many.wait(kv[:, :more])
        assert found.references.dtype == dtype and found.references[0, : few.compressed].equal(
            few.references[0].to(dtype)
        )


def test_layers_that_are_not_compressed_follow_the_models_depth(tmp_path):
    path = write_for(tmp_path / "file", tiny("llama"))
    expected = {"llama31_8b": {32: [0, 1, 2, 8, 18], 16: [0, 1, 4, 9]}, "llama31_8b_20": {32: [0, 1, 10, 18]},
                "qwen25_7b": {28: [0, 1, 2, 4, 7, 14]}, "qwen25_32b": {64: [0, 1, 2, 3, 4, 5, 17, 29, 40]},
                "reference": {6: [0, 1]}}  # fmt: skip
    for preset, found in expected.items():
        codec = build("codec", load_settings("codec", "delta", {"preset": preset, "path": path}))
        assert {layers: codec.find_full_layers(layers) for layers in found} == found
        assert (codec.sinks, codec.recent, codec.stride, codec.nearest) == (8, 128, 10, 4)


@pytest.mark.parametrize(
    "name, own_args",
    [
        ("kivi", dict(bits=4, group=16, residual=16)),
        *((own, {"rounding": "cut"}) for own in ("fp8", "fp4", "int4", "int8")),
        ("turboquant", {"rounding": "cut", "raw_layers": 0}),
        ("hf_quantized", dict(group=16, residual=16)),
    ],
    ids=str,
)
def test_another_codec_stores_the_layers_that_are_not_compressed(tmp_path, name, own_args):
    """One token at a time then, as these codecs read them."""
    args = SMALL | {"path": write_for(tmp_path / "file", tiny("llama"))}
    base = dict(base=name, base_args=own_args)
    plain, packed = (
        kvbench.prefill(tiny("llama"), ids(60), codec="delta", codec_args=args | own) for own in ({}, base)
    )
    assert [layer.packs for layer in packed.contexts[0].own_layers] == [True] * 3
    assert plain.contexts[0].own_layers[0].rows.is_raw
    first = kvbench.prefill(tiny("llama"), ids(60), codec=name, codec_args=base["base_args"])
    sizes = [own.contexts[0].own_layers[0].bytes().rows for own in (plain, packed, first)]
    assert sizes[0] > sizes[1] == sizes[2]
    assert packed.contexts[0].choice.token_by_token and not plain.contexts[0].choice.token_by_token
    assert not packed.contexts[0].choice.codec.packing.keeps
    assert (packed.extend(ids(3, seed=1)) - plain.extend(ids(3, seed=1))).abs().max() > 1e-4


@pytest.mark.parametrize(
    "method, args", [("quest", {"page": 4, "dense_layers": 1}), ("omnikv", {"filters": [0], "depth": None, "wait": 0})]
)
def test_methods_that_read_few_rows_read_compressed_ones(tmp_path, method, args):
    codec = make_codec(write_for(tmp_path / "file", tiny("llama")))
    held = kvbench.prefill(tiny("llama"), ids(60), method, 0.3, codec=codec, method_args=args)
    held.generate(4, stop=frozenset())
    attended = [layer.attended[0] for layer in held.contexts[0].own_layers]
    assert attended[0] == 61 and max(attended[1:]) < 25 and held.contexts[0].decoding == "modules"
    plain = kvbench.prefill(tiny("llama"), ids(60), codec=codec)
    plain.generate(4, stop=frozenset())
    assert held.resident_bytes == plain.resident_bytes


def test_a_run_is_named_by_the_files_content(tmp_path):
    names = [write_for(tmp_path / name, tiny(model)) for name, model in (("a", "llama"), ("b", "llama"), ("c", "wide"))]
    found = [identity_settings(load_settings("codec", "delta", {"path": own})) for own in names]
    assert found[0] == found[1] != found[2] and "base_args" not in found[0] and found[0]["base"] == {"name": "raw"}


PAIRS = list(product(methods_available(), list_choices("allocator")))
FILE = write_for(Path(FOLDER.name) / "delta-llama", tiny("llama"))
DELTA = make_codec(FILE)
REFUSED = [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama")[:2], DELTA)]


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
def test_every_method_and_allocator(method, allocator):
    """The full cache, and methods that read few of its rows: all rows are held, in fewer bytes."""
    args = dict(method_args=make_tiny_method_args(method, "llama"), allocator=allocator)
    held = kvbench.prefill(tiny("llama"), ids(140), method, 100, codec=make_codec(FILE), **args)
    assert held.resident_bytes < 0.7 * held.full_bytes
    for layer, head in product(range(3), range(2)):
        assert held.places(layer, head).tolist() == list(range(140))
    assert torch.isfinite(held.extend(ids(3))).all()


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", REFUSED)
def test_what_cannot_be_packed_is_refused(method, allocator):
    reason = f"^codec=delta: it stores all heads of a layer.*{method} evicts|^allocator={allocator}: .*{method}"
    with pytest.raises(SettingError, match=reason):
        choose_cache(*build_policy(method, allocator, "llama")[:2], make_codec(FILE))


def test_a_file_of_another_model_of_the_same_shape_is_refused(tmp_path):
    """A file that does not say its model, like the authors', is taken."""
    made = [draw_compressor(24, 8, layer) for layer in range(3)]
    plain, named = make_codec(write_compressors(tmp_path / "plain", made)), tmp_path / "named"
    save_file(name_weights(made), str(named), {"model": "one"})
    plain.check_identity(lambda: pytest.fail("needs no identity"))
    make_codec(str(named)).check_identity(lambda: "one")
    with pytest.raises(SettingError, match="the compressors were trained for the model one, this one is other$"):
        make_codec(str(named)).check_identity(lambda: "other")


def test_codecs_with_one_file_share_its_weights(tmp_path):
    path = write_compressors(tmp_path / "one", [draw_compressor(24, 8, layer) for layer in range(3)])
    one, other = make_codec(path), make_codec(path, bits=4)
    like = torch.zeros(0, dtype=torch.float64)
    assert one.compressors.like(1, like) is other.compressors.like(1, like)
    write_compressors(tmp_path / "one", [draw_compressor(24, 4, layer) for layer in range(3)])
    assert make_codec(path).compressors.like(1, like).code == 4


def test_a_rotation_that_changes_with_the_length_is_refused():
    codec = make_codec(FILE)
    check_rotation(Method("full"), codec, None)
    with pytest.raises(SettingError, match="^codec=delta: .* beyond 64 tokens; use codec=raw$"):
        check_rotation(Method("full"), codec, 64)
    check_rotation(Method("full"), Codec("raw"), 64)


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(path=None), "codec.path=null: give a safetensors file of DeltaKV's compressors"),
        (dict(path="nowhere"), "codec.path=nowhere: cannot read the compressors"),
        (dict(full_layers=[2, 1]), r"codec.full_layers=\[2, 1\]: layers from 0 on, in ascending order"),
        (dict(full_layers=[3]), r"codec.full_layers=\[3\]: the model has layers 0 to 2"),
        (dict(full_layers=[3], depth=3), "codec.depth=3: a whole number of at least 4"),
        (dict(nearest=4), "codec.nearest=4: at most codec.sinks=3"),
        (dict(sinks=0), "codec.sinks=0: a whole number of at least 1"),
        (dict(stride=0), "codec.stride=0: a whole number of at least 1"),
        (dict(stride_alpha=-1.0), "codec.stride_alpha=-1.0: a number of at least 0"),
        (dict(recent=0), "codec.recent=0: a whole number of at least 1"),
        (dict(bits=3), "codec.bits=3: choose one of"),
        (dict(group=4), "codec.group=4: needs codec.bits=4 or 2, or use null"),
        (dict(bits=4, group=5), "codec.group=5: a divisor of the 12 numbers of a code"),
        (dict(bits=4, group=1), "codec.group=1: a divisor of the 12 numbers of a code that fills whole bytes"),
        (dict(scales="half"), "codec.scales=half: choose one of float16, model"),
        (dict(remove="both"), "codec.remove=both: choose one of"),
        (dict(base="delta"), "codec.base=delta: path=null: give a safetensors file"),
        (dict(base="zip"), "codec.base=zip: choose one that kvbench run --help lists"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, args, message):
    own = SMALL | {"path": write_for(tmp_path / "file", tiny("llama"))} | args
    with pytest.raises(SettingError, match=f"^{message}"):
        kvbench.prefill(tiny("llama"), ids(60), codec="delta", codec_args=own)


def test_what_is_packed_must_be_two_numbers(tmp_path, monkeypatch):
    codec = make_codec(write_for(tmp_path / "file", tiny("llama")))
    monkeypatch.setattr(DeltaLayer, "find_packed", lambda self, packed, more: [3, 11])
    held = kvbench.prefill(tiny("llama"), ids(60), "quest", 0.3, codec=codec)
    with pytest.raises(
        ContractError, match=r"^codec=delta: find_packed of layer 1 returned \[3, 11\], expected two whole"
    ):
        held.extend(ids(1))


def test_files_of_other_models_and_wrong_codes_are_refused(tmp_path):
    path = write_for(tmp_path / "file", tiny("llama"), code=3)
    with pytest.raises(SettingError, match="codec.bits=2: codes of 3 numbers do not fill whole bytes"):
        make_codec(path, bits=2)
    codec = make_codec(path)
    with pytest.raises(SettingError, match=r"the compressors have \(layers, 2·d_k\) \(3, 128\), the model \(2, 256\)"):
        kvbench.prefill(tiny("wide"), ids(60), codec=codec)
    with pytest.raises(SettingError, match="codec.base=delta: a codec that stores each head on its own, such as raw"):
        replace(codec, base=codec)
    with pytest.raises(SettingError, match="codec.base=fp8: packs rows as they are read; .* rounding=cut"):
        make_codec(path, base="fp8")


def test_pieces_change_nothing(tmp_path, monkeypatch):
    """Long texts are compared, compressed and reconstructed in pieces."""
    path = write_compressors(tmp_path / "file", [draw_compressor(24, 8, layer) for layer in range(3)])
    for args in ({}, {"bits": 4}):
        codec, kv = make_codec(path, **args), draw_kv(60)
        whole = pack(codec, kv, [60]).read()
        for name, most in (("COMPARED", 260), ("CODED", 7)):
            monkeypatch.setattr(delta, name, most)
        for found, expected in zip(pack(codec, kv, [60]).read(), whole, strict=True):
            torch.testing.assert_close(found, expected, **EXACT)
        monkeypatch.undo()
