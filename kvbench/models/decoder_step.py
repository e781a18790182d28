"""Run tokens through a plain decoder by its weights, without the model's modules."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.functional import embedding

from kvbench.models.decoder_parts import Around, Block, HeadNorms, Linear, Norm, project
from kvbench.models.decoder_weights import DecoderWeights

Norms = HeadNorms
Attend = Callable[[int, Sequence[Tensor], Norms], Tensor]
"""Appends and attends in one layer.

It maps the layer's index, the projected queries, keys and values (B·T, heads·d) and the QK norm to attention outputs
(B, Hq, T, d).
"""
Part = Callable[[Tensor, Norm | None, Tensor | None, str | None], Tensor]  # see `kvbench.models.decoder_parts`


def forward_step(weights: DecoderWeights, ids: Tensor, attend: Attend, implementation: str | None) -> Tensor:
    """Run tokens through all layers.

    Args:
        weights: The model's weights.
        ids: Token ids, (B, T).
        attend: Appends and attends in one layer.
        implementation: Name of the kernels' implementation; None chooses one.

    Returns:
        Hidden states after the last layer, (B·T, hidden).
    """
    x = embedding(ids.flatten(), weights.embed)
    if weights.embed_scale is not None:
        x = x * weights.embed_scale
    if weights.embed_norm is not None:
        x = weights.embed_norm.apply(x, None, implementation)
    for index, block in enumerate(weights.blocks):
        x = run_block(x, block, partial(block.attention, partial(attend, index)), implementation)
    return x


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return the model's logits, (…, vocab), as it caps them in their dtype; None for no cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


def run_block(x: Tensor, block: Block, attention: Part, implementation: str | None) -> Tensor:
    """Run hidden states (B·T, hidden) through one layer."""
    if block.parallel:
        norm = block.around_attention.before
        normed = x if norm is None else norm.apply(x, None, implementation)
        x = attention(normed, None, x, implementation)
        return block.mlp(normed, None, x, implementation)
    x = add_part(x, attention, block.around_attention, block.factor, implementation)
    return add_part(x, block.mlp, block.around_mlp, block.factor, implementation)


def add_part(x: Tensor, part: Part, around: Around, factor: float | None, implementation: str | None) -> Tensor:
    """Return hidden states and what attention or an MLP adds to them, (B·T, hidden)."""
    if around.after is None and factor is None:
        return part(x, around.before, x, implementation)
    added = part(x, around.before, None, implementation)
    if factor is None and around.after is not None:
        return around.after.apply(added, x, implementation)
    if around.after is not None:
        added = around.after.apply(added, None, implementation)
    return x if factor is None else x + added * factor


def find_logits(weights: DecoderWeights, x: Tensor, implementation: str | None) -> Tensor:
    """Return the logits (B·T, vocab) of hidden states after the last layer."""
    (logits,) = project(x, (Linear(weights.head, weights.head_bias),), weights.norm, implementation)
    logits = logits if weights.logit_factor is None else logits * weights.logit_factor
    return cap_logits(logits, weights.logit_cap)
