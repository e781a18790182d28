"""Read the layout of a model from its configuration, and say which architectures were tested with kvbench."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, cast

from kvbench.config.provenance import find_installed_version
from kvbench.interfaces.layout import Layout, Probe
from kvbench.validation import SettingError

WITHOUT_ROPE = "it has no rotary embedding"
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")  # RoPE whose frequencies follow the largest position


@dataclass(frozen=True)
class Architecture:
    """What is known about a tested type of model."""

    family: str
    """The name of its family in docs/models.md."""
    graphs: bool = False
    """Whether `kvbench.models.decoder_step.forward_step` computes what the model computes."""
    rotation_fault: str | None = None
    """Why kvbench cannot norm and rotate keys as the model does, or None if it can."""
    rerotation_fault: str | None = None
    """Why rotated keys cannot be rotated to other positions, or None if they can."""
    joint_norm: bool = False
    """Whether it norms the keys of all heads of a token together."""
    since: tuple[int, int] = (5, 0)
    """The first version of transformers that reads such a model right. With an earlier one it is probed."""


LATE_NORM = "it norms rotated keys by weights that do not rotate with them"
STATES = (5, 17)  # earlier transformers lose the state between two blocks
ARCHITECTURES = {  # the tested list, by transformers' names of types
    "llama": Architecture("Llama", graphs=True),
    "llama4_text": Architecture("Llama"),
    "mistral": Architecture("Mistral", graphs=True),
    "mixtral": Architecture("Mistral", graphs=True),
    "ministral": Architecture("Mistral", graphs=True),
    "ministral3": Architecture("Mistral"),
    "qwen2": Architecture("Qwen", graphs=True),
    "qwen3": Architecture("Qwen", graphs=True),
    "qwen2_moe": Architecture("Qwen", graphs=True),
    "qwen3_moe": Architecture("Qwen", graphs=True),
    "qwen3_next": Architecture("Qwen", since=STATES),
    "qwen3_5_text": Architecture("Qwen", since=STATES),
    "qwen3_5_moe_text": Architecture("Qwen", since=STATES),
    "gemma3_text": Architecture("Gemma", graphs=True),
    "gemma": Architecture("Gemma", graphs=True),
    "gemma2": Architecture("Gemma", graphs=True),
    "gemma4_text": Architecture("Gemma"),
    "gemma4_unified_text": Architecture("Gemma"),
    "vaultgemma": Architecture("Gemma", graphs=True),
    "phi3": Architecture("Phi", graphs=True),
    "phi": Architecture("Phi", graphs=True),
    "phimoe": Architecture("Phi", graphs=True),
    "phi4_multimodal": Architecture("Phi", graphs=True),
    "olmo": Architecture("OLMo", graphs=True),
    "olmo2": Architecture("OLMo", graphs=True, joint_norm=True),
    "olmo3": Architecture("OLMo", graphs=True, joint_norm=True),
    "olmoe": Architecture("OLMo", graphs=True, joint_norm=True),
    "flex_olmo": Architecture("OLMo", graphs=True, joint_norm=True),
    "olmo_hybrid": Architecture("OLMo", since=STATES, joint_norm=True),
    "granite": Architecture("Granite", graphs=True),
    "granitemoe": Architecture("Granite", graphs=True),
    "granitemoeshared": Architecture("Granite", graphs=True),
    "granite_swa": Architecture("Granite", graphs=True),
    "granitemoe_swa": Architecture("Granite", graphs=True),
    "granitemoehybrid": Architecture("Granite", since=STATES),
    "cohere": Architecture("Cohere", graphs=True),
    "cohere2": Architecture("Cohere", graphs=True),
    "cohere2_moe": Architecture("Cohere", graphs=True),
    "glm": Architecture("GLM", graphs=True),
    "glm4": Architecture("GLM", graphs=True),
    "glm4_moe": Architecture("GLM", graphs=True),
    "smollm3": Architecture("SmolLM", graphs=True),
    "exaone4": Architecture("EXAONE", graphs=True),
    "exaone_moe": Architecture("EXAONE", graphs=True),
    "ernie4_5": Architecture("ERNIE", graphs=True),
    "ernie4_5_moe": Architecture("ERNIE", graphs=True),
    "hunyuan_v1_dense": Architecture("Hunyuan", rerotation_fault=LATE_NORM),
    "hunyuan_v1_moe": Architecture("Hunyuan", rerotation_fault=LATE_NORM),
    "hy_v3": Architecture("Hunyuan", graphs=True),
    "hyperclovax": Architecture("HyperCLOVA", graphs=True),
    "gpt_oss": Architecture("gpt-oss", graphs=True),
    "mimo_v2_flash": Architecture("MiMo"),
    "seed_oss": Architecture("Seed-OSS", graphs=True),
    "starcoder2": Architecture("StarCoder", graphs=True),
    "stablelm": Architecture("StableLM", graphs=True),
    "nemotron": Architecture("Nemotron", graphs=True, since=(5, 17)),  # its attention was none of the registry's
    "nemotron_h": Architecture("Nemotron", since=STATES),
    "helium": Architecture("Helium", graphs=True),
    "arcee": Architecture("AFM", graphs=True),
    "afmoe": Architecture("AFM", graphs=True),
    "apertus": Architecture("Apertus", graphs=True),
    "bitnet": Architecture("BitNet", graphs=True),
    "minimax_m2": Architecture("MiniMax", graphs=True, joint_norm=True),
    "dots1": Architecture("dots", graphs=True),
    "aria_text": Architecture("Aria", graphs=True),
    "cwm": Architecture("CWM", graphs=True),
    "jais2": Architecture("Jais", graphs=True),
    "laguna": Architecture("Laguna", graphs=True),
    "mellum": Architecture("Mellum", graphs=True),
    "nanochat": Architecture("nanochat", graphs=True),
    "solar_open": Architecture("Solar", graphs=True),
    "lfm2": Architecture("LFM2", since=STATES),
    "lfm2_moe": Architecture("LFM2", since=STATES),
    "falcon_h1": Architecture("Falcon-H1", since=STATES, rotation_fault="it multiplies keys by a factor"),
    "zaya": Architecture("Zaya", since=STATES, rotation_fault="its keys come out of a convolution"),
}


MULTIMODAL = frozenset(  # types whose text decoder reads a text as it does alone; the decoder's type may be any
    ["gemma3", "gemma4", "gemma4_unified", "llava", "llava_next", "llava_onevision", "vipllava", "mistral3"]
    + ["internvl", "idefics3", "smolvlm", "cohere2_vision", "aya_vision", "lighton_ocr", "qwen2_vl", "qwen2_5_vl"]
    + ["qwen3_vl", "qwen3_vl_moe"]
)


class Configuration(Protocol):
    """What kvbench uses of a configuration of transformers, besides the fields of its text decoder."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Configuration":
        """Return the configuration that has these fields."""

    def get_text_config(self, decoder: bool) -> Any:
        """Return the configuration of the text decoder."""


