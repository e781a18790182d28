"""Say what kvbench would do with a checkpoint, without loading its weights."""

from collections.abc import Iterator, Mapping

import torch

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.config.catalogue import build, list_choices, load_class, load_settings
from kvbench.interfaces.codec import Packing
from kvbench.interfaces.layout import Layout
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.decoder_weights import can_collect_weights
from kvbench.models.int4 import LEAST, find_linear_share
from kvbench.models.layouts import Configuration, count_row_numbers, find_window, name_type
from kvbench.models.loading import count_states, count_weight_bytes, make_skeleton
from kvbench.models.miniature import Unshrinkable
from kvbench.models.model_kinds import name_checkpoint
from kvbench.validation import SettingError

UNCUT = {"method": "full", "allocator": "uniform", "codec": "raw"}


def describe_model(model: str, tokens: int | None = None) -> list[str]:
    """Return lines that say what kvbench would do with a model.

    Args:
        model: A name that kvbench knows, a folder, a hub id or a GGUF file.
        tokens: Length of the text whose memory is told; None for the longest that the model reads.

    Raises:
        SettingError: There is no such model, or kvbench refuses it.
    """
    path = find_model(model, "model")
    checkpoint = Checkpoint(name_checkpoint(path), path)
    layout, config = checkpoint.layout(), checkpoint.config()
    tokens = layout.longest if tokens is None else tokens
    if tokens > layout.longest:
        raise SettingError(f"--tokens={tokens}: {checkpoint.name} takes at most {layout.longest} tokens")
    how = "on the tested list" if layout.probe is None else "probed, not on the tested list"
    dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    facts = {
        "model": checkpoint.name,
        "architecture": f"{name_type(config)}, {how}",
        **describe_layers(layout, config),
        **describe_memory(layout, config, tokens, dtype),
        "longest text": describe_length(layout),
        **describe_template(checkpoint),
        "answers": describe_answers(layout, config),
    }
    return [f"{name}: {fact}" for name, fact in facts.items()] + describe_refusals(layout)


def describe_layers(layout: Layout, config: Configuration) -> dict[str, str]:
    """Return the layers by kind, and their heads."""
    kinds = f"{len(layout.held)} full, which methods cut"
    if layout.sliding:
        text = config.get_text_config(decoder=True)
        chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
        kind = "that attend within chunks" if chunked else "with a sliding window"
        kinds += f"; {len(layout.sliding)} {kind} of {find_window(text):,} tokens, which are not cut"
    if layout.recurrent:
        kinds += f"; {len(layout.recurrent)} without rows (a recurrent state, or none), which are not cut"
    elif layout.stateful:
        kinds += "; each has a recurrent state beside its rows, which is not cut"
    if layout.window is not None:
        kinds += f"; all have a sliding window, so a text has at most {layout.window:,} tokens"
    heads = f"{layout.query_heads} of queries, {layout.heads} of keys and values, dimension {layout.dim}"
    if layout.value_width is not None:
        heads += f", of values {layout.value_width}"
    return {"layers": kinds, "heads": heads}


def describe_memory(layout: Layout, config: Configuration, tokens: int, dtype: torch.dtype) -> dict[str, str]:
    """Return the bytes of a token, and the memory of weights and of the full cache of a text."""
    layer, name = layout.row_numbers * dtype.itemsize, str(dtype).removeprefix("torch.")
    held, text = len(layout.held) * layer, config.get_text_config(decoder=True)
    windowed = sum(count_row_numbers(text, index) for index in layout.sliding) * dtype.itemsize
    cached = held * tokens + windowed * min(tokens, find_window(text))
    weights = f"{count_weight_bytes(config, dtype, None) / 1e9:.2f} GB of weights"
    if find_linear_share(make_skeleton(config)) >= LEAST:
        weights += f" ({count_weight_bytes(config, dtype, 'int4') / 1e9:.2f} with model.weights=int4)"
    states = count_states(config, dtype) if layout.stateful else 0
    more = f", of which {states / 1e9:.2g} GB are recurrent states" if states else ""
    cached += states
    cache = f"{cached / 1e9:.2f} GB for the full cache of {tokens:,} tokens{more}"
    return {
        "bytes per token": f"{held:,} in the layers that methods cut ({name})",
        "memory": f"{weights}, {cache}",
    }


def describe_answers(layout: Layout, config: Configuration) -> str:
    """Return how answers are decoded, and whether weights in int4 change that."""
    if not can_collect_weights(config, layout):
        return "through the model's modules, without CUDA graphs"
    graphs = "in CUDA graphs on a GPU, where method and codec allow it"
    if find_linear_share(make_skeleton(config)) < LEAST:
        return graphs  # there is no int4
    try:
        packed = can_collect_weights(config, layout, "int4")
    except Unshrinkable:
        return f"{graphs}; with model.weights=int4 maybe through the model's modules"
    return graphs if packed else f"{graphs}; with model.weights=int4 through the model's modules"


def describe_length(layout: Layout) -> str:
    """Return how many tokens the model reads."""
    if layout.rope_switch is None:
        return f"{layout.longest:,} tokens"
    return f"{layout.longest:,} tokens; RoPE changes its frequencies beyond {layout.rope_switch:,}"


def describe_template(checkpoint: Checkpoint) -> dict[str, str]:
    """Return whether there is a chat template, and whether it can be told to think."""
    try:
        template = getattr(checkpoint.tokenizer(), "chat_template", None)
    except SettingError as error:
        return {"chat template": f"not known ({error})"}
    if not template:
        return {"chat template": "none"}
    switch = "model.thinking=on and off" if "enable_thinking" in str(template) else "no switch"
    return {"chat template": "yes", "thinking": switch}


def describe_refusals(layout: Layout) -> list[str]:
    """Return a line for each method and codec that cannot serve the model, and one for those that were not checked."""
    lines, unchecked = list[str](), list[str]()
    for group in ("method", "codec"):
        for name in list_choices(group):
            try:
                policy = build_policy(group, name)
            except SettingError:
                fault = layout.rotation_fault or (layout.rerotation_fault if group == "method" else None)
                if fault is None or not rotates_keys(group, name):
                    unchecked.append(f"{group}={name}")
                else:
                    lines.append(f"refused: {group}={name}: it rotates keys; {fault}")
                continue
            lines += [f"refused: {line}" for line in list_faults(policy, layout)]
    if not lines:
        lines = ["refused: no method and no codec"]
    return [*lines, f"not checked, because they need a file or a setting: {', '.join(unchecked)}"]


def build_policy(group: str, name: str) -> CachePolicy:
    """Return the policy of a method or codec with its own settings, and otherwise of the full cache.

    Raises:
        SettingError: It needs a setting.
    """
    return choose_cache(*(build(part, load_settings(part, name if part == group else UNCUT[part])) for part in UNCUT))


def rotates_keys(group: str, name: str) -> bool:
    """Return whether the class of a method or codec says that it rotates keys, whatever its settings are."""
    class_ = load_class(f"{group}={name}", load_settings(group, name)["_target_"])
    refusals, packing = getattr(class_, "refusals", None), getattr(class_, "packing", None)  # unless settings decide
    if isinstance(packing, Packing):
        return packing.takes_unrotated_keys
    return isinstance(refusals, Mapping) and "rope_switch" in refusals


def list_faults(policy: CachePolicy, layout: Layout) -> Iterator[str]:
    """Yield why a policy cannot serve a model."""
    try:
        policy.check(layout)
    except SettingError as error:
        yield str(error)
