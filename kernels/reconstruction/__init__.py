"""Attend to listed rows of which a layer stores codes and references. Keys are made of them, values are not."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.reconstruction.reference import (
    attend_compressed_reference,
    rebuild_keys_reference,
    take_codes_reference,
)
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows

__all__ = ["Expansion", "ReferencedRows", "attend_compressed", "rebuild_keys", "take_codes"]


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


@announced
def rebuild_keys(
    listed: Tensor,
    expansion: Expansion | None,
    rows: ReferencedRows,
    cos: Tensor,
    sin: Tensor,
    step: Tensor,
    heads: int,
    *,
    norm: tuple[Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Make the keys of listed rows, compressed ones of their codes and references, and norm and rotate them.

    The mean of the references, f_d's last product, their sum, the normed keys and the terms of the rotation are rounded
    to the rows' dtype one by one.

    Args:
        listed: Listed rows, (B, n) int64.
        expansion: What f_d's last product is made of. It is added to the mean of a compressed row's references. None
            adds nothing.
        rows: The rows.
        cos: The cosines of all positions, (P, r), with r at most d.
        sin: (P, r)
        step: Number of tokens read since the memory was made, int32 on the device. Rows from that one on do not exist
            yet, so the row of a token that is being read may be listed.
        heads: Number of KV heads, H.
        norm: The weight (d,) of the keys' RMS norm and its ε (`kernels.fused_linear.rms_norm`); None for no norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        (B, H, n + 1, d), with zeros for rows that do not exist and room for the key of that token behind them.

    Raises:
        ValueError: Shapes do not fit.
    """
    wide = rows.raw.shape[2]
    if wide % (2 * heads) or cos.shape != sin.shape or cos.shape[1] > wide // (2 * heads):
        raise ValueError(f"rebuild_keys: {wide} numbers of {heads} heads, cos {tuple(cos.shape)}")
    check_stored("rebuild_keys", listed, expansion, rows)
    given = listed, expansion, rows, cos, sin, step, heads, norm
    if choose_implementation("rebuild_keys", implementation, rows.raw) == "reference":
        return rebuild_keys_reference(*given)
    from kvbench.kernels.reconstruction.triton import rebuild_keys_triton

    return rebuild_keys_triton(*given)


@announced
def attend_compressed(
    queries: Tensor,
    keys: Tensor,
    listed: Tensor,
    expansion: Expansion | None,
    rows: ReferencedRows,
    step: Tensor,
    scaling: float,
    *,
    counts: tuple[Tensor, Tensor] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token to listed rows and to its own, whose values are left as they are stored.

    Args:
        queries: Normed and rotated, (B, Hq, 1, d); H divides Hq.
        keys: What `rebuild_keys` made of the same list, with the token's own key behind it, (B, H, n + 1, d).
        listed: Different rows, (B, n) int64. Only rows that do not exist may be listed several times.
        expansion: What f_d's last product is made of (`rebuild_keys`).
        rows: The rows. The token's own row is written behind the others.
        step: Number of tokens read since the memory was made, this one not counted, int32 on the device.
        scaling: The factor of the logits.
        counts: A vector of whole numbers and an index into it, without dimensions. The number of rows that the query
            heads attended to, all together, is added there.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    check_stored("attend_compressed", listed, expansion, rows)
    (batch, count), (heads, room, dim) = listed.shape, keys.shape[1:]
    fits = len(keys) == batch and room == count + 1 and 2 * heads * dim == rows.raw.shape[2]
    if not fits or queries.shape[::2] != (batch, 1) or queries.shape[3] != dim or queries.shape[1] % heads:
        raise ValueError(
            f"attend_compressed: queries {tuple(queries.shape)}, keys {tuple(keys.shape)} of {count} rows of "
            f"{rows.raw.shape[2]} numbers"
        )
    given = queries, keys, listed, expansion, rows, step, scaling, counts
    if choose_implementation("attend_compressed", implementation, queries) == "reference":
        return attend_compressed_reference(*given)
    from kvbench.kernels.reconstruction.attention import attend_compressed_triton

    return attend_compressed_triton(*given)


def check_stored(op: str, listed: Tensor, expansion: Expansion | None, rows: ReferencedRows) -> None:
    """Raise a ValueError if compressed rows have neither references nor codes, or codes of other rows."""
    if expansion is None and rows.references is None:
        raise ValueError(f"{op}: compressed rows have neither references nor codes")
    check_listed(op, listed, rows)
    if expansion is not None:
        stored = (len(rows.raw), rows.compressed) if expansion.more is not None else tuple(listed.shape)
        if expansion.inner.shape[:2] != stored or 2 * len(expansion.weights[0]) != rows.raw.shape[2]:
            numbers, matrix = tuple(expansion.inner.shape), tuple(expansion.weights[0].shape)
            wide = rows.raw.shape[2]
            raise ValueError(f"{op}: numbers {numbers}, matrix {matrix} for {stored} rows of {wide} numbers")


def check_listed(op: str, listed: Tensor, rows: ReferencedRows) -> None:
    """Raise a ValueError if there is no list for each sample."""
    if listed.dim() != 2 or len(listed) != len(rows.raw) or listed.is_floating_point():
        raise ValueError(f"{op}: listed {tuple(listed.shape)} {listed.dtype} for {len(rows.raw)} samples")
