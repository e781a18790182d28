"""Collect the weights of a plain decoder, so that a step can run without the model's modules."""

from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.kernels.experts import MOST_TOKENS
from kvbench.models.decoder_parts import Block, HeadLayerNorm, Linear, Norm, ProjectedNorm
from kvbench.models.expert_parts import Mixture
from kvbench.models.expert_reader import read_feed_forward
from kvbench.models.int4 import Int4Weight, move_quantized
from kvbench.models.layouts import (
    ARCHITECTURES,
    Configuration,
    read_config_layout,
    read_rope_settings,
    read_text_type,
)
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.part_reader import PartReader, UnknownPart, check_factors, list_children, read_block
from kvbench.models.rotations import Rotation
from kvbench.models.silence import silence_transformers
from kvbench.models.transformers_port import (
    copy_frequencies,
    find_class,
    find_text_decoder,
    list_decoder_layers,
    make_rotations,
    read_layout,
    text_config,
)

UNUSED = ("embed_tokens_extend",)  # modules that read images and sounds
NORMED_EMBEDDINGS = ("nanochat",)  # types whose last norm is also the embeddings'


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
    norm: Norm
    """The last norm."""
    head: Tensor
    """(vocab, hidden)"""
    scaling: float
    """The factor of the logits of attention."""
    rotations: tuple[Rotation, ...]
    """The rotary embedding of each layer: positions (B, n) -> cos, sin. Layers that rotate alike have the same one."""
    orders: tuple[Tensor | None, ...]
    """For each layer the model's dimensions of a head in the order of the step's queries and keys, (d,), or None if
    they are the same (`kvbench.models.transformers_port.LayerRotation`).
    """
    head_bias: Tensor | None = None
    """(vocab,)"""
    embed_scale: Tensor | float | None = None
    """The factor of the embeddings (Gemma, Granite)."""
    embed_norm: Norm | None = None
    """The norm of the embeddings (nanochat)."""
    logit_factor: float | None = None
    """The factor of the logits of tokens (Granite, Cohere)."""
    sliding: SlidingWindow | None = None
    """The layers with a sliding window."""
    logit_cap: float | None = None
    """The cap c of the model's logits l, which become c·tanh(l/c) (Gemma 2)."""

    @property
    def longest_block(self) -> int | None:
        """The number of tokens beyond which transformers' modules read a block faster than the step; None if none."""
        return MOST_TOKENS if any(isinstance(block.mlp, Mixture) for block in self.blocks) else None


COLLECTED: WeakKeyDictionary[torch.nn.Module, tuple[object, "DecoderWeights | None"]] = WeakKeyDictionary()
"""For each model, of which parameters its weights were collected, and the weights without rotations, which hold it."""


@torch.no_grad()
def collect_weights(model: Any) -> DecoderWeights | None:
    """Return the weights of a model whose decoder layers compute exactly what `forward_step` computes, or None.

    See `kvbench.models.decoder_step.forward_step`. Modules are recognised by what they compute, which takes time, so
    the weights are collected again only if a parameter has changed.
    """
    layout, config, kind = read_layout(model), model.config, type(model)
    if kind is not find_class(config) or not has_plain_step(config, layout):
        return None
    parameters = tuple((id(part), part.device, part.dtype, part._version) for part in model.parameters())
    known, weights = COLLECTED.get(model, (None, None))
    if known == (layout, parameters):
        return weights and replace(weights, rotations=tuple(turning.rotation for turning in make_rotations(model)))
    weights = collect_plain_weights(model, layout)
    COLLECTED[model] = (layout, parameters), weights and replace(weights, rotations=())
    return weights


def has_plain_step(config: Configuration, layout: Layout) -> bool:
    """Return whether tests or a probe say that `forward_step` computes what a model of a type computes."""
    return ARCHITECTURES[read_text_type(config)].graphs if layout.probe is None else layout.probe.graphs


def can_collect_weights(config: Configuration, layout: Layout, weights_format: str | None = None) -> bool:
    """Return whether the weights of a model that is not loaded will be collected, as far as its configuration tells.

    Args:
        config: The model's configuration.
        layout: Its layout.
        weights_format: "int4", whose matrices can be neither taken apart nor reordered. A miniature shows whether the
            step has to, which takes up to a second. None for weights in the run's dtype.

    Raises:
        Unshrinkable: There is no miniature of the configuration.
    """
    if not has_plain_step(config, layout) or layout.rope_switch is not None:
        return False
    try:
        check_config(config.get_text_config(decoder=True))
    except UnknownPart:
        return False
    if weights_format is None:
        return True
    with silence_transformers():
        model = move_quantized(draw_miniature(shrink(config)), "cpu")
    return collect_plain_weights(model, read_config_layout(model.config, layout.probe)) is not None


@torch.no_grad()
def collect_plain_weights(model: torch.nn.Module, layout: Layout) -> DecoderWeights | None:
    """Return the weights of a model by its modules, or None if they have parts that the step does not compute.

    Whether the step computes what the model computes is not checked here (see `kvbench.models.probe`).

    Args:
        model: The model.
        layout: Its layout.
    """
    if layout.value_width is not None:
        return None
    parameters = list(model.parameters())
    known = torch.nn.Parameter, Int4Weight
    plain = all(type(parameter) in known and parameter.is_contiguous() for parameter in parameters)
    # on several GPUs, quantised by others, or not contiguous
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) > 1 or not plain:
        return None
    # the rotations of a whole answer are computed at once, so the frequencies must not change with its length
    if copy_frequencies(model) is not None:
        return None
    try:
        return read_weights(model, layout)
    except UnknownPart:
        return None


