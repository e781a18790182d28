"""Compute what cells score at each question of a context (turn), and how that changes from the first to the last one.

Subtasks of a task with several turns end with `/turnN`. The loss at a turn is the paired difference from the full cache
over the subtasks of this turn. The change is the loss at the last turn less that at the first, paired by context, so
that questions which the full cache answers worse do not count.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.analysis.intervals import BOUND
from kvbench.analysis.joint_signs import sign_changes
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_averages
from kvbench.analysis.score_matrix import MatrixCell, ScoreBlock, list_cells

TURN = re.compile(r"(.+)/turn(\d+)")
Loss = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class TurnScores:
    """What a cell scores at each turn.

    Attributes:
        run: Hash of its run.
        losses: Its difference from the full cache at each turn, in points, and the ends of its 95 % interval.
        change: The difference at the last turn less that at the first one, likewise.
        sign: -1, 0 or 1: whether the change is below or above 0, jointly for all cells of the block.
    """

    run: str
    losses: Sequence[Loss]
    change: Loss
    sign: int


def compare_turns(blocks: Sequence[ScoreBlock]) -> list[TurnScores]:
    """Return the scores by turn of each cell but the full cache, for blocks whose subtasks all have several turns."""
    found: list[TurnScores] = []
    for block in blocks:
        turns = list_turns(block)
        cells = [cell for _, _, cell in list_cells([block]) if not cell.run.full]
        if len(turns) < 2 or not cells:
            continue
        by_turn = [compare_averages([(pair_turn(block, cell, subtasks), None) for cell in cells]) for subtasks in turns]
        pairs = [(pair_changes(block, cell, turns[0], turns[-1]), None) for cell in cells]
        signs = sign_changes(pairs)
        for cell, change, sign, *losses in zip(cells, compare_averages(pairs), signs, *by_turn, strict=True):
            found.append(TurnScores(cell.run.hash, [read(loss) for loss in losses], read(change), sign))
    return found


def list_turns(block: ScoreBlock) -> list[list[str]]:
    """Return the subtasks of each turn in one order; empty if a subtask has no turn, or not each has all."""
    matches = [TURN.fullmatch(name) for name in block.paired.places]
    known = [(match[1], int(match[2])) for match in matches if match]
    names, turns = sorted({name for name, _ in known}), sorted({turn for _, turn in known})
    if len(known) < len(matches) or len(known) < len(names) * len(turns):
        return []
    return [[f"{name}/turn{turn}" for name in names] for turn in turns]


def pair_turn(block: ScoreBlock, cell: MatrixCell, subtasks: Sequence[str]) -> list[PairedScores]:
    """Return the scores of a turn's subtasks with the full cache and in a cell."""
    pairs = dict(zip(block.paired.places, block.paired.pair(block.full.run, cell.run), strict=True))
    return [pairs[name] for name in subtasks]


def pair_changes(block: ScoreBlock, cell: MatrixCell, first: Sequence[str], last: Sequence[str]) -> list[PairedScores]:
    """Return the losses of contexts at their first turn in the place of the full cache's scores, and at their last one.

    Losses are counted from -100 points on, because a score is not below 0.
    """
    changes = []
    for one, other in zip(pair_turn(block, cell, first), pair_turn(block, cell, last), strict=True):
        losses = [
            {
                group: BOUND + method - full
                for full, method, group in zip(pair.full, pair.method, pair.groups, strict=True)
            }
            for pair in (one, other)
        ]
        groups = [group for group in losses[0] if group in losses[1]]
        before, after = ([loss[group] for group in groups] for loss in losses)
        changes.append(PairedScores(before, after, groups, 2 * BOUND))
    return changes


def lose(full: float, method: float) -> float:
    """Return the difference from the full cache, from 0 on."""
    return BOUND + method - full


def read(change: PairedDifference) -> Loss:
    """Return a difference and the ends of its interval."""
    return change.difference, change.low, change.high
