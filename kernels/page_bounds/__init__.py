"""Bounds of the keys of a page, and of what queries can see in it."""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.page_bounds.reference import page_bounds_reference, page_upper_bounds_reference


def page_bounds(keys: Tensor, page: int, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Elementwise minimum and maximum (B, H, ⌈n/page⌉, d) of the keys (B, H, n, d) of each page; the last page may be
    partial. ValueError for no keys or page < 1.
    """
    if keys.dim() != 4 or page < 1 or keys.shape[2] == 0:
        raise ValueError(f"page_bounds: keys {tuple(keys.shape)} in pages of {page}")
    if choose_implementation("page_bounds", implementation, keys) == "reference":
        return page_bounds_reference(keys, page)
    from kvbench.kernels.page_bounds.triton import page_bounds_triton

    return page_bounds_triton(keys, page)


def page_upper_bounds(queries: Tensor, low: Tensor, high: Tensor, *, implementation: str | None = None) -> Tensor:
    """(B, H·G, pages) in float32 (float64 for float64 inputs): no q·k in the page is larger, but for rounding.

    queries (B, H·G, d); low, high (B, H, pages, d). ValueError if heads do not divide or dimensions differ.
    """
    fits = low.dim() == 4 and queries.dim() == 3 and low.shape == high.shape and queries.shape[2] == low.shape[3]
    if not fits or queries.shape[0] != low.shape[0] or queries.shape[1] % low.shape[1]:
        raise ValueError(
            f"page_upper_bounds: queries {tuple(queries.shape)}, bounds {tuple(low.shape)}, {tuple(high.shape)}"
        )
    if choose_implementation("page_upper_bounds", implementation, low) == "reference":
        return page_upper_bounds_reference(queries, low, high)
    from kvbench.kernels.page_bounds.triton import page_upper_bounds_triton

    return page_upper_bounds_triton(queries, low, high)
