"""Bounds of pages in one pass over the keys, and of their logits in one pass over the bounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.dispatch import is_interpreting

ELEMENTS = 8192  # elements of keys that a program holds
BYTES = 32768  # bytes of each bound that a program holds


@triton.jit(do_not_specialize=["rows", "heads", "pages", "page"])
def _bounds(
    keys,
    low,
    high,
    rows,
    heads,
    pages,
    page,
    dim,
    k_b,
    k_h,
    k_n,
    k_d,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    line = tl.program_id(1)
    keys += (line // heads).to(tl.int64) * k_b + (line % heads).to(tl.int64) * k_h
    number = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    column = tl.arange(0, D)
    least = tl.full((PAGES, D), float("inf"), tl.float32)
    most = tl.full((PAGES, D), float("-inf"), tl.float32)
    for first in range(0, page, ROWS):
        in_page = first + tl.arange(0, ROWS)
        row = number[:, None] * page + in_page[None]
        here = ((row < rows) & (in_page < page)[None])[:, :, None] & (column < dim)[None, None]
        at = row[:, :, None].to(tl.int64) * k_n + column[None, None] * k_d
        k = tl.load(keys + at, mask=here, other=0.0).to(tl.float32)  # (PAGES, ROWS, D)
        least = tl.minimum(least, tl.min(tl.where(here, k, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(here, k, float("-inf")), 1))
    out = (line.to(tl.int64) * pages + number)[:, None] * dim + column[None]
    here = (number < pages)[:, None] & (column < dim)[None]
    tl.store(low + out, least.to(low.dtype.element_ty), mask=here)
    tl.store(high + out, most.to(high.dtype.element_ty), mask=here)


def page_bounds_triton(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = keys.shape
    pages, wide = triton.cdiv(rows, page), triton.next_power_of_2(dim)
    low, high = (keys.new_empty(batch, heads, pages, dim) for _ in range(2))
    rows_each = min(triton.next_power_of_2(page), max(1, ELEMENTS // wide))
    several = max(1, ELEMENTS // wide // rows_each)
    if batch * heads:
        _bounds[triton.cdiv(pages, several), batch * heads](
            keys, low, high, rows, heads, pages, page, dim, *keys.stride(), PAGES=several, ROWS=rows_each, D=wide
        )
    return low, high


@triton.jit(do_not_specialize=["heads", "pages", "page"])
def _newest(keys, low, high, last, heads, pages, page, dim, k_b, k_h, k_n, k_d, ROWS: tl.constexpr, D: tl.constexpr):
    line = tl.program_id(0)
    newest = tl.load(last).to(tl.int32)
    number = newest // page
    keys += (line // heads).to(tl.int64) * k_b + (line % heads).to(tl.int64) * k_h
    column = tl.arange(0, D)
    least = tl.full((D,), float("inf"), tl.float32)
    most = tl.full((D,), float("-inf"), tl.float32)
    for first in range(number * page, newest + 1, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row <= newest)[:, None] & (column < dim)[None]
        at = row[:, None].to(tl.int64) * k_n + column[None] * k_d
        k = tl.load(keys + at, mask=here, other=0.0).to(tl.float32)  # (ROWS, D)
        least = tl.minimum(least, tl.min(tl.where(here, k, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(here, k, float("-inf")), 0))
    out = (line.to(tl.int64) * pages + number) * dim + column
    tl.store(low + out, least.to(low.dtype.element_ty), mask=column < dim)
    tl.store(high + out, most.to(high.dtype.element_ty), mask=column < dim)


def update_page_bounds_triton(keys: Tensor, low: Tensor, high: Tensor, last: Tensor, page: int) -> None:
    batch, heads, pages, dim = low.shape
    rows = min(triton.next_power_of_2(page), 16)
    _newest[batch * heads,](
        keys, low, high, last, heads, pages, page, dim, *keys.stride(), ROWS=rows, D=triton.next_power_of_2(dim)
    )


@triton.jit(do_not_specialize=["group", "pages", "heads"])
def _upper(
    queries,
    low,
    high,
    above,
    newest,
    group,
    pages,
    dim,
    heads,
    q_b,
    q_h,
    q_d,
    l_b,
    l_h,
    l_n,
    l_d,
    h_b,
    h_h,
    h_n,
    h_d,
    NEWEST: tl.constexpr,
    FORCE: tl.constexpr,
    PAGES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    CAST: tl.constexpr,
):
    line = tl.program_id(1)
    batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    number, column, member = tl.program_id(0) * PAGES + tl.arange(0, PAGES), tl.arange(0, D), tl.arange(0, M)
    wide = (column < dim)[None]
    here = (number < pages)[:, None] & wide
    page, asking = number[:, None].to(tl.int64), (member < group)[:, None]
    # (PAGES, D)
    least = tl.load(low + batch * l_b + head * l_h + page * l_n + column[None] * l_d, mask=here, other=0.0)
    # (PAGES, D)
    most = tl.load(high + batch * h_b + head * h_h + page * h_n + column[None] * h_d, mask=here, other=0.0)
    at = batch * q_b + (head * group + member)[:, None] * q_h + column[None] * q_d
    query = tl.load(queries + at, mask=asking & wide, other=0.0)  # (M, D)
    if CAST:
        query, least, most = query.to(tl.float32), least.to(tl.float32), most.to(tl.float32)
    zero = tl.zeros_like(query)
    bound = tl.dot(tl.where(query > 0, query, zero), tl.trans(most), input_precision="ieee")  # (M, PAGES)
    bound = tl.dot(tl.where(query > 0, zero, query), tl.trans(least), bound, input_precision="ieee")  # (M, PAGES)
    if NEWEST:
        last = tl.load(newest)
        bound = tl.where((number <= last)[None], bound, float("-inf"))
        if FORCE:
            bound = tl.where((number == last)[None], float("inf"), bound)
    out = (line.to(tl.int64) * group + member)[:, None] * pages + number[None]
    tl.store(above + out, bound, mask=asking & (number < pages)[None])


def page_upper_bounds_triton(
    queries: Tensor, low: Tensor, high: Tensor, newest: Tensor | None, force_newest: bool
) -> Tensor:
    batch, heads, pages, dim = low.shape
    group, wide = queries.shape[1] // heads, max(16, triton.next_power_of_2(dim))
    several = max(16, BYTES // (wide * low.element_size()))
    above = torch.empty(*queries.shape[:2], pages, dtype=torch.float32, device=queries.device)
    if above.numel():
        _upper[triton.cdiv(pages, several), batch * heads](
            queries,
            low,
            high,
            above,
            above if newest is None else newest,
            group,
            pages,
            dim,
            heads,
            *queries.stride(),
            *low.stride(),
            *high.stride(),
            NEWEST=newest is not None,
            FORCE=force_newest,
            PAGES=several,
            M=max(16, triton.next_power_of_2(group)),
            D=wide,
            CAST=is_interpreting() and queries.dtype == torch.bfloat16,
            num_warps=2,
        )
    return above
