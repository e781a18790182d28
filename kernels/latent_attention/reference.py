"""Both operations in PyTorch. They wait for the host."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvbench.kernels.attention.reference import attend_reference
from kvbench.kernels.fused_linear.reference import rms_norm_reference
from kvbench.kernels.latent_attention.rounding import restore_latents, round_latents
from kvbench.kernels.latent_attention.rows import LatentRows, Side
from kvbench.kernels.rerotation.reference import rotate_reference
from kvbench.kernels.softmax_extras import SoftmaxExtras


def append_latents_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: LatentRows,
    step: Tensor,
    norm: tuple[Tensor, float] | None,
) -> Tensor:
    for side, numbers in ((rows.keys, keys), (rows.values, values)):
        for group, x in enumerate(numbers.chunk(rows.groups, 1)):
            less = x if side.bias is None else x - side.bias[group]
            latents, rounding = linear(less, side.down[group]), side.rounding
            rounded = (latents,) if rounding is None else round_latents(latents, rounding.bits, rounding.clip)
            side.write(group, step, rounded)
    asking = queries.view(rows.batch, -1, 1, rows.dim)
    if norm is not None:
        asking = rms_norm_reference(asking, *norm)
    at = rows.seen + int(step)
    return rotate_reference(asking, *(part[at].to(queries.dtype) for part in (cos, sin)))


def attend_latents_reference(
    queries: Tensor,
    pairs: Tensor,
    rows: LatentRows,
    scaling: float,
    step: Tensor,
    norm: tuple[Tensor, float] | None,
    extras: SoftmaxExtras | None,
) -> Tensor:
    cos, sin = (part.repeat(1, 2) for part in pairs.unbind(-1))
    return attend_reference(queries, *pad_rows(rows, int(step), cos, sin, norm), scaling, None, False, extras)[0]


def pad_rows(
    rows: LatentRows, step: int, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Make all rows: keys and values (B, H, n, d) and mass (B, H, n), which is 0 for rows that a head does not hold."""
    each, dtype = rows.heads // rows.groups, rows.keys.up[0].dtype
    size = rows.longest + step + 1
    keys, values = (rows.keys.up[0].new_zeros(rows.batch, rows.heads, size, rows.dim) for _ in range(2))
    mass = torch.zeros(
        rows.batch, rows.heads, size, dtype=torch.promote_types(dtype, torch.float32), device=keys.device
    )
    for group in range(rows.groups):
        heads = slice(group * each, (group + 1) * each)
        for b in range(rows.batch):
            count, first = int(rows.counts[group, b]), int(rows.places[group, b])
            where = slice(size - count - step - 1, size)
            at = torch.arange(count, device=keys.device)
            if rows.positions is not None:
                at = rows.positions[first : first + count].long()
            at = torch.cat([at, rows.seen + torch.arange(step + 1, device=keys.device)])
            made = read_side(rows, rows.keys, group, b, step)
            if norm is not None:
                made = rms_norm_reference(made, *norm)
            keys[b, heads, where] = rotate_reference(made, *(part[at].to(dtype) for part in (cos, sin)))
            values[b, heads, where] = read_side(rows, rows.values, group, b, step)
            mass[b, heads, where] = 1
            if rows.marks is not None:
                mass[b, heads, where.start : where.start + count] = rows.marks[first : first + count].T.to(mass.dtype)
    return keys, values, mass


def read_side(rows: LatentRows, side: Side, group: int, b: int, step: int) -> Tensor:
    """Return the keys or values of a group and a sample, before norm and rotation, (H/G, n, d)."""
    start, rank = int(rows.starts[group, b]), side.ranks[group]
    here, new = slice(start, start + int(rows.counts[group, b])), slice(step + 1)
    latents = torch.cat([side.latents[group][here], side.more[group, b, new, : side.pitch(rank)]])
    if (rounding := side.rounding) is not None:
        steps = torch.cat([rounding.steps[group][here, 0], rounding.more_steps[group, b, new]])
        zeros = torch.cat([rounding.zeros[group][here, 0], rounding.more_zeros[group, b, new]])
        latents = restore_latents((latents, steps[:, None], zeros[:, None]), rounding.bits, side.up[group].dtype)
    made = linear(latents, side.up[group], None if side.bias is None else side.bias[group])
    return made.unflatten(1, (rows.heads // rows.groups, rows.dim)).transpose(0, 1)
