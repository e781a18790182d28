"""What enters a layer's attention: who asks gets it, who does not ask pays nothing, and rows may be stored by it."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

import kvbench
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.engine import shared_prefill
from kvbench.engine.context import decodes_in_graph
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import ExtraRead, Observation
from kvbench.validation import ContractError, SettingError
from tests.support.method_files import SHORT, build_policy
from tests.support.tiny_models import ids, make_double, tiny

UNIFORM, RAW = Allocator("uniform"), Codec("raw")


@dataclass(frozen=True)
class Asks(Method):
    """Notes what it is shown: keys and hidden states by layer and first position."""

    wants = ("unrotated_keys", "hidden", "normed_hidden")

    def update(self, observation, rows, state):
        notes = state.shared.setdefault("notes", {})
        notes[observation.layer, observation.first] = (
            observation.unrotated_keys,
            observation.hidden,
            observation.normed_hidden,
        )
        return {}


class AsksForHidden(Asks):
    wants = ("hidden",)


class AsksForNormedHidden(Asks):
    wants = ("normed_hidden",)


class AsksForKeys(Asks):
    wants = ("unrotated_keys",)


class AsksInExtraReads(Asks):
    def extra_reads(self, ids, prefix, words):
        return [ExtraRead(ids[:, :5].clone(), 0, 5)]

    def score(self, observation, rows, state):
        return rows.mass


@dataclass(frozen=True)
class Unrotated(Codec):
    """Keeps rows raw, keys as they are before rotation."""

    packing = Packing(takes_unrotated_keys=True)


def read(model: torch.nn.Module, method: Method, block: int | None = None, budget: float = 1.0) -> GenerationContext:
    context = GenerationContext(model, CachePolicy(method, UNIFORM, RAW), Budget(budget), block, (0,))
    context.prefill(ids(40))
    return context


def enters(model: torch.nn.Module, tokens: torch.Tensor) -> dict[int, tuple[torch.Tensor, ...]]:
    """By layer: keys (1, H, n, d) before norm and rotation, computed from the weights, and the hidden states before
    and behind the layer's norm.
    """
    with torch.no_grad():
        hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
    found = {}
    for index, layer in enumerate(model.model.layers):
        own, normed = layer.self_attn, layer.input_layernorm(hidden[index])
        size = model.config.num_key_value_heads * own.head_dim
        if hasattr(own, "qkv_proj"):
            keys = normed @ own.qkv_proj.weight[-2 * size : -size].T
        else:
            keys = normed @ own.k_proj.weight.T + (0 if own.k_proj.bias is None else own.k_proj.bias)
        found[index] = keys.unflatten(-1, (-1, own.head_dim)).transpose(1, 2).detach(), hidden[index], normed.detach()
    return found


@pytest.mark.parametrize("model, block", [("llama", 7), ("qwen2", None), ("qwen3", 1), ("phi3", 13), ("gemma3", 25)])
def test_a_method_that_asks_is_shown_what_enters_the_layer(model, block):
    """In blocks, in a question read as one block, and token by token."""
    context = read(make_double(model), Asks("asks"), block)
    context.extend(ids(3, seed=1))
    answer = [int(token) for token in context.generate(3, Sampling(), frozenset(), read_last=True)]
    text = torch.cat([ids(40), ids(3, seed=1), torch.tensor([answer])], 1)
    expected, shown = enters(make_double(model), text), {}
    for (layer, _), parts in sorted(context.own_layers[0].state.shared["notes"].items()):
        shown.setdefault(layer, []).append(parts)
    assert shown.keys() == {layer.index for layer in context.own_layers}
    for layer, parts in shown.items():
        for own, dim, correct in zip(zip(*parts, strict=True), (2, 1, 1), expected[layer], strict=True):
            torch.testing.assert_close(torch.cat(own, dim), correct, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number, kind", [(0, AsksForKeys), (1, AsksForHidden), (2, AsksForNormedHidden)])
def test_only_what_was_asked_for_is_shown(number, kind):
    for shown in read(tiny("llama"), kind("asks")).own_layers[0].state.shared["notes"].values():
        assert [own is not None for own in shown] == [own == number for own in range(3)]


def test_extra_reads_are_shown_too():
    context = read(tiny("llama"), AsksInExtraReads("asks"), budget=0.5)
    notes = context.own_layers[0].state.shared["notes"]
    assert [own.shape for own in notes[0, 40]] == [(1, 2, 5, 32), (1, 5, 48), (1, 5, 48)]


def test_who_does_not_ask_pays_nothing():
    """No hook is registered for others, and none stays registered."""
    model, counts = tiny("llama"), []

    def count() -> int:
        modules = list(model.modules())
        return sum(len(own._forward_hooks) + len(own._forward_pre_hooks) for own in modules)

    class Counts(Method):
        def update(self, observation: Observation, rows, state):
            shown = observation.unrotated_keys, observation.hidden, observation.normed_hidden
            assert shown == (None, None, None)
            counts.append(count())
            return {}

    read(model, Counts("counts"))
    assert counts == [0] * 3

    class CountsAndAsks(Asks):
        def update(self, observation, rows, state):
            counts.append(count())
            return {}

    read(model, CountsAndAsks("counts"))
    assert counts[3:] == [9] * 3 and count() == 0

    class Fails(Asks):
        def update(self, observation, rows, state):
            raise ValueError("no")

    with pytest.raises(ContractError, match="method=fails: update of layer 0 raised ValueError: no"):
        read(model, Fails("fails"))
    assert count() == 0


def test_a_shared_prefill_shows_it_to_who_asks():
    """Beside a method that does not ask, and a codec that stores other keys: all hold what they hold alone."""
    choices = [
        CachePolicy(Asks("asks"), UNIFORM, RAW),
        choose_cache(*build_policy("snapkv", "uniform", "llama")),
        CachePolicy(Method("full"), UNIFORM, Unrotated("unrotated")),
        CachePolicy(build_policy("snapkv", "uniform", "llama")[0], UNIFORM, Unrotated("unrotated")),
    ]
    budgets = (1.0, 0.5, 1.0, 0.5)
    contexts = [
        GenerationContext(tiny("llama"), own, Budget(budget), None, (0,))
        for own, budget in zip(choices, budgets, strict=True)
    ]
    shared_prefill.prefill(contexts[::-1], ids(40))
    for context, choice in zip(contexts, choices, strict=True):
        alone = GenerationContext(tiny("llama"), choice, context.budget, None, (0,))
        alone.prefill(ids(40))
        assert torch.equal(alone.logits, context.logits)
        for own, other in zip(alone.own_layers, context.own_layers, strict=True):
            assert own.bytes() == other.bytes() and torch.equal(own.rows.view().keys, other.rows.view().keys)
    shown = contexts[0].own_layers[0].state.shared["notes"][1, 0]
    for own, correct in zip(shown, enters(tiny("llama"), ids(40))[1], strict=True):
        torch.testing.assert_close(own, correct)


@pytest.mark.cover
@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3", "yarn", "gemma3"])
@pytest.mark.parametrize("method, block", [("full", 7), ("snapkv", 13), ("snapkv", None), ("kvgrad", None)])
def test_rows_stored_before_rotation_are_the_models_own(model, method, block):
    """Bit for bit, in blocks and after cuts, and they take no further bytes."""

    def answer(codec: Codec) -> tuple[torch.Tensor, ...]:
        allocator, args = "ada" if method == "snapkv" else "uniform", SHORT.get(method)
        held = kvbench.prefill(tiny(model), ids(60), method, 0.4, block, allocator, codec, args)
        return (
            held.logits,
            held.extend(ids(3, seed=1)),
            held.generate(4, stop=frozenset()),
            torch.tensor(held.resident_bytes),
        )

    for found, expected in zip(answer(Unrotated("unrotated")), answer(RAW), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("codec", [RAW, Unrotated("unrotated")], ids=lambda own: own.name)
def test_memory_is_freed_when_a_cache_is_dropped(codec):
    """At once: rows refer to the rotation, which must not refer to the rows again."""
    gc.collect()
    gc.disable()
    try:
        held = kvbench.prefill(tiny("llama"), ids(40), codec=codec)
        rows = [weakref.ref(layer.rows.tail_keys) for layer in held.contexts[0].own_layers]
        del held
        assert [own() for own in rows] == [None] * 3
    finally:
        gc.enable()


def test_graphs_are_left_to_those_who_do_not_ask():
    assert decodes_in_graph(CachePolicy(Method("full"), UNIFORM, RAW))
    assert not decodes_in_graph(CachePolicy(Method("full"), UNIFORM, Unrotated("u")))
    for kind in (AsksForKeys, AsksForHidden, AsksForNormedHidden):
        for decoding in (False, True):  # otherwise it needs nothing of an answer's tokens
            assert decodes_in_graph(CachePolicy(kind("asks", decoding=decoding), UNIFORM, RAW)) == (not decoding)


@dataclass(frozen=True)
class Joins(Codec):
    packing = Packing(joins_heads=True)


@pytest.mark.parametrize("method", ["snapkv", "sink", "tova", "duo_attention", "kvzip", "random"])
def test_a_codec_that_joins_heads_serves_no_method_that_evicts(method):
    """Nor one such as tova, which keeps the same rows in all heads of a layer."""
    own, allocator, _ = build_policy(method, "uniform", "llama")
    reason = (
        f"^codec=joins: it stores all heads of a layer together, and {method} evicts rows, which kvbench does in each "
        "head on its own; use method=full, "
    )
    with pytest.raises(SettingError, match=reason):
        choose_cache(own, allocator, Joins("joins"))
    for whole in ("full", "quest", "omnikv"):
        choose_cache(build_policy(whole, "uniform", "llama")[0], allocator, Joins("joins"))


def test_merged_rows_are_not_stored_before_rotation():
    method, allocator, _ = build_policy("centroidkv", "uniform", "llama")
    with pytest.raises(
        SettingError, match="^codec=u: it stores keys before rotation, and centroidkv merges rotated ones"
    ):
        choose_cache(method, allocator, Unrotated("u"))


def test_a_codec_of_its_own_for_each_layer():
    @dataclass(frozen=True)
    class Every(Codec):
        """Stores keys before rotation in layer 1 only."""

        packing = Packing(takes_unrotated_keys=True)

        def of_layer(self, layer, layers):
            return self if layer == 1 else Codec("raw")

    held = kvbench.prefill(tiny("llama"), ids(40), codec=Every("every"))
    assert [layer.rows.is_raw for layer in held.contexts[0].own_layers] == [True, False, True]
    assert torch.equal(held.logits, kvbench.prefill(tiny("llama"), ids(40)).logits)

    class Wrong(Codec):
        def of_layer(self, layer, layers):
            return "raw"

    class Refuses(Codec):
        def check(self, layout):
            raise SettingError(f"codec.path: not for {(layout.layers, layout.query_heads, layout.heads)}")

    with pytest.raises(ContractError, match="^codec=wrong: of_layer of layer 0 returned str, expected a Codec$"):
        kvbench.prefill(tiny("llama"), ids(40), codec=Wrong("wrong"))
    with pytest.raises(SettingError, match=r"^codec.path: not for \(3, 6, 2\)$"):
        kvbench.prefill(tiny("llama"), ids(40), codec=Refuses("refuses"))


def test_weights_beside_the_model_are_counted():
    policies = [
        choose_cache(*build_policy(name, "uniform", "llama")) for name in ("snapkv", "qfilters", "duo_attention")
    ]
    assert [own.weights_bytes for own in policies] == [0, 3 * 2 * 32 * 4, 3 * 2 * 8]
    base = build_policy("qfilters", "uniform", "llama")[0]
    composite = build_policy("criticalkv", "uniform", "llama")[0]
    object.__setattr__(composite, "base", base)
    assert composite.file is base.file and composite.file.nbytes == 3 * 2 * 32 * 4
