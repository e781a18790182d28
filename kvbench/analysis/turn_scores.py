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
from kvbench.analysis.score_matrix import ScoreBlock, list_cells

TURN = re.compile(r"(.+)/turn(\d+)")
Change = tuple[float, float | None, float | None]  # a difference in points, and the ends of its 95 % interval


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
    losses: Sequence[Change]
    change: Change
    sign: int


def compare_turns(blocks: Sequence[ScoreBlock]) -> list[TurnScores]:
    """Return the scores by turn of each cell but the full cache, for blocks whose subtasks all have several turns."""
    found: list[TurnScores] = []
    for block in blocks:
        turns = list_turns(block)
        runs = [cell.run for _, _, cell in list_cells([block]) if not cell.run.full]
        if len(turns) < 2 or not runs:
            continue
        paired = [dict(zip(block.paired.places, block.paired.pair(block.full.run, run), strict=True)) for run in runs]
        by_turn = [compare_averages([([pairs[name] for name in turn], None) for pairs in paired]) for turn in turns]
        ends = list(zip(turns[0], turns[-1], strict=True))
        changes = [([pair_losses(pairs[first], pairs[last]) for first, last in ends], None) for pairs in paired]
        compared = zip(runs, compare_averages(changes), sign_changes(changes), *by_turn, strict=True)
        for run, change, sign, *losses in compared:
            found.append(TurnScores(run.hash, [read(loss) for loss in losses], read(change), sign))
    return found


def list_turns(block: ScoreBlock) -> list[list[str]]:
    """Return the subtasks of each turn in one order; empty if a subtask has no turn, or not each has all."""
    matches = [TURN.fullmatch(name) for name in block.paired.places]
    known = [(match[1], int(match[2])) for match in matches if match]
    names, turns = sorted({name for name, _ in known}), sorted({turn for _, turn in known})
    if len(known) < len(matches) or len(known) < len(names) * len(turns):
        return []
    return [[f"{name}/turn{turn}" for name in names] for turn in turns]


def pair_losses(first: PairedScores, last: PairedScores) -> PairedScores:
    """Return the losses of contexts at their first turn in the place of the full cache's scores, and at their last one.

    Losses are counted from -100 points on, because a score is not below 0.
    """
    before, after = (
        {group: BOUND + method - full for full, method, group in zip(turn.full, turn.method, turn.groups, strict=True)}
        for turn in (first, last)
    )
    groups = [group for group in before if group in after]
    return PairedScores([before[group] for group in groups], [after[group] for group in groups], groups, 2 * BOUND)


def read(change: PairedDifference) -> Change:
    """Return a difference and the ends of its interval."""
    return change.difference, change.low, change.high
