"""Attend to some rows only: those of listed blocks, and those behind a position."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.listed_attention.reference import attend_listed_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


@announced
def attend_listed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    size: int,
    last: Tensor,
    scaling: float,
    *,
    after: int | None = None,
    counts: tuple[Tensor, Tensor] | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one query per head to the rows of listed blocks.

    Args:
        queries: (B, Hq, 1, d)
        keys: (B, H, n, d); H divides Hq. Row j lies in block ⌊j/size⌋.
        values: (B, H, n, d)
        blocks: Different blocks, int64, one list per query head, (B, Hq, k), per KV head, (B, H, k), or for all heads,
            (B, 1, k). Only blocks that do not exist may be listed several times.
        size: Rows of a block.
        last: The last row that exists, a whole number without dimensions. Rows behind it are not attended to.
        scaling: The factor of the logits.
        after: The rows from this one on are attended to as well. No listed block may contain one of them.
        counts: A vector of whole numbers and an index into it, without dimensions. The number of rows that the query
            heads attended to, all together, is added there.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    batch, query_heads, tokens, dim = queries.shape
    fits = keys.shape == values.shape and keys.shape[0] == batch and keys.shape[3] == dim and tokens == 1
    if not fits or query_heads % keys.shape[1]:
        raise ValueError(
            f"attend_listed: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    fits = blocks.dim() == 3 and blocks.shape[0] == batch and blocks.shape[2] > 0
    if not fits or blocks.shape[1] not in (1, keys.shape[1], query_heads) or size < 1 or blocks.dtype != torch.int64:
        raise ValueError(f"attend_listed: blocks {tuple(blocks.shape)} {blocks.dtype} of {size} rows")
    given = queries, keys, values, blocks, size, last, scaling, after, counts, extras
    if choose_implementation("attend_listed", implementation, queries) == "reference":
        return attend_listed_reference(*given)
    from kvbench.kernels.listed_attention.triton import attend_listed_triton

    return attend_listed_triton(*given)
