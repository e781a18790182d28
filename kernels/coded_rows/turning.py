"""Multiply rows with the orthogonal matrix of a side, in Triton. README.md says how."""

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.coded_rows.form import is_hadamard

PRECISION = tl.constexpr("tf32x3")  # of products with a matrix of float32 numbers: about that of float32


def name_turn(turn: Tensor | None) -> str:
    """Return "none", "hadamard" for a matrix that `make_hadamard` has made, or "matrix" for any other."""
    if turn is None:
        return "none"
    return "hadamard" if is_hadamard(turn) else "matrix"


def count_warps(*turns: str) -> int:
    """Return the warps of a program that rounds a row, or turns it. Steps of a Hadamard matrix are fastest in one."""
    return 1 if "hadamard" in turns and "matrix" not in turns else 4


@triton.constexpr_function
def halve(size):
    """Return the power of two that is about the root of a power of two."""
    return 2 ** ((size.bit_length() - 1) // 2)


@triton.constexpr_function
def narrow(rows):
    """Return the dtype of factors of products with ±1: 16 bits, but the interpreter multiplies no bfloat16."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return tl.bfloat16 if rows == tl.float32 else rows


@triton.jit
def find_signs(SIZE: tl.constexpr):
    """Return the Hadamard matrix (SIZE, SIZE) of ±1: the parity of the bits that both indices have."""
    index = tl.arange(0, SIZE)
    bits = index[:, None] & index[None]
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)


@triton.jit
def turn_row(row, matrix, TURN: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return a row (D,) float32 times the matrix (DIM, DIM), or with BACK times the transposed matrix.

    A Hadamard matrix is a product of two small ones, of which nothing is loaded but the first column: signs over √DIM.
    """
    column = tl.arange(0, D)
    if TURN == "hadamard":
        A: tl.constexpr = halve(D)
        B: tl.constexpr = D // A
        signs = tl.load(matrix + column * DIM)  # (D,)
        if not BACK:
            row *= signs
        grid = tl.reshape(row, [A, B])
        grid = tl.sum(grid[:, None, :] * find_signs(A)[:, :, None], 0)
        grid = tl.sum(grid[:, :, None] * find_signs(B)[None], 1)
        row = tl.reshape(grid, [D])
        if BACK:
            row *= signs
    else:
        row = tl.sum(row[:, None] * load_matrix(matrix, BACK, DIM, D), 0)
    return row


@triton.jit
def turn_tile(tile, matrix, TURN: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return rows (N, D) times the matrix, or with BACK times the transposed matrix, in float32. N is at least 16.

    Channels from DIM on are 0, before and after. Products with ±1 are exact: those of rows in 16 bits, and those of the
    three bfloat16 whose sum is a float32.
    """
    turns = load_matrix(matrix, BACK, DIM, D)
    if TURN == "hadamard":
        LIKE: tl.constexpr = narrow(tile.dtype)
        signs = tl.where(turns > 0, 1.0, -1.0).to(LIKE)
        first = tile.to(LIKE)
        turned = tl.dot(first, signs)
        if tile.dtype == tl.float32:
            rest = tile - first.to(tl.float32)
            second = rest.to(LIKE)
            turned = tl.dot(second, signs, turned)
            turned = tl.dot((rest - second.to(tl.float32)).to(LIKE), signs, turned)
        turned = tl.where((tl.arange(0, D) < DIM)[None], turned * tl.abs(tl.load(matrix)), 0.0)
    else:
        turned = tl.dot(tile.to(tl.float32), turns, input_precision=PRECISION)
    return turned


@triton.jit
def load_matrix(matrix, BACK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return the matrix, or with BACK the transposed one, (D, D)."""
    column = tl.arange(0, D)
    inside = (column < DIM)[:, None] & (column < DIM)[None]
    strides: tl.constexpr = (1, DIM) if BACK else (DIM, 1)
    return tl.load(matrix + column[:, None] * strides[0] + column[None] * strides[1], mask=inside, other=0.0)


@triton.jit
def _turn_back(rows, matrix, TURN: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Turn one row back, in place."""
    column = tl.arange(0, D)
    there = column < DIM
    place = rows + tl.program_id(0).to(tl.int64) * DIM + column
    row = tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every warp may need the whole row, and the first one to end overwrites its part
    tl.store(place, turn_row(row, matrix, TURN, True, DIM, D), mask=there)


def turn_back(outputs: Tensor, turn: Tensor) -> Tensor:
    """Multiply outputs (B, Hq, 1, d), contiguous, with the transposed matrix, in place. Returns them."""
    dim, name = outputs.shape[-1], name_turn(turn)
    padded = triton.next_power_of_2(dim)
    _turn_back[(outputs.numel() // dim,)](
        outputs, turn.contiguous(), TURN=name, DIM=dim, D=padded, num_warps=count_warps(name), enable_fp_fusion=False
    )
    return outputs
