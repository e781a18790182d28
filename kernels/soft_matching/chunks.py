"""Find the rows that propose: those at even positions of their chunk."""

import torch


def even_count(rows: int, chunk: int | None) -> int:
    """Return how many rows are at even positions of their chunk."""
    chunk = chunk or rows
    return rows // chunk * ((chunk + 1) // 2) + (rows % chunk + 1) // 2


def edge_count(rows: int, chunk: int | None) -> int:
    """Return how many even rows have an odd row in their chunk: all but a row that is alone in its chunk."""
    return even_count(rows, chunk) - (rows % (chunk or rows) == 1 or rows == 1)


def even_rows(rows: int, chunk: int | None, device: torch.device) -> torch.Tensor:
    """Return the indices of the rows at even positions of their chunk, (E,)."""
    chunk = chunk or rows
    if chunk % 2 == 0 or rows <= chunk:
        return torch.arange(0, rows, 2, device=device)
    edge, evens = torch.arange(even_count(rows, chunk), device=device), (chunk + 1) // 2
    return edge // evens * chunk + edge % evens * 2
