"""Rotary frequencies that follow the longest place belong to a context: what was read before changes no answer."""

import copy
from collections.abc import Callable

import pytest
import torch

import kvbench
from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, load_settings
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.engine.shared_prefill import prefill
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec
from kvbench.models.transformers_port import make_plain_cache, make_rotations
from tests.support.selection import choose_quick
from tests.support.tiny_models import heads, ids, rope, tiny

ORIGINAL = 64  # places from which on dynamic scaling and LongRoPE have other frequencies
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
FACTORS = dict(short_factor=[1.0] * 16, long_factor=[1.0 + place / 4 for place in range(16)])
ROPES = {
    "linear": rope(rope_type="linear", factor=4.0),
    "dynamic": rope(rope_type="dynamic", factor=4.0),
    "llama3": rope(rope_type="llama3", **LLAMA3),
    "yarn": rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=ORIGINAL),
    "longrope": rope(rope_type="longrope", factor=8.0, original_max_position_embeddings=ORIGINAL, **FACTORS),
}
CHANGING = ("dynamic", "longrope")
METHODS = {"full": {}, "snapkv": {"window": 4}, "expected_attention": {}, "sink": {"positions": "rolling"}}
SHORT, LONG, MORE = 56, 150, 12  # a prompt, one beyond the original places, and tokens that bring the short one there
LONGEST = 260  # tokens that are read by others

each_rope = pytest.mark.parametrize("kind", choose_quick(ROPES, "yarn", *CHANGING))
each_method = pytest.mark.parametrize("method", METHODS)


