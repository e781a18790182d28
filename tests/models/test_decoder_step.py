"""kvbench's own step, which CUDA graphs are captured of, against the logits of transformers' eager attention.

Each family is read with the settings that its checkpoints use, and each part of the step is left out once: the logits
then differ.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvbench.models import decoder_weights
from kvbench.models.decoder_parts import Around, Block, LayerNorm, RmsNorm
from kvbench.models.decoder_weights import DecoderWeights, collect_plain_weights, collect_weights, read_weights
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.part_reader import PartReader, UnknownPart
from kvbench.models.probe import STEPS, TOLERANCE, Trial, make_trial, measure, run_step

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
UNSCALED_QUERIES = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 512}
UNCAPPED = dict(final_logit_softcapping=None, attn_logit_softcapping=None)
MULTIPLIERS = dict(residual_multiplier=0.3, embedding_multiplier=12.0, attention_multiplier=0.2, logits_scaling=4.0)
CASES: dict[str, tuple[str, dict[str, object]]] = {  # a type and what its default configuration does not switch on
    "llama, biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, relu": ("llama", dict(hidden_act="relu")),
    "llama, exact gelu": ("llama", dict(hidden_act="gelu")),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "seed_oss": ("seed_oss", {}),
    "ministral": ("ministral", dict(head_dim=128, rope_parameters=PLAIN_ROPE)),
    "ministral3": ("ministral3", dict(rope_parameters=PLAIN_ROPE | UNSCALED_QUERIES)),
    "cwm": ("cwm", {}),
    "phi4_multimodal": ("phi4_multimodal", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", UNCAPPED),
    "gemma3": ("gemma3_text", {}),
    "vaultgemma": ("vaultgemma", UNCAPPED),
    "granite": ("granite", MULTIPLIERS),
    "hyperclovax": ("hyperclovax", MULTIPLIERS),
    "hyperclovax, post-norms": ("hyperclovax", MULTIPLIERS | dict(use_post_norm=True)),
    "olmo": ("olmo", dict(clip_qkv=0.5)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "exaone4": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 32)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1] * 36)),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, no biases": ("starcoder2", dict(use_bias=False)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True)),
    "stablelm, QK norm, parallel": ("stablelm", dict(qk_layernorm=True, use_parallel_residual=True)),
    "phi": ("phi", {}),
    "nemotron": ("nemotron", dict(num_key_value_heads=8)),
    "arcee": ("arcee", {}),
    "jais2": ("jais2", {}),
    "apertus": ("apertus", {}),
    "bitnet": ("bitnet", {}),
    "afmoe, dense": ("afmoe", dict(num_dense_layers=32, layer_types=["sliding_attention"] * 32, mup_enabled=True)),
}
AT_ONCE = (  # together they have each part of the step
    *("gemma2", "hyperclovax, post-norms", "olmo", "olmo2", "starcoder2", "stablelm, QK norm, parallel"),
    *("apertus", "bitnet", "afmoe, dense"),
)


@cache
def draw_trial(case: str) -> Trial:
    name, settings = CASES[case]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return make_trial(draw_miniature(shrink(CONFIG_MAPPING[name](**settings))))


@torch.no_grad()
def find_error(trial: Trial, change: Callable[[DecoderWeights], DecoderWeights] = lambda weights: weights) -> float:
    """The largest difference of the step's logits as a part of their spread."""
    weights = change(read_weights(trial.model, trial.layout))
    return measure(run_step(weights, trial.layout, trial.ids[:, :STEPS]), trial.truth.logits[:, :STEPS])


@pytest.mark.parametrize("case", AT_ONCE)
def test_the_step_computes_the_logits(case):
    assert find_error(draw_trial(case)) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case not in AT_ONCE])
def test_the_step_computes_the_logits_of_every_family(case):
    assert find_error(draw_trial(case)) <= TOLERANCE


# A mistake in each part


def change_blocks(**changes: Callable[[Block], Any]) -> Callable[[DecoderWeights], DecoderWeights]:
    """Return what replaces fields of each block by what functions make of it."""

    def change(weights: DecoderWeights) -> DecoderWeights:
        blocks = (replace(block, **{name: make(block) for name, make in changes.items()}) for block in weights.blocks)
        return replace(weights, blocks=tuple(blocks))

    return change


def change_attention(**fields: object) -> Callable[[DecoderWeights], DecoderWeights]:
    return change_blocks(attention=lambda block: replace(block.attention, **fields))


