"""Attend to listed rows of which a layer stores codes and references, without making their values."""

import torch
from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.reconstruction.reference import attend_compressed_reference, take_codes_reference
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = ["Expansion", "ReferencedRows", "attend_compressed", "reserve_weights", "take_codes"]


@announced
def take_codes(
    listed: Tensor,
    codes: Tensor,
    more: Tensor,
    rows: ReferencedRows,
    step: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Gather what is stored per compressed row, such as codes.

    Args:
        listed: Listed rows, (B, n) int64.
        codes: Of the rows that were compressed when `step` was 0, (B, C, c).
        more: Of further compressed rows, (B, room, c).
        rows: The rows.
        step: Number of tokens read since the memory was made, int32 on the device.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, n, c), with zeros for rows that are not compressed or do not exist.

    Raises:
        ValueError: Shapes do not fit.
    """
    size = len(rows.raw), rows.compressed
    if codes.shape[:2] != size or more.shape[::2] != codes.shape[::2] or codes.dtype != more.dtype:
        raise ValueError(f"take_codes: codes {tuple(codes.shape)}, more {tuple(more.shape)} for (B, C) {size}")
    check_listed("take_codes", listed, rows)
    if choose_implementation("take_codes", implementation, rows.raw) == "reference":
        return take_codes_reference(listed, codes, more, rows, step)
    from kvbench.kernels.reconstruction.triton import take_codes_triton

    return take_codes_triton(listed, codes, more, rows, step)


def reserve_weights(rows: ReferencedRows, query_heads: int, *, implementation: str | None = None) -> Tensor:
    """Reserve the memory in which one call of `attend_compressed` adds up the weights of bases, and clear it.

    Args:
        rows: The rows.
        query_heads: Number of query heads.
        implementation: The call's implementation; None chooses.

    Returns:
        Zeros, (B, …, Hq) int64. The reference needs none.
    """
    chosen = choose_implementation("attend_compressed", implementation, rows.raw)
    # two more: the largest weight, and the sum of the rows without a base
    places = count_places(rows) + 2 if chosen == "triton" else 0
    return torch.zeros(len(rows.raw), places, query_heads, dtype=torch.int64, device=rows.raw.device)


@announced
def attend_compressed(
    queries: Tensor,
    listed: Tensor,
    expansion: Expansion | None,
    rows: ReferencedRows,
    cos: Tensor,
    sin: Tensor,
    step: Tensor,
    scaling: float,
    *,
    norm: tuple[Tensor, float] | None = None,
    counts: tuple[Tensor, Tensor] | None = None,
    weights: Tensor | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token to listed rows and to its own.

    The mean of a key's references, its sum with what f_d gives, the normed key and the terms of the rotation are
    rounded to the rows' dtype one by one. The kernel rounds the rows' weights to this dtype and adds up their products
    with bases and codes in float32. The reference also rounds the values of each row.

    Args:
        queries: Normed and rotated, (B, Hq, 1, d); H divides Hq.
        listed: Rows, (B, n) int64, at least 0. A row below the token's own one may be listed once. Others are ignored.
        expansion: What is added to the mean of a compressed row's references; None adds nothing.
        rows: The rows. The token's own row is written behind the others.
        cos: The cosines of all positions, (P, r), with r at most d. Both halves are equal.
        sin: (P, r)
        step: Number of tokens read since the memory was made, this one not counted, int32 on the device.
        scaling: The factor of the logits.
        norm: The weight (d,) of the keys' RMS norm and its ε (`kernels.fused_linear.rms_norm`); None for no norm.
        counts: A vector of whole numbers and an index into it, without dimensions. The number of rows that the query
            heads attended to, all together, is added there.
        weights: What `reserve_weights` returned, not used since; None reserves it.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    if expansion is None and rows.references is None:
        raise ValueError("attend_compressed: compressed rows have neither references nor codes")
    check_listed("attend_compressed", listed, rows)
    (batch, query_heads, tokens, dim), width = queries.shape, rows.raw.shape[2]
    heads = width // (2 * dim)
    if batch != len(listed) or tokens != 1 or heads * 2 * dim != width or not heads or query_heads % heads:
        raise ValueError(f"attend_compressed: queries {tuple(queries.shape)} for rows of {width} numbers")
    if cos.shape != sin.shape or cos.shape[1] > dim:
        raise ValueError(f"attend_compressed: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for {dim} channels")
    if expansion is not None and expansion.keys.shape != (*listed.shape, width // 2):
        raise ValueError(f"attend_compressed: keys {tuple(expansion.keys.shape)} for {tuple(listed.shape)} rows")
    given = queries, listed, expansion, rows, cos, sin, step, scaling, norm, counts
    if choose_implementation("attend_compressed", implementation, queries) == "reference":
        return attend_compressed_reference(*given, extras)
    from kvbench.kernels.reconstruction.triton import attend_compressed_triton

    if weights is None:
        weights = reserve_weights(rows, query_heads, implementation="triton")
    if weights.shape != (batch, count_places(rows) + 2, query_heads) or weights.dtype != torch.int64:
        raise ValueError(f"attend_compressed: weights {tuple(weights.shape)} {weights.dtype}")
    return attend_compressed_triton(*given, weights, extras)


def count_places(rows: ReferencedRows) -> int:
    """Return how many bases and raw rows may get a weight."""
    return rows.bases.shape[1] + rows.more_bases.shape[1] + rows.raw.shape[1]


def check_listed(op: str, listed: Tensor, rows: ReferencedRows) -> None:
    """Raise a ValueError if there is no list for each sample."""
    if listed.dim() != 2 or len(listed) != len(rows.raw) or listed.is_floating_point():
        raise ValueError(f"{op}: listed {tuple(listed.shape)} {listed.dtype} for {len(rows.raw)} samples")
