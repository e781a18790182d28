"""How rows are rounded to codes, and the rows of a layer that are held as codes, at fixed addresses."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by the lower three bits of a code
BITS = {"e4m3": 8, "e5m2": 8, "int8": 8, "uint8": 8, "uint4": 4, "uint3": 3, "uint2": 2, "e2m1": 4}
WHOLE = {"int8": 127.0, "uint8": 255.0, "uint4": 15.0, "uint3": 7.0, "uint2": 3.0}  # the largest of whole numbers
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0} | WHOLE  # of all codes
HADAMARDS: list[Tensor] = []  # those that `make_hadamard` has made
STEPS = {"none": 0, "largest": 1, "power": 1, "power_below": 1, "norm": 1, "point": 1}
STEPS |= {"range": 2, "middle": 2, "shift": 2}


@dataclass(frozen=True)
class Form:
    """How the channels of a row become codes: number = base(code)·scale + zero, with one scale and zero a group."""

    code: str
    """What a code stands for, its base: a float ("e4m3", "e5m2", "e2m1"), a whole number ("int8", "uint8", "uint4",
    "uint3", "uint2"), or a number of a list ("levels").
    """
    scale: str = "none"
    """What a group stores. "none"; a scale, namely the one that makes the group's "largest" size the largest code, the
    next "power" of two above it, the power of two with which the largest size has the exponent of the largest code
    ("power_below"), or the "norm" of the row; or scale and zero, which spread the codes over the group's "range", from
    its smallest number on, or around its "middle"; or a scale that spreads the codes over the range and has a "point"
    in its 4 lowest bits, the code of zero: number = (base(code) - point)·scale, with 0 for these bits of the scale.
    Rows that a codec rounds itself may have a scale and a "shift": number = (base(code) - shift)·scale.
    """
    group: int = 0
    """Channels of a group; 0 for all channels of a row."""
    least: float = 0.0
    """The smallest scale of a largest size, or the smallest range, that a group is taken to have."""
    clip: float = 1.0
    """What a group's smallest and largest number are multiplied with to give its range, in which all codes lie."""
    stored: torch.dtype = torch.float32
    """The dtype of scales and zeros. Scales in e4m3 are at most its largest number."""
    rounds_by_stored: bool = True
    """Whether rows are rounded by the scales and zeros that are stored, or by those in float32."""
    wide: bool = False
    """Whether rows in float64 are rounded and read in float64, after the turn; otherwise it is done in float32."""
    rounding: str = "even"
    """What becomes of a number between two codes: it gets the nearest one, and of two equally near ones the "even" one
    or the one further "up" in size; or it is "cut" off towards zero.
    """
    levels: tuple[float, ...] = ()
    """The numbers of "levels", ascending, 2^bits of them."""
    normed: bool = False
    """Whether a row of levels is divided by its norm when it is read."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.code] if self.code != "levels" else len(self.levels).bit_length() - 1

    @property
    def steps(self) -> int:
        """Numbers that a group stores beside its codes: none, a scale, or a scale and a zero."""
        return STEPS[self.scale]

    def count_groups(self, dim: int) -> int:
        """Return the number of groups of a row of `dim` channels."""
        return dim // (self.group or dim) if self.steps else 0

    def count_bytes(self, dim: int) -> int:
        """Return the bytes of a row of `dim` channels."""
        return dim * self.bits // 8 + self.count_groups(dim) * self.steps * self.stored.itemsize


Parts = tuple[Tensor, ...]
"""A row's codes (R, bytes) uint8, then, if its form has them, the groups' scales and zeros, (R, groups) each."""


@cache
def make_hadamard(dim: int, seed: int | None, device: torch.device) -> Tensor:
    """Return the Hadamard matrix over √d, (d, d) float32, whose rows have random signs if `seed` is given.

    Signs are drawn as in vLLM's int4_per_token_head.py.

    Args:
        dim: d, a power of two.
        seed: The seed of the signs.
        device: Where the matrix lies.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if seed is not None:
        signs = torch.bernoulli(torch.full((dim,), 0.5), generator=torch.Generator().manual_seed(seed))
        matrix = matrix * (2 * signs - 1)[:, None]
    HADAMARDS.append((matrix / dim**0.5).to(device, torch.float32))
    return HADAMARDS[-1]


def is_hadamard(turn: Tensor) -> bool:
    """Return whether `make_hadamard` has made this very matrix, so that sums of ±1 times its first column turn rows."""
    return any(turn is made for made in HADAMARDS)


@dataclass(frozen=True)
class CodedSide:
    """Keys or values of a layer as codes."""

    form: Form
    held: Parts
    """Those of the rows that were held when the memory was made, flat, one head after the other."""
    more: Parts
    """Memory for those of further tokens, (B, H, room, …)."""
    factor: float | Tensor
    """What every number is multiplied with; or what those of each head are, (B, H) float32, contiguous."""
    turn: Tensor | None
    """The orthogonal matrix that rows are multiplied with before they are rounded, (d, d) float32; None for none."""


@dataclass(frozen=True)
class RawWindow:
    """The newest rows of each head, which are not rounded yet, in a ring. They are rounded many at once."""

    ring: Tensor
    """Keys and values, rotated, (2, B, H, L, d), contiguous. The i-th row behind those held lies at i mod L."""
    waiting: int
    """Rows that each head had in the ring when the memory was made."""
    every: int
    """Number of rows at which they are rounded, R. L is at least R."""

    def count_rounded(self, step: int) -> int:
        """Return how many rows behind those held are codes when the token of this number, from 0 on, is read."""
        return (self.waiting + step) // self.every * self.every

    def find_slots(self, start: int, stop: int) -> Tensor:
        """Return where the rows from `start` to before `stop`, counted from those held, lie in the ring."""
        return torch.arange(start, stop, device=self.ring.device) % self.ring.shape[3]


@dataclass(frozen=True)
class CodedRows:
    """The rows of B·H heads as codes at fixed addresses: rows held, and rows of further tokens."""

    keys: CodedSide
    values: CodedSide
    lengths: Tensor
    """Rows of each head that are held, (B, H) int64."""
    starts: Tensor
    """Index of each head's first held row, (B, H) int64."""
    longest: int
    """The most rows that a head holds."""
    mass: Tensor | None
    """Tokens that each held row stands for, flat, above 0; None for one each. Further rows stand for one."""
    newest: Tensor
    """The keys and values of the token that is read, as it attends to them, times the turns, (2, B, H, d)."""
    rounds_newest: bool
    """Whether a token attends to its own row as it is rounded."""
    window: RawWindow | None = None
    """Rows that are not rounded yet, the token's own among them; tokens then do not attend to `newest`. None for none.
    """
