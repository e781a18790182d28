"""Architectures beside the tested list are probed: right ones are admitted, and each check notices a mistake."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

import kvbench
from kvbench.cache.layer import Layer
from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.imports import list_files
from kvbench.config.provenance import follow_imports
from kvbench.engine.context import PromptContext
from kvbench.engine.full_cache_check import check_full_cache
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.codec import Codec, Packing
from kvbench.interfaces.layout import Probe
from kvbench.interfaces.method import Method
from kvbench.models import admission, layouts, miniature, probe, transformers_port
from kvbench.models.admission import admit_model, make_key, probe_architecture
from kvbench.models.layouts import ARCHITECTURES, is_tested, read_config_layout
from kvbench.models.loading import make_random_model
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.probe import Refused
from kvbench.models.transformers_port import read_layout
from kvbench.validation import SettingError
from tests.support.families import configure
from tests.support.selection import only_in_full
from tests.support.tiny_models import distinct, ids, tiny

FEW = dict(num_hidden_layers=2)
RIGHT = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmo", "gemma", "granite", "granitemoe", "granitemoeshared", "glm4_moe"),
    *("hyperclovax", "hy_v3", "seed_oss", "phimoe", "phi4_multimodal", "starcoder2", "nemotron", "arcee", "apertus"),
    *("bitnet", "ministral", "ministral3", "dots1", "aria_text", "cwm", "jais2", "laguna", "mellum", "solar_open"),
    *("phi", "gemma4_text", "gemma4_unified_text"),
    *("olmo2", "olmo3", "olmoe", "flex_olmo", "cohere", "cohere2", "cohere2_moe", "glm", "glm4", "smollm3", "exaone4"),
    *("exaone_moe", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "helium", "minimax_m2", "afmoe"),
    *("nanochat", "stablelm", "gemma2", "vaultgemma", "granite_swa", "granitemoe_swa", "gpt_oss"),
)
LATE = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # their norm's weights follow the rotation
JOINT = ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")  # their norm is over all heads
MODULES = (  # what the step does not compute; ministral3 scales queries by their position
    *("ministral3", "gemma4_text", "gemma4_unified_text", "hunyuan_v1_dense", "hunyuan_v1_moe"),
)
REFUSED = {
    "deepseek_v3": "latent rows",
    "glm4_moe_lite": "latent rows",
    "deepseek_v32": "a sparse indexer",
    "glm_moe_dsa": "a sparse indexer",
    "minimax_m3_vl_text": "a sparse indexer",
    "gemma3n_text": "15 layers .* that read the rows of earlier ones",
    "jamba": "transformers' own cache differs",
    "bamba": "none of its layers keeps keys and values of all tokens",
    "zamba2": "layer 3 has no attention module, or that has no W_o",
    "recurrent_gemma": "a recurrent state outside of transformers' cache|max_position_embeddings",
    "mamba": "no attention layer",
    "rwkv": "no attention layer",
    "opt": "its configuration lacks something",
    "bloom": r"its decoder has no modules named layers \(BloomModel\)",
    "diffllama": "kvbench's cache does not fit it",
    "doge": "transformers' own cache differs",
    "jetmoe": "layer 0 has no attention module, or that has no W_o",
}
AT_ONCE = ("deepseek_v3", "deepseek_v32", "gemma3n_text", "bamba", "mamba")


def probe_type(name: str, **more: object) -> Probe:
    return probe.probe(configure(name, **more))


@cache
def make_trial() -> probe.Trial:
    """A Llama with three KV heads of two queries each, read once by eager attention."""
    config = CONFIG_MAPPING["llama"](
        vocab_size=128, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8,
    )  # fmt: skip
    return probe.make_trial(draw_miniature(config))


# Verdicts


def test_experts_are_decoded_in_graphs():
    assert probe_type("qwen3_moe", **FEW) == Probe("qwen3_moe", None, graphs=True)


def test_a_plain_decoder_is_decoded_in_graphs():
    assert probe_type("seed_oss", **FEW) == Probe("seed_oss", None, graphs=True)


def test_a_layer_of_each_kind_is_probed():
    """Every fourth layer of Cohere 2 has no window and no RoPE."""
    small = shrink(configure("cohere2"))
    assert small.layer_types == ["sliding_attention"] * 3 + ["full_attention"] and small.sliding_window == 16
    verdict = probe_type("cohere2", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    assert verdict.rotation_fault is None and verdict.graphs


@pytest.mark.parametrize("name", AT_ONCE)
def test_layers_of_other_kinds_are_refused_at_once(name):
    with pytest.raises(Refused, match=REFUSED[name]):
        probe_type(name)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_sinks_and_caps_are_read_and_dropping_them_is_noticed(name, monkeypatch):
    """Layer 0 slides and layer 1 does not."""
    kinds = ["sliding_attention", "full_attention"]
    trial = probe.make_trial(draw_miniature(shrink(configure(name, **FEW, layer_types=kinds))))
    probe.check_full_cache(trial)
    windowed, run = transformers_port.attend_windowed, Layer.run_attention
    for layer, owner, attribute, dropping in (
        (0, transformers_port, "attend_windowed", lambda *given: windowed(*given[:5])),
        (1, Layer, "run_attention", lambda *given: run(*given[:5])),
    ):
        with monkeypatch.context() as patch, pytest.raises(Refused, match=f"eager attention .*from layer {layer} on"):
            patch.setattr(owner, attribute, dropping)
            probe.check_full_cache(trial)


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_every_right_type_is_admitted(name):
    verdict = probe_type(name)
    assert verdict.rotation_fault is None and verdict.graphs == (name not in MODULES)
    assert ((verdict.rerotation_fault is not None), verdict.joint_norm) == (name in LATE, name in JOINT)
    facts = ARCHITECTURES[name]
    assert (facts.graphs, facts.rerotation_fault is not None) == (name not in MODULES, name in LATE)
    assert facts.rotation_fault is None and facts.joint_norm == (name in JOINT)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(AT_ONCE)))
def test_every_wrong_type_is_refused(name):
    with pytest.raises(Refused, match=REFUSED[name]):
        probe_type(name)


def test_what_does_not_shrink_is_refused(monkeypatch):
    with pytest.raises(Refused, match="its configuration does not shrink to a miniature"):
        probe_type("qwen3_moe", num_hidden_layers=2, hidden_act="none such")
    monkeypatch.setattr(miniature, "MOST", 1000)
    with pytest.raises(Refused, match=r"does not shrink to a miniature \(the miniature has [\d,]+ weights\)"):
        probe_type("qwen3_moe", **FEW)


# Layers that attend within chunks, and heads that differ by layer


CHUNKED = dict(num_hidden_layers=2, no_rope_layers=[1, 0], intermediate_size=64, intermediate_size_mlp=64)


@cache
def make_chunked() -> torch.nn.Module:
    return draw_miniature(shrink(configure("llama4_text", **CHUNKED)))


def test_layers_that_attend_within_chunks_are_read():
    """Llama 4 has full layers without RoPE beside them, whose queries grow with the position."""
    small = make_chunked().config
    assert small.layer_types == ["chunked_attention", "full_attention"] and small.attention_chunk_size == 16
    verdict = probe.probe_miniature(make_chunked())
    assert verdict.rotation_fault is None and not verdict.graphs


@pytest.mark.parametrize(
    "change",
    [lambda given: given.pop("chunk"), lambda given: given.update(first=given["first"] + 1)],
    ids=["dropped", "shifted"],
)
def test_other_chunks_are_noticed(monkeypatch, change):
    attend = transformers_port.attend_windowed

    def attend_otherwise(*parts, **given):
        change(given)
        return attend(*parts, **given)

    monkeypatch.setattr(transformers_port, "attend_windowed", attend_otherwise)
    with pytest.raises(Refused, match="kvbench's full cache .* differs .* from layer 0 on"):
        probe.probe_miniature(make_chunked())


def test_a_batch_and_its_copy_answer_across_the_ends_of_chunks(kept, tmp_path, monkeypatch):
    model = make_chunked()
    monkeypatch.setattr(probe, "probe", lambda config: Probe("llama4_text", "complex numbers", graphs=False))
    texts = 3 + torch.cat([ids(42, seed) for seed in (0, 1)]) % 125
    expected = model.generate(texts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 42:]
    cache = kvbench.prefill(model, texts, block_size=9)
    cache.save(tmp_path / "saved")
    for each in (cache, kvbench.load_cache(tmp_path / "saved", model)):
        assert torch.equal(each.generate(8, stop=frozenset()), expected)


WIDE = dict(attention_k_eq_v=True, num_global_key_value_heads=2)


def test_heads_of_full_layers_differ_from_those_of_others():
    small = shrink(configure("gemma4_text", **WIDE))
    if not getattr(small, "is_heterogeneous", False):
        pytest.skip("this transformers states no fields of single layers")
    layout = read_config_layout(small)
    assert (layout.heads, layout.dim, layout.sliding) == (1, 64, (0, 1, 2)) and small.per_layer_config[0].head_dim == 32
    assert probe.probe_miniature(draw_miniature(small)) == Probe("gemma4_text", None, graphs=False)


def test_shared_rows_are_refused_although_the_type_is_tested():
    config = configure("gemma4_text", num_kv_shared_layers=10)
    assert not is_tested(config)
    with pytest.raises(Refused, match="10 layers .* that read the rows of earlier ones"):
        probe.probe(config)


TWO_WIDTHS = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2)


@cache
def make_two_widths() -> torch.nn.Module:
    """A MiMo-V2 without windows, whose keys are 32 numbers wide and its values 24."""
    return draw_miniature(shrink(configure("mimo_v2_flash", **TWO_WIDTHS)))


def test_values_may_have_another_width_than_keys():
    assert probe.probe_miniature(make_two_widths()) == Probe("mimo_v2_flash", None, graphs=False)
    layout = probe.make_trial(make_two_widths()).layout
    assert (layout.dim, layout.value_dim, layout.row_numbers) == (32, 24, 2 * (32 + 24))


def test_another_width_than_that_of_the_configuration_is_noticed():
    trial = probe.make_trial(make_two_widths())
    with pytest.raises(Refused, match=r"layer 0: it appends values \(1, 2, 96, 24\), expected \(1, 2, 96, 32\)"):
        probe.check_full_cache(replace(trial, layout=replace(trial.layout, value_width=None)))


@pytest.mark.parametrize("method", ["snapkv", "criticalkv", *map(only_in_full, ["dropkv", "andpro", "cake", "h2o"])])
def test_narrower_values_are_stored_cut_and_counted_as_they_are(method, kept):
    model, tokens = make_two_widths(), 40
    whole = kvbench.prefill(model, ids(tokens) % 128)
    torch.testing.assert_close(whole.logits[0], model(input_ids=ids(tokens) % 128).logits[0, -1], rtol=1e-3, atol=1e-3)
    row = 2 * 2 * (32 + 24) * 4  # bytes of a token in both layers
    context = whole.contexts[0]
    assert context.bytes().rows == context.full_bytes() == tokens * row
    cut = kvbench.prefill(model, ids(tokens) % 128, method, 20, 16)
    cut.generate(3, stop=frozenset())
    assert cut.contexts[0].bytes().rows % row == 0
    if method != "full":
        assert cut.contexts[0].bytes().rows <= 24 * row


def test_codecs_that_pack_are_refused_for_two_widths(kept):
    with pytest.raises(SettingError, match="^codec=kivi: it packs keys and values of one width, .* 32 and 24"):
        kvbench.prefill(make_two_widths(), ids(20) % 128, codec="kivi")


# A mistake in each check


def test_a_llama_passes_all_checks():
    assert probe.probe_miniature(make_trial().model) == Probe("llama", None, graphs=True)


def test_interleaved_pairs_are_noticed(monkeypatch):
    def rotate(rows, cos, sin):
        pairs = rows.unflatten(-1, (-1, 2))
        turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
        return rows * cos + turned * sin

    monkeypatch.setattr(transformers_port, "rotate", rotate)
    assert "in layer 0 keys that kvbench norms and rotates differ" in probe.find_rotation_faults(make_trial())[0]


def test_a_cut_that_comes_a_layer_late_is_noticed(monkeypatch):
    waiting, cut = [], Layer.cut

    def cut_late(*given):
        waiting.append(given)
        if len(waiting) > 1:
            cut(*waiting.pop(0))

    monkeypatch.setattr(Layer, "cut", cut_late)
    with pytest.raises(Refused, match=r"layer 1: heads hold \[96, 96, 96\] rows after a cut to 28"):
        probe.check_cuts(make_trial())


def test_rows_of_another_head_are_noticed(monkeypatch):
    """The heads of a cut cache are compared, whose full cache would not tell."""
    take_rows = probe.show_rows

    def flip_heads(held, seen, start, stop):
        take_rows(held, seen, start, stop)
        for layer in seen:
            seen[layer] = seen[layer].flip(0)

    monkeypatch.setattr(probe, "show_rows", flip_heads)
    with pytest.raises(Refused, match="a cut cache in one block differs"):
        probe.check_cuts(make_trial())


def test_another_order_of_heads_is_noticed(monkeypatch):
    append = Layer.append
    monkeypatch.setattr(Layer, "append", lambda layer, keys, values: append(layer, keys.flip(1), values.flip(1)))
    with pytest.raises(Refused, match="kvbench's full cache in one block differs"):
        probe.check_full_cache(make_trial())


def test_an_answer_that_is_not_forgotten_is_noticed(monkeypatch):
    monkeypatch.setattr(Layer, "restore", lambda layer, snapshot: None)
    with pytest.raises(Refused, match="kvbench's full cache after an answer was forgotten differs"):
        probe.check_full_cache(make_trial())


def test_a_wrong_cache_of_transformers_is_noticed(monkeypatch):
    update = DynamicLayer.update

    def shift(layer, *given, **more):
        keys, values = update(layer, *given, **more)
        return keys, values.roll(1, 2)

    monkeypatch.setattr(DynamicLayer, "update", shift)
    with pytest.raises(Refused, match="transformers' own cache differs"):
        probe.check_cached_reading(make_trial())


def test_other_shapes_and_a_second_attention_are_noticed(monkeypatch):
    trial = make_trial()
    with pytest.raises(Refused, match=r"layer 0: it appends keys \(1, 3, 96, 8\), expected \(1, 6, 96, 8\)"):
        probe.check_full_cache(replace(trial, layout=replace(trial.layout, heads=6)))
    with pytest.raises(Refused, match=r"layer 0: W_o is \(48, 48\), expected \(50, 48\)"):
        probe.check_full_cache(replace(trial, layout=replace(trial.layout, hidden=50)))
    attend = probe.WatchedLayer.attend

    def attend_twice(layer, *given):
        layer.attended += 1
        return attend(layer, *given)

    monkeypatch.setattr(probe.WatchedLayer, "attend", attend_twice)
    with pytest.raises(Refused, match="layer 0: it appends 1 times and attends 2 times to a block, expected once"):
        probe.check_full_cache(trial)


@pytest.mark.parametrize("name, part", [("granite_swa", "sinks"), ("gemma2", "cap"), ("gemma2", "logit_cap")])
def test_a_step_has_sinks_and_caps(name, part, monkeypatch):
    """Without one of them it is noticed."""
    trial = probe.make_trial(draw_miniature(shrink(configure(name, **FEW))))
    assert probe.matches_step(trial)
    collect = probe.collect_plain_weights

    def drop(*given):
        weights = collect(*given)
        if part == "logit_cap":
            return replace(weights, logit_cap=None)
        parts = [block.attention for block in weights.blocks]
        assert all(getattr(attention.extras, part) is not None for attention in parts)
        blocks = zip(weights.blocks, parts, strict=True)
        plain = tuple(replace(block, attention=replace(attention, extras=None)) for block, attention in blocks)
        return replace(weights, blocks=plain)

    monkeypatch.setattr(probe, "collect_plain_weights", drop)
    assert not probe.matches_step(trial)


def test_another_step_is_noticed(monkeypatch):
    collect = probe.collect_plain_weights
    assert probe.matches_step(make_trial())
    monkeypatch.setattr(probe, "collect_plain_weights", lambda *given: replace(collect(*given), embed_scale=1.01))
    assert not probe.matches_step(make_trial())


# What a verdict does


def test_a_probe_leaves_no_trace():
    before = torch.random.get_rng_state(), torch.get_default_dtype(), set(ALL_ATTENTION_FUNCTIONS.keys())
    probe.probe_miniature(draw_miniature(make_trial().model.config, seed=1))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and torch.get_default_dtype() == before[1]
    assert set(ALL_ATTENTION_FUNCTIONS.keys()) - {transformers_port.NAME} == before[2] - {transformers_port.NAME}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "CACHE", tmp_path)
    monkeypatch.setattr(admission, "VERDICTS", {})
    return tmp_path / "probes"


def test_a_probe_prints_nothing_of_transformers(monkeypatch):
    """Jamba says while it reads which packages would make it faster, and a refusal is one line."""
    run, levels = probe.run, set()
    before = logging.get_verbosity()

    def listen(*given: object) -> torch.Tensor:
        levels.add(logging.get_verbosity())
        return run(*given)

    monkeypatch.setattr(probe, "run", listen)
    logging.set_verbosity_warning()
    try:
        probe_type("seed_oss", **FEW)
        assert levels == {logging.ERROR} and logging.get_verbosity() == logging.WARNING
    finally:
        logging.set_verbosity(before)


def test_a_verdict_is_kept(kept, monkeypatch):
    config, verdict = configure("qwen3_moe", **FEW), Probe("qwen3_moe", None, graphs=False)
    monkeypatch.setattr(probe, "probe", lambda config: verdict)
    assert probe_architecture(config) == verdict
    [file] = kept.iterdir()
    monkeypatch.setattr(probe, "probe", None)  # nobody asks for it again
    for _ in range(2):
        assert probe_architecture(config) == verdict
        admission.VERDICTS.clear()
    assert json.loads(file.read_text())["architecture"] == "qwen3_moe"


def test_a_refusal_is_kept(kept, monkeypatch):
    config = configure("mamba")
    for _ in range(2):
        with pytest.raises(SettingError, match="^model: architecture mamba is not supported: it has no attention"):
            probe_architecture(config)
        monkeypatch.setattr(probe, "probe", None)
        admission.VERDICTS.clear()


def test_names_do_not_change_the_key_and_numbers_do():
    one, other = configure("qwen3_moe", **FEW), configure("qwen3_moe", **FEW)
    other.name_or_path, other.architectures, other.dtype = "elsewhere", ["Some"], torch.bfloat16
    assert make_key(one) == make_key(other)
    other.rms_norm_eps = 1e-3
    assert make_key(one) != make_key(other)


def test_a_change_of_whatever_probes_changes_the_key(monkeypatch):
    """Verdicts are kept, so one of older sources must not be found again."""
    hashed = []
    monkeypatch.setattr(admission, "content_hash", lambda file: hashed.append(file) or "")
    admission.hash_sources.__wrapped__()
    beside = "kvbench", "kvbench.config", "kvbench.validation"  # names, paths and messages
    modules = [module for module in follow_imports(["kvbench.models.probe"]) if module not in beside]
    assert {file for module in modules for file in list_files(module) if file.suffix == ".py"} <= set(hashed)


def check_policy(method: Method, codec: str, verdict: Probe | None) -> None:
    layout = replace(make_trial().layout, rotation_fault=None if verdict is None else verdict.rotation_fault)
    CachePolicy(method, Allocator("uniform"), Packed(codec) if codec == "packed" else Codec(codec)).check(layout)


class Rotating(Method):
    takes_rotation = True


class Packed(Codec):
    packing = Packing(takes_unrotated_keys=True)


def test_what_rotates_keys_is_refused_where_rotations_differ():
    fault = Probe("cohere2", "in layer 3 keys differ", graphs=False)
    check_policy(Method("full"), "raw", fault)
    with pytest.raises(SettingError, match="^method=rotating: it rotates keys, .*: in layer 3 keys differ"):
        check_policy(Rotating("rotating"), "raw", fault)
    with pytest.raises(SettingError, match="^codec=packed: it stores keys before rotation, .* in layer 3 keys differ"):
        check_policy(Method("full"), "packed", fault)
    for verdict in (None, replace(fault, rotation_fault=None)):
        check_policy(Rotating("rotating"), "packed", verdict)


class Asking(Method):
    """Rotates without saying so."""

    def update(self, observation, rows, state):
        observation.rotation(rows.places[0])
        return {}


def test_rotations_are_refused_at_run_time_too(kept, monkeypatch):
    monkeypatch.delitem(layouts.ARCHITECTURES, "cohere2")
    monkeypatch.setattr(probe, "probe", lambda config: Probe("cohere2", "in layer 3 keys differ", graphs=False))
    model = make_random_model(shrink(configure("cohere2", **FEW)), torch.float32, "cpu", 0)
    assert read_layout(model).rotation_fault == "in layer 3 keys differ"
    context = PromptContext(
        model, choose_cache(Asking("rotating"), Allocator("uniform"), Codec("raw")), Budget(1.0), None, (0,)
    )
    with pytest.raises(SettingError, match="^model: kvbench cannot rotate its keys: in layer 3 keys differ"):
        context.prefill(ids(20) % 100)


def test_a_model_that_was_not_admitted_has_no_layout(monkeypatch):
    monkeypatch.delitem(layouts.ARCHITECTURES, "qwen3_moe")
    model = draw_miniature(shrink(configure("qwen3_moe", **FEW)))
    with pytest.raises(SettingError, match="architecture qwen3_moe is not on the tested list"):
        read_layout(model)
    with pytest.raises(SettingError, match="LlamaForCausalLM is no causal language model of transformers"):
        other = draw_miniature(make_trial().model.config)
        other.config = model.config
        admit_model(other)


def test_law_1_is_repeated_with_loaded_weights(monkeypatch):
    assert check_full_cache(tiny("llama"), distinct(150)) < 1e-4
    append = Layer.append
    monkeypatch.setattr(
        Layer, "append", lambda layer, keys, values, inputs: append(layer, keys.flip(1), values, inputs)
    )
    with pytest.raises(SettingError, match="the full cache's logits differ by .* over 150 tokens"):
        check_full_cache(tiny("llama"), distinct(150))
