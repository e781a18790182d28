"""The hidden states that the attention of every layer reads, taken from transformers' own modules."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def record_normed_states(model: torch.nn.Module) -> Iterator[dict[int, np.ndarray]]:
    """By layer: the states behind the layer's norm (T, hidden) of the tokens that the model reads inside, the last ones
    only.
    """
    found: dict[int, np.ndarray] = {}

    def keep(layer, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        found[layer.self_attn.layer_idx] = layer.input_layernorm(states)[0].numpy()

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
