"""The operations in PyTorch. They wait for the host."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvbench.kernels.attention.reference import attend_reference
from kvbench.kernels.fused_linear.reference import rms_norm_reference
from kvbench.kernels.reconstruction.rows import Expansion, ReferencedRows
from kvbench.kernels.rerotation.reference import rotate_reference


def find_compressed(listed: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    """Return which listed rows are compressed, (B, n) bool."""
    return (listed >= rows.sinks) & (listed < rows.sinks + rows.count_compressed(int(step)))


def take(parts: list[Tensor], index: Tensor, where: Tensor) -> Tensor:
    """Return entries (B, n, …) of the parts (B, m, …) joined, by index (B, n); zeros where `where` (B, n) is false."""
    whole, batch = torch.cat(parts, 1), torch.arange(len(index), device=index.device)[:, None]
    found = whole[batch, index.where(where, 0)] if whole.shape[1] else whole.new_zeros(*index.shape, *whole.shape[2:])
    return found.where(where.view(*where.shape, *[1] * (found.dim() - 2)), 0)


def take_codes_reference(listed: Tensor, codes: Tensor, more: Tensor, rows: ReferencedRows, step: Tensor) -> Tensor:
    return take([codes, more], listed - rows.sinks, find_compressed(listed, rows, step))


def rebuild_reference(
    listed: Tensor, decoded: Tensor | None, rows: ReferencedRows, step: Tensor, half: int, last: int
) -> Tensor:
    """Return the keys (half 0) or values (half 1) of listed rows as they were projected, (B, n, w/2).

    `decoded` is what f_d gives for them, (B, n, w/2). Rows behind `last` are 0.
    """
    bases, more_bases, raw = (own.chunk(2, -1)[half] for own in (rows.bases, rows.more_bases, rows.raw))
    exists, compressed = listed <= last, find_compressed(listed, rows, step)
    plain = exists & ~compressed
    kv = take([bases], listed, plain & (listed < rows.raw_from))
    kv = kv + take([raw], listed - rows.raw_from, plain & (listed >= rows.raw_from))
    if rows.references is not None and rows.more_references is not None:
        known, more = rows.references.long(), rows.more_references.long()
        numbers = take([known, more], listed - rows.sinks, compressed)
        where = compressed[..., None].expand_as(numbers).flatten(1)
        found = take([bases, more_bases], numbers.flatten(1), where)
        kv = kv + found.unflatten(1, numbers.shape[1:]).mean(2)
    return kv if decoded is None else (kv + decoded).where(compressed[..., None], kv)


def finish_reference(
    keys: Tensor, places: Tensor, cos: Tensor, sin: Tensor, heads: int, norm: tuple[Tensor, float] | None
) -> Tensor:
    """Norm and rotate keys as projected (B, n, H·d) to keys (B, H, n, d)."""
    keys = keys.unflatten(-1, (heads, -1)).transpose(1, 2)
    if norm is not None:
        keys = rms_norm_reference(keys, *norm)
    return rotate_reference(keys, *(part[places][:, None].to(keys.dtype) for part in (cos, sin)))


def make_keys_reference(
    listed: Tensor, decoded: Tensor | None, rows: ReferencedRows, cos: Tensor, sin: Tensor, step: Tensor, heads: int,
    norm: tuple[Tensor, float] | None,
) -> Tensor:  # fmt: skip
    last = rows.seen + int(step) - 1
    keys = rebuild_reference(listed, decoded, rows, step, 0, last)
    return finish_reference(keys, listed.where(listed <= last, 0), cos, sin, heads, norm)


def attend_compressed_reference(
    queries: Tensor, listed: Tensor, keys: Tensor, expansion: Expansion | None, rows: ReferencedRows, cos: Tensor,
    sin: Tensor, step: Tensor, scaling: float, norm: tuple[Tensor, float] | None, counts: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    now, query_heads, heads = rows.seen + int(step), queries.shape[1], keys.shape[1]
    own, look = listed.new_full((len(listed), 1), now), pad(listed < now, (0, 1), value=True)
    key = finish_reference(rebuild_reference(own, None, rows, step, 0, now), own, cos, sin, heads, norm)
    # the token's own row has no code
    decoded = None if expansion is None else pad(linear(expansion.inner, expansion.weight), (0, 0, 0, 1))
    values = rebuild_reference(torch.cat([listed, own], 1), decoded, rows, step, 1, now)
    look = look[:, None].expand(-1, query_heads, -1)
    if counts is not None:
        counts[0][int(counts[1])] += look.sum()
    values = values.unflatten(-1, (heads, -1)).transpose(1, 2)
    return attend_reference(queries, torch.cat([keys, key], 2), values, None, scaling, look, False)[0]
