"""Compare cells of published runs: those that conf/measured.yaml names, and those that differ in settings alone.

A comparison is the paired difference of two cells on the samples of their protocol (kvbench.analysis.paired), with its
95 % interval. Its sign holds jointly with those of its family (kvbench.analysis.joint_signs): all planned comparisons
of the part (kvbench.config.planned_pairs), as `kvbench dev measured PART --power` counts them, all named changes of the
part, or all variants of a protocol.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kvbench.analysis.byte_classes import split_column
from kvbench.analysis.joint_signs import sign_changes
from kvbench.analysis.paired import compare_averages
from kvbench.analysis.score_matrix import MatrixCell, ScoreBlock, list_cells
from kvbench.config.catalogue import list_presets
from kvbench.config.planned_pairs import BUDGET, ProtocolCell, list_compared
from kvbench.store.runs import CACHE_GROUPS, StoredRun

RunPair = tuple[StoredRun, StoredRun, ScoreBlock]  # two runs, and the block of both


@dataclass(frozen=True)
class CellComparison:
    """A comparison of two cells.

    Attributes:
        one: Hash of the run of the first cell; of a planned comparison, the one that the pair names first.
        other: Hash of the second run.
        change: Difference of their scores, other - one, in points, and the ends of its 95 % interval.
        sign: -1, 0 or 1: whether the difference is below or above 0, jointly for all comparisons of its family.
        words: What the second cell changes in the first one, if conf/measured.yaml says it.
    """

    one: str
    other: str
    change: tuple[float, float | None, float | None]
    sign: int
    words: str = ""


def compare_planned(pairs: Sequence[tuple[str, str]], blocks: Sequence[ScoreBlock]) -> list[CellComparison]:
    """Return the planned comparisons of a part that its runs allow, in the order of the pairs and blocks.

    Args:
        pairs: The planned pairs. Those whose cells were not measured are left out.
        blocks: The blocks of the part.

    Raises:
        SettingError: A pair means several cells of one budget.
    """
    return compare_cells([pair for each in find_pairs(pairs, blocks, {}) for pair in each])


def compare_changes(
    changes: Mapping[str, Mapping[str, str]], blocks: Sequence[ScoreBlock], files: Mapping[str, str]
) -> list[CellComparison]:
    """Return the comparisons of cells with those that change something in them, as conf/measured.yaml names them.

    Args:
        changes: Cell -> what another cell changes in it, in words -> the other cell.
        blocks: The blocks of the part.
        files: `content_hash` of a file -> its name.

    Raises:
        SettingError: A cell of `changes` means several cells of one budget.
    """
    named = [(words, (cell, other)) for cell, others in changes.items() for words, other in others.items()]
    found = find_pairs([pair for _, pair in named], blocks, files)
    told = [words for (words, _), pairs in zip(named, found, strict=True) for _ in pairs]
    compared = compare_cells([pair for pairs in found for pair in pairs])
    return [replace(each, words=words) for each, words in zip(compared, told, strict=True)]


def find_pairs(
    pairs: Sequence[tuple[str, str]], blocks: Sequence[ScoreBlock], files: Mapping[str, str]
) -> list[list[RunPair]]:
    """Return the runs that each pair of conf/measured.yaml compares, with the block of both.

    Raises:
        SettingError: A pair means several cells of one budget.
    """
    if not pairs:
        return []
    runs = {cell.run.hash: (cell.run, block) for block, _, cell in list_cells(blocks) if not cell.run.full}
    places = {id(block): str(place) for place, block in enumerate(blocks)}
    cells = [make_cell(run, places[id(block)], files) for run, block in runs.values()]
    return [
        [(runs[one.name][0], runs[other.name][0], runs[one.name][1]) for one, other in list_compared(pair, cells)]
        for pair in pairs
    ]


def compare_variants(blocks: Sequence[ScoreBlock]) -> list[CellComparison]:
    """Return the comparisons of all cells that differ in presets, settings or files alone and hold similar bytes.

    The signs of a block hold together. Of each pair, the second cell scores at least as much as the first.
    """
    compared = []
    for block in blocks:
        groups: dict[tuple[str, ...], list[MatrixCell]] = {}
        for _, _, cell in list_cells([block]):
            if not cell.run.full:
                names = (str(cell.run.value[group]["name"]) for group in CACHE_GROUPS)
                groups.setdefault((*names, cell.run.budget_name), []).append(cell)
        alike = [
            sorted(some, key=lambda cell: cell.score.value)
            for cells in groups.values()
            for _, some in split_column(cells)
        ]
        pairs = [(one.run, other.run, block) for cells in alike for one, other in combinations(cells, 2)]
        compared += compare_cells(pairs)
    return compared


def compare_cells(pairs: Sequence[RunPair]) -> list[CellComparison]:
    """Return the comparisons of a family: pairs of runs with the block of both."""
    known = [(block.paired.pair(one, other), list(block.paired.weights.values())) for one, other, block in pairs]
    return [
        CellComparison(one.hash, other.hash, (change.difference, change.low, change.high), sign)
        for (one, other, _), change, sign in zip(pairs, compare_averages(known), sign_changes(known), strict=True)
    ]


def make_cell(run: StoredRun, protocol: str, files: Mapping[str, str]) -> ProtocolCell:
    """Return a run with its settings as the command line has them, but files by their names.

    Args:
        run: The run.
        protocol: A text that is the same for runs that can be compared.
        files: `content_hash` of a file -> its name.
    """
    settings = [f"{group}={run.value[group]['name']}" for group in CACHE_GROUPS]
    values = {name: spell(value) for name, value in run.settings.items() if name.startswith(CACHE_GROUPS)}
    settings += [f"{name}={files.get(value, value)}" for name, value in values.items()]
    settings += [f"{group}.preset={name}" for group in CACHE_GROUPS for name in list_presets(group, run.value[group])]
    return ProtocolCell(protocol, (*settings, f"{BUDGET}={run.budget_name}"), run.budget_name, run.hash)


def spell(value: object) -> str:
    """Return the value of a setting as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
