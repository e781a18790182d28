"""Try a method, an allocator and a codec on a short prompt before the first sample."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.hook_table import HOOKS
from kvbench.cache.policy import CachePolicy
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import PromptEncoder
from kvbench.models.transformers_port import read_layout, use_first_layers
from kvbench.validation import SettingError

LAYERS = 8  # of the model that reads the prompt: some methods spare the first few, and do the same in all others


def rehearse(model: torch.nn.Module, choice: CachePolicy, words: PromptEncoder, ids: Tensor) -> None:
    """Read a short prompt, cut it to half, and decode a few tokens, with exact guards.

    The full cache with a codec is not cut. Without a codec it has no hooks, and nothing is read. Only the first layers
    of the model do so, or all, if the method has learned something for each layer.

    Args:
        model: A supported transformers model.
        choice: The method, allocator and codec.
        words: Turns a method's own words to the model into token ids.
        ids: Token ids of the prompt, (1, n).

    Raises:
        ContractError: A hook broke its contract. If it changed a weight of the model (`spoils_model`), the caller must
            load the model again.
    """
    method = choice.method
    cuts = method.overrides(*HOOKS["method"])  # the full cache has no hooks of its own
    if not (cuts or choice.codec.packs):
        return
    budget = Budget(0.5 if cuts else 1.0)
    if method.decoding:
        method = replace(method, decode_interval=1, decode_size=None)
    rehearsed = replace(choice, method=method, exact=True)
    with use_first_layers(model, LAYERS) if serves_first_layers(model, choice) else nullcontext():
        for block in {None} if method.one_block else {None, ids.shape[1] // 2}:
            context = GenerationContext(model, rehearsed, budget, block, (0,) * len(ids), 0, words, compile=False)
            context.prefill(ids)
            with context.branch():
                context.extend(ids[:, :2])
            for _ in context.generate(3, Sampling(), frozenset()):
                pass


def serves_first_layers(model: torch.nn.Module, choice: CachePolicy) -> bool:
    """Return whether the method can serve a model that has the first layers only."""
    with use_first_layers(model, LAYERS):
        shape = read_layout(model)
        try:
            choice.check(shape)
        except SettingError:
            return False
    return True
