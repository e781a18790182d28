"""Score submissions to a leaderboard, each alone, and put them into common tables.

A submission is a bundle (kvbench.analysis.bundle). Its numbers come from its own records and its own full cache, so
another bundle can change none of them. Every sample that a submission should have counts. Where a run failed on a
sample, or lacks it, the sample scores 0 in the row of this run and nowhere else.

Which samples a submission should have follows from its settings where `task.samples`, `task.limit` and a list
`task.subtasks` name them. Other tasks take their samples from data, which are not here: then all samples that any run
of the submission has are counted. `Panel.planned` says which of both it was.

The difference from the full cache is shown only if the submission's full cache answered every sample. Otherwise an
author could choose the samples of his differences by letting the full cache fail. A full cache that answers worse than
it could would raise the differences as well: full caches on the same samples are therefore compared across submissions
(`Agreement`), and the full cache's own score stands beside each difference.

Rows are compared across submissions only on whole sample sets: their submissions have the same samples, by uid, prompt
and right answer, and both runs answered all of them. The marks in kvbench.analysis.score_matrix come from these rows.
"""

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.bundle import VerifiedBundle, describe, verify_bundle
from kvbench.analysis.intervals import TOLERANCE
from kvbench.analysis.paired import compare_averages, pair_records
from kvbench.analysis.run_labels import describe_protocol, name_panel, rank_budget
from kvbench.analysis.score_matrix import FULL, MatrixCell, ScoreBlock, build_block, list_cells, name_run
from kvbench.store.audit import comparison_key
from kvbench.store.runs import NAMED_GROUPS, StoredRun, find_baseline, flatten, load_runs
from kvbench.validation import SettingError, format_value

SAMPLE = ("uid", "subtask", "group", "prompt_hash", "target_hash")  # fields that say what a sample is
BY_SETTINGS, BY_RUNS = "its settings", "its runs"


@dataclass(frozen=True)
class CountedRun(StoredRun):
    """A run with a record for every sample that its submission should have. Lacking and failed samples score 0.

    Attributes:
        counted: The records by uid.
        lacking: Number of samples without a record.
        failed: Number of samples whose answer failed.
    """

    counted: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    lacking: int = 0
    failed: int = 0

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """The records by uid."""
        return self.counted

    @property
    def finished(self) -> bool:
        """Whether nothing more will be written: always, because bundles hold finished runs."""
        return True

    @property
    def whole(self) -> bool:
        """Whether the run answered every sample."""
        return not (self.lacking or self.failed)


@dataclass(frozen=True)
class Panel:
    """The runs of one submission that have the same protocol.

    Attributes:
        key: Hash of the settings that make the protocol.
        samples: Hash of its samples.
        planned: What says which samples there are, BY_SETTINGS or BY_RUNS.
        block: Scores and differences of its runs, which are instances of CountedRun.
        fidelity: Whether some of its runs compared predictions.
    """

    key: str
    samples: str
    planned: str
    block: ScoreBlock
    fidelity: bool

    @property
    def cells(self) -> list[tuple[str, MatrixCell, CountedRun]]:
        """Label, numbers and run of each row, the full cache's first. Without a whole full cache, they are absolute."""
        rows = [
            (label, cell, cell.run) for _, label, cell in list_cells([self.block]) if isinstance(cell.run, CountedRun)
        ]
        whole = rows[0][2].whole
        return [(label, cell if whole else replace(cell, difference=None), run) for label, cell, run in rows]


@dataclass(frozen=True)
class Submission:
    """A bundle and its numbers.

    Attributes:
        path: The bundle's file.
        bundle: The bundle.
        panels: Its protocols.
        left_out: Runs and protocols that cannot be scored, each with the reason.
        machines: Hash of a run -> descriptions of the machines that worked on it, with versions and settings.
    """

    path: Path
    bundle: VerifiedBundle
    panels: tuple[Panel, ...]
    left_out: tuple[str, ...]
    machines: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Agreement:
    """How the full cache of a submission compares with those of other submissions on the same samples.

    Attributes:
        others: Number of other submissions.
        differ: Number of those in which some sample has another score.
        apart: Number of those whose mean score differs by more than the 95 % interval of the paired difference.
    """

    others: int
    differ: int
    apart: int


