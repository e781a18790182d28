"""Both operations in PyTorch. They wait for the host."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

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


def expand_reference(listed: Tensor, expansion: Expansion, rows: ReferencedRows, step: Tensor) -> Tensor:
    """Return what f_d gives for listed rows, (B, n, w)."""
    inner, more = expansion.inner, expansion.more
    if more is not None:
        inner = take_codes_reference(listed, inner, more, rows, step)
    (keys, values), biases = expansion.weights, expansion.biases
    parts = inner[..., : keys.shape[1]], inner[..., inner.shape[2] - values.shape[1] :]
    return torch.cat([linear(*own) for own in zip(parts, (keys, values), biases, strict=True)], -1)


def rebuild_rows_reference(
    listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, cos: Tensor, sin: Tensor, step: Tensor,
    heads: int, norm: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    exists, compressed = listed < rows.seen + int(step), find_compressed(listed, rows, step)
    plain = exists & ~compressed
    kv = take([rows.bases], listed, plain & (listed < rows.raw_from))
    kv = kv + take([rows.raw], listed - rows.raw_from, plain & (listed >= rows.raw_from))
    if rows.references is not None and rows.more_references is not None:
        known, more = rows.references.long(), rows.more_references.long()
        numbers = take([known, more], listed - rows.sinks, compressed)
        where = compressed[..., None].expand_as(numbers).flatten(1)
        found = take([rows.bases, rows.more_bases], numbers.flatten(1), where)
        kv = kv + found.unflatten(1, numbers.shape[1:]).mean(2)
    if expansion is not None:
        kv = (kv + expand_reference(listed, expansion, rows, step)).where(compressed[..., None], kv)
    keys, values = kv.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    if norm is not None:
        keys = rms_norm_reference(keys, *norm)
    places = listed.where(exists, 0)
    keys = rotate_reference(keys, *(part[places][:, None].to(keys.dtype) for part in (cos, sin)))
    slots = torch.arange(listed.shape[1], device=listed.device).where(exists, listed.shape[1] + 1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), slots[:, None]
