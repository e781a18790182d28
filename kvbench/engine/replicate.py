"""Copy the cache of one prompt to every sample of a batch.

The time to decode a large batch depends on the number of rows, not on their content. A prefill of the whole batch would
take as long for each sample as for the first. In every tensor of a cache the sample is the first dimension.
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
    """Turn a context of one sample into one of several equal samples.

    It works layer by layer, so that only the copies need memory.

    Args:
        context: A context of one sample, changed in place.
        times: Number of samples.
        room: Number of further tokens to reserve memory for.

    Raises:
        SettingError: The codec packs rows, which cannot be copied.
        ValueError: The context has more than one sample.
    """
    if context.choice.codec.packs:
        raise SettingError(
            f"task.fill=replicated: codec={context.choice.codec.name} packs rows, which cannot be copied; "
            "use task.fill=prefilled"
        )
    if len(context.seeds) != 1:
        raise ValueError(f"replicate: the context has {len(context.seeds)} samples, not one")
    context.seeds = context.seeds * times
    context.logits = copy_samples(context.logits, times)
    for own in context.sliding_layers():
        own.keys, own.values = copy_samples(own.keys, times), copy_samples(own.values, times)
    shared = context.own_layers[0].state.shared
    shared.update({name: copy_samples(value, times) for name, value in shared.items()})
    for layer in context.own_layers:
        replicate_layer(layer, times, room)


def replicate_layer(layer: Layer, times: int, room: int) -> None:
    """Turn a layer of one sample into one of `times` equal samples, with memory for `room` further tokens."""
    layer.rows = layer.rows.replicate(times, room)
    layer.tally = replace(layer.tally, evicted=copy_samples(layer.tally.evicted, times))
    layer.state.seeds = layer.state.seeds * times
    layer.state.layer = copy_samples(layer.state.layer, times)
    if layer.shares is not None:
        layer.shares = HeadShares(layer.shares.quotas * times, copy_samples(layer.shares.counts, times))
    layer.token_bytes *= times
    layer.update_memory()


def copy_samples(value: Any, times: int) -> Any:
    """Return the same value with every tensor in it repeated along its first dimension."""
    if isinstance(value, Tensor):
        return value.repeat(times, *(1 for _ in value.shape[1:])) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: copy_samples(own, times) for key, own in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: copy_samples(one, times) for name, one in own.items()})
    return value
