"""Compare many runs in one matrix: a row for each method, a column for each budget, a block for each protocol.

A block holds the runs that can be compared (kvbench.store.audit.comparison_key): the same model, task, data, question,
sampling, seed and kind of machine. All numbers of a block come from the same samples: those that all its runs and the
full cache answered. A sweep that is not finished therefore shows what its runs have in common. A run that would take a
whole subtask from the others is left out and named.

Of each run the matrix shows the mean score and its paired difference from the full cache with a 95 % interval
(kvbench.analysis.paired), the shares of bytes held, rows kept and rows attended, and the share of answers that ended at
the length limit; kvbench.analysis.score_matrix_columns lists all that it can show. Means over subtasks are those of
`kvbench.analysis.budget_series.choose_weights`.

The runs of a column that hold similar bytes are a class (kvbench.analysis.byte_classes), and only these are compared: a
budget does not say what a codec or a method that reads few rows holds. The best of a class is the run with the highest
mean score. Chance may have put it there, so a class also marks the runs that cannot be told from the best: a set that
contains the truly best run with a confidence of 95 %. A run that is alone in its class has no mark. Run i of k is left
out of the set only if some run j scores more and the one-sided interval of the paired difference j - i excludes 0 at
the level 1 - 0.05 / (k - 1). If the truly best run is left out, at least one of its k - 1 comparisons was wrong, and by
Bonferroni's inequality that happens with a chance of at most 5 %. In a class of more than 100 runs, each is compared
only with the best of those that score more (COMPARED, FEWEST_RIVALS). That leaves fewer runs out, so the set still
contains the truly best one. Sources: Gupta 1965, "On Some Multiple Decision (Selection and Ranking) Rules"; Hsu 1984,
"Constrained Simultaneous Confidence Intervals for Multiple Comparisons with the Best".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
from scipy.special import ndtri

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.budget_series import (
    SHARES,
    CurveOptions,
    choose_weights,
    find_obstacle,
)
from kvbench.analysis.byte_classes import split_column
from kvbench.analysis.closing_table import average_known, divide, is_embedded, reduce_known, warn_of_data
from kvbench.analysis.intervals import TOLERANCE, Mean, compute_means
from kvbench.analysis.joint_signs import sign_interval
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_averages
from kvbench.analysis.pairwise import Columns
from kvbench.analysis.run_labels import (
    describe_protocol,
    format_budget,
    group_series,
    label_cache,
    name_panel,
    rank_budget,
)
from kvbench.store.audit import comparison_key
from kvbench.store.runs import StoredRun, find_baseline, name_some
from kvbench.validation import SettingError

FULL = "full cache"  # label of its row
KEPT = ("rows_held", "rows_seen")  # fields of a record whose ratio is the share of rows kept
FILES, BESIDE = ("weights_bytes",), ("metadata_bytes", "state_bytes")  # bytes of a record that are not those of rows
POWER = 0.8  # chance that samples tell two runs apart
ERROR = 0.05  # chance that the set of possibly best runs lacks the truly best one
COMPARED = 10_000  # comparisons that mark the best of a class, which otherwise grow with the square of its runs
FEWEST_RIVALS = 5  # rivals that each run is compared with, however many runs a class has
Record = dict[str, Any]
SampleKey = tuple[str, str, tuple[str, ...], tuple[tuple[str, float], ...]]  # run, full cache, samples, weights
RunNumbers = tuple[Mean, PairedDifference]  # mean score, difference from the full cache


@dataclass(frozen=True)
class MatrixCell:
    """One run in the matrix.

    Attributes:
        run: The run.
        score: Its mean score in points.
        difference: Its paired difference from the full cache in points; None for the full cache itself.
        held: Share of the full cache's bytes that it holds, in [0, 1]. None if the records do not say.
        loaded: The same with the weights that its method and codec read from files. None likewise.
        whole: The same with what it keeps beside the rows, such as positions, codes and bounds, too. None likewise.
        kept: Share of the rows read that are in the cache when the answer begins, in [0, 1], None likewise.
        attended: Share of the full cache's rows that a decoded token attends to, in [0, 1], None likewise.
        at_limit: Share of the answers that ended at the length limit, in [0, 1].
        alike: The class of its column in which it is compared, such as "20.0 % of the bytes". Empty if it is alone.
        best: Whether no run of the class has a higher score.
        tied: Whether the run may be the truly best of its class, as this module's docstring says. True for the best.
    """

    run: StoredRun
    score: Mean
    difference: PairedDifference | None
    held: float | None
    loaded: float | None
    whole: float | None
    kept: float | None
    attended: float | None
    at_limit: float
    alike: str = ""
    best: bool = False
    tied: bool = False


@dataclass(frozen=True)
class ScoreBlock:
    """The matrix of one protocol.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        question: "visible" or "hidden".
        also: Other settings that distinguish the protocol, such as "length 2048".
        average: Name of the average over subtasks.
        budgets: The columns, in order.
        full: The full cache.
        rows: Label of a method -> budget -> its cell. A budget without a run is missing.
        paired: The samples that the numbers come from.
        samples: Number of samples that the numbers come from.
        total: Number of samples that any run has.
        planned: Number of samples that the runs have when they are finished, as far as they say.
        failed: Number of samples that are left out because an answer failed in some run.
        unfinished: Names of runs that lack records, each with the number that it has, the fewest first.
        left_out: Names of runs that are not shown, each with the reason.
        warnings: Why the scores are no evidence about the benchmark (`kvbench.analysis.closing_table.warn_of_data`).
        grouped_by: Names of the settings by which blocks and rows are gathered (kvbench.analysis.score_matrix_order).
        heading: Heading above the block, with the values of these settings.
        sections: Label of a row -> heading above it and those that have the same one. Empty if rows are not gathered.
    """

    model: str
    task: str
    question: str
    also: tuple[str, ...]
    average: str
    budgets: tuple[str, ...]
    full: MatrixCell
    rows: Mapping[str, Mapping[str, MatrixCell]]
    paired: "Samples"
    samples: int
    total: int
    planned: int
    failed: int
    unfinished: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    grouped_by: tuple[str, ...] = ()
    heading: str = ""
    sections: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Model, task and question, with the settings that distinguish the protocol."""
        return " · ".join([self.model, self.task, *self.also, f"question {self.question}"])


