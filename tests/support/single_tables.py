"""One closing table and one subtask, where the program computes many at once."""

from collections.abc import Sequence
from typing import Any

from kvbench.analysis.closing_table import ClosingTable, draft_table, finish_tables
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_subtasks


def build_closing_table(*given: Any) -> ClosingTable:
    """The closing table of what `draft_table` takes."""
    return finish_tables([draft_table(*given)])[0]


def compare_scores(full: Sequence[float], method: Sequence[float], groups: Sequence[str]) -> PairedDifference:
    """The paired difference of one subtask. The three sequences have one entry per sample."""
    return compare_subtasks([PairedScores(full, method, groups)])
