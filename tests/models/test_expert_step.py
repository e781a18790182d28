"""Mixtures of experts in kvbench's own step, against the logits of transformers' eager attention.

Each part of a mixture is left out or exchanged once: the logits then differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbench.kernels.experts import MOST_TOKENS
from kvbench.models import expert_reader
from kvbench.models.decoder_parts import Linear
from kvbench.models.decoder_weights import DecoderWeights, collect_plain_weights, read_weights
from kvbench.models.expert_parts import Mixture
from kvbench.models.expert_reader import read_mixture
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.part_reader import PartReader, UnknownPart
from kvbench.models.probe import STEPS, TOLERANCE, Trial, make_trial, measure, run_step

CASES: dict[str, tuple[str, dict[str, object]]] = {  # a type and what its default configuration does not switch on
    "qwen3_moe": ("qwen3_moe", dict(norm_topk_prob=True)),
    "qwen3_moe, not normalised, some layers dense": ("qwen3_moe", dict(decoder_sparse_step=2, mlp_only_layers=[3])),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", dict(residual_multiplier=0.3, embedding_multiplier=12.0)),
    "granitemoeshared": ("granitemoeshared", dict(shared_intermediate_size=48, logits_scaling=6.0)),
    "glm4_moe": ("glm4_moe", dict(n_group=2, topk_group=1, routed_scaling_factor=2.5)),
    "dots1": ("dots1", dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, norm_topk_prob=True)),
    "minimax_m2": ("minimax_m2", {}),
    "hy_v3": ("hy_v3", {}),
    "mellum": ("mellum", {}),
    "solar_open": ("solar_open", {}),
    "aria_text": ("aria_text", {}),
    "phimoe": ("phimoe", dict(router_jitter_noise=0.2)),
    "laguna": ("laguna", dict(moe_routed_scaling_factor=2.5)),
    "flex_olmo": ("flex_olmo", {}),
    "gpt_oss": ("gpt_oss", {}),
    "granitemoe_swa": ("granitemoe_swa", {}),
    "exaone_moe": ("exaone_moe", dict(n_group=2, topk_group=1, routed_scaling_factor=2.5)),
    "afmoe": ("afmoe", dict(route_norm=False, route_scale=2.5)),
    "cohere2_moe": ("cohere2_moe", dict(num_shared_experts=2, shared_expert_combination_strategy="sum")),
    "cohere2_moe, by sigmoid": ("cohere2_moe", dict(expert_selection_fn="sigmoid")),
    "ernie4_5_moe, some layers dense": ("ernie4_5_moe", dict(moe_layer_interval=2)),
}
AT_ONCE = ("qwen2_moe", "granitemoeshared", "glm4_moe", "aria_text", "phimoe")  # together they have each part


def correct(model: torch.nn.Module) -> torch.nn.Module:
    """Make the corrections of scores, which are 0 in a new model, large enough to change which experts are chosen."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith(expert_reader.CORRECTIONS):
            tensor.data = torch.rand(tensor.shape, generator=generator)
    return model


@cache
def draw_trial(case: str) -> Trial:
    name, settings = CASES[case]
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return make_trial(correct(draw_miniature(shrink(CONFIG_MAPPING[name](**settings)))))


@torch.no_grad()
def find_error(trial: Trial, change: Callable[[DecoderWeights], DecoderWeights] = lambda weights: weights) -> float:
    """The largest difference of the step's logits as a part of their spread."""
    weights = change(read_weights(trial.model, trial.layout))
    assert any(isinstance(block.mlp, Mixture) for block in weights.blocks)
    return measure(run_step(weights, trial.layout, trial.ids[:, :STEPS]), trial.truth.logits[:, :STEPS])


@pytest.mark.parametrize("case", AT_ONCE)
def test_the_step_computes_the_logits(case):
    assert find_error(draw_trial(case)) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case not in AT_ONCE])
def test_the_step_computes_the_logits_of_every_family(case):
    assert find_error(draw_trial(case)) <= TOLERANCE


# A mistake in each part


def change_mixtures(change: Callable[[Mixture], Mixture]) -> Callable[[DecoderWeights], DecoderWeights]:
    def apply(weights: DecoderWeights) -> DecoderWeights:
        mlps = [change(block.mlp) if isinstance(block.mlp, Mixture) else block.mlp for block in weights.blocks]
        blocks = [replace(block, mlp=mlp) for block, mlp in zip(weights.blocks, mlps, strict=True)]
        return replace(weights, blocks=tuple(blocks))

    return apply


