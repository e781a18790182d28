"""Run tokens through a plain decoder by its weights, without the model's modules."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.functional import embedding

from kvbench.kernels.fused_linear import rms_norm, rms_norm_glu, rms_norm_linear
from kvbench.models.decoder_weights import DecoderWeights

Norms = tuple[Tensor, Tensor, float] | None  # the QK norm: weights of queries and of keys, (d,) each, and ε
Attend = Callable[[int, Sequence[Tensor], Norms], Tensor]
"""Appends and attends in one layer.

It maps the layer's index, the projected queries, keys and values (B·T, heads·d) and the QK norm to attention outputs
(B, Hq, T, d).
"""


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
    epsilon = weights.epsilon
    x = embedding(ids.flatten(), weights.embed)
    if weights.embed_scale is not None:
        x = x * weights.embed_scale
    for index, block in enumerate(weights.blocks):
        norm = (block.norms[0], epsilon)
        three = rms_norm_linear(x, block.project, biases=block.biases, norm=norm, implementation=implementation)
        outputs = attend(index, three, None if block.head_norms is None else (*block.head_norms, epsilon))
        outputs = outputs.transpose(1, 2).reshape(len(x), -1)
        x = add_projected(x, outputs, block.output, block.output_norms[0], epsilon, implementation)
        inner = rms_norm_glu(
            x, block.gate, block.up, (block.norms[1], epsilon),
            activation=weights.activation, implementation=implementation,
        )  # fmt: skip
        x = add_projected(x, inner, block.down, block.output_norms[1], epsilon, implementation)
    return x


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return the model's logits, (…, vocab), as it caps them in their dtype; None for no cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


def add_projected(
    x: Tensor, inputs: Tensor, weight: Tensor, norm: Tensor | None, epsilon: float, implementation: str | None
) -> Tensor:
    """Return x + inputs·Wᵀ, or x + norm(inputs·Wᵀ) if `norm` is the weight of an RMS norm."""
    if norm is None:
        (x,) = rms_norm_linear(inputs, [weight], residual=x, implementation=implementation)
        return x
    (products,) = rms_norm_linear(inputs, [weight], implementation=implementation)
    return rms_norm(products, norm, epsilon, residual=x, implementation=implementation)