MISTAKES: dict[str, tuple[str, Callable[[DecoderWeights], DecoderWeights]]] = {
    "the residual's factor": ("granite", change_blocks(factor=lambda block: None)),
    "the embeddings' factor": ("granite", lambda weights: replace(weights, embed_scale=None)),
    "the logits' factor": ("granite", lambda weights: replace(weights, logit_factor=None)),
    "a logits' factor turned around": (
        "hyperclovax, post-norms",
        lambda weights: replace(weights, logit_factor=1 / weights.logit_factor),
    ),
    "mup": ("afmoe, dense", lambda weights: replace(weights, embed_scale=None)),
    "the order of norms": (
        "gemma2",
        change_blocks(
            around_mlp=lambda block: replace(
                block.around_mlp, before=block.around_mlp.after, after=block.around_mlp.before
            )
        ),
    ),
    "norms before in place of behind": (
        "olmo2",
        change_blocks(around_mlp=lambda block: Around(block.around_mlp.after)),
    ),
    "a post-norm": (
        "afmoe, dense",
        change_blocks(around_attention=lambda block: Around(block.around_attention.before)),
    ),
    "a QK norm over all heads": ("olmo2", change_attention(projected_norms=None)),
    "a QK norm of each head": ("stablelm, QK norm, parallel", change_attention(projected_norms=None)),
    "the parallel residual": (
        "stablelm, QK norm, parallel",
        change_blocks(parallel=lambda block: False, around_mlp=lambda block: block.around_attention),
    ),
    "the clip": ("olmo", change_attention(clip=None)),
    "the gate": ("afmoe, dense", change_attention(gate=None)),
    "a norm before W_o": ("bitnet", change_attention(norm=None)),
    "a norm before the last product": ("bitnet", change_blocks(mlp=lambda block: replace(block.mlp, norm=None))),
    "an activation": ("apertus", change_blocks(mlp=lambda block: replace(block.mlp, activation=torch.relu))),
    "a bias": (
        "starcoder2",
        change_blocks(mlp=lambda block: replace(block.mlp, down=replace(block.mlp.down, bias=None))),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_part_is_noticed(mistake):
    case, change = MISTAKES[mistake]
    assert find_error(draw_trial(case), change) > 10 * TOLERANCE


# What modules are


def make_norms(dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    norms = {
        "llama": LlamaRMSNorm(96, 1e-6),
        "olmo2": Olmo2RMSNorm(96, 1e-6),
        "gemma": Gemma3RMSNorm(96, 1e-6),
        "olmo": OlmoLayerNorm(96),
        "layer": torch.nn.LayerNorm(96, 1e-5),
        "layer, no bias": torch.nn.LayerNorm(96, 1e-5, bias=False),
        "nemotron": NemotronLayerNorm1P(96, 1e-5),
        "cohere": CohereLayerNorm(96, 1e-5),
    }
    generator = torch.Generator().manual_seed(3)
    for norm in norms.values():
        for part in norm.parameters():
            part.data += 0.3 * torch.randn(part.shape, generator=generator)
    return {name: norm.to(dtype).requires_grad_(False) for name, norm in norms.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_read_by_what_they_compute(dtype):
    """Also by how they round: Llama's is rounded before the weight, Gemma's behind it."""
    reader = PartReader(torch.empty(0, dtype=dtype))
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
    for name, module in make_norms(dtype).items():
        norm = reader.norm(module, 96)
        given, expected = norm.apply(x, None, "reference"), module(x)
        assert isinstance(norm, RmsNorm if name in ("llama", "olmo2", "gemma") else LayerNorm)
        bound = 2e-6 if dtype == torch.float32 else 2e-5  # of the mean: hardly an element is rounded to its neighbour
        assert float((given - expected).abs().double().mean() / expected.abs().double().mean()) < bound, name


@torch.no_grad()
def test_norms_that_the_step_does_not_compute_are_unknown():
    reader = PartReader(torch.empty(0))
    norm = LlamaRMSNorm(96, 1e-6)
    norm.forward = lambda x: LlamaRMSNorm.forward(norm, x) * 1.01
    with pytest.raises(UnknownPart, match="LlamaRMSNorm is no norm that the step computes"):
        reader.norm(norm, 96)
    other = LlamaRMSNorm(96, 1e-3)
    other.variance_epsilon = 1e-6
    other.forward = lambda x: torch.nn.functional.rms_norm(x, (96,), eps=1e-3)
    with pytest.raises(UnknownPart):
        PartReader(torch.empty(0)).norm(other, 96)
    with pytest.raises(UnknownPart, match="weights of another shape than 48"):
        reader.norm(norm, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_norm_of_each_head_is_read(dtype):
    module = CohereLayerNorm((3, 16), 1e-5).to(dtype)
    module.weight += 0.3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(4)).to(dtype)
    norm = PartReader(torch.empty(0, dtype=dtype)).head_layer_norm(module, 3, 16)
    assert torch.allclose(norm.apply(x, None, None), module(x.unflatten(-1, (3, 16))).flatten(-2), rtol=1e-5)
    with pytest.raises(UnknownPart, match="CohereLayerNorm as QK norm"):
        PartReader(x).head_layer_norm(module, 2, 24)


def make_llama_trial() -> Trial:
    config = CONFIG_MAPPING["llama"](
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    return make_trial(draw_miniature(config))


def add_parameter(layer: torch.nn.Module) -> None:
    layer.self_attn.temperatures = torch.nn.Parameter(torch.ones(4))


def add_module(layer: torch.nn.Module) -> None:
    layer.self_attn.temperature = torch.nn.Softplus()


def add_norm(layer: torch.nn.Module) -> None:
    layer.third_norm = LlamaRMSNorm(64)


def add_factor(layer: torch.nn.Module) -> None:
    layer.mlp.gain = 0.7


def add_bias(layer: torch.nn.Module) -> None:
    layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(len(layer.self_attn.k_proj.weight)))


def wrap_linear(layer: torch.nn.Module) -> None:
    layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)


def widen_heads(layer: torch.nn.Module) -> None:
    layer.self_attn.q_proj = torch.nn.Linear(64, 128, bias=False)


def add_buffer(layer: torch.nn.Module) -> None:
    layer.register_buffer("layer_scalar", torch.ones(1))


UNKNOWN = {
    add_parameter: "LlamaAttention with temperatures",
    add_module: "self_attn.temperature",
    add_norm: "third_norm",
    add_factor: "gain=0.7",
    add_bias: "biases of some projections",
    wrap_linear: "Sequential in place of a linear layer",
    widen_heads: "projects to other heads",
    add_buffer: "LlamaDecoderLayer",
}


@pytest.mark.parametrize("change", UNKNOWN, ids=lambda change: change.__name__)
def test_a_layer_with_another_part_is_left_to_the_modules(change):
    trial = make_llama_trial()
    assert collect_plain_weights(trial.model, trial.layout) is not None
    change(trial.model.model.layers[1])
    with pytest.raises(UnknownPart, match=UNKNOWN[change]):
        read_weights(trial.model, trial.layout)
    assert collect_plain_weights(trial.model, trial.layout) is None


OTHER_MODELS: dict[str, tuple[Callable[[torch.nn.Module], None], str]] = {
    "two factors of logits": (lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5), "of their own"),
    "no factor": (lambda model: [delattr(layer.self_attn, "scaling") for layer in model.model.layers], "of their own"),
    "a projection": (lambda model: setattr(model.model, "project_out", torch.nn.Linear(4, 4)), "with .*project_out"),
    "no output layer": (lambda model: delattr(model, "lm_head"), "NoneType in place of a linear layer"),
    "no last norm": (lambda model: delattr(model.model, "norm"), "LlamaModel with embed_tokens, layers"),
    "another factor": (lambda model: setattr(model, "temperature", 0.7), "temperature=0.7"),
}


@pytest.mark.parametrize("part", OTHER_MODELS)
def test_a_model_with_another_part_is_left_to_the_modules(part):
    trial = make_llama_trial()
    change, match = OTHER_MODELS[part]
    change(trial.model)
    with pytest.raises(UnknownPart, match=match):
        read_weights(trial.model, trial.layout)


def test_settings_that_no_module_shows_are_left_to_the_modules():
    trial = draw_trial("gemma2")
    config, other = trial.model.config, trial.model.config.to_dict()
    trial.model.config = type(config).from_dict(other | {"logits_scaling": 2.0})
    assert collect_plain_weights(trial.model, trial.layout) is None
    trial.model.config = config
    assert collect_plain_weights(trial.model, trial.layout) is not None


def test_weights_are_collected_again_only_after_a_change(monkeypatch):
    """The collected weights do not keep the model alive, and what is derived from a parameter follows it."""
    model = draw_miniature(shrink(CONFIG_MAPPING["gemma"]()))  # its norms are 1 + weight
    first, reads = collect_weights(model), []
    monkeypatch.setattr(decoder_weights, "read_weights", lambda *given: reads.append(given) or read_weights(*given))
    again = collect_weights(model)
    assert not reads and again.blocks is first.blocks and len(again.rotations) == len(first.rotations)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    changed = collect_weights(model)
    assert len(reads) == 1 and torch.equal(changed.norm.weight, first.norm.weight + 1)
    alive = weakref.ref(model)
    del model, first, again, changed, reads[:]
    gc.collect()
    assert alive() is None
