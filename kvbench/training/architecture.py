"""The embedded model while it is trained: a Llama in plain PyTorch over flat tokens, and its look-ahead.

Parameters have the names of transformers' LlamaForCausalLM, so the weights are exported as they are. All positionwise
work runs on a flat (tokens, hidden) array. It has the same shape at every sequence length, so it is compiled once. Only
attention sees (rows, length). Residuals and norms stay in fp32, and products run in bf16.

The look-ahead is trained with the model and never exported. Through one matrix for each offset k, the last hidden state
at i also predicts token i + k with the model's own unembedding. This is multi-token prediction (Gloeckle et al. 2024,
arXiv 2404.19737) with a linear map instead of a layer, and with far offsets for answers only.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.training.recipe import DIM, EPSILON, VOCABULARY, Recipe


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute RMSNorm of (…, hidden) with `weight` (hidden,) in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to (tokens, heads, dim), with halves as in Llama."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def project_qkv(x: Tensor, weight: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, angles: Tensor, places: Tensor):
    """Compute queries (tokens, heads, 64), keys and values (tokens, KV heads, 64) of one layer."""
    h = rms_norm(x, weight)
    cos, sin = angles[places].cos()[:, None], angles[places].sin()[:, None]
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, DIM)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(x: Tensor, seen: Tensor, wo: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Add the output projection of `seen` (tokens, heads * 64) and the feed-forward to `x` (tokens, hidden)."""
    x = x + F.linear(seen, wo)
    h = rms_norm(x, weight)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def next_token_loss(x: Tensor, weight: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (tokens,) in nats of `targets` (tokens,) after last hidden states (tokens, hidden)."""
    return F.cross_entropy(F.linear(rms_norm(x, weight), embedding).float(), targets, reduction="none")


def look_ahead_loss(x: Tensor, weight: Tensor, maps: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (offsets, pairs) of states (offsets, pairs, hidden), each mapped by its offset's map."""
    h = torch.bmm(rms_norm(x, weight), maps)
    return F.cross_entropy(F.linear(h, embedding).float().flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights by transformers' names."""
    hidden, inner, queries, keys = recipe.hidden, recipe.inner, recipe.heads * DIM, recipe.kv_heads * DIM
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    found |= {"model.norm.weight": (hidden,)}
    for i in range(recipe.layers):
        found |= {
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
            f"model.layers.{i}.self_attn.q_proj.weight": (queries, hidden),
            f"model.layers.{i}.self_attn.k_proj.weight": (keys, hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": (keys, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"model.layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return found


class Llama(nn.Module):
    """The model with its look-ahead. Its weights are drawn from `seed`."""

    angles: Tensor

    def __init__(self, recipe: Recipe, seed: int = 0, compile: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        draw = torch.Generator().manual_seed(seed)
        own = weight_shapes(recipe)
        self.names = list(own)
        self.weights = nn.ParameterList()
        for name, shape in own.items():
            weight = torch.ones(shape)
            if len(shape) == 2:  # 0.02 for the embedding, fan-in otherwise, residual branches scaled down by depth
                std = 0.02 if "embed" in name else shape[1] ** -0.5
                std *= (2 * recipe.layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                weight = torch.randn(shape, generator=draw) * std
            self.weights.append(nn.Parameter(weight))
        self.maps = nn.Parameter(torch.eye(recipe.hidden).repeat(len(recipe.offsets), 1, 1))
        speeds = recipe.theta ** (-torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("angles", torch.arange(recipe.context)[:, None] * speeds[None])
        wrap = torch.compile(dynamic=False) if compile else lambda f: f
        self.project_qkv, self.finish_layer, self.next_token_loss, self.look_ahead_loss = (
            wrap(project_qkv),
            wrap(finish_layer),
            wrap(next_token_loss),
            wrap(look_ahead_loss),
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of targets after tokens (rows, length), and last hidden states (tokens, hidden)."""
        rows, length = tokens.shape
        places = torch.arange(length, device=tokens.device).repeat(rows)
        embedding, final, *layers = self.weights
        x = F.embedding(tokens.flatten(), embedding)
        for i in range(self.recipe.layers):
            n1, wq, wk, wv, wo, n2, gate, up, down = layers[9 * i : 9 * i + 9]
            q, k, v = (
                t.view(rows, length, -1, DIM).transpose(1, 2)
                for t in self.project_qkv(x, n1, wq, wk, wv, self.angles, places)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.finish_layer(x, seen.transpose(1, 2).reshape(rows * length, -1), wo, n2, gate, up, down)
        return self.next_token_loss(x, final, embedding, targets.flatten()).view(rows, length), x

    def compute_look_ahead_loss(self, x: Tensor, pairs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy (offsets, pairs) of `targets` after the hidden states at flat positions `pairs`."""
        embedding, final, *_ = self.weights
        return self.look_ahead_loss(x[pairs], final, self.maps, embedding, targets)

    def take(self, folder: Path) -> None:
        """Load the weights of a folder, exported by a model of this shape."""
        held = {name: weight for path in folder.glob("model*.safetensors") for name, weight in load_file(path).items()}
        with torch.no_grad():
            for name, weight in zip(self.names, self.weights, strict=True):
                weight.copy_(held[name])

    def export(self) -> dict[str, Tensor]:
        """Return the weights in bf16 under transformers' names."""
        named = zip(self.names, self.weights, strict=True)
        return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in named}
