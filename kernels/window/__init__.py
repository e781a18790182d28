"""What the block's last queries saw: their attention probabilities over all rows."""

from torch import Tensor

from kvbench.kernels.window.reference import window_reference


def window(queries: Tensor, keys: Tensor, mass: Tensor, scaling: float) -> Tensor:
    """Probabilities (B, H, G, w, n) in float32 (float64 for float64 inputs) of the last w queries.

    queries (B, H·G, w, d), the last of which belongs to the last row; keys (B, H, n, d); mass (B, H, n) >= 0.
    Touches w·n logits per query head. ValueError if w > n or heads do not divide.
    """
    if queries.shape[1] % keys.shape[1] or queries.shape[2] > keys.shape[2]:
        raise ValueError(f"window: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}")
    return window_reference(queries, keys, mass, scaling)
