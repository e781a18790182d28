"""Models whose layers keep a recurrent or convolutional state: it is copied wherever rows are, and counted apart."""

import copy

import pytest
import torch

import kvbench
from kvbench.cache.policy import CachePolicy
from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine import saved_cache, shared_prefill
from kvbench.engine.generation import GenerationContext
from kvbench.engine.replicate import replicate
from kvbench.interfaces.budget import Budget
from kvbench.models import layer_state, layouts, probe
from kvbench.models.layouts import ARCHITECTURES, is_tested, read_config_layout
from kvbench.models.loading import count_states
from kvbench.models.miniature import draw_miniature
from kvbench.models.probe import Refused
from kvbench.models.transformers_port import (
    count_plain_states,
    find_text_decoder,
    make_plain_cache,
    read_layout,
    text_config,
    use_first_layers,
)
from kvbench.validation import SettingError
from tests.support.hybrids import COVERING, EVERY, configure_hybrid, draw_tokens, make_hybrid, read_at_once
from tests.support.method_files import budget_for, hold_all, make_method_args

PROMPT = 120
CLOSE = dict(rtol=2e-4, atol=2e-4)  # as in tests/laws: float32 against another order of the same sums


def make_policy(method: str, name: str, codec: str = "raw") -> CachePolicy:
    settings = load_settings("method", method, find_args(method, name))
    others = [build(group, load_settings(group, own)) for group, own in (("allocator", "uniform"), ("codec", codec))]
    return CachePolicy(build("method", settings), *others)


def find_args(method: str, name: str) -> dict:
    return make_method_args(method, name, make_hybrid(name), [draw_tokens(100, seed)[0] for seed in range(4)])


def read_prompt(name: str, method: str = "full", budget: float = 1.0, block: int | None = None) -> GenerationContext:
    context = GenerationContext(make_hybrid(name), make_policy(method, name), Budget(budget), block, (0,))
    context.prefill(draw_tokens(PROMPT))
    return context


def list_states(context: GenerationContext) -> list[torch.Tensor]:
    """All states of a context, the very tensors."""
    values = [value for layer in context.cache.stateful for value in vars(layer).values()]
    return [part for value in values for part in layer_state.find_parts(value)]


# Laws


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("block", [None, 37])
def test_a_full_cache_gives_the_models_own_logits(name, block):
    """Also the second time that something is read after the prompt."""
    model, prompt, more = make_hybrid(name), draw_tokens(PROMPT), draw_tokens(9, seed=1)
    truth = read_at_once(model, torch.cat([prompt, more], 1))
    held = kvbench.prefill(model, prompt, block_size=block)
    torch.testing.assert_close(held.logits, truth[:, PROMPT - 1], **CLOSE)
    for parts in ([9], [4, 5], [1] * 9):
        with held.branch():
            logits = torch.cat([held.extend(part) for part in more.split(parts, 1)], 1)
        torch.testing.assert_close(logits, truth[:, PROMPT:], **CLOSE)
    answer = held.generate(5, stop=frozenset())
    logits = read_at_once(model, torch.cat([prompt, answer], 1))[:, PROMPT - 1 : -1]
    assert (logits.max(-1).values - logits.gather(2, answer[..., None])[..., 0] <= 1e-4).all()


@pytest.mark.parametrize("name", EVERY)
def test_a_cut_cache_gives_what_a_masked_pass_gives(name):
    """Layers with a state read all tokens, whatever the others hold."""
    with torch.no_grad():
        trial = probe.make_trial(draw_miniature(configure_hybrid(name)))
        probe.check_cached_reading(trial)
        probe.check_cuts(trial)


