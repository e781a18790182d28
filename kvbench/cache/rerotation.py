"""Positions by slot: a row's number among its head's rows, in place of its original position (StreamingLLM).

Rows stay stored as the model rotated them; for attention keys and queries are turned from their place to their slot,
so that after an eviction positions have no gaps and never pass the number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.interfaces.rows import Rows
from kvbench.kernels.rerotation import rerotate


def rotate_by_slot(
    queries: Tensor, rows: Rows, rotation: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Queries (B, H·G, T, d) of the block and keys (B, H, n, d) of all rows, the block's last, rotated by slot."""
    batch, heads, count, _ = rows.keys.shape
    tokens = queries.shape[2]
    places = rows.places.clamp(min=0)
    slots = (rows.present.cumsum(-1) - 1).clamp(min=0)

    def angles(where: Tensor) -> list[Tensor]:
        return [part.unflatten(0, (batch, heads)) for part in rotation(where.flatten(0, 1))]

    before, after = angles(places), angles(slots)
    stays = (places == slots)[..., None]
    keys = torch.where(stays, rows.keys, rerotate(rows.keys, before, after))
    grouped = queries.unflatten(1, (heads, -1))
    last = [[part[:, :, None, count - tokens :] for part in pair] for pair in (before, after)]
    turned = torch.where(stays[:, :, None, count - tokens :], grouped, rerotate(grouped, *last))
    return turned.flatten(1, 2), keys
