"""Types that norm and rotate keys in their own ways: kvbench does as their modules do, and notices if it does not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache

from kvbench.cache.policy import choose_cache
from kvbench.engine.compressed_cache import choose_cache as choose_policy
from kvbench.engine.context import PromptContext
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.layout import Probe
from kvbench.interfaces.method import Method
from kvbench.kernels.rerotation import rerotate
from kvbench.models import probe, rotations, transformers_port
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.transformers_port import (
    PROBED,
    CacheLayerPort,
    find_text_decoder,
    list_decoder_layers,
    make_rotations,
    use_attention,
)
from kvbench.validation import SettingError
from tests.support.method_files import build_policy
from tests.support.selection import choose_quick
from tests.support.tiny_models import ids

TOKENS = 40
TYPES = {  # with settings that the default configuration lacks
    "glm": {},  # neighbours are pairs, of half of the dimensions
    "ernie4_5": {},  # of all
    "cohere": dict(use_qk_norm=True),  # cos and sin repeat for neighbours, and each head's norm has its weights
    "cohere2": dict(layer_types=["sliding_attention", "full_attention"]),  # and full layers have no RoPE
    "smollm3": dict(no_rope_layers=[1, 0]),
    "exaone4": dict(layer_types=["sliding_attention", "full_attention"]),
    "afmoe": dict(layer_types=["sliding_attention", "full_attention"], num_dense_layers=1),
    "olmo2": {},  # a norm over all heads
    "olmoe": dict(clip_qkv=0.7),  # whose results are clipped
    "stablelm": dict(qk_layernorm=True),
    "nanochat": {},  # the other sign, and a norm behind the rotation
    "hunyuan_v1_dense": dict(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
}
LATE = "hunyuan_v1_dense"
EXPERTS = ("olmoe", "afmoe")
SLIDING = ("cohere2", "exaone4", "afmoe")


@cache
def make_model(name: str) -> torch.nn.Module:
    """A random model of two layers in float64, or in float32 if transformers' experts know nothing else."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model = draw_miniature(shrink(CONFIG_MAPPING[name](num_hidden_layers=2, **TYPES[name])))
    return model if name in EXPERTS else model.double()


def read_prompt(name: str, choice: object, budget: float = 1.0, tokens: int = TOKENS) -> PromptContext:
    context = PromptContext(make_model(name), choice, Budget(budget), None, (0,))
    context.prefill(ids(tokens) % 100)
    return context


@contextmanager
def watch_rotations(name: str) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Note by layer the queries and keys that the model's modules rotate by their own function."""
    attentions = [layer.self_attn for layer in list_decoder_layers(make_model(name))]
    source, given, current = sys.modules[type(attentions[0]).__module__], dict[int, tuple[Tensor, Tensor]](), [0]
    rotate = source.apply_rotary_pos_emb

    def note(queries, keys, *angles):
        given[current[0]] = queries.clone(), keys.clone()
        return rotate(queries, keys, *angles)

    handles = [
        attention.register_forward_pre_hook(lambda *_, index=index: current.__setitem__(0, index))
        for index, attention in enumerate(attentions)
    ]
    source.apply_rotary_pos_emb = note
    try:
        yield given
    finally:
        source.apply_rotary_pos_emb = rotate
        for handle in handles:
            handle.remove()


def rotate_as_model(name: str, layer: int, queries: Tensor, keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by the functions of the model's own source. `places` (n,)."""
    model = make_model(name)
    attention, decoder = list_decoder_layers(model)[layer].self_attn, find_text_decoder(model)
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    angles = decoder.rotary_emb(queries, places[None])
    width = angles[0].shape[-1] if name == "stablelm" else queries.shape[-1]  # which the module itself splits off
    turned = apply(queries[..., :width], keys[..., :width], *angles)
    queries, keys = (
        torch.cat([part, rows[..., width:]], -1) for part, rows in zip(turned, (queries, keys), strict=True)
    )
    return (attention.q_norm(queries), attention.k_norm(keys)) if name == "nanochat" else (queries, keys)


def find_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """The product of each query with each key, which the order of dimensions does not change."""
    return queries @ keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1).mT


@dataclass(frozen=True)
class Watching(Method):
    """Notes what each layer shows."""

    seen: dict = field(default_factory=dict)

    def update(self, observation, rows, state):
        self.seen[observation.layer] = observation.queries, rows.keys, observation.rotation
        return {}


@dataclass(frozen=True)
class Unrotated(Codec):
    """Stores keys as they are before norm and rotation."""

    packing = Packing(takes_unrotated_keys=True)


