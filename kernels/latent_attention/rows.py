"""The rows of a layer that are stored as latents of groups of KV heads, at fixed addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNED = 16  # bytes; addresses that the kernels read from a table are multiples


@dataclass(frozen=True)
class Side:
    """The keys or the values of a layer: their latents and what makes rows of them, by group.

    Symbols: w the numbers of a group's row, r_g the rank of group g.
    """

    latents: tuple[Tensor, ...]
    """Latents that were there when `step` was 0, (n_g, r_g) each. Samples come one after the other."""
    down: tuple[Tensor, ...]
    """Maps a row less its bias to latents, (r_g, w) each."""
    up: tuple[Tensor, ...]
    """Maps latents to a row less its bias, (w, r_g) each."""
    bias: tuple[Tensor, ...] | None
    """(w,) each; None for none."""
    more: Tensor
    """Memory for the latents of further rows, (G, B, room, R); R is the largest rank."""

    @property
    def ranks(self) -> list[int]:
        """The rank of each group."""
        return [len(own) for own in self.down]

    def check(self, groups: int, width: int) -> None:
        """Raise a ValueError if shapes do not fit."""
        parts = [*self.latents, *self.down, *self.up, *(self.bias or ())]
        shapes = [
            *((len(own), rank) for own, rank in zip(self.latents, self.ranks, strict=True)),
            *((rank, width) for rank in self.ranks), *((width, rank) for rank in self.ranks),
            *([(width,)] * groups if self.bias else ()),
        ]  # fmt: skip
        if len(self.ranks) != groups or [tuple(own.shape) for own in parts] != shapes:
            raise ValueError(
                f"latent rows: {[tuple(own.shape) for own in parts]} of {groups} groups of {width} numbers"
            )
        if self.more.shape[::3] != (groups, max(self.ranks)):
            raise ValueError(f"latent rows: memory {tuple(self.more.shape)} for ranks {self.ranks}")
        parts.append(self.more)
        odd = any(not own.is_contiguous() or (own.is_cuda and own.data_ptr() % ALIGNED) for own in parts)
        if odd or any(own.dtype != self.more.dtype for own in parts):
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
    """Addresses of the tensors of each group, (8·G,) int64: latents, up, down, bias; of keys, then of values."""

    def __post_init__(self) -> None:
        groups = len(self.counts)
        width = len(self.keys.up[0])
        if self.heads % groups or width % (self.heads // groups):
            raise ValueError(f"latent rows: {self.heads} heads in {groups} groups of {width} numbers")
        for side in (self.keys, self.values):
            side.check(groups, width)
        if self.keys.more.shape[:3] != self.values.more.shape[:3] or self.keys.more.shape[1] != self.counts.shape[1]:
            raise ValueError(f"latent rows: memory {tuple(self.keys.more.shape)} and {tuple(self.values.more.shape)}")
        if self.marks is not None and (self.positions is None or self.marks.shape[1] != self.heads // groups):
            raise ValueError(f"latent rows: marks {tuple(self.marks.shape)} of {self.heads // groups} heads of a group")
        device = self.counts.device
        ranks = torch.tensor(self.keys.ranks + self.values.ranks, dtype=torch.int32, device=device)
        object.__setattr__(self, "starts", self.counts.cumsum(1) - self.counts)
        object.__setattr__(self, "ranks", ranks)
        sides = self.keys, self.values
        object.__setattr__(self, "addresses", torch.tensor(
            [
                own.data_ptr()
                for name in ("latents", "up", "down", "bias")
                for side in sides
                for own in getattr(side, name) or side.down
            ],
            dtype=torch.int64, device=device,
        ))  # fmt: skip

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


def find_unit(ranks: Sequence[int]) -> int:
    """Return the largest power of two up to 16 that divides all ranks."""
    return next(unit for unit in (16, 8, 4, 2, 1) if all(rank % unit == 0 for rank in ranks))