@pytest.mark.parametrize("name", EVERY)
def test_layers_that_hold_rows_share_the_budget(name):
    layout = read_layout(make_hybrid(name))
    context = read_prompt(name, "snapkv", 0.25, 40)
    assert [layer.index for layer in context.own_layers] == list(layout.held)
    for layer in context.own_layers:
        assert set(layer.rows.counts().flatten().tolist()) == {PROMPT // 4}
    assert {*layout.held, *layout.recurrent, *layout.sliding} == set(range(layout.layers))


@pytest.mark.full
@pytest.mark.parametrize("method", list_choices("method"))
@pytest.mark.parametrize("name", COVERING)
def test_every_method_serves_or_is_refused(name, method):
    model, layout = make_hybrid(name), read_layout(make_hybrid(name))
    try:
        policy, args = make_policy(method, name), find_args(method, name)
        policy.check(layout)
    except SettingError as error:
        assert layout.rotation_fault is not None and layout.rotation_fault in str(error)
        return
    one_block = policy.method.one_block
    prompt, more, block = draw_tokens(PROMPT), draw_tokens(5, seed=1), None if one_block else 50
    truth = read_at_once(model, torch.cat([prompt, more], 1))
    held = kvbench.prefill(model, prompt, method, budget_for(method, 1.0), block, method_args=args | hold_all(method))
    torch.testing.assert_close(held.logits, truth[:, PROMPT - 1], **CLOSE)
    torch.testing.assert_close(held.extend(more), truth[:, PROMPT:], **CLOSE)
    cut = kvbench.prefill(model, prompt, method, budget_for(method, 0.3), block, method_args=args)
    with cut.branch():
        first = cut.extend(more)
    assert torch.equal(cut.extend(more), first) and cut.bytes.recurrent == held.bytes.recurrent


# Copies


@pytest.mark.parametrize("name", COVERING)
def test_a_snapshot_stays_what_it_is(name):
    """Also when the context reads on after it returned to the snapshot."""
    context, more = read_prompt(name), draw_tokens(3, seed=1)
    snapshot = context.snapshot()
    kept = copy.deepcopy(snapshot.recurrent)
    first = context.extend(more)
    assert not all(map(torch.equal, list_states(context), find_tensors(kept)))
    for _ in range(2):
        context.restore(snapshot)
        assert all(map(torch.equal, list_states(context), find_tensors(kept)))
        assert torch.equal(context.extend(more), first)
        assert all(map(torch.equal, find_tensors(snapshot.recurrent), find_tensors(kept)))


def find_tensors(states: list[layer_state.LayerState]) -> list[torch.Tensor]:
    return [part for state in states for value in state.values() for part in layer_state.find_parts(value)]


@pytest.mark.parametrize("name", COVERING)
def test_contexts_share_a_prefill_and_no_state(name):
    cells, more = [("full", 1.0), ("snapkv", 0.3), ("knorm", 0.2)], draw_tokens(4, seed=1)
    contexts = [
        GenerationContext(make_hybrid(name), make_policy(method, name), Budget(budget), None, (0,))
        for method, budget in cells
    ]
    shared_prefill.prefill(contexts, draw_tokens(PROMPT))
    for _ in range(2):  # what one context reads must not reach the next one
        for context, (method, budget) in zip(contexts, cells, strict=True):
            alone = read_prompt(name, method, budget)
            with context.branch():
                torch.testing.assert_close(context.extend(more), alone.extend(more), **CLOSE)
    addresses = [{state.data_ptr() for state in list_states(context)} for context in contexts]
    assert not addresses[0] & addresses[1] and not addresses[1] & addresses[2]


@pytest.mark.parametrize("name", COVERING)
def test_a_replicated_state_decodes_as_it_does_alone(name):
    context, one = read_prompt(name, "snapkv", 0.3), read_prompt(name, "snapkv", 0.3)
    before, more = context.bytes().recurrent, draw_tokens(3, seed=1)
    replicate(context, 3, 8)
    assert context.bytes().recurrent == 3 * before
    logits = context.extend(more.expand(3, -1))
    torch.testing.assert_close(logits, one.extend(more).expand(3, -1, -1), **CLOSE)


@pytest.mark.parametrize("name", COVERING)
def test_samples_of_a_batch_keep_their_own_states(name):
    prompts, more = draw_tokens(PROMPT, batch=2), draw_tokens(3, seed=1, batch=2)
    truth = read_at_once(make_hybrid(name), torch.cat([prompts, more], 1))
    held = kvbench.prefill(make_hybrid(name), prompts, block_size=50)
    torch.testing.assert_close(held.extend(more), truth[:, PROMPT:], **CLOSE)


@pytest.mark.parametrize("name", COVERING)
def test_a_saved_cache_holds_the_states(name, tmp_path):
    held, more = kvbench.prefill(make_hybrid(name), draw_tokens(PROMPT), "snapkv", 0.3), draw_tokens(3, seed=1)
    held.save(tmp_path / "held.safetensors")
    expected = held.extend(more)
    loaded = kvbench.load_cache(tmp_path / "held.safetensors", make_hybrid(name))
    assert torch.equal(loaded.extend(more), expected) and loaded.bytes.recurrent == held.bytes.recurrent


def test_files_of_before_hold_no_states(tmp_path, monkeypatch):
    model = make_hybrid("lfm2")
    held = kvbench.prefill(model, draw_tokens(20))
    monkeypatch.setattr(saved_cache, "OF_SNAPSHOT", saved_cache.OF_SNAPSHOT[:-1])
    held.save(tmp_path / "old.safetensors")
    monkeypatch.undo()
    with pytest.raises(SettingError, match="old.safetensors"):
        kvbench.load_cache(tmp_path / "old.safetensors", model)


def test_gradients_do_not_stay_in_a_state():
    context = read_prompt("qwen3_next", "kvgrad", 0.3)
    assert not any(state.requires_grad for state in list_states(context))


# Bytes and layers


def test_bytes_are_counted_by_kind():
    """LFM2 remembers the last inputs of each convolution, L_cache of them for each channel."""
    context = read_prompt("lfm2")
    config = text_config(context.model)
    assert context.bytes().recurrent == 2 * config.hidden_size * config.conv_L_cache * 4
    rows = 2 * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * PROMPT * 4
    assert context.bytes().rows == context.full_bytes() == rows and context.sliding_bytes() == 0
    assert context.bytes().total >= rows + context.bytes().recurrent
    context.extend(draw_tokens(9))
    assert context.bytes().recurrent == 2 * config.hidden_size * config.conv_L_cache * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_states_are_known_without_weights(dtype):
    """Also of a model with experts, whose grouped products take one dtype alone where there are no numbers."""
    model = copy.deepcopy(make_hybrid("qwen3_next")).to(dtype)
    cache = make_plain_cache(model)
    model(input_ids=draw_tokens(3), past_key_values=cache, use_cache=True)
    assert count_states(model.config, dtype) == count_plain_states(cache) > 0


def test_layers_without_rows_are_named():
    held = kvbench.prefill(make_hybrid("lfm2"), draw_tokens(20))
    assert held.recurrent_layers == (0, 2) and held.sliding_layers == () and len(held.places(1, 0)) == 20
    with pytest.raises(SettingError, match="layer=0: keeps transformers' own recurrent state, not rows"):
        held.places(0, 0)
    both = kvbench.prefill(make_hybrid("falcon_h1"), draw_tokens(20))
    assert both.recurrent_layers == () and both.bytes.recurrent > 0


def test_a_model_without_rows_has_nothing_to_cut():
    config = configure_hybrid("granitemoehybrid", layer_types=["linear_attention"] * 2)
    with pytest.raises(SettingError, match="^model: none of its layers keeps keys and values of all tokens"):
        read_config_layout(config)


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_the_first_layers_work_alone(name):
    """Whether a model visits all layers that it has, or as many as its configuration says."""
    kinds = {"nemotron_h": "layers_block_type"}.get(name, "layer_types")
    few = ["linear_attention", "mlp" if name == "nemotron_h" else "full_attention", "full_attention"]
    more = {} if name == "falcon_h1" else {kinds: few * 2}
    model = draw_miniature(configure_hybrid(name, **{"num_hidden_layers": 6} | more))
    before, layers = text_config(model).to_dict(), find_text_decoder(model).layers
    shorter = {"qwen3_next": 2, "granitemoehybrid": 2, "falcon_h1": 1, "nemotron_h": 3}[name]
    with use_first_layers(model, 1):
        held = kvbench.prefill(model, draw_tokens(30), "snapkv", 0.5)
        assert len(held.contexts[0].layers) == len(find_text_decoder(model).layers) == shorter < len(layers)
        assert held.generate(2, stop=frozenset()).shape == (1, 2)
    assert text_config(model).to_dict() == before and find_text_decoder(model).layers is layers


# Refusals


class Handle:
    """Something that only transformers knows."""


def test_a_state_that_cannot_be_copied_is_refused():
    context = read_prompt("lfm2")
    context.cache.stateful[0].conv_states = Handle()
    with pytest.raises(SettingError, match="^model: a cache layer holds its state in conv_states, a Handle, which"):
        context.snapshot()


def test_earlier_versions_are_probed(monkeypatch):
    config = configure_hybrid("lfm2")
    assert is_tested(config)
    monkeypatch.setattr(layouts, "read_version", lambda: (5, 16))
    assert not is_tested(config)


def test_a_state_that_is_not_copied_is_noticed_by_a_probe(monkeypatch):
    monkeypatch.setattr(layer_state, "clone", lambda value, name: value)
    with torch.no_grad(), pytest.raises(Refused, match="kvbench's full cache after an answer was forgotten differs"):
        probe.check_full_cache(probe.make_trial(draw_miniature(configure_hybrid("qwen3_next"))))


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid"])
def test_what_rotates_keys_is_refused_without_rotary_embedding(name):
    line = "^method=expected_attention: it rotates keys, which kvbench .*: it has no rotary embedding; use another"
    with pytest.raises(SettingError, match=line):
        kvbench.prefill(make_hybrid(name), draw_tokens(20), "expected_attention", 0.5)


@pytest.mark.parametrize("name", EVERY)
def test_the_list_says_what_a_probe_says(name):
    """A type whose keys the list lets methods rotate is one whose keys the probe rotates."""
    config = configure_hybrid(name)
    verdict, layout = probe.probe_miniature(draw_miniature(config)), read_config_layout(config)
    assert not verdict.graphs and not ARCHITECTURES[name].graphs and layout.probe is None
    assert (verdict.rotation_fault is None) == (layout.rotation_fault is None)
    assert layout.joint_norm == verdict.joint_norm