def build_blocks(
    runs: Sequence[StoredRun], stored: Sequence[StoredRun], average: str | None = None, wanted: str | None = None
) -> tuple[list[ScoreBlock], list[str]]:
    """Build the blocks of the runs.

    Args:
        runs: The runs to compare, finished or not.
        stored: The runs among which the full cache's are looked for.
        average: One of the task's averages, "each" or "solvable"; None for the task's first.
        wanted: Hash of the full cache's run, if there are several with different answers.

    Returns:
        The blocks, sorted by model, task and question, visible before hidden; and a line for each protocol or run that
        cannot be shown.
    """
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(comparison_key(run.value), []).append(run)
    names = {key: name_panel(group[0]) for key, group in groups.items()}
    blocks, refused = [], []
    for key in sorted(groups, key=lambda key: (names[key][:2], names[key][2] != "visible", key)):
        beside = [groups[other][0] for other in groups if names[other] == names[key]]
        try:
            blocks.append(build_block(groups[key], stored, describe_protocol(groups[key][0], beside), average, wanted))
        except SettingError as error:
            refused.append(f"{' · '.join(names[key])}: {error}")
    return blocks, refused


def build_block(
    runs: Sequence[StoredRun],
    stored: Sequence[StoredRun],
    also: Sequence[str],
    average: str | None = None,
    wanted: str | None = None,
    known: Mapping[SampleKey, RunNumbers] | None = None,
    shared: "SharedSamples | None" = None,
) -> ScoreBlock:
    """Build the block of runs that can be compared.

    Args:
        runs: The runs. The full cache's need not be among them.
        stored: The runs among which the full cache's is looked for.
        also: Settings that distinguish the protocol from others with the same model, task and question.
        average: As in `build_blocks`.
        wanted: Likewise.
        known: Numbers of runs that were computed before (`make_sample_key`). They are not computed again.
        shared: The samples of the runs, if they were chosen before (`choose_shared_samples`).

    Raises:
        SettingError: As in `choose_shared_samples`.
    """
    shared = shared or choose_shared_samples(runs, stored, CurveOptions(average=average, full=wanted))
    full, begun, weights = shared.full, shared.compared, shared.weights
    every = [uid for uid, subtask in shared.every.items() if subtask in weights]
    uids = [uid for uid in every if uid in shared.answered]
    sample = Samples.of(full, uids, weights)
    whole, *made = sample.make_cells([full, *begun], known or {})
    cells = {cell.run.hash: cell for cell in made}
    columns = list(dict.fromkeys(format_budget(run) for run in sorted(begun, key=rank_budget)))
    for budget in columns:
        marked = sample.mark_alike([cell for cell in made if format_budget(cell.run) == budget])
        cells |= {cell.run.hash: cell for cell in marked}
    rows: dict[str, dict[str, MatrixCell]] = {}
    for label, _, series in group_series(begun):
        unique = label if label not in rows else f"{label} · {series[0].hash[:8]}"
        rows[unique] = {format_budget(run): cells[run.hash] for run in sorted(series, key=rank_budget)}
    model, task, question = name_panel(full)
    short = sorted((run for run in (full, *begun) if not run.finished), key=lambda run: len(run.records))
    return ScoreBlock(
        model=model,
        task=task,
        question=question,
        also=tuple(also),
        average=shared.average,
        budgets=tuple(columns) or (format_budget(full),),
        full=whole,
        rows=rows,
        paired=sample,
        samples=len(uids),
        total=len(every),
        planned=max(len(every), *(run.planned for run in (full, *begun))),
        failed=sum(uid in shared.failed for uid in every),
        warnings=tuple(warn_of_data(full.records, is_embedded(full.value))),
        unfinished=tuple(f"{name_run(run)} ({len(run.records)} of {run.planned})" for run in short),
        left_out=tuple(f"{name_run(run)}: {reason}" for run, reason in shared.left_out),
    )


