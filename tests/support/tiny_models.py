"""Tiny random models of every supported architecture, and tokens for them to read."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 199
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)


def rope(**more: object) -> dict:
    return {"rope_theta": 10000.0, "rope_type": "default", **more}


LLAMA3 = rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)


def heads(query: int, kv: int, dim: int = 32) -> dict:
    return dict(num_attention_heads=query, num_key_value_heads=kv, head_dim=dim)


def without_head_dim(query: int, kv: int) -> dict:
    return dict(num_attention_heads=query, num_key_value_heads=kv, hidden_size=32 * query)


SLIDING = 16
BUILD: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **heads(6, 2), num_hidden_layers=3)),
    "short": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **heads(6, 2), num_hidden_layers=2)),
    "wide": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **heads(4, 2, 64), num_hidden_layers=2)),
    "llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, **heads(4, 4), num_hidden_layers=2, rope_parameters=LLAMA3)
    ),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **heads(4, 2), num_hidden_layers=2, rope_parameters=YARN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**(COMMON | without_head_dim(3, 1)), num_hidden_layers=2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, **heads(3, 3), num_hidden_layers=2)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, **heads(8, 2), num_hidden_layers=2, sliding_window=None)
    ),
    "windowed": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, **heads(4, 2), num_hidden_layers=2, sliding_window=24)
    ),
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(
            **(COMMON | without_head_dim(4, 2)),
            num_hidden_layers=2,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=512,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            **heads(4, 2),
            num_hidden_layers=6,
            sliding_window=SLIDING,
            query_pre_attn_scalar=32,
            layer_types=["full_attention" if layer in (2, 5) else "sliding_attention" for layer in range(6)],
        )
    ),
}


def make_gemma3_with_vision() -> Gemma3ForConditionalGeneration:
    """Gemma 3 as it is published: a text model beside a vision tower."""
    text = make_fresh("gemma3").config.to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4)
    return draw_model(lambda: Gemma3ForConditionalGeneration(config), 0)


def make_small_gemma3() -> Gemma3ForCausalLM:
    """A Gemma 3 with one layer of each kind."""
    config = Gemma3TextConfig(
        **COMMON, **heads(4, 2), num_hidden_layers=2, sliding_window=SLIDING, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return draw_model(lambda: Gemma3ForCausalLM(config), 2)


MADE: dict[str, torch.nn.Module] = {}


def tiny(name: str) -> torch.nn.Module:
    """A random model in float32 whose attention is far from uniform; made once, the same in every process."""
    if name not in MADE:
        MADE[name] = make_fresh(name)
    return MADE[name]


def make_fresh(name: str) -> torch.nn.Module:
    """A fresh one, to be changed by a test."""
    return draw_model(BUILD[name], seed=sum(map(ord, name)))


def draw_model(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """A model with random weights whose attention is far from uniform."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = build().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                gain = 1.7 if "attn" in parameter_name and "o_proj" not in parameter_name else 1.0
                parameter.normal_(std=gain * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(std=0.3)
    torch.random.set_rng_state(state)
    return model


@cache
def make_double(name: str) -> torch.nn.Module:
    """The same model in float64."""
    return copy.deepcopy(tiny(name)).double()


@cache
def make_exact(name: str) -> torch.nn.Module:
    """The same with norms that are computed in float64 too, where small differences would be multiplied."""
    model = copy.deepcopy(make_double(name))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(norm_exactly, module)
    return model


def norm_exactly(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMS norm in the dtype of x."""
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def ids(tokens: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """(batch, tokens) token ids without the end token."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def distinct(tokens: int, seed: int = 0) -> torch.Tensor:
    """(1, tokens) token ids, none twice: in the first layer equal tokens have keys of equal norm, but for rounding."""
    return 3 + torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(seed))[None, :tokens]
