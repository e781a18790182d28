"""Queries and keys as they are before rotation, and the frequencies that a model rotates them by, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.models.transformers_port import find_text_decoder
from tests.support.tiny_models import make_double


@dataclass(frozen=True)
class Frequencies:
    """How a model rotates the d/2 pairs of a head: first those of the rotated dimensions, then those of the others."""

    omega: np.ndarray
    """Radians per token, float32 as the model has them; 0 for dimensions that are not rotated."""
    factor: np.ndarray
    """What a rotation multiplies by."""
    rotated: int
    """Number of rotated dimensions."""

    def split(self, x: np.ndarray) -> np.ndarray:
        """(..., d) -> (..., d/2) complex numbers."""
        pairs = [(i, i + self.rotated // 2) for i in range(self.rotated // 2)]
        rest = (x.shape[-1] - self.rotated) // 2
        pairs += [(self.rotated + i, self.rotated + i + rest) for i in range(rest)]
        return np.stack([x[..., one] + 1j * x[..., other] for one, other in pairs], -1)

    def angles(self, place: int) -> np.ndarray:
        """(d/2,), rounded as the model rounds them: it multiplies in float32."""
        return (self.omega * np.float32(place)).astype(np.float64)


def find_frequencies(name: str, dim: int = 32) -> Frequencies:
    """The frequencies of a tiny model's layers with full attention."""
    rotary = find_text_decoder(make_double(name)).rotary_emb
    kind = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
    own = getattr(rotary, f"{kind}inv_freq").float().numpy()
    rest = dim // 2 - len(own)
    factor = np.full(len(own), getattr(rotary, f"{kind}attention_scaling"))
    return Frequencies(
        np.concatenate([own, np.zeros(rest, np.float32)]), np.concatenate([factor, np.ones(rest)]), 2 * len(own)
    )


def read_unrotated(name: str, tokens: torch.Tensor) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Queries (Hq, n, d) and keys (H, n, d) of each layer behind the model's norms, for `tokens` (1, n)."""
    model, found, handles = make_double(name), dict[int, list[np.ndarray]](), []
    config = model.config.get_text_config()
    counts = config.num_attention_heads, config.num_key_value_heads

    def note(layer: int, attention: torch.nn.Module) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            heads = output[0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            parts = [heads] if module is not getattr(attention, "qkv_proj", None) else heads.split([*counts, counts[1]])
            for part in parts[:2]:
                norm = getattr(attention, "k_norm" if found.get(layer) else "q_norm", None)  # queries come first
                found.setdefault(layer, []).append((part if norm is None else norm(part)).detach().numpy())

        return hook

    for layer, block in enumerate(find_text_decoder(model).layers):
        attention = block.self_attn
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj")
        handles += [getattr(attention, own).register_forward_hook(note(layer, attention)) for own in names]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return {layer: (own[0], own[1]) for layer, own in found.items()}