@dataclass(frozen=True)
class SharedSamples:
    """The samples that runs and their full cache answered, so that all numbers of these runs come from the same ones.

    Attributes:
        full: The full cache's run.
        compared: The runs that can be compared.
        left_out: Each other run, and the reason.
        average: Name of the average over subtasks.
        weights: Weights of its subtasks. Each has an answered sample.
        every: Each sample that any of the compared runs or the full cache has, sorted, and its subtask.
        answered: The samples of `every` that all of them answered.
        failed: The samples of `every` that all of them have and whose answer failed in some run.
    """

    full: StoredRun
    compared: Sequence[StoredRun]
    left_out: Sequence[tuple[StoredRun, str]]
    average: str
    weights: Mapping[str, float]
    every: Mapping[str, str]
    answered: frozenset[str]
    failed: frozenset[str]


def choose_shared_samples(
    runs: Sequence[StoredRun], stored: Sequence[StoredRun], choice: CurveOptions
) -> SharedSamples:
    """Choose the samples on which runs can be compared.

    A run that would take a whole subtask, or all samples, from the others is left out and named: one that has not
    answered a sample of it yet, whose answers all failed, or whose prompts are other ones.

    Args:
        runs: The runs. The full cache's need not be among them.
        stored: The runs among which the full cache's is looked for.
        choice: The average or the subtask that must have answered samples.

    Raises:
        SettingError: There is no run of the full cache, no sample that all runs answered, or no such average.
    """
    full = find_baseline(runs[0], stored, choice.full)
    answered = {
        uid
        for uid, record in full.records.items()
        if find_failure(record) is None and choice.subtask in (None, record["subtask"])
    }
    if not answered:
        raise SettingError("the full cache answered no sample")
    name, weights = choose_weights(runs[0], {str(full.records[uid]["subtask"]) for uid in answered}, choice)
    begun, left_out = [], []
    for run in (run for run in runs if not run.full):
        reason = find_obstacle(full, run, answered, weights)
        if reason is None:
            begun.append(run)
        else:
            left_out.append((run, reason))
    records = [full.records, *(run.records for run in begun)]
    every = {uid: str(record["subtask"]) for run_records in records for uid, record in run_records.items()}
    common = [uid for uid in every if all(uid in run_records for run_records in records)]
    failed = {uid for uid in common if any(find_failure(run_records[uid]) for run_records in records)}
    shared = frozenset(common) - failed
    if lost := sorted(set(weights) - {every[uid] for uid in shared}):
        raise SettingError(f"there is no sample of {name_some(lost)} that all runs and the full cache answered")
    ordered = dict(sorted(every.items()))
    return SharedSamples(full, begun, left_out, name, weights, ordered, shared, frozenset(failed))


def make_sample_key(run: StoredRun, full: StoredRun, uids: Iterable[str], weights: Mapping[str, float]) -> SampleKey:
    """Return what the mean score of a run and its difference from the full cache depend on."""
    return run.hash, full.hash, tuple(uids), tuple(sorted(weights.items()))


