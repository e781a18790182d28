"""Palu against its definition: a model with other weights, loops over tokens, and the factorisation of the source."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.linalg import hadamard

import kvbench
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.cache.refusals import find_refusal
from kvbench.cli import run as command
from kvbench.config.catalogue import identity_settings, list_choices, load_settings, methods_available
from kvbench.engine import shared_prefill
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.method import Method
from kvbench.kernels.latent_attention import restore_latents, round_latents
from kvbench.methods.codecs.palu import Palu
from kvbench.methods.codecs.palu_projections import Projection, make_rotation, peek_projections
from kvbench.models.configuration import load_layout
from kvbench.models.transformers_port import read_layout
from kvbench.training.delta_losses import collect_rows
from kvbench.validation import SettingError
from tests.support.branches import read_on_in_branches
from tests.support.method_files import budget_for, build_policy
from tests.support.palu_files import TEXT, build_palu, draw_palu, find_palu, write_palu
from tests.support.recorded_runs import read_records
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import ids, make_double, tiny

EXACT = dict(rtol=1e-9, atol=1e-9)
LOGITS = dict(rtol=1e-6, atol=1e-6)  # transformers computes norms in float32
MODELS = ("llama", "qwen2", "qwen3", "phi3", "gemma3", "llama3")


# The definition, in loops in float64


def read_group(path: str, layer: int, side: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """U (w, r) and b (w,) as they stand in the file."""
    weights, name = load_file(path), f"model.layers.{layer}.self_attn.{side}_proj.U.{group}"
    up = weights[f"{name}.weight"].double().numpy()
    return up, weights[f"{name}.bias"].double().numpy() if f"{name}.bias" in weights else np.zeros(len(up))


def round_token(h: np.ndarray, bits: int, clip: float) -> np.ndarray:
    """quant.py's rounding of one token, with s as float16."""
    low, high, most = clip * min(h), clip * max(h), 2**bits - 1
    s = float(np.float16(max(high - low, 1e-5) / most))
    z = min(max(np.round(-low / s), 0), most)
    return np.array([(min(max(np.round(x / s) + z, 0), most) - z) * s for x in h])


def replace_token(
    x: np.ndarray, up: np.ndarray, bias: np.ndarray, bits: int | None, clip: float, turns: bool
) -> np.ndarray:
    """What is attended to instead of a group's keys or values (w,) of a token."""
    up = up @ (hadamard(up.shape[1]) / up.shape[1] ** 0.5) if turns and bits else up
    h = np.linalg.lstsq(up, x - bias, rcond=None)[0]
    return up @ (h if bits is None else round_token(h, bits, clip)) + bias


