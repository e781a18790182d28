"""The bounds in PyTorch."""

import torch
from torch import Tensor


def page_bounds_reference(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    whole = keys.shape[2] // page * page
    paged = keys[:, :, :whole].unflatten(2, (whole // page, page))
    low, high = paged.amin(3), paged.amax(3)
    if whole < keys.shape[2]:
        rest = keys[:, :, whole:]
        low = torch.cat([low, rest.amin(2, keepdim=True)], 2)
        high = torch.cat([high, rest.amax(2, keepdim=True)], 2)
    return low, high


def update_page_bounds_reference(keys: Tensor, low: Tensor, high: Tensor, last: Tensor, page: int) -> None:
    number = int(last) // page
    rows = keys[:, :, number * page : int(last) + 1]
    low[:, :, number], high[:, :, number] = rows.amin(2), rows.amax(2)


def page_upper_bounds_reference(
    queries: Tensor, low: Tensor, high: Tensor, newest: Tensor | None, force_newest: bool
) -> Tensor:
    dtype = torch.float64 if low.dtype == torch.float64 else torch.float32
    grouped = queries.to(dtype).unflatten(1, (low.shape[1], -1))
    above = grouped.clamp(min=0) @ high.to(dtype).mT + grouped.clamp(max=0) @ low.to(dtype).mT
    above = above.flatten(1, 2)
    if newest is None:
        return above
    page = torch.arange(above.shape[2], device=above.device)
    above = above.masked_fill(page > newest, -torch.inf)
    return above.masked_fill(page == newest, torch.inf) if force_newest else above
