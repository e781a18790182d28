"""Split the cells of a column into classes whose scores may be ranked: cells of like measured bytes.

A budget does not say what a cell holds. A codec holds fewer bytes at the same budget, and a method that keeps all rows
and reads few of them holds all bytes. Within a column, a class begins with the cell that holds the fewest bytes and
takes all cells that hold at most a tenth more (SPREAD); the next class begins with the first cell that holds more.
Cells that read clearly fewer rows than they keep are classes of their own, by the share of rows that a token attends
to.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeVar

SPREAD = 0.1  # part of a class's least bytes (or rows) by which others of the class may exceed it
READS = 0.9  # a method that attends to less than this part of the rows it keeps reads few rows


class Holding(Protocol):
    """What is known of a cell: shares of the bytes held, rows kept and rows attended, as in `MatrixCell`."""

    @property
    def held(self) -> float | None: ...
    @property
    def kept(self) -> float | None: ...
    @property
    def attended(self) -> float | None: ...


Held = TypeVar("Held", bound=Holding)


def split_column(cells: Sequence[Held]) -> list[tuple[str, list[Held]]]:
    """Return the classes of a column: a text that names each, and its cells in their order.

    Args:
        cells: The cells of a column.

    Returns:
        Classes by bytes, the fewest first, then classes by rows. Cells whose bytes are unknown are the last class.
    """
    readers = [cell for cell in cells if reads_few_rows(cell.kept, cell.attended)]
    holders = [cell for cell in cells if cell not in readers and cell.held is not None]
    unknown = [cell for cell in cells if cell not in readers and cell.held is None]
    classes = _name_classes(holders, lambda cell: cell.held or 0.0, "of the bytes")
    classes += _name_classes(readers, lambda cell: cell.attended or 0.0, "of the rows read")
    return [*classes, *([("unknown bytes", unknown)] if unknown else [])]


def reads_few_rows(kept: float | None, attended: float | None) -> bool:
    """Return whether a decoded token attends to clearly fewer rows than a cell keeps; both are shares, if known."""
    return attended is not None and kept is not None and attended < READS * kept


def _split_by_measure(cells: Sequence[Held], measure: Callable[[Held], float]) -> list[list[Held]]:
    """Return classes of cells whose measures are alike, the smallest first, each in the order of `cells`."""
    bounds: list[float] = []
    for share in sorted(map(measure, cells)):
        if not bounds or share > (1 + SPREAD) * bounds[-1]:
            bounds.append(share)
    return [[cell for cell in cells if least <= measure(cell) <= (1 + SPREAD) * least] for least in bounds]


def _name_classes(cells: Sequence[Held], measure: Callable[[Held], float], what: str) -> list[tuple[str, list[Held]]]:
    """Return the classes of cells with a text that names each and no other one."""
    classes = _split_by_measure(cells, measure)
    ends = [(min(shares), max(shares)) for shares in (list(map(measure, alike)) for alike in classes)]
    for decimals in count(1):
        names = [" to ".join(dict.fromkeys(f"{100 * end:.{decimals}f}%" for end in pair)) for pair in ends]
        if len(set(names)) == len(names):
            break
    return [(f"{name} {what}", alike) for name, alike in zip(names, classes, strict=True)]
