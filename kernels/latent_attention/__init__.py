"""Decode one token over rows that are stored as latents of groups of KV heads, and never as rows."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.latent_attention.reference import append_latents_reference, attend_latents_reference
from kvbench.kernels.latent_attention.rounding import restore_latents, round_latents
from kvbench.kernels.latent_attention.rows import LatentRows, Rounding, Side
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = ["LatentRows", "Rounding", "Side", "append_latents", "attend_latents", "restore_latents", "round_latents"]


@announced
def append_latents(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: LatentRows,
    step: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Norm and rotate the queries of a token, and write the latents of its keys and values behind the rows.

    If the latents of the rows are rounded, these are too. Nothing else is written, so that any number of tokens may be
    taken back.

    Args:
        queries: As projected, (B, Hq·d).
        keys: As projected, (B, H·d).
        values: As projected, (B, H·d).
        cos: The cosines of all positions, (P, r), with r at most d.
        sin: (P, r)
        rows: The rows.
        step: Number of tokens read since the memory was made, int32 on the device.
        norm: The weight (d,) of the queries' RMS norm and its ε; None for no norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The rotated queries, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    batch, width = rows.batch, rows.heads * rows.dim
    if keys.shape != (batch, width) or values.shape != keys.shape or len(queries) != batch or queries.shape[1] % width:
        raise ValueError(
            f"append: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for "
            f"{batch} samples and {rows.heads} heads of {rows.dim}"
        )
    if cos.shape != sin.shape or cos.shape[1] > rows.dim or len(cos) < rows.seen + rows.room:
        raise ValueError(
            f"append: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for {rows.seen + rows.room} positions of "
            f"{rows.dim} channels"
        )
    if choose_implementation("append", implementation, queries) == "reference":
        return append_latents_reference(queries, keys, values, cos, sin, rows, step, norm)
    from kvbench.kernels.latent_attention.triton import append_latents_triton

    return append_latents_triton(queries, keys, values, cos, sin, rows, step, norm)


@announced
def attend_latents(
    queries: Tensor,
    pairs: Tensor,
    rows: LatentRows,
    scaling: float,
    step: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token to all rows and to its own, whose latents `append_latents` has written.

    Args:
        queries: Normed and rotated, (B, Hq, 1, d); H divides Hq.
        pairs: Cosine and sine of each pair of channels that is rotated, for all positions, (P, r/2, 2), contiguous and
            in the queries' dtype, with r at most d.
        rows: The rows.
        scaling: The factor of the logits.
        step: Number of tokens read since the memory was made, this one not counted, int32 on the device.
        norm: The weight (d,) of the keys' RMS norm and its ε; None for no norm.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (B, Hq, 1, d) in the queries' dtype.

    Raises:
        ValueError: Shapes do not fit, or the angles are not contiguous or of another dtype.
    """
    if len(queries) != rows.batch or queries.shape[1] % rows.heads or queries.shape[2:] != (1, rows.dim):
        raise ValueError(
            f"attend: queries {tuple(queries.shape)}, {rows.batch} samples and {rows.heads} heads of {rows.dim}"
        )
    shape = tuple(pairs.shape)
    fits = shape[2:] == (2,) and 2 * shape[1] <= rows.dim and shape[0] >= rows.seen + rows.room
    if not (fits and pairs.is_contiguous() and pairs.dtype == queries.dtype):
        raise ValueError(
            f"attend: pairs {shape} of {pairs.dtype} with strides {pairs.stride()} for {rows.seen + rows.room} "
            f"positions of {rows.dim} channels of {queries.dtype}"
        )
    if choose_implementation("attend", implementation, queries) == "reference":
        return attend_latents_reference(queries, pairs, rows, scaling, step, norm, extras)
    from kvbench.kernels.latent_attention.triton import attend_latents_triton

    return attend_latents_triton(queries, pairs, rows, scaling, step, norm, extras)
