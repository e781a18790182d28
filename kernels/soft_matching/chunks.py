"""Who proposes: the rows at even positions of their chunk."""

import torch


def even_count(rows: int, chunk: int | None) -> int:
    """Rows that stand at even positions of their chunk."""
    chunk = chunk or rows
    return rows // chunk * ((chunk + 1) // 2) + (rows % chunk + 1) // 2


def edge_count(rows: int, chunk: int | None) -> int:
    """Even rows that have an odd row in their chunk: all but one that is a chunk alone."""
    return even_count(rows, chunk) - (rows % (chunk or rows) == 1 or rows == 1)


def even_rows(rows: int, chunk: int | None, device: torch.device) -> torch.Tensor:
    """(E,) indices of the rows that stand at even positions of their chunk."""
    chunk = chunk or rows
    if chunk % 2 == 0 or rows <= chunk:
        return torch.arange(0, rows, 2, device=device)
    edge, own = torch.arange(even_count(rows, chunk), device=device), (chunk + 1) // 2
    return edge // own * chunk + edge % own * 2
