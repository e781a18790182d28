"""Connect kvbench to transformers through its public registries: an attention function and cache layers.

A cache layer's `update` may return any object, and transformers passes it to the attention function as `key`. A port
therefore returns itself, and the attention function calls it. Nothing of transformers is patched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
)

from kvbench.interfaces.layout import Layout, Probe
from kvbench.interfaces.observation import KeyRotation, LayerInputs
from kvbench.kernels.attention.sdpa import attend_windowed
from kvbench.kernels.rerotation import rotate
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.models.layer_state import LayerState, copy_state, count_state_bytes, has_state, put_state, repeat_state
from kvbench.models.layouts import (
    LENGTH_DEPENDENT_ROPE,
    WITHOUT_ROPE,
    Configuration,
    read_config_layout,
    read_layer_config,
    read_rope_settings,
    read_text_type,
)
from kvbench.models.rotations import (
    FIRST_POSITION,
    AngleForm,
    Rotation,
    find_form,
    find_key_norm,
    find_order,
    find_rotary,
    is_rotated,
    stand_still,
)
from kvbench.validation import SettingError

NAME = "kvbench"
HARMLESS = frozenset(  # arguments of attention that change none of its outputs, if nothing is trained
    ["dropout", "position_ids", "cache_position", "use_cache", "logits_to_keep"]
    + ["output_attentions", "output_hidden_states", "output_router_logits", "return_dict"]
)


PROBED: WeakKeyDictionary[torch.nn.Module, Probe] = WeakKeyDictionary()  # models of architectures beside the list


class AttentionLayer(Protocol):
    """The part of a layer of kvbench's cache that a port uses."""

    @property
    def wants_unrotated_keys(self) -> bool:
        """Whether `append` needs the keys before QK norm and rotation."""

    @property
    def wants_hidden(self) -> bool:
        """Whether `append` needs the hidden states that enter the layer."""

    @property
    def wants_normed_hidden(self) -> bool:
        """Whether `append` needs the hidden states behind the layer's norm."""

    def append(self, keys: Tensor, values: Tensor, inputs: LayerInputs | None) -> None:
        """Append a block's keys and values. `inputs` is None unless the layer asks for some of them."""

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
        extras: SoftmaxExtras | None = None,
    ) -> Tensor:
        """Return the attention outputs of the block that was appended last."""


