"""Define a Llama with frozen weights and low-rank factors for training, in plain PyTorch over flat tokens.

All positionwise work runs on a flat (tokens, hidden) array. It has the same shape at every sequence length, so it is
compiled once; only attention uses the shape (rows, length). The factors are masters in float32 and used in the dtype of
the weights, as residuals are. The frozen weights get no gradients.

Projections that read the same input are one product: q, k and v, and gate and up. Their factors `a` are stacked, and
their factors `b` are the blocks of one matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kvbench.models.low_rank import PROJECTIONS
from kvbench.validation import SettingError

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PLACES = 4096  # positions whose predictions over the vocabulary are computed at once
Factors = tuple[Tensor, Tensor] | None
"""The factors of a group: a, (ranks, inputs), and b, (outputs, ranks), scaled. None without factors."""


def project(x: Tensor, weight: Tensor, factors: Factors) -> Tensor:
    """Return x (tokens, inputs) times a frozen weight (outputs, inputs), with its factors."""
    y = F.linear(x, weight)
    return y if factors is None else y + F.linear(F.linear(x, factors[0]), factors[1])


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm of x (tokens, hidden). The mean is computed in float32, as transformers does."""
    h = x.float()
    return weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to (tokens, heads, dim), with halves as in Llama; `cos` and `sin` are (tokens, dim / 2), float32."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def read_heads(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    factors: Factors,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys, and values of one layer, (tokens, heads, dim).

    Args:
        x: Hidden states, (tokens, hidden).
        norm: Weight of the norm before attention.
        weight: The projections to queries, keys and values, one above the other.
        factors: Their factors.
        cos, sin: Of RoPE's angles, (tokens, dim / 2).
        heads: Number of query heads and of KV heads.
        epsilon: Of the norm.
    """
    query, key = heads
    y = project(rms_norm(x, norm, epsilon), weight, factors)
    q, k, v = y.unflatten(-1, (query + 2 * key, -1)).split((query, key, key), 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(
    x: Tensor,
    seen: Tensor,
    output: Tensor,
    output_factors: Factors,
    norm: Tensor,
    weight: Tensor,
    factors: Factors,
    down: Tensor,
    down_factors: Factors,
    epsilon: float,
) -> Tensor:
    """Add the attention's output projection and the feed-forward layer to the hidden states.

    Args:
        x: Hidden states before the layer, (tokens, hidden).
        seen: Output of the attention, (tokens, heads * dim).
        output: Output projection.
        norm: Weight of the norm before the feed-forward layer.
        weight: The projections gate and up, one above the other.
        down: The projection back.
        output_factors, factors, down_factors: Their factors.
        epsilon: Of the norm.
    """
    x = x + project(seen, output, output_factors)
    gate, up = project(rms_norm(x, norm, epsilon), weight, factors).chunk(2, -1)
    return x + project(F.silu(gate) * up, down, down_factors)


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama, as its configuration says it."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    dim: int
    epsilon: float
    theta: float
    positions: int
    """Positions that the base was trained for."""

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Return the shape of a transformers configuration.

        Raises:
            SettingError: It is not a Llama with tied embeddings, plain RoPE and no biases.
        """
        rope = dict(config.rope_parameters)
        plain = rope.get("rope_type", "default") == "default" and config.hidden_act == "silu"
        biases = config.attention_bias or config.mlp_bias
        if config.model_type != "llama" or not plain or biases or not config.tie_word_embeddings:
            raise SettingError("--model: must be a Llama with plain RoPE and tied embeddings, without biases")
        return cls(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size,
            config.head_dim,
            config.rms_norm_eps,
            float(rope["rope_theta"]),
            config.max_position_embeddings,
        )


