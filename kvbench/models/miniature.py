"""Make a random miniature of a model by its configuration, on the CPU, to try whether kvbench reads it correctly.

A configuration is shrunk by the names of its fields (`SIZES` and the tables below it). One layer of each kind stays.
Thresholds in tokens, such as windows and the length from which RoPE is scaled, are below the length of the text that
the probe reads (`kvbench.models.probe`), so that what they switch on is active. Weights are large enough that attention
is far from uniform: with transformers' own initialisation a feature that is left out may change the logits by no more
than rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvbench.models.layouts import LENGTH_DEPENDENT_ROPE, Configuration
from kvbench.models.silence import silence_transformers
from kvbench.models.transformers_port import find_factory
from kvbench.validation import summarize

VOCABULARY = 128
HIDDEN, HEADS, SHORT = 64, 4, 16  # width, query heads, and a threshold in tokens
LAYERS = 4  # least number of layers: some models decide by a layer's number what it is
POSITIONS = 512
STATES = 8  # heads of a recurrent layer
MOST = 20_000_000  # weights of a miniature
GAIN = 1.7  # of the projections to queries, keys and values

SIZES = {  # the largest number that a field may have
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "vision_output_dim"), HIDDEN),  # of vision towers
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("dense_intermediate_size", "attention_hidden_size", "hidden_size_per_layer_input"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), SHORT),
    **dict.fromkeys(("local_attention", "attention_chunk_size", "keep_window_size", "floor_scale"), SHORT),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size", "rel_extent"), SHORT),
    **dict.fromkeys(("index_topk", "index_block_size", "index_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("index_topk_blocks", "index_n_heads", "mlp_only_period"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), POSITIONS),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"), 2),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "linear_num_key_heads"), 2),
    "linear_num_value_heads": 4,
    "mamba_num_heads": STATES,
    "mamba_head_dim": SHORT,
    "original_max_position_embeddings": 2 * SHORT,
    "query_pre_attn_scalar": SHORT,
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
HEAD_DIMS = ("head_dim", "swa_head_dim", "global_head_dim", "kv_channels", "attention_head_dim")
FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # how many of another kind
LAYER_LISTS = (  # indices of layers
    *("mlp_only_layers", "full_attn_idxs", "moe_layers", "ple_layer_ids", "hybrid_layer_ids", "attn_layer_indices"),
)
MAMBA_HEADS = (("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"), ("n_mamba_heads", "mamba_headdim", ""))
HEADS_BY_LAYER = "num_attention_heads_per_layer"
FIELDS_BY_LAYER = "per_layer_config"  # the fields of single layers that differ from all others, by their indices


class Unshrinkable(Exception):
    """A configuration of which no miniature can be made. The message says why."""


def shrink(config: Configuration) -> Configuration:
    """Return the configuration of a miniature.

    Args:
        config: The configuration of a model, which stays as it is.

    Raises:
        Unshrinkable: Its fields have other names.
    """
    fields = {name: part for name, part in config.to_dict().items() if name != "quantization_config"}
    try:
        with silence_transformers():
            small = type(config).from_dict(shrink_fields(fields))
        weights = count_weights(small)
    except Exception as error:  # transformers may fail in any way on numbers that do not fit each other
        raise Unshrinkable(summarize(error)) from None
    if weights > MOST:
        raise Unshrinkable(f"the miniature has {weights:,} weights")
    return small


def shrink_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration, of one of its parts, or of its RoPE, with small numbers."""
    layers = next((fields[name] for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    kept = choose_layers(fields, layers) if layers else []
    small: dict[str, Any] = {name: shrink_field(name, value) for name, value in fields.items()}
    small |= shrink_heads(fields)
    if isinstance(by_layer := fields.get(FIELDS_BY_LAYER), Mapping):
        others = {int(index): shrink_differing(own, fields, small) for index, own in by_layer.items()}
        small[FIELDS_BY_LAYER] = {place: others[index] for place, index in enumerate(kept) if index in others}
    for name, value in fields.items():
        if name in LAYER_COUNTS:
            small[name] = len(kept)
        elif name in FIRST_LAYERS and isinstance(value, int):
            small[name] = sum(index < value for index in kept)
        elif name in LAYER_LISTS and isinstance(value, Sequence):
            small[name] = [place for place, index in enumerate(kept) if index in value]
        elif is_by_layer(value, layers):
            small[name] = [small[name][index] for index in kept]
    if "sliding_window" in small and slides_everywhere(fields, layers):
        small["sliding_window"] = POSITIONS  # no text may be longer, so it must not end within the probe's
    if longest := shrink_rope(small):
        small |= {"max_position_embeddings": longest, "original_max_position_embeddings": POSITIONS}
    return small


def shrink_field(name: str, value: object) -> object:
    """Return the small value of a field that does not depend on others."""
    if isinstance(value, Mapping):
        return shrink_fields(value) if all(isinstance(key, str) for key in value) else value
    if isinstance(value, list) and all(isinstance(part, int) for part in value) and name.endswith("token_id"):
        return [min(part, 2) for part in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith("token_id"):
        return min(value, 2)
    return min(value, SIZES.get(name, value))


def choose_layers(fields: Mapping[str, Any], layers: int) -> list[int]:
    """Return the layers that stay: the first one of each kind, and the first ones of all until there are `LAYERS`."""
    lists = [value for name, value in fields.items() if name not in LAYER_LISTS and is_by_layer(value, layers)]
    named = [fields[name] for name in LAYER_LISTS if isinstance(fields.get(name), Sequence)]
    firsts = [fields[name] for name in FIRST_LAYERS if isinstance(fields.get(name), int)]
    single = {int(index): own for index, own in (fields.get(FIELDS_BY_LAYER) or {}).items()}
    kinds: dict[str, int] = {}
    for index in range(layers):
        parts = [entries[index] for entries in lists], [index in some for some in named], [index < n for n in firsts]
        kinds.setdefault(repr((*parts, single.get(index))), index)
    kept = set(kinds.values())
    for index in range(layers):
        if len(kept) < LAYERS:
            kept.add(index)
    return sorted(kept)


def is_by_layer(value: object, layers: int | None) -> bool:
    """Return whether a field has an entry for each layer."""
    return isinstance(value, list | tuple) and layers is not None and len(value) == layers


def shrink_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of heads and the head dimensions. Heads are shared by queries if they were before."""
    query = next((fields[name] for name in HEAD_COUNTS if isinstance(fields.get(name), int)), None)
    hidden = next((fields[name] for name in ("hidden_size", "d_model", "n_embd") if fields.get(name)), None)
    if query is None or hidden is None:
        return {}
    small: dict[str, Any] = {name: HEADS for name in HEAD_COUNTS if isinstance(fields.get(name), int)}
    for name in KV_HEAD_COUNTS:
        if isinstance(given := fields.get(name), int):
            small[name] = HEADS if given >= query else min(given, HEADS // 2)
    for name in HEAD_DIMS:
        if isinstance(given := fields.get(name), int):
            small[name] = HIDDEN // HEADS * (1 if given * query == hidden else 2)
    if isinstance(given := fields.get("v_head_dim"), int) and "head_dim" in small:
        small["v_head_dim"] = small["head_dim"] if given == fields["head_dim"] else small["head_dim"] * 3 // 4
    for name, dim, inner in MAMBA_HEADS:
        if isinstance(fields.get(name), int):
            width = HIDDEN * fields.get("mamba_expand", 2)
            small |= {name: STATES, dim: width // STATES} | ({inner: width} if fields.get(inner) else {})
    if isinstance(by_layer := fields.get(HEADS_BY_LAYER), list):
        small[HEADS_BY_LAYER] = [HEADS if heads <= query else 2 * HEADS for heads in by_layer]
    return small


def shrink_differing(own: Mapping[str, Any], fields: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small fields of a layer that differs from others, so that it differs still.

    Args:
        own: The layer's own fields.
        fields: The fields of all layers.
        small: What these become.
    """
    shrunk: dict[str, Any] = {}
    for name, value in own.items():
        if name in (*HEAD_DIMS, *KV_HEAD_COUNTS) and isinstance(small.get(name), int):
            more = 2 * small[name] if value > fields[name] else max(1, small[name] // 2)
            shrunk[name] = small[name] if value == fields[name] else more
        else:
            shrunk[name] = shrink_field(name, value)
    return shrunk


def slides_everywhere(fields: Mapping[str, Any], layers: int | None) -> bool:
    """Return whether every layer has a sliding window."""
    kinds = fields.get("layer_types")
    return all(kind == "sliding_attention" for kind in kinds) if kinds else fields.get("sliding_window") is not None


def shrink_rope(small: dict[str, Any]) -> int | None:
    """Shrink what RoPE lists for each pair of dimensions, in place.

    Frequencies that follow the length must not change within the text: a prompt read in blocks is another one then.

    Returns:
        The number of positions if the frequencies follow the length, otherwise None.
    """
    rope = small.get("rope_parameters") or small.get("rope_scaling")
    if not isinstance(rope, dict):
        return None
    dim = small.get("head_dim") or HIDDEN // HEADS
    part = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1
    if sections := rope.get("mrope_section"):  # pairs of dimensions for time, height and width
        each = int(dim * part) // 2 // len(sections)
        rope["mrope_section"] = [int(dim * part) // 2 - each * (len(sections) - 1), *[each] * (len(sections) - 1)]
    if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
        return None
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = rope[name][: int(dim * part) // 2]
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = POSITIONS
    return 2 * POSITIONS if rope["rope_type"] == "longrope" else None


def count_weights(config: Configuration) -> int:
    """Return the number of weights of a model. It needs no memory."""
    with silence_transformers(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        return sum(weight.numel() for weight in find_factory(config).from_config(config).parameters())


@torch.no_grad()
def draw_miniature(config: Configuration, seed: int = 0) -> torch.nn.Module:
    """Make a model with strong random weights in float32 on the CPU, which attends by transformers' `eager`.

    The global random state and the default dtype do not change.

    Args:
        config: What `shrink` returned.
        seed: The seed of the weights.
    """
    with silence_transformers(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = find_factory(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        assert isinstance(model, torch.nn.Module)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
            elif weight.dim() > 1:
                attends = "att" in name and not any(part in name for part in ("o_proj", "out_proj", "dense"))
                weight.normal_(std=(GAIN if attends else 1.0) * weight.shape[-1] ** -0.5)
            else:
                weight.normal_(std=0.3)
    return model.requires_grad_(False)
