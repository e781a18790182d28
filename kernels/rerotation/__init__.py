"""Rotate rows from one position to another."""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.rerotation.reference import rerotate_reference


def rerotate(
    x: Tensor, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], *, implementation: str | None = None
) -> Tensor:
    """Return rows as if they had been rotated by other angles. Pairs are channels i and i + r/2.

    Args:
        x: Rotated rows, (…, d). Channels from r on do not change.
        before: The cos and sin that they were rotated with, (…, r) each.
        after: The cos and sin of the result, (…, r) each.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: r is odd or larger than d.
    """
    rotated = before[0].shape[-1]
    if rotated % 2 or rotated > x.shape[-1]:
        raise ValueError(f"rerotate: {rotated} rotated channels of {x.shape[-1]}")
    if choose_implementation("rerotate", implementation, x) == "reference":
        return rerotate_reference(x, before, after)
    from kvbench.kernels.rerotation.triton import rerotate_triton

    return rerotate_triton(x, before, after)
