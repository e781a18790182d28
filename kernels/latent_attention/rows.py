"""The rows of a layer that are stored as latents of groups of KV heads, at fixed addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels.latent_attention.rounding import EIGHT

ALIGNED = 16  # bytes; addresses that the kernels read from a table are multiples


@dataclass(frozen=True)
class Rounding:
    """How the latents of a side are rounded to a few bits (`rounding.round_latents`).

    Latents are then codes, (n, r·bits/8) uint8, and with a token's s and z they stand for (c − z)·s.
    """

    bits: int
    """Bits of a code."""
    clip: float
    """Share of a token's range that the codes cover."""
    steps: tuple[Tensor, ...]
    """s of each row of a group, (n_g, 1) float16 each."""
    zeros: tuple[Tensor, ...]
    """z, (n_g, 1) uint8 each."""
    more_steps: Tensor
    """Memory for s of further rows, (G, B, room) float16."""
    more_zeros: Tensor
    """Memory for z of further rows, (G, B, room) uint8."""

    def check(self, rows: Sequence[int], room: tuple[int, ...]) -> None:
        """Raise a ValueError if shapes or dtypes do not fit groups of so many rows and the memory for further ones."""
        kinds = ((self.steps, self.more_steps, torch.float16), (self.zeros, self.more_zeros, torch.uint8))
        for parts, more, dtype in kinds:
            shapes = [tuple(tensor.shape) for tensor in parts] == [(count, 1) for count in rows]
            if not shapes or more.shape != room or any(tensor.dtype != dtype for tensor in (*parts, more)):
                raise ValueError(f"latent rows: {[tuple(tensor.shape) for tensor in (*parts, more)]} of s or z")


@dataclass(frozen=True)
class Side:
    """The keys or the values of a layer: their latents and what makes rows of them, by group.

    Symbols: w the numbers of a group's row, r_g the rank of group g.
    """

    latents: tuple[Tensor, ...]
    """Latents that were there when `step` was 0, (n_g, r_g) each, or their codes. Samples come one after the other."""
    down: tuple[Tensor, ...]
    """Maps a row less its bias to latents, (r_g, w) each."""
    up: tuple[Tensor, ...]
    """Maps latents to a row less its bias, (w, r_g) each."""
    bias: tuple[Tensor, ...] | None
    """(w,) each; None for none."""
    more: Tensor
    """Memory for the latents of further rows, (G, B, room, R), R being the largest rank, or for their codes, of which
    a row has the `pitch` of that rank.
    """
    rounding: Rounding | None = None
    """How latents are rounded; None if they are numbers of the model."""

    @property
    def bits(self) -> int:
        """Bits of a code, or 0."""
        return 0 if self.rounding is None else self.rounding.bits

    @property
    def largest_rank(self) -> int:
        """The largest rank, R."""
        return max(self.ranks)

    def pitch(self, rank: int) -> int:
        """Return the size of the latents of a row: numbers, or bytes of codes."""
        return rank * self.bits // EIGHT if self.bits else rank

    @property
    def ranks(self) -> list[int]:
        """The rank of each group."""
        return [len(matrix) for matrix in self.down]

    @property
    def own_tensors(self) -> tuple[Tensor, ...]:
        """The memory for further rows: their latents, and s and z if the latents are rounded."""
        rounding = self.rounding
        return (self.more,) if rounding is None else (self.more, rounding.more_steps, rounding.more_zeros)

    def write(self, group: int, step: Tensor, latents: Sequence[Tensor]) -> None:
        """Write the latents of a token of all samples behind the rows of a group.

        Args:
            group: The group.
            step: Number of tokens written before, int32 or int64 on the device.
            latents: (B, r), or codes, s and z.
        """
        at, (own, *about) = step.long().view(1), latents
        self.more[group, :, :, : own.shape[1]].index_copy_(1, at, own[:, None])
        for memory, part in zip(self.own_tensors[1:], about, strict=True):
            memory[group].index_copy_(1, at, part)

    def list_more(self, read: int) -> list[tuple[Tensor, ...]]:
        """Return the latents of each group's first `read` further rows, flat: numbers, or codes, s and z."""
        latents = [x[:, :read, : self.pitch(rank)].flatten(0, 1) for x, rank in zip(self.more, self.ranks, strict=True)]
        return list(
            zip(
                latents, *([x[:, :read].flatten()[:, None] for x in part] for part in self.own_tensors[1:]), strict=True
            )
        )

    def check(self, groups: int, width: int) -> None:
        """Raise a ValueError if shapes do not fit."""
        factors = [*self.down, *self.up, *(self.bias or ())]  # of the model's numbers
        parts = [*self.latents, *factors]
        shapes = [
            *((len(x), self.pitch(rank)) for x, rank in zip(self.latents, self.ranks, strict=True)),
            *((rank, width) for rank in self.ranks),
            *((width, rank) for rank in self.ranks),
            *([(width,)] * groups if self.bias else ()),
        ]
        if len(self.ranks) != groups or [tuple(x.shape) for x in parts] != shapes:
            raise ValueError(f"latent rows: {[tuple(x.shape) for x in parts]} of {groups} groups of {width} numbers")
        if self.more.shape[::3] != (groups, self.pitch(self.largest_rank)):
            raise ValueError(f"latent rows: memory {tuple(self.more.shape)} for ranks {self.ranks}")
        if self.rounding is not None:
            if any(rank % EIGHT for rank in self.ranks):
                raise ValueError(f"latent rows: {EIGHT} does not divide each of the ranks {self.ranks} of rounded ones")
            self.rounding.check([len(x) for x in self.latents], tuple(self.more.shape[:3]))
            parts += [*self.rounding.steps, *self.rounding.zeros]
        parts.append(self.more)
        odd = any(not x.is_contiguous() or (x.is_cuda and x.data_ptr() % ALIGNED) for x in parts)
        stored = torch.uint8 if self.bits else factors[0].dtype
        alike = all(x.dtype == stored for x in (*self.latents, self.more)) and len({x.dtype for x in factors}) == 1
        if odd or not alike:
            raise ValueError(f"latent rows: contiguous parts of one dtype, at addresses that {ALIGNED} divides")