def llama(kind: str) -> torch.nn.Module:
    """A fresh model in float32 that has read nothing."""
    config = copy.deepcopy(tiny("llama").config)
    config.max_position_embeddings = ORIGINAL if kind in CHANGING else ORIGINAL * 8  # theirs start to change there
    config.rope_parameters = copy.deepcopy(ROPES[kind])
    model = type(tiny("llama"))(config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    return model


def context(
    model: torch.nn.Module, method: str, budget: float | int = 13, block: int | None = None
) -> GenerationContext:
    own = build("method", load_settings("method", method, METHODS.get(method)))
    amount = Budget(1.0 if method == "full" else budget)
    return GenerationContext(
        model, CachePolicy(own, Allocator("uniform"), Codec("raw")), amount, block, (0,), compile=False
    )


def facts(held: GenerationContext) -> list[torch.Tensor]:
    """Logits and the rows that are held."""
    views = [layer.rows.view() for layer in held.own_layers]
    return [held.logits, *(part for view in views for part in (view.keys, view.values, view.places))]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def answer(model: torch.nn.Module, method: str, tokens: int, block: int | None = None) -> list[torch.Tensor]:
    """What a context holds of a prompt, and of the tokens that follow one by one."""
    held = context(model, method, block=block)
    held.prefill(ids(tokens))
    read = facts(held)
    for token in ids(MORE, seed=1).split(1, dim=1):
        held.extend(token)
    return [*read, *facts(held)]


def rotary(model: torch.nn.Module) -> dict[str, object]:
    """All that the rotary module holds."""
    module = model.model.rotary_emb
    plain = {name: own for name, own in vars(module).items() if isinstance(own, int | float | torch.Tensor)}
    return plain | {name: own.clone() for name, own in module.named_buffers()}


def read_outside(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model(ids(LONGEST, seed=5))


BEFORE: dict[str, Callable[[torch.nn.Module], object]] = {
    "kvbench": lambda model: answer(model, "snapkv", LONGEST),
    "outside": read_outside,
    "both": lambda model: (read_outside(model), answer(model, "full", SHORT), read_outside(model)),
}


@pytest.mark.cover
@each_rope
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("tokens, block", [(SHORT, None), (SHORT, 20), (LONG, None), (LONG, 20)])
def test_a_prompt_is_answered_alike_whatever_was_read_before(kind, before, tokens, block):
    used = llama(kind)
    BEFORE[before](used)
    assert equal(answer(used, "snapkv", tokens, block), answer(llama(kind), "snapkv", tokens, block))


@pytest.mark.cover
@pytest.mark.parametrize("kind", CHANGING)
@each_method
def test_methods_that_turn_rows_are_asked_with_the_contexts_own(kind, method):
    used = llama(kind)
    read_outside(used)
    assert equal(answer(used, method, LONG), answer(llama(kind), method, LONG))


@each_rope
def test_the_full_cache_gives_what_transformers_gives(kind):
    used, fresh = llama(kind), llama(kind)
    read_outside(used)
    held, cache = kvbench.prefill(used, ids(LONG)), make_plain_cache(fresh)
    with torch.no_grad():
        own = [fresh(input_ids=ids(LONG), past_key_values=cache).logits[:, -1]]
        for token in ids(MORE, seed=1).split(1, dim=1):
            own.append(fresh(input_ids=token, past_key_values=cache).logits[:, -1])
    found = [held.logits, *(held.extend(token)[:, -1] for token in ids(MORE, seed=1).split(1, dim=1))]
    torch.testing.assert_close(torch.stack(found), torch.stack(own), rtol=2e-4, atol=2e-4)


@each_rope
def test_contexts_that_interleave_do_not_see_each_others(kind):
    model = llama(kind)
    held = [context(model, "snapkv"), context(model, "full")]
    for own, tokens in zip(held, (SHORT, LONG), strict=True):
        own.prefill(ids(tokens))
    for token in ids(MORE, seed=1).split(1, dim=1):
        for own in held:
            own.extend(token)
    alone = answer(llama(kind), "snapkv", SHORT), answer(llama(kind), "full", LONG)
    for own, expected in zip(held, alone, strict=True):
        assert equal(facts(own), expected[len(expected) // 2 :])


@pytest.mark.cover
@each_rope
@each_method
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_branch_that_went_longer_is_forgotten(kind, method, tokens):
    found = []
    for branches in (False, True):
        held = context(llama(kind), method, 20)
        held.prefill(ids(tokens))
        if branches:
            with held.branch():
                held.extend(ids(LONG, seed=7))
        for token in ids(3, seed=1).split(1, dim=1):
            held.extend(token)
        found.append(facts(held))
    assert equal(*found)


@pytest.mark.cover
@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_shared_prefill_hands_the_frequencies_on(kind, tokens):
    names, model = ("full", "knorm", "random"), llama(kind)
    read_outside(model)
    held = [context(model, name) for name in names]
    prefill(held, ids(tokens))
    for own, name in zip(held, names, strict=True):
        alone = kvbench.prefill(llama(kind), ids(tokens), name, 13).contexts[0]
        for token in ids(MORE, seed=1).split(1, dim=1):
            assert torch.equal(own.extend(token), alone.extend(token))


@pytest.mark.parametrize("kind", CHANGING)
def test_a_replicated_context_goes_on_with_its_own(kind):
    model, more = llama(kind), ids(5, seed=1)
    held = context(model, "full")
    held.prefill(ids(LONG))
    with held.branch():
        expected = held.extend(more)
    replicate(held, 2, 8)
    kvbench.prefill(model, ids(SHORT))
    torch.testing.assert_close(held.extend(more.repeat(2, 1)), expected.repeat(2, 1, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.cover
@each_rope
@pytest.mark.parametrize("before", [None, LONG])
def test_the_model_is_left_as_it_was_found(kind, before):
    model = llama(kind)
    if before:
        read_outside(model)
    names, held = set(vars(model.model.rotary_emb)), rotary(model)
    answer(model, "expected_attention", LONG)
    answer(model, "snapkv", SHORT, 20)
    assert set(vars(model.model.rotary_emb)) == names
    found = rotary(model)
    assert found.keys() == held.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(held[name])) for name in held)
    model.zero_grad()
    model(ids(LONG)).logits.sum().backward()  # no tensor of inference mode is left in it


@pytest.mark.parametrize("kind", CHANGING)
def test_earlier_places_are_turned_with_the_frequencies_of_now(kind):
    """`Seen.rotation` of places that the model has passed, read where it has other frequencies than at first."""
    places, fresh = torch.arange(LONG), llama(kind)
    expected = fresh.model.rotary_emb(torch.zeros(1), places[None])
    model = llama(kind)
    held = context(model, "full")
    held.prefill(ids(LONG))
    for some in (slice(0, 10), slice(0, LONG), slice(100, 120)):
        found = held.cache.layers[0].turning.again(places[some][None])
        assert all(torch.equal(part, own[:, some]) for part, own in zip(found, expected, strict=True))
    original = make_rotations(model)[0].again(places[None, :10])
    assert not torch.equal(original[0], expected[0][:, :10])


def test_frequencies_that_never_change_cost_nothing():
    for kind in set(ROPES) - set(CHANGING):
        assert context(llama(kind), "full").cache.frequencies is None


def test_one_kind_of_layer_may_have_changing_frequencies():
    """Gemma 3 has a rotation for each kind of layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from tests.support.tiny_models import COMMON, SLIDING

    def gemma() -> torch.nn.Module:
        config = Gemma3TextConfig(
            **COMMON | {"max_position_embeddings": ORIGINAL}, **heads(4, 2), num_hidden_layers=2,
            sliding_window=SLIDING, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": ROPES["dynamic"], "sliding_attention": rope()},
        )  # fmt: skip
        torch.manual_seed(0)
        return Gemma3ForCausalLM(config).eval()

    used = gemma()
    read_outside(used)
    found = [kvbench.prefill(model, ids(LONG), "knorm", 13).extend(ids(MORE)) for model in (used, gemma())]
    assert torch.equal(*found)
