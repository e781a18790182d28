"""Tiny random models whose layers keep a recurrent or convolutional state, and tokens for them to read."""

from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvbench.models.layouts import STATES, Configuration, read_version
from kvbench.models.miniature import VOCABULARY, draw_miniature, shrink

TWO = ["linear_attention", "full_attention"]
CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
HYBRIDS = {  # what their checkpoints state and the defaults of transformers do not, or few layers
    "qwen3_next": dict(num_hidden_layers=2, layer_types=TWO),
    "qwen3_5_text": dict(num_hidden_layers=2, layer_types=TWO),
    "qwen3_5_moe_text": dict(num_hidden_layers=2, layer_types=TWO),
    "lfm2": dict(num_hidden_layers=4, layer_types=CONVOLUTIONS),
    "lfm2_moe": dict(num_hidden_layers=4, layer_types=CONVOLUTIONS, num_dense_layers=1),
    "granitemoehybrid": dict(num_hidden_layers=2, layer_types=TWO),
    "nemotron_h": {},  # a layer of each kind: recurrent, experts, attention, MLP
    "falcon_h1": dict(num_hidden_layers=2, key_multiplier=0.5),
    "zaya": dict(num_hidden_layers=4, layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=64),
    "olmo_hybrid": dict(num_hidden_layers=2, layer_types=TWO),
}
COVERING = ("qwen3_next", "lfm2", "nemotron_h", "falcon_h1")  # chunks, convolutions, layers without state, two in one
EVERY = [name if name in COVERING else pytest.param(name, marks=pytest.mark.full) for name in HYBRIDS]


def configure_hybrid(name: str, **more: object) -> Configuration:
    """The configuration of a tiny model. The test is skipped if this transformers does not read such models right."""
    if name not in CONFIG_MAPPING or read_version() < STATES:
        pytest.skip(f"this transformers does not read {name}")
    config: Configuration = shrink(CONFIG_MAPPING[name](**(HYBRIDS[name] | more)))
    return config


@cache
def make_hybrid(name: str) -> torch.nn.Module:
    """A model in float32 whose attention is far from uniform."""
    return draw_miniature(configure_hybrid(name))


def draw_tokens(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """(batch, count) token ids."""
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read_at_once(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of one pass of transformers' eager attention without a cache."""
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