class CacheLayerPort(CacheLayerMixin):
    """A transformers cache layer that forwards to a kvbench layer.

    Its length is the number of tokens read, not of rows held, so that transformers computes the right positions.
    """

    is_sliding = False

    def __init__(self, layer: AttentionLayer, turning: "LayerRotation") -> None:
        super().__init__()
        self.layer, self.turning, self.seen = layer, turning, 0
        self.inputs: LayerInputs | None = None  # of the block that the model reads

    @property
    def wants_inputs(self) -> bool:
        """Whether the layer asks for any of what enters its attention."""
        layer = self.layer
        return layer.wants_unrotated_keys or layer.wants_hidden or layer.wants_normed_hidden

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        """Append a block and return the port itself, twice, in place of keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        self.seen += key_states.shape[2]
        inputs, self.inputs = self.inputs, None
        self.layer.append(put_in_order(key_states, self.turning.order), value_states, inputs)
        return self, self

    def make_key_rotation(self, module: Any) -> KeyRotation:
        """Return what norms and rotates keys as a decoder layer does, and puts them in the order of `LayerRotation`."""
        norm, rotation, order = find_key_norm(find_attention(module)), self.turning.rotation, self.turning.order

        def rotate_keys(keys: Tensor, places: Tensor) -> Tensor:
            shape = places.shape
            if norm.joint and shape[1] > 1 and not bool((places == places[:, :1]).all()):
                raise SettingError("model: it norms the keys of all heads together, but heads hold other tokens")
            cos, sin = (part.unflatten(0, shape[:2]).to(keys.dtype) for part in rotation(places.flatten(0, 1)))
            rotated = rotate(put_in_order(keys if norm.late else norm(keys), order), cos, sin)
            return norm(rotated) if norm.late else rotated

        return rotate_keys

    @contextmanager
    def observe_inputs(self, module: Any, heads: int) -> Iterator[None]:
        """Take what the layer asks for from forward hooks of the model's modules, inside the `with` block.

        Args:
            module: The decoder layer.
            heads: Number of KV heads.
        """
        layer, attention = self.layer, find_attention(module)
        fused = getattr(attention, "qkv_proj", None)  # Phi-3 has queries, keys and values in one projection
        projection = attention.k_proj if fused is None else fused
        rotate_keys = self.make_key_rotation(module)

        def add(**taken: Tensor) -> None:
            given: dict[str, Any] = {name: tensor.detach() for name, tensor in taken.items()}
            self.inputs = replace(self.inputs or LayerInputs(None, None, None, rotate_keys), **given)

        def take_hidden(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            add(hidden=args[0] if args else kwargs["hidden_states"])

        def take_normed(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            add(normed_hidden=args[0] if args else kwargs["hidden_states"])

        def take_keys(_: object, args: tuple[Any, ...], output: Tensor) -> None:
            size = heads * attention.head_dim
            keys = output if fused is None else output[..., -2 * size : -size]
            add(keys=keys.unflatten(-1, (heads, attention.head_dim)).transpose(1, 2))

        handles = []
        try:
            if layer.wants_hidden:
                handles.append(module.register_forward_pre_hook(take_hidden, with_kwargs=True))
            if layer.wants_normed_hidden:
                handles.append(attention.register_forward_pre_hook(take_normed, with_kwargs=True))
            if layer.wants_unrotated_keys:
                handles.append(projection.register_forward_hook(take_keys))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.inputs = None

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.17


class StatefulLayerPort(CacheLayerPort, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A port of a layer that has a recurrent or convolutional state beside its rows. transformers keeps the state."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepare for rows of a kind (keys, values), or for a state of a kind (keyword arguments)."""
        if args:
            CacheLayerPort.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


PORT_FIELDS = frozenset(["layer", "turning", "seen", "inputs", "keys", "values", "is_initialized", "dtype", "device"])


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """transformers' own sliding-window layer, which frees what has left the window instead of holding a view of it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        everything = super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None  # `update` has set them
        if self.keys.shape != everything[0].shape:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return everything


@dataclass(frozen=True)
class ChunkedRows:
    """The rows that a block of a layer attends to within chunks."""

    keys: Tensor
    """(B, H, n, d)"""
    values: Tensor
    """(B, H, n, d)"""
    chunk: int
    """Number of tokens of a chunk."""
    first: int
    """Position of the first row."""


class ChunkedLayer(SlidingWindowLayer):
    """A layer whose queries see the rows of their own chunk. It returns `ChunkedRows` in place of keys and values.

    It holds as many of the last rows as a chunk has, whatever chunk they are in, as transformers' own layer does.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        rows = ChunkedRows(keys, values, self.sliding_window, self.cumulative_length - keys.shape[2])
        return rows, rows


def attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend for transformers, which calls this function by name.

    Args:
        module: The attention module of the layer.
        query: (B, Hq, T, d)
        key: A `CacheLayerPort`, `ChunkedRows`, or keys (B, H, n, d) in a layer with a sliding window.
        value: Likewise.
        attention_mask: None; attention is causal.
        scaling: The factor of the logits; None is 1/√d.
        sliding_window: Number of tokens of the layer's window.
        s_aux: The layer's sinks, one logit for each query head, (Hq,) (gpt-oss).
        softcap: The cap of the logits (Gemma 2).
        **kwargs: Not used (`HARMLESS`).

    Returns:
        The outputs, (B, T, Hq, d), and None for the probabilities.

    Raises:
        SettingError: The model computes another attention, for example with a bias of positions.
    """
    refuse_arguments({"attention_mask": attention_mask, **kwargs})
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = make_extras(query, s_aux, softcap)
    with torch.cuda.device_of(query):  # a layer's kernels must run on the layer's GPU
        if isinstance(key, CacheLayerPort):
            query = put_in_order(query, key.turning.order)
            outputs = key.layer.attend(query, scaling, find_output_projection(module).weight, key.turning.again, extras)
        elif isinstance(key, ChunkedRows):
            outputs = attend_windowed(
                query, key.keys, key.values, scaling, None, extras, chunk=key.chunk, first=key.first
            )
        else:
            outputs = attend_windowed(query, key, value, scaling, sliding_window, extras)
    return outputs.transpose(1, 2).contiguous(), None  # as eager's: AFMoE calls `view` on it


def make_extras(query: Tensor, sinks: Tensor | None, cap: float | None) -> SoftmaxExtras | None:
    """Return what the softmax of a layer with queries (B, Hq, T, d) has beside its logits, or None if it is plain.

    Raises:
        SettingError: The sinks are not one logit for each query head, or the cap is not above 0.
    """
    if sinks is None and cap is None:
        return None
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise SettingError(f"model: its attention takes s_aux {tuple(sinks.shape)} for {query.shape[1]} query heads")
    if cap is not None and not cap > 0:
        raise SettingError(f"model: its attention takes softcap={cap}, expected a number above 0")
    return SoftmaxExtras(None if sinks is None else sinks.detach(), cap)


def refuse_arguments(given: Mapping[str, object]) -> None:
    """Raise a SettingError if the attention function of a model is given an argument that may change its outputs."""
    for name, argument in given.items():
        is_causal = name == "is_causal" and argument is True
        if argument is not None and name not in HARMLESS and not is_causal:
            raise SettingError(f"model: its attention takes {name}, which kvbench does not compute")


@contextmanager
def kvbench_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let the model attend through kvbench inside the `with` block, and as before afterwards."""
    AttentionInterface.register(NAME, attention)
    with use_attention(model, NAME):
        yield


