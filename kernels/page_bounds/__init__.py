"""Compute bounds of the keys of a page, and upper bounds of the logits of queries with them."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.page_bounds.reference import (
    page_bounds_reference,
    page_upper_bounds_reference,
    update_page_bounds_reference,
)


@announced
def page_bounds(keys: Tensor, page: int, *, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the elementwise minimum and maximum of the keys of each page. The last page may be partial.

    Args:
        keys: (B, H, n, d)
        page: Number of rows of a page.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        Minimum and maximum, (B, H, ⌈n/page⌉, d) each.

    Raises:
        ValueError: There are no keys, or `page` is below 1.
    """
    if keys.dim() != 4 or page < 1 or keys.shape[2] == 0:
        raise ValueError(f"page_bounds: keys {tuple(keys.shape)} in pages of {page}")
    if choose_implementation("page_bounds", implementation, keys) == "reference":
        return page_bounds_reference(keys, page)
    from kvbench.kernels.page_bounds.triton import page_bounds_triton

    return page_bounds_triton(keys, page)


@announced
def update_page_bounds(
    keys: Tensor, low: Tensor, high: Tensor, last: Tensor, page: int, *, implementation: str | None = None
) -> None:
    """Compute the bounds of the newest page, in place.

    Args:
        keys: (B, H, n, d)
        low: Minimum of each page's keys, (B, H, pages, d), contiguous. The newest page's is written.
        high: Maximum of each page's keys, (B, H, pages, d), contiguous. The newest page's is written.
        last: The newest row, a whole number without dimensions.
        page: Number of rows of a page.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes do not fit.
    """
    fits = low.shape == high.shape and low.shape[:2] == keys.shape[:2] and low.shape[3:] == keys.shape[3:]
    if not fits or not (low.is_contiguous() and high.is_contiguous()) or page < 1:
        raise ValueError(
            f"update_page_bounds: keys {tuple(keys.shape)}, bounds {tuple(low.shape)}, {tuple(high.shape)} of {page}"
        )
    if choose_implementation("update_page_bounds", implementation, keys) == "reference":
        update_page_bounds_reference(keys, low, high, last, page)
        return
    from kvbench.kernels.page_bounds.triton import update_page_bounds_triton

    update_page_bounds_triton(keys, low, high, last, page)


@announced
def page_upper_bounds(
    queries: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    newest: Tensor | None = None,
    force_newest: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Return an upper bound of q·k over the keys k of each page. It is exact up to rounding.

    Args:
        queries: (B, H·G, d)
        low: Minimum of each page's keys, (B, H, pages, d).
        high: Maximum of each page's keys, (B, H, pages, d).
        newest: The last page that exists, a whole number without dimensions; later ones get -inf. None if all exist.
        force_newest: Whether page `newest` gets +inf, so that it is chosen.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H·G, pages) in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: Heads or dimensions do not fit, or a newest page is forced and not named.
    """
    if force_newest and newest is None:
        raise ValueError("page_upper_bounds: force_newest needs newest")
    fits = low.dim() == 4 and queries.dim() == 3 and low.shape == high.shape and queries.shape[2] == low.shape[3]
    if not fits or queries.shape[0] != low.shape[0] or queries.shape[1] % low.shape[1]:
        raise ValueError(
            f"page_upper_bounds: queries {tuple(queries.shape)}, bounds {tuple(low.shape)}, {tuple(high.shape)}"
        )
    if choose_implementation("page_upper_bounds", implementation, low) == "reference":
        return page_upper_bounds_reference(queries, low, high, newest, force_newest)
    from kvbench.kernels.page_bounds.triton import page_upper_bounds_triton

    return page_upper_bounds_triton(queries, low, high, newest, force_newest)