@dataclass(frozen=True)
class LatentRows:
    """The rows of B samples and H KV heads in G groups, at fixed addresses.

    The heads of a group share its latents. A group has the rows that were there when `step` was 0, and behind them one
    row for each token since, at the token's own position.
    """

    heads: int
    """H."""
    seen: int
    """Position of the token that is read when step is 0."""
    keys: Side
    """Keys before norm and rotation."""
    values: Side
    counts: Tensor
    """Rows of each group and sample when step was 0, (G, B) int64."""
    longest: int
    """The largest of the counts."""
    positions: Tensor | None
    """Positions of these rows, flat, int32; None if row j of every sample has position j."""
    places: Tensor
    """Index in `positions` of the first row of each group and sample, (G, B) int64."""
    marks: Tensor | None
    """Which heads of the group hold these rows, (rows, H/G) bool, in the order of `positions`. None if all do."""
    starts: Tensor = field(init=False)
    """Index among a group's latents of the first row of each sample, (G, B) int64."""
    ranks: Tensor = field(init=False)
    """Ranks of the keys of each group, and then of the values, (2·G,) int32."""
    addresses: Tensor = field(init=False)
    """Addresses of the tensors of each group, (12·G,) int64: latents, up, down, bias, s, z; of keys, then of values."""

    def __post_init__(self) -> None:
        groups = len(self.counts)
        width = len(self.keys.up[0])
        if self.heads % groups or width % (self.heads // groups):
            raise ValueError(f"latent rows: {self.heads} heads in {groups} groups of {width} numbers")
        for side in (self.keys, self.values):
            side.check(groups, width)
        if self.keys.bits != self.values.bits:
            raise ValueError(f"latent rows: keys of {self.keys.bits} bits and values of {self.values.bits}")
        if self.keys.more.shape[:3] != self.values.more.shape[:3] or self.keys.more.shape[1] != self.counts.shape[1]:
            raise ValueError(f"latent rows: memory {tuple(self.keys.more.shape)} and {tuple(self.values.more.shape)}")
        if self.marks is not None and (self.positions is None or self.marks.shape[1] != self.heads // groups):
            raise ValueError(f"latent rows: marks {tuple(self.marks.shape)} of {self.heads // groups} heads of a group")
        device = self.counts.device
        ranks = torch.tensor(self.keys.ranks + self.values.ranks, dtype=torch.int32, device=device)
        object.__setattr__(self, "starts", self.counts.cumsum(1) - self.counts)
        object.__setattr__(self, "ranks", ranks)
        sides = self.keys, self.values
        tables = [
            *([getattr(side, name) or side.down for side in sides] for name in ("latents", "up", "down", "bias")),
            *(
                [side.down if side.rounding is None else getattr(side.rounding, name) for side in sides]
                for name in ("steps", "zeros")
            ),
        ]
        addresses = [tensor.data_ptr() for table in tables for side in table for tensor in side]
        object.__setattr__(self, "addresses", torch.tensor(addresses, dtype=torch.int64, device=device))

    @property
    def groups(self) -> int:
        """Number of groups, G."""
        return len(self.counts)

    @property
    def batch(self) -> int:
        """Number of samples, B."""
        return self.counts.shape[1]

    @property
    def room(self) -> int:
        """Number of further rows that there is memory for."""
        return self.keys.more.shape[2]

    @property
    def dim(self) -> int:
        """Head dimension, d."""
        return len(self.keys.up[0]) * self.groups // self.heads

    @property
    def own_tensors(self) -> Sequence[Tensor]:
        """The small tensors that this object has made."""
        return self.starts, self.ranks, self.addresses


def find_unit(side: Side) -> int:
    """Return the largest power of two up to 16 that divides the pitch of each rank."""
    sizes = list(map(side.pitch, side.ranks))
    return next(unit for unit in (16, 8, 4, 2, 1) if all(size % unit == 0 for size in sizes))
