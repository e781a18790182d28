"""Multiply one row with matrices in Triton. Every weight is read once. Derivation: README.md."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8  # outputs of a program; these three were chosen by trial on an H200
COLUMNS = 512  # columns of the weights that are read at once
STAGES = 3  # such parts that are being loaded at a time


@triton.jit
def _inverse(x, columns, epsilon, K: tl.constexpr):
    """Return 1/√(mean x² + ε) of one row."""
    total = tl.zeros([K], tl.float32)
    for first in range(0, columns, K):
        at = first + tl.arange(0, K)
        part = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)  # (K,)
        total += part * part
    return 1.0 / tl.sqrt(tl.sum(total, 0) / columns + epsilon)


@triton.jit
def _some(x, inverse, scale, at, here, NORM: tl.constexpr):
    """Return a part of the normed row in float32, after rounding to the weight's dtype and to x's dtype."""
    part = tl.load(x + at, mask=here, other=0.0)  # (K,)
    if NORM:
        weight = tl.load(scale + at, mask=here, other=0.0)  # (K,)
        normed = (part.to(tl.float32) * inverse).to(weight.dtype)
        part = (normed.to(tl.float32) * weight.to(tl.float32)).to(part.dtype)
    return part.to(tl.float32)


@triton.jit
def _project(
    x,
    scale,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    residual,
    out,
    columns,
    n0,
    n1,
    n2,
    epsilon,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of one of up to three weights."""
    block = tl.program_id(0)
    weight, bias, rows, before = w0, b0, n0, 0
    if WEIGHTS > 1:  # noqa: SIM102 - a constant, so the body is compiled only if it holds
        if block >= tl.cdiv(n0, N):
            block -= tl.cdiv(n0, N)
            weight, bias, rows, before = w1, b1, n1, n0
            if WEIGHTS > 2:  # noqa: SIM102
                if block >= tl.cdiv(n1, N):
                    block -= tl.cdiv(n1, N)
                    weight, bias, rows, before = w2, b2, n2, n0 + n1
    row = block * N + tl.arange(0, N)
    there = row < rows
    inverse = 1.0
    if NORM:
        inverse = _inverse(x, columns, epsilon, K)
    total = tl.zeros([N, K], tl.float32)
    for first in tl.range(0, columns, K, num_stages=STAGES):
        at = first + tl.arange(0, K)
        here = at < columns
        part = _some(x, inverse, scale, at, here, NORM)
        where = there[:, None] & here[None]
        w = tl.load(weight + row[:, None].to(tl.int64) * columns + at[None], mask=where, other=0.0)  # (N, K)
        total += w.to(tl.float32) * part[None]
    sums = tl.sum(total, 1)
    if BIAS:
        sums += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)  # (N,)
    if RESIDUAL:
        sums = sums.to(out.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual + row, mask=there, other=0.0).to(tl.float32)  # (N,)
    tl.store(out + before + row, sums, mask=there)


@triton.jit
def _activate(gate, up, DTYPE: tl.constexpr, GELU: tl.constexpr):
    """Return f(gate)·up of float32 numbers, rounded to DTYPE after each step. f is silu, or GELU by its tanh formula.

    Both are gate·σ(z), because 1 + tanh(z/2) = 2σ(z).
    """
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2√(2/π)
    return (gate / (1.0 + tl.exp(-z))).to(DTYPE).to(tl.float32) * up


@triton.jit
def _gated(
    x,
    scale,
    gate,
    up,
    out,
    columns,
    rows,
    epsilon,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs, from the same rows of both weights."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    there = row < rows
    inverse = 1.0
    if NORM:
        inverse = _inverse(x, columns, epsilon, K)
    one, two = tl.zeros([N, K], tl.float32), tl.zeros([N, K], tl.float32)
    for first in tl.range(0, columns, K, num_stages=STAGES):
        at = first + tl.arange(0, K)
        here = at < columns
        part = _some(x, inverse, scale, at, here, NORM)
        where, offset = there[:, None] & here[None], row[:, None].to(tl.int64) * columns + at[None]
        one += tl.load(gate + offset, mask=where, other=0.0).to(tl.float32) * part[None]  # (N, K)
        two += tl.load(up + offset, mask=where, other=0.0).to(tl.float32) * part[None]  # (N, K)
    tl.store(out + row, _activate(tl.sum(one, 1), tl.sum(two, 1), out.dtype.element_ty, GELU), mask=there)


@triton.jit(do_not_specialize=["count"])
def _product(gate, up, out, count, GELU: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    here = at < count
    one = tl.load(gate + at, mask=here, other=0.0).to(tl.float32)  # (N,)
    two = tl.load(up + at, mask=here, other=0.0).to(tl.float32)  # (N,)
    tl.store(out + at, _activate(one, two, out.dtype.element_ty, GELU), mask=here)


@triton.jit
def _normed(x, scale, residual, out, columns, epsilon, RESIDUAL: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    inverse = _inverse(x + row, columns, epsilon, K)
    for first in range(0, columns, K):
        at = first + tl.arange(0, K)
        here = at < columns
        normed = _some(x + row, inverse, scale, at, here, True)
        if RESIDUAL:
            normed += tl.load(residual + row + at, mask=here, other=0.0).to(tl.float32)  # (K,)
        tl.store(out + row + at, normed, mask=here)


def rms_norm_linear_triton(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
) -> list[Tensor]:
    sizes = [len(weight) for weight in weights]
    out = torch.empty(1, sum(sizes), dtype=x.dtype, device=x.device)
    scale, epsilon = norm or (x, 0.0)
    none = [None] * (3 - len(weights))
    _project[(sum(triton.cdiv(size, ROWS) for size in sizes),)](
        x,
        scale,
        *weights,
        *none,
        *(biases if any(b is not None for b in biases) else [None] * len(weights)),
        *none,
        residual,
        out,
        x.shape[1],
        *sizes,
        *[0] * len(none),
        epsilon,
        NORM=norm is not None,
        BIAS=any(b is not None for b in biases),
        RESIDUAL=residual is not None,
        WEIGHTS=len(weights),
        N=ROWS,
        K=COLUMNS,
        STAGES=STAGES,
        num_warps=4,
    )
    return list(out.split(sizes, 1))


def rms_norm_glu_triton(
    x: Tensor, gate: Tensor, up: Tensor, norm: tuple[Tensor, float] | None, activation: str
) -> Tensor:
    out = torch.empty(1, len(gate), dtype=x.dtype, device=x.device)
    scale, epsilon = norm or (x, 0.0)
    _gated[(triton.cdiv(len(gate), ROWS),)](
        x,
        scale,
        gate,
        up,
        out,
        x.shape[1],
        len(gate),
        epsilon,
        NORM=norm is not None,
        GELU=activation == "gelu_tanh",
        N=ROWS,
        K=COLUMNS,
        STAGES=STAGES,
        num_warps=4,
    )
    return out


def gated_product_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(gate)
    _product[(triton.cdiv(gate.numel(), 1024),)](
        gate, up, out, gate.numel(), GELU=activation == "gelu_tanh", N=1024, num_warps=4
    )
    return out


def rms_norm_triton(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    _normed[(len(x),)](
        x, weight, residual, out, x.shape[1], epsilon, RESIDUAL=residual is not None, K=COLUMNS, num_warps=4
    )
    return out
