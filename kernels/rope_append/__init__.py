"""The step between a layer's projections and its attention.

It norms and rotates queries and keys, and writes keys and values behind the rows held.
"""

from torch import Tensor

from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.rope_append.reference import append_reference


@announced
def append(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail: int,
    step: Tensor,
    *,
    slots: Tensor | None = None,
    starts: Tensor | None = None,
    offsets: Tensor | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    rotates_keys: bool = True,
    wraps: bool = False,
    implementation: str | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values into the tail.

    Keys and values go to the rows from `tail` + step to `tail` + step + T. Results are rounded like in the Llama-like
    modules of transformers.

    Args:
        queries: As projected, (B·T, Hq·d).
        keys: As projected, (B·T, H·d).
        values: As projected, (B·T, H·d).
        cos: (P, r), with r at most d. The rows from step to step + T belong to these tokens, if there are no `offsets`.
        sin: (P, r)
        tail_keys: (B, H, m, d), written in place; with `starts` (R, d).
        tail_values: Like `tail_keys`.
        tail: Number of rows of the tail when the graph was captured.
        step: Number of rows written since then, int32 on the device.
        slots: The row of each head that the token is written to, (B, H) whole numbers, for T = 1; None for the next.
        starts: Where each head's rows begin in the tail if heads have room for different numbers of rows, (B, H) int64.
            It requires `slots`.
        offsets: For each sample the row of cos and sin that belongs to step 0, (B,) whole numbers; None if that is row
            0 for all.
        norms: The weights (d,) of the queries' and the keys' RMS norm, of one dtype (see
            `kernels.fused_linear.rms_norm`), and its ε; None for no norm.
        rotates_keys: Whether keys are normed and rotated; otherwise they are written as they are given.
        wraps: Whether the tail is a ring: behind its last row comes its first one. For T = 1 and no `slots`.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The rotated queries, (B, Hq, T, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    if starts is not None and (slots is None or starts.shape != slots.shape or tail_keys.dim() != 2):
        raise ValueError(f"append: starts {tuple(starts.shape)} in rows {tuple(tail_keys.shape)}")
    (batch, heads), dim = tail_keys.shape[:2] if starts is None else starts.shape, tail_keys.shape[-1]
    if keys.shape != values.shape or keys.shape[1] != heads * dim or queries.shape[1] % (heads * dim):
        raise ValueError(
            f"append: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for "
            f"{heads} heads of {dim}"
        )
    if len(queries) != len(keys) or len(keys) % batch or cos.shape != sin.shape or cos.shape[1] > dim:
        raise ValueError(f"append: {len(queries)} queries, {len(keys)} keys, batch {batch}, cos {tuple(cos.shape)}")
    if slots is not None and (slots.shape != (batch, heads) or len(keys) != batch):
        raise ValueError(f"append: slots {tuple(slots.shape)} of {heads} heads for {len(keys)} tokens")
    if offsets is not None and offsets.shape != (batch,):
        raise ValueError(f"append: offsets {tuple(offsets.shape)} for batch {batch}")
    if wraps and (slots is not None or len(keys) != batch):
        raise ValueError(f"append: {len(keys)} tokens of {batch} samples into a ring")
    into = tail_keys, tail_values, tail, step, slots, starts, offsets
    given = queries, keys, values, cos, sin, *into, norms, rotates_keys, wraps
    if choose_implementation("append", implementation, queries) == "reference":
        return append_reference(*given)
    from kvbench.kernels.rope_append.triton import append_triton

    return append_triton(*given)
