"""What every layer of a tiny model computes for a text, taken from transformers' own modules, in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from kvbench.models.transformers_port import find_text_decoder
from tests.support.normed_states import record_normed_states
from tests.support.tiny_models import make_double
from tests.support.unrotated_heads import find_frequencies, read_unrotated


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer. T tokens, H KV heads, Hq query heads."""

    hidden: np.ndarray  # (T, hidden), before the layer's norm
    normed: np.ndarray  # (T, hidden), behind it
    queries: np.ndarray  # (Hq, T, d), before rotation
    rotated: np.ndarray  # (Hq, T, d)
    keys: np.ndarray  # (H, T, d), rotated
    stored: np.ndarray  # (T, 2·H·d), keys before norm and rotation, and values


def read_layers(name: str, ids: torch.Tensor) -> list[LayerStates]:
    """Read a text (1, T) with a tiny model whose layers all have full attention."""
    model, projected = make_double(name), dict[int, list[np.ndarray]]()
    plain = read_unrotated(name, ids)
    handles = []
    for index, layer in enumerate(find_text_decoder(model).layers):
        for own in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            handles.append(
                own.register_forward_hook(
                    lambda module, args, output, index=index: projected.setdefault(index, []).append(output[0].numpy())
                )
            )
    with torch.no_grad(), record_normed_states(model) as normed:
        hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    return [
        LayerStates(
            hidden[layer][0].numpy(), normed[layer], queries, *(rotate(name, x) for x in (queries, keys)),
            np.concatenate(projected[layer], -1),
        )
        for layer, (queries, keys) in plain.items()
    ]  # fmt: skip


def rotation(name: str, place: int, dim: int) -> np.ndarray:
    """The matrix (d, d) by which a model rotates the queries and keys of a position."""
    own, found = find_frequencies(name, dim), np.eye(dim)
    half, angles = own.rotated // 2, own.angles(place)
    for i in range(half):
        cos, sin = own.factor[i] * np.cos(angles[i]), own.factor[i] * np.sin(angles[i])
        found[i, i], found[i, i + half], found[i + half, i], found[i + half, i + half] = cos, -sin, sin, cos
    return found


def rotate(name: str, heads: np.ndarray) -> np.ndarray:
    """Rotate heads (H, T, d) at the positions 0 to T - 1."""
    return np.stack([heads[:, t] @ rotation(name, t, heads.shape[2]).T for t in range(heads.shape[1])], 1)


def attend(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The attention probabilities (T, T) of a head's rotated queries and keys (T, d)."""
    logits = np.where(np.tri(len(keys), dtype=bool), queries @ keys.T / keys.shape[1] ** 0.5, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)
