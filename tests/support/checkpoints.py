"""A checkpoint on the disk that runs of the command line can load in a moment."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvbench.config.catalogue import SHAPES
from kvbench.models.embedded import REFERENCE


def write_checkpoint(folder: Path, layers: int = 2, stops: bool = True, like: str | None = None) -> None:
    """Write a random model with the reference model's tokenizer. It answers nothing, and everything else is real.

    Args:
        folder: Where it is written.
        layers: Number of layers.
        stops: Whether every fourth token ends an answer, so that a run does not spend its time on decoding. Otherwise
            no token does.
        like: A model of conf/model/shapes, whose architecture and RoPE it takes; None writes a plain Llama.
    """
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, *range(4, len(tokenizer), 4)]
    torch.manual_seed(0)
    plain = {"model_type": "llama", "max_position_embeddings": 4096}
    known = {} if like is None else json.loads((SHAPES / f"{like}.json").read_text())
    small = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        bos_token_id=tokenizer.bos_token_id if stops else None, eos_token_id=ends if stops else None,
    )  # fmt: skip
    if "layer_types" in known:
        small |= {"layer_types": known["layer_types"][:layers], "sliding_window": 16}
    config = AutoConfig.for_model(**(plain | known | small))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
