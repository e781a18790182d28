"""The Python interface: kvbench.prefill and what it gives."""

import copy
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from transformers import MambaConfig, MambaForCausalLM

import kvbench
from kvbench.cache.policy import CachePolicy
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine.compressed_cache import CompressedCache, choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.methods.codecs.raw import Raw
from kvbench.methods.knorm import Knorm
from kvbench.models.encoding import find_text
from kvbench.models.transformers_port import read_layout
from kvbench.validation import ContractError, SettingError, format_value
from tests.support.delta_files import build_delta
from tests.support.dense_engine import DenseEngine
from tests.support.method_files import budget_for, build_policy, hold_all, make_tiny_method_args
from tests.support.palu_files import build_palu, find_palu
from tests.support.selection import only_in_full
from tests.support.tiny_models import (
    SLIDING,
    VOCAB,
    distinct,
    draw_model,
    ids,
    make_double,
    make_fresh,
    make_gemma3_with_vision,
    make_small_gemma3,
    tiny,
)

BUILT = {method: build_policy(method, "uniform", "short") for method in list_choices("method")}
ALLOCATORS = {allocator: build_policy("full", allocator, "short")[1] for allocator in list_choices("allocator")}
CHOICES = {
    (method, own): [BUILT[method][0], ALLOCATORS[own], BUILT[method][2]] for method, own in product(BUILT, ALLOCATORS)
}
COMBINATIONS = [pair for pair, (method, *others) in CHOICES.items() if find_refusal(method, *others) is None]


