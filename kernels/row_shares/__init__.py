"""Share the rows of a layer out among its heads in given proportions, so that their sum is exact."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.row_shares.reference import share_rows_reference


@announced
def share_rows(
    targets: Tensor, least: Tensor, most: Tensor, total: Tensor, *, implementation: str | None = None
) -> Tensor:
    """Round the targets of each sample's heads to whole numbers with an exact sum, by largest remainder.

    It is `kvbench.interfaces.apportion.apportion` for each sample. What a bound takes from one head goes to the others,
    in the order of their remaining distance to the target. Of equal distances the lower head comes first.

    Args:
        targets: The numbers to round, (B, H) float64, not negative.
        least: The smallest allowed result of each head, (B, H) int64.
        most: The largest allowed result, (B, H) int64, at least `least`.
        total: The sum of each sample's results, (B,) int64.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H) int64. They sum to `total`, or to the nearest sum that the bounds allow.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    whole = (least, most, total)
    fits = targets.dim() == 2 and least.shape == most.shape == targets.shape and total.shape == targets.shape[:1]
    if not fits or targets.dtype != torch.float64 or any(own.dtype != torch.int64 for own in whole):
        found = ", ".join(f"{tuple(own.shape)} {own.dtype}" for own in (targets, *whole))
        raise ValueError(f"share_rows: targets, least, most, total {found}")
    like = torch.empty(0, device=targets.device)  # the dtype of the rows does not matter
    if choose_implementation("share_rows", implementation, like) == "reference":
        return share_rows_reference(targets, least, most, total)
    from kvbench.kernels.row_shares.triton import share_rows_triton

    return share_rows_triton(targets, least, most, total)
