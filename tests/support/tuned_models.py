"""A miniature in the place of the downloaded base, factors for it, and a source of samples, for tests of tuning."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbench.models import local_models
from kvbench.models.converted_folders import make_folder
from kvbench.models.embedded import REFERENCE
from kvbench.models.local_models import identify_converted
from kvbench.models.low_rank import PROJECTIONS
from kvbench.models.miniature import draw_miniature
from kvbench.training.recording import write_tensors

THETA, LONGEST = 5e4, 384


def make_config(vocabulary: int = 97, layers: int = 2) -> LlamaConfig:
    """Return the configuration of a tiny Llama with tied embeddings."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def make_weights(config: LlamaConfig, seed: int = 0) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a miniature in float32, and its weights by name."""
    model = draw_miniature(config, seed)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    return model, weights


def write_base(models: Path, seed: int = 0) -> Path:
    """Write a miniature as the downloaded model smollm2, with the embedded model's tokenizer, and return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)

    def fill(folder: Path) -> None:
        config = make_config(len(tokenizer))
        model = LlamaForCausalLM(config)
        model.load_state_dict(draw_miniature(config, seed).state_dict())
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    models.mkdir(parents=True, exist_ok=True)
    make_folder(REFERENCE / "config.json", f"miniature {seed}", models / "smollm2", 1, fill)
    return models / "smollm2"


def write_factors(path: Path, **changed: str) -> dict[str, torch.Tensor]:
    """Write random factors of rank 3 for the base that `write_base` wrote, with changed metadata, and return them."""
    config, draw = make_config(), torch.Generator().manual_seed(1)
    inner, hidden, query, key = config.intermediate_size, config.hidden_size, 3 * 16, 16
    sizes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    sizes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    factors = {}
    for name in PROJECTIONS:
        outputs, inputs = sizes[name]
        factors[f"{name}.a"] = 0.2 * torch.randn(config.num_hidden_layers, 3, inputs, generator=draw)
        factors[f"{name}.b"] = 0.2 * torch.randn(config.num_hidden_layers, outputs, 3, generator=draw)
    factors = {name: factor.bfloat16() for name, factor in factors.items()}
    metadata = {"alpha": "6.0", "theta": str(THETA), "longest": str(LONGEST)}
    metadata |= {"model": identify_converted(local_models.MODELS / "smollm2") or ""}
    write_tensors(path, factors, {name: text for name, text in (metadata | changed).items() if text})
    return factors


@dataclass(frozen=True)
class WrittenSample:
    """A sample as `kvbench.training.tuning_data` draws it."""

    kind: str
    ids: list[int]
    answers: list[tuple[int, int]]


class RandomSource:
    """Draws samples of random tokens, of which every third is plain text; others repeat their beginning as answers."""

    def draw(self, seed: int, number: int, length: int) -> WrittenSample:
        draw = random.Random(f"{seed}/{number}/{length}")
        if number % 3 == 2:
            return WrittenSample("text", [draw.randrange(97) for _ in range(length)], [(1, length)])
        half = [draw.randrange(97) for _ in range(length // 2 - draw.randrange(4))]
        return WrittenSample(
            f"copy_{number % 2}", half + half, [(len(half), len(half) + 5), (2 * len(half) - 3, 2 * len(half))]
        )
