"""Collect the weights of a plain decoder, so that a step can run without the model's modules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """The weights of one decoder layer of a Llama-like model. The tensors are those of the modules."""

    norms: tuple[Tensor, Tensor]
    """The norms before attention and before the MLP, (hidden,) each."""
    project: tuple[Tensor, Tensor, Tensor]
    """The projections to queries, keys and values."""
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    """Their biases."""
    head_norms: tuple[Tensor, Tensor] | None
    """The QK norm of queries and of keys, (d,) each."""
    output: Tensor
    """The output projection W_o of attention."""
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All weights that decoding a token needs in a Llama-like model. The tensors are those of the modules."""

    embed: Tensor
    """(vocab, hidden)"""
    blocks: tuple[Block, ...]
    """The weights of each layer."""
    norm: Tensor
    """The last norm, (hidden,)."""
    head: Tensor
    """(vocab, hidden)"""
    epsilon: float
    """The ε of all norms."""
    scaling: float
    """The factor of the logits of attention."""
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The rotary embedding: positions (B, n) -> cos, sin."""


def collect_weights(model: Any) -> DecoderWeights | None:
    """Return the weights of a model whose decoder layers compute exactly what `forward_step` computes, or None.

    See `kvbench.engine.graph_decoding.forward_step`.
    """
    if (
        type(model).__name__ not in GRAPH_ARCHITECTURES
        or read_layout(model).sliding
        or read_layout(model).window is not None
    ):
        return None
    # the rotations of a whole answer are computed at once, so the frequencies must not change with its length
    if read_rope_settings(model.config).get("rope_type") in LENGTH_DEPENDENT_ROPE:
        return None
    inner, linear = model.model, torch.nn.Linear
    layers = [(layer.self_attn, layer.mlp, layer) for layer in inner.layers]
    products = [
        (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for own, mlp, _ in layers
    ]
    flat = [product for some in products for product in some] + [model.lm_head]
    one_place = len({parameter.device for parameter in model.parameters()}) == 1
    if not one_place or any(
        type(product) is not linear for product in flat
    ):  # quantised, with an adapter, or on several GPUs
        return None
    plain = all(type(own) is torch.nn.Parameter and own.is_contiguous() for own in model.parameters())
    if not plain or len({own.dtype for own in model.parameters()}) > 1:  # quantised in place, or not contiguous
        return None
    if any(product.bias is not None for some in products for product in some[3:]) or model.lm_head.bias is not None:
        return None
    if any(type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation") for _, mlp, _ in layers):
        return None
    blocks = tuple(
        Block(
            (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
            (some[0].weight, some[1].weight, some[2].weight),
            (some[0].bias, some[1].bias, some[2].bias),
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
