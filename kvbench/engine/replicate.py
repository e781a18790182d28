"""Make one prompt that was read once a batch of many: copy the rows that its layers hold for every sample.

How a GPU decodes a large batch depends on how many rows it reads, not on what they say; a prefill of the whole batch
would cost as much time for each sample. Every tensor that a cache of one sample holds has the sample first.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from kvbench.cache.eviction import HeadShares
from kvbench.cache.layer import Layer
from kvbench.engine.context import PromptContext
from kvbench.validation import SettingError


def replicate(context: PromptContext, times: int, room: int) -> None:
    """Make `context`, of one sample, one of `times` equal samples, with room for `room` tokens to come; layer by layer,
    so that memory is needed for the copies only. SettingError for a codec that packs: its rows cannot be copied.
    """
    if context.choice.codec.packs:
        raise SettingError(f"task.fill=replicated: codec={context.choice.codec.name} packs rows; task.fill=prefilled")
    if len(context.seeds) != 1:
        raise ValueError(f"replicate: one sample, not {len(context.seeds)}")
    context.seeds = context.seeds * times
    context.logits = copy_samples(context.logits, times)
    for own in context.sliding_layers():
        own.keys, own.values = copy_samples(own.keys, times), copy_samples(own.values, times)
    shared = context.own_layers[0].state.shared
    shared.update({name: copy_samples(value, times) for name, value in shared.items()})
    for layer in context.own_layers:
        replicate_layer(layer, times, room)


def replicate_layer(layer: Layer, times: int, room: int) -> None:
    """Make the layer's one sample `times` equal samples, with room for `room` further tokens."""
    layer.rows = layer.rows.replicate(times, room)
    layer.tally = replace(layer.tally, evicted=copy_samples(layer.tally.evicted, times))
    layer.state.seeds = layer.state.seeds * times
    layer.state.layer = copy_samples(layer.state.layer, times)
    if layer.shares is not None:
        layer.shares = HeadShares(layer.shares.quotas * times, copy_samples(layer.shares.counts, times))
    layer.token_bytes *= times
    layer.update_memory()


def copy_samples(value: Any, times: int) -> Any:
    """The same value with every tensor in it repeated along its first dimension."""
    if isinstance(value, Tensor):
        return value.repeat(times, *(1 for _ in value.shape[1:])) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: copy_samples(own, times) for key, own in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: copy_samples(one, times) for name, one in own.items()})
    return value