@dataclass(frozen=True)
class BoardRow:
    """A run of a submission.

    Attributes:
        submission: The submission.
        panel: Its protocol.
        label: The method, or FULL.
        run: The run.
        cell: Its numbers. The difference is None if the submission's full cache did not answer every sample.
        agreement: Of the submission's full cache.
    """

    submission: Submission
    panel: Panel
    label: str
    run: CountedRun
    cell: MatrixCell
    agreement: Agreement


@dataclass(frozen=True)
class BoardTable:
    """The rows that have the same protocol and the same samples.

    Attributes:
        title: Model, task and settings of the protocol.
        rows: The rows, by budget, the highest score of a budget first, full caches last.
    """

    title: str
    rows: tuple[BoardRow, ...]


def read_submission(
    path: Path, average: str | None, use: Callable[[Submission, Path], None] = lambda submission, folder: None
) -> Submission:
    """Verify a bundle and score it.

    Args:
        path: The bundle's file.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.
        use: What to do with the submission while a folder of results holds its runs.

    Raises:
        SettingError: The bundle cannot be used.
    """
    bundle = verify_bundle(path)
    if bundle.drawn is not None:
        raise SettingError(f"bundle={path}: holds drawn answers; a board needs whole runs (bundle without --draw)")
    with TemporaryDirectory() as folder:
        bundle.unpack(Path(folder))
        try:
            submission = score_submission(path, bundle, Path(folder), average)
            use(submission, Path(folder))
        except (SettingError, OSError):
            raise
        except Exception as error:  # odd records of a stranger must not stop a site that shows others
            raise SettingError(f"bundle={path}: cannot be shown ({describe(error)})") from None
    return submission


def score_submission(path: Path, bundle: VerifiedBundle, folder: Path, average: str | None = None) -> Submission:
    """Score a bundle from its own records.

    Args:
        path: The bundle's file.
        bundle: The bundle.
        folder: A folder of results that the bundle was unpacked into.
        average: As in `kvbench.analysis.score_matrix.build_blocks`.

    Raises:
        SettingError: None of its runs can be scored.
    """
    runs = load_runs(folder)
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(make_protocol_key(run.value), []).append(run)
    panels, left_out = [], []
    for key, group in sorted(groups.items()):
        try:
            panel, odd = score_panel(key, group, average)
        except SettingError as error:
            left_out.append(f"{' · '.join(name_panel(group[0]))}: {error}")
        else:
            panels.append(panel)
            left_out += odd
    if not panels:
        raise SettingError(f"bundle={path}: {left_out[0]}")
    return Submission(path, bundle, tuple(panels), tuple(left_out), {run.hash: run.machines for run in runs})


def make_protocol_key(value: Mapping[str, Any]) -> str:
    """Return a hash of the settings that two comparable runs share. `fidelity` changes no answer and is left out."""
    return comparison_key({name: setting for name, setting in value.items() if name != "fidelity"})


def score_panel(key: str, runs: Sequence[StoredRun], average: str | None) -> tuple[Panel, list[str]]:
    """Score the runs of one protocol.

    Returns:
        The panel, and a line for each run that cannot be compared with its full cache.

    Raises:
        SettingError: There is no full cache, or too little of the sample set.
    """
    full = find_baseline(runs[0], runs)
    samples, fitting, left_out = dict(full.records), [full], []
    for run in (run for run in runs if not run.full):
        try:
            pair_records(samples, run.records)
        except SettingError as error:
            left_out.append(f"{name_run(run)}: {error}")
        else:
            fitting.append(run)
            samples = run.records | samples
    known = count_named_samples(full.value["task"])
    samples = {uid: {name: sample[name] for name in SAMPLE} for uid, sample in sorted(samples.items())}
    if known is not None:
        samples |= name_lacking_samples(samples, known)
    counted = {run.hash: count_samples(run, samples) for run in fitting}
    whole = counted[full.hash]
    block = build_block([counted[run.hash] for run in fitting if not run.full], [whole], (), average)
    content = json.dumps([list(sample.values()) for sample in samples.values()])
    return (
        Panel(
            key=key,
            samples=hashlib.sha256(content.encode()).hexdigest(),
            planned=BY_RUNS if known is None else BY_SETTINGS,
            block=block,
            fidelity=any("fidelity" in run.value for run in fitting),
        ),
        [*left_out, *block.left_out],
    )