def each_method(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with every method and every allocator; with every pair of them that is not refused, if all run."""
    return pytest.mark.cover(pytest.mark.parametrize("method, allocator", COMBINATIONS)(test))


def holds_all(method: str) -> bool:
    """The full cache and readers; of methods with a law of their own for heads, the shares are tested elsewhere."""
    return method == "full" or CHOICES[method, "uniform"][0].attends_subset


def own_law(method: str) -> bool:
    return CHOICES[method, "uniform"][0].sets_head_quotas


def blocks_for(method: str, *blocks: int | None) -> list[int | None]:
    return [block for block in blocks if block is None or not CHOICES[method, "uniform"][0].one_block]


def context_of(model, method, budget=1.0, block=None, seeds=(0,)) -> GenerationContext:
    return GenerationContext(
        model, choose_cache(method, Allocator("uniform"), Raw("raw")), Budget(budget), block, seeds
    )


def places(held: CompressedCache) -> dict[tuple[int, int, int], list[int]]:
    layers = [i for i in range(len(held.contexts[0].layers)) if i not in held.sliding_layers]
    heads = held.contexts[0].layers[layers[0]].rows.shape[1]
    samples = range(sum(len(context.seeds) for context in held.contexts))
    return {(i, h, s): held.places(i, h, s).tolist() for i in layers for h in range(heads) for s in samples}


# What is given


def test_a_policy_is_checked_once_for_a_model():
    """However many contexts are made with it. Another model and another method are checked again."""
    seen: list[int] = []

    @dataclass(frozen=True)
    class Counted(Method):
        most: int = field(default=2, kw_only=True)

        def check(self, layout: Layout) -> None:
            seen.append(layout.heads)
            if layout.heads > self.most:
                raise SettingError("too many heads")

    def use(name: str, policy: CachePolicy) -> None:
        for seed in range(2):
            GenerationContext(tiny(name), policy, Budget(0.5), None, (seed,))

    policy = choose_cache(Counted("counted"), Allocator("uniform"), Raw("raw"))
    heads = [read_layout(tiny(name)).heads for name in ("llama", "gemma3")]
    use("llama", policy)
    use("gemma3", policy)
    use("llama", policy)
    assert seen == heads
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(SettingError, match="too many heads"):
            use("llama", replace(policy, method=Counted("counted", most=0)))
    assert seen == [*heads, heads[0], heads[0]]


def test_the_contract_in_one_call():
    model, prompt = tiny("llama"), ids(200, batch=2)
    held = kvbench.prefill(
        model, prompt, method="snapkv", budget=0.25, block_size=None, allocator="uniform", codec="raw",
        method_args={"window": 32}, seed=0,
    )  # fmt: skip
    assert held.logits.shape == (2, 199)
    for sample in range(2):
        found = held.places(layer=1, head=1, sample=sample)
        assert found.dtype == torch.int64 and found.dim() == 1 and len(found) == 50
        assert (found.diff() > 0).all() and found[-32:].tolist() == list(range(168, 200))
        masses = held.masses(layer=1, head=1, sample=sample)
        assert masses.dtype == torch.int64 and masses.tolist() == [1] * 50
        assert held.evicted(1, 1, sample) == 150
    assert held.full_bytes == 4 * held.resident_bytes == 2 * 200 * 3 * 2 * 2 * 32 * 4
    assert held.peak_rows == 50 and held.peak_rows_attended == 200
    assert held.extend(ids(5, batch=2)).shape == (2, 5, 199)
    tokens = held.generate(max_new_tokens=7, stop=frozenset())
    assert tokens.shape == (2, 7) and tokens.dtype == torch.int64
    assert set(kvbench.methods_available()) == set(list_choices("method")) >= {"full", "snapkv", "dropkv", "centroidkv"}
    blocks = kvbench.prefill(model, prompt[:1], "snapkv", 0.25, block_size=30)
    assert blocks.peak_rows == 50 and blocks.peak_rows_attended == 80


def test_objects_do_what_their_names_do():
    names = kvbench.prefill(tiny("llama"), ids(60), "knorm", 12, allocator="ada", codec="raw", seed=3)
    parts = [build(group, load_settings(group, name)) for group, name in (("method", "knorm"), ("allocator", "ada"))]
    objects = kvbench.prefill(tiny("llama"), ids(60), parts[0], 12, allocator=parts[1], codec=Raw("raw"), seed=3)
    assert torch.equal(names.logits, objects.logits) and repr(names) == repr(objects)
    for layer, head in product(range(3), range(2)):
        assert torch.equal(names.places(layer, head), objects.places(layer, head))
    for arguments, message in (
        ({"method": 3}, "method=3: a name of conf/method or a Method object"),
        ({"method": parts[1]}, "method=.*: a name of conf/method or a Method object"),
        ({"codec": parts[0]}, "codec=.*: a name of conf/codec or a Codec object"),
        ({"method": parts[0], "method_args": {"sinks": 2}}, "method_args: method is an object, which has its settings"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            kvbench.prefill(tiny("llama"), ids(9), **arguments)


def test_a_cache_says_what_it_is():
    held = kvbench.prefill(tiny("llama"), ids(200, batch=2), "knorm", 0.25)
    assert repr(held) == (
        "CompressedCache(method=knorm, allocator=uniform, codec=raw, budget=0.25: 2 samples, 200 tokens seen, "
        f"50 rows held per layer and head, {held.resident_bytes} of {held.full_bytes} bytes)"
    )
    held.extend(ids(3, batch=2))
    assert " 203 tokens seen, 50 rows held" in repr(held)  # knorm evicts while it decodes
    uneven = kvbench.prefill(tiny("llama"), ids(200), "knorm", 0.25, allocator="ada")
    counts = [len(uneven.places(layer, head)) for layer, head in product(range(3), range(2))]
    assert f"1 sample, 200 tokens seen, {min(counts)} to {max(counts)} rows held" in repr(uneven)


def test_a_prompt_longer_than_the_model_is_refused():
    model = tiny("llama")
    longest = model.config.max_position_embeddings
    with pytest.raises(SettingError, match=f"^input_ids: {longest + 1} tokens with those read before, and the model"):
        kvbench.prefill(model, ids(longest + 1))
    held = kvbench.prefill(model, ids(longest - 2), "knorm", 8)
    with pytest.raises(SettingError, match=f"^max_new_tokens=3: {longest + 1} tokens with those read before"):
        held.generate(3)
    assert held.generate(2, stop=frozenset()).shape == (1, 2)


def test_an_attention_of_ones_own_is_not_replaced():
    model = make_fresh("llama")
    model.config._attn_implementation = "mine"
    with pytest.raises(SettingError, match="^model: has the attention implementation mine, which kvbench would replac"):
        kvbench.prefill(model, ids(9))
    assert model.config._attn_implementation == "mine"


def test_the_interface_is_listed():
    text = kvbench.__doc__
    for name in kvbench.__all__:
        assert getattr(kvbench, name) is not None and name in dir(kvbench) and name in text, name
    assert kvbench.Method is Method and kvbench.SettingError is SettingError
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvbench.nothing  # noqa: B018


def test_defaults_are_the_full_cache():
    held = kvbench.prefill(tiny("llama"), ids(20))
    assert held.places(2, 1).tolist() == list(range(20)) and held.resident_bytes == held.full_bytes
    assert kvbench.prefill(tiny("llama"), ids(20), "full", 0.1).places(0, 0).tolist() == list(range(20))


@each_method
def test_a_prompt_shorter_than_the_budget_is_not_cut(method, allocator):
    args = make_tiny_method_args(method, "short") | hold_all(method)
    for block in blocks_for(method, None, 10):
        size = budget_for(method, 20)
        held = kvbench.prefill(tiny("short"), ids(20), method, size, block, allocator, method_args=args)
        assert all(own == list(range(20)) for own in places(held).values())
        size = budget_for(method, 10**9)
        held = kvbench.prefill(tiny("short"), ids(20), method, size, block, allocator, method_args=args)
        assert held.evicted(0, 0) == 0


@each_method
def test_one_row_less_drops_one_row(method, allocator):
    args = make_tiny_method_args(method, "qwen3")
    size = budget_for(method, 39)
    held = kvbench.prefill(tiny("qwen3"), distinct(40), method, size, None, allocator, method_args=args)
    lengths = [len(own) for own in places(held).values()]
    if holds_all(method):
        assert set(lengths) == {40}
    elif not own_law(method):
        assert sum(lengths) == 39 * len(lengths) and max(lengths) <= 40
        assert set(lengths) == {39} or allocator != "uniform"


@pytest.mark.parametrize(("budget", "block"), [(0.5, None), (2, 1), (1.0, 7)])
@each_method
def test_a_prompt_of_one_token(method, allocator, budget, block):
    with torch.no_grad():
        own = tiny("gemma3")(input_ids=ids(1)).logits[0, 0]
    args, budget = make_tiny_method_args(method, "gemma3"), budget_for(method, budget)
    held = kvbench.prefill(tiny("gemma3"), ids(1), method, budget, block, allocator, method_args=args)
    torch.testing.assert_close(held.logits[0], own, rtol=1e-4, atol=1e-4)
    assert held.places(2, 0).tolist() == [0]
    assert held.generate(3, stop=frozenset()).shape == (1, 3)


@pytest.mark.parametrize("block", [None, 1, 7])
@each_method
def test_a_quota_of_one(method, allocator, block):
    args = make_tiny_method_args(method, "short")
    if block not in blocks_for(method, None, 1, 7):
        return
    size = budget_for(method, 0.001)
    held = kvbench.prefill(tiny("short"), distinct(16), method, size, block, allocator, method_args=args)
    if not holds_all(method) and size is not None:
        assert {len(own) for own in places(held).values()} == {1}
    assert held.extend(ids(3)).isfinite().all()
    assert held.generate(3, stop=frozenset()).shape == (1, 3)


@pytest.mark.cover
@pytest.mark.parametrize("method", [name for name, allocator in COMBINATIONS if allocator == "uniform"])
@pytest.mark.parametrize("quota", [2, 3, 5])
def test_more_protected_rows_than_quota_shrink_to_it(method, quota):
    """Sinks from the first on, else the newest first, one row free; the numbers protected and given up are noted."""
    args = make_tiny_method_args(method, "short")
    held = kvbench.prefill(tiny("short"), distinct(60), method, budget_for(method, quota), method_args=args)
    if holds_all(method) or own_law(method):
        return
    assert {len(own) for own in places(held).values()} == {quota}
    layer = held.contexts[0].own_layers[0]
    assert layer.tally.protected <= quota - 1
    sinks = {"sink": 4, "expected_attention": 4, "centroidkv": 16}.get(method, 0)
    assert layer.tally.given_up["sinks"] == max(0, sinks - (quota - 1))
    if layer.tally.protected:
        wanted = range(layer.tally.protected) if sinks else range(60 - layer.tally.protected, 60)
        assert all(set(wanted) <= set(own) for own in places(held).values())


def test_a_budget_of_the_sinks_keeps_the_first_tokens_and_the_newest():
    held = kvbench.prefill(tiny("llama"), distinct(60), "sink", 4)
    assert set(map(tuple, places(held).values())) == {(0, 1, 2, 59)}
    held.extend(ids(3))
    assert set(map(tuple, places(held).values())) == {(0, 1, 2, 62)}


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("quota, sinks, recents", [(81, 16, 64), (80, 16, 63), (40, 16, 23), (17, 16, 0), (10, 9, 0)])
def test_centroidkv_keeps_its_sinks_where_not_all_recents_fit(quota, sinks, recents, block):
    held = kvbench.prefill(tiny("llama"), distinct(150), "centroidkv", quota, block)
    for own in places(held).values():
        assert own[:sinks] == list(range(sinks)) and own[quota - recents :] == list(range(150 - recents, 150))
    assert (held.masses(1, 1)[:sinks] == 1).all() and held.masses(1, 1).sum() == 150
    layer = held.contexts[0].own_layers[0]
    assert layer.tally.protected == sinks + recents and layer.tally.given_up["sinks"] == 16 - sinks
    if block is None:  # a shorter block brings fewer recents
        assert layer.tally.given_up["recents"] == 64 - recents


def test_andpro_keeps_its_first_chunk_where_the_window_does_not_fit():
    args = {"preset": "official_code"}
    held = kvbench.prefill(tiny("llama"), distinct(60), "andpro", 12, method_args=args)
    assert all({0, 1, 2, 3, *range(53, 60)} <= set(own) for own in places(held).values())
    assert held.contexts[0].own_layers[0].tally.given_up == {"sinks": 0, "recents": 32 - 7}


@pytest.mark.parametrize("block", [None, 8])
def test_a_window_larger_than_the_quota(block):
    args = {"window": 50, "kernel": 3}
    for method in ("snapkv", "dropkv"):
        held = kvbench.prefill(tiny("llama"), distinct(60), method, 10, block, method_args=args)
        for own in places(held).values():
            assert own[1:] == list(range(51, 60)) and own[0] < 51


@each_method
def test_cuts_while_decoding_may_have_a_size_of_their_own(method, allocator):
    """The prompt keeps all, the answer is cut to 30 rows; a method that does not cut while decoding ignores it."""
    if "decoding" not in load_settings("method", method) or own_law(method):
        return
    args = {"decoding": True, "decode_interval": 2, "decode_size": 30} | make_tiny_method_args(method, "llama")
    held = kvbench.prefill(tiny("llama"), distinct(40), method, 1.0, None, allocator, method_args=args)
    assert {len(own) for own in places(held).values()} == {40}
    for rows in (41, 30, 31, 30):
        held.extend(ids(1, seed=rows))
        assert sum(map(len, places(held).values())) == 6 * rows
    with pytest.raises(SettingError, match="^method.decode_size=1"):
        kvbench.prefill(tiny("llama"), ids(9), method, method_args=args | {"decode_size": 1})


@pytest.mark.parametrize("interval", [1, 3])
@each_method
def test_any_method_may_cut_while_decoding(method, allocator, interval):
    if "decoding" not in load_settings("method", method):
        return
    args = {"decoding": True, "decode_interval": interval} | make_tiny_method_args(method, "llama")
    (block,) = blocks_for(method, 20) or (None,)
    size = budget_for(method, 12)
    held = kvbench.prefill(tiny("llama"), distinct(40), method, size, block, allocator, method_args=args)
    before = sum(map(len, places(held).values()))
    for read in range(1, 5):
        held.extend(ids(1, seed=read))
        lengths = [len(held.places(layer, head)) for layer in range(3) for head in range(2)]
        if not own_law(method):
            assert sum(lengths) == before + 6 * (read % interval)
        assert sum(held.masses(1, 0).tolist()) + held.evicted(1, 0) == 40 + read


@cache
def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return make_fresh(name).to(dtype)


DTYPES = {torch.float64: 1e-9, torch.float16: 0.02, torch.bfloat16: 0.1}  # dtype -> tolerance of logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_other_dtypes_give_the_models_own_logits(name, dtype):
    model = model_of(name, dtype)
    with torch.no_grad():
        own = model(input_ids=distinct(60)).logits[0, -1]
    full = kvbench.prefill(model, distinct(60), block_size=9)
    torch.testing.assert_close(full.logits[0], own, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["short", only_in_full("gemma3")])
@each_method
def test_methods_in_other_dtypes(method, allocator, name, dtype):
    """Every method runs and holds what it should."""
    (block,) = blocks_for(method, 20) or (None,)
    args = make_tiny_method_args(method, name)
    size = budget_for(method, 15)
    held = kvbench.prefill(model_of(name, dtype), distinct(60), method, size, block, allocator, method_args=args)
    assert held.logits.dtype == dtype and held.extend(ids(3)).isfinite().all()
    held.generate(2, temperature=1.0)
    if not holds_all(method):
        layers = held.contexts[0].own_layers
        assert own_law(method) or sum(map(len, places(held).values())) >= 15 * len(places(held))
        assert {layer.rows.stored.read()[0].dtype for layer in layers if layer.rows.stored is not None} == {dtype}


def test_budget_of_what_was_seen():
    held = kvbench.prefill(tiny("llama"), ids(40), "sink", 0.5, 10, budget_of="seen")
    assert held.places(0, 0).tolist() == [0, 1, 2, 3, *range(24, 40)]
    held.extend(ids(3))
    assert len(held.places(0, 0)) == 21
    early = kvbench.prefill(tiny("llama"), ids(40), "sink", 0.5, 10)
    assert (early.peak_rows_attended, held.peak_rows_attended) == (30, 25)
    lengths = []
    context = context_of(tiny("llama"), Knorm("knorm", ()), 0.3, 5)
    context.budget = Budget(0.3, "seen")
    handle = context.model.register_forward_hook(lambda *_: lengths.append(len(context.layers[0].rows.view())))
    context.prefill(ids(23))
    handle.remove()
    assert lengths == [1, 3, 4, 6, 6]


# The model is left as it was


def test_attention_implementation_is_put_back():
    model = make_fresh("llama")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        held = kvbench.prefill(model, ids(20), "knorm", 5)
        assert model.config._attn_implementation == implementation
        held.extend(ids(2))
        held.generate(2)
        with held.branch():
            held.extend(ids(2))
        assert model.config._attn_implementation == implementation
        with pytest.raises(SettingError, match="input_ids: token ids from 0 to"):
            kvbench.prefill(model, torch.full((1, 5), 10**6))
        with pytest.raises(IndexError):
            held.extend(torch.full((1, 5), 10**6))
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            assert model(input_ids=ids(9)).logits.isfinite().all()
            assert model.generate(ids(9), max_new_tokens=2, do_sample=False).shape[1] <= 11


def test_attention_implementation_is_put_back_when_a_method_fails():
    @dataclass(frozen=True)
    class Broken(Method):
        def score(self, observation, rows, state):
            raise RuntimeError("broken")

    model = make_fresh("llama")
    with pytest.raises(RuntimeError, match="broken"):
        context_of(model, Broken("broken"), 5).prefill(ids(20))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ContractError, match="scoreless has no score"):
        context_of(model, Method("scoreless"), 5).prefill(ids(20))
    context = context_of(model, Knorm("knorm", ()), 5)
    context.prefill(ids(20))
    answer = context.generate(5, Sampling(), frozenset())
    next(answer)
    answer.close()
    assert model.config._attn_implementation == "sdpa"


def test_two_answers_may_be_generated_in_turn():
    """Token by token from two contexts of one model; afterwards its attention is put back."""
    model = make_fresh("llama")
    contexts = [kvbench.prefill(model, ids(20, seed)).contexts[0] for seed in (1, 2)]
    expected = [kvbench.prefill(model, ids(20, seed)).generate(5, stop=frozenset())[0].tolist() for seed in (1, 2)]
    one, two = (context.generate(5, Sampling(), frozenset()) for context in contexts)
    found = [[int(next(one))], [int(next(two))]]
    found[0] += [int(token) for token in one]
    found[1] += [int(token) for token in two]
    assert found == expected and model.config._attn_implementation == "sdpa"


def test_models_with_parts_are_put_back():
    """Both the text model and the vision tower keep their own attention."""
    model = make_gemma3_with_vision()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    with torch.no_grad():
        own = model(input_ids=ids(40)).logits[0, -1]
    held = kvbench.prefill(model, ids(40), "knorm", 10)
    assert [part._attn_implementation for part in parts] == before
    torch.testing.assert_close(held.logits[0], own, rtol=1e-4, atol=1e-4)
    assert held.sliding_layers == (0, 1, 3, 4) and len(held.places(5, 0)) == 10


def test_sliding_layers_are_reported_and_keep_their_cache():
    held = kvbench.prefill(tiny("gemma3"), ids(60), "knorm", 10)
    assert held.sliding_layers == (0, 1, 3, 4)
    assert len(held.places(2, 0)) == len(held.places(5, 1)) == 10
    for question in (held.places, held.masses, held.evicted):
        with pytest.raises(SettingError, match="^layer=3: .*sliding-window"):
            question(3, 0)
    assert kvbench.prefill(tiny("llama"), ids(9)).sliding_layers == ()


def test_a_model_of_sliding_layers_only_counts_as_full_up_to_its_window():
    model = tiny("windowed")
    held = kvbench.prefill(model, ids(20), "knorm", 10, 7)
    assert held.sliding_layers == () and len(held.places(1, 0)) == 10
    held.extend(ids(4))
    for read in (lambda: held.extend(ids(1)), lambda: kvbench.prefill(model, ids(25))):
        with pytest.raises(SettingError, match="window of 24 tokens"):
            read()
    assert model.config._attn_implementation == "sdpa"


def test_unknown_architectures_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(SettingError, match="^model: architecture mamba is not supported: it has no attention layer"):
        kvbench.prefill(model, ids(9))


def test_custom_code_is_refused():
    model = make_fresh("llama")
    model.config = MambaConfig()
    with pytest.raises(SettingError, match="LlamaForCausalLM is no causal language model of transformers"):
        kvbench.prefill(model, ids(9))


# Reading on


@pytest.mark.parametrize(
    ("method", "block", "name"), [("keydiff", 20, "gemma3"), ("snapkv", None, "llama"), ("centroidkv", 9, "llama")]
)
def test_branches_share_one_context_and_forget(method, block, name):
    prompt, model = ids(60), tiny(name)
    args = {"recents": 3, "sinks": 2, "decode_interval": 3} if method == "centroidkv" else None

    def read(prompt=prompt, model=model, method=method, block=block, args=args):
        return kvbench.prefill(model, prompt, method, 12, block, method_args=args)

    held = read()
    questions = [ids(5, seed) for seed in (1, 2)]
    alone = []
    for question in questions:
        own = read()
        alone.append((own.extend(question), own.generate(5, stop=frozenset()), places(own), own.logits))
    before = places(held), held.bytes, held.logits.clone(), held.peak_rows_attended, held.contexts[0].memory.total
    for question, (logits, tokens, rows, last) in zip(questions, alone, strict=True):
        with held.branch() as same:
            assert same is held
            assert torch.equal(held.extend(question), logits)
            with held.branch():  # and what is read between is forgotten too
                held.generate(3, temperature=1.0)
                held.extend(ids(40))
                held.extend(ids(1))
            assert torch.equal(held.generate(5, stop=frozenset()), tokens)
            assert places(held) == rows and torch.equal(held.logits, last)
        assert places(held) == before[0] and held.bytes == before[1] and torch.equal(held.logits, before[2])
        assert (held.peak_rows_attended, held.contexts[0].memory.total) == before[3:]


def test_a_branch_that_fails_is_forgotten():
    held = kvbench.prefill(tiny("gemma3"), ids(60), "keydiff", 12, 9)
    expected = held.contexts[0].logits.clone(), places(held)
    with held.branch():
        after = held.extend(ids(3))
    with pytest.raises(IndexError), held.branch():
        held.extend(ids(3))
        held.extend(torch.full((1, 2), 10**6))
    assert torch.equal(held.logits, expected[0]) and places(held) == expected[1]
    assert torch.equal(held.extend(ids(3)), after)


def test_reading_on_at_once_or_token_by_token():
    """Without cuts while decoding the two agree; and generated tokens are those that extend predicts."""
    for model in ("llama", "gemma3", "phi3"):
        held = kvbench.prefill(tiny(model), ids(50), "snapkv", 12, method_args={"window": 4})
        more = ids(20, seed=3)
        with held.branch():
            at_once = held.extend(more)
            assert torch.equal(held.logits, at_once[:, -1])
        with held.branch():
            parts = torch.cat([held.extend(token) for token in more.split(1, dim=1)], 1)
        torch.testing.assert_close(at_once, parts, rtol=1e-4, atol=1e-4)
        with held.branch():
            first = held.logits.argmax(-1)
            tokens = held.generate(6, stop=frozenset())
        assert tokens[0, 0] == first
        logits = held.extend(tokens)
        assert (logits[0, :-1].argmax(-1) == tokens[0, 1:]).all()


def test_several_turns_follow_each_other():
    """Question, answer, question: as the dense engine reads them."""
    held = kvbench.prefill(tiny("mistral"), ids(40), "knorm", 40, method_args={"preset": "kvpress"})
    dense = DenseEngine("mistral")
    dense.prefill(ids(40), None)
    for turn in range(3):
        question = ids(4, seed=turn)
        torch.testing.assert_close(held.extend(question)[0].double(), dense.extend(question), rtol=1e-4, atol=1e-4)
        answer = held.generate(3, stop=frozenset())
        dense.extend(answer)
        assert held.contexts[0].seen == dense.seen


def test_generation_stops_at_the_end_token():
    held = kvbench.prefill(tiny("llama"), ids(30, batch=3), "knorm", 10)
    with held.branch():
        free = held.generate(12, stop=frozenset())
    assert free.shape == (3, 12)
    first = {
        int(token): [row.tolist().index(token) if token in row else None for row in free] for token in free.unique()
    }
    token, ends = next(
        (token, ends) for token, ends in first.items() if [e is None for e in ends].count(True) in (1, 2)
    )
    with held.branch():
        stopped = held.generate(12, stop=frozenset([token]))
    for row, expected, end in zip(stopped, free, ends, strict=True):
        end = 11 if end is None else end
        assert torch.equal(row[: end + 1], expected[: end + 1]) and (row[end:] == row[end]).all()
    with held.branch():
        one = held.contexts[0]
        seen = one.seen
        tokens = list(one.generate(12, Sampling(), frozenset([int(free[0, 2])])))
        assert len(tokens) <= 3 and one.seen == seen + len(tokens) - 1


def test_samples_of_one_context_end_alone():
    """The batched path: a sample that ended waits for the others, and what it says meanwhile is not given."""
    model, prompts = tiny("llama"), ids(30, batch=3)
    alone = kvbench.prefill(model, prompts, "knorm", 10)
    with alone.branch():
        free = alone.generate(12, stop=frozenset())
    stop = frozenset(free[0, 4:8].tolist()) - set(free[2].tolist())  # the first gives several of them
    assert len(stop) > 1
    context = context_of(model, Knorm("knorm", (), decoding=True), 10, seeds=(0, 0, 0))
    context.prefill(prompts)
    assert torch.equal(CompressedCache([context]).generate(12, stop=stop), alone.generate(12, stop=stop))


def test_the_models_own_end_token_is_the_default():
    model = make_fresh("llama")
    held = kvbench.prefill(model, ids(30))
    with held.branch():
        free = held.generate(8, stop=frozenset())[0].tolist()
    for end in (free[2], [free[2], 5], None):
        model.generation_config.eos_token_id = end
        model.config.eos_token_id = free[1] if end is None else 7
        with held.branch():
            expected = free[: free.index(free[2] if end is not None else free[1]) + 1]
            assert held.generate(8)[0].tolist() == expected


def test_room_is_reserved_once():
    held = kvbench.prefill(tiny("llama"), ids(30))
    held.generate(40, stop=frozenset())
    assert held.contexts[0].layers[0].rows.tail_keys.shape[2] == 30 + 40 and held.bytes.headroom == 0
    assert held.resident_bytes == 70 * 3 * 2 * 2 * 32 * 4 == held.full_bytes


def test_peak_bytes_of_methods_that_cut_while_decoding():
    held = kvbench.prefill(tiny("wide"), ids(20), "sink", 10)
    memory, row = held.contexts[0].memory, 2 * 2 * 64 * 4
    before = memory.peak
    held.generate(30, stop=frozenset())
    assert memory.peak <= before + 10 * row


def test_no_logits_but_the_last_stay():
    held = kvbench.prefill(tiny("llama"), ids(30))
    held.extend(ids(300))
    assert held.contexts[0].logits.untyped_storage().nbytes() == 199 * 4


# Sampling


def test_sampling_follows_its_seed():
    def sample(seed, **more):
        return kvbench.prefill(tiny("llama"), ids(30), "knorm", 10, seed=seed).generate(
            6, stop=frozenset(), **{"temperature": 1.0, **more}
        )

    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    greedy = sample(1, temperature=0)
    assert torch.equal(sample(3, temperature=1e-4), greedy) and torch.equal(sample(4, top_p=1e-6), greedy)
    assert not torch.equal(sample(1, temperature=0.5), sample(1, temperature=2.0))
    both = kvbench.prefill(tiny("llama"), ids(30, batch=2), "knorm", 10, seed=1)
    alone = kvbench.prefill(tiny("llama"), ids(30, batch=2)[1:], "knorm", 10, seed=1)
    expected = alone.generate(6, temperature=1.0, stop=frozenset())[0]
    assert torch.equal(both.generate(6, temperature=1.0, stop=frozenset())[1], expected)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.45)])
def test_sampling_draws_from_the_distribution(temperature, top_p):
    logits = torch.tensor([1.0, 3.0, 0.0, 2.5, -1.0, 2.0])
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    p = [w / sum(weights) for w in weights]
    ranked, inside, total = sorted(range(6), key=lambda i: -p[i]), set(), 0.0
    for token in ranked:  # the smallest set of likeliest tokens with probability top_p
        if total < top_p:
            inside.add(token)
        total += p[token]
    share = sum(p[token] for token in inside)
    sampling, draws = Sampling(temperature, top_p), 4000
    numbers = sampling.draws((0, 1), draws // 2).flatten()
    counts = Counter(sampling.pick(logits.expand(draws, -1), numbers).tolist())
    assert set(counts) <= inside
    for token in inside:
        expected = draws * p[token] / share
        assert abs(counts[token] - expected) < 4.5 * math.sqrt(expected) + 1


def test_greedy_takes_the_first_of_equals_and_draws_are_a_samples_own():
    assert Sampling().pick(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 2.0]]), torch.zeros(2)).tolist() == [1, 0]
    sampling = Sampling(1.0)
    alone, both = sampling.draws((5,), 3), sampling.draws((4, 5), 3)
    assert torch.equal(alone[0], both[1]) and not torch.equal(both[0], both[1])
    logits = torch.zeros(2, 50)
    assert sampling.pick(logits, torch.tensor([0.0, 0.999999])).tolist() == [0, 49]


def test_no_draw_falls_beyond_the_kept_tokens():
    largest = torch.tensor([1 - 2**-24])  # times the sum it may round to the sum
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    kept = logits.softmax(-1).sort(descending=True)[1][0, :2].tolist()
    share = float(logits.softmax(-1).max())
    assert Sampling(1.0, share * 1.01).pick(logits, largest).item() in kept


# What cannot be used


MODEL, PROMPT = "llama", ids(30)
WRONG = [
    (dict(budget=1), r"budget=1: .*1\.0"),
    (dict(budget=0.0), "budget=0.0: .*fraction"),
    (dict(budget=float("nan")), "budget=nan"),
    (dict(budget="0.5"), "budget=0.5"),
    (dict(budget_of="rows"), "budget_of=rows: choose one of prompt, seen"),
    (dict(method="snapv"), "method=snapv: did you mean snapkv[?] "),
    (dict(method=None), "method=null: choose one of "),
    (dict(allocator="greedy"), "allocator=greedy: choose one of .*ada.*uniform"),
    (dict(codec="zip"), "codec=zip: choose one that"),
    (dict(block_size=0), "block_size=0: a whole number of at least 1"),
    (dict(block_size=2.5), r"block_size=2\.5"),
    (dict(block_size=True), "block_size=True"),
    (dict(method_args={"windw": 8}), "method setting=windw: did you mean window[?] Choose one of "),
    (dict(method_args={"name": "x"}), "method setting=name: choose one of "),
    (dict(method_args={"_target_": "os.system"}), "method setting=_target_: choose one of "),
    (dict(method_args={"preset": "x"}), "method.preset=x: choose one of paper, "),
    (dict(method_args={"window": 0}), "method.window=0: a whole number of at least 1"),
    (dict(method_args={"window": 2.0}), r"method.window=2\.0"),
    (dict(method_args={"kernel": 4}), "method.kernel=4: an odd whole number"),
    (dict(method_args={"pooling": "min"}), "method.pooling=min: choose one of avg, max"),
    (dict(method_args={"group": "never"}), "method.group=never: choose one of after, before"),
    (dict(method="dropkv", method_args={"p_dtype": "fp16"}), "method.p_dtype=fp16: did you mean bf16[?] "),
    (dict(method="dropkv", method_args={"epsilon": 0}), "method.epsilon=0: a number above 0"),
    (dict(method="keydiff", method_args={"anchor": "x"}), "method.anchor=x: choose one of mean_normalised"),
    (dict(method="keydiff", method_args={"metric": "x"}), "method.metric=x: choose one of cosine"),
    (dict(method="keydiff", method_args={"recent": 1.0}), r"method.recent=1\.0: a share in \[0, 1\)"),
    (dict(method="sink", method_args={"sinks": -1}), "method.sinks=-1"),
    (dict(method="centroidkv", method_args={"chunk": 1}), "method.chunk=1: a whole number of at least 2"),
    (dict(method="centroidkv", method_args={"r": 1.5}), r"method.r=1\.5: a share in \(0, 1\]"),
    (dict(method="centroidkv", allocator="ada"), "allocator=ada: centroidkv has no scores.*uniform"),
    (dict(allocator="ada", allocator_args={"alpha": 2}), r"allocator.alpha=2: a share in \[0, 1\]"),
    (dict(allocator="ada", allocator_args={"mode": "x"}), "allocator.mode=x: choose one of interpolate, safeguard"),
    (dict(input_ids=PROMPT[0]), r"input_ids: a LongTensor of shape \(batch, tokens\).*\(30,\)"),
    (dict(input_ids=PROMPT[:, :0]), r"input_ids: a LongTensor of shape \(batch, tokens\).*\(1, 0\)"),
    (dict(method="full", budget=1), "budget=1"),
    (dict(input_ids=PROMPT[:0]), "input_ids: "),
    (dict(input_ids=PROMPT.float()), "input_ids: "),
    (dict(input_ids=PROMPT.tolist()), "input_ids: "),
    (dict(input_ids=PROMPT + 10**6), "input_ids: "),
    (dict(seed="a"), "seed=a"),
    (dict(seed=2**64), "seed="),
    (dict(method="sink", method_args={"decode_interval": 0}), "method.decode_interval=0"),
    (dict(method="sink", method_args={"decode_interval": "x"}), "method.decode_interval=x"),
    (dict(method="sink", method_args={"decoding": "no"}), "method.decoding=no"),
    (dict(method="knorm", method_args={"skip_layers": 3}), "method.skip_layers=3"),
    (dict(method="knorm", method_args={"skip_layers": ["x"]}), "method.skip_layers="),
    (dict(method_args={"window": object()}), "method.window="),
    (dict(method="dropkv", method_args={"epsilon": "x"}), "method.epsilon=x"),
    (dict(method="keydiff", method_args={"recent": "x"}), "method.recent=x"),
    (dict(method="centroidkv", method_args={"r": "x"}), "method.r=x"),
    (dict(allocator="ada", allocator_args={"alpha": "x"}), "allocator.alpha=x"),
    (dict(allocator_args={"alpha": 0.5}), "allocator setting=alpha: uniform has no settings"),
]


def refuse(arguments: dict, message: str) -> None:
    chosen = {"input_ids": PROMPT, "method": "snapkv", "budget": 0.5, "seed": 0} | arguments
    with pytest.raises(SettingError, match=f"^{message}") as error:
        kvbench.prefill(tiny(MODEL), **chosen)
    assert isinstance(error.value, ValueError) and "\n" not in str(error.value)


@pytest.mark.parametrize("arguments, message", WRONG)
def test_wrong_settings_are_named_in_one_line(arguments, message):
    refuse(arguments, message)


def test_wrong_settings_of_reading_on():
    held = kvbench.prefill(tiny("llama"), ids(30), "knorm", 10)
    for arguments, message in [
        (dict(max_new_tokens=0), "max_new_tokens=0: a whole number of at least 1"),
        (dict(max_new_tokens=2.0), r"max_new_tokens=2\.0"),
        (dict(temperature=-1), "temperature=-1: a number from 0"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(top_p=0), r"top_p=0: a share in \(0, 1\]"),
        (dict(top_p=1.5), r"top_p=1\.5"),
        (dict(top_p=math.nan), "top_p=nan"),
    ]:
        with pytest.raises(SettingError, match=f"^{message}"):
            held.generate(**arguments)
    for layer, head, sample in ((3, 0, 0), (0, 2, 0), (0, 0, 1)):
        with pytest.raises(IndexError):
            held.places(layer, head, sample)


def test_samples_count_from_0():
    held = kvbench.prefill(tiny("llama"), ids(30, batch=2), "knorm", 10)
    with pytest.raises(IndexError):
        held.places(0, 0, -1)


@pytest.mark.parametrize("more", [ids(3, batch=3), ids(3)[0], ids(3, batch=2)[:, :0]], ids=["batch", "1-D", "no token"])
def test_what_cannot_be_read_on_is_refused(more):
    with pytest.raises(SettingError):
        kvbench.prefill(tiny("llama"), ids(30, batch=2)).extend(more)


# What a method is shown


@dataclass(frozen=True)
class Spy(Method):
    """Notes what it is shown and keeps the newest rows."""

    notes: list = field(default_factory=list)

    wants = ("lse",)

    def score(self, observation, rows, state):
        self.notes.append((observation, rows))
        return rows.places.double()


@pytest.mark.parametrize("model", ["llama", "llama3", "yarn", "qwen2", "qwen3", "gemma3", "phi3"])
def test_what_a_method_sees(model):
    """Queries, outputs, lse, W_o and rotation, against what the model's own modules computed."""
    spy, own = Spy("spy", decoding=True), tiny(model)
    context = context_of(own, spy, 6, 9)
    layers = [layer.index for layer in context.own_layers]
    before_rotation: dict[int, list] = {}
    handles = []
    for index in layers:
        module = own.model.layers[index].self_attn
        source = getattr(module, "k_norm", None) or getattr(module, "k_proj", None) or module.qkv_proj
        note = before_rotation.setdefault(index, [])
        handles.append(source.register_forward_hook(lambda _, __, out, note=note: note.append(out)))
    context.prefill(ids(25))
    context.extend(ids(5))
    for handle in handles:
        handle.remove()
    firsts = [0, 9, 18, 25]
    assert [seen.layer for seen, _ in spy.notes] == layers * 4
    for number, (seen, rows) in enumerate(spy.notes):
        block = number // len(layers)
        assert (seen.first, seen.last, seen.decoding) == (firsts[block], block == 2, block == 3)
        assert (seen.layers, seen.prompt, seen.tokens) == (len(context.layers), 25, [9, 18, 25, 30][block])
        module = own.model.layers[seen.layer].self_attn
        assert seen.output_weight is module.o_proj.weight and seen.scaling == pytest.approx(module.scaling)
        tokens, heads, dim = seen.queries.shape[2], rows.heads, rows.keys.shape[-1]
        assert rows.places[0, 0].tolist()[-tokens:] == list(range(seen.first, seen.tokens))
        grouped = seen.queries[0].view(heads, -1, tokens, dim).double()
        logits = grouped @ rows.keys[0, :, None].mT.double() * seen.scaling
        later = rows.places[0, 0] > torch.arange(seen.first, seen.tokens)[:, None]
        logits = logits.masked_fill(later, -torch.inf)
        outputs = (logits.softmax(-1) @ rows.values[0, :, None].double()).flatten(0, 1)
        torch.testing.assert_close(seen.outputs[0].double(), outputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen.lse[0].double(), logits.logsumexp(-1).flatten(0, 1), rtol=1e-5, atol=1e-5)
        keys = before_rotation[seen.layer][block][0]
        if model == "phi3":
            keys = keys[:, -2 * heads * dim : -heads * dim]
        keys = keys.view(tokens, heads, dim).transpose(0, 1) if keys.shape[0] == tokens else keys
        cos, sin = (x[0] for x in seen.rotation(torch.arange(seen.first, seen.tokens)[None]))
        turned = rows.keys[0, :, -tokens:]
        size = cos.shape[-1]
        assert size == (dim // 2 if model == "phi3" else dim)
        half = torch.cat([-keys[..., size // 2 : size], keys[..., : size // 2]], -1)
        torch.testing.assert_close(turned[..., :size], keys[..., :size] * cos + half * sin, rtol=1e-5, atol=1e-5)
        assert torch.equal(turned[..., size:], keys[..., size:])


WRONG = [
    ("method", "h2o", {"recent": "half"}), ("method", "h2o", {"recent": None}),
    ("method", "criticalkv", {"alpha": "half"}), ("method", "criticalkv", {"epsilon": None}),
    ("method", "criticalkv", {"base": None}), ("method", "criticalkv", {"base": "nothing"}),
    ("method", "criticalkv", {"base_args": 5}), ("method", "criticalkv", {"base_args": [1]}),
    ("method", "cake", {"gamma": "x"}), ("method", "cake", {"gamma": float("inf")}),
    ("method", "expected_attention", {"epsilon": "x"}), ("method", "qfilters", {"path": 5}),
    ("method", "duo_attention", {"path": [1]}), ("method", "duo_attention", {"path": "", "sparsity": "half"}),
    ("allocator", "cake", {"tau1": "x"}), ("allocator", "cake", {"tau2": float("inf")}),
    ("allocator", "cake", {"cascade": "maybe"}), ("method", "kvzip", {"first": [True]}),
]  # fmt: skip


@pytest.mark.parametrize("group, name, args", WRONG, ids=str)
def test_a_value_of_another_kind_is_refused_by_its_name(group, name, args):
    """Not by what Python says when it compares a text with a number."""
    key, value = list(args.items())[-1]
    with pytest.raises(SettingError) as refusal:
        build(group, load_settings(group, name, args))
    shown = tuple(f"{group}.{key}={own}: " for own in (value, format_value(value)))
    assert str(refusal.value).startswith(shown) and "\n" not in str(refusal.value)


# Saving


def read_on(held: CompressedCache) -> list[torch.Tensor]:
    """What a question and its answer give, and the rows that they leave; all forgotten afterwards."""
    with held.branch():
        found = [held.extend(ids(3, 1)), held.generate(5, temperature=1.0, stop=frozenset()), held.logits]
        for layer in (own for context in held.contexts for own in context.own_layers):
            rows = layer.rows.view()
            found += [rows.keys, rows.values, rows.places, rows.mass, *rows.columns.values(), *layer.tally.counted]
            found.append(torch.tensor(layer.attended))
    return found


def save_and_load(held: CompressedCache, path: Path) -> CompressedCache:
    """The cache behind a file, which is then overwritten. It says of itself what the saved one says."""
    held.save(path)
    loaded = kvbench.load_cache(path, held.contexts[0].model)
    path.write_bytes(bytes(path.stat().st_size))
    assert repr(loaded) == repr(held) and torch.equal(loaded.logits, held.logits)
    assert replace(loaded.bytes, headroom=0) == replace(held.bytes, headroom=0) and loaded.bytes.headroom == 0
    assert (loaded.peak_rows, loaded.peak_rows_attended) == (held.peak_rows, held.peak_rows_attended)
    for one, other in zip(held.contexts, loaded.contexts, strict=True):
        assert other.memory.total == sum(layer.bytes().total for layer in other.own_layers)
        for layer, again in zip(one.own_layers, other.own_layers, strict=True):
            assert again.state.shared.keys() == layer.state.shared.keys()
            assert torch.equal(again.rows.view().keys, layer.rows.view().keys)
    return loaded


SAVED = {
    "snapkv": dict(method="snapkv", method_args={"window": 4}),
    "keydiff": dict(model="gemma3", method="keydiff", block_size=20),  # sliding windows; it cuts while decoding
    "h2o": dict(method="h2o"),  # a column of the rows
    "centroidkv": dict(method="centroidkv", method_args={"recents": 3, "sinks": 2, "decode_interval": 3}),  # masses
    "quest": dict(method="quest", method_args={"page": 4}),  # a state that grows, and rows that are not read
    "expected_attention": dict(method="expected_attention", method_args={"decoding": True, "decode_interval": 5}),
    "ada": dict(method="snapkv", method_args={"window": 4, "decoding": True}, allocator="ada"),  # ragged heads
    "kivi": dict(method="snapkv", method_args={"window": 4}, codec="kivi", codec_args={"group": 4, "residual": 8}),
    "hf_quantized": dict(codec="hf_quantized", codec_args={"group": 16, "residual": 3}),  # its rows share tensors
    "composite": dict(method="criticalkv", method_args={"base": "knorm", "base_args": {}}),
}


@pytest.mark.parametrize("case", SAVED)
def test_a_saved_cache_answers_as_it_did(case, tmp_path):
    """To the bit, after a question and a part of an answer."""
    settings = {"model": "llama"} | SAVED[case]
    held = kvbench.prefill(make_double(settings.pop("model")), ids(30), budget=0.4, **settings)
    held.extend(ids(2, 5))
    held.generate(2, stop=frozenset())
    loaded = save_and_load(held, tmp_path / "held.safetensors")
    for own, other in zip(read_on(held), read_on(loaded), strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)


@pytest.mark.parametrize("codec", [lambda: build_palu(find_palu("qwen3")), lambda: build_delta("qwen3")])
def test_saved_keys_are_rotated_by_the_model_that_loads_them(codec, tmp_path):
    held = kvbench.prefill(make_double("qwen3"), ids(30), codec=codec())
    loaded = save_and_load(held, tmp_path / "held.safetensors")
    for layer in (own for own in loaded.contexts[0].own_layers if own.packs):
        assert layer.rows.stored.owner.subject.codec is layer.codec.owner.subject  # and its hooks are guarded again
    for own, other in zip(read_on(held), read_on(loaded), strict=True):
        assert torch.equal(own, other)


def test_frequencies_that_changed_are_saved(tmp_path):
    config = copy.deepcopy(tiny("llama").config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    model = draw_model(lambda: type(tiny("llama"))(config), 0).double()
    held = kvbench.prefill(model, ids(40), "knorm", 12)
    loaded = save_and_load(held, tmp_path / "held.safetensors")
    before, after = (own.contexts[0].cache.frequencies for own in (held, loaded))
    assert after.longest == before.longest and torch.equal(after.state[1]["inv_freq"], before.state[1]["inv_freq"])
    assert after.state[0] == before.state[0]
    for own, other in zip(read_on(held), read_on(loaded), strict=True):
        assert torch.equal(own, other)


def test_reserved_memory_is_not_saved(tmp_path):
    held, shapes = kvbench.prefill(tiny("llama"), ids(20), "knorm", 8), []
    for _ in range(2):
        held.save(tmp_path / "held.safetensors")
        shapes.append({name: own.shape for name, own in load_file(tmp_path / "held.safetensors").items()})
        held.contexts[0].reserve(100)
        for layer in held.contexts[0].own_layers:
            layer.rows = layer.rows.with_starts()
    assert held.bytes.headroom and shapes[0] == shapes[1]


@each_method
def test_any_method_can_be_saved(method, allocator, tmp_path):
    held = kvbench.prefill(tiny("short"), ids(30), CHOICES[method, allocator][0], budget_for(method, 0.4),
                           allocator=CHOICES[method, allocator][1])  # fmt: skip
    loaded = save_and_load(held, tmp_path / "held.safetensors")
    assert torch.equal(loaded.extend(ids(3)), held.extend(ids(3)))


def test_a_method_may_remember_any_plain_value(tmp_path):
    held = kvbench.prefill(tiny("llama"), ids(20), "knorm", 8)
    state = held.contexts[0].layers[1].state.layer
    state["own"] = {1: torch.ones(2), "1": torch.zeros(2), (2, None): [Fraction(1, 3), torch.half, torch.device("cpu")]}
    state["same"] = state["own"][1]
    found = save_and_load(held, tmp_path / "held.safetensors").contexts[0].layers[1].state.layer
    assert found["own"][1] is found["same"]
    assert torch.equal(found["own"].pop(1), torch.ones(2)) and torch.equal(found["own"].pop("1"), torch.zeros(2))
    assert found["own"] == {(2, None): [Fraction(1, 3), torch.half, torch.device("cpu")]}


def refuse_loading(path: Path, model: torch.nn.Module, message: str) -> None:
    with pytest.raises(SettingError, match=f"^path={re.escape(str(path))}: {message}") as error:
        kvbench.load_cache(path, model)
    assert "\n" not in str(error.value)


def test_a_saved_cache_is_of_one_model(tmp_path):
    path, changed = tmp_path / "held.safetensors", make_fresh("llama")
    kvbench.prefill(tiny("llama"), ids(20), "knorm", 8).save(path)
    refuse_loading(path, tiny("llama3"), "was made with another model: num_hidden_layers is 2, and was 3")
    refuse_loading(path, make_double("llama"), "was made with another model: dtype is float64, and was float32")
    kvbench.load_cache(path, changed)  # another object with the same weights
    changed.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1e-3
    refuse_loading(path, changed, "was made with other weights: their hash is ")


def test_a_damaged_file_is_refused(tmp_path):
    """Whatever it says, nothing that it names is imported or unpickled."""
    path, model = tmp_path / "held.safetensors", tiny("llama")
    kvbench.prefill(model, ids(20), "knorm", 8).save(path)
    whole = path.read_bytes()
    tensors = load(whole)  # `load_file` maps the file, which is written to below
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    for size in (0, 5, 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuse_loading(path, model, "cannot read the compressed context ")
    torch.save(tensors, path)
    refuse_loading(path, model, "pickled weights are not read")
    save_file(tensors, path)
    refuse_loading(path, model, "is no compressed context of kvbench$")
    save_file(tensors, path, metadata | {"version": "2"})
    refuse_loading(path, model, "has version 2 of the format, and this kvbench reads 1$")
    for old, new, message in (
        ('"StoredRows"', '"subprocess.Popen"', r"cannot read .*unknown kind make \['subprocess.Popen'"),
        ('"name": "knorm"', '"name": "os.system"', "method=os.system: choose one of "),
        ('"skip_layers"', '"skip"', "cannot read .*unexpected keyword argument 'skip'"),
        ('"contexts.0.logits"', '"x"', "cannot read .*does not contain tensor x"),
        ("}]", "", "cannot read .*delimiter"),
    ):
        save_file(tensors, path, metadata | {"about": metadata["about"].replace(old, new, 1)})
        refuse_loading(path, model, message)
    refuse_loading(tmp_path / "none", model, "cannot read the compressed context ")


def test_what_no_file_can_hold_is_refused_before_it_is_written(tmp_path):
    class Other(Knorm):
        pass

    @dataclass(frozen=True)
    class Bound:
        work: Callable[[], None]

    path, settings = tmp_path / "held.safetensors", load_settings("method", "knorm")
    named = {name: value for name, value in settings.items() if name not in ("_target_", "preset")}
    for method, message in (
        (Other(**named), "method=knorm: the context cannot be saved, because this method has no file in conf/method"),
        (
            Other(**named | {"name": "mine"}),
            "method=mine: the context cannot be saved, because this method has no file",
        ),
    ):
        with pytest.raises(SettingError, match=message):
            kvbench.prefill(tiny("llama"), ids(20), method, 8).save(path)
    held = kvbench.prefill(tiny("llama"), ids(20), "knorm", 8)
    for value in (torch.Generator(), Bound(print), print):
        held.contexts[0].layers[1].state.layer["own"] = [value]
        line = "method=knorm: the context cannot be saved, because contexts.0.layers.1.state.own.0 is of type "
        with pytest.raises(SettingError, match=line + type(value).__name__):
            held.save(path)
    del held.contexts[0].layers[1].state.layer["own"]
    with pytest.raises(SettingError, match="^path=.*: cannot write the compressed context "):
        held.save(tmp_path / "none" / "held.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_methods_file_must_be_what_it_was(tmp_path):
    path, file = tmp_path / "held.safetensors", tmp_path / "filters"
    shutil.copy(make_tiny_method_args("qfilters", "llama")["path"], file)
    held = kvbench.prefill(tiny("llama"), ids(20), "qfilters", 8, method_args={"path": file})
    assert torch.equal(save_and_load(held, path).extend(ids(3)), held.extend(ids(3)))
    held.save(path)
    save_file({"q_filters": load_file(file)["q_filters"] + 1}, file)
    refuse_loading(path, tiny("llama"), f"was made with another content of method.path={file}$")


# Where a text is


class Letters:
    """A tokenizer with one byte of UTF-8 a token."""

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """A tokenizer with two letters and a space in front a token. Decoding drops the space in front of the first."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(f" {chr(97 + token)}{chr(97 + token)}" for token in tokens)[1:]


def test_a_text_is_found_whatever_decoding_drops_in_front():
    assert [find_text(Words(), [0, 1, 0, 1, 1], text) for text in ("a b", "b b", " aa", "ab")] == [
        [0, 1, 2, 3], [3, 4], [2], []
    ]  # fmt: skip


def test_where_a_text_is_held(tmp_path):
    """Positions are those of its tokens, of which a character may have two. Heads hold what `places` says."""
    text = "The sky is blau, die Stra\u00dfe grau. The sky is wide."
    prompt = torch.tensor([list(text.encode()), list(text.swapcase().encode())])
    held = kvbench.prefill(make_small_gemma3(), prompt, "knorm", 12, tokenizer=Letters())
    held.extend(ids(5, batch=2))
    held.save(tmp_path / "held.safetensors")
    loaded = kvbench.load_cache(tmp_path / "held.safetensors", held.contexts[0].model)
    for sample, part, places in (
        (0, "sky", [4, 5, 6, 39, 40, 41]), (1, "SKY", [4, 5, 6, 39, 40, 41]), (0, "a\u00dfe", [24, 25, 26, 27])
    ):  # fmt: skip
        found = held.where(part, sample=sample)
        assert found.places.tolist() == places and found.held.shape == (2, 2, len(places))
        window = range(prompt.shape[1] + 5 - SLIDING + 1, prompt.shape[1] + 5)
        assert found.held[0].tolist() == [[place in window for place in places]] * 2
        for head in range(2):
            own = set(held.places(1, head, sample).tolist())
            assert found.held[1, head].tolist() == [place in own for place in places]
        assert all(map(torch.equal, loaded.where(part, Letters(), sample), found))
    for text, sample, message in (("SKY", 0, "text=SKY: not in the prompt of sample 0"), ("", 1, "text=")):
        with pytest.raises(SettingError, match=message):
            held.where(text, sample=sample)
    with pytest.raises(SettingError, match="^tokenizer=null: give the tokenizer of the prompt"):
        loaded.where("sky")
    with pytest.raises(SettingError, match="^prompt: not known"):
        CompressedCache(held.contexts).where("sky", Letters())
    with pytest.raises(IndexError):
        held.where("sky", sample=2)
