"""Rotate rows by their slot, which is a row's index among its head's rows, instead of their position (StreamingLLM).

Rows stay stored as the model rotated them. For attention, keys and queries are rotated from their position to their
slot. After an eviction positions therefore have no gaps and never exceed the number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.interfaces.rows import Rows
from kvbench.kernels.rerotation import rerotate


def rotate_by_slot(
    queries: Tensor, rows: Rows, rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by slot.

    Args:
        queries: Queries of the block, (B, H·G, T, d).
        rows: All rows of the layer; the block's are the last T.
        rotation: The model's rotary embedding: positions -> cos, sin.

    Returns:
        The queries (B, H·G, T, d) and the keys (B, H, n, d).
    """
    batch, heads, count, _ = rows.keys.shape
    tokens = queries.shape[2]
    places = rows.places.clamp(min=0)
    slots = (rows.present.cumsum(-1) - 1).clamp(min=0)

    def angles(where: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotation(where.flatten(0, 1))
        return cos.unflatten(0, (batch, heads)), sin.unflatten(0, (batch, heads))

    def of_block(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = pair
        return cos[:, :, None, count - tokens :], sin[:, :, None, count - tokens :]

    before, after = angles(places), angles(slots)
    stays = (places == slots)[..., None]
    keys = torch.where(stays, rows.keys, rerotate(rows.keys, before, after))
    grouped = queries.unflatten(1, (heads, -1))
    rotated = rerotate(grouped, of_block(before), of_block(after))
    turned = torch.where(stays[:, :, None, count - tokens :], grouped, rotated)
    return turned.flatten(1, 2), keys
