"""Try a method, an allocator and a codec on a short prompt before the first sample."""

from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.guarded_hooks import HOOKS
from kvbench.cache.policy import CachePolicy
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.observation import PromptEncoder


def rehearse(model: torch.nn.Module, choice: CachePolicy, words: PromptEncoder, ids: Tensor) -> None:
    """Read a short prompt, cut it to half, and decode a few tokens, with exact guards.

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
    if not (method.overrides(*HOOKS) or choice.codec.packs):  # the full cache has no hooks of its own
        return
    if method.decoding:
        method = replace(method, decode_interval=1, decode_size=None)
    own = replace(choice, method=method, exact=True)
    for block in {None} if method.one_block else {None, ids.shape[1] // 2}:
        context = GenerationContext(model, own, Budget(0.5), block, (0,) * len(ids), 0, words, compile=False)
        context.prefill(ids)
        with context.branch():
            context.extend(ids[:, :2])
        for _ in context.generate(3, Sampling(), frozenset()):
            pass
