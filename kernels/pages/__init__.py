"""Bounds of the keys of a page, and of what queries can see in it."""

from torch import Tensor

from kvbench.kernels.pages.reference import bounds_reference, upper_reference


def bounds(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Elementwise minimum and maximum (B, H, ⌈n/page⌉, d) of the keys (B, H, n, d) of each page; the last page may be
    partial. ValueError for no keys or page < 1.
    """
    if page < 1 or keys.shape[2] == 0:
        raise ValueError(f"bounds: keys {tuple(keys.shape)} in pages of {page}")
    return bounds_reference(keys, page)


def upper(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(B, H·G, pages) in float32 (float64 for float64 inputs): no q·k in the page is larger, but for rounding.

    queries (B, H·G, d); low, high (B, H, pages, d). ValueError if heads do not divide.
    """
    if queries.shape[1] % low.shape[1] or low.shape != high.shape:
        raise ValueError(f"upper: queries {tuple(queries.shape)}, bounds {tuple(low.shape)}, {tuple(high.shape)}")
    return upper_reference(queries, low, high)