def choose(method: Method, codec: Codec | None = None) -> object:
    return choose_cache(method, Allocator("uniform"), codec or Codec("raw"))


@pytest.mark.parametrize("name", [name for name in TYPES if name != LATE])
def test_rotated_queries_and_keys_move_as_the_models_own(name):
    """Moved to other positions, they give the logits that the model's own function gives there."""
    method, moved = Watching("watching"), torch.arange(TOKENS).flip(0) * 3 + 1
    with watch_rotations(name) as given:
        read_prompt(name, choose(method))
    for layer, (queries, keys, rotation) in method.seen.items():
        angles = [tuple(part[0] for part in rotation(places[None])) for places in (torch.arange(TOKENS), moved)]
        queries, keys = rerotate(queries, *angles), rerotate(keys, *angles)
        if layer not in given or name in SLIDING:  # a layer without RoPE
            assert torch.equal(queries, method.seen[layer][0]) and torch.equal(keys, method.seen[layer][1])
            continue
        before = given[layer]
        if name == "stablelm":  # its function gets the rotated dimensions only
            width = before[0].shape[-1]
            queries, keys = queries[..., :width], keys[..., :width]
        truth = find_logits(*rotate_as_model(name, layer, *before, moved))
        torch.testing.assert_close(find_logits(queries, keys), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_keys_that_are_stored_before_norm_and_rotation_give_the_models_logits(name):
    context, tokens = read_prompt(name, choose(Method("full"), Unrotated("unrotated"))), ids(TOKENS + 9) % 100
    logits = context.extend(tokens[:, TOKENS:])
    with use_attention(make_model(name), "eager"):
        truth = make_model(name)(input_ids=tokens, use_cache=False).logits[:, TOKENS:]
    torch.testing.assert_close(logits, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm", "cohere", "smollm3", "nanochat", "olmo2"])
def test_rolling_positions_are_the_models_own_at_these_positions(name):
    """A cut cache reads on like the model itself from a cache whose keys it rotated to the rows' slots."""
    policy = choose_policy(*build_policy("sink", "uniform", "llama", sinks=3))
    tokens = ids(TOKENS + 1) % 100
    with watch_rotations(name) as given:
        context = read_prompt(name, policy, 0.3)
    model, truth = make_model(name), DynamicCache(config=make_model(name).config)
    for layer, held in enumerate(context.own_layers):
        rows = held.rows.view()
        kept, keys = rows.places[0, 0], rows.keys  # of a layer without RoPE
        assert len(kept) < TOKENS and bool((rows.places == kept).all())
        if layer in given:
            queries, keys = (part[:, :, kept] for part in given[layer])
            keys = rotate_as_model(name, layer, queries, keys, torch.arange(len(kept)))[1]
        truth.update(keys, rows.values, layer)
    with use_attention(model, "eager"):
        logits = model(input_ids=tokens[:, -1:], past_key_values=truth, position_ids=torch.tensor([[len(kept)]])).logits
    torch.testing.assert_close(context.extend(tokens[:, -1:]), logits, atol=1e-4, rtol=1e-4)


def test_what_needs_another_norm_is_refused():
    with pytest.raises(SettingError, match="^method=sink: it rotates keys, .*: it norms rotated keys by weights"):
        read_prompt(LATE, choose_policy(*build_policy("sink", "uniform", "llama")), 0.3)
    with pytest.raises(SettingError, match="^model: kvbench cannot rotate its keys: it norms rotated keys by weights"):
        read_prompt(LATE, choose(Rotating("full")))
    cuts = choose_policy(*build_policy("knorm", "uniform", "llama"))
    with pytest.raises(SettingError, match="^codec=unrotated: it stores keys before their norm, .* over all heads"):
        read_prompt("olmo2", choose(cuts.method, Unrotated("unrotated")), 0.3)


class Rotating(Method):
    """Rotates without saying so."""

    def update(self, observation, rows, state):
        observation.rotation(rows.places[0])
        return {}


def test_rows_of_other_tokens_are_not_normed_together():
    port = read_prompt("olmo2", choose(Method("full"), Unrotated("unrotated"))).ports()[0]
    rotate = port.make_key_rotation(list_decoder_layers(make_model("olmo2"))[0])
    heads = make_model("olmo2").config.num_key_value_heads
    keys, places = torch.randn(1, heads, 5, 16).double(), torch.arange(5).repeat(1, heads, 1)
    rotate(keys, places)
    places[0, 1, 2] = 7
    with pytest.raises(SettingError, match="heads hold other tokens"):
        rotate(keys, places)


OTHERS = {  # further forms of angles, of types that need more than a rotation
    "gpt_oss": {},  # once for each pair
    "granite_swa": dict(layer_rope_theta=[1e4, 0, 5e5, 1e4], layer_types=["full_attention"] * 4),
    "llama4_text": dict(no_rope_layers=[1, 0, 1, 1]),  # a complex number
    "qwen3_next": dict(layer_types=["linear_attention"] * 3 + ["full_attention"]),  # layers without attention
}


@pytest.mark.parametrize("name", choose_quick(OTHERS, "gpt_oss", "granite_swa"))
def test_other_types_are_rotated_as_their_modules_do(name, monkeypatch):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model = draw_miniature(shrink(CONFIG_MAPPING[name](num_hidden_layers=4, **OTHERS[name])))
    monkeypatch.setitem(PROBED, model, Probe(name, None, graphs=False))
    check_appended_keys(model)


@pytest.mark.parametrize("name", ["qwen2_vl", "paligemma"])  # positions on three axes, and positions from 1 on
def test_text_decoders_of_multimodal_types_are_rotated_as_their_modules_do(name, monkeypatch):
    text = dict(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text |= dict(num_key_value_heads=1, head_dim=16, model_type={"paligemma": "gemma"}.get(name, f"{name}_text"))
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]))
    if name == "paligemma":
        del text["rope_parameters"]["mrope_section"]
    few = dict(depth=1, embed_dim=16, num_heads=1, hidden_size=32, intermediate_size=16, num_hidden_layers=1)
    vision = few | dict(num_attention_heads=1, model_type="siglip_vision_model" if name == "paligemma" else name)
    config = CONFIG_MAPPING[name].from_dict(dict(text_config=text, vision_config=vision, projection_dim=32))
    with torch.random.fork_rng():
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").requires_grad_(False)
    monkeypatch.setitem(PROBED, model, Probe(name, None, graphs=False))
    check_appended_keys(model)


