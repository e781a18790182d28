"""Collect the weights of a plain decoder, so that a step can run without the model's modules."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models.layouts import ARCHITECTURES, Configuration, read_text_type
from kvbench.models.rotations import Rotation
from kvbench.models.transformers_port import (
    copy_frequencies,
    find_class,
    find_text_decoder,
    list_decoder_layers,
    make_rotations,
    read_layout,
    text_config,
)

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # names in transformers and in kernels.fused_linear


@dataclass(frozen=True)
class Block:
    """The weights of one decoder layer. They are the modules' tensors or rows of them, apart from Gemma's norms.

    Projections to queries and keys may be copies, with their rows in another order (`DecoderWeights.orders`).

    A norm's weights are those of `kernels.fused_linear.rms_norm`: Gemma multiplies by 1 + weight in float32.
    """

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
    output_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    """The norms of what attention and the MLP add to the hidden states, (hidden,) each (Gemma 3)."""
    extras: SoftmaxExtras | None = None
    """Sinks (gpt-oss) and cap (Gemma 2) of the layer's softmax."""


@dataclass(frozen=True)
class SlidingWindow:
    """The layers with a sliding window in a model that has other layers too."""

    layers: tuple[int, ...]
    """Their indices."""
    tokens: int
    """Number of last tokens that a query attends to, its own token included."""


@dataclass(frozen=True)
class DecoderWeights:
    """All weights that decoding a token needs."""

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
    rotations: tuple[Rotation, ...]
    """The rotary embedding of each layer: positions (B, n) -> cos, sin. Layers that rotate alike have the same one."""
    orders: tuple[Tensor | None, ...]
    """For each layer the model's dimensions of a head in the order of the step's queries and keys, (d,), or None if
    they are the same (`kvbench.models.transformers_port.LayerRotation`).
    """
    activation: str
    """The activation of the MLPs (`kernels.fused_linear.rms_norm_glu`)."""
    embed_scale: Tensor | None = None
    """The factor of the embeddings, () in their dtype (Gemma 3)."""
    sliding: SlidingWindow | None = None
    """The layers with a sliding window."""
    logit_cap: float | None = None
    """The cap c of the model's logits l, which become c·tanh(l/c) (Gemma 2)."""


@torch.no_grad()
def collect_weights(model: Any) -> DecoderWeights | None:
    """Return the weights of a model whose decoder layers compute exactly what `forward_step` computes, or None.

    See `kvbench.models.decoder_step.forward_step`.
    """
    layout, config = read_layout(model), model.config
    graphs = type(model) is find_class(config) and has_plain_step(config, layout)
    return collect_plain_weights(model, layout) if graphs else None


def has_plain_step(config: Configuration, layout: Layout) -> bool:
    """Return whether tests or a probe say that `forward_step` computes what a model of a type computes."""
    return ARCHITECTURES[read_text_type(config)].graphs if layout.probe is None else layout.probe.graphs


def can_collect_weights(config: Configuration, layout: Layout) -> bool:
    """Return whether the weights of a model that is not loaded will be collected, as far as its configuration tells."""
    return has_plain_step(config, layout) and layout.rope_switch is None


@torch.no_grad()
def collect_plain_weights(model: torch.nn.Module, layout: Layout) -> DecoderWeights | None:
    """Return the weights of a model by the names of its modules, or None if they are not those of a plain decoder.

    Whether the step computes what the model computes is not checked here (see `kvbench.models.probe`).

    Args:
        model: The model.
        layout: Its layout.

    Raises:
        AttributeError: The model has other modules.
    """
    config = text_config(model)
    # the rotations of a whole answer are computed at once, so the frequencies must not change with its length
    if copy_frequencies(model) is not None:
        return None
    parameters = list(model.parameters())
    plain = all(type(parameter) is torch.nn.Parameter and parameter.is_contiguous() for parameter in parameters)
    # on several GPUs, quantised in place, or not contiguous
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) > 1 or not plain:
        return None
    inner, head = find_text_decoder(model), cast(Any, model).lm_head
    activation = ACTIVATIONS.get(getattr(config, "hidden_activation", None) or config.hidden_act)
    layers = list_decoder_layers(model)
    blocks = tuple(block for layer in layers if (block := read_block(layer, layout)) is not None)
    if activation is None or len(blocks) < len(layers) or not is_plain_linear(head):
        return None
    sliding = SlidingWindow(layout.sliding, config.sliding_window) if layout.sliding else None
    turnings = make_rotations(model)
    orders = tuple(turning.order for turning in turnings)
    embed, scale = inner.embed_tokens.weight, getattr(inner.embed_tokens, "embed_scale", None)
    return DecoderWeights(
        embed,
        tuple(reorder_block(block, order) for block, order in zip(blocks, orders, strict=True)),
        read_norm(inner.norm),
        head.weight,
        config.rms_norm_eps,
        inner.layers[0].self_attn.scaling,
        tuple(turning.rotation for turning in turnings),
        orders,
        activation,
        None if scale is None else scale.to(embed.dtype),
        sliding,
        getattr(config, "final_logit_softcapping", None),
    )