def read_weights(model: torch.nn.Module, layout: Layout) -> DecoderWeights:
    """Read the weights of a model by its modules.

    Raises:
        UnknownPart: It has a part that the step does not compute.
    """
    config, inner = text_config(model), find_text_decoder(model)
    check_config(config)
    names = list_children(inner)
    last = "final_layernorm" if "final_layernorm" in names else "norm"
    needed = {"embed_tokens", "layers", last}
    others = {name for name in names - needed - set(UNUSED) if not name.startswith("rotary")}
    if others or not needed <= names:
        raise UnknownPart(f"{type(inner).__name__} with {', '.join(sorted(names))}")
    embed: Tensor = inner.embed_tokens.weight
    reader, layers = PartReader(embed), list_decoder_layers(model)
    turnings = make_rotations(model)
    orders = tuple(turning.order for turning in turnings)
    read = (read_block(reader, layer, layout, read_feed_forward) for layer in layers)
    blocks = tuple(reorder_block(block, order) for block, order in zip(read, orders, strict=True))
    norm, head = reader.norm(getattr(inner, last), layout.hidden), reader.linear(getattr(model, "lm_head", None))
    scalings = {getattr(layer.self_attn, "scaling", None) for layer in layers}
    scaling = scalings.pop()
    if scalings or scaling is None:
        raise UnknownPart("layers with factors of their own for the logits of attention")
    for module in (model, inner, inner.embed_tokens):
        check_factors(module)
    sliding = SlidingWindow(layout.sliding, config.sliding_window) if layout.sliding else None
    return DecoderWeights(
        embed,
        blocks,
        norm,
        head.weight,
        scaling,
        tuple(turning.rotation for turning in turnings),
        orders,
        head.bias,
        read_embed_scale(inner, config),
        norm if config.model_type in NORMED_EMBEDDINGS else None,
        read_logit_factor(model, config),
        sliding,
        getattr(config, "final_logit_softcapping", None),
    )


def reorder_block(block: Block, order: Tensor | None) -> Block:
    """Return a layer's weights so that its queries and keys have their dimensions in another order.

    Args:
        block: The weights.
        order: The present dimensions in their new order, (d,), or None for no change.

    Raises:
        UnknownPart: The weights are in int4, whose rows cannot be reordered.
    """
    if order is None:
        return block
    attention = block.attention
    queries, keys, values = attention.project
    if isinstance(queries.weight, Int4Weight) or isinstance(keys.weight, Int4Weight):
        raise UnknownPart("queries and keys in int4, in another order of their dimensions than the step's")

    def reorder(rows: Tensor) -> Tensor:  # (heads·d, …), or a norm of each head or of all, (d,) or (heads·d,)
        return rows.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)

    def reorder_linear(linear: Linear) -> Linear:
        return Linear(reorder(linear.weight), None if linear.bias is None else reorder(linear.bias))

    def reorder_norm(norm: ProjectedNorm) -> ProjectedNorm:
        parts = {name: getattr(norm, name, None) for name in ("weight", "bias")}
        by_head = isinstance(norm, HeadLayerNorm)  # (heads, d)
        turned = {
            name: part.index_select(1, order) if by_head else reorder(part)
            for name, part in parts.items()
            if part is not None
        }
        return replace(cast(Any, norm), **turned)

    head_norms, wide = attention.head_norms, attention.projected_norms
    attention = replace(
        attention,
        project=(reorder_linear(queries), reorder_linear(keys), values),
        head_norms=head_norms and (reorder(head_norms[0]), reorder(head_norms[1]), head_norms[2]),
        projected_norms=wide and (reorder_norm(wide[0]), reorder_norm(wide[1])),
    )
    return replace(block, attention=attention)


def check_config(config: Any) -> None:
    """Check that a configuration sets nothing that the step does not compute and that no module shows.

    Raises:
        UnknownPart: It does.
    """
    if read_rope_settings(config).get("llama_4_scaling_beta"):
        raise UnknownPart("queries are scaled by their position")


def read_embed_scale(inner: Any, config: Any) -> Tensor | float | None:
    """Return the factor of the embeddings, or None.

    Raises:
        UnknownPart: They are computed in another way.
    """
    if type(inner.embed_tokens) is not torch.nn.Embedding:  # Gemma
        scale = getattr(inner.embed_tokens, "embed_scale", None)
        if not isinstance(scale, Tensor):
            raise UnknownPart(f"{type(inner.embed_tokens).__name__} in place of an embedding")
        return scale.to(inner.embed_tokens.weight.dtype)
    if getattr(config, "mup_enabled", False):  # AFMoE
        return float(config.hidden_size**0.5)
    return nontrivial(getattr(inner, "embedding_multiplier", None))


def read_logit_factor(model: torch.nn.Module, config: Any) -> float | None:
    """Return the factor of the logits, or None.

    Raises:
        UnknownPart: Whether the model multiplies or divides by its setting is not known.
    """
    scaling = nontrivial(getattr(config, "logits_scaling", None))
    if scaling is None:
        return nontrivial(getattr(model, "logit_scale", None))
    if config.model_type.startswith("granite"):
        return 1 / scaling
    if config.model_type == "hyperclovax":
        return scaling
    raise UnknownPart(f"logits_scaling={scaling}")


def nontrivial(factor: float | None) -> float | None:
    """Return a factor, or None if it changes nothing."""
    return None if factor == 1 else factor
