"""Rotate rows from one position to another."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.rerotation.reference import rerotate_reference, rotate_reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate rows as the model does, in their dtype. Pairs are channels i and i + r/2.

    Args:
        x: Rows before rotation, (…, d). Channels from r on do not change.
        cos: (…, r), of the rows' dtype.
        sin: (…, r), of the rows' dtype.

    Raises:
        ValueError: r is odd or larger than d.
    """
    rotated = cos.shape[-1]
    if rotated % 2 or rotated > x.shape[-1]:
        raise ValueError(f"rotate: {rotated} rotated channels of {x.shape[-1]}")
    return rotate_reference(x, cos, sin)


def rerotate(x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    """Return rows as if they had been rotated by other angles. Pairs are channels i and i + r/2.

    Args:
        x: Rotated rows, (…, d). Channels from r on do not change.
        before: The cos and sin that they were rotated with, (…, r) each.
        after: The cos and sin of the result, (…, r) each.

    Raises:
        ValueError: r is odd or larger than d.
    """
    rotated = before[0].shape[-1]
    if rotated % 2 or rotated > x.shape[-1]:
        raise ValueError(f"rerotate: {rotated} rotated channels of {x.shape[-1]}")
    return rerotate_reference(x, before, after)


@announced
def rotate_rows(
    x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, slots: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Return rows as if they had been rotated to other positions (`rerotate`).

    Args:
        x: Rotated rows, (B, H, n, d).
        cos: The cos of all positions, (P, r).
        sin: The sin of all positions, (P, r).
        places: The positions that the rows were rotated to, whole numbers that broadcast to (B, H, n); -1 for rows that
            do not exist.
        slots: The positions of the result, like `places`.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: r is odd or larger than d, or shapes do not fit.
    """
    if x.dim() != 4 or cos.shape != sin.shape or cos.shape[1] % 2 or cos.shape[1] > x.shape[3]:
        raise ValueError(f"rotate_rows: {tuple(x.shape)} by cos {tuple(cos.shape)}, sin {tuple(sin.shape)}")
    if choose_implementation("rotate_rows", implementation, x) == "reference":
        return rerotate_reference(x, (cos[places], sin[places]), (cos[slots], sin[slots]))
    from kvbench.kernels.rerotation.triton import rotate_rows_triton

    return rotate_rows_triton(x, cos, sin, places, slots)
