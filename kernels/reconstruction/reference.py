"""All operations in PyTorch. They wait for the host."""

from dataclasses import replace

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


def expand_reference(listed: Tensor, expansion: Expansion, rows: ReferencedRows, step: Tensor, part: int) -> Tensor:
    """Return what f_d gives for the keys (part 0) or the values (part 1) of listed rows, (B, n, w/2)."""
    inner, more = expansion.inner, expansion.more
    if more is not None:
        inner = take_codes_reference(listed, inner, more, rows, step)
    weight, bias = expansion.weights[part], expansion.biases[part]
    first = (inner.shape[2] - weight.shape[1]) * part
    return linear(inner[..., first : first + weight.shape[1]], weight, bias)


def rebuild_reference(
    listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, step: Tensor, heads: int, part: int
) -> Tensor:
    """Return the keys (part 0) before norm and rotation, or the values (part 1), of listed rows, (B, H, n, d).

    Rows that do not exist are 0. The row of the token that is being read exists.
    """
    exists, compressed = listed <= rows.seen + int(step), find_compressed(listed, rows, step)
    plain, width = exists & ~compressed, rows.raw.shape[2] // 2
    half = slice(part * width, (part + 1) * width)
    made = take([rows.bases[..., half]], listed, plain & (listed < rows.raw_from))
    made = made + take([rows.raw[..., half]], listed - rows.raw_from, plain & (listed >= rows.raw_from))
    if rows.references is not None and rows.more_references is not None:
        known, more = rows.references.long(), rows.more_references.long()
        numbers = take([known, more], listed - rows.sinks, compressed)
        where = compressed[..., None].expand_as(numbers).flatten(1)
        found = take([rows.bases[..., half], rows.more_bases[..., half]], numbers.flatten(1), where)
        made = made + found.unflatten(1, numbers.shape[1:]).mean(2)
    if expansion is not None:
        made = (made + expand_reference(listed, expansion, rows, step, part)).where(compressed[..., None], made)
    return made.unflatten(-1, (heads, -1)).transpose(1, 2)


def rebuild_keys_reference(
    listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, cos: Tensor, sin: Tensor, step: Tensor,
    heads: int, norm: tuple[Tensor, float] | None,
) -> Tensor:  # fmt: skip
    exists = listed < rows.seen + int(step)
    keys = rebuild_reference(listed, expansion, rows, step, heads, 0)
    if norm is not None:
        keys = rms_norm_reference(keys, *norm)
    places = listed.where(exists, 0)
    keys = rotate_reference(keys, *(part[places][:, None].to(keys.dtype) for part in (cos, sin)))
    return pad(keys.where(exists[:, None, :, None], 0), (0, 0, 0, 1))


def attend_compressed_reference(
    queries: Tensor, keys: Tensor, listed: Tensor, expansion: Expansion | None, rows: ReferencedRows, step: Tensor,
    scaling: float, counts: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    now = rows.seen + int(step)
    look = pad(listed < now, (0, 1), value=True)
    listed = pad(listed, (0, 1), value=now)
    if expansion is not None and expansion.more is None:
        expansion = replace(expansion, inner=pad(expansion.inner, (0, 0, 0, 1)))  # the token's own row has no code
    values = rebuild_reference(listed, expansion, rows, step, keys.shape[1], 1)
    look = look[:, None].expand(-1, queries.shape[1], -1)
    if counts is not None:
        counts[0][int(counts[1])] += look.sum()
    return attend_reference(queries, keys, values, None, scaling, look, False)[0]