def count_named_samples(task: Mapping[str, Any]) -> dict[str, int] | None:
    """Return subtask -> number of its samples, or None if the settings of the task do not say."""
    subtasks, samples, limit = task.get("subtasks"), task.get("samples"), task.get("limit")
    if not isinstance(subtasks, list) or not isinstance(samples, int):
        return None
    return dict.fromkeys(map(str, subtasks), min(samples, limit) if isinstance(limit, int) else samples)


def name_lacking_samples(samples: Mapping[str, Mapping[str, Any]], known: Mapping[str, int]) -> dict[str, Any]:
    """Return samples in place of those that no run of a submission has.

    Args:
        samples: Those that some run has, by uid.
        known: Subtask -> number of its samples.

    Raises:
        SettingError: They are more than half of all.
    """
    there = Counter(str(sample["subtask"]) for sample in samples.values())
    lacking = {subtask: max(count - there[subtask], 0) for subtask, count in known.items()}
    if (number := sum(lacking.values())) > len(samples):
        raise SettingError(f"has {len(samples)} of the {len(samples) + number} samples that its settings name")
    return {
        uid: dict.fromkeys(SAMPLE) | {"uid": uid, "subtask": subtask}
        for subtask, count in lacking.items()
        for uid in (f"{subtask}: lacking sample {place + 1}" for place in range(count))
    }


def count_samples(run: StoredRun, samples: Mapping[str, dict[str, Any]]) -> CountedRun:
    """Return the run with a record for each of the samples."""
    failure = {"score": 0.0, "error": None, "stop": "error"}
    counted, lacking, failed = {}, 0, 0
    for uid, sample in samples.items():
        record = run.records.get(uid)
        if record is None:
            counted[uid] = {"meta": {}} | sample | failure
            lacking += 1
        elif find_failure(record) is not None:
            counted[uid] = record | sample | failure
            failed += 1
        else:
            counted[uid] = record | sample
    return CountedRun(run.hash, run.value, run.folder, counted, lacking, failed)


def describe_hardware(machine: Mapping[str, Any]) -> str:
    """Return the hardware that a run states, in one line."""
    gpu = machine.get("gpu")
    return (
        f"{f'{gpu}, ' if gpu else ''}{machine.get('processor') or 'unknown'}, {machine.get('threads') or '?'} threads"
    )


def describe_software(machine: Mapping[str, Any]) -> str:
    """Return the versions that a run states, in one line."""
    stated = machine.get("versions")
    versions = {"Python": machine.get("python")} | (dict(stated) if isinstance(stated, Mapping) else {})
    return ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())


