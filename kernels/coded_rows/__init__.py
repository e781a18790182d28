"""Round rows to codes of 2 to 8 bits, and decode one token over rows that are held as codes."""

import torch
from torch import Tensor

from kvbench.kernels.coded_rows.form import CodedRows, CodedSide, Form, Parts, RawWindow, make_hadamard
from kvbench.kernels.coded_rows.reference import (
    append_newest_reference,
    attend_reference,
    decode_reference,
    encode_reference,
    pack_codes,
    round_in_place_reference,
    unpack_codes,
)
from kvbench.kernels.dispatch import announced, choose_implementation
from kvbench.kernels.softmax_extras import SoftmaxExtras

__all__ = [
    "CodedRows", "CodedSide", "Form", "Parts", "RawWindow", "append_newest", "attend_coded", "decode", "encode",
    "make_hadamard", "pack_codes", "round_in_place", "unpack_codes",
]  # fmt: skip


@announced
def encode(
    rows: Tensor,
    form: Form,
    factor: float | Tensor = 1.0,
    turn: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Parts:
    """Round rows to codes.

    Args:
        rows: (R, d); groups divide d.
        form: How channels become codes.
        factor: What every number is divided by before, or what those of each row are, (R, 1) float32.
        turn: The orthogonal matrix that rows are multiplied with before, (d, d) float32.
        implementation: "reference" or "triton"; None chooses. Triton needs groups of a power of two, or whole rows.

    Returns:
        Codes (R, d·bits/8) uint8, and the scales and zeros that the form stores, (R, groups) each.

    Raises:
        ValueError: Shapes do not fit.
    """
    dim = rows.shape[-1]
    if rows.dim() != 2 or (form.group and dim % form.group) or dim * form.bits % 8:
        raise ValueError(f"encode: rows {tuple(rows.shape)}, groups of {form.group} channels, {form.bits} bits")
    if form.scale == "shift":
        raise ValueError("encode: rows with a shift are rounded by their codec")
    if choose_for_form("encode", implementation, rows, form, dim) == "reference":
        return encode_reference(rows, form, factor, turn)
    from kvbench.kernels.coded_rows.rounding import encode_triton

    return encode_triton(rows, form, factor, turn)


@announced
def decode(
    parts: Parts,
    form: Form,
    dtype: torch.dtype,
    factor: float | Tensor = 1.0,
    turn: Tensor | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Return the rows that `encode` has rounded, (R, d) in `dtype`. Arguments are those of `encode`."""
    dim, like = parts[0].shape[-1] * 8 // form.bits, parts[0].new_empty(0, dtype=dtype)
    if choose_for_form("decode", implementation, like, form, dim) == "reference":
        return decode_reference(parts, form, dtype, factor, turn)
    from kvbench.kernels.coded_rows.rounding import decode_triton

    return decode_triton(parts, form, dtype, factor, turn)


def choose_for_form(op: str, asked: str | None, like: Tensor, form: Form, dim: int) -> str:
    """Return `choose_implementation`, but the reference for groups that no tile of a kernel has.

    Raises:
        ValueError: "triton" is asked for with such groups.
    """
    fits = form.group in (0, dim) or form.group & (form.group - 1) == 0
    if asked == "triton" and not fits:
        raise ValueError(f"{op}: implementation triton needs groups of a power of two, not of {form.group} channels")
    return choose_implementation(op, asked, like) if fits else "reference"


@announced
def append_newest(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: CodedRows,
    step: Tensor,
    *,
    norms: tuple[Tensor, Tensor, float] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Norm and rotate a token's queries and keys as `rope_append.append` does, and round its row of each head to codes.

    The codes lie behind those of earlier tokens.

    Args:
        queries: As projected, (B, Hq·d).
        keys: As projected, (B, H·d).
        values: As projected, (B, H·d).
        cos: (P, r), with r at most d. Its row `step` belongs to the token.
        sin: (P, r)
        rows: The rows. `newest` is overwritten by the keys and values that the token attends to, times the turns.
        step: Number of tokens read since the memory was made, int32 on the device.
        norms: The weights (d,) of the queries' and the keys' RMS norm, and its ε; None for no norm.
        implementation: "reference" or "triton"; None chooses.

    Returns:
        The rotated queries times the turn of the keys, (B, Hq, 1, d).

    Raises:
        ValueError: Shapes do not fit.
    """
    _, batch, heads, dim = rows.newest.shape
    given = [tuple(side.shape) for side in (queries, keys, values)]
    if given[1:] != [(batch, heads * dim)] * 2 or len(queries) != batch or queries.shape[1] % (heads * dim):
        raise ValueError(f"coded rows: queries, keys, values {given} for {heads} heads of {dim}, batch {batch}")
    if choose_implementation("append_newest", implementation, queries) == "reference":
        return append_newest_reference(queries, keys, values, cos, sin, rows, step, norms)
    from kvbench.kernels.coded_rows.rounding import append_newest_triton

    return append_newest_triton(queries, keys, values, cos, sin, rows, step, norms)


@announced
def round_in_place(rows: CodedRows, step: Tensor, *, implementation: str | None = None) -> None:
    """Round the newest row of each head to codes, behind those of earlier tokens, and make it what codes stand for.

    Args:
        rows: The rows. `newest` holds the token's keys and values, rotated, and is overwritten by what `decode` returns
            for them.
        step: Number of tokens read since the memory was made, a whole number on the device.
        implementation: "reference" or "triton"; None chooses.
    """
    if choose_implementation("round_in_place", implementation, rows.newest) == "reference":
        return round_in_place_reference(rows, step)
    from kvbench.kernels.coded_rows.rounding import round_in_place_triton

    return round_in_place_triton(rows, step)


@announced
def attend_coded(
    queries: Tensor,
    rows: CodedRows,
    scaling: float,
    step: Tensor,
    *,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend with one token to all rows and to its own one, or to all rows and to those of the window.

    Args:
        queries: Times the turn of the keys, as `append_newest` returns them, (B, Hq, 1, d).
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
    check(queries, rows)
    if choose_implementation("attend_coded", implementation, queries) == "reference":
        return attend_reference(queries, rows, scaling, step, extras)
    from kvbench.kernels.coded_rows.attend import attend_triton

    return attend_triton(queries, rows, scaling, step, extras)


def check(queries: Tensor, rows: CodedRows) -> None:
    """Raise a ValueError if queries do not fit rows."""
    sides, batch, heads, dim = rows.newest.shape
    if sides != 2 or queries.shape[0] != batch or queries.shape[1] % heads or queries.shape[2:] != (1, dim):
        raise ValueError(f"coded rows: queries {tuple(queries.shape)}, newest rows {tuple(rows.newest.shape)}")