@dataclass
class Oracle:
    """A codec, as a function of what k_proj and v_proj give."""

    path: str
    heads: int
    bits: int | None = None
    clip: float = 1.0
    turns: bool = True

    def replace(self, layer: int, side: str, rows: torch.Tensor) -> torch.Tensor:
        """What replaces keys or values (..., H·d)."""
        groups = peek_projections(self.path).groups
        flat = rows.reshape(-1, groups, rows.shape[-1] // groups).numpy()
        out = np.empty_like(flat)
        for group in range(groups):
            up, bias = read_group(self.path, layer, side, group)
            for token in range(len(flat)):
                out[token, group] = replace_token(flat[token, group], up, bias, self.bits, self.clip, self.turns)
        return torch.from_numpy(out).view(rows.shape)

    @contextmanager
    def in_place_of_weights(self, model: torch.nn.Module, sliding: tuple[int, ...]) -> Iterator[None]:
        """Let a model's own forward compute with replaced keys and values, but for layers with a window."""
        handles = []
        for index, layer in enumerate(model.model.layers):
            own = layer.self_attn
            if index in sliding:
                continue
            if hasattr(own, "qkv_proj"):
                size = self.heads * own.head_dim

                def joint(_m, _a, out, index=index, size=size):
                    parts = out.split([out.shape[-1] - 2 * size, size, size], -1)
                    made = [self.replace(index, side, part) for side, part in zip("kv", parts[1:], strict=True)]
                    return torch.cat([parts[0], *made], -1)

                handles.append(own.qkv_proj.register_forward_hook(joint))
                continue
            for side, module in (("k", own.k_proj), ("v", own.v_proj)):
                hook = lambda _m, _a, out, index=index, side=side: self.replace(index, side, out)  # noqa: E731
                handles.append(module.register_forward_hook(hook))
        yield
        for handle in handles:
            handle.remove()


def answer(model: torch.nn.Module, codec: Codec | str, block: int | None, **more: object) -> torch.Tensor:
    """The logits of the last token of a prompt, of a question in one block, and of two tokens, (8, vocab)."""
    held = kvbench.prefill(model, ids(40), block_size=block, codec=codec, **more)
    found = [held.logits[:, None], *(held.extend(part) for part in ids(7, seed=1).split([5, 1, 1], dim=1))]
    return torch.cat(found, 1)[0]


def answer_densely(model: torch.nn.Module) -> torch.Tensor:
    """The same of a model's own forward."""
    with torch.no_grad():
        return model(input_ids=torch.cat([ids(40), ids(7, seed=1)], 1)).logits[0, 39:]


@pytest.mark.parametrize(
    "model, bits",
    [
        *[("llama", 4), ("qwen2", 3), ("phi3", 2), ("gemma3", None)],
        *(only_in_full(name, None) for name in ("llama", "qwen2", "qwen3", "phi3", "llama3")),
    ],
)
@pytest.mark.parametrize("blocks", [(None, 7), only_in_full((1, 128))])
def test_a_model_attends_to_what_is_defined(model, bits, blocks):
    """In the prefill, whatever its blocks, and while decoding: as if k_proj and v_proj gave other rows."""
    own, path = make_double(model), find_palu(model, removed=0.7)
    shape = read_layout(own)
    oracle = Oracle(path, shape.heads, bits)
    with oracle.in_place_of_weights(own, shape.sliding):
        expected = answer_densely(own)
    codec = build_palu(path, bits=bits)
    for block in blocks:
        torch.testing.assert_close(answer(own, codec, block), expected, **LOGITS)
    assert (answer(own, "raw", None) - expected).abs().max() > 0.05


def test_it_equals_a_model_with_other_weights():
    """The paper's claim: projected keys are the keys of projected weights."""
    own, path, shape = make_double("qwen2"), find_palu("qwen2"), read_layout(make_double("qwen2"))
    with torch.no_grad():
        expected = answer(own, build_palu(path), None)
        saved = {}
        for (index, layer), side in product(enumerate(own.model.layers), "kv"):
            weight = getattr(layer.self_attn, f"{side}_proj").weight
            saved[weight] = weight.clone()
            up = torch.from_numpy(read_group(path, index, side, 0)[0])
            q = torch.linalg.qr(up).Q
            weight.copy_(q @ q.T @ weight)  # the bias stays
        try:
            found = answer_densely(own)
        finally:
            for weight, before in saved.items():
                weight.copy_(before)
    assert shape.heads == 1
    torch.testing.assert_close(found, expected, **LOGITS)


@pytest.mark.parametrize("model", choose_quick(MODELS, "llama", "phi3"))
def test_nothing_removed_changes_nothing(model):
    own, codec = make_double(model), build_palu(find_palu(model, removed=0.0))
    torch.testing.assert_close(answer(own, codec, 7), answer_densely(own), **EXACT)
    one, other = (kvbench.prefill(own, ids(40), codec=name).contexts[0].own_layers for name in (codec, "raw"))
    for layer, plain in zip(one, other, strict=True):
        for found, expected in zip(layer.rows.attention_view()[:2], plain.rows.attention_view()[:2], strict=True):
            torch.testing.assert_close(found, expected, **EXACT)


# The source's way: the singular value decomposition of whitened weights


def find_projection(codec: Palu, layer: int, side: str, group: int) -> Projection:
    return codec.projections.read[layer].each["kv".index(side) * codec.file.groups + group]


def whiten(model: torch.nn.Module) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What enters the projections of each layer, (tokens, hidden), and S with S Sᵀ = mean of x xᵀ."""
    found: dict[int, list[torch.Tensor]] = {}
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda _m, args, _o, index=index: found[index].append(args[0]))
        for index, layer in enumerate(model.model.layers)
        if found.setdefault(index, []) == []
    ]
    with torch.no_grad():
        for own in TEXT:
            model(input_ids=own[None])
    for handle in handles:
        handle.remove()
    entered = {index: torch.cat(own, 1)[0] for index, own in found.items()}
    return {index: (x, torch.linalg.cholesky(x.T @ x / len(x))) for index, x in entered.items()}


def factorise(weight: torch.Tensor, s: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """svd_linear.py's two matrices, (w, r) and (r, hidden)."""
    u, sigma, vt = torch.linalg.svd(weight @ s, full_matrices=False)
    root = sigma[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vt[:rank] @ torch.linalg.inv(s)


@pytest.mark.parametrize("model", choose_quick(["llama", "qwen2", "mistral"], "llama", "qwen2"))
def test_latents_are_those_of_whitened_weights(model):
    """h = VT x = U⁺ (k − b), up to the sign of each latent, which no decomposition determines."""
    own, codec = make_double(model), build_palu(find_palu(model))
    for layer, (x, s) in whiten(own).items():
        attention = own.model.layers[layer].self_attn
        for side, group in product("kv", range(codec.file.groups)):
            module, projection = getattr(attention, f"{side}_proj"), find_projection(codec, layer, side, group)
            weight = module.weight.detach().chunk(codec.file.groups)[group]
            expected = x @ factorise(weight, s, len(projection.down))[1].T
            found = projection.encode(module(x).detach().chunk(codec.file.groups, -1)[group])
            signs = (found * expected).sum(0).sign()
            torch.testing.assert_close(found * signs, expected, rtol=1e-4, atol=1e-4)  # U is stored in float32


def write_official(folder: Path, model: torch.nn.Module, rank: int = 24, groups: int = 1, **config: object) -> Path:
    """A folder as the authors' compress.py writes it, in two files, with weights that are no projections."""
    parts: list[dict[str, torch.Tensor]] = [{"model.embed_tokens.weight": model.model.embed_tokens.weight.detach()}, {}]
    ranks = {}
    for layer, (_, s) in whiten(model).items():
        for side in "kv":
            module, name = (
                getattr(model.model.layers[layer].self_attn, f"{side}_proj"),
                f"model.layers.{layer}.self_attn",
            )
            made = [factorise(weight, s, rank) for weight in module.weight.detach().chunk(groups)]
            ranks[f"{name}.{side}_proj"] = [rank] * groups
            own = {f"{name}.{side}_proj.VT.weight": torch.cat([down for _, down in made])}
            own |= {f"{name}.{side}_proj.U.{group}.weight": up for group, (up, _) in enumerate(made)}
            if module.bias is not None:
                biases = enumerate(module.bias.detach().chunk(groups))
                own |= {f"{name}.{side}_proj.U.{group}.bias": bias for group, bias in biases}
            parts[layer % 2] |= own
    folder.mkdir()
    for number, own in enumerate(parts):
        save_file({name: x.contiguous() for name, x in own.items()}, str(folder / f"model-{number}.safetensors"))
    (folder / "config.json").write_text(json.dumps({"model_type": "palullama", "head_wise_ranks": ranks} | config))
    return folder


@pytest.mark.parametrize("model, groups", [only_in_full("llama", 1), ("llama", 2), ("qwen2", 1)])
def test_the_authors_checkpoints_give_the_authors_latents(tmp_path, model, groups):
    own = make_double(model)
    folder = write_official(tmp_path / "palu", make_double(model), 24 // groups, groups)
    codec, downs = build_palu(str(folder)), {}
    for file in folder.glob("*.safetensors"):
        downs |= {name: x for name, x in load_file(file).items() if name.endswith("VT.weight")}
    for layer, (x, _) in whiten(own).items():
        for side in "kv":
            module = getattr(own.model.layers[layer].self_attn, f"{side}_proj")
            expected = x @ downs[f"model.layers.{layer}.self_attn.{side}_proj.VT.weight"].T
            for group, part in enumerate(module(x).detach().chunk(groups, -1)):
                found = find_projection(codec, layer, side, group).encode(part)
                torch.testing.assert_close(found, expected.chunk(groups, -1)[group], **EXACT)
    assert codec.file.identity is None and kvbench.prefill(own, ids(9), codec=codec).resident_bytes


@pytest.mark.parametrize("model", choose_quick(["llama", "qwen2", "phi3"], "qwen2"))
def test_what_is_lost_is_the_sum_of_the_eigenvalues_left_out(model):
    """Of the text of the calibration: Σ ‖k − k̂‖² = tokens · Σ_{i>r} λ_i, for keys and values of every group."""
    own, codec, path = make_double(model), build_palu(find_palu(model)), find_palu(model)
    rows = [torch.cat(own, 0).flatten(0, 1) for own in zip(*(collect_rows(own, x[None]) for x in TEXT), strict=True)]
    with safe_open(path, "pt") as file:
        for layer, kv in enumerate(rows):
            for side, x in zip("kv", kv.chunk(2, -1), strict=True):
                values = file.get_tensor(f"model.layers.{layer}.self_attn.{side}_proj.eigenvalues")
                for group, part in enumerate(x.chunk(codec.file.groups, -1)):
                    projection = find_projection(codec, layer, side, group)
                    lost = (part - projection.decode(projection.encode(part))).square().sum().item()
                    expected = len(part) * values[group, len(projection.down) :].double().sum().item()
                    assert lost == pytest.approx(expected, rel=1e-5) and lost > 1


# Rounding


@pytest.mark.cover
@pytest.mark.parametrize("bits, clip", [(4, 1.0), (3, 0.9), (2, 1.0), (2, 0.7)])
@pytest.mark.parametrize("turns", [True, False])
def test_rows_are_rounded_as_defined(bits, clip, turns):
    """Keys and values of two samples and two groups, read back, also after eviction and with further tokens."""
    path = find_palu("llama3", group=2)
    codec = build_palu(path, bits=bits, clip=clip, hadamard=turns).of_layer(1, 2)
    drawn = torch.randn(2, 2, 4, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    oracle, expected = Oracle(path, 4, bits, clip, turns), []
    for side, x in zip("kv", drawn, strict=True):
        flat = x.transpose(1, 2).flatten(2)  # (B, n, H·d)
        expected.append(oracle.replace(1, side, flat).unflatten(-1, (4, 32)).transpose(1, 2))
    none = drawn.new_empty(0, 32)
    rows = codec.pack(none, none, torch.zeros(2, 4, dtype=torch.int64))
    first, rest = (own.flatten(1, 3) for own in drawn.split([6, 3], 3))
    rows = rows.extend(*first, torch.full((2, 4), 6))
    kept = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(2)) < 0.4
    cut = rows.keep(kept.flatten())
    for found, own in zip(rows.read(), expected, strict=True):
        torch.testing.assert_close(found, own[:, :, :6].flatten(0, 2), **EXACT)
    for found, own in zip(cut.read(), expected, strict=True):
        torch.testing.assert_close(found, own[:, :, :6][kept], **EXACT)
    stays = torch.cat([kept, torch.ones(2, 4, 3, dtype=torch.bool)], 2)
    for found, own in zip(cut.extend(*rest, stays.sum(2)).read(), expected, strict=True):
        torch.testing.assert_close(found, own[stays], **EXACT)
    assert (expected[0] - drawn[0]).abs().max() > 0.3


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_fill_whole_bytes(bits):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(bits))
    codes, scale, zero = round_latents(x, bits, 1.0)
    assert codes.shape == (5, 24 * bits // 8) and (codes.dtype, scale.dtype, zero.dtype) == (
        torch.uint8, torch.float16, torch.uint8
    )  # fmt: skip
    back = restore_latents((codes, scale, zero), bits, torch.float32)
    assert ((back - x).abs() <= scale.float() * (1 + 2.0**-9)).all() and back.unique().numel() > 2**bits
    constant = restore_latents(round_latents(torch.zeros(3, 8), bits, 1.0), bits, torch.bfloat16)
    assert torch.equal(constant, torch.zeros(3, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("rank", [1, 8, 24, 64, 96, 160])
def test_a_rotation_spreads_every_latent(rank):
    turn = make_rotation(rank)
    torch.testing.assert_close(turn @ turn.T, torch.eye(rank).double(), rtol=0, atol=1e-12)
    assert turn.abs().max() <= (2 / rank) ** 0.5 + 1e-12
    if rank & (rank - 1) == 0:
        assert turn.numpy() == pytest.approx(hadamard(rank) / rank**0.5)


# Eviction, and everything that rows go through


PAIRS = list(product(methods_available(), list_choices("allocator")))


def choose_policy(method: str, allocator: str, codec: Palu | None = None):
    own = build_policy(method, allocator, "llama")
    return choose_cache(*own[:2], codec or build_palu(find_palu("llama", removed=0.0)))


PALU = build_palu(find_palu("llama", removed=0.0))
REFUSED = [pair for pair in PAIRS if find_refusal(*build_policy(*pair, "llama")[:2], PALU)]


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", [pair for pair in PAIRS if pair not in REFUSED])
@pytest.mark.parametrize("blocks", ["several", only_in_full("one")])
def test_every_method_and_allocator(method, allocator, blocks):
    """If nothing is removed, the same rows stay as with raw rows, in the prefill and while decoding."""
    own = build_policy(method, allocator, "llama")
    codec, block = build_palu(find_palu("llama", removed=0.0)), 50 if blocks == "several" else None
    one, other = (
        read(
            choose_cache(*own[:2], each),
            1.0 if method == "full" else budget_for(method, 0.4),
            None if own[0].one_block else block,
        )
        for each in (codec, own[2])
    )
    for layer, plain in zip(one.own_layers, other.own_layers, strict=True):
        for sample, head in product(range(2), range(2)):
            assert layer.rows.head_places(sample, head).tolist() == plain.rows.head_places(sample, head).tolist()
    torch.testing.assert_close(one.logits, other.logits, **LOGITS)


def read(choice: CachePolicy, budget: float | None, block: int | None) -> GenerationContext:
    """Two samples in one cache, after a prompt, a question in one block, and a token."""
    context = GenerationContext(make_double("llama"), choice, Budget(budget), block, (0, 1))
    context.prefill(ids(90, batch=2))
    for part in ids(5, seed=3, batch=2).split([4, 1], 1):
        context.extend(part)
    return context


@pytest.mark.cover
@pytest.mark.parametrize("method, allocator", REFUSED)
def test_what_cannot_be_packed_is_refused(method, allocator):
    with pytest.raises(SettingError, match=f"^codec=palu: it stores keys before rotation, and {method}|^allocator="):
        choose_policy(method, allocator)


def test_only_methods_that_merge_are_refused():
    own = [method for method, allocator in REFUSED if allocator == "uniform"]
    assert own and all(build_policy(method, "uniform", "llama")[0].merges for method in own)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("method", ["snapkv", "random", "tova", "sink"])
def test_rows_that_stay_are_those_of_the_full_cache(method, bits):
    """A cut drops latents and changes none. Heads of a group keep different rows but for tova's and sink's."""
    codec, contexts = build_palu(find_palu("llama3", removed=0.7), bits=bits), []
    for name, budget in (("full", 1.0), (method, 0.3)):
        choice = choose_cache(*build_policy(name, "uniform", "llama3")[:2], codec)
        contexts.append(GenerationContext(make_double("llama3"), choice, Budget(budget), None, (0, 1)))
        contexts[-1].prefill(ids(60, batch=2))
    for other, one in zip(*(own.own_layers for own in contexts), strict=True):
        rows, whole = one.rows.view(), other.rows.view()
        for name in ("keys", "values"):
            at = rows.places[..., None].expand_as(rows.keys)
            torch.testing.assert_close(getattr(rows, name), getattr(whole, name).gather(2, at), **EXACT)
        assert (one.rows.stored.held is None) == (method in ("tova", "sink"))


def count_latents(codec: Palu, layer: int, tokens: list[int], item: int) -> int:
    """Bytes of so many tokens of each group."""
    own = [codec.file.ranks[layer, side] for side in "kv"]
    sizes = [[rank * item if codec.bits is None else rank * codec.bits // 8 + 3 for rank in ranks] for ranks in own]
    return sum(count * (keys + values) for count, keys, values in zip(tokens, *sizes, strict=True))


@pytest.mark.parametrize("bits", [None, 4, 3, 2])
def test_bytes_are_those_of_the_formula(bits):
    """Σ ranks · tokens · size, of a full cache and of one whose heads keep different rows, and 8 bytes for a count."""
    model, codec = tiny("llama3"), build_palu(find_palu("llama3", group=2, search="fisher"), bits=bits)
    assert len({rank for own in codec.file.ranks.values() for rank in own}) > 1
    held = kvbench.prefill(model, ids(150), codec=codec)
    held.extend(ids(3))
    assert held.resident_bytes == sum(count_latents(codec, layer, [153] * 2, 4) + 16 for layer in range(2))
    cut = kvbench.prefill(model, ids(150), "snapkv", 0.5, codec=codec)
    expected = 0
    for layer in range(2):
        kept = [set(cut.places(layer, head).tolist()) for head in range(4)]
        tokens = [len(kept[0] | kept[1]), len(kept[2] | kept[3])]
        assert all(75 < count < 150 for count in tokens)
        expected += count_latents(codec, layer, tokens, 4) + 2 * sum(tokens) + 16
    assert cut.resident_bytes == expected
    stored = {name: x for name, x in load_file(codec.path).items() if "eigenvalues" not in name}
    assert codec.weights_bytes == 2 * sum(x.nbytes for x in stored.values())


def test_samples_branches_and_shared_prefills_are_apart():
    """A batch gives what its samples give alone, a branch is forgotten, and a shared prefill gives the same bits."""
    model, codec = tiny("llama"), build_palu(find_palu("llama"), bits=4)
    choice = choose_policy("full", "uniform", codec)
    both, *alone = (read_on_in_branches(model, choice, own) for own in (slice(2), slice(1), slice(1, 2)))
    torch.testing.assert_close(both[1], torch.cat([own[1] for own in alone]), rtol=2e-3, atol=2e-3)
    others = [choice, choose_policy("snapkv", "uniform", codec)]
    contexts = [
        GenerationContext(model, own, Budget(budget), None, (0,))
        for own, budget in zip(others, (1.0, 0.5), strict=True)
    ]
    shared_prefill.prefill(contexts, ids(60, batch=2)[:1])
    for layer, other in zip(contexts[0].own_layers, alone[0][0].own_layers, strict=True):
        assert torch.equal(layer.rows.view().keys, other.rows.view().keys)
    lone = GenerationContext(model, others[1], Budget(0.5), None, (0,))
    lone.prefill(ids(60, batch=2)[:1])
    for layer, other in zip(contexts[1].own_layers, lone.own_layers, strict=True):
        assert torch.equal(layer.rows.view().keys, other.rows.view().keys) and layer.rows.longest == 30
    mixed = [
        GenerationContext(model, own, Budget(1.0), None, (0,))
        for own in (choice, choose_cache(*build_policy("full", "uniform", "llama")))
    ]
    with pytest.raises(ValueError, match="must have the same codec"):
        shared_prefill.prefill(mixed, ids(60))


def test_it_serves_few_rows_of_many_and_kivi_does_not_serve_below_it():
    codec = build_palu(find_palu("llama"))
    held = kvbench.prefill(
        tiny("llama"), ids(60), "quest", 0.3, codec=codec, method_args={"page": 4, "dense_layers": 1}
    )
    held.generate(4, stop=frozenset())
    assert max(layer.attended[0] for layer in held.contexts[0].own_layers[1:]) < 25
    layer = held.contexts[0].own_layers[1]
    needed, operations = layer.count_needs()
    ranks = [rank for side in "kv" for rank in codec.file.ranks[1, side]]
    share = layer.attended[-1] / layer.rows.mean_rows
    weights = 64 * sum(ranks)
    assert needed == pytest.approx(share * (sum(ranks) * layer.rows.seen * 4 + 8) + weights * 4, abs=1)
    keys = 64 * sum(codec.file.ranks[1, "k"])
    assert operations == pytest.approx(2 * layer.rows.seen * share * keys, abs=1)
    with pytest.raises(SettingError, match="codec.base=palu: packs rows as they are read"):
        args = dict(base="palu", base_args={"path": codec.path}, path="unused")
        kvbench.prefill(tiny("llama"), ids(9), codec="delta", codec_args=args)


@dataclass(frozen=True)
class Notes(Method):
    """Notes the keys before rotation that it is shown."""

    wants = ("unrotated_keys",)

    def update(self, observation, rows, state):
        state.layer[f"keys {observation.first}"] = observation.unrotated_keys
        return {}


def test_a_method_is_shown_the_keys_before_rotation_that_are_attended_to():
    codec = build_palu(find_palu("llama", removed=0.7))
    choice = choose_cache(Notes("notes"), Allocator("uniform"), codec)
    context = GenerationContext(make_double("llama"), choice, Budget(1.0), 20, (0,))
    context.prefill(ids(40))
    for layer in context.own_layers:
        for first in (0, 20):
            shown = layer.state.layer[f"keys {first}"]
            places = torch.arange(first, first + 20).expand(1, 1, -1)
            found = layer.rows.rotate(shown, places)
            torch.testing.assert_close(found, layer.rows.view().keys[:, :, first : first + 20], **EXACT)


@dataclass(frozen=True)
class Early(Codec):
    """Packs before attention, keys after rotation."""

    packs = True
    packing = Packing(before_attention=True)


def test_a_codec_that_packs_before_attention_serves_no_method_that_merges():
    with pytest.raises(
        SettingError, match="^codec=early: its rows are packed, and centroidkv merges rows; use codec=raw$"
    ):
        choose_cache(*build_policy("centroidkv", "uniform", "llama")[:2], Early("early"))


def test_runs_share_a_prefill_with_runs_of_the_same_codec(checkpoint, tmp_path, monkeypatch):
    """The untouched baseline is read apart."""
    monkeypatch.chdir(tmp_path)
    codec = build_palu(draw_palu(tmp_path / "file", load_layout(str(checkpoint))))
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", "task=phonebook", "task.sizes=[5]"]
    settings = ["-m", "method=full,snapkv", "codec=palu", f"codec.path={codec.path}", "budget=0.5", "limit=1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *where, *settings])
    assert command.main() == 0
    found = {}
    for folder in Path("results/runs").iterdir():
        value = yaml.safe_load((folder / "run.yaml").read_text())["value"]
        [found[value["method"]["name"], value["codec"]["name"]]] = read_records(folder)
    assert {name: own["shared_prefill"] for name, own in found.items()} == {
        ("full", "palu"): 2, ("snapkv", "palu"): 2, ("full", "raw"): 1,
    }  # fmt: skip
    full, snapkv = found["full", "palu"], found["snapkv", "palu"]
    share = full["resident_bytes"] / full["full_bytes"]
    assert share == pytest.approx(8 / codec.file.width, abs=1e-3) and full["weights_bytes"] == codec.weights_bytes
    assert 0.5 * share < snapkv["resident_bytes"] / snapkv["full_bytes"] < share
    assert full["decoding"] == "modules" and full["metadata_bytes"] > 0


# What is refused


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(path=None), "codec.path=null: give a safetensors file of Palu's projections"),
        (dict(path="nowhere"), "codec.path=nowhere: cannot read the projections"),
        (dict(path=3), "codec.path=3: a path"),
        (dict(bits=8), "codec.bits=8: choose one of"),
        (dict(clip=0.0), r"codec.clip=0.0: a share in \(0, 1\]"),
        (dict(hadamard="yes"), "codec.hadamard=yes: choose one of"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(args, message):
    with pytest.raises(SettingError, match=f"^{message}"):
        kvbench.prefill(tiny("llama"), ids(9), codec="palu", codec_args={"path": find_palu("llama")} | args)


LAYER = "model.layers.1.self_attn"
WEIGHT, BIAS = f"{LAYER}.k_proj.U.0.weight", f"{LAYER}.k_proj.U.0.bias"
FOURTH = {f"model.layers.3.self_attn.{side}_proj.U.0.weight": torch.ones(64, 8) for side in "kv"}
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda own: own.update(other=torch.ones(1)), "other is no weight of a projection"),
        (lambda own: own.pop(f"{LAYER}.v_proj.U.0.weight"), "layer 1, v_proj has no U.0.weight"),
        (lambda own: [own.pop(name) for name in [*own] if ".1." in name], "the projections of layer 1 are missing"),
        (lambda own: [own.pop(name) for name in [*own] if "eigen" not in name], "the file holds no projections"),
        (lambda own: own.update({WEIGHT: torch.ones(64, 65)}), r"layer 1, k_proj has U of shapes \[\(64, 65\)\]"),
        (lambda own: own.update({BIAS: torch.ones(63)}), r"layer 1, k_proj has U.0.bias of shape \(63,\)"),
        (lambda own: own.update({WEIGHT: torch.ones(64, 8).int()}), ".*has dtype I32, allowed are"),
        (lambda own: own.update({WEIGHT: torch.full((64, 8), torch.nan)}), ".*U.0.weight is not finite"),
        (lambda own: own.update(FOURTH), "there are projections of layer 3, the model has 3"),
    ],
    ids=range(9),
)
def test_wrong_files_are_refused(tmp_path, change: Change, message):
    weights = load_file(find_palu("llama"))
    change(weights)
    save_file(weights, str(tmp_path / "file"))
    with pytest.raises(SettingError, match=f"^codec.path={tmp_path}/file: {message}"):
        kvbench.prefill(tiny("llama"), ids(9), codec="palu", codec_args={"path": str(tmp_path / "file")})


def test_files_that_are_damaged_pickled_or_of_other_models_are_refused(tmp_path):
    path, file = find_palu("llama"), tmp_path / "file"
    file.write_bytes(Path(path).read_bytes()[:-100])
    with pytest.raises(SettingError, match=r"^codec.path=.*/file: cannot read the projections \(.*\)$"):
        build_palu(str(file))
    torch.save({"x": torch.ones(1)}, file)
    with pytest.raises(SettingError, match="pickled weights are not read; give a safetensors file$"):
        build_palu(str(file))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match=r"empty: no \*.safetensors there$"):
        build_palu(str(tmp_path / "empty"))
    with pytest.raises(SettingError, match="the projections have 1 groups of 64 numbers, the model 2 KV heads of 64$"):
        kvbench.prefill(tiny("wide"), ids(9), codec=build_palu(path))
    save_file(load_file(path), str(file), {"model": "one"})
    build_palu(path).check_identity(lambda: pytest.fail("needs no identity"))
    build_palu(str(file)).check_identity(lambda: "one")
    with pytest.raises(SettingError, match="the projections were made for the model one, this one is other$"):
        build_palu(str(file)).check_identity(lambda: "other")


def test_official_folders_are_checked(tmp_path):
    folder = write_official(tmp_path / "palu", make_double("llama"), rank=20)
    for bits in (3, 4):
        with pytest.raises(SettingError, match=f"^codec.bits={bits}: needs ranks that 8 divides, and a group has 20$"):
            build_palu(str(folder), bits=bits)
    ranks = json.loads((folder / "config.json").read_text())["head_wise_ranks"]
    (folder / "config.json").write_text(json.dumps({"head_wise_ranks": ranks | {f"{LAYER}.v_proj": [16]}}))
    with pytest.raises(SettingError, match="layer 1, v_proj has not the ranks of head_wise_ranks in config.json$"):
        build_palu(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(SettingError, match="config.json cannot be read"):
        build_palu(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(SettingError, match="model.embed_tokens.weight is no weight of a projection$"):
        build_palu(str(folder))


def test_a_run_is_named_by_the_files_content(tmp_path):
    names = [write_palu(tmp_path / name, model) for name, model in (("a", "llama"), ("b", "llama"), ("c", "wide"))]
    found = [identity_settings(load_settings("codec", "palu", {"path": own})) for own in names]
    assert found[0] == found[1] != found[2]
    write_palu(tmp_path / "a", "llama", removed=0.0)
    assert find_projection(build_palu(names[0]), 0, "k", 0).up.shape == (64, 64)