def find_settings(machine: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings that a run was made with, or None if the description of its machine has none."""
    settings = machine.get("settings")
    known = isinstance(settings, Mapping) and all(isinstance(settings.get(name), Mapping) for name in NAMED_GROUPS)
    return settings if known else None


def list_commands(submission: Submission) -> list[str]:
    """Return the commands that make the runs of a submission again, each once.

    A bundle leaves out local paths, so they are missing here.
    """
    settings = [find_settings(machine) for machines in submission.machines.values() for machine in machines]
    return sorted({format_command(run_settings) for run_settings in settings if run_settings is not None})


def format_command(settings: Mapping[str, Any]) -> str:
    """Return the command that makes a run of these settings."""
    names = [f"{group}={settings[group].get('name')}" for group in NAMED_GROUPS]
    names += [
        f"{name}={format_value(value)}"
        for name, value in sorted(flatten(settings).items())
        if value is not None and name.split(".")[-1] not in ("_target_", "name")
    ]
    return shlex.join(["python", "run.py", *names])


def build_tables(submissions: Sequence[Submission]) -> list[BoardTable]:
    """Put the rows of all submissions into tables, sorted by title. No number of a row depends on other submissions."""
    groups: dict[tuple[str, str], list[tuple[Submission, Panel]]] = {}
    for submission in submissions:
        for panel in submission.panels:
            groups.setdefault((panel.key, panel.samples), []).append((submission, panel))
    first = {key: entries[0][1].block.full.run for (key, _), entries in groups.items()}
    tables = []
    for (key, samples), entries in groups.items():
        beside = [run for run in first.values() if name_panel(run) == name_panel(first[key])]
        title = replace(entries[0][1].block, also=tuple(describe_protocol(first[key], beside))).title
        if sum(key == other for other, _ in groups) > 1:
            title += f" · samples {samples[:8]}"
        tables.append(BoardTable(title, tuple(mark_rows(list_rows(entries)))))
    return sorted(tables, key=lambda table: table.title)


def list_rows(entries: Sequence[tuple[Submission, Panel]]) -> list[BoardRow]:
    """Return the rows of panels with the same samples."""
    agreements = compare_full_caches([panel for _, panel in entries])
    rows = [
        BoardRow(submission, panel, label, run, cell, agreement)
        for (submission, panel), agreement in zip(entries, agreements, strict=True)
        for label, cell, run in panel.cells
    ]
    return sorted(rows, key=lambda row: (row.label == FULL, rank_budget(row.run), -row.cell.score.value))


def compare_full_caches(panels: Sequence[Panel]) -> list[Agreement]:
    """Compare the full caches of submissions on the same samples."""
    pair, weights = panels[0].block.paired.pair, list(panels[0].block.paired.weights.values())
    fulls = [panel.block.full.run for panel in panels]
    scores = [tuple(float(record["score"]) for record in run.records.values()) for run in fulls]
    kinds = dict(zip(scores, fulls, strict=True))  # one full cache for each different list of scores
    pairs = list(combinations(kinds, 2))
    changes = compare_averages([(pair(kinds[one], kinds[other]), weights) for one, other in pairs])
    apart = {
        frozenset(both)
        for both, change in zip(pairs, changes, strict=True)
        if change.low is not None and change.high is not None and (change.low > TOLERANCE or change.high < -TOLERANCE)
    }
    return [
        Agreement(
            others=len(scores) - 1,
            differ=sum(other != one for other in scores),
            apart=sum(frozenset((one, other)) in apart for other in scores),
        )
        for one in scores
    ]


def mark_rows(rows: Sequence[BoardRow]) -> list[BoardRow]:
    """Mark the best row of each class of a budget (`Samples.mark_alike`), among rows that answered every sample."""
    marked = []
    for _, group in groupby(rows, lambda row: (row.label == FULL, rank_budget(row.run))):
        budget_rows = list(group)
        whole = {place: row for place, row in enumerate(budget_rows) if row.run.whole and row.label != FULL}
        if whole:
            # a run that two submissions hold has one hash, which mark_alike tells runs apart by
            cells = [
                replace(row.cell, run=replace(row.run, hash=f"{row.run.hash}@{place}")) for place, row in whole.items()
            ]
            marked_cells = rows[0].panel.block.paired.mark_alike(cells)
            for (place, row), cell in zip(whole.items(), marked_cells, strict=True):
                budget_rows[place] = replace(row, cell=replace(cell, run=row.cell.run))
        marked += [
            row if place in whole else replace(row, cell=replace(row.cell, alike="", best=False, tied=False))
            for place, row in enumerate(budget_rows)
        ]
    return marked
