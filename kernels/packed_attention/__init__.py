"""Decode one token over rows of which the old ones are quantized: keys per channel, values per row."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.packed_attention.reference import append_packed_reference, attend_packed_reference
from kvbench.kernels.packed_attention.rows import PackedRows
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = ["PackedRows", "append_packed", "attend_packed"]


@announced
def append_packed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: PackedRows,
    step: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into the ring, and quantize what leaves the residual.

    The rows that left the residual with the token before are quantized now. Doing a step again writes the same again,
    as long as the ring still has the rows: L - R - 1 tokens may be taken back.

    Args:
        queries: As projected, (B, Hq·d).
        keys: As projected, (B, H·d).
        values: As projected, (B, H·d).
        cos: (P, r), with r at most d. The row at `step` belongs to this token.
        sin: (P, r)
        rows: The rows, whose memory behind what is held is written in place.
        step: Number of tokens read since the memory was made, int32 on the device.
        norms: The weights (d,) of the queries' and the keys' RMS norm, and its ε; None for no norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The rotated queries, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    batch, heads, _, dim = rows.ring_keys.shape
    if keys.shape != values.shape or keys.shape != (batch, heads * dim) or queries.shape[1] % (heads * dim):
        raise ValueError(
            f"append: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for "
            f"{batch} samples and {heads} heads of {dim}"
        )
    if len(queries) != batch or cos.shape != sin.shape or cos.shape[1] > dim:
        raise ValueError(f"append: {len(queries)} queries, batch {batch}, cos {tuple(cos.shape)}")
    if choose_implementation("append", implementation, queries) == "reference":
        return append_packed_reference(queries, keys, values, cos, sin, rows, step, norms)
    from kvbench.kernels.packed_attention.triton import append_packed_triton

    return append_packed_triton(queries, keys, values, cos, sin, rows, step, norms)


@announced
def attend_packed(
    queries: Tensor,
    rows: PackedRows,
    scaling: float,
    step: Tensor,
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token to all rows and to its own, which `append_packed` has written.

    Args:
        queries: (B, Hq, 1, d); H divides Hq.
        rows: The rows.
        scaling: The factor of the logits.
        step: Number of tokens read since the memory was made, this one not counted, int32 on the device.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (B, Hq, 1, d) in the queries' dtype.

    Raises:
        ValueError: Shapes do not fit.
    """
    batch, heads, _, dim = rows.ring_keys.shape
    if queries.shape[0] != batch or queries.shape[1] % heads or queries.shape[2:] != (1, dim):
        raise ValueError(f"attend: queries {tuple(queries.shape)}, {batch} samples and {heads} heads of {dim}")
    if choose_implementation("attend", implementation, queries) == "reference":
        return attend_packed_reference(queries, rows, scaling, step, extras)
    from kvbench.kernels.packed_attention.triton import attend_packed_triton

    return attend_packed_triton(queries, rows, scaling, step, extras)
