"""The reference model while it is trained: a Llama in plain PyTorch over flat tokens.

Parameters carry the names that transformers' LlamaForCausalLM gives them, so the weights are exported as they are.
All positionwise work runs on a flat (tokens, hidden) array, which has one shape at every sequence length: it is
compiled once. Only attention sees (rows, length). Residuals and norms stay in fp32, products run in bf16.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=768,
    hidden_act="silu",
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=100000.0),
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    dtype="bfloat16",
)
HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER = 256, 6, 4, 2, 64, 768


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of (tokens, heads, dim), halves as in Llama."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def before(x: Tensor, weight: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, angles: Tensor, places: Tensor):
    """Queries (tokens, 4, 64), keys and values (tokens, 2, 64) of one layer."""
    h = norm(x, weight)
    cos, sin = angles[places].cos()[:, None], angles[places].sin()[:, None]
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, DIM)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after(x: Tensor, seen: Tensor, wo: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The rest of the layer: output projection and feed-forward, both added to the residual."""
    x = x + F.linear(seen, wo)
    h = norm(x, weight)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def surprise(x: Tensor, weight: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every token, (tokens,), in nats."""
    return F.cross_entropy(F.linear(norm(x, weight), embedding).float(), targets, reduction="none")


class Llama(nn.Module):
    def __init__(self, seed: int = 0, compile: bool = False):
        super().__init__()
        shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], HIDDEN), "model.norm.weight": (HIDDEN,)}
        for i in range(LAYERS):
            shapes |= {
                f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
                f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
                f"model.layers.{i}.self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
                f"model.layers.{i}.self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
                f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
                f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
                f"model.layers.{i}.mlp.gate_proj.weight": (INNER, HIDDEN),
                f"model.layers.{i}.mlp.up_proj.weight": (INNER, HIDDEN),
                f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, INNER),
            }
        draw = torch.Generator().manual_seed(seed)
        self.names = list(shapes)
        self.weights = nn.ParameterList()
        for name, shape in shapes.items():
            weight = torch.ones(shape)
            if len(shape) == 2:  # 0.02 for the embedding, fan-in otherwise, residual branches scaled down by depth
                std = 0.02 if "embed" in name else shape[1] ** -0.5
                std *= (2 * LAYERS) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                weight = torch.randn(shape, generator=draw) * std
            self.weights.append(nn.Parameter(weight))
        speeds = CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(0, DIM, 2) / DIM)
        places = torch.arange(CONFIG["max_position_embeddings"])
        self.register_buffer("angles", places[:, None] * speeds[None])
        wrap = torch.compile(dynamic=False) if compile else lambda f: f
        self.before, self.after, self.surprise = wrap(before), wrap(after), wrap(surprise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and targets (rows, length) -> cross-entropy (rows, length)."""
        rows, length = tokens.shape
        places = torch.arange(length, device=tokens.device).repeat(rows)
        embedding, final, *layers = self.weights
        x = F.embedding(tokens.flatten(), embedding)
        for i in range(LAYERS):
            n1, wq, wk, wv, wo, n2, gate, up, down = layers[9 * i : 9 * i + 9]
            q, k, v = (
                t.view(rows, length, -1, DIM).transpose(1, 2)
                for t in self.before(x, n1, wq, wk, wv, self.angles, places)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.after(x, seen.transpose(1, 2).reshape(rows * length, -1), wo, n2, gate, up, down)
        return self.surprise(x, final, embedding, targets.flatten()).view(rows, length)

    def export(self) -> dict[str, Tensor]:
        """Weights in bf16 under transformers' names."""
        named = zip(self.names, self.weights, strict=True)
        return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in named}
