"""Copy the cache of one prompt to every sample of a batch.

The time to decode a large batch depends on the number of rows, not on their content. A prefill of the whole batch would
take as long for each sample as for the first. In every tensor of a cache the sample is the first dimension.
"""

from dataclasses import replace

from kvbench.cache.eviction import HeadShares
from kvbench.cache.layer import Layer
from kvbench.engine.context import PromptContext
from kvbench.interfaces.codec import Codec, copy_samples
from kvbench.validation import SettingError


def replicate(context: PromptContext, times: int, room: int) -> None:
    """Turn a context of one sample into one of several equal samples.

    It works layer by layer, so that only the copies need memory.

    Args:
        context: A context of one sample, changed in place.
        times: Number of samples.
        room: Number of further tokens to reserve memory for.

    Raises:
        SettingError: The codec packs rows that it cannot copy.
        ValueError: The context has more than one sample.
    """
    codec = context.choice.codec
    if not can_replicate(codec):
        raise SettingError(
            f"task.fill=replicated: codec={codec.name} packs rows that it cannot copy; use task.fill=prefilled"
        )
    if len(context.seeds) != 1:
        raise ValueError(f"replicate: the context has {len(context.seeds)} samples, not one")
    context.seeds = context.seeds * times
    context.logits = copy_samples(context.logits, times)
    for window in context.sliding_layers():
        window.keys, window.values = copy_samples(window.keys, times), copy_samples(window.values, times)
    context.cache.repeat_states(times)
    shared = context.own_layers[0].state.shared
    shared.update({name: copy_samples(value, times) for name, value in shared.items()})
    for layer in context.own_layers:
        replicate_layer(layer, times, room)


def can_replicate(codec: Codec) -> bool:
    """Return whether the rows of a codec can be copied."""
    return codec.packing.replicates or not codec.packs


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
