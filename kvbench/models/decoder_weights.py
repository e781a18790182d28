"""The weights of a plain decoder, for steps without its modules."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.models.configuration import LENGTH_DEPENDENT_ROPE, read_rope_settings
from kvbench.models.transformers_port import make_rotation, read_layout

GRAPH_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)  # see `collect_weights`


@dataclass(frozen=True)
class Block:
    """Weights of one decoder layer of a Llama-like model, the modules' own."""

    norms: tuple[Tensor, Tensor]  # in front of attention and of the MLP, (hidden,)
    project: tuple[Tensor, Tensor, Tensor]  # to queries, keys, values
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    head_norms: tuple[Tensor, Tensor] | None  # QK norm, (d,)
    output: Tensor  # W_o
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """What a decoded token passes through in a Llama-like model, the modules' own tensors."""

    embed: Tensor  # (vocab, hidden)
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Tensor  # (vocab, hidden)
    epsilon: float  # of all norms
    scaling: float  # of the logits of attention
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]


def collect_weights(model: torch.nn.Module) -> DecoderWeights | None:
    """The weights of a model whose decoder layers do just what `Block` says; None for another."""
    if (
        type(model).__name__ not in GRAPH_ARCHITECTURES
        or read_layout(model).sliding
        or read_layout(model).window is not None
    ):
        return None
    if (
        read_rope_settings(model.config).get("rope_type") in LENGTH_DEPENDENT_ROPE
    ):  # all places of an answer are turned at once
        return None
    inner, linear = model.model, torch.nn.Linear
    layers = [(layer.self_attn, layer.mlp, layer) for layer in inner.layers]
    products = [
        (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for own, mlp, _ in layers
    ]
    flat = [product for some in products for product in some] + [model.lm_head]
    one_place = len({parameter.device for parameter in model.parameters()}) == 1
    if not one_place or any(type(product) is not linear for product in flat):  # quantised, adapted, spread
        return None
    plain = all(type(own) is torch.nn.Parameter and own.is_contiguous() for own in model.parameters())
    if not plain or len({own.dtype for own in model.parameters()}) > 1:  # quantised in place; kernels read rows
        return None
    if any(product.bias is not None for some in products for product in some[3:]) or model.lm_head.bias is not None:
        return None
    if any(getattr(mlp.act_fn, "__class__", None).__name__ not in ("SiLU", "SiLUActivation") for _, mlp, _ in layers):
        return None
    blocks = tuple(
        Block(
            (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
            tuple(product.weight for product in some[:3]),
            tuple(product.bias for product in some[:3]),
            (own.q_norm.weight, own.k_norm.weight) if hasattr(own, "q_norm") else None,
            *(product.weight for product in some[3:]),
        )
        for some, (own, _, layer) in zip(products, layers, strict=True)
    )
    scaling = getattr(layers[0][0], "scaling", read_layout(model).dim ** -0.5)
    epsilon = model.config.rms_norm_eps
    turn = make_rotation(model, "full_attention")
    return DecoderWeights(
        inner.embed_tokens.weight, blocks, inner.norm.weight, model.lm_head.weight, epsilon, scaling, turn
    )
