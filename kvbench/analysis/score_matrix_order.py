"""Order the matrix of scores: sort its rows, gather its blocks and rows under headings, and separate rows by bytes.

Order never changes a number or a mark. Blocks are made by protocol, so that only runs which can be compared share one.
A setting of the protocol, such as the model, therefore gathers whole blocks. A setting in which runs of a block may
differ, such as the allocator, gathers the rows inside each block. Nothing is averaged over runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from kvbench.analysis.run_labels import HASHED_SETTINGS, format_setting
from kvbench.analysis.score_matrix import MatrixCell, ScoreBlock, list_cells
from kvbench.analysis.score_matrix_columns import COLUMNS
from kvbench.store.runs import NAMED_GROUPS, UNSHARED_SETTINGS, StoredRun
from kvbench.validation import SettingError, escape, require_choice

METHOD = "method"
BY_BYTES = "cells by their bytes"  # title of a block of cells that are compared by their bytes, and of its column


def sort_rows(blocks: Sequence[ScoreBlock], by: str) -> list[ScoreBlock]:
    """Sort the rows of each block, the best first. Rows without a number come last.

    Args:
        blocks: The blocks.
        by: "method" for the rows' labels; a budget as on the command line, such as "0.05" or "64", for the scores at
            it; or "column@budget" for another column of one number, such as "bytes_held@0.05".

    Raises:
        SettingError: No run has this budget, or there is no such column.
    """
    if by == METHOD:
        return [replace(block, rows=dict(sorted(block.rows.items(), key=itemgetter(0)))) for block in blocks]
    name, _, budget = by.rpartition("@")
    sortable = [column.name for column in COLUMNS.values() if len(column.numbers) == 1]
    known = sorted(
        {cell.run.value["budget"] for block in blocks for row in block.rows.values() for cell in row.values()} - {None}
    )
    if "@" in by:
        require_choice(f"--sort={by}: column", name, sortable)
    try:
        wanted = float(budget)
    except ValueError:
        wanted = math.nan
    if wanted not in map(float, known):
        budgets = ", ".join(map(str, known)) or "no budget, because only the full cache is shown"
        raise SettingError(f"--sort={by}: choose {METHOD}, a budget ({budgets}), or a column at a budget (n@0.1)")
    column = COLUMNS[name or "score"]
    [read] = column.numbers.values()

    def rank(cells: Mapping[str, MatrixCell]) -> float:
        numbers = [read(cell) for cell in cells.values() if cell.run.value["budget"] == wanted]
        given = [number for number in numbers if number is not None]
        return math.inf if not given else given[0] if column.less else -given[0]

    return [order_rows(block, rank) for block in blocks]


def order_rows(block: ScoreBlock, rank: Callable[[Mapping[str, MatrixCell]], Any]) -> ScoreBlock:
    """Return the block with its rows sorted by a function of their cells. Rows of one rank keep their order."""
    return replace(block, rows=dict(sorted(block.rows.items(), key=lambda row: rank(row[1]))))


def group_blocks(blocks: Sequence[ScoreBlock], names: Sequence[str]) -> list[ScoreBlock]:
    """Gather blocks and rows under headings, one for each value of some settings. Inside, the order stays.

    Args:
        blocks: The blocks.
        names: The settings, as in `kvbench.store.runs.filter_runs`. The first one is the outermost.

    Raises:
        SettingError: No run has such a setting, a name is given twice, or the setting decides how many rows stay, which
            the columns show.
    """
    runs = [cell.run for _, _, cell in list_cells(blocks)]
    offered = {name for run in runs for name in run.settings} - {run.budget_setting for run in runs}
    for name in names if blocks else ():
        require_choice("--group-by", name, [*NAMED_GROUPS, *sorted(offered)])
    if len(set(names)) < len(names):
        raise SettingError(f"--group-by={','.join(names)}: give each setting once")
    keys = {name: f"{name}.name" if name in NAMED_GROUPS else name for name in names}
    of_rows = [name for name in names if name.split(".")[0] in UNSHARED_SETTINGS]
    of_blocks = [name for name in names if name not in of_rows]

    def rank(run: StoredRun, levels: Iterable[str]) -> list[tuple[Any, ...]]:
        return [rank_value(run.settings.get(keys[name])) for name in levels]

    def describe(run: StoredRun, levels: Iterable[str]) -> str:
        return escape(" · ".join(f"{name} {describe_value(run, keys[name])}" for name in levels))

    gathered = []
    for block in sorted(blocks, key=lambda block: rank(block.full.run, of_blocks)):
        block = order_rows(block, lambda cells: rank(choose_any(cells), of_rows))
        gathered.append(
            replace(
                block,
                grouped_by=tuple(keys.values()),
                heading=describe(block.full.run, of_blocks),
                sections={label: describe(choose_any(cells), of_rows) for label, cells in block.rows.items()},
            )
        )
    return gathered


def separate_points(blocks: Iterable[ScoreBlock]) -> list[ScoreBlock]:
    """Return each block without the rows of `find_points`, and behind it one that has only these.

    The latter has a row for each cell and a single column. Its rows are sorted by bytes, the fewest first, below each
    heading. A block without such rows stays as it is.
    """
    separated = []
    for block in blocks:
        points = find_points(block)
        others = {label: cells for label, cells in block.rows.items() if label not in points}
        if others or not points:
            budgets = [budget for budget in block.budgets if any(budget in cells for cells in others.values())]
            separated.append(replace(block, rows=others, budgets=tuple(budgets) or block.budgets))
        if points:
            separated.append(gather_points(block, points))
    return separated


def gather_points(block: ScoreBlock, points: Mapping[str, Mapping[str, MatrixCell]]) -> ScoreBlock:
    """Return a block with a row for each cell of some rows and a single column, sorted by bytes below each heading."""
    headings = list(dict.fromkeys(block.sections.values()))

    def rank(entry: tuple[str, str, MatrixCell]) -> tuple[int, float]:
        _, label, cell = entry
        heading = headings.index(block.sections[label]) if label in block.sections else 0
        return heading, math.inf if cell.held is None else cell.held

    named = [
        (label if cell.run.value["budget"] == 1 else f"{label} · {budget}", label, cell)
        for label, cells in points.items()
        for budget, cell in cells.items()
    ]
    named.sort(key=rank)
    return replace(
        block,
        also=(*block.also, BY_BYTES),
        rows={name: {BY_BYTES: cell} for name, _, cell in named},
        budgets=(BY_BYTES,),
        sections={name: block.sections[label] for name, label, _ in named if label in block.sections},
        warnings=(),
    )


def find_points(block: ScoreBlock) -> dict[str, Mapping[str, MatrixCell]]:
    """Return the rows of a block whose budgets say little: all of their cells are points (`is_point`).

    A row stays if it is compared with one that stays, so that no class of similar bytes is divided.
    """
    points = {label: cells for label, cells in block.rows.items() if all(map(is_point, cells.values()))}
    while True:
        stay = {
            (budget, cell.alike)
            for label, cells in block.rows.items()
            if label not in points
            for budget, cell in cells.items()
            if cell.alike
        }
        divided = [
            label
            for label, cells in points.items()
            if any((budget, cell.alike) in stay for budget, cell in cells.items())
        ]
        if not divided:
            return points
        points = {label: cells for label, cells in points.items() if label not in divided}


def is_point(cell: MatrixCell) -> bool:
    """Return whether a codec, or the method itself, decides how many bytes a cell holds, rather than the budget.

    These are full caches with a codec, methods that decide themselves how many rows stay, and cells with a codec that
    no other one of their budget is like.
    """
    value = cell.run.value
    alone = value["codec"]["name"] != "raw" and not cell.alike
    return alone or value["method"]["name"] == "full" or cell.run.budget_setting != "budget"


def choose_any(cells: Mapping[str, MatrixCell]) -> StoredRun:
    """Return a run of a row. The others differ in their budget only."""
    return next(iter(cells.values())).run


def rank_value(value: object) -> tuple[Any, ...]:
    """Return a key that sorts the values of a setting: none, numbers, texts; a visible question before a hidden one."""
    if value is None:
        return (0,)
    return (1, value) if isinstance(value, int | float) else (2, value == "hidden", str(value))


def describe_value(run: StoredRun, name: str) -> str:
    """Return a short text for the value that a run has of a setting."""
    return format_setting(run.settings[name], name in HASHED_SETTINGS) if name in run.settings else "not set"