def is_tested(config: Configuration) -> bool:
    """Return whether an architecture was tested with kvbench's attention function. Others are probed."""
    text, kind = config.get_text_config(decoder=True), read_text_type(config)
    # Gemma 4 by setting; and before transformers 5.17, whose configurations say otherwise which heads differ by layer
    if getattr(text, "num_kv_shared_layers", None) or hasattr(text, "global_head_dim"):
        return False
    known = ARCHITECTURES.get(kind)
    return known is not None and known.since <= read_version() and config.model_type in (kind, *MULTIMODAL)


@cache
def read_version() -> tuple[int, int]:
    """Return the first two numbers of transformers' version."""
    major, minor, *_ = find_installed_version("transformers").split(".")
    return int(major), int(minor)


def read_text_type(config: Configuration) -> str:
    """Return the type of a model's text decoder, which is the model's own unless it is multimodal."""
    return cast(str, config.get_text_config(decoder=True).model_type)


def name_type(config: Configuration) -> str:
    """Return the type of a model for messages and records, and that of its text decoder if it is another one."""
    kind = read_text_type(config)
    return kind if kind == config.model_type else f"{config.model_type} (text decoder {kind})"


def find_rotation_facts(config: Configuration, probe: Probe | None) -> Architecture | Probe:
    """Return what is known about the rotation of a model: what a probe says, or the tested list.

    Args:
        config: The model's configuration.
        probe: What a probe says about its architecture. None if it is on the list.
    """
    facts: Architecture | Probe = ARCHITECTURES[read_text_type(config)] if probe is None else probe
    without = is_without_rope(config.get_text_config(decoder=True))
    return replace(facts, rotation_fault=WITHOUT_ROPE) if without else facts


def is_without_rope(text: Any) -> bool:
    """Return whether a model has no rotary embedding, by the configuration of its text decoder."""
    if text.model_type == "olmo_hybrid":
        return read_rope_settings(text).get("rope_theta") is None
    if text.model_type == "granitemoehybrid":
        return bool(text.position_embedding_type != "rope")
    return bool(text.model_type == "nemotron_h")


