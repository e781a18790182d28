"""Both operations in PyTorch. They wait for the host."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvbench.kernels.attention.reference import attend_reference
from kvbench.kernels.fused_linear.reference import rms_norm_reference
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows
from kvbench.kernels.rerotation.reference import rotate_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


def find_compressed(listed: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    """Return which listed rows are compressed, (B, n) bool."""
    return (listed >= rows.sinks) & (listed < rows.sinks + rows.count_compressed(int(step)))


def take(parts: list[Tensor], index: Tensor, where: Tensor) -> Tensor:
    """Return entries (B, n, …) of the parts (B, m, …) joined, by index (B, n); zeros where `where` (B, n) is false."""
    whole, batch = torch.cat(parts, 1), torch.arange(len(index), device=index.device)[:, None]
    entries = whole[batch, index.where(where, 0)] if whole.shape[1] else whole.new_zeros(*index.shape, *whole.shape[2:])
    return entries.where(where.view(*where.shape, *[1] * (entries.dim() - 2)), 0)


def take_codes_reference(listed: Tensor, codes: Tensor, more: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    return take([codes, more], listed - rows.sinks, find_compressed(listed, rows, step))


def rebuild_reference(listed: Tensor, decoded: Tensor | None, rows: ReferencedRows, step: Tensor) -> Tensor:
    """Return listed rows, keys before norm and rotation, (B, n, w).

    `decoded` is what f_d gives for them, (B, n, w). Rows behind that of the token that is being read are 0.
    """
    exists, compressed = listed <= rows.seen + int(step), find_compressed(listed, rows, step)
    plain = exists & ~compressed
    kv = take([rows.bases], listed, plain & (listed < rows.raw_from))
    kv = kv + take([rows.raw], listed - rows.raw_from, plain & (listed >= rows.raw_from))
    if rows.references is not None and rows.more_references is not None:
        known, more = rows.references.long(), rows.more_references.long()
        numbers = take([known, more], listed - rows.sinks, compressed)
        where = compressed[..., None].expand_as(numbers).flatten(1)
        base_rows = take([rows.bases, rows.more_bases], numbers.flatten(1), where)
        kv = kv + base_rows.unflatten(1, numbers.shape[1:]).mean(2)
    return kv if decoded is None else (kv + decoded).where(compressed[..., None], kv)


def attend_compressed_reference(
    queries: Tensor,
    listed: Tensor,
    expansion: Expansion | None,
    rows: ReferencedRows,
    cos: Tensor,
    sin: Tensor,
    step: Tensor,
    scaling: float,
    norm: tuple[Tensor, float] | None,
    counts: tuple[Tensor, Tensor] | None,
    extras: SoftmaxExtras | None,
) -> Tensor:
    now, (query_heads, _, dim) = rows.seen + int(step), queries.shape[1:]
    heads, look = rows.raw.shape[2] // (2 * dim), pad(listed < now, (0, 1), value=True)
    listed, decoded = pad(listed, (0, 1), value=now), None
    if expansion is not None:  # the token's own row has no code
        decoded = torch.cat([expansion.keys, linear(expansion.inner, expansion.weight)], -1)
        decoded = pad(decoded, (0, 0, 0, 1))
    kv = rebuild_reference(listed, decoded, rows, step)
    keys, values = kv.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    if norm is not None:
        keys = rms_norm_reference(keys, *norm)
    places = listed.where(look, 0)
    keys = rotate_reference(keys, *(part[places][:, None].to(keys.dtype) for part in (cos, sin)))
    look = look[:, None].expand(-1, query_heads, -1)
    if counts is not None:
        counts[0][int(counts[1])] += look.sum()
    return attend_reference(queries, keys, values, None, scaling, look, False, extras)[0]
