"""Tiny models as GGUF files, written as llama.cpp's converter writes them (convert_hf_to_gguf.py)."""

from pathlib import Path

import gguf
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["a b", "Ġ a", "1 2", "12 3", "123 4"]
BYTES = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *map(chr, range(ord("a"), ord("z") + 1)), "▁a"]
COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
)  # fmt: skip
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
}


def make_model(architecture: str, vocabulary: int) -> torch.nn.Module:
    """A tiny random model in float32 with numbers that bfloat16 holds."""
    kind, config = ARCHITECTURES[architecture]
    more = {} if architecture != "qwen2" else {"head_dim": 16}
    torch.manual_seed(0)
    model = kind(config(**COMMON | more, vocab_size=vocabulary, tie_word_embeddings=architecture != "qwen2"))
    with torch.no_grad():
        for name, own in model.named_parameters():
            if "norm" in name or "bias" in name:
                own.add_(torch.randn_like(own) * 0.1)
            own.copy_(own.bfloat16())
    return model.eval()


def write_gguf(path: Path, architecture: str = "llama", quantisation: str = "F32", **fields: object) -> torch.nn.Module:
    """Write a tiny model and return it.

    `fields`: `called` (its architecture in the header), `name`, `pre`, `tokenizer`, `template`, `special`, `adds_bos`,
    `scale_linear`, further `tensors`, tensors that it is `without`, and further keys of the header (__ for a point).
    """
    tokenizer = str(fields.pop("tokenizer", "llama" if architecture == "gemma3" else "gpt2"))
    tokens = PIECES if tokenizer == "llama" else BYTES
    model = make_model(architecture, len(tokens))
    config = model.config
    writer = gguf.GGUFWriter(path, fields.pop("called", architecture))
    writer.add_name(fields.pop("name", "tiny"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    if architecture != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1000000.0)
    else:
        writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    if tokenizer == "llama":
        writer.add_token_scores([-float(number) for number in range(len(tokens))])
        writer.add_token_types([3, 3, 3, 2, *[1] * (len(tokens) - 4)])
        special = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    else:
        writer.add_tokenizer_pre(fields.pop("pre", "smollm" if architecture == "llama" else "qwen2"))
        writer.add_token_types([*[3] * len(SPECIAL), *[1] * (len(tokens) - len(SPECIAL))])
        writer.add_token_merges(MERGES)
        special = {"unk": 0, "bos": 1, "eos": 2, "pad": 2}
    for name, number in (special | fields.pop("special", {})).items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(fields.pop("template", TEMPLATE))
    extra, missing = fields.pop("tensors", {}), fields.pop("without", ())
    if (adds_bos := fields.pop("adds_bos", None)) is not None:
        writer.add_add_bos_token(adds_bos)
    if (linear := fields.pop("scale_linear", None)) is not None:
        writer.add_float32(f"{architecture}.rope.scale_linear", linear)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), str(value))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    own = {
        name: value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" or not has_tied_embeddings(model)
    }
    for name, value in own.items():
        base, _, kind = name.rpartition(".")
        if architecture == "llama" and base.endswith(("q_proj", "k_proj")):
            value = interleave(value, config.num_attention_heads if "q_proj" in base else config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in base:
            value = value + 1
        numbers, stored = value.numpy(), gguf.GGMLQuantizationType.F32
        if value.ndim == 2 and quantisation != "F32":
            stored = gguf.GGMLQuantizationType[quantisation]
            numbers = gguf.quants.quantize(numbers, stored)
        if f"{names.get_name(base)}.{kind}" not in missing:
            writer.add_tensor(f"{names.get_name(base)}.{kind}", numbers, raw_dtype=stored)
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def has_tied_embeddings(model: torch.nn.Module) -> bool:
    return model.config.tie_word_embeddings


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection in GGUF's order, in which the two halves that RoPE turns together alternate."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