def check_appended_keys(model: torch.nn.Module) -> None:
    """The keys that each layer appends are those of its projection, normed and rotated."""
    projected, cache = dict[int, Tensor](), DynamicCache(config=transformers_port.text_config(model))
    modules = [getattr(layer, "self_attn", None) for layer in list_decoder_layers(model)]
    for index, attention in enumerate(modules):
        if attention is not None:
            attention.k_proj.register_forward_hook(lambda *given, index=index: projected.update({index: given[2]}))
    model(input_ids=ids(12) % 100 + 3, past_key_values=cache, use_cache=True)
    for index, turning in enumerate(make_rotations(model)):
        if (attention := modules[index]) is not None:
            keys = projected[index].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            rotate = CacheLayerPort(None, turning).make_key_rotation(SimpleNamespace(self_attn=attention))
            appended = transformers_port.put_in_order(cache.layers[index].keys, turning.order)
            torch.testing.assert_close(rotate(keys, torch.arange(12).expand(1, 1, -1)), appended, atol=1e-5, rtol=1e-5)


MISTAKES = {  # a type, and what is done wrongly with its keys
    "interleaved pairs": ("glm", transformers_port, "find_order", lambda *given: None),
    "no RoPE": ("smollm3", transformers_port, "is_rotated", lambda attention: True),
    "the sign": ("nanochat", rotations, "BACKWARDS", ()),
    "a late norm": ("hunyuan_v1_dense", rotations, "LATE_NORM", ()),
    "a norm by another name": ("stablelm", rotations, "NORMS", ("k_norm",)),
    "a joint norm": ("olmo2", rotations, "NORMS", ()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_probe_notices_another_rotation(mistake, monkeypatch):
    name, module, attribute, wrong = MISTAKES[mistake]
    trial = probe.make_trial(make_model(name).float())
    transformers_port.FORMS.clear()
    monkeypatch.setattr(module, attribute, wrong)
    fault, _ = probe.find_rotation_faults(trial)
    transformers_port.FORMS.clear()
    make_model.cache_clear()
    assert fault is not None and "keys that kvbench norms and rotates differ from the model's" in fault


def test_a_probe_notices_a_rotation_that_cannot_be_repeated():
    assert probe.find_rotation_faults(probe.make_trial(make_model("glm").float())) == (None, None)
    fault, again = probe.find_rotation_faults(probe.make_trial(make_model(LATE).float()))
    make_model.cache_clear()
    assert fault is None and "in layer 0 keys that are rotated to other positions differ" in again
