"""Compute the value of a cell of a paper's table from the runs of a store: a mean with its 95 % interval.

kvbench.analysis.intervals defines the interval. The key `of` of a cell states what is averaged:

    subtasks    a subtask, or a list of subtasks or lists; each entry of a list has the same weight. A pattern
                (scbench_kv/*) stands for all matching subtasks
    metric      score (in points), a further metric of the task (`also.<metric>`), tokens_out, or resident_bytes
    where       use only records with these values in `meta`
    longer      use only prompts whose prompt and full-cache answers have, on average, more tokens than this
    difference  subtract the full cache's score on the same samples

Runs on data that kvbench made in a benchmark's format are skipped, because such data cannot replace the benchmark's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import fsum, inf
from pathlib import Path
from typing import Any

from kvbench.analysis.answer_metrics import collect_scores, find_failure, select_answered
from kvbench.analysis.intervals import BOUND, mean
from kvbench.analysis.paired import Pair, compare_subtasks, pair_records
from kvbench.analysis.run_labels import describe_error
from kvbench.papers.experiment_key import ExperimentKey
from kvbench.store.runs import FoundRuns as Store
from kvbench.store.runs import StoredRun, find_baseline, find_runs
from kvbench.validation import SettingError

KEYS = ("subtasks", "metric", "where", "longer", "difference")
SYNTHETIC = ("miniature", "generated")  # values in `meta` that mark data made by kvbench
ORIGINS = ("data", "haystack", "qa")
SCORE = "score"
COUNTS = ("tokens_out", "resident_bytes")  # fields of a record without an upper bound

Tree = str | Sequence["Tree"]


@dataclass(frozen=True)
class CellValue:
    """The value of a cell.

    Attributes:
        value: The mean in the metric's own unit.
        low: Lower end of its 95 % interval; None if there is only one context.
        high: Upper end of it.
        failed: Number of samples that failed and are left out.
        run: Hash of the run.
    """

    value: float
    low: float | None
    high: float | None
    failed: int
    run: str


@dataclass(frozen=True)
class RunIndex:
    """The runs of a results folder, indexed by protocol.

    Attributes:
        by_protocol: Protocol -> its runs, the oldest first.
        store: Damage of the runs whose records were read.
        known: Cache of `find_matching`.
    """

    by_protocol: Mapping[ExperimentKey, Sequence[StoredRun]]
    store: Store
    known: dict[ExperimentKey, list[StoredRun]] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path) -> "RunIndex":
        """Index all runs of a folder, finished or not. Records are read when they are needed."""
        gathered: dict[ExperimentKey, list[StoredRun]] = {}
        store = find_runs(results)
        for run in store.runs:
            try:
                gathered.setdefault(ExperimentKey.of(run.value), []).append(run)
            except (LookupError, TypeError) as error:
                store.damaged[run.hash] = f"run.yaml lacks a setting ({error})"
        ordered = {protocol: sorted(runs, key=read_finish_time) for protocol, runs in gathered.items()}
        return cls(ordered, Store(damaged=store.damaged))

    @cached_property
    def full(self) -> list[StoredRun]:
        """The finished runs of the full cache."""
        return self.finished([run for runs in self.by_protocol.values() for run in runs if run.full])

    def finished(self, runs: Iterable[StoredRun]) -> list[StoredRun]:
        """Return the finished runs among `runs`, and note the damage of all of them in `store`."""
        runs = list(runs)
        for run in runs:
            self.store.note_damage(run)
        return [run for run in runs if run.finished]

    def find_matching(self, protocol: ExperimentKey) -> list[StoredRun]:
        """Return the finished runs of a protocol on the benchmark's own data, the newest first."""
        if protocol not in self.known:
            oldest_first = [
                run for run in self.finished(self.by_protocol.get(protocol, ())) if not is_synthetic(run.records)
            ]
            self.known[protocol] = oldest_first[::-1]
        return self.known[protocol]

    def find_value(self, protocol: ExperimentKey, of: Mapping[str, Any]) -> CellValue | None:
        """Return the value from the newest run that has one; None if no run has.

        A run whose records lack the metric, or have it outside its range, is noted as damaged in `store`.
        """
        for run in self.find_matching(protocol):
            try:
                return self.value(run, of)
            except SettingError:  # the run lacks subtasks, or there is no full-cache run to compare with
                continue
            except (LookupError, TypeError, ValueError) as error:
                self.store.damaged[run.hash] = f"{of.get('metric', SCORE)} cannot be read: {describe_error(error)}"
        return None

    def value(self, run: StoredRun, of: Mapping[str, Any]) -> CellValue:
        """Return the value from one run.

        Args:
            run: The run.
            of: What is averaged, as in this module's docstring.

        Raises:
            SettingError: The run lacks a subtask, or there is no full-cache run to compare with.
        """
        records: list[Pair] = [(record, record) for record in run.records.values()]
        if of.get("difference") or of.get("longer") is not None:
            records = self.pair_with_baseline(run)
        if of.get("longer") is not None:
            records = select_longer(records, of["longer"])
        records = [both for both in records if all(both[1]["meta"].get(k) == v for k, v in of.get("where", {}).items())]
        metric = of.get("metric", SCORE)
        subtasks: dict[str, list[Pair]] = {}
        for both in records:
            subtasks.setdefault(both[1]["subtask"], []).append(both)
        weights = weigh_subtasks(of["subtasks"], list(subtasks))
        kept = {name: select_answered(subtasks[name]) for name in weights}
        if missing := [name for name, pairs in kept.items() if not pairs]:
            raise SettingError(f"run {run.hash}: no sample of {missing[0]} was answered")
        failed = sum(any(map(find_failure, both)) for name in weights for both in subtasks[name])
        scores = [
            collect_scores(pairs, make_metric_reader(metric), inf if metric in COUNTS else BOUND)
            for pairs in kept.values()
        ]
        if of.get("difference"):
            change = compare_subtasks(scores, list(weights.values()))
            return CellValue(change.difference, change.low, change.high, failed, run.hash)
        average = mean([one.method_values for one in scores], list(weights.values()))
        return CellValue(average.value, average.low, average.high, failed, run.hash)

    def pair_with_baseline(self, run: StoredRun) -> list[Pair]:
        """Pair the records of a run with the full cache's.

        Raises:
            SettingError: There is no full-cache run on the same samples.
        """
        try:
            return pair_records(find_baseline(run, self.full).records, run.records)
        except ValueError as error:
            raise SettingError(f"run {run.hash}: {error}") from None


