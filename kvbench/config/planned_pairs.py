"""Find the cells of a study that conf/measured.yaml compares: of planned sweeps, or of published runs.

A pair is two cells, each written as settings: `method=snapkv` and `method=snapkv codec=int4 budget=0.355`. A cell is
meant if it has these settings; a side that names no allocator or codec means uniform and raw. If neither side names a
budget, the pair is compared at every budget that both have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.validation import SettingError

BUDGET = "budget"
UNNAMED = {"allocator": "uniform", "codec": "raw"}  # of cells and sides that do not name them


@dataclass(frozen=True)
class ProtocolCell:
    """A cell of a study.

    Attributes:
        protocol: A text that is the same for cells that can be compared.
        overrides: Its settings, as the command line has them. A run that has the settings of several presets has each.
        budget: Its budget as a text.
        name: What it is called where it is looked up again; empty for cells that are only counted.
    """

    protocol: str
    overrides: tuple[str, ...]
    budget: str
    name: str = ""


def count_pairs(pairs: Iterable[tuple[str, str]], cells: Sequence[ProtocolCell]) -> dict[str, int]:
    """Return protocol -> number of planned comparisons, for the protocols that have any.

    Raises:
        SettingError: A pair has no cells, or means several cells of one budget.
    """
    counts: dict[str, int] = {}
    for pair in pairs:
        compared = list_compared(pair, cells)
        if not compared:
            raise SettingError(f"pairs: no sweep has both {pair[0]!r} and {pair[1]!r} to compare")
        for one, _ in compared:
            counts[one.protocol] = counts.get(one.protocol, 0) + 1
    return counts


def list_compared(pair: tuple[str, str], cells: Sequence[ProtocolCell]) -> list[tuple[ProtocolCell, ProtocolCell]]:
    """Return the cells that a planned pair compares, in the order of its sides; nothing if there are none.

    Raises:
        SettingError: The pair means several cells of one budget.
    """
    ones, others = ([cell for cell in cells if is_meant(side, cell)] for side in pair)
    free = not any(BUDGET in parse_settings(side.split()) for side in pair)
    compared = [
        (one, other)
        for one in ones
        for other in others
        if one.protocol == other.protocol and (not free or one.budget == other.budget)
    ]
    if len({(one.protocol, one.budget, other.budget) for one, other in compared}) < len(compared):
        named = f"{pair[0]!r} and {pair[1]!r}"
        raise SettingError(f"pairs and changes: {named} mean several cells of one budget; name more settings")
    return compared


def is_meant(side: str, cell: ProtocolCell) -> bool:
    """Return whether one side of a pair means a cell."""
    asked = UNNAMED | parse_settings(side.split())
    usual = [f"{name}={value}" for name, value in UNNAMED.items() if name not in parse_settings(cell.overrides)]
    return {f"{name}={value}" for name, value in asked.items()} <= {*cell.overrides, *usual}


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Return name -> value of settings such as `method=snapkv`."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
