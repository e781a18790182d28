"""Models for tests that need a GPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama(dtype: torch.dtype, hidden: int = 256, layers: int = 3, device: str = "cuda") -> LlamaForCausalLM:
    """A Llama with random weights, the same each time, 8 query heads and 2 KV heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=32768,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, dtype).eval()
