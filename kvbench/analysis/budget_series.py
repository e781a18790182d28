"""Runs that differ in their budget alone, on the samples that all of them and the full cache answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.budget_curve import Curve
from kvbench.analysis.intervals import Mean, mean
from kvbench.analysis.paired import PairedDifference, PairedScores, compare_subtasks, pair_records
from kvbench.store.runs import StoredRun, find_baseline, find_differences
from kvbench.validation import SettingError, require_choice

SHARES = {"bytes": ("resident_bytes", "full_bytes"), "rows": ("rows_attended", "rows_seen_decoding")}
EACH = "each"  # the average in which each subtask weighs the same
SOLVABLE = "solvable"  # that over the subtasks that the model's card lists


@dataclass(frozen=True)
class CurveOptions:
    """What is drawn of the runs."""

    against: str = "bytes"  # a key of SHARES
    average: str | None = None  # one of the task's, EACH or SOLVABLE; None: the first
    subtask: str | None = None  # this one alone
    full: str | None = None  # hash of the full cache's run where there are several


@dataclass(frozen=True)
class Point:
    """A budget, or the full cache."""

    budget: str
    share: float
    score: Mean
    interval: PairedDifference | None  # None: the full cache


@dataclass(frozen=True)
class BudgetSeries:
    """Runs of one method that differ in their budget alone, and the full cache's."""

    runs: tuple[StoredRun, ...]
    full: StoredRun
    against: str  # a key of SHARES
    average: str
    weights: Mapping[str, float]
    uids: tuple[str, ...]  # answered by all
    left_out: int

    @cached_property
    def curve(self) -> Curve:
        own = [self.full.records[uid] for uid in self.uids]
        return Curve(
            scores=np.array([[run.records[uid]["score"] for run in self.runs] for uid in self.uids], float),
            shares=np.array(
                [[compute_kept_share(run.records[uid], self.against) for run in self.runs] for uid in self.uids]
            ),
            full=np.array([record["score"] for record in own], float),
            subtasks=[record["subtask"] for record in own],
            groups=[record["group"] or record["uid"] for record in own],
            weights=self.weights,
        )

    @cached_property
    def points(self) -> list[Point]:
        """By measured share, the full cache last."""
        curve, weights = self.curve, list(self.weights.values())
        places = [[at for at, own in enumerate(curve.subtasks) if own == name] for name in self.weights]
        groups = [[curve.groups[at] for at in own] for own in places]
        found = []
        for column, run in enumerate(self.runs):
            scores = [
                PairedScores(curve.full[own].tolist(), curve.scores[own, column].tolist(), names)
                for own, names in zip(places, groups, strict=True)
            ]
            score = mean([own.method_values for own in scores], weights)
            share = float(curve.points[0][column])
            found.append(Point(str(run.value["budget"]), share, score, compare_subtasks(scores, weights)))
        full = mean([own.full_values for own in scores], weights)
        shares = [[compute_kept_share(self.full.records[self.uids[at]], self.against) for at in own] for own in places]
        share = float(np.average([np.mean(own) for own in shares], weights=weights))
        return [*sorted(found, key=lambda point: (point.share, point.budget)), Point("full cache", share, full, None)]

    @property
    def measured_range(self) -> tuple[float, float]:
        """The smallest and the largest measured share."""
        shares = self.curve.points[0]
        return float(shares.min()), float(shares.max())


def compute_kept_share(record: Mapping, against: str) -> float:
    """What a sample kept of the full cache."""
    part, whole = (record[name] for name in SHARES[against])
    if part is None or not whole:
        raise SettingError(f"{record['uid']}: its record has no {' / '.join(SHARES[against])}")
    return part / whole


def list_subtasks(runs: Sequence[StoredRun]) -> list[str]:
    """Those of which runs have records."""
    return sorted({str(own.get("subtask")) for run in runs for own in run.records.values()})


def build_series(runs: Sequence[StoredRun], stored: Sequence[StoredRun], choice: CurveOptions) -> BudgetSeries:
    """The curve of `runs`, with the full cache's run among `stored`; SettingError where they make none."""
    # averages follow from other settings
    if found := find_differences(runs, ("budget", "averages")) or find_differences(runs, ("budget",)):
        said = "; ".join(f"{name} is {' and '.join(values)}" for name, values in found.items())
        raise SettingError(f"runs of different protocols make no curve: {said}")
    full = find_baseline(runs[0], stored, choice.full)
    records = [full.records, *(run.records for run in runs)]
    for own in records[1:]:
        pair_records(full.records, own)
    every = {uid for own in records for uid in own if choice.subtask in (None, own[uid]["subtask"])}
    uids = [uid for uid in sorted(every) if all(uid in own and find_failure(own[uid]) is None for own in records)]
    if not uids:
        raise SettingError("no sample was answered at all budgets and by the full cache")
    name, weights = choose_weights(runs[0], {full.records[uid]["subtask"] for uid in uids}, choice)
    uids = [uid for uid in uids if full.records[uid]["subtask"] in weights]
    every = {uid for uid in every if any(uid in own and own[uid]["subtask"] in weights for own in records)}
    swept = BudgetSeries(tuple(runs), full, choice.against, name, weights, tuple(uids), len(every) - len(uids))
    try:
        swept.points  # noqa: B018 - a record that cannot be used is said now
    except ValueError as error:
        raise SettingError(str(error)) from None
    return swept


def build_all_series(
    runs: Sequence[StoredRun], stored: Sequence[StoredRun], choice: CurveOptions
) -> list[BudgetSeries]:
    """The curve of `runs` as `build_series` has it. Where `choice` names neither an average nor a subtask, a second one
    follows: over the subtasks that the model's card lists, if it lists some of them and not all.
    """
    found = [build_series(runs, stored, choice)]
    open_ = choice.average is None and choice.subtask is None
    if open_ and solvable_subtasks.average_solvable(
        solvable_subtasks.list_solvable(runs[0].value), set(found[0].curve.subtasks)
    ):
        found.append(build_series(runs, stored, replace(choice, average=SOLVABLE)))
    return found


def choose_weights(run: StoredRun, there: set[str], choice: CurveOptions) -> tuple[str, Mapping[str, float]]:
    """The average that is drawn, by name, and the weights of its subtasks; SettingError if one has no samples."""
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
        raise SettingError(f"{name}: no answered sample of {', '.join(missing)}; --average {EACH}, or another")
    return name, averages[name]
