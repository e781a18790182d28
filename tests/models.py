"""Tiny random models, and an independent engine to compare with: dense, head by head, in float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
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


MADE: dict[str, torch.nn.Module] = {}


def tiny(name: str) -> torch.nn.Module:
    """A random model in float32 whose attention is far from uniform; made once, the same in every process."""
    if name not in MADE:
        MADE[name] = make(name)
    return MADE[name]


def make(name: str) -> torch.nn.Module:
    """A fresh one, to be changed by a test."""
    return draw(BUILD[name], seed=sum(map(ord, name)))


def draw(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
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
def double(name: str) -> torch.nn.Module:
    """The same model in float64."""
    return copy.deepcopy(tiny(name)).double()


def ids(tokens: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """(batch, tokens) token ids without the end token."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def distinct(tokens: int, seed: int = 0) -> torch.Tensor:
    """(1, tokens) token ids, none twice: in the first layer equal tokens have keys of equal norm, but for rounding."""
    return 3 + torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(seed))[None, :tokens]


@dataclass
class Head:
    """What one KV head holds, one numpy row each."""

    keys: np.ndarray
    values: np.ndarray
    places: np.ndarray
    mass: np.ndarray

    def take(self, index: object) -> "Head":
        return Head(self.keys[index], self.values[index], self.places[index], self.mass[index])


@dataclass
class Glance:
    """What the dense engine shows of one KV head when a block was read."""

    layer: int
    head: int
    queries: np.ndarray  # (G, T, d)
    outputs: np.ndarray  # (G, T, d)
    rows: Head  # the block's rows are its last
    scaling: float
    tokens: int  # read so far


Cut = Callable[[list[Glance]], list[Head]]


@dataclass
class Dense:
    """Reads blocks with plain attention over what each head holds; transformers does the rest. `cut` is asked after
    every block of the prompt (and while decoding if `cuts_decoding`) with the glances of a layer's KV heads and gives
    what they hold from then on.
    """

    name: str
    cut: Cut | None = None
    cuts_decoding: bool = False
    held: dict[int, list[Head]] = field(default_factory=dict)
    seen: int = 0
    cutting: bool = False

    def prefill(self, tokens: torch.Tensor, block: int | None) -> torch.Tensor:
        """Logits (vocab) after the last of `tokens` (1, n)."""
        for part in tokens.split(block or tokens.shape[1], dim=1):
            self.cutting = self.cut is not None
            logits = self.read(part)
        return logits[-1]

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (t, vocab) of further tokens (1, t)."""
        self.cutting = self.cut is not None and self.cuts_decoding
        return self.read(tokens)

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        model = double(self.name)
        AttentionInterface.register("dense", self.attention)
        model.set_attn_implementation("dense")
        positions = torch.arange(self.seen, self.seen + tokens.shape[1])[None]
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        self.seen += tokens.shape[1]
        return logits

    def attention(self, module, query, key, value, mask, scaling, sliding_window=None, **kwargs):
        layer, tokens = module.layer_idx, query.shape[2]
        places = np.arange(self.seen, self.seen + tokens)
        fresh = [Head(k.numpy(), v.numpy(), places, np.ones(tokens)) for k, v in zip(key[0], value[0], strict=True)]
        before = self.held.get(layer, [head.take(slice(0)) for head in fresh])
        glances, outputs = [], []
        for index, (old, new) in enumerate(zip(before, fresh, strict=True)):
            rows = Head(*(np.concatenate([getattr(old, f), getattr(new, f)]) for f in vars(old)))
            group = query.shape[1] // len(fresh)
            queries = query[0, index * group : (index + 1) * group].numpy()
            found = np.stack([self.attend(q, rows, places, scaling, sliding_window) for q in queries])
            glances.append(Glance(layer, index, queries, found, rows, scaling, self.seen + tokens))
            outputs.extend(found)
        cut = self.cutting and sliding_window is None
        self.held[layer] = self.cut(glances) if cut else [glance.rows for glance in glances]
        return torch.from_numpy(np.stack(outputs, axis=1))[None], None

    @staticmethod
    def attend(queries, rows, places, scaling, window) -> np.ndarray:
        """(T, d): softmax(q·k·s + log mass)·v over the rows whose place a query may see."""
        logits = queries @ rows.keys.T * scaling + np.log(rows.mass)
        logits[rows.places[None] > places[:, None]] = -np.inf
        if window is not None:
            logits[rows.places[None] <= places[:, None] - window] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ rows.values