class LowRankLlama(nn.Module):
    """A frozen Llama with low-rank factors on all projections of all layers.

    Args:
        weights: The base's weights under transformers' names, on their device and in their dtype.
        shape: Its shape.
        rank: Rank of the factors.
        scale: The number by which the factors' product is multiplied.
        theta: Base of RoPE with factors. Without factors it is the base's.
        seed: Seed of the factors `a`. The factors `b` begin at 0, so that training begins with the base.
        compile: Whether to compile the positionwise work.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shape: Shape,
        rank: int,
        scale: float,
        theta: float,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.scale, self.theta = shape, scale, theta
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.layers = [self._read_layer(weights, layer) for layer in range(shape.layers)]
        draw = torch.Generator().manual_seed(seed)
        self.factors = nn.ParameterDict()
        for name, module in PROJECTIONS.items():
            outputs, inputs = weights[f"model.layers.0.{module}.{name}.weight"].shape
            a = (torch.rand(shape.layers, rank, inputs, generator=draw) * 2 - 1) * inputs**-0.5
            self.factors[f"{name}_a"] = nn.Parameter(a.to(self.device))
            self.factors[f"{name}_b"] = nn.Parameter(torch.zeros(shape.layers, outputs, rank, device=self.device))
        wrap: Callable[[Any], Any] = torch.compile(dynamic=False) if compile else lambda function: function
        self.read_heads, self.finish_layer = wrap(read_heads), wrap(finish_layer)

    def _read_layer(self, weights: Mapping[str, Tensor], layer: int) -> tuple[Tensor, ...]:
        """Return a layer's norms and groups of projections: norm, q k v, o, norm, gate up, down."""
        here = f"model.layers.{layer}"
        groups = [
            torch.cat([weights[f"{here}.{PROJECTIONS[name]}.{name}.weight"] for name in group]) for group in GROUPS
        ]
        norms = (weights[f"{here}.{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm"))
        before, behind = norms
        return before, groups[0], groups[1], behind, groups[2], groups[3]

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the factors to those of a file, by the names that it has."""
        for name in PROJECTIONS:
            for part in "ab":
                self.factors[f"{name}_{part}"].copy_(tensors[f"{name}.{part}"])

    def export(self) -> dict[str, Tensor]:
        """Return the factors in bfloat16 on the CPU, by the names that their file has."""
        named = {f"{name}.{part}": self.factors[f"{name}_{part}"] for name in PROJECTIONS for part in "ab"}
        return {name: factor.detach().to("cpu", torch.bfloat16).contiguous() for name, factor in named.items()}

    def group_factors(self) -> list[list[Factors]]:
        """Return the factors of each group of each layer in the weights' dtype. Gradients flow back to the masters."""
        grouped = []
        for group in GROUPS:
            a = torch.cat([self.factors[f"{name}_a"] for name in group], 1)
            rank = a.shape[1] // len(group)
            blocks = [
                F.pad(self.factors[f"{name}_b"] * self.scale, (i * rank, (len(group) - 1 - i) * rank))
                for i, name in enumerate(group)
            ]
            grouped.append((a.to(self.dtype).unbind(), torch.cat(blocks, 1).to(self.dtype).unbind()))
        return [[(a[layer], b[layer]) for a, b in grouped] for layer in range(self.shape.layers)]

    def forward(self, ids: Tensor, tuned: bool = True, compiled: bool = True) -> Tensor:
        """Return the last hidden states before the final norm, (rows * length, hidden).

        Args:
            ids: Token ids, (rows, length).
            tuned: Whether with the factors and their RoPE. Otherwise this is the base.
            compiled: Whether by the compiled functions, which are compiled anew for every number of tokens.
        """
        rows, length = ids.shape
        shape = self.shape
        read, finish = (self.read_heads, self.finish_layer) if compiled else (read_heads, finish_layer)
        cos, sin = (part.repeat(rows, 1) for part in self._find_angles(length, self.theta if tuned else shape.theta))
        factors: list[list[Factors]] = self.group_factors() if tuned else [[None] * len(GROUPS)] * shape.layers
        heads, epsilon = (shape.heads, shape.kv_heads), shape.epsilon
        x = F.embedding(ids.flatten(), self.embedding)
        for layer, (of_heads, of_output, of_inner, of_down) in zip(self.layers, factors, strict=True):
            before, qkv, output, behind, inner, down = layer
            parts = read(x, before, qkv, of_heads, cos, sin, heads, epsilon)
            q, k, v = (part.view(rows, length, -1, shape.dim).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            seen = seen.transpose(1, 2).reshape(rows * length, -1)
            x = finish(x, seen, output, of_output, behind, inner, of_inner, down, of_down, epsilon)
        return x

    def _find_angles(self, length: int, theta: float) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of RoPE's angles, (length, dim / 2), in float32."""
        dim = self.shape.dim
        speeds = theta ** (-torch.arange(0, dim, 2, device=self.device, dtype=torch.float32) / dim)
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None] * speeds[None]
        return angles.cos(), angles.sin()

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states (places, hidden), (places, vocabulary), in float32."""
        return F.linear(rms_norm(x, self.norm, self.shape.epsilon), self.embedding).float()

    def compute_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of target tokens in nats, (places,), of hidden states (places, hidden)."""

        def compute(part: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.predict(part), target, reduction="none")

        pieces = zip(x.split(PLACES), targets.split(PLACES), strict=True)
        return torch.cat(
            [checkpoint(compute, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        )

    def compute_divergence(self, x: Tensor, base: Tensor) -> Tensor:
        """Return KL(base || tuned) of predictions in nats, (places,), of two hidden states (places, hidden)."""

        def compute(part: Tensor, other: Tensor) -> Tensor:
            before, after = self.predict(other).log_softmax(-1), self.predict(part).log_softmax(-1)
            return (before.exp() * (before - after)).sum(-1)

        pieces = zip(x.split(PLACES), base.split(PLACES), strict=True)
        return torch.cat(
            [checkpoint(compute, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        )
