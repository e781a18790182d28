"""Both operations in PyTorch. They wait for the host."""

import torch
from torch import Tensor

from kvbench.kernels.attention.reference import attend_reference
from kvbench.kernels.packed_attention.rows import PackedRows
from kvbench.kernels.quantize import Groups, dequantize, quantize
from kvbench.kernels.rope_append.reference import rotate_projected
from kvbench.kernels.softmax_extras import SoftmaxExtras


def count_packed(rows: int, residual: int) -> tuple[int, int]:
    """Return how many keys and how many values of a head with so many rows are quantized."""
    return rows - rows % residual, max(0, rows - residual)


def append_packed_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: PackedRows,
    step: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    batch, heads, ring, dim = rows.ring_keys.shape
    queries, keys, values = rotate_projected(queries, keys, values, cos, sin, batch, dim, step, norms)
    for b in range(batch):
        for h in range(heads):
            held, now = int(rows.lengths[b, h]), int(rows.lengths[b, h]) + int(step)
            rows.ring_keys[b, h, now % ring] = keys[b, h, 0]
            rows.ring_values[b, h, now % ring] = values[b, h, 0]
            if now == held:
                continue
            (old_keys, old_values), first = count_packed(held, rows.residual), count_packed(now - 1, rows.residual)
            past_keys, past_values = count_packed(now, rows.residual)
            slots = torch.arange(first[0], past_keys, device=keys.device) % ring
            if len(slots):
                new = rows.ring_keys[b, h, slots].view(-1, rows.group, dim).mT
                into = slice((first[0] - old_keys) // rows.group, (past_keys - old_keys) // rows.group)
                write(rows.more_keys, b, h, into, quantize(new, rows.bits, rows.group, implementation="reference"))
            slots = torch.arange(first[1], past_values, device=keys.device) % ring
            if len(slots):
                new, into = rows.ring_values[b, h, slots], slice(first[1] - old_values, past_values - old_values)
                write(rows.more_values, b, h, into, quantize(new, rows.bits, rows.group, implementation="reference"))
    return queries


def write(groups: Groups, b: int, h: int, into: slice, new: Groups) -> None:
    for part, quantized in zip(groups, new, strict=True):
        part[b, h, into] = quantized


def attend_packed_reference(
    queries: Tensor, rows: PackedRows, scaling: float, step: Tensor, extras: SoftmaxExtras | None
) -> Tensor:
    return attend_reference(queries, *pad_packed(rows, int(step), queries.dtype), scaling, None, False, extras)[0]


def pad_packed(rows: PackedRows, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Read all rows back: keys and values (B, H, n, d) and mass (B, H, n), absent rows on the left."""
    batch, heads, ring, dim = rows.ring_keys.shape
    longest = int(rows.lengths.max()) + step + 1
    keys, values = (rows.ring_keys.new_zeros(batch, heads, longest, dim, dtype=dtype) for _ in range(2))
    mass = torch.zeros(batch, heads, longest, dtype=torch.promote_types(dtype, torch.float32), device=keys.device)
    for b in range(batch):
        for h in range(heads):
            held = int(rows.lengths[b, h])
            now, places = held + step, slice(longest - held - step - 1, longest)
            (old_keys, old_values), (past_keys, past_values) = (count_packed(n, rows.residual) for n in (held, now))
            first, more = int(rows.key_starts[b, h]), (past_keys - old_keys) // rows.group
            slots = torch.arange(past_keys, now + 1, device=keys.device) % ring
            keys[b, h, places] = torch.cat(
                [
                    *(
                        read(part, rows, dtype).mT.flatten(0, 1)
                        for part in (
                            take(rows.held_keys, slice(first, first + old_keys // rows.group)),
                            Groups(*(part[b, h, :more] for part in rows.more_keys)),
                        )
                    ),
                    rows.ring_keys[b, h, slots].to(dtype),
                ]
            )
            first, more = int(rows.value_starts[b, h]), past_values - old_values
            slots = torch.arange(past_values, now + 1, device=keys.device) % ring
            values[b, h, places] = torch.cat(
                [
                    read(take(rows.held_values, slice(first, first + old_values)), rows, dtype),
                    read(Groups(*(part[b, h, :more] for part in rows.more_values)), rows, dtype),
                    rows.ring_values[b, h, slots].to(dtype),
                ]
            )
            mass[b, h, places] = 1
            if rows.mass is not None:
                first = int(rows.starts[b, h])
                mass[b, h, places.start : places.start + held] = rows.mass[first : first + held].to(mass.dtype)
    return keys, values, mass


def take(groups: Groups, which: slice) -> Groups:
    return Groups(*(part[which] for part in groups))


def read(groups: Groups, rows: PackedRows, dtype: torch.dtype) -> Tensor:
    return dequantize(groups, rows.bits, rows.group, dtype, implementation="reference")
