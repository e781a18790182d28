"""What the runs of a store say for one cell of a paper's table: a mean with its 95 % interval
(kvbench.analysis.intervals).

A cell says `of` what of a run's records it is the mean:

    subtasks    a subtask, or a list: the mean of what is in it, each weighing the same, lists within lists likewise. A
                pattern (scbench_kv/*) stands for all subtasks that it fits
    metric      score (in points), what the task says also (`also.<metric>`), or tokens_out
    where       only records with these values in `meta`
    longer      only prompts whose full-cache answers end, on average, beyond so many tokens of prompt and answer
    difference  the score less the full cache's on the same samples

Data that kvbench made in a benchmark's format never stands for the benchmark: such runs are passed over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import fsum, inf
from pathlib import Path
from typing import Any

from kvbench.analysis.answer_metrics import collect_scores, find_failure, select_answered
from kvbench.analysis.intervals import BOUND, Mean, mean
from kvbench.analysis.paired import compare_subtasks, pair_records
from kvbench.papers.experiment_key import ExperimentKey
from kvbench.store.runs import FoundRuns as Store
from kvbench.store.runs import StoredRun, find_baseline, find_runs
from kvbench.validation import SettingError

KEYS = ("subtasks", "metric", "where", "longer", "difference")
SYNTHETIC = ("miniature", "generated")  # what `meta` says of data made by kvbench
ORIGINS = ("data", "haystack", "qa")
SCORE, TOKENS = "score", "tokens_out"

Tree = str | Sequence["Tree"]
Pair = tuple[dict, dict]


@dataclass(frozen=True)
class CellValue:
    """A cell's value in the metric's own unit, its interval (None: one context only), and what it rests on."""

    value: float
    low: float | None
    high: float | None
    failed: int
    run: str  # hash


@dataclass(frozen=True)
class RunIndex:
    """The runs of a results folder by what they answer; `store`: those whose records were read, and what is damaged."""

    by_protocol: Mapping[ExperimentKey, Sequence[StoredRun]]
    store: Store
    known: dict[ExperimentKey, list[StoredRun]] = field(default_factory=dict)  # what `find_matching` has found

    @classmethod
    def read(cls, results: Path) -> "RunIndex":
        """All that are there, finished or not: records are read when they are asked for."""
        found: dict[ExperimentKey, list[StoredRun]] = {}
        store = find_runs(results)
        for run in store.runs:
            try:
                found.setdefault(ExperimentKey.of(run.value), []).append(run)
            except (LookupError, TypeError) as error:
                store.damaged[run.hash] = f"run.yaml lacks a setting ({error})"
        own = {protocol: sorted(runs, key=read_finish_time) for protocol, runs in found.items()}
        return cls(own, Store(damaged=store.damaged))

    @cached_property
    def full(self) -> list[StoredRun]:
        """The finished runs of the full cache."""
        return self.finished([run for own in self.by_protocol.values() for run in own if run.full])

    def finished(self, runs: Iterable[StoredRun]) -> list[StoredRun]:
        """Those of the runs that are finished; what is damaged of them is kept for whoever tells it."""
        runs = list(runs)
        for run in runs:
            self.store.note_damage(run)
        return [run for run in runs if run.finished]

    def find_matching(self, protocol: ExperimentKey) -> list[StoredRun]:
        """Finished runs of a protocol on the benchmark's own data, the newest first."""
        if protocol not in self.known:
            own = [run for run in self.finished(self.by_protocol.get(protocol, ())) if not is_synthetic(run.records)]
            self.known[protocol] = own[::-1]
        return self.known[protocol]

    def find_value(self, protocol: ExperimentKey, of: Mapping[str, Any]) -> CellValue | None:
        """What the newest run says that has an answer; None if none has."""
        for run in self.find_matching(protocol):
            try:
                return self.value(run, of)
            except SettingError:  # it lacks subtasks, or the full cache's run to compare with
                continue
        return None

    def value(self, run: StoredRun, of: Mapping[str, Any]) -> CellValue:
        """Of one run; SettingError if it cannot say."""
        records = [(record, record) for record in run.records.values()]
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
            collect_scores(pairs, make_metric_reader(metric), inf if metric == TOKENS else BOUND)
            for pairs in kept.values()
        ]
        if of.get("difference"):
            own = compare_subtasks(scores, list(weights.values()))
            return CellValue(own.difference, own.low, own.high, failed, run.hash)
        own: Mean = mean([one.method_values for one in scores], list(weights.values()))
        return CellValue(own.value, own.low, own.high, failed, run.hash)

    def pair_with_baseline(self, run: StoredRun) -> list[Pair]:
        """The records of a run beside the full cache's; SettingError if it was not run."""
        try:
            return pair_records(find_baseline(run, self.full).records, run.records)
        except ValueError as error:
            raise SettingError(f"run {run.hash}: {error}") from None


def read_finish_time(run: StoredRun) -> float:
    """When it was finished; 0 if it is not."""
    done = run.folder.path / "done"
    return done.stat().st_mtime if done.exists() else 0.0


def is_synthetic(records: Mapping[str, Mapping]) -> bool:
    """Whether any prompt is of data that kvbench made itself."""
    return any(record["meta"].get(key) in SYNTHETIC for record in records.values() for key in ORIGINS)


def select_longer(pairs: Sequence[Pair], tokens: int) -> list[Pair]:
    """The pairs of prompts whose full-cache answers end, on average, beyond `tokens`."""
    ends: dict[str, list[int]] = {}
    for full, _ in pairs:
        ends.setdefault(full["prompt_hash"], []).append(full["tokens_in"] + full["tokens_out"])
    return [both for both in pairs if fsum(own := ends[both[0]["prompt_hash"]]) / len(own) > tokens]


def make_metric_reader(metric: str) -> Any:
    """The function that reads it from a record."""
    if metric in (SCORE, TOKENS):
        return lambda record: record[metric]

    def also(record: Mapping) -> float:
        value = record["also"][metric]
        return BOUND * value if isinstance(value, bool) else value

    return also


def weigh_subtasks(tree: Tree, names: Sequence[str]) -> dict[str, float]:
    """Subtask -> weight; SettingError for one that is not among `names`."""
    if isinstance(tree, str):
        fitting = [name for name in names if fnmatchcase(name, tree)]
        if not fitting:
            raise SettingError(f"no samples of {tree}")
        return dict.fromkeys(fitting, 1 / len(fitting))
    found: dict[str, float] = {}
    for part in tree:
        for name, share in weigh_subtasks(part, names).items():
            found[name] = found.get(name, 0.0) + share / len(tree)
    return found
