"""Compare the cells of published runs whose comparison was planned (kvbench.config.planned_pairs).

A comparison is the paired difference of two cells on the samples of their protocol (kvbench.analysis.paired), with its
95 % interval. Its sign holds jointly with those of all planned comparisons of the part (kvbench.analysis.joint_signs),
as `kvbench dev measured PART --power` counts them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.analysis.joint_signs import sign_changes
from kvbench.analysis.paired import compare_averages
from kvbench.analysis.score_matrix import ScoreBlock, list_cells
from kvbench.config.catalogue import list_presets
from kvbench.config.planned_pairs import BUDGET, ProtocolCell, list_compared
from kvbench.store.runs import CACHE_GROUPS, StoredRun


@dataclass(frozen=True)
class PlannedComparison:
    """A planned comparison that was measured.

    Attributes:
        one: Hash of the run that the pair names first.
        other: Hash of the second run.
        change: Difference of their scores, other - one, in points, and the ends of its 95 % interval.
        sign: -1, 0 or 1: whether the difference is below or above 0, jointly for all planned comparisons of the part.
    """

    one: str
    other: str
    change: tuple[float, float | None, float | None]
    sign: int


def compare_planned(pairs: Sequence[tuple[str, str]], blocks: Sequence[ScoreBlock]) -> list[PlannedComparison]:
    """Return the planned comparisons of a part that its runs allow, in the order of the pairs and blocks.

    Args:
        pairs: The planned pairs. Those whose cells were not measured are left out.
        blocks: The blocks of the part.

    Raises:
        SettingError: A pair means several cells of one budget.
    """
    runs = {cell.run.hash: (cell.run, block) for block, _, cell in list_cells(blocks) if not cell.run.full}
    places = {id(block): str(place) for place, block in enumerate(blocks)}
    cells = [make_cell(run, places[id(block)]) for run, block in runs.values()]
    compared = [(one.name, other.name) for pair in pairs for one, other in list_compared(pair, cells)]
    known = []
    for one, other in compared:
        samples = runs[one][1].paired
        known.append((samples.pair(runs[one][0], runs[other][0]), list(samples.weights.values())))
    changes = compare_averages(known)
    return [
        PlannedComparison(one, other, (change.difference, change.low, change.high), sign)
        for (one, other), change, sign in zip(compared, changes, sign_changes(known), strict=True)
    ]


def make_cell(run: StoredRun, protocol: str) -> ProtocolCell:
    """Return a run with its settings as the command line has them.

    Args:
        run: The run.
        protocol: A text that is the same for runs that can be compared.
    """
    settings = [f"{group}={run.value[group]['name']}" for group in CACHE_GROUPS]
    settings += [f"{name}={spell(value)}" for name, value in run.settings.items() if name.startswith(CACHE_GROUPS)]
    settings += [f"{group}.preset={name}" for group in CACHE_GROUPS for name in list_presets(group, run.value[group])]
    return ProtocolCell(protocol, (*settings, f"{BUDGET}={run.budget_name}"), run.budget_name, run.hash)


def spell(value: object) -> str:
    """Return the value of a setting as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
