"""Matching and merge in Triton: keys are read as they are stored, and nothing is added up by atomics.

`_match` holds a tile of even rows and walks the odd rows of their chunk; norms are taken from the tiles and divide the
products, so no unit vectors are written. `_chain` links the rows that join the same row, each to the one before it in
its head, and `_merge` follows the links from the rows that stay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.implementation import interpreting
from kvbench.kernels.match.edges import even_count

TILE = 64  # rows that are compared with as many others


@triton.jit(do_not_specialize=["rows", "heads", "chunk", "tiles", "edges"])
def _match(
    keys, similar, partner, rows, heads, chunk, tiles, edges, dim, k_b, k_h, k_n, k_d,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
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
    a = tl.load(keys + at_a + column * k_d, mask=here[:, None] & (column < dim), other=0.0)
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
                a = tl.load(keys + at_a + column * k_d, mask=here[:, None] & (column < dim), other=0.0)
            b = tl.load(keys + at_b + column * k_d, mask=there[:, None] & (column < dim), other=0.0)
            a32, b32 = a.to(tl.float32), b.to(tl.float32)
            if CAST:
                products = tl.dot(a32, tl.trans(b32), products)
            else:
                products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
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
    own = (chunk + 1) // 2
    size = min(TILE, max(16, triton.next_power_of_2(own)))
    part = min(wide, 32) if keys.dtype == torch.float32 else wide  # longer products in float32 compile slowly
    tiles = triton.cdiv(own, size)
    if batch * heads:
        _match[triton.cdiv(rows, chunk) * tiles, batch * heads](
            keys, similar, partner, rows, heads, chunk, tiles, edges, dim, *keys.stride(),
            M=size, N=size, D=wide, K=part, CAST=interpreting(), num_warps=4, num_stages=1,
        )  # fmt: skip
    return similar, partner


@triton.jit(do_not_specialize=["rows", "chunk", "tiles"])
def _chain(into, chain, rows, chunk, tiles, TILE: tl.constexpr):
    """Of each row the last one (before it, if it joins a row itself) that joins the same row, or -1."""
    number, tile, line = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    first = number * chunk
    stop = tl.minimum(first + chunk, rows)
    start = line.to(tl.int64) * rows
    row = first + tile * TILE + tl.arange(0, TILE)
    own = tl.load(into + start + row, mask=row < stop, other=-1).to(tl.int32)
    limit = tl.where(own == row, stop, row)
    found = tl.full((TILE,), -1, tl.int32)
    for at in range(first, stop, TILE):
        other = at + tl.arange(0, TILE)
        target = tl.load(into + start + other, mask=other < stop, other=-2).to(tl.int32)
        joins = (target[None] == own[:, None]) & (target != other)[None] & (other[None] < limit[:, None])
        found = tl.maximum(found, tl.max(tl.where(joins, other[None], -1), 1))
    tl.store(chain + start + row, found, mask=row < stop)


@triton.jit(do_not_specialize=["total", "rows", "heads"])
def _merge(
    index, keys, values, mass, into, chain, new_keys, new_values, new_mass, total, rows, heads, dim,
    k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    ROWS: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = slot < total
    place = slot if ALL else tl.load(index + slot, mask=real, other=0)
    line, row = place // rows, place % rows
    keys += ((line // heads) * k_b + (line % heads) * k_h)[:, None] + tl.arange(0, D)[None] * k_d
    values += ((line // heads) * v_b + (line % heads) * v_h)[:, None] + tl.arange(0, D)[None] * v_d
    wide = (tl.arange(0, D) < dim)[None]
    stays = real & (tl.load(into + place, mask=real, other=-1) == row)
    before = tl.load(mass + place, mask=real, other=0.0)
    here = real[:, None] & wide
    k = tl.load(keys + row[:, None] * k_n, mask=here, other=0.0)
    v = tl.load(values + row[:, None] * v_n, mask=here, other=0.0)
    after = tl.where(stays, before, 0.0)
    sum_k = tl.where(before > 0, before, 0.0)[:, None] * tl.where((before > 0)[:, None], k.to(tl.float32), 0.0)
    sum_v = tl.where(before > 0, before, 0.0)[:, None] * tl.where((before > 0)[:, None], v.to(tl.float32), 0.0)
    other = tl.where(stays, tl.load(chain + place, mask=real, other=-1), -1)
    while tl.max(other) >= 0:
        weight = tl.load(mass + line * rows + other, mask=other >= 0, other=0.0)
        here = (weight > 0)[:, None] & wide
        far = other[:, None].to(tl.int64)
        sum_k += weight[:, None] * tl.load(keys + far * k_n, mask=here, other=0.0).to(tl.float32)
        sum_v += weight[:, None] * tl.load(values + far * v_n, mask=here, other=0.0).to(tl.float32)
        after += weight
        other = tl.load(chain + line * rows + other, mask=other >= 0, other=-1)
    grew = (after > before)[:, None]
    share = tl.maximum(after, 1.0)[:, None]
    out, here = slot[:, None] * dim + tl.arange(0, D)[None], real[:, None] & wide
    tl.store(new_keys + out, tl.where(grew, (sum_k / share).to(k.dtype), k), mask=here)
    tl.store(new_values + out, tl.where(grew, (sum_v / share).to(v.dtype), v), mask=here)
    tl.store(new_mass + slot, after, mask=real)


def merge_triton(
    keys: Tensor, values: Tensor, mass: Tensor, into: Tensor, chunk: int | None, index: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, dim = keys.shape
    mass, into = mass.contiguous(), into.contiguous()
    chain = torch.empty(into.shape, dtype=torch.int32, device=keys.device)
    shape = mass.shape if index is None else index.shape
    new = [x.new_empty(*shape, dim) for x in (keys, values)] + [mass.new_empty(shape)]
    total = mass.numel() if index is None else len(index)
    if total:
        chunk = min(chunk or rows, rows)
        tiles = triton.cdiv(chunk, TILE)
        _chain[triton.cdiv(rows, chunk) * tiles, batch * heads](into, chain, rows, chunk, tiles, TILE=TILE)
        size = max(4, min(64, 2048 // triton.next_power_of_2(dim)))
        _merge[triton.cdiv(total, size),](
            index, keys, values, mass, into, chain, *new, total, rows, heads, dim, *keys.stride(), *values.stride(),
            ROWS=size, D=triton.next_power_of_2(dim), ALL=index is None,
        )  # fmt: skip
    return tuple(new)
