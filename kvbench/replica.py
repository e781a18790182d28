"""One prompt that was read once as a batch of many: the rows that its layers hold, copied for every sample.

How a GPU decodes a large batch depends on how many rows it reads, not on what they say; a prefill of the whole batch
would cost as much time for each sample. Every tensor that a cache of one sample holds has the sample first: rows lie
in the order (sample, head, place), all else is (sample, head, …).
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from kvbench.engine import Context
from kvbench.layer import Layer
from kvbench.settings import SettingError


def replicate(context: Context, times: int, room: int) -> None:
    """Make `context`, of one sample, one of `times` equal samples, with room for `room` tokens to come; layer by layer,
    so that memory is needed for the copies only. SettingError for a codec that packs: its rows cannot be copied.
    """
    if context.choice.codec.packs:
        raise SettingError(f"task.fill=replicated: codec={context.choice.codec.name} packs rows; task.fill=prefilled")
    if len(context.seeds) != 1:
        raise ValueError(f"replicate: one sample, not {len(context.seeds)}")
    context.seeds = context.seeds * times
    context.logits = copied(context.logits, times)
    for own in context._sliding():
        own.keys, own.values = copied(own.keys, times), copied(own.values, times)
    shared = context.own_layers[0].state.shared
    shared.update({name: copied(value, times) for name, value in shared.items()})
    for layer in context.own_layers:
        enlarge(layer, times, room)


def enlarge(layer: Layer, times: int, room: int) -> None:
    rows = layer.rows
    batch, heads = rows.shape
    rows.shape = batch * times, heads
    for name, value in vars(rows).items():
        if name not in ("shape", "codec", "starts", "tail_keys", "tail_values"):
            setattr(rows, name, copied(value, times))
    rows.starts = None  # counted anew from the lengths
    if rows.tail_keys is not None:  # with the room, so that no longer one must be made while decoding
        for name in ("tail_keys", "tail_values"):
            before = getattr(rows, name)
            grown = before.new_empty(times, heads, rows.tail + room, before.shape[-1])
            grown[:, :, : rows.tail] = before[:, :, : rows.tail]
            setattr(rows, name, grown)
            del before
    layer.evicted = copied(layer.evicted, times)
    layer.state.seeds = layer.state.seeds * times
    layer.state.layer = copied(layer.state.layer, times)
    if layer.shares is not None:
        quotas, counts = layer.shares
        layer.shares = quotas * times, copied(counts, times)
    layer.token_bytes *= times
    layer.weigh()


def copied(value: Any, times: int) -> Any:
    """The same with every tensor in it repeated along its first dimension."""
    if isinstance(value, Tensor):
        return value.repeat(times, *(1 for _ in value.shape[1:])) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: copied(own, times) for key, own in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: copied(one, times) for name, one in own.items()})
    return value
