"""Matching and merging in Triton. Keys are read as they are stored, and there are no atomics.

`_match` holds a tile of even rows and reads the odd rows of their chunk. Norms are computed from the tiles and divide
the products, so no unit vectors are written. `_link` links each row that joins another to the row before it that joins
the same one. `_centroids` follows these links from the rows that stay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting
from kvbench.kernels.row_selection import kept_indices
from kvbench.kernels.soft_matching.chunks import even_count

TILE = 64  # even rows of a tile, and odd rows that they are compared with at once


@triton.jit(do_not_specialize=["rows", "heads", "chunk", "tiles", "edges"])
def _match(
    keys,
    similar,
    partner,
    rows,
    heads,
    chunk,
    tiles,
    edges,
    dim,
    k_b,
    k_h,
    k_n,
    k_d,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    CAST: tl.constexpr,
):
    number, tile, line = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    first = number * chunk
    stop = tl.minimum(first + chunk, rows)
    keys += (line // heads).to(tl.int64) * k_b + (line % heads).to(tl.int64) * k_h
    even = first + 2 * (tile * M + tl.arange(0, M))
    here = even < stop
    best = tl.full((M,), float("-inf"), tl.float32)
    who = tl.zeros((M,), tl.int32)
    length = tl.full((M,), 1.0, tl.float32)
    column = tl.arange(0, K)[None]
    at_a = even[:, None].to(tl.int64) * k_n
    a = tl.load(keys + at_a + column * k_d, mask=here[:, None] & (column < dim), other=0.0)  # (M, K)
    for start in range(0, (stop - first) // 2, N):
        odd = first + 1 + 2 * (start + tl.arange(0, N))
        there = odd < stop
        products = tl.zeros((M, N), tl.float32)
        a_squares = tl.zeros((M,), tl.float32)
        b_squares = tl.zeros((N,), tl.float32)
        for part in range(0, D, K):
            column = part + tl.arange(0, K)[None]
            at_b = odd[:, None].to(tl.int64) * k_n
            if K < D:
                a = tl.load(keys + at_a + column * k_d, mask=here[:, None] & (column < dim), other=0.0)  # (M, K)
            b = tl.load(keys + at_b + column * k_d, mask=there[:, None] & (column < dim), other=0.0)  # (N, K)
            a32, b32 = a.to(tl.float32), b.to(tl.float32)
            if CAST:
                products = tl.dot(a32, tl.trans(b32), products)  # (M, N)
            else:
                products = tl.dot(a, tl.trans(b), products, input_precision="ieee")  # (M, N)
            a_squares += tl.sum(a32 * a32, 1)
            b_squares += tl.sum(b32 * b32, 1)
        length = tl.maximum(tl.sqrt(a_squares), 1e-12)
        cosines = products / tl.maximum(tl.sqrt(b_squares), 1e-12)[None]
        cosines = tl.where(there[None], cosines, float("-inf"))
        most, at = tl.max(cosines, 1, return_indices=True)
        who = tl.where(most > best, start + at, who)
        best = tl.maximum(best, most)
    best /= length
    out = line.to(tl.int64) * edges + number * ((chunk + 1) // 2) + tile * M + tl.arange(0, M)
    tl.store(similar + out, best, mask=here)
    tl.store(partner + out, (first + 1 + 2 * who).to(tl.int64), mask=here)


def match_triton(keys: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = keys.shape
    chunk = min(chunk or rows, rows)
    edges, wide = even_count(rows, chunk), max(16, triton.next_power_of_2(dim))
    similar = torch.empty(batch, heads, edges, dtype=torch.float32, device=keys.device)
    partner = torch.empty(batch, heads, edges, dtype=torch.int64, device=keys.device)
    evens = (chunk + 1) // 2
    part = min(wide, 32) if keys.dtype == torch.float32 else wide  # longer products in float32 compile slowly
    tiles = triton.cdiv(evens, TILE)
    if batch * heads:
        _match[triton.cdiv(rows, chunk) * tiles, batch * heads](
            keys,
            similar,
            partner,
            rows,
            heads,
            chunk,
            tiles,
            edges,
            dim,
            *keys.stride(),
            M=TILE,
            N=TILE,
            D=wide,
            K=part,
            CAST=is_interpreting(),
            num_warps=4,
            num_stages=1,
        )
    return similar, partner


@triton.jit(do_not_specialize=["rows", "chunk", "tiles", "edges"])
def _link(chosen, partner, chain, stays, rows, chunk, tiles, edges, TILE: tl.constexpr):
    """Link the rows that join the same row.

    For each row, `chain` is the last row that joins the same row (before it, if it joins too), or -1. `stays` says
    whether the row stays.
    """
    number, tile, line = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    first = number * chunk
    stop = tl.minimum(first + chunk, rows)
    start = line.to(tl.int64) * edges + number * ((chunk + 1) // 2)
    chosen += start
    partner += start
    local = tile * TILE + tl.arange(0, TILE)
    row, edge = first + local, local // 2
    joins = tl.load(chosen + edge, mask=(row < stop) & (local % 2 == 0), other=0) != 0  # (TILE,)
    into = tl.where(joins, tl.load(partner + edge, mask=joins, other=0).to(tl.int32), row)  # (TILE,)
    limit = tl.where(joins, edge, chunk)
    previous = tl.full((TILE,), -1, tl.int32)
    for at in range(0, (stop - first + 1) // 2, TILE):
        other = at + tl.arange(0, TILE)
        comes = tl.load(chosen + other, mask=first + 2 * other < stop, other=0) != 0  # (TILE,)
        target = tl.load(partner + other, mask=comes, other=-1).to(tl.int32)  # (TILE,)
        same = (target[None] == into[:, None]) & (other[None] < limit[:, None])
        previous = tl.maximum(previous, tl.max(tl.where(same, first + 2 * other[None], -1), 1))
    out = line.to(tl.int64) * rows + row
    tl.store(chain + out, previous, mask=row < stop)
    tl.store(stays + out, (joins == 0).to(tl.uint8), mask=row < stop)


@triton.jit(do_not_specialize=["total", "rows", "heads", "m_b", "m_h"])
def _centroids(
    index,
    old,
    mass,
    chain,
    new,
    new_mass,
    total,
    rows,
    heads,
    dim,
    x_b,
    x_h,
    x_n,
    m_b,
    m_h,
    m_n,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = slot < total
    place = tl.load(index + slot, mask=real, other=0)  # (ROWS,)
    line, row = place // rows, place % rows
    old += ((line // heads) * x_b + (line % heads) * x_h)[:, None] + tl.arange(0, D)[None]
    mass += (line // heads) * m_b + (line % heads) * m_h
    chain += line * rows
    wide = (tl.arange(0, D) < dim)[None]
    x = tl.load(old + row[:, None] * x_n, mask=real[:, None] & wide, other=0.0)  # (ROWS, D)
    before = tl.load(mass + row * m_n, mask=real, other=0.0)  # (ROWS,)
    after = before
    summed = before[:, None] * tl.where((before > 0)[:, None], x.to(tl.float32), 0.0)
    other = tl.load(chain + row, mask=real, other=-1)  # (ROWS,)
    while tl.max(other) >= 0:
        weight = tl.load(mass + other.to(tl.int64) * m_n, mask=other >= 0, other=0.0)  # (ROWS,)
        here = (weight > 0)[:, None] & wide
        summed += weight[:, None] * tl.load(old + other[:, None].to(tl.int64) * x_n, mask=here, other=0.0).to(
            tl.float32
        )  # (ROWS, D)
        after += weight
        other = tl.load(chain + other, mask=other >= 0, other=-1)  # (ROWS,)
    mean = (summed / tl.maximum(after, 1.0)[:, None]).to(x.dtype)
    out = slot[:, None] * dim + tl.arange(0, D)[None]
    tl.store(new + out, tl.where((after > before)[:, None], mean, x), mask=real[:, None] & wide)
    tl.store(new_mass + slot, after, mask=real)


class JoinedTriton:
    def __init__(self, mass: Tensor, chosen: Tensor, partner: Tensor, chunk: int | None, count: int) -> None:
        batch, heads, rows = mass.shape
        self.mass, self.shape = mass, (batch, heads, rows - count)
        self.chain = torch.empty(mass.shape, dtype=torch.int32, device=mass.device)
        stays = torch.empty(mass.shape, dtype=torch.bool, device=mass.device)
        chunk = min(chunk or rows, rows)
        tiles = triton.cdiv(chunk, TILE)
        if stays.numel():
            _link[triton.cdiv(rows, chunk) * tiles, batch * heads](
                chosen.contiguous().view(torch.uint8),
                partner.contiguous(),
                self.chain,
                stays.view(torch.uint8),
                rows,
                chunk,
                tiles,
                chosen.shape[2],
                TILE=TILE,
            )
        self.index = kept_indices(stays, batch * heads * (rows - count))

    def centroids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows if rows.stride(3) == 1 else rows.contiguous()
        dim, total = rows.shape[3], len(self.index)
        new, mass = rows.new_empty(*self.shape, dim), self.mass.new_empty(self.shape)
        wide = triton.next_power_of_2(dim)
        size = max(4, min(64, 2048 // wide))
        if total:
            _centroids[triton.cdiv(total, size),](
                self.index,
                rows,
                self.mass,
                self.chain,
                new,
                mass,
                total,
                rows.shape[2],
                rows.shape[1],
                dim,
                *rows.stride()[:3],
                *self.mass.stride(),
                ROWS=size,
                D=wide,
            )
        return new, mass
