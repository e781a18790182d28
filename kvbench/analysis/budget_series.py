"""Group runs that differ only in how many rows stay, on the samples that all of them and the full cache answered."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.budget_curve import Curve
from kvbench.analysis.intervals import Mean, compute_means
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_averages, pair_records
from kvbench.analysis.text_table import pad_numbers
from kvbench.store.runs import StoredRun, find_baseline, find_differences, name_some
from kvbench.validation import SettingError, require_choice

SHARES = {"bytes": ("resident_bytes", "full_bytes"), "rows": ("rows_attended", "rows_seen_decoding")}
EACH = "each"  # the average in which each subtask weighs the same
SOLVABLE = "solvable"  # the average over the subtasks that the model's card lists


@dataclass(frozen=True)
class CurveOptions:
    """What a curve shows.

    Attributes:
        against: The kept share on the x axis, a key of SHARES.
        average: One of the task's averages, EACH or SOLVABLE. None for the task's first.
        subtask: Show this subtask alone.
        full: Hash of the full cache's run, if there are several.
    """

    against: str = "bytes"
    average: str | None = None
    subtask: str | None = None
    full: str | None = None


@dataclass(frozen=True)
class Point:
    """A point of a curve: a budget, or the full cache.

    Attributes:
        budget: Its name.
        share: Measured kept share.
        score: Mean score in points.
        interval: Difference from the full cache; None for the full cache itself.
    """

    budget: str
    share: float
    score: Mean
    interval: PairedDifference | None


@dataclass(frozen=True)
class BudgetSeries:
    """Runs of one method that differ only in their budget, and the full cache's run.

    Attributes:
        runs: The runs.
        full: The full cache's run on the same samples.
        against: The kept share, a key of SHARES.
        average: Name of the average over subtasks.
        weights: Weights of its subtasks.
        uids: Samples that all runs answered.
        left_out: Number of samples that some run did not answer.
        unfinished: Budget of each run that is not finished, and the number of its records.
        skipped: Budget of each unfinished run that the curve leaves out, and the reason.
    """

    runs: tuple[StoredRun, ...]
    full: StoredRun
    against: str
    average: str
    weights: Mapping[str, float]
    uids: tuple[str, ...]
    left_out: int
    unfinished: tuple[tuple[str, int], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @cached_property
    def curve(self) -> Curve:
        """Scores and shares of the samples, for kvbench.analysis.budget_curve."""
        full_records = [self.full.records[uid] for uid in self.uids]
        return Curve(
            scores=np.array([[run.records[uid]["score"] for run in self.runs] for uid in self.uids], float),
            shares=np.array(
                [[compute_kept_share(run.records[uid], self.against) for run in self.runs] for uid in self.uids]
            ),
            full=np.array([record["score"] for record in full_records], float),
            subtasks=[record["subtask"] for record in full_records],
            groups=[record["group"] or record["uid"] for record in full_records],
            weights=self.weights,
        )

    @cached_property
    def points(self) -> list[Point]:
        """The points, sorted by measured share, with the full cache last."""
        curve, weights = self.curve, list(self.weights.values())
        places = [[at for at, subtask in enumerate(curve.subtasks) if subtask == name] for name in self.weights]
        groups = [[curve.groups[at] for at in samples] for samples in places]
        scores = [
            [
                PairedScores(curve.full[samples].tolist(), curve.scores[samples, column].tolist(), names)
                for samples, names in zip(places, groups, strict=True)
            ]
            for column in range(len(self.runs))
        ]
        sides = [[scored.method_values for scored in run_scores] for run_scores in scores]
        *means, full = compute_means(
            [(side, weights) for side in (*sides, [scored.full_values for scored in scores[0]])]
        )
        changes = compare_averages([(run_scores, weights) for run_scores in scores])
        budgets = [run.budget_name for run in self.runs]
        kept = map(float, curve.points[0])
        points = [Point(*fields) for fields in zip(budgets, kept, means, changes, strict=True)]
        shares = [
            [compute_kept_share(self.full.records[self.uids[at]], self.against) for at in samples] for samples in places
        ]
        share = float(np.average([np.mean(subtask_shares) for subtask_shares in shares], weights=weights))
        return [*sorted(points, key=lambda point: (point.share, point.budget)), Point("full cache", share, full, None)]

    @property
    def measured_range(self) -> tuple[float, float]:
        """The smallest and the largest measured share."""
        shares = self.curve.points[0]
        return float(shares.min()), float(shares.max())


def compute_kept_share(record: Mapping[str, Any], against: str) -> float:
    """Return the share of the full cache that a sample kept.

    Args:
        record: The sample's record.
        against: A key of SHARES.

    Raises:
        SettingError: The record lacks the numbers.
    """
    part, whole = (record[name] for name in SHARES[against])
    if part is None or not whole:
        raise SettingError(f"{record['uid']}: its record has no {' / '.join(SHARES[against])}")
    share: float = part / whole
    return share


def list_subtasks(runs: Sequence[StoredRun]) -> list[str]:
    """Return all subtasks for which the runs have records, sorted."""
    return sorted({str(record.get("subtask")) for run in runs for record in run.records.values()}, key=pad_numbers)


def build_series(runs: Sequence[StoredRun], stored: Sequence[StoredRun], choice: CurveOptions) -> BudgetSeries:
    """Build the curve of runs that differ only in their budget.

    The runs need not be finished: the curve shows the samples that all of them answered. An unfinished run that would
    take a whole subtask from the others is left out and named.

    Args:
        runs: The runs.
        stored: The runs among which the full cache's is looked for.
        choice: What the curve shows.

    Raises:
        SettingError: The runs differ in another setting, there is no full cache's run to compare with, or no sample was
            answered by all runs.
    """
    # differing averages follow from another setting, so a message names that setting first
    varied = runs[0].budget_setting
    if differences := find_differences(runs, (varied, "averages")) or find_differences(runs, (varied,)):
        said = "; ".join(f"{name} is {' and '.join(values)}" for name, values in differences.items())
        raise SettingError(f"runs of different protocols do not form a curve: {said}")
    full = find_baseline(runs[0], stored, choice.full)
    runs, skipped = skip_obstacles(full, runs, choice)
    records = [full.records, *(run.records for run in runs)]
    for run_records in records[1:]:
        pair_records(full.records, run_records)
    every = {
        uid for run_records in records for uid in run_records if choice.subtask in (None, run_records[uid]["subtask"])
    }
    uids = [
        uid
        for uid in sorted(every)
        if all(uid in run_records and find_failure(run_records[uid]) is None for run_records in records)
    ]
    if not uids:
        raise SettingError("no sample was answered both at all budgets and by the full cache")
    name, weights = choose_weights(runs[0], {full.records[uid]["subtask"] for uid in uids}, choice)
    uids = [uid for uid in uids if full.records[uid]["subtask"] in weights]
    every = {
        uid
        for uid in every
        if any(uid in run_records and run_records[uid]["subtask"] in weights for run_records in records)
    }
    swept = BudgetSeries(
        runs=tuple(runs),
        full=full,
        against=choice.against,
        average=name,
        weights=weights,
        uids=tuple(uids),
        left_out=len(every) - len(uids),
        unfinished=tuple((run.budget_name, len(run.records)) for run in runs if not run.finished),
        skipped=skipped,
    )
    try:
        swept.points  # noqa: B018 - computes the points, so that a damaged record raises here
    except ValueError as error:
        raise SettingError(str(error)) from None
    return swept


def skip_obstacles(
    full: StoredRun, runs: Sequence[StoredRun], choice: CurveOptions
) -> tuple[list[StoredRun], tuple[tuple[str, str], ...]]:
    """Return the runs that a curve shows, and the budget of each other run with the reason (`find_obstacle`).

    Raises:
        SettingError: No run is left.
    """
    if all(run.finished for run in runs):
        return list(runs), ()
    answered = {
        uid
        for uid, record in full.records.items()
        if find_failure(record) is None and choice.subtask in (None, record["subtask"])
    }
    _, weights = choose_weights(runs[0], {str(full.records[uid]["subtask"]) for uid in answered}, choice)
    reasons: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: (not run.finished, -len(run.records))):  # whole runs before parts
        reason = None if run.finished else find_obstacle(full, run, answered, weights)
        if reason is None:
            answered &= {uid for uid, record in run.records.items() if find_failure(record) is None}
        else:
            reasons[run.hash] = reason
    kept = [run for run in runs if run.hash not in reasons]
    skipped = tuple((run.budget_name, reasons[run.hash]) for run in runs if run.hash in reasons)
    if not kept:
        raise SettingError("; ".join(f"budget {budget} {reason}" for budget, reason in skipped))
    return kept, skipped


def find_obstacle(
    full: StoredRun, run: StoredRun, answered: Collection[str], weights: Mapping[str, float]
) -> str | None:
    """Return why a run cannot be compared with the others of its block, or None."""
    if not run.records:
        return "has no records yet"
    try:
        pair_records(full.records, run.records)
    except SettingError as error:
        return str(error)
    both = {uid for uid in answered if uid in run.records and find_failure(run.records[uid]) is None}
    lost = sorted(set(weights) - {str(run.records[uid]["subtask"]) for uid in both})
    return f"answered no sample of {name_some(lost)}" if lost else None


def build_all_series(
    runs: Sequence[StoredRun], stored: Sequence[StoredRun], choice: CurveOptions
) -> list[BudgetSeries]:
    """Build the curve of `runs` with `build_series`, and possibly a second one.

    The second curve covers the subtasks that the model's card lists. It follows if the card lists some subtasks but not
    all, and if `choice` names neither an average nor a subtask.

    Raises:
        SettingError: As in `build_series`.
    """
    series = [build_series(runs, stored, choice)]
    open_ = choice.average is None and choice.subtask is None
    if open_ and solvable_subtasks.average_solvable(
        solvable_subtasks.list_solvable(runs[0].value), set(series[0].curve.subtasks)
    ):
        series.append(build_series(runs, stored, replace(choice, average=SOLVABLE)))
    return series


def choose_weights(run: StoredRun, there: set[str], choice: CurveOptions) -> tuple[str, Mapping[str, float]]:
    """Return the name of the average that a curve shows, and the weights of its subtasks.

    Args:
        run: A run of the curve.
        there: Subtasks with answered samples.
        choice: What the curve shows.

    Raises:
        SettingError: There is no such average, or one of its subtasks has no answered sample.
    """
    averages = dict(run.value.get("averages") or [])
    if choice.subtask is not None:
        return choice.subtask, {choice.subtask: 1.0}
    solvable = solvable_subtasks.average_solvable(solvable_subtasks.list_solvable(run.value), sorted(there))
    if choice.average is not None:
        require_choice("--average", choice.average, [*averages, EACH, *([SOLVABLE] if solvable else [])])
    name = choice.average or next(iter(averages), EACH)
    if name == SOLVABLE:
        return next(iter(solvable.items()))
    if name == EACH:
        return "average, each subtask weighing the same", dict.fromkeys(sorted(there), 1.0)
    if missing := sorted(set(averages[name]) - there):
        raise SettingError(
            f"{name}: no sample of {', '.join(missing)} was answered; choose --average {EACH} or another average"
        )
    return name, averages[name]
