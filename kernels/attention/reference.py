"""The equation in PyTorch, computed in float32, or in float64 for an oracle. Outputs have the dtype of the queries."""

import torch
from torch import Tensor

from kvbench.kernels.softmax_extras import SoftmaxExtras, add_sinks, cap_logits

CHUNK = 1 << 24  # logits that are held at once


def visible_mask(tokens: int, start: int, stop: int, rows: int, device: torch.device) -> Tensor:
    """Return which rows the queries from `start` to `stop` see, (stop - start, rows) bool: j <= rows - tokens + t."""
    last = torch.arange(start, stop, device=device)[:, None] + rows - tokens
    return torch.arange(rows, device=device) <= last


def attend_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor | None,
    scaling: float,
    look: Tensor | None,
    lse: bool,
    extras: SoftmaxExtras | None = None,
) -> tuple[Tensor, Tensor | None]:
    batch, query_heads, tokens, dim = queries.shape
    heads, rows = keys.shape[1:3]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.view(batch, heads, -1, tokens, dim)
    outputs, sums = torch.empty_like(grouped), grouped.new_empty(grouped.shape[:-1], dtype=dtype)
    keys, values = keys.to(dtype), values.to(dtype)
    step = max(1, CHUNK // (batch * query_heads * rows))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        logits = cap_logits(grouped[..., start:stop, :].to(dtype) @ keys[:, :, None].mT * scaling, extras)
        if mass is not None:
            logits = logits + mass.log().to(dtype)[:, :, None, None]
        logits = logits.masked_fill(~visible_mask(tokens, start, stop, rows, keys.device), -torch.inf)
        if look is not None:
            logits = logits.masked_fill(~look.view(batch, heads, -1, 1, rows), -torch.inf)
        outputs[..., start:stop, :] = logits.softmax(-1) @ values[:, :, None]
        sums[..., start:stop] = logits.logsumexp(-1)
    outputs, sums = add_sinks(outputs.view_as(queries), sums.view(batch, query_heads, tokens), extras)
    return outputs, sums if lse else None


def find_largest(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest products of queries (B, Hq, 1, d) with keys (B, H, n, d), (B, H, n), in at least float32."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries[:, :, 0].unflatten(1, (keys.shape[1], -1))
    return (grouped.to(dtype) @ keys.to(dtype).mT).amax(2)


def pad_ragged(
    held_keys: Tensor,
    held_values: Tensor,
    mass: Tensor | None,
    starts: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad ragged rows and their tails to keys and values (B, H, n, d) and mass (B, H, n), absent rows on the left."""
    batch, heads, tail, dim = keys.shape
    longest = int(lengths.max())
    dtype = torch.promote_types(keys.dtype, torch.float32)
    some_keys, some_values = (x.new_zeros(batch * heads, longest, dim) for x in (held_keys, held_values))
    some_mass = torch.zeros(batch * heads, longest, dtype=dtype, device=keys.device)
    for head, (start, length) in enumerate(zip(starts.tolist(), lengths.flatten().tolist(), strict=True)):
        here = slice(start, start + length)
        some_keys[head, longest - length :] = held_keys[here]
        some_values[head, longest - length :] = held_values[here]
        some_mass[head, longest - length :] = 1 if mass is None else mass[here].to(dtype)
    ones = torch.ones(batch, heads, tail, dtype=dtype, device=keys.device)
    return (
        torch.cat([some_keys.view(batch, heads, longest, dim), keys], 2),
        torch.cat([some_values.view(batch, heads, longest, dim), values], 2),
        torch.cat([some_mass.view(batch, heads, longest), ones], 2),
    )
