"""Define the embedded model for training: a Llama in plain PyTorch over flat tokens, with a look-ahead.

Parameters have the names of transformers' LlamaForCausalLM, so the weights are exported without conversion. All
positionwise work runs on a flat (tokens, hidden) array. It has the same shape at every sequence length, so it is
compiled once. Only attention uses the shape (rows, length). Residuals and norms stay in fp32, and products run in bf16.

The look-ahead is trained with the model and never exported. For each offset k it has one matrix, which maps the last
hidden state at position i. The model's unembedding then predicts token i + k. This is multi-token prediction (Gloeckle
et al. 2024, arXiv 2404.19737) with a linear map instead of a layer, and with far offsets for answers only.
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
    """Compute the queries, keys and values of one layer, with RoPE applied to queries and keys.

    Args:
        x: Hidden states, shape (tokens, hidden).
        weight: Weight of the norm before attention, shape (hidden,).
        wq, wk, wv: Projections.
        angles: Angles of RoPE, shape (positions, 32).
        places: Position of each token, shape (tokens,).

    Returns:
        Queries, shape (tokens, heads, 64); keys and values, shape (tokens, KV heads, 64).
    """
    h = rms_norm(x, weight)
    cos, sin = angles[places].cos()[:, None], angles[places].sin()[:, None]
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, DIM)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(x: Tensor, seen: Tensor, wo: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Add the attention's output projection and the feed-forward layer to the hidden states.

    Args:
        x: Hidden states before the layer, shape (tokens, hidden).
        seen: Output of the attention, shape (tokens, heads * 64).
        wo: Output projection.
        weight: Weight of the norm before the feed-forward layer, shape (hidden,).
        gate, up, down: Projections of the feed-forward layer.
    """
    x = x + F.linear(seen, wo)
    h = rms_norm(x, weight)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def next_token_loss(x: Tensor, weight: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of the next tokens in nats, shape (tokens,).

    Args:
        x: Last hidden states, shape (tokens, hidden).
        weight: Weight of the final norm, shape (hidden,).
        embedding: Embedding, which is also the unembedding, shape (vocabulary, hidden).
        targets: Token ids that follow, shape (tokens,).
    """
    return F.cross_entropy(F.linear(rms_norm(x, weight), embedding).float(), targets, reduction="none")


def look_ahead_loss(x: Tensor, weight: Tensor, maps: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of tokens further ahead in nats, shape (offsets, pairs).

    Args:
        x: Last hidden states, shape (offsets, pairs, hidden).
        weight: Weight of the final norm, shape (hidden,).
        maps: One matrix for each offset, shape (offsets, hidden, hidden).
        embedding: Embedding, which is also the unembedding, shape (vocabulary, hidden).
        targets: Token ids, shape (offsets, pairs); -100 gives a loss of zero.
    """
    h = torch.bmm(rms_norm(x, weight), maps)
    return F.cross_entropy(F.linear(h, embedding).float().flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )


def weight_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights, by their names in transformers."""
    hidden, inner, queries, keys = recipe.hidden, recipe.inner, recipe.heads * DIM, recipe.kv_heads * DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    shapes |= {"model.norm.weight": (hidden,)}
    for i in range(recipe.layers):
        shapes |= {
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
    return shapes


class Llama(nn.Module):
    """The embedded model with its look-ahead.

    Args:
        recipe: Shape of the model and settings of its training.
        seed: Seed of the initial weights.
        compile: Whether to compile the positionwise work with `torch.compile`.
    """

    angles: Tensor

    def __init__(self, recipe: Recipe, seed: int = 0, compile: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        draw = torch.Generator().manual_seed(seed)
        shapes = weight_shapes(recipe)
        self.names = list(shapes)
        self.weights = nn.ParameterList()
        for name, shape in shapes.items():
            weight = torch.ones(shape)
            # A norm starts at 1. The embedding has a standard deviation of 0.02, other matrices one over the root of
            # their fan-in. Matrices that write to the residual are scaled down by the depth.
            if len(shape) == 2:
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
        """Run the model.

        Args:
            tokens: Token ids, shape (rows, length).
            targets: The ids that follow each of them, shape (rows, length).

        Returns:
            The cross-entropy of the targets in nats, shape (rows, length), and the last hidden states, shape
            (rows * length, hidden).
        """
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
        """Return the cross-entropy of tokens further ahead in nats, shape (offsets, pairs).

        Args:
            x: Last hidden states, shape (rows * length, hidden).
            pairs: Index into `x` of the state that predicts each target, shape (offsets, pairs).
            targets: Token ids, shape (offsets, pairs); -100 gives a loss of zero.
        """
        embedding, final, *_ = self.weights
        return self.look_ahead_loss(x[pairs], final, self.maps, embedding, targets)

    def take(self, folder: Path) -> None:
        """Load weights from a folder to which a model of this shape was exported."""
        held = {name: weight for path in folder.glob("model*.safetensors") for name, weight in load_file(path).items()}
        with torch.no_grad():
            for name, weight in zip(self.names, self.weights, strict=True):
                weight.copy_(held[name])

    def export(self) -> dict[str, Tensor]:
        """Return the weights in bf16 under transformers' names."""
        named = zip(self.names, self.weights, strict=True)
        return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in named}
