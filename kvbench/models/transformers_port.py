"""Where kvbench meets transformers, through its public registries only: an attention function and cache layers.

A cache layer's `update` may return any object and it reaches the attention function as `key`: so a Port hands itself
over and the attention function asks it. Nothing of transformers is patched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer, StaticCache

from kvbench.kernels.attention.sdpa import attend_windowed
from kvbench.models.configuration import LENGTH_DEPENDENT_ROPE, check_architecture

NAME = "kvbench"


class AttentionLayer(Protocol):
    """What a layer of kvbench's cache offers to a Port."""

    def append(self, keys: Tensor, values: Tensor) -> None: ...

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor: ...


class CacheLayerPort(CacheLayerMixin):
    """A transformers cache layer in front of a kvbench layer. Its length is tokens seen, so positions stay right."""

    is_sliding = False

    def __init__(self, layer: AttentionLayer, rotation: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer, self.rotation, self.seen = layer, rotation, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple["CacheLayerPort", "CacheLayerPort"]:
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.seen += key_states.shape[2]
        self.layer.append(key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """transformers' own sliding-window layer, which frees what has left the window instead of holding a view of it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        everything = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.shape != everything[0].shape:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return everything


def attention(
    module: torch.nn.Module, query: Tensor, key: CacheLayerPort | Tensor, value: CacheLayerPort | Tensor,
    attention_mask: Tensor | None, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that transformers calls by name; queries (B, Hq, T, d), outputs (B, T, Hq, d)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.cuda.device_of(query):  # a layer's kernels run where the layer is
        if isinstance(key, CacheLayerPort):
            outputs = key.layer.attend(query, scaling, module.o_proj.weight, key.rotation)
        else:
            outputs = attend_windowed(query, key, value, scaling, sliding_window)
    return outputs.transpose(1, 2), None


@contextmanager
def kvbench_attention(model: torch.nn.Module) -> Iterator[None]:
    """The model attends through kvbench inside, and as before afterwards."""
    AttentionInterface.register(NAME, attention)
    parts = {"": model.config} | {key: getattr(model.config, key) for key in model.config.sub_configs}
    before = {key: config._attn_implementation for key, config in parts.items() if config is not None}
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before if len(before) > 1 else before[""])


@dataclass(frozen=True)
class Layout:
    """What a cache must know of a model's layers."""

    layers: int
    heads: int  # KV heads of a layer
    dim: int  # of a head
    sliding: tuple[int, ...]  # layers with a sliding window: they keep transformers' own cache
    window: int | None  # longest context if *every* layer has that sliding window (then they count as full)


def read_layout(model: torch.nn.Module) -> Layout:
    """The layers of a supported model; SettingError for another architecture."""
    return read_config_layout(model.config)


def read_config_layout(config: Any) -> Layout:
    """The same from a model's configuration, before it is loaded."""
    check_architecture(config)
    config = config.get_text_config(decoder=True)
    own = DynamicCache(config=config).layers
    sliding = tuple(i for i, layer in enumerate(own) if layer.is_sliding)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    all_slide = len(sliding) == config.num_hidden_layers
    window = own[0].sliding_window if all_slide else None
    return Layout(config.num_hidden_layers, config.num_key_value_heads, dim, () if all_slide else sliding, window)


def find_rotary_module(model: torch.nn.Module) -> torch.nn.Module:
    """The model's rotary embedding."""
    return next(m.rotary_emb for m in model.modules() if hasattr(m, "rotary_emb") and hasattr(m, "layers"))


class Frequencies:
    """The rotary frequencies of one context, for models whose frequencies follow the longest place (dynamic, LongRoPE).

    transformers keeps them in the model's rotary module, where they stay after the longest prompt and would be used for
    the next one (`dynamic_rope_update` in transformers/modeling_rope_utils.py). A context therefore has a copy of that
    module's state. The copy starts with the original frequencies, whatever the module holds, and takes the module's
    place while the model reads for this context.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.longest = module, 0  # tokens read with them
        attributes, buffers = module_state(module)
        for name in buffers.keys() | attributes.keys():
            if name.endswith("original_inv_freq"):
                buffers[name.replace("original_", "")] = getattr(module, name)
        for name in attributes.copy():
            if name.endswith("_max_seq_len_cached"):  # of a kind of layer: made when its length first grows
                del attributes[name]
        attributes["max_seq_len_cached"] = module.original_max_seq_len
        self.state = clone_state((attributes, buffers))

    @contextmanager
    def install(self, tokens: int) -> Iterator[None]:
        """The rotary module has this context's frequencies inside, for so many tokens, and its own again afterwards."""
        before, self.longest = module_state(self.module), tokens
        set_module_state(self.module, self.state)
        try:
            yield
        finally:
            self.state = module_state(self.module)
            set_module_state(self.module, before)

    def rotate(self, places: Tensor, own: tuple[str, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `places` (B, n), as the model would turn them now; the frequencies stay as they are, although
        a method may ask for places that the model has not reached.
        """
        longest = places.new_full((places.shape[0], 1), max(self.longest - 1, 0))
        asked = self.copy()
        with asked.install(asked.longest):  # a copy: from transformers 5.23 on LongRoPE writes into the module's buffer
            cos, sin = self.module(like, torch.cat([places, longest], 1), *own)
        return cos[:, :-1], sin[:, :-1]

    def copy(self) -> "Frequencies":
        """Another context's, which are the same now."""
        other = copy(self)
        other.take_over(self)
        return other

    def take_over(self, other: "Frequencies") -> None:
        """Become what `other` is now."""
        self.state, self.longest = clone_state(other.state), other.longest


ModuleState = tuple[dict[str, Any], dict[str, Tensor | None]]  # plain attributes, buffers
REGISTRIES = frozenset(vars(torch.nn.Module()))


def module_state(module: torch.nn.Module) -> ModuleState:
    """The attributes and buffers that the module's forward may replace; the tensors are the module's own."""
    return {name: own for name, own in vars(module).items() if name not in REGISTRIES}, dict(module._buffers)


def set_module_state(module: torch.nn.Module, state: ModuleState) -> None:
    """Give the module this state, by reference; what it holds beyond that is gone."""
    attributes, buffers = state
    for name in vars(module).keys() - REGISTRIES - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def clone_state(state: ModuleState) -> ModuleState:
    attributes, buffers = state
    return dict(attributes), {name: None if own is None else own.clone() for name, own in buffers.items()}


def copy_frequencies(model: torch.nn.Module) -> Frequencies | None:
    """The original frequencies, for a new context; None for a model whose frequencies never change."""
    module = find_rotary_module(model)
    kinds = module.rope_type if isinstance(module.rope_type, Mapping) else {"": module.rope_type}
    return Frequencies(module) if set(kinds.values()) & set(LENGTH_DEPENDENT_ROPE) else None


class ContextCache(Cache):
    """transformers' cache of one context. `frequencies`: the context's own, where the model's change."""

    def __init__(self, layers: list[CacheLayerMixin], frequencies: Frequencies | None) -> None:
        super().__init__(layers=layers)
        self.frequencies = frequencies


def make_cache(model: torch.nn.Module, layers: list[AttentionLayer | None]) -> ContextCache:
    """A transformers cache with a Port in front of each of `layers`, and its own sliding layer where there is None."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    own = copy_frequencies(model)
    return ContextCache(
        [
            SlidingWindowLayer(sliding_window=config.sliding_window)
            if layer is None
            else CacheLayerPort(layer, make_rotation(model, kind, own))
            for layer, kind in zip(layers, kinds, strict=True)
        ],
        own,
    )


def make_rotation(
    model: torch.nn.Module, kind: str, frequencies: Frequencies | None = None
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The model's own rotary embedding: places (B, n) to cos, sin (B, n, rotated dimensions). `frequencies`: of the
    context that asks; without them the original ones of a model whose frequencies change.
    """
    module, frequencies = find_rotary_module(model), frequencies or copy_frequencies(model)
    own = (kind,) if hasattr(module, "layer_types") else ()  # Gemma3 has one rotation per kind of layer

    def rotate(places: Tensor) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        like, there = torch.empty(0, dtype=torch.float32, device=device), places.to(device)
        found = frequencies.rotate(there, own, like) if frequencies else module(like, there, *own)
        return tuple(part.to(places.device) for part in found)

    return rotate


def forward(model: torch.nn.Module, ids: Tensor, cache: ContextCache, keep: int) -> Tensor:
    """Logits (B, keep, vocab) of the last `keep` of the tokens `ids` (B, T), 0 for all of them."""
    tokens = cache.get_seq_length() + ids.shape[1]
    with cache.frequencies.install(tokens) if cache.frequencies else nullcontext():
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits


def make_plain_cache(model: torch.nn.Module, rows: int | None = None) -> Cache:
    """transformers' own cache, to compare with: one that grows, or a static one of `rows` tokens."""
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config) if rows is None else StaticCache(config=config, max_cache_len=rows)
