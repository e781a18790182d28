"""The recurrent and convolutional states of transformers' cache layers: copied, put back, repeated, counted.

Such a state stands for all tokens read, so nothing of it can be cut. transformers updates it in place. A copy must
therefore be a clone, on its way out and on its way back. All versions of transformers keep it in plain attributes of
the layer, as tensors or as dictionaries of tensors. The names differ between versions, so all attributes are copied.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvbench.interfaces.codec import copy_samples
from kvbench.validation import SettingError

LayerState = dict[str, Any]  # attributes by name
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def has_state(layer: object) -> bool:
    """Return whether a cache layer of transformers may hold a recurrent or convolutional state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def copy_state(layer: object, without: frozenset[str] = frozenset()) -> LayerState:
    """Return a copy of a layer's state.

    Args:
        layer: A cache layer for which `has_state` is true.
        without: Names of attributes that are no part of the state.

    Raises:
        SettingError: It holds something else than tensors and plain values.
    """
    return {name: clone(value, name) for name, value in vars(layer).items() if name not in without}


def put_state(layer: object, state: LayerState) -> None:
    """Put a copy of a state into a layer. The state stays what it is when the layer reads on."""
    vars(layer).update({name: clone(value, name) for name, value in state.items()})


def repeat_state(layer: object, times: int, without: frozenset[str] = frozenset()) -> None:
    """Repeat the state of a layer for a batch of `times` equal samples. Other arguments as in `copy_state`."""
    state = {name: copy_samples(value, times) for name, value in copy_state(layer, without).items()}
    vars(layer).update({name: times if name.endswith("batch_size") else value for name, value in state.items()})


def count_state_bytes(layer: object, without: frozenset[str] = frozenset()) -> int:
    """Return the bytes of a layer's state. Arguments as in `copy_state`."""
    return sum(part.nbytes for name, value in vars(layer).items() if name not in without for part in find_parts(value))


def clone(value: object, name: str) -> Any:
    """Return a copy of an attribute that shares no memory with it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: clone(entry, name) for key, entry in value.items()}
    if isinstance(value, PLAIN):
        return value
    raise SettingError(
        f"model: a cache layer holds its state in {name}, a {type(value).__name__}, which kvbench cannot copy"
    )


def find_parts(value: object) -> Iterator[Tensor]:
    """Yield the tensors of an attribute."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from find_parts(entry)
