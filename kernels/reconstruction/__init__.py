"""Make the keys and values of listed rows from what a layer stores of them: codes, references and raw rows."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.reconstruction.reference import rebuild_rows_reference, take_codes_reference
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows

__all__ = ["Expansion", "ReferencedRows", "rebuild_rows", "take_codes"]


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
def rebuild_rows(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Make compressed rows of their codes and references, and norm and rotate the keys of all listed rows.

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
        Keys and values, (B, H, n + 1, d) each, with zeros for rows that do not exist and room for one more row behind
        them; and where the rows that exist are among them, (B, 1, n) int64: their own places, and n + 1 in place of
        those that do not exist.

    Raises:
        ValueError: Shapes do not fit.
    """
    wide = rows.raw.shape[2]
    if expansion is None and rows.references is None:
        raise ValueError("rebuild_rows: compressed rows have neither references nor codes")
    if wide % (2 * heads) or cos.shape != sin.shape or cos.shape[1] > wide // (2 * heads):
        raise ValueError(f"rebuild_rows: {wide} numbers of {heads} heads, cos {tuple(cos.shape)}")
    check_listed("rebuild_rows", listed, rows)
    if expansion is not None:
        stored = (len(rows.raw), rows.compressed) if expansion.more is not None else tuple(listed.shape)
        if expansion.inner.shape[:2] != stored or 2 * len(expansion.weights[0]) != wide:
            numbers, matrix = tuple(expansion.inner.shape), tuple(expansion.weights[0].shape)
            raise ValueError(f"rebuild_rows: numbers {numbers}, matrix {matrix} for {stored} rows of {wide} numbers")
    given = listed, expansion, rows, cos, sin, step, heads, norm
    if choose_implementation("rebuild_rows", implementation, rows.raw) == "reference":
        return rebuild_rows_reference(*given)
    from kvbench.kernels.reconstruction.triton import rebuild_rows_triton

    return rebuild_rows_triton(*given)


def check_listed(op: str, listed: Tensor, rows: ReferencedRows) -> None:
    """Raise a ValueError if there is no list for each sample."""
    if listed.dim() != 2 or len(listed) != len(rows.raw) or listed.is_floating_point():
        raise ValueError(f"{op}: listed {tuple(listed.shape)} {listed.dtype} for {len(rows.raw)} samples")
