"""Append a token to the rows of several contexts, and attend to them: one call for all contexts."""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.joined_rows.reference import append_joined_reference, attend_joined_reference
from kvbench.kernels.joined_rows.rows import JoinedLayer, Part, join_parts
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = ["JoinedLayer", "Part", "append_joined", "attend_joined", "join_parts"]


@announced
def append_joined(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    layer: JoinedLayer,
    step: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Norm and rotate a token's queries and keys, and write its keys and values into the tails.

    A sample's key and value go to row `tail` + step of its part's tail. Results are rounded like in
    `kernels.rope_append.append`.

    Args:
        queries: As projected, (S, Hq·d).
        keys: As projected, (S, H·d).
        values: As projected, (S, H·d).
        cos: (P, r), with r at most d. The row at `places` + step belongs to the sample's token.
        sin: (P, r)
        places: The row of cos and sin that belongs to each sample's token when `step` is 0, (S,) int64.
        layer: The rows, whose tails are written in place.
        step: Number of tokens read since the rows were joined, int32 on the device.
        norms: The weights (d,) of the queries' and the keys' RMS norm, of one dtype, and its ε; None for no norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The rotated queries, (S, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    samples, heads, dim = layer.shape
    if keys.shape != values.shape or keys.shape != (samples, heads * dim) or queries.shape[1] % (heads * dim):
        raise ValueError(
            f"append: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for "
            f"{samples} samples and {heads} heads of {dim}"
        )
    if len(queries) != samples or cos.shape != sin.shape or cos.shape[1] > dim or places.shape != (samples,):
        raise ValueError(
            f"append: {len(queries)} queries, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, places "
            f"{tuple(places.shape)} for {samples} samples"
        )
    if choose_implementation("append", implementation, queries) == "reference":
        return append_joined_reference(queries, keys, values, cos, sin, places, layer, step, norms)
    from kvbench.kernels.joined_rows.triton import append_joined_triton

    return append_joined_triton(queries, keys, values, cos, sin, places, layer, step, norms)


@announced
def attend_joined(
    queries: Tensor,
    layer: JoinedLayer,
    scaling: float,
    step: Tensor,
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token of each sample to all rows of the sample, its own row included.

    `append_joined` has written the token's row, which is number `tail` + step of its part's tail.

    Args:
        queries: (S, Hq, 1, d); H divides Hq.
        layer: The rows.
        scaling: The factor of the logits.
        step: Number of tokens read since the rows were joined, this one not counted, int32 on the device.
        extras: Sinks and cap of the softmax; None for the plain one.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The outputs, (S, Hq, 1, d) in the queries' dtype.

    Raises:
        ValueError: Shapes do not fit.
    """
    samples, heads, dim = layer.shape
    if len(queries) != samples or queries.shape[1] % heads or queries.shape[2:] != (1, dim):
        raise ValueError(f"attend: queries {tuple(queries.shape)}, {samples} samples and {heads} heads of {dim}")
    if choose_implementation("attend", implementation, queries) == "reference":
        return attend_joined_reference(queries, layer, scaling, step, extras)
    from kvbench.kernels.joined_rows.triton import attend_joined_triton

    return attend_joined_triton(queries, layer, scaling, step, extras)
