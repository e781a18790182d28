"""The rows of a layer of which the old ones are quantized, at fixed addresses."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.kernels.quantize import Groups


@dataclass(frozen=True)
class PackedRows:
    """The rows of B·H heads at fixed addresses: quantized rows held, quantized rows appended, and the newest rows.

    A head has n = lengths + step rows, and the token that is read is one more. Its keys before n - n mod R are
    quantized, per channel in groups of G rows; its values before n - R are quantized, per row in groups of G channels.
    What was quantized when `step` was 0 is held, and all further groups are appended behind it. Row j of the others is
    in slot j mod L of a ring.
    """

    bits: int
    """Bits of a number: 2 or 4."""
    group: int
    """G. It divides the head dimension d."""
    residual: int
    """R. A multiple of G."""
    lengths: Tensor
    """Rows of each head when step was 0, (B, H) int64."""
    longest: int
    """The most rows of a head when step was 0."""
    mass: Tensor | None
    """Tokens that each of those rows stands for, flat, above 0; None for one each. Further rows stand for one."""
    starts: Tensor
    """Index of each head's first row in `mass`, (B, H) int64."""
    held_keys: Groups
    """Keys of all heads, one head after the other: codes (m, d, G·bits/8), scale and zero (m, d, 1)."""
    key_starts: Tensor
    """Index of each head's first group of keys, (B, H) int64."""
    held_values: Groups
    """Values of all heads, one head after the other: codes (m, d·bits/8), scale and zero (m, d/G)."""
    value_starts: Tensor
    """Index of each head's first row of values, (B, H) int64."""
    more_keys: Groups
    """Memory for further groups of keys: codes (B, H, room, d, G·bits/8), scale and zero (B, H, room, d, 1)."""
    more_values: Groups
    """Memory for further rows of values: codes (B, H, room, d·bits/8), scale and zero (B, H, room, d/G)."""
    ring_keys: Tensor
    """(B, H, L, d), contiguous, with L above R + 1."""
    ring_values: Tensor
    """(B, H, L, d), contiguous"""

    def __post_init__(self) -> None:
        ring, dim = self.ring_keys.shape[2:]
        if self.bits not in (2, 4) or self.group * self.bits % 8 or dim % self.group or self.residual % self.group:
            raise ValueError(f"packed rows: {self.bits} bits, group {self.group}, residual {self.residual}, d {dim}")
        if ring <= self.residual + 1 or self.ring_values.shape != self.ring_keys.shape:
            raise ValueError(f"packed rows: a ring of {ring} rows for a residual of {self.residual}")
        if self.lengths.shape != self.ring_keys.shape[:2]:
            raise ValueError(f"packed rows: lengths {tuple(self.lengths.shape)}, ring {tuple(self.ring_keys.shape)}")