def read_block(layer: Any, layout: Layout) -> Block | None:
    """Return the weights of a decoder layer, or None if it is quantised, or has an adapter or unknown biases."""
    attention, mlp = layer.self_attn, layer.mlp
    fused = hasattr(attention, "qkv_proj")  # Phi-3 has queries, keys and values in one matrix, gate and up in another
    inputs = [attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.down_proj, *([mlp.gate_up_proj] if fused else [mlp.gate_proj, mlp.up_proj])]
    if not all(is_plain_linear(linear, biased=not fused) for linear in inputs) or not all(map(is_plain_linear, others)):
        return None
    if fused:
        weight, rows = attention.qkv_proj.weight, layout.heads * layout.dim
        project, biases = weight.split([len(weight) - 2 * rows, rows, rows]), (None, None, None)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
    else:
        project, biases = (tuple(getattr(linear, name) for linear in inputs) for name in ("weight", "bias"))
        gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    norms = read_norm(layer.input_layernorm), read_norm(layer.post_attention_layernorm)
    output_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 3, where the second of these norms is the attention's own
        output_norms = norms[1], read_norm(layer.post_feedforward_layernorm)
        norms = norms[0], read_norm(layer.pre_feedforward_layernorm)
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = read_norm(attention.q_norm), read_norm(attention.k_norm)
    extras = read_extras(attention, layout.softcap)
    output, down = attention.o_proj.weight, mlp.down_proj.weight
    return Block(norms, project, biases, head_norms, output, gate, up, down, output_norms, extras)


def read_extras(attention: Any, cap: float | None) -> SoftmaxExtras | None:
    """Return sinks and cap of the softmax of an attention module, or None if it is plain."""
    sinks: Tensor | None = getattr(attention, "sinks", None)
    if sinks is None and cap is None:
        return None
    return SoftmaxExtras(None if sinks is None else sinks.detach(), cap)


def reorder_block(block: Block, order: Tensor | None) -> Block:
    """Return a layer's weights so that its queries and keys have their dimensions in another order.

    Args:
        block: The weights.
        order: The present dimensions in their new order, (d,), or None for no change.
    """
    if order is None:
        return block

    def reorder(rows: Tensor) -> Tensor:  # (heads·d, …), or a norm of each head or of all, (d,) or (heads·d,)
        return rows.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)

    queries, keys, values = block.project
    to_queries, to_keys, to_values = block.biases
    biases = None if to_queries is None else reorder(to_queries), None if to_keys is None else reorder(to_keys)
    norms = block.head_norms and (reorder(block.head_norms[0]), reorder(block.head_norms[1]))
    project = reorder(queries), reorder(keys), values
    return replace(block, project=project, biases=(*biases, to_values), head_norms=norms)


def is_plain_linear(module: object, biased: bool = False) -> bool:
    """Return whether a module is torch's own linear layer, without a bias unless `biased`."""
    return type(module) is torch.nn.Linear and (biased or module.bias is None)


def read_norm(norm: Any) -> Tensor:
    """Return the weight of an RMS norm, as `kernels.fused_linear.rms_norm` takes it."""
    weight: Tensor = norm.weight
    return 1.0 + weight.float() if type(norm).__name__ == "Gemma3RMSNorm" else weight
