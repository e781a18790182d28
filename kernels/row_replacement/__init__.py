"""Choose the row of each head that makes room for the next token."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.row_replacement.reference import replace_row_reference

NEVER = 1 << 30  # the quota of a head that is not cut


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
    tally: Tensor,
    *,
    growth: tuple[Tensor, Tensor, Tensor] | None = None,
    implementation: str | None = None,
) -> None:
    """Free the slot of each head's row with the smallest score, and hand it to the next token.

    Of equal scores the latest row leaves. Protected rows stay, as far as the quota minus one of them (or one, if the
    quota is 1) go: sinks before recent rows, the first sinks and the newest recent rows before the others.

    A head whose rows fit its quota keeps them all. The next token then gets the first unused slot.

    Args:
        scores: (B, H, n), n at least 2.
        sinks: First rows that stay whatever their score, (B, H, n) bool, or None.
        recents: Newest rows that stay, (B, H, n) bool, or None.
        places: Positions of the rows, (B, H, n) int64, different within a head, updated. The next token's slot gets its
            position.
        ranks: Index of each slot's row in the order of positions, (B, H, n) int64, updated. An unused slot has its own
            index.
        order: The slot of each rank, (B, H, n) int64, updated. The next token's is the last of those in use.
        free: The next token's slots, (B, H) int64, written.
        position: Position of the token of each sample that was read last, whole numbers that broadcast to (B, 1, 1).
        invalid: Set if a score is NaN, bool without dimensions.
        tally: For each head the rows that it protected at its last cut, and the largest numbers of sinks and of other
            protected rows that its quota had no room for at a cut, (3, B, H) int64, updated.
        growth: None if every head uses all n slots, so that its quota is n - 1. Otherwise the number of slots in use,
            the first ones of each head, (B, H) int64, updated; the quotas, which broadcast to (B, H) int64, `NEVER` for
            heads that are not cut and at least one less than the slots in use; and the masses of the rows, (B, H, n),
            of which the next token's becomes 1.
        implementation: "reference" or "triton"; None chooses.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    tables = places, ranks, order
    whole = all(table.shape == scores.shape and table.is_contiguous() for table in tables) and scores.shape[-1] > 1
    counters = (free, *tally) if growth is None else (free, *tally, growth[0])
    whole = whole and all(counter.shape == scores.shape[:2] and counter.is_contiguous() for counter in counters)
    if growth is not None:
        whole = whole and growth[2].shape == scores.shape and growth[2].is_contiguous()
    if scores.dim() != 3 or not whole:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (scores, *tables, free, tally, *(growth or ())))
        raise ValueError(f"replace_row: scores, places, ranks, order, free, tally, growth {shapes}")
    whole_numbers = ranks, order, free, tally, *(growth or ())[:2]
    if invalid.dtype != torch.bool or any(tensor.dtype != torch.int64 for tensor in whole_numbers):
        dtypes = ", ".join(str(tensor.dtype) for tensor in (*whole_numbers, invalid))
        raise ValueError(f"replace_row: ranks, order, free, tally, growth, invalid {dtypes}")
    given = scores, sinks, recents, *tables, free, position, invalid, tally, growth
    if choose_implementation("replace_row", implementation, scores) == "reference":
        replace_row_reference(*given, never=NEVER)
        return
    from kvbench.kernels.row_replacement.triton import replace_row_triton

    replace_row_triton(*given, never=NEVER)