def read_layer_config(text: Any, layer: int) -> Any:
    """Return the configuration of one layer of a text decoder: the heads of single layers may differ from others."""
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def read_head_dim(config: Any) -> int:
    """Return the width of keys by the configuration of a layer, as `read_layer_config` returns it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_value_dim(config: Any) -> int:
    """Return the width of values by the configuration of a layer, as `read_layer_config` returns it."""
    return getattr(config, "v_head_dim", None) or read_head_dim(config)


def count_row_numbers(text: Any, layer: int) -> int:
    """Return how many numbers the keys and values of one token are in a layer of a text decoder."""
    config = read_layer_config(text, layer)
    doubled = text.model_type == "mimo_v2_flash" and text.layer_types[layer] == "sliding_attention"  # no field says so
    return (1 + doubled) * config.num_key_value_heads * (read_head_dim(config) + read_value_dim(config))


def find_window(config: Any) -> int:
    """Return how many tokens the windows or chunks of some layers have, or 0 if no layer has one.

    Args:
        config: The configuration of a text decoder.
    """
    kinds = getattr(config, "layer_types", None) or ()
    name = "attention_chunk_size" if "chunked_attention" in kinds else "sliding_window"
    return getattr(config, name, None) or 0


def read_rope_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the rotary embedding, {} for the plain one. (`rope_scaling` before transformers 5.)"""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def find_max_tokens(config: Any) -> int:
    """Return how many tokens a model supports.

    These are its positions, or those that its RoPE scaling extends them to (YaRN, dynamic, LongRoPE), or its window if
    all layers slide. Positions of a linear scaling are taken as they are stated: some checkpoints state them as scaled
    (Gemma 3), others as they were before. `model.longest` overrides them.
    """
    from transformers.cache_utils import DynamicCache

    text = config.get_text_config(decoder=True)
    longest, rope = text.max_position_embeddings, read_rope_settings(text)
    for own in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # Gemma 3 has one a kind of layer
        if own.get("rope_type") in ("yarn", *LENGTH_DEPENDENT_ROPE):
            original = own.get("original_max_position_embeddings") or text.max_position_embeddings
            longest = max(longest, int(original * (own.get("factor") or 1)))
    layers: list[Any] = list(DynamicCache(config=text).layers)
    if layers and all(getattr(layer, "is_sliding", False) for layer in layers):
        longest = min(longest, layers[0].sliding_window)
    return longest


def find_rope_switch(text: Any) -> int | None:
    """Return the length beyond which a text decoder's RoPE changes its frequencies, or None if it never does."""
    rope = read_rope_settings(text)
    if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
        return None
    original = rope.get("original_max_position_embeddings")
    return original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings


def read_config_layout(config: Any, probe: Probe | None = None) -> Layout:
    """Return the layout of a model by its configuration, before the model is loaded.

    Args:
        config: The configuration.
        probe: What a probe says about its architecture. None if it is on the list.

    Raises:
        SettingError: The architecture is not on the list, and there is no probe.
    """
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

    if probe is None and not is_tested(config):
        raise SettingError(f"model: architecture {name_type(config)} is not on the tested list, and was not probed")
    longest, facts = find_max_tokens(config), find_rotation_facts(config, probe)
    config = config.get_text_config(decoder=True)
    own: list[Any] = list(DynamicCache(config=config).layers)
    recurrent = tuple(i for i, layer in enumerate(own) if not isinstance(layer, CacheLayerMixin))
    sliding = tuple(i for i, layer in enumerate(own) if i not in recurrent and layer.is_sliding)
    if len(recurrent) + len(sliding) == len(own) != len(sliding):
        raise SettingError("model: none of its layers keeps keys and values of all tokens, so there is nothing to cut")
    all_slide = len(sliding) == config.num_hidden_layers
    window = own[0].sliding_window if all_slide else None
    others = {*sliding, *recurrent}
    held = next((index for index in range(config.num_hidden_layers) if index not in others), 0)
    layer = read_layer_config(config, held)
    return Layout(
        layers=config.num_hidden_layers,
        heads=layer.num_key_value_heads,
        query_heads=layer.num_attention_heads,
        dim=read_head_dim(layer),
        hidden=config.hidden_size,
        sliding=() if all_slide else sliding,
        window=window,
        longest=longest,
        rope_switch=find_rope_switch(config),
        softcap=getattr(config, "attn_logit_softcapping", None),
        probe=probe,
        rotation_fault=facts.rotation_fault,
        rerotation_fault=facts.rerotation_fault,
        joint_norm=facts.joint_norm,
        recurrent=recurrent,
        stateful=any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in own),
        value_width=None if read_value_dim(layer) == read_head_dim(layer) else read_value_dim(layer),
    )
