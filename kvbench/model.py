"""Where kvbench meets transformers, through its public registries only: an attention function and cache layers.

A cache layer's `update` may return any object and it reaches the attention function as `key`: so a Port hands itself
over and the attention function asks it. Nothing of transformers is patched.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer, StaticCache
from transformers.utils import logging

from kvbench.gguf_model import find_converted, read_samples
from kvbench.kernels.attention.sdpa import attend_windowed
from kvbench.model_cache import FETCHED_MODELS, MODELS, check_fetched, identify
from kvbench.settings import SettingError, check_model_path, is_gguf

NAME = "kvbench"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3")
SWITCHING = ("longrope", "dynamic")  # RoPE whose frequencies follow the longest place
PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # see `weights_of`
IDENTITY = (
    "model",
    "pytorch",
    "config.",
    "generation_config",
    "tokenizer",
    "special",
    "added",
    "chat_",
    "vocab",
    "merges",
)
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
VERSIONS = Path(__file__).resolve().parent / "reference"
REFERENCE = VERSIONS / "v2"  # what model=reference is
EMBEDDED_MODELS = {"reference": REFERENCE, "reference_v1": VERSIONS / "v1", "reference_v2": VERSIONS / "v2"}
KNOWN_MODELS = EMBEDDED_MODELS | {name: MODELS / name for name in FETCHED_MODELS}


class Remembers(Protocol):
    """What a layer of kvbench's cache offers to a Port."""

    def append(self, keys: Tensor, values: Tensor) -> None: ...

    def attend(
        self,
        queries: Tensor,
        scaling: float,
        output_weight: Tensor,
        rotation: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor: ...


class Port(CacheLayerMixin):
    """A transformers cache layer in front of a kvbench layer. Its length is tokens seen, so positions stay right."""

    is_sliding = False

    def __init__(self, layer: Remembers, rotation: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer, self.rotation, self.seen = layer, rotation, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple["Port", "Port"]:
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


class Sliding(DynamicSlidingWindowLayer):
    """transformers' own sliding-window layer, which frees what has left the window instead of holding a view of it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        everything = super().update(key_states, value_states, *args, **kwargs)
        if self.keys.shape != everything[0].shape:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return everything


def attention(
    module: torch.nn.Module, query: Tensor, key: Port | Tensor, value: Port | Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that transformers calls by name; queries (B, Hq, T, d), outputs (B, T, Hq, d)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.cuda.device_of(query):  # a layer's kernels run where the layer is
        if isinstance(key, Port):
            outputs = key.layer.attend(query, scaling, module.o_proj.weight, key.rotation)
        else:
            outputs = attend_windowed(query, key, value, scaling, sliding_window)
    return outputs.transpose(1, 2), None


@contextmanager
def attached(model: torch.nn.Module) -> Iterator[None]:
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


def layout(model: torch.nn.Module) -> Layout:
    """The layers of a supported model; SettingError for another architecture."""
    return layout_of(model.config)


def layout_of(config: Any) -> Layout:
    """The same from a model's configuration, before it is loaded."""
    check_architecture(config)
    config = config.get_text_config(decoder=True)
    own = DynamicCache(config=config).layers
    sliding = tuple(i for i, layer in enumerate(own) if layer.is_sliding)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    all_slide = len(sliding) == config.num_hidden_layers
    window = own[0].sliding_window if all_slide else None
    return Layout(config.num_hidden_layers, config.num_key_value_heads, dim, () if all_slide else sliding, window)


def rotary_module(model: torch.nn.Module) -> torch.nn.Module:
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
        attributes, buffers = held_by(module)
        for name in buffers.keys() | attributes.keys():
            if name.endswith("original_inv_freq"):
                buffers[name.replace("original_", "")] = getattr(module, name)
        for name in attributes.copy():
            if name.endswith("_max_seq_len_cached"):  # of a kind of layer: made when its length first grows
                del attributes[name]
        attributes["max_seq_len_cached"] = module.original_max_seq_len
        self.state = cloned((attributes, buffers))

    @contextmanager
    def used(self, tokens: int) -> Iterator[None]:
        """The rotary module has this context's frequencies inside, for so many tokens, and its own again afterwards."""
        before, self.longest = held_by(self.module), tokens
        put(self.module, self.state)
        try:
            yield
        finally:
            self.state = held_by(self.module)
            put(self.module, before)

    def rotate(self, places: Tensor, own: tuple[str, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `places` (B, n), as the model would turn them now; the frequencies stay as they are, although
        a method may ask for places that the model has not reached.
        """
        longest = places.new_full((places.shape[0], 1), max(self.longest - 1, 0))
        asked = self.copy()
        with asked.used(asked.longest):  # a copy: from transformers 5.23 on LongRoPE writes into the module's buffer
            cos, sin = self.module(like, torch.cat([places, longest], 1), *own)
        return cos[:, :-1], sin[:, :-1]

    def copy(self) -> "Frequencies":
        """Another context's, which are the same now."""
        other = copy(self)
        other.take_over(self)
        return other

    def take_over(self, other: "Frequencies") -> None:
        """Become what `other` is now."""
        self.state, self.longest = cloned(other.state), other.longest


ModuleState = tuple[dict[str, Any], dict[str, Tensor | None]]  # plain attributes, buffers
REGISTRIES = frozenset(vars(torch.nn.Module()))


def held_by(module: torch.nn.Module) -> ModuleState:
    """The attributes and buffers that the module's forward may replace; the tensors are the module's own."""
    return {name: own for name, own in vars(module).items() if name not in REGISTRIES}, dict(module._buffers)


def put(module: torch.nn.Module, state: ModuleState) -> None:
    """Give the module this state, by reference; what it holds beyond that is gone."""
    attributes, buffers = state
    for name in vars(module).keys() - REGISTRIES - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


def cloned(state: ModuleState) -> ModuleState:
    attributes, buffers = state
    return dict(attributes), {name: None if own is None else own.clone() for name, own in buffers.items()}


def frequencies_of(model: torch.nn.Module) -> Frequencies | None:
    """The original frequencies, for a new context; None for a model whose frequencies never change."""
    module = rotary_module(model)
    kinds = module.rope_type if isinstance(module.rope_type, Mapping) else {"": module.rope_type}
    return Frequencies(module) if set(kinds.values()) & set(SWITCHING) else None


class ContextCache(Cache):
    """transformers' cache of one context. `frequencies`: the context's own, where the model's change."""

    def __init__(self, layers: list[CacheLayerMixin], frequencies: Frequencies | None) -> None:
        super().__init__(layers=layers)
        self.frequencies = frequencies


def make_cache(model: torch.nn.Module, layers: list[Remembers | None]) -> ContextCache:
    """A transformers cache with a Port in front of each of `layers`, and its own sliding layer where there is None."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    own = frequencies_of(model)
    return ContextCache(
        [
            Sliding(sliding_window=config.sliding_window) if layer is None else Port(layer, rotation(model, kind, own))
            for layer, kind in zip(layers, kinds, strict=True)
        ],
        own,
    )


def rotation(
    model: torch.nn.Module, kind: str, frequencies: Frequencies | None = None
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The model's own rotary embedding: places (B, n) to cos, sin (B, n, rotated dimensions). `frequencies`: of the
    context that asks; without them the original ones of a model whose frequencies change.
    """
    module, frequencies = rotary_module(model), frequencies or frequencies_of(model)
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
    with cache.frequencies.used(tokens) if cache.frequencies else nullcontext():
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits


@dataclass(frozen=True)
class Block:
    """Weights of one decoder layer of a Llama-like model, the modules' own."""

    norms: tuple[Tensor, Tensor]  # in front of attention and of the MLP, (hidden,)
    project: tuple[Tensor, Tensor, Tensor]  # to queries, keys, values
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    head_norms: tuple[Tensor, Tensor] | None  # QK norm, (d,)
    output: Tensor  # W_o
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """What a decoded token passes through in a Llama-like model, the modules' own tensors."""

    embed: Tensor  # (vocab, hidden)
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Tensor  # (vocab, hidden)
    epsilon: float  # of all norms
    scaling: float  # of the logits of attention
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]]


def weights_of(model: torch.nn.Module) -> Weights | None:
    """The weights of a model whose decoder layers do just what `Block` says; None for another."""
    if type(model).__name__ not in PLAIN or layout(model).sliding or layout(model).window is not None:
        return None
    if rope_settings(model.config).get("rope_type") in SWITCHING:  # all places of an answer are turned at once
        return None
    inner, linear = model.model, torch.nn.Linear
    layers = [(layer.self_attn, layer.mlp, layer) for layer in inner.layers]
    products = [
        (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for own, mlp, _ in layers
    ]
    flat = [product for some in products for product in some] + [model.lm_head]
    one_place = len({parameter.device for parameter in model.parameters()}) == 1
    if not one_place or any(type(product) is not linear for product in flat):  # quantised, adapted, spread
        return None
    plain = all(type(own) is torch.nn.Parameter and own.is_contiguous() for own in model.parameters())
    if not plain or len({own.dtype for own in model.parameters()}) > 1:  # quantised in place; kernels read rows
        return None
    if any(product.bias is not None for some in products for product in some[3:]) or model.lm_head.bias is not None:
        return None
    if any(getattr(mlp.act_fn, "__class__", None).__name__ not in ("SiLU", "SiLUActivation") for _, mlp, _ in layers):
        return None
    blocks = tuple(
        Block(
            (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
            tuple(product.weight for product in some[:3]),
            tuple(product.bias for product in some[:3]),
            (own.q_norm.weight, own.k_norm.weight) if hasattr(own, "q_norm") else None,
            *(product.weight for product in some[3:]),
        )
        for some, (own, _, layer) in zip(products, layers, strict=True)
    )
    scaling = getattr(layers[0][0], "scaling", layout(model).dim ** -0.5)
    epsilon = model.config.rms_norm_eps
    turn = rotation(model, "full_attention")
    return Weights(inner.embed_tokens.weight, blocks, inner.norm.weight, model.lm_head.weight, epsilon, scaling, turn)


def stop_tokens(model: torch.nn.Module) -> frozenset[int]:
    """Token ids that end an answer."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.get_text_config(decoder=True).eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def rope_settings(config: Any) -> dict[str, Any]:
    """The rotary embedding's settings, {} for the plain one; `rope_scaling` before transformers 5."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def check_architecture(config: Any) -> None:
    """SettingError unless the architecture was tested with this attention function."""
    if config.model_type not in ARCHITECTURES:
        raise SettingError(
            f"model: architecture {config.model_type} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )


def configuration(path: str, revision: str | None = None) -> Any:
    """The configuration in a folder, a config.json or on the hub; SettingError if it is none that is supported."""
    config = found_at(path, revision) if Path(path).exists() else deepcopy(on_hub(path, revision))
    if isinstance(config, str):
        raise SettingError(f"model.path={path}: no readable model there ({config})")
    check_architecture(config)
    return config


def found_at(path: str, revision: str | None) -> Any:
    """A configuration, or why there is none."""
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@cache
def on_hub(path: str, revision: str | None) -> Any:
    """The same, asked for once: where no hub can be reached, each time costs half a minute."""
    return found_at(path, revision)


def plain_cache(model: torch.nn.Module, rows: int | None = None) -> Cache:
    """transformers' own cache, to compare with: one that grows, or a static one of `rows` tokens."""
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config) if rows is None else StaticCache(config=config, max_cache_len=rows)


def random_model(config: Any, dtype: torch.dtype, device: str, seed: int) -> torch.nn.Module:
    """A model of this configuration, initialised on the device in `dtype`; the global random state stays as it was."""
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def parameters(config: Any) -> int:
    """How many a model of this configuration has; tied ones count once. No memory is taken."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(own.numel() for own in model.parameters())


def positions(config: Any) -> int:
    """Tokens that a model can take: its positions (YaRN's factor counted), or its window if all layers slide."""
    text = config.get_text_config(decoder=True)
    longest, rope = text.max_position_embeddings, rope_settings(text)
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * rope.get("factor", 1)))
    layers = DynamicCache(config=text).layers
    if layers and all(layer.is_sliding for layer in layers):
        longest = min(longest, layers[0].sliding_window)
    return longest


def find_model(model: str) -> str:
    """Return where a model lies: the folder of one that kvbench knows by name, or `model` itself, a folder or an id of
    the hub. A GGUF file is converted once, and its converted folder is returned.

    Raises:
        SettingError: There is no such file or folder, or the GGUF file cannot be converted.
    """
    if model in FETCHED_MODELS:
        check_fetched(model)
    path = str(KNOWN_MODELS.get(model, model))
    check_model_path(path)
    return str(find_converted(Path(path).expanduser())) if is_gguf(path) else path


@dataclass(frozen=True)
class Checkpoint:
    """A model that is not loaded yet. `path`: a local folder or a hub id; `revision`: of the hub; `device_map`: "auto"
    spreads its layers over all GPUs (accelerate).
    """

    name: str
    path: str
    revision: str | None = None
    device_map: str | None = None

    reads_text = True  # it has a tokenizer

    def config(self) -> Any:
        """Its configuration; SettingError if there is none or the architecture is not supported."""
        check_model_path(self.path)
        return configuration(self.path, self.revision)

    def longest(self) -> int:
        """Tokens that the model can take."""
        return positions(self.config())

    def switches(self) -> int | None:
        """Tokens beyond which RoPE changes its frequencies (LongRoPE, dynamic scaling), None if it never does."""
        text = self.config().get_text_config(decoder=True)
        rope = rope_settings(text)
        if rope.get("rope_type") not in SWITCHING:
            return None
        original = rope.get("original_max_position_embeddings")
        return original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings

    def check(self) -> None:
        """SettingError unless a local folder has weights in safetensors; nothing is loaded."""
        folder = Path(self.path)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise SettingError(f"model.path={self.path}: no *.safetensors there")

    def tokenizer(self) -> Any:
        try:
            found = AutoTokenizer.from_pretrained(self.path, revision=self.revision, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise SettingError(
                f"model.path={self.path}: no readable tokenizer ({str(error).splitlines()[0]})"
            ) from None
        if not found.is_fast:
            raise SettingError(
                f"model.path={self.path}: its tokenizer gives no offsets; a fast one (tokenizer.json) is needed"
            )
        return found

    def weights(self, dtype: torch.dtype, device: str) -> torch.nn.Module:
        """The model, ready to run. Weights come from safetensors only."""
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.path, revision=self.revision, dtype=dtype, trust_remote_code=False, use_safetensors=True,
                device_map=self.device_map,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise SettingError(f"model.path={self.path}: no readable weights ({str(error).splitlines()[0]})") from None
        return (model if self.device_map else model.to(device)).eval()

    def identity(self) -> str:
        """What the weights are: the hub's commit, or a hash over a local folder's weights, settings and tokenizer
        (files over 64 MiB by 64 samples of 1 MiB).
        """
        folder = Path(self.path)
        if (converted := identify(folder)) is not None:
            return converted
        if not folder.is_dir():
            return f"{self.path}@{getattr(self.config(), '_commit_hash', None) or self.revision}"
        digest = hashlib.sha256()
        for file in sorted(p for p in folder.iterdir() if p.name.startswith(IDENTITY) and p.suffix in SUFFIXES):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            for sample in read_samples(file):
                digest.update(sample)
        return digest.hexdigest()[:16]
