"""A checkpoint on the disk that runs of the command line can load in a moment."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbench.models.embedded import REFERENCE


def write_checkpoint(folder: Path, layers: int = 2, stops: bool = True) -> None:
    """Write a random model with the reference model's tokenizer. It answers nothing, and everything else is real.

    If it `stops`, every fourth token ends an answer, so that a run does not spend its time on decoding. Otherwise no
    token does.
    """
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, *range(4, len(tokenizer), 4)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id if stops else None, eos_token_id=ends if stops else None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
