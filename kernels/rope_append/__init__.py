"""What stands between a layer's projections and its attention: norm and rotate queries and keys, write keys and values
behind the rows held.
"""

from torch import Tensor

from kvbench.kernels.dispatch import choose_implementation
from kvbench.kernels.rope_append.reference import append_reference


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
    norms: tuple[Tensor, Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Queries (B, Hq, T, d), rotated; keys, rotated, and values stand in rows `tail` + step to `tail` + step + T of
    tail_keys and tail_values (B, H, m, d) afterwards.

    queries (B·T, Hq·d), keys and values (B·T, H·d), as projected; cos, sin (P, r), r <= d, of whose rows step to
    step + T are these tokens'; step: int32 on the device; norms: weights (d,) of queries' and keys' RMS norm and its ε.
    Rounded as transformers' Llama-like modules round. ValueError for shapes that do not fit.
    """
    batch, heads, _, dim = tail_keys.shape
    if keys.shape != values.shape or keys.shape[1] != heads * dim or queries.shape[1] % (heads * dim):
        raise ValueError(
            f"append: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} for "
            f"{heads} heads of {dim}"
        )
    if len(queries) != len(keys) or len(keys) % batch or cos.shape != sin.shape or cos.shape[1] > dim:
        raise ValueError(f"append: {len(queries)} queries, {len(keys)} keys, batch {batch}, cos {tuple(cos.shape)}")
    given = queries, keys, values, cos, sin, tail_keys, tail_values, tail, step, norms
    if choose_implementation("append", implementation, queries) == "reference":
        return append_reference(*given)
    from kvbench.kernels.rope_append.triton import append_triton

    return append_triton(*given)
