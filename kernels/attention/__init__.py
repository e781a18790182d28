"""Attend to rows with mass: softmax(q·k·scaling + log mass)·v, causal within the block."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.kernels.attention.reference import attend_reference, find_largest, pad_ragged
from kvbench.kernels.attention.sdpa import attend_cudnn, attend_sdpa, attend_sdpa_lse, cudnn_serves
from kvbench.kernels.dispatch import FAST, announced, choose_implementation
from kvbench.kernels.softmax_extras import SoftmaxExtras, add_sinks, get_cap, get_sinks

PLANNED = 2.5e12  # smallest work of a sample's block for cuDNN, in operations; chosen by trial on an H200 (README.md)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor | None,
    scaling: float,
    *,
    look: Tensor | None = None,
    lse: bool = False,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend to padded rows.

    Args:
        queries: (B, Hq, T, d)
        keys: (B, H, n, d); H divides Hq. The last T rows are the block: query t sees rows up to n - T + t.
        values: (B, H, n, e); e may be another width than d.
        mass: Tokens that each row stands for, (B, H, n), at least 0; None for one each. Rows of mass 0 do not exist.
        scaling: The factor of the logits.
        look: Rows that each query head may attend to, (B, Hq, n) bool; None for all.
        lse: Whether the log-sum-exp is returned.
        extras: Sinks and cap of the softmax; None for the plain one. The log-sum-exp includes the sinks.
        implementation: "reference" or "sdpa"; None chooses.

    Returns:
        The outputs, (B, Hq, T, e) in the queries' dtype, and the log-sum-exp, (B, Hq, T) in at least float32, or None.

    Raises:
        ValueError: Shapes do not fit, or the implementation does not support the arguments.
    """
    if (width := values.shape[3]) != keys.shape[3] == queries.shape[3]:
        queries, keys, values = widen(queries, keys, values)
        outputs, sums = attend(queries, keys, values, mass, scaling, look=look, lse=lse, implementation=implementation)
        return outputs[..., :width], sums
    batch, query_heads, tokens, dim = queries.shape
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim:
        raise ValueError(
            f"attend: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    if query_heads % keys.shape[1] or keys.shape[2] < tokens:
        raise ValueError(
            f"attend: {query_heads} query heads on {keys.shape[1]} KV heads, {tokens} tokens of {keys.shape[2]} rows"
        )
    if mass is not None and mass.shape != keys.shape[:3]:
        raise ValueError(f"attend: mass {tuple(mass.shape)} for keys {tuple(keys.shape)}")
    plain = mass is None and look is None
    fast = implementation is None and queries.is_cuda and queries.dtype in FAST
    if plain and fast and (tokens == keys.shape[2] or extras is not None):
        return attend_ragged(queries, None, keys, values, scaling, lse=lse, extras=extras)
    whole = plain and tokens == keys.shape[2] and queries.device.type == "cpu"
    needs_lse, capped = lse or get_sinks(extras) is not None, get_cap(extras) is not None
    implementation = implementation or ("reference" if capped or (needs_lse and not whole) else "sdpa")
    if implementation == "reference":
        return attend_reference(queries, keys, values, mass, scaling, look, lse, extras)
    if implementation != "sdpa" or capped or (needs_lse and not whole):
        raise ValueError(f"attend: implementation {implementation!r} with lse={lse}, extras={extras}")
    if needs_lse:
        outputs, sums = add_sinks(*attend_sdpa_lse(queries, keys, values, scaling), extras)
        return outputs, sums if lse else None
    return attend_sdpa(queries, keys, values, mass, scaling, look), None


def widen(*parts: Tensor) -> list[Tensor]:
    """Fill keys or values, and what is multiplied by them, with zeros to one width. No product changes."""
    width = max(part.shape[-1] for part in parts)
    return [pad(part, (0, width - part.shape[-1])) for part in parts]


@dataclass(frozen=True)
class RaggedRows:
    """R rows of several heads, one after the other.

    The i-th of the B·H heads has the `lengths[i]` rows from `starts[i]` on.
    """

    keys: Tensor
    """(R, d), contiguous"""
    values: Tensor
    """(R, e), contiguous"""
    mass: Tensor | None
    """Tokens that each row stands for, (R,), above 0; None for one each."""
    starts: Tensor
    """(B·H,) int64"""
    lengths: Tensor
    """(B·H,) int64"""
    longest: int
    """The largest of the lengths."""
    even: bool = False
    """Whether all lengths are equal."""


@announced
def attend_ragged(
    queries: Tensor,
    held: RaggedRows | None,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    lse: bool = False,
    tail: int | None = None,
    step: Tensor | None = None,
    largest: Tensor | None = None,
    extras: SoftmaxExtras | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend to ragged rows and to a tail behind them, without copying them together.

    Args:
        queries: (B, Hq, T, d)
        held: The ragged rows; None for none.
        keys: Keys of the tail, (B, H, m, d).
        values: Values of the tail, (B, H, m, e). If e is not d, both parts are copied to one width.
        scaling: The factor of the logits.
        lse: Whether the log-sum-exp is returned.
        tail: Number of rows of the tail that exist; None for all m. The last T of them are the block. If there are
            none, a single query attends to the ragged rows.
        step: Further rows that exist in the tail, int32 on the device. A CUDA graph needs it, because all other
            arguments of a graph are fixed.
        largest: Gets the largest product q·k, without the factor and the cap, that a query of a KV head has with each
            row of the tail that exists, (B, H, m) in at least float32, contiguous. Other rows may get any number. With
            one token only.
        extras: Sinks and cap of the softmax; None for the plain one. The log-sum-exp includes the sinks.
        implementation: "reference", "triton" or "cudnn" (for a block over even heads of single tokens, and no cap);
            None chooses.

    Returns:
        The outputs, (B, Hq, T, e) in the queries' dtype, and the log-sum-exp, (B, Hq, T) in at least float32, or None.

    Raises:
        ValueError: Shapes do not fit, or the implementation does not support the arguments.
    """
    if (width := values.shape[3]) != keys.shape[3] == queries.shape[3]:
        queries, keys, values = widen(queries, keys, values)
        if held is not None:
            held_keys, held_values = widen(held.keys, held.values)
            held = replace(held, keys=held_keys, values=held_values)
        outputs, sums = attend_ragged(
            queries,
            held,
            keys,
            values,
            scaling,
            lse=lse,
            tail=tail,
            step=step,
            largest=largest,
            implementation=implementation,
        )
        return outputs[..., :width], sums
    batch, query_heads, tokens, dim = queries.shape
    heads, room = keys.shape[1:3]
    tail = room if tail is None else tail
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim or query_heads % heads:
        raise ValueError(
            f"attend: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    alone = tokens == 1 and tail == 0 and held is not None
    if tail > room or (tail < tokens and step is None and not alone):
        raise ValueError(f"attend: {tokens} tokens of {tail} rows, room for {room}")
    if held is not None and (held.keys.shape[1] != dim or held.lengths.numel() != batch * heads):
        raise ValueError(f"attend: held rows {tuple(held.keys.shape)} of {held.lengths.numel()} heads")
    if largest is not None:
        fits = largest.shape == keys.shape[:3] and largest.dtype == torch.promote_types(keys.dtype, torch.float32)
        if not fits or tokens != 1 or implementation == "cudnn" or not largest.is_contiguous():
            raise ValueError(f"attend: largest {tuple(largest.shape)} {largest.dtype} of {tokens} tokens, {room} rows")
    capped = get_cap(extras) is not None
    if capped and implementation == "cudnn":
        raise ValueError("attend: implementation 'cudnn' has no cap of logits")
    chosen = implementation or (None if capped else choose_cudnn(queries, held, keys, tail, step))
    implementation = choose_implementation("attend", chosen, queries, ("cudnn",))
    if implementation == "cudnn":
        keys, values = keys[:, :, :tail], values[:, :, :tail]
        earlier = (keys[:, :, : tail - tokens], values[:, :, : tail - tokens]) if tail > tokens else None
        if held is not None:
            cut = held.keys.view(batch, heads, held.longest, dim), held.values.view(batch, heads, held.longest, dim)
            earlier = (torch.cat([cut[0], earlier[0]], 2), torch.cat([cut[1], earlier[1]], 2)) if earlier else cut
        keys, values = keys[:, :, tail - tokens :], values[:, :, tail - tokens :]
        outputs, sums = add_sinks(*attend_cudnn(queries, earlier, keys, values, scaling), extras)
        return outputs, sums if lse else None
    if implementation == "triton":
        from kvbench.kernels.attention.triton import attend_triton, count_together

        if largest is not None and query_heads // heads > count_together(queries):  # no program sees all of them
            largest.copy_(find_largest(queries, keys))
            largest = None
        parts = None
        if held is not None:
            parts = held.keys, held.values, held.mass, held.starts, held.lengths
        longest = (tail if step is None else room) + (0 if held is None else held.longest)
        return attend_triton(queries, parts, keys, values, scaling, longest, tail, lse, step, largest, extras)
    if largest is not None:
        largest.copy_(find_largest(queries, keys))
    tail += 0 if step is None else int(step)
    keys, values = keys[:, :, :tail], values[:, :, :tail]
    if held is None:
        return attend_reference(queries, keys, values, None, scaling, None, lse, extras)
    everything = pad_ragged(held.keys, held.values, held.mass, held.starts, held.lengths, keys, values)
    return attend_reference(queries, *everything, scaling, None, lse, extras)


def choose_cudnn(queries: Tensor, held: RaggedRows | None, keys: Tensor, tail: int, step: Tensor | None) -> str | None:
    """Return "cudnn" if cuDNN supports the rows and saves more time than its plan takes, otherwise None."""
    batch, query_heads, tokens, dim = queries.shape
    earlier = tail - tokens + (0 if held is None else held.longest)
    if 4 * query_heads * dim * tokens * (earlier + tokens / 2) < PLANNED:  # of one sample: README.md
        return None
    plain = step is None and (held is None or (held.even and held.mass is None))
    return "cudnn" if plain and earlier != 1 and cudnn_serves(queries, keys) else None  # cuDNN refuses a single row