def name_run(run: StoredRun) -> str:
    """Return the method and the budget of a run."""
    return FULL if run.full else f"{label_cache(run.value)} {format_budget(run)}"


@dataclass(frozen=True)
class Samples:
    """The samples of a block.

    Attributes:
        full: The full cache's run.
        uids: The samples.
        places: Subtask -> its samples.
        weights: Subtask -> its weight in the average.
    """

    full: StoredRun
    uids: Sequence[str]
    places: Mapping[str, Sequence[str]]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, full: StoredRun, uids: Sequence[str], weights: Mapping[str, float]) -> "Samples":
        """Group samples by subtask."""
        places: dict[str, list[str]] = {name: [] for name in weights}
        for uid in uids:
            places[full.records[uid]["subtask"]].append(uid)
        return cls(full, uids, places, weights)

    def make_cells(self, runs: Sequence[StoredRun], known: Mapping[SampleKey, RunNumbers]) -> list[MatrixCell]:
        """Compute the numbers of runs, except the scores and differences that are known (`build_block`)."""
        keys = {run.hash: make_sample_key(run, self.full, self.uids, self.weights) for run in runs}
        numbers = {name: known[key] for name, key in keys.items() if key in known}
        weights = list(self.weights.values())
        missing = [run for run in runs if run.hash not in numbers]
        scores = [self.pair(self.full, run) for run in missing]
        means = compute_means([([subtask.method_values for subtask in paired], weights) for paired in scores])
        changes = compare_averages([(paired, weights) for paired in scores])
        numbers |= {run.hash: both for run, both in zip(missing, zip(means, changes, strict=True), strict=True)}
        cells = []
        for run in runs:
            score, change = numbers[run.hash]
            held, kept, attended = (
                self.average(run, partial(read_share, share)) for share in (SHARES["bytes"], KEPT, SHARES["rows"])
            )
            loaded, whole = (self.average(run, partial(read_more, more)) for more in (FILES, FILES + BESIDE))
            at_limit = self.average(run, lambda record: float(record["stop"] == "length"))
            assert at_limit is not None  # every record says how its answer stopped
            difference = None if run.hash == self.full.hash else change
            cells.append(MatrixCell(run, score, difference, held, loaded, whole, kept, attended, at_limit))
        return cells

    def pair(self, one: StoredRun, other: StoredRun) -> list[PairedScores]:
        """Return the scores of two runs by subtask. The first stands where the full cache does."""
        return [
            PairedScores(
                [float(one.records[uid]["score"]) for uid in uids],
                [float(other.records[uid]["score"]) for uid in uids],
                [one.records[uid]["group"] or uid for uid in uids],
            )
            for uids in self.places.values()
        ]

    def find_better(self, cells: Sequence[MatrixCell]) -> list[list[int]]:
        """Return for each cell of a column the places of those that score more for certain.

        All of them together are right with a confidence of 95 %: every pair of cells is compared, and the level of the
        intervals counts how many pairs there are (Bonferroni). Most pairs are clear without their interval
        (kvbench.analysis.pairwise).
        """
        tail = 1 - ERROR / 2 / max(len(cells) * (len(cells) - 1) // 2, 1)
        weights = list(self.weights.values())
        better: list[list[int]] = [[] for _ in cells]
        for one, other, signs, known in self._make_columns(cells).sign_pairs(tail):
            asked = list(zip(one[~known], other[~known], strict=True))
            changes = compare_averages([(self.pair(cells[i].run, cells[j].run), weights) for i, j in asked], tail)
            signs[~known] = [sign_interval(change.low, change.high) for change in changes]
            lows, highs = np.where(signs > 0, (one, other), (other, one))[:, signs != 0]
            for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
                better[low].append(high)
        return better

    def _make_columns(self, cells: Sequence[MatrixCell]) -> Columns:
        """Return the scores of cells as columns, whose pairs are compared at once."""
        records = [cell.run.records for cell in cells]
        scores = [
            np.array([[row[uid]["score"] for uid in uids] for row in records], float) for uids in self.places.values()
        ]
        groups = [[self.full.records[uid]["group"] or uid for uid in uids] for uids in self.places.values()]
        return Columns(scores, groups, list(self.weights.values()))

    def average(self, run: StoredRun, read: Callable[[Record], float | None]) -> float | None:
        """Return the weighted mean over subtasks of a number that records have, or None if no record has it."""
        means = [reduce_known(fmean, (read(run.records[uid]) for uid in uids)) for uids in self.places.values()]
        return average_known(means, list(self.weights.values()))

    def mark_alike(self, cells: Sequence[MatrixCell]) -> list[MatrixCell]:
        """Mark the best of each class of a column, and those that cannot be told from it, in the order of `cells`."""
        marked = {cell.run.hash: replace(cell, alike="", best=False, tied=False) for cell in cells}
        for name, alike in split_column(cells):
            for cell in self.mark_best(alike) if len(alike) > 1 else ():
                marked[cell.run.hash] = replace(cell, alike=name)
        return [marked[cell.run.hash] for cell in cells]

    def mark_best(self, cells: Sequence[MatrixCell]) -> list[MatrixCell]:
        """Mark the best of some cells and those that cannot be told from it, as this module's docstring says."""
        most = max((cell.score.value for cell in cells), default=0.0)
        level = 1 - ERROR / max(len(cells) - 1, 1)
        ordered = sorted(cells, key=lambda cell: -cell.score.value)  # the best ones decide most comparisons
        compared = max(FEWEST_RIVALS, COMPARED // max(len(cells), 1))
        rivals = self._make_columns(ordered).list_rivals(level, compared) if cells else []
        beaten: set[str] = set()
        for rank in range(max(map(len, rivals), default=0)):
            asked = [
                (cell, ordered[cell_rivals[rank]])
                for cell, cell_rivals in zip(ordered, rivals, strict=True)
                if rank < len(cell_rivals) and cell.run.hash not in beaten
            ]
            weights = list(self.weights.values())
            changes = compare_averages([(self.pair(cell.run, rival.run), weights) for cell, rival in asked], level)
            beaten |= {
                cell.run.hash
                for (cell, _), change in zip(asked, changes, strict=True)
                if change.low is not None and change.low > TOLERANCE
            }
        return [
            replace(cell, best=cell.score.value >= most - TOLERANCE, tied=cell.run.hash not in beaten) for cell in cells
        ]

    def count_needed(self, cells: Sequence[MatrixCell]) -> dict[str, int]:
        """Estimate how many samples are enough to tell each cell of a column from the best one that it is tied with.

        The difference is taken to stay as it is, and its interval, at the level of the class's marks, to narrow with
        the square root of the number of samples. The interval then excludes 0 with a chance of POWER or more: intervals
        of few samples, which allow for what was not seen, narrow faster. A cell without a difference has no number.

        Args:
            cells: The cells of a column, marked (`mark_alike`).

        Returns:
            Hash of a run -> number of samples.
        """
        needed: dict[str, int] = {}
        weights = list(self.weights.values())
        for best in {cell.alike: cell for cell in cells if cell.best}.values():
            alike = [cell for cell in cells if cell.alike == best.alike]
            tail = 1 - ERROR / max(len(alike) - 1, 1)
            tied = [cell for cell in alike if cell.tied and best.score.value - cell.score.value > TOLERANCE]
            changes = compare_averages([(self.pair(cell.run, best.run), weights) for cell in tied], tail)
            more = 1 + float(ndtri(POWER) / ndtri(tail))
            needed |= {
                cell.run.hash: ceil(change.samples * (more * (change.difference - change.low) / change.difference) ** 2)
                for cell, change in zip(tied, changes, strict=True)
                if change.low is not None
            }
        return needed


def read_share(names: tuple[str, str], record: Record) -> float | None:
    """Return the ratio of two numbers of a record, or None if one is unknown or the second is 0."""
    part, whole = names
    return divide(record.get(part), record.get(whole))


def read_more(more: Sequence[str], record: Record) -> float | None:
    """Return the share of the full cache's bytes that a record's rows and `more` take together, or None if unknown."""
    part, full = SHARES["bytes"]
    known = [size for size in map(record.get, (part, *more)) if size is not None]
    return None if len(known) <= len(more) else divide(sum(known), record.get(full))


def list_cells(blocks: Iterable[ScoreBlock]) -> list[tuple[ScoreBlock, str, MatrixCell]]:
    """Return every cell with its block and the label of its row. The full cache comes first in a block."""
    cells = []
    for block in blocks:
        cells.append((block, FULL, block.full))
        cells += [(block, label, cell) for label, row in block.rows.items() for cell in row.values()]
    return cells