def change_routing(**fields: object) -> Callable[[DecoderWeights], DecoderWeights]:
    return change_mixtures(lambda mixture: replace(mixture, routing=replace(mixture.routing, **fields)))


def exchange(linear: Linear) -> Linear:
    """Exchange gate and up."""
    return replace(linear, weight=torch.cat(linear.weight.chunk(2, 1)[::-1], 1))


MISTAKES: dict[str, tuple[str, Callable[[DecoderWeights], DecoderWeights]]] = {
    "shares are normalised": ("qwen2_moe", change_routing(normalized=True)),
    "shares are not normalised": ("glm4_moe", change_routing(normalized=False)),
    "shares have no factor": ("glm4_moe", change_routing(factor=1.0)),
    "groups": ("glm4_moe", change_routing(groups=1, kept_groups=1)),
    "other scores": ("glm4_moe", change_routing(scores="softmax")),
    "sparsemixer": ("phimoe", change_routing(scores="softmax")),
    "its distance": ("phimoe", change_routing(jitter=0.01)),
    "one expert less": ("aria_text", change_routing(count=1)),
    "the correction": ("glm4_moe", change_mixtures(lambda mixture: replace(mixture, correction=None))),
    "the shared expert": ("granitemoeshared", change_mixtures(lambda mixture: replace(mixture, shared=None))),
    "its gate": (
        "qwen2_moe",
        change_mixtures(lambda mixture: replace(mixture, shared=replace(mixture.shared, gate=None))),
    ),
    "gate and up": (
        "aria_text",
        change_mixtures(
            lambda mixture: replace(
                mixture, experts=replace(mixture.experts, gate_up=exchange(mixture.experts.gate_up))
            )
        ),
    ),
    "the activation": (
        "qwen2_moe",
        change_mixtures(lambda mixture: replace(mixture, experts=replace(mixture.experts, activation="gelu_tanh"))),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_part_counts(mistake):
    case, change = MISTAKES[mistake]
    assert find_error(draw_trial(case), change) > 10 * TOLERANCE


# What is read


@torch.no_grad()
def draw_gpt_oss() -> torch.nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = CONFIG_MAPPING["gpt_oss"](hidden_size=24, intermediate_size=24, num_local_experts=8, num_experts_per_tok=3)
    block = GptOssMLP(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.8)
    return block.double()


@torch.no_grad()
def test_experts_of_gpt_oss_are_read():
    """Transposed weights of as many inputs as outputs, interleaved, with biases, and a gate that is clamped."""
    block = draw_gpt_oss()
    x = 3 * torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mixture = read_mixture(PartReader(x), block)
    expected = block(x)[0][0]
    torch.testing.assert_close(mixture(x[0], None, x[0], None), expected + x[0], rtol=1e-6, atol=1e-6)
    assert mixture.experts.interleaved and mixture.experts.activation == "clamped"
    weight = mixture.experts.gate_up.weight
    assert weight.data_ptr() == block.experts.gate_up_proj.data_ptr() and weight.stride(1) == 1


def test_an_unknown_part_is_refused():
    x = torch.zeros(1, dtype=torch.float64)
    changes: list[Callable[[torch.nn.Module], object]] = [
        lambda block: setattr(block.experts, "limit", 5.0),
        lambda block: block.experts.register_buffer("scale", torch.ones(1)),
        lambda block: block.router.register_parameter("temperature", torch.nn.Parameter(torch.ones(1))),
        lambda block: block.register_module("norm", torch.nn.LayerNorm(24)),
        lambda block: setattr(block.router, "forward", lambda x: (x, -x[:, :3], x[:, :3].argsort(-1))),
        lambda block: block.register_forward_hook(lambda block, inputs, outputs: (2 * outputs[0], outputs[1])),
    ]
    for change in changes:
        block = draw_gpt_oss()
        change(block)
        with pytest.raises(UnknownPart):
            read_mixture(PartReader(x), block)


@pytest.mark.full
def test_the_mean_of_experts_and_shared_experts_is_refused():
    if "cohere2_moe" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no cohere2_moe")
    model = draw_miniature(shrink(CONFIG_MAPPING["cohere2_moe"](num_shared_experts=1)))
    trial = make_trial(model)
    with pytest.raises(UnknownPart, match="computes something else than router, experts and shared expert"):
        read_weights(trial.model, trial.layout)


def test_long_blocks_are_left_to_the_modules():
    weights = collect_plain_weights(draw_trial("aria_text").model, draw_trial("aria_text").layout)
    assert weights is not None and weights.longest_block == MOST_TOKENS
    dense = change_mixtures(lambda mixture: mixture.shared.mlp)(weights)
    assert dense.longest_block is None