def read_finish_time(run: StoredRun) -> float:
    """Return the time when a run was finished, in seconds since the epoch; 0 for an unfinished run."""
    done = run.folder.path / "done"
    return done.stat().st_mtime if done.exists() else 0.0


def is_synthetic(records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether any prompt was made from data that kvbench generated."""
    return any(record["meta"].get(key) in SYNTHETIC for record in records.values() for key in ORIGINS)


def select_longer(pairs: Sequence[Pair], tokens: int) -> list[Pair]:
    """Return the pairs of prompts whose prompt and full-cache answers have, on average, more than `tokens` tokens."""
    ends: dict[str, list[int]] = {}
    for full, _ in pairs:
        ends.setdefault(full["prompt_hash"], []).append(full["tokens_in"] + full["tokens_out"])
    return [both for both in pairs if fsum(lengths := ends[both[0]["prompt_hash"]]) / len(lengths) > tokens]


def make_metric_reader(metric: str) -> Any:
    """Return the function that reads a metric from a record."""
    if metric in (SCORE, *COUNTS):
        return lambda record: record[metric]

    def also(record: Mapping[str, Any]) -> float:
        value = record["also"][metric]
        return float(BOUND * value if isinstance(value, bool) else value)

    return also


def weigh_subtasks(tree: Tree, names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each subtask.

    Args:
        tree: A subtask or pattern, or nested lists of these.
        names: Subtasks that have samples.

    Raises:
        SettingError: No subtask matches an entry of `tree`.
    """
    if isinstance(tree, str):
        fitting = [name for name in names if fnmatchcase(name, tree)]
        if not fitting:
            raise SettingError(f"there are no samples of {tree}")
        return dict.fromkeys(fitting, 1 / len(fitting))
    weights: dict[str, float] = {}
    for part in tree:
        for name, share in weigh_subtasks(part, names).items():
            weights[name] = weights.get(name, 0.0) + share / len(tree)
    return weights