@contextmanager
def use_attention(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Let the model attend by a function of transformers' registry inside the `with` block."""
    config = cast(PreTrainedModel, model).config
    parts = {"": config} | {key: getattr(config, key) for key in config.sub_configs}
    before = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    config._attn_implementation = name  # `set_attn_implementation` would visit every module, for every token
    try:
        yield
    finally:
        config._attn_implementation = before


def text_config(model: torch.nn.Module) -> Any:
    """Return the configuration of a model's text decoder."""
    return cast(PreTrainedModel, model).config.get_text_config(decoder=True)


@contextmanager
def use_first_layers(model: torch.nn.Module, least: int) -> Iterator[None]:
    """Let the model consist of its first layers inside the `with` block, for work that needs no right outputs.

    Args:
        model: A supported transformers model.
        least: Number of layers. If a kind of layer comes later, the layers up to the first one of this kind are used.
    """
    config = text_config(model)
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    count = min(config.num_hidden_layers, max([least, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    names: Mapping[str, str] = getattr(config, "attribute_map", {})
    fewer: dict[str, Any] = {"num_hidden_layers": count}
    fewer |= {names.get("layer_types", "layer_types"): kinds[:count]} if kinds else {}
    before = {name: value for name, value in vars(config).items() if name in fewer}  # others follow from these
    decoder = find_text_decoder(model)
    layers = decoder.layers
    vars(config).update({name: fewer[name] for name in before})
    decoder.layers = layers[:count]  # some models visit all layers that they have
    try:
        yield
    finally:
        vars(config).update(before)
        decoder.layers = layers


def embedding_tables(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weights of the embedding and of the output layer, (vocab, hidden) each; they may be one tensor."""
    decoder = cast(PreTrainedModel, model)
    inputs, outputs = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    return inputs.get_parameter("weight"), outputs.get_parameter("weight")


def find_class(config: object) -> type | None:
    """Return the class of transformers' language model with such a configuration, or None if there is none.

    A multimodal model is taken as a whole, so that each of its weights has a place, although no image is read.
    """
    kind = cast(type[PreTrainedConfig], type(config))
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_multimodal(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return cast(type, mapping[kind]) if kind in mapping else None


def find_factory(config: object) -> Any:
    """Return the class of transformers that makes and loads models of the class that `find_class` returns."""
    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def is_multimodal(config: object) -> bool:
    """Return whether a model has a text decoder beside parts for images, which transformers loads by another class."""
    kind = cast(type[PreTrainedConfig], type(config))
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING or read_text_type(cast(Configuration, config)) != kind.model_type


def read_layout(model: torch.nn.Module) -> Layout:
    """Return the layout of a model.

    Raises:
        SettingError: The architecture is not on the tested list, and the model is not in `PROBED`.
    """
    return read_config_layout(cast(PreTrainedModel, model).config, PROBED.get(model))


def find_text_decoder(model: torch.nn.Module) -> Any:
    """Return the module that has the embedding, the layers and the last norm.

    A vision tower may have layers too, so only transformers' text decoder is searched.

    Raises:
        SettingError: There is no such module.
    """
    decoder = cast(PreTrainedModel, model).get_decoder()
    for module in decoder.modules():
        if hasattr(module, "layers"):
            return module
    raise SettingError(f"model: its decoder has no modules named layers ({type(decoder).__name__})")


def find_rotary_module(model: torch.nn.Module) -> Any:
    """Return the module that computes the angles of the rotary embedding, or None if the model has none."""
    decoder = find_text_decoder(model)
    return getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)  # LFM2-MoE has the second name


def find_attention(layer: Any) -> Any:
    """Return the attention module of a decoder layer that attends. Nemotron-H calls the only part of a layer its mixer.

    Raises:
        AttributeError: It has none, or it has another name.
    """
    attention = getattr(layer, "self_attn", None)
    return layer.mixer if attention is None else attention


def find_output_projection(attention: Any) -> Any:
    """Return the projection W_o of an attention module.

    Raises:
        AttributeError: It has none, or it has another name.
    """
    name = next((name for name in ("out_proj", "dense") if hasattr(attention, name)), "o_proj")
    return getattr(attention, name)


def list_decoder_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers of the text decoder that read, which are all or the first ones (`use_first_layers`)."""
    return list(find_text_decoder(model).layers[: text_config(model).num_hidden_layers])


class Frequencies:
    """The rotary frequencies of one context, for models whose frequencies follow the largest position.

    These are dynamic RoPE and LongRoPE. transformers keeps the frequencies in the model's rotary module. After a long
    prompt they would be used for the next one, too (`dynamic_rope_update` in transformers/modeling_rope_utils.py). A
    context therefore has a copy of that module's state. The copy starts with the original frequencies, and replaces the
    module's state while the model reads for this context.
    """

    def __init__(self, module: Any) -> None:
        """Copy the original frequencies of a rotary module."""
        self.module, self.longest = module, 0  # longest: number of tokens read
        attributes, buffers = module_state(module)
        for name in buffers.keys() | attributes.keys():
            if name.endswith("original_inv_freq"):
                buffers[name.replace("original_", "")] = getattr(module, name)
        for name in attributes.copy():
            if name.endswith("_max_seq_len_cached"):  # one per kind of layer, set when its length first grows
                del attributes[name]
        attributes["max_seq_len_cached"] = module.original_max_seq_len
        self.state = clone_state((attributes, buffers))

    @contextmanager
    def install(self, tokens: int) -> Iterator[None]:
        """Put these frequencies into the rotary module inside the `with` block, for a text of `tokens` tokens."""
        before, self.longest = module_state(self.module), tokens
        set_module_state(self.module, self.state)
        try:
            yield
        finally:
            self.state = module_state(self.module)
            set_module_state(self.module, before)

    def rotate(self, places: Tensor, extra: tuple[str, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cos and sin of positions, as the model would rotate them now.

        The frequencies do not change, even for positions that the model has not reached.

        Args:
            places: Positions, (B, n).
            extra: Further arguments of the rotary module.
            like: A tensor with the dtype and device of the result.
        """
        longest = places.new_full((places.shape[0], 1), max(self.longest - 1, 0))
        asked = self.copy()
        with asked.install(asked.longest):  # a copy, because LongRoPE of transformers 5.23 writes to it
            cos, sin = self.module(like, torch.cat([places, longest], 1), *extra)
        return cos[:, :-1], sin[:, :-1]

    def copy(self) -> "Frequencies":
        """Return a copy for another context."""
        other = copy(self)
        other.take_over(self)
        return other

    def take_over(self, other: "Frequencies") -> None:
        """Take over the state of other frequencies."""
        self.state, self.longest = clone_state(other.state), other.longest


ModuleState = tuple[dict[str, Any], dict[str, Tensor | None]]  # plain attributes, buffers
REGISTRIES = frozenset(vars(torch.nn.Module()))


def module_state(module: torch.nn.Module) -> ModuleState:
    """Return the attributes and buffers that the module's forward may replace. Tensors are not copied."""
    attributes = {name: attribute for name, attribute in vars(module).items() if name not in REGISTRIES}
    return attributes, dict(module._buffers)


def set_module_state(module: torch.nn.Module, state: ModuleState) -> None:
    """Set the state of a module, by reference, and delete everything else that its forward may have set."""
    attributes, buffers = state
    for name in vars(module).keys() - REGISTRIES - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def clone_state(state: ModuleState) -> ModuleState:
    """Copy a state and its tensors."""
    attributes, buffers = state
    return dict(attributes), {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


def copy_frequencies(model: torch.nn.Module) -> Frequencies | None:
    """Return the original frequencies for a new context, or None for a model whose frequencies never change."""
    module = find_rotary_module(model)
    if module is None:
        return None
    kinds = module.rope_type if isinstance(module.rope_type, Mapping) else {"": module.rope_type}
    return Frequencies(module) if set(kinds.values()) & set(LENGTH_DEPENDENT_ROPE) else None


class ContextCache(Cache):
    """The transformers cache of one context, with the context's own frequencies if the model's change."""

    def __init__(self, layers: Sequence[CacheLayerMixin], frequencies: Frequencies | None) -> None:
        super().__init__(layers=[*layers])
        self.frequencies = frequencies

    @property
    def stateful(self) -> list[object]:
        """The layers that have a recurrent or convolutional state."""
        return [layer for layer in self.layers if has_state(layer)]

    def copy_states(self) -> list[LayerState]:
        """Return copies of all recurrent and convolutional states.

        Raises:
            SettingError: A layer holds something that cannot be copied.
        """
        return [copy_state(layer, PORT_FIELDS) for layer in self.stateful]

    def put_states(self, states: Sequence[LayerState]) -> None:
        """Put copies of states into the layers, which `copy_states` of this cache or of another context's returned."""
        for layer, state in zip(self.stateful, states, strict=True):
            put_state(layer, state)

    def repeat_states(self, times: int) -> None:
        """Repeat all states for a batch of `times` equal samples."""
        for layer in self.stateful:
            repeat_state(layer, times, PORT_FIELDS)

    def count_state_bytes(self) -> int:
        """Return the bytes of all recurrent and convolutional states."""
        return sum(count_state_bytes(layer, PORT_FIELDS) for layer in self.stateful)


def make_cache(model: torch.nn.Module, layers: Sequence[AttentionLayer | None]) -> ContextCache:
    """Make a transformers cache: a port for each of `layers`, and transformers' own layer for None."""
    frequencies = copy_frequencies(model)
    plain = DynamicCache(config=text_config(model)).layers
    every = zip(layers, plain, list_kinds(model), make_rotations(model, frequencies), strict=True)
    return ContextCache([make_cache_layer(*layer) for layer in every], frequencies)


def list_kinds(model: torch.nn.Module) -> Sequence[str]:
    """Return the kind of each layer, such as "sliding_attention"."""
    config = text_config(model)
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def make_cache_layer(layer: AttentionLayer | None, plain: Any, kind: str, turning: "LayerRotation") -> CacheLayerMixin:
    """Make one layer of a transformers cache.

    Args:
        layer: The layer of kvbench's cache, or None if kvbench does not hold its rows.
        plain: The new layer that transformers would take.
        kind: The kind of layer.
        turning: How the layer rotates.
    """
    if layer is not None:
        return (StatefulLayerPort if has_state(plain) else CacheLayerPort)(layer, turning)
    if isinstance(plain, DynamicSlidingWindowLayer) and not has_state(plain):
        like = ChunkedLayer if kind == "chunked_attention" else SlidingWindowLayer
        return like(sliding_window=plain.sliding_window)
    return cast(CacheLayerMixin, plain)


@dataclass(frozen=True)
class LayerRotation:
    """How a layer rotates queries and keys. Layers that rotate alike have the same function."""

    rotation: Rotation
    """The rotary embedding, for halves."""
    again: Rotation
    """The same for keys and queries that were rotated before; it refuses where that is not the model's rotation."""
    order: Tensor | None
    """The model's dimensions of a head in the order in which kvbench holds those of queries and keys, (d,), or None if
    it holds them as they are.
    """


def put_in_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return queries or keys (…, d) with their dimensions in the order of `LayerRotation.order`."""
    return rows if order is None else rows.index_select(-1, order.to(rows.device))


FORMS: WeakKeyDictionary[torch.nn.Module, tuple[AngleForm, int]] = WeakKeyDictionary()
"""For rotary modules how they state angles, and the number of dimensions that they rotate."""


def make_rotations(model: torch.nn.Module, frequencies: Frequencies | None = None) -> list[LayerRotation]:
    """Return how the layers of a model rotate.

    Args:
        model: A supported transformers model.
        frequencies: The context's own frequencies. Without them the original ones are used if the model's change.
    """
    decoder, layers, layout = find_text_decoder(model), list_decoder_layers(model), read_layout(model)
    attending, kinds = {*layout.held, *layout.sliding}, list_kinds(model)
    frequencies, common = frequencies or copy_frequencies(model), find_rotary_module(model)
    refuse = partial(refuse_rotation, layout.rotation_fault or WITHOUT_ROPE)
    known: dict[object, LayerRotation] = {}
    turnings = []
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if index not in attending or layout.rotation_fault is not None or common is None:
            turnings.append(LayerRotation(refuse, refuse, None))
            continue
        attention = find_attention(layer)
        rotary, rotated = find_rotary(decoder, attention, common), is_rotated(attention)
        same = rotated, rotary, kind if hasattr(rotary, "layer_types") else ""
        if same not in known:
            changing = frequencies if frequencies is not None and frequencies.module is rotary else None
            state_angles = partial(compute_angles, model, rotary, same[2], changing)
            known[same] = make_layer_rotation(model, attention, rotary, rotated, state_angles, layout.rerotation_fault)
        turnings.append(known[same])
    return turnings


def make_layer_rotation(
    model: torch.nn.Module,
    attention: Any,
    rotary: torch.nn.Module,
    rotated: bool,
    state_angles: Callable[[Tensor], tuple[Tensor, Tensor] | Tensor],
    fault: str | None,
) -> LayerRotation:
    """Return how a layer rotates.

    Args:
        model: A supported transformers model.
        attention: The layer's attention module.
        rotary: Its rotary module.
        rotated: Whether it rotates at all.
        state_angles: Returns what the rotary module does for positions (B, n).
        fault: Why rotated keys cannot be rotated to other positions, or None if they can.
    """
    device = next(model.parameters()).device
    if rotary not in FORMS:
        sample = state_angles(torch.ones(1, 1, dtype=torch.int64, device=device))
        form = find_form(attention, sample)
        FORMS[rotary] = form, form.convert(sample)[0].shape[-1]
    form, width = FORMS[rotary]

    def rotation(places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = form.convert(state_angles(places.to(device)))
        return cos.to(places.device), sin.to(places.device)

    if not rotated:
        return LayerRotation(still := partial(stand_still, width), still, None)
    again = rotation if fault is None else partial(refuse_rotation, fault)
    return LayerRotation(rotation, again, find_order(form, width, attention.head_dim, device))


def compute_angles(
    model: torch.nn.Module, rotary: Any, kind: str, frequencies: Frequencies | None, places: Tensor
) -> tuple[Tensor, Tensor] | Tensor:
    """Return what a rotary module does for positions (B, n).

    Args:
        model: The model.
        rotary: The rotary module.
        kind: The kind of layer, for a module that has one rotation for each kind, such as Gemma 3's. Otherwise "".
        frequencies: The context's own frequencies, or None if the module's never change.
        places: The positions, on the model's device.
    """
    like, extra = torch.empty(0, dtype=torch.float32, device=places.device), (kind,) if kind else ()
    places = places + FIRST_POSITION.get(cast(PreTrainedModel, model).config.model_type, 0)
    if frequencies is not None:
        return frequencies.rotate(places, extra, like)
    if "mrope_section" in read_rope_settings(text_config(model)) or hasattr(rotary, "mrope_section"):
        places = places.expand(3, -1, -1)  # a text has the same position on each axis of an image
    angles: tuple[Tensor, Tensor] | Tensor = rotary(like, places, *extra)
    return angles


def refuse_rotation(fault: str, places: Tensor) -> tuple[Tensor, Tensor]:
    """Raise a SettingError in place of rotating, because it would be wrong."""
    raise SettingError(f"model: kvbench cannot rotate its keys: {fault}")


def forward(model: torch.nn.Module, ids: Tensor, cache: ContextCache, keep: int) -> Tensor:
    """Read tokens through the model.

    Args:
        model: A supported transformers model, inside `kvbench_attention`.
        ids: Token ids, (B, T).
        cache: The context's cache.
        keep: Number of last tokens whose logits are returned; 0 for all.

    Returns:
        Logits, (B, keep, vocab).
    """
    tokens = cache.get_seq_length() + ids.shape[1]
    with cache.frequencies.install(tokens) if cache.frequencies else nullcontext(), observe_inputs(model, cache):
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits


def differentiate(
    model: torch.nn.Module, ids: Tensor, cache: ContextCache, objective: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Read tokens through the model and differentiate a number that depends on their last hidden states.

    Args:
        model: A supported transformers model, inside `kvbench_attention`.
        ids: Token ids, (B, T).
        cache: The context's cache.
        objective: Makes a number of the hidden states that leave the last layer, before the final norm, (B, T, hidden).

    Returns:
        The logits of the last token, (B, 1, vocab), and, by the numbers of the layers whose rows kvbench holds, the
        gradients by what their attention returns after W_o, (B, T, hidden) each.
    """
    added, hidden = dict[int, Tensor](), list[Tensor]()
    layers = list_decoder_layers(model)
    attending = {index: layers[index] for index, port in enumerate(cache.layers) if isinstance(port, CacheLayerPort)}

    def begin(module: object, args: object, output: Tensor) -> Tensor:  # also if no weight requires a gradient
        return output.detach().requires_grad_()

    def take_added(index: int, module: object, args: object, output: Tensor) -> None:
        added[index] = output

    def take_hidden(module: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    embedding = cast(PreTrainedModel, model).get_input_embeddings()
    handles = [embedding.register_forward_hook(begin), layers[-1].register_forward_hook(take_hidden)]
    for index, layer in attending.items():
        projection = find_output_projection(find_attention(layer))
        handles.append(projection.register_forward_hook(partial(take_added, index)))
    try:
        with torch.enable_grad():
            logits = forward(model, ids, cache, 1)
            gradients = torch.autograd.grad(objective(hidden[0]), list(added.values()))
    finally:
        for handle in handles:
            handle.remove()
    return logits.detach(), dict(zip(added, gradients, strict=True))


@contextmanager
def observe_inputs(model: torch.nn.Module, cache: ContextCache) -> Iterator[None]:
    """Let the ports of a cache take what their layers ask for while the model reads. Others cost nothing."""
    with ExitStack() as stack:
        asking = {
            i: port for i, port in enumerate(cache.layers) if isinstance(port, CacheLayerPort) and port.wants_inputs
        }
        layers, text = list_decoder_layers(model) if asking else [], text_config(model)  # listing visits all modules
        for index, port in asking.items():
            stack.enter_context(port.observe_inputs(layers[index], read_layer_config(text, index).num_key_value_heads))
        yield


@contextmanager
def watch_numbers(model: torch.nn.Module) -> Iterator[list[int]]:
    """Note the layers in which a module returns numbers that are not finite, in the order in which they do.

    The host waits for each module, so this is for finding the cause of an error.
    """
    indices: list[int] = []

    def note(index: int, module: torch.nn.Module, inputs: object, output: object) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                indices.append(index)

    layers = enumerate(list_decoder_layers(model))
    handles = [part.register_forward_hook(partial(note, index)) for index, layer in layers for part in layer.modules()]
    try:
        yield indices
    finally:
        for handle in handles:
            handle.remove()


def make_plain_cache(model: torch.nn.Module, rows: int | None = None) -> Cache:
    """Return transformers' own cache to compare with: one that grows, or a static one for `rows` tokens."""
    config = text_config(model)
    return DynamicCache(config=config) if rows is None else StaticCache(config=config, max_cache_len=rows)


def list_plain_rows(cache: Cache) -> dict[int, tuple[Tensor, Tensor]]:
    """Return keys and values, by layer, of a cache that `make_plain_cache` made and that has read a prompt.

    Layers without rows are left out.
    """
    layers: dict[int, Any] = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)}
    return {index: (layer.keys, layer.values) for index, layer in layers.items()}


def count_plain_rows(cache: Cache) -> int:
    """Return the bytes of the keys and values of such a cache."""
    return sum(keys.nbytes + values.nbytes for keys, values in list_plain_rows(cache).values())


def count_plain_states(cache: Cache) -> int:
    """Return the bytes of the recurrent and convolutional states of such a cache."""
    return sum(count_state_bytes(layer, PORT_FIELDS) for layer in cache.layers if has_state(layer))


def repeat_plain_rows(cache: Cache, times: int) -> None:
    """Repeat the rows and states of such a cache for a batch of `times` equal samples."""
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin):
            cast(Any, layer).batch_repeat_interleave(times)
        if has_state(layer):
            repeat_state(layer, times, PORT_FIELDS)


def copy_plain_rows(source: Cache, target: Cache) -> None:
    """Copy rows and states of such a cache into an empty one. The memory of a static cache stays where it is."""
    for index, (keys, values) in list_plain_rows(source).items():
        target.update(keys, values, index)
    for index, layer in enumerate(cast(list[Any], source.layers)):
        if has_state(layer):
            for number, state in layer.conv_states.items():
                if state is not None:
                    target.update_conv_state(state, index, number)
            for number, state in layer.recurrent_states.items():
                if state is not None:
                    target.update_recurrent_state(state, index, number)
