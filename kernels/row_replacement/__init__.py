"""Choose the row of each head that makes room for the next token."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.row_replacement.reference import replace_row_reference


@announced
def replace_row(
    scores: Tensor,
    sinks: Tensor | None,
    recents: Tensor | None,
    places: Tensor,
    ranks: Tensor,
    order: Tensor,
    free: Tensor,
    position: Tensor,
    invalid: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Free the slot of each head's row with the smallest score, and hand it to the next token.

    Of equal scores the latest row leaves. Protected rows stay, as far as n - 2 of them (or one, if n is 2) go: sinks
    before recent rows, the first sinks and the newest recent rows before the others.

    Args:
        scores: (B, H, n), n at least 2.
        sinks: First rows that stay whatever their score, (B, H, n) bool, or None.
        recents: Newest rows that stay, (B, H, n) bool, or None.
        places: Positions of the rows, (B, H, n) int64, different within a head, updated. The freed slot gets the
            position of the next token.
        ranks: Index of each slot's row in the order of positions, (B, H, n) int64, updated.
        order: The slot of each rank, (B, H, n) int64, updated. The next token's is the last.
        free: The freed slots, (B, H) int64, written.
        position: Position of the token that was read last, a whole number without dimensions.
        invalid: Set if a score is NaN, bool without dimensions.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    tables = places, ranks, order
    whole = all(own.shape == scores.shape and own.is_contiguous() for own in tables) and scores.shape[-1] > 1
    if scores.dim() != 3 or not whole or free.shape != scores.shape[:2]:
        shapes = ", ".join(str(tuple(own.shape)) for own in (scores, *tables, free))
        raise ValueError(f"replace_row: scores, places, ranks, order, free {shapes}")
    if invalid.dtype != torch.bool or not (ranks.dtype == order.dtype == free.dtype == torch.int64):
        raise ValueError(f"replace_row: {ranks.dtype}, {order.dtype}, {free.dtype}, {invalid.dtype}")
    given = scores, sinks, recents, *tables, free, position, invalid
    if choose_implementation("replace_row", implementation, scores) == "reference":
        replace_row_reference(*given)
        return
    from kvbench.kernels.row_replacement.triton import replace_row_triton

    replace_row_triton(*given)
