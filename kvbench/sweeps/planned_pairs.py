"""Find the cells of planned sweeps whose comparison was named beforehand.

A planned pair is two cells, each written as settings: `method=snapkv` and `method=snapkv codec=int4 budget=0.355`. A
cell is meant if it has these settings; a side that names no allocator or codec means uniform and raw. If neither side
names a budget, the pair is compared at every budget that both have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.validation import SettingError

BUDGET = "budget"
UNNAMED = {"allocator": "uniform", "codec": "raw"}  # of cells and sides that do not name them


@dataclass(frozen=True)
class ProtocolCell:
    """A cell of a planned sweep.

    Attributes:
        protocol: A text that is the same for cells that can be compared.
        overrides: Its settings, as the command line has them.
        budget: Its budget as a text.
    """

    protocol: str
    overrides: tuple[str, ...]
    budget: str


def count_pairs(pairs: Iterable[tuple[str, str]], cells: Sequence[ProtocolCell]) -> dict[str, int]:
    """Return protocol -> number of planned comparisons, for the protocols that have any.

    Raises:
        SettingError: A pair has no cells, or means several cells of one budget.
    """
    counts: dict[str, int] = {}
    for pair in pairs:
        one, other = ([cell for cell in cells if is_meant(side, cell)] for side in pair)
        free = not any(BUDGET in parse_settings(side.split()) for side in pair)
        compared = [
            (left, right)
            for left in one
            for right in other
            if left.protocol == right.protocol and (not free or left.budget == right.budget)
        ]
        if not compared:
            raise SettingError(f"pairs: no sweep has both {pair[0]!r} and {pair[1]!r} to compare")
        places = [(left.protocol, left.budget, right.budget) for left, right in compared]
        if len({*places}) < len(places):
            named = f"{pair[0]!r} and {pair[1]!r}"
            raise SettingError(f"pairs: {named} mean several cells of one budget; name more settings")
        for protocol, _, _ in places:
            counts[protocol] = counts.get(protocol, 0) + 1
    return counts


def is_meant(side: str, cell: ProtocolCell) -> bool:
    """Return whether one side of a pair means a cell."""
    asked, there = (UNNAMED | parse_settings(texts) for texts in (side.split(), cell.overrides))
    return all(there.get(name) == value for name, value in asked.items())


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Return name -> value of settings such as `method=snapkv`."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
