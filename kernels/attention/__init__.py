"""Attention over rows with mass: softmax(q·k·scaling + log mass)·v, causal within the block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.attention.reference import attend_reference, pad_ragged
from kvbench.kernels.attention.sdpa import attend_cudnn, attend_sdpa, attend_sdpa_lse, cudnn_serves
from kvbench.kernels.dispatch import FAST, choose_implementation

LONG = 512  # tokens of a block from which on cuDNN takes it; chosen by trial on an H200


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor | None,
    scaling: float,
    *,
    look: Tensor | None = None,
    lse: bool = False,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (B, Hq, T, d) in the queries' dtype and, if `lse`, the log-sum-exp (B, Hq, T) in at least float32.

    queries (B, Hq, T, d); keys, values (B, H, n, d), H dividing Hq, whose last T rows are the block: query t sees
    rows up to n - T + t. mass (B, H, n) >= 0, None for all ones; rows of mass 0 do not exist. look (B, Hq, n) bool:
    rows a query head may see, None for all. implementation: "reference" | "sdpa"; None chooses.
    ValueError for shapes that do not fit and for an implementation that cannot do what is asked.
    """
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
    whole = mass is None and look is None and tokens == keys.shape[2]
    if whole and lse and implementation is None and queries.is_cuda and queries.dtype in FAST:
        return attend_ragged(queries, None, keys, values, scaling, lse=True)
    whole = whole and queries.device.type == "cpu"
    implementation = implementation or ("reference" if lse and not whole else "sdpa")
    if implementation == "reference":
        return attend_reference(queries, keys, values, mass, scaling, look, lse)
    if implementation != "sdpa" or (lse and not whole):
        raise ValueError(f"attend: implementation {implementation!r} with lse={lse}")
    if lse:
        return attend_sdpa_lse(queries, keys, values, scaling)
    return attend_sdpa(queries, keys, values, mass, scaling, look), None


@dataclass(frozen=True)
class RaggedRows:
    """R rows of several heads, row after row: those of head (b, h), the i-th of B·H, are `lengths[i]` from `starts[i]`
    on.
    """

    keys: Tensor  # (R, d), contiguous
    values: Tensor  # (R, d), contiguous
    mass: Tensor | None  # (R,) tokens that each row stands for, > 0; None: one each
    starts: Tensor  # (B·H,) int64
    lengths: Tensor  # (B·H,) int64
    longest: int  # of the lengths
    even: bool = False  # all heads have the longest's length


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
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same as `attend` over `held` rows and, behind those of every head, the first `tail` (None: all) of keys and
    values (B, H, m, d), of which the last T rows are the block. No rows are copied together.

    step: int32 on the device, so many rows more are in the tail (for graphs, whose arguments are fixed).
    implementation: "reference" | "triton" | "cudnn" (a block over even heads of single tokens); None chooses.
    ValueError for shapes that do not fit and for an implementation that cannot do what is asked.
    """
    batch, query_heads, tokens, dim = queries.shape
    heads, room = keys.shape[1:3]
    tail = room if tail is None else tail
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim or query_heads % heads:
        raise ValueError(
            f"attend: queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    if tail > room or (tail < tokens and step is None):
        raise ValueError(f"attend: {tokens} tokens of {tail} rows, room for {room}")
    if held is not None and (held.keys.shape[1] != dim or held.lengths.numel() != batch * heads):
        raise ValueError(f"attend: held rows {tuple(held.keys.shape)} of {held.lengths.numel()} heads")
    implementation = choose_implementation(
        "attend", implementation or choose_cudnn(queries, held, keys, tail, step), queries, ("cudnn",)
    )
    if implementation == "cudnn":
        keys, values = keys[:, :, :tail], values[:, :, :tail]
        earlier = [x[:, :, : tail - tokens] for x in (keys, values)] if tail > tokens else []
        if held is not None:
            cut = [x.view(batch, heads, held.longest, dim) for x in (held.keys, held.values)]
            earlier = [torch.cat(both, 2) for both in zip(cut, earlier, strict=True)] if earlier else cut
        keys, values = keys[:, :, tail - tokens :], values[:, :, tail - tokens :]
        outputs, sums = attend_cudnn(queries, tuple(earlier) or None, keys, values, scaling)
        return outputs, sums if lse else None
    if implementation == "triton":
        from kvbench.kernels.attention.triton import attend_triton

        parts = None
        if held is not None:
            parts = held.keys, held.values, held.mass, held.starts, held.lengths
        longest = (tail if step is None else room) + (0 if held is None else held.longest)
        return attend_triton(queries, parts, keys, values, scaling, longest, tail, lse, step)
    tail += 0 if step is None else int(step)
    keys, values = keys[:, :, :tail], values[:, :, :tail]
    if held is None:
        return attend_reference(queries, keys, values, None, scaling, None, lse)
    everything = pad_ragged(held.keys, held.values, held.mass, held.starts, held.lengths, keys, values)
    return attend_reference(queries, *everything, scaling, None, lse)


def choose_cudnn(queries: Tensor, held: RaggedRows | None, keys: Tensor, tail: int, step: Tensor | None) -> str | None:
    """Name of cuDNN's for a long block over even heads of single tokens, where it can serve them; else None."""
    plain = step is None and (held is None or (held.even and held.mass is None))
    earlier = tail - queries.shape[2] + (0 if held is None else held.longest)  # of one row it refuses to be asked
    return "cudnn" if plain and queries.shape[2] >= LONG and earlier != 1 and cudnn_serves(queries, keys) else None
