"""The rows of one layer of several contexts, for kernels that read and write those of all contexts at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.kernels.attention import RaggedRows

PROGRAMS = 1056  # about as many programs read the rows: four times those that an H200 runs at once
LEAST = 256  # rows that a program has at least, if its head has as many
MOST = 128  # programs of one head


@dataclass(frozen=True)
class Part:
    """The rows of one context with B samples: a ragged part, and a tail with memory for further tokens."""

    held: RaggedRows | None
    """The ragged part, with B·H heads; None for none."""
    tail_keys: Tensor
    """(B, H, m, d). The rows of a head lie one behind the other."""
    tail_values: Tensor
    """Like `tail_keys`."""
    tail: int
    """Number of rows of the tail when `step` is 0."""

    @property
    def longest(self) -> int:
        """The most rows that a head can have."""
        return self.tail_keys.shape[2] + (0 if self.held is None else self.held.longest)

    @property
    def mass(self) -> Tensor | None:
        """The mass of the ragged part."""
        return None if self.held is None else self.held.mass


@dataclass(frozen=True)
class JoinedLayer:
    """The rows of one layer of several contexts, with S samples in total. `join_parts` makes it.

    Every context's rows lie at their own addresses. Kernels get one tensor of keys and one of values, and find the
    others by their distance from it, which is counted in elements.
    """

    parts: tuple[Part, ...]
    """The rows of each context, in the order of the samples. The first tails are the tensors that kernels get."""
    table: Tensor
    """Where the rows of each head are, (S·H, 8) int64:

    0. distance from the first tail's keys to the keys of the part's first held row;
    1. the same for values;
    2. distance from the first tail's keys to the keys of the head's own tail;
    3. the same for values;
    4. index in `mass` of the part's first held row, or -1 if each row stands for one token;
    5. number of rows of the tail when `step` is 0;
    6. the first program that reads the head's rows;
    7. the number of these programs.
    """
    starts: Tensor
    """The first held row of each head, counted from the first one of its part, (S·H,) int64."""
    lengths: Tensor
    """Number of held rows of each head, (S·H,) int64."""
    mass: Tensor | None
    """Ones for the longest head without mass, and behind them the mass of all parts that have one, float32.

    None if no part has one.
    """
    programs: Tensor
    """The head whose rows each program reads, int64."""
    align: int
    """A number of elements that divides all distances: 16 bytes of them, or 1."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """S, H and d."""
        _, heads, _, dim = self.parts[0].tail_keys.shape
        return len(self.table) // heads, heads, dim


def join_parts(parts: Sequence[Part]) -> JoinedLayer:
    """Find the rows of several contexts, and share them out among programs. Lengths stay on the device.

    Args:
        parts: The rows of each context. They must stay at their addresses.

    Raises:
        ValueError: There are no parts, they do not fit each other, or the rows of a head do not lie one behind the
            other.
    """
    check_parts(parts)
    keys, values = parts[0].tail_keys, parts[0].tail_values
    heads, dim, size, device = keys.shape[1], keys.shape[3], keys.element_size(), keys.device
    counts = [len(part.tail_keys) * heads for part in parts]  # heads of all samples
    total = sum(count * part.longest for count, part in zip(counts, parts, strict=True))
    share = max(LEAST, -(-total // PROGRAMS), -(-max(part.longest for part in parts) // MOST))
    masses = [part.mass for part in parts if part.mass is not None]
    plain = max((part.held.longest for part in parts if part.held is not None and part.mass is None), default=0)
    before = accumulate((0 if part.mass is None else len(part.mass) for part in parts), initial=plain)
    distances, strides = [], []
    for part, first in zip(parts, before, strict=False):
        held = (0, 0)
        if part.held is not None:
            held = measure_distance(keys, part.held.keys), measure_distance(values, part.held.values)
        tail = measure_distance(keys, part.tail_keys), measure_distance(values, part.tail_values)
        mass = -1 if part.mass is None else first
        distances.append([*held, *tail, mass, part.tail, 0, -(-part.longest // share)])
        strides.append([part.tail_keys.stride()[:2], part.tail_values.stride()[:2]])
    repeats = torch.tensor(counts)
    table = torch.tensor(distances).repeat_interleave(repeats, 0)
    head = torch.cat([torch.arange(count) for count in counts])
    place = torch.stack([head // heads, head % heads], 1)
    table[:, 2:4] += (torch.tensor(strides).repeat_interleave(repeats, 0) * place[:, None]).sum(-1)
    table[:, 6] = table[:, 7].cumsum(0) - table[:, 7]
    programs = torch.arange(len(table)).repeat_interleave(table[:, 7])
    whole = dim * size % 16 == keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
    align = 16 // size if whole and not bool((table[:, :4] * size % 16).any()) else 1
    none = torch.zeros(max(counts), dtype=torch.int64, device=device)
    starts, lengths = zip(
        *(
            (none[:count], none[:count]) if part.held is None else (part.held.starts, part.held.lengths)
            for count, part in zip(counts, parts, strict=True)
        ),
        strict=True,
    )
    return JoinedLayer(
        tuple(parts),
        table.to(device),
        torch.cat(starts),
        torch.cat(lengths),
        torch.cat([torch.ones(plain, device=device), *(mass.float() for mass in masses)]) if masses else None,
        programs.to(device),
        align,
    )


def measure_distance(anchor: Tensor, rows: Tensor) -> int:
    """Return the number of elements from the beginning of `anchor` to that of `rows`. It may be negative."""
    return (rows.data_ptr() - anchor.data_ptr()) // anchor.element_size()


def check_parts(parts: Sequence[Part]) -> None:
    """Raise a ValueError if kernels cannot read these parts at once."""
    if not parts:
        raise ValueError("join: no parts")
    like = parts[0].tail_keys
    for part in parts:
        held, (batch, heads, room, dim) = part.held, part.tail_keys.shape
        if (heads, dim) != (like.shape[1], like.shape[3]) or part.tail_values.shape != part.tail_keys.shape:
            raise ValueError(
                f"join: tails {tuple(part.tail_keys.shape)} and {tuple(part.tail_values.shape)} beside "
                f"{tuple(like.shape)}"
            )
        if not 0 <= part.tail <= room:
            raise ValueError(f"join: {part.tail} rows in a tail with room for {room}")
        tensors = [part.tail_keys, part.tail_values]
        if held is not None:
            tensors += [held.keys, held.values]
            fits = held.keys.shape == held.values.shape == (len(held.keys), dim)
            fits = fits and held.starts.shape == held.lengths.shape == (batch * heads,)
            if not fits or (held.mass is not None and held.mass.shape != held.keys.shape[:1]):
                raise ValueError(f"join: held rows {tuple(held.keys.shape)} of {held.lengths.numel()} heads")
        if any((tensor.dtype, tensor.device) != (like.dtype, like.device) for tensor in tensors):
            raise ValueError(f"join: rows are {like.dtype} on {like.device} in one part and not in another")
        if any(tensor.stride()[-2:] != (dim, 1) for tensor in tensors):
            raise ValueError("join: the rows of a head do not lie one behind the other")
