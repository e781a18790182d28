"""Read the runs of a store, choose some by their settings, and find the full cache's run to compare each with.

All commands read a store through this module, so that damage means the same to all of them:

    left out       A run whose run.yaml cannot be read, or whose `done` speaks of other records than are there.
    passed over    A line that holds no record, and all but the first record of a sample. The run is used as far as its
                   records go, finished or not.

`find_runs` reads run.yaml alone, `find_finished` the records too. `FoundRuns` keeps what they left out or passed over,
and `FoundRuns.print_damage` says it on stderr, one line a run. A torn last line without `done` is no damage: somebody
writes it now, or was killed, and the next writer cuts it off.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.store.record import find_problems
from kvbench.store.run_folder import RunFolder, make_seal, parse_record, read_run_value, run_hash
from kvbench.validation import SettingError, escape

NAMED_GROUPS = ("model", "method", "allocator", "codec", "task")  # groups: as a filter their name is meant
CACHE_GROUPS = ("method", "allocator", "codec")
# what the full cache's run does not share with others
UNSHARED_SETTINGS = (*CACHE_GROUPS, "budget", "budget_of", "block_size", "sources")
MAX_NAMED = 3  # lines or samples that a message names


class RunRecords:
    """Iterate over the records of a run's folder, each sample once: the first file by name that has it counts.

    Args:
        path: The folder.
        fields: Whether `problems` also names records that break the rules of kvbench.store.record. It doubles the time.

    Attributes:
        problems: What is damaged, one line each; complete after the last record.
        done: After the last record, whether `done` speaks of exactly these records; None where it is not there.
    """

    def __init__(self, path: Path, fields: bool = False) -> None:
        self.path, self.fields = path, fields
        self.problems: list[str] = []
        self.done: bool | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        done = self._read_done()  # before the records: a writer puts it behind the last of them
        seen: set[str] = set()
        for file in sorted(self.path.glob("records*.jsonl")):
            found: dict[str, list[object]] = {"line": [], "sample": [], "record": []}
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    record = parse_record(line)
                    if record is None:
                        if not line.endswith(b"\n"):
                            self.problems += [f"{file.name}: line {number} is torn"] if done is not None else []
                        elif line.strip():
                            found["line"].append(number)
                    elif record["uid"] in seen:
                        found["sample"].append(record["uid"])
                    else:
                        seen.add(record["uid"])
                        if self.fields:
                            found["record"] += [f"{record['uid']}: {problem}" for problem in find_problems(record)]
                        yield record
            self.problems += [
                f"{file.name}: {what} {name_some(own)}{PROBLEM_ENDINGS[what]}" for what, own in found.items() if own
            ]
        self.done = None if done is None else done == make_seal(seen)
        if self.done is False:
            self.problems.append(f"done does not speak of the {len(seen)} records that are there")

    def _read_done(self) -> object:
        """What `done` says, None where it is not there."""
        try:
            return json.loads((self.path / "done").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return type(error).__name__


PROBLEM_ENDINGS = {"line": " not whole", "sample": " in another line too", "record": ""}


def name_some(found: Sequence[object]) -> str:
    """Name the first of `found`, and say how many more there are."""
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{', '.join(map(str, found[:MAX_NAMED]))}{more}"


@dataclass(frozen=True)
class StoredRun:
    """A run."""

    hash: str
    value: Mapping[str, Any]
    folder: RunFolder

    @cached_property
    def _read(self) -> tuple[dict[str, dict[str, Any]], RunRecords]:
        found = RunRecords(self.folder.path)
        return {record["uid"]: record for record in found}, found

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """uid -> record."""
        return self._read[0]

    @property
    def problems(self) -> list[str]:
        """What is damaged of its records, one line each."""
        return self._read[1].problems

    @property
    def finished(self) -> bool:
        """Whether `done` is there and speaks of exactly its records."""
        return self._read[1].done is True

    @property
    def falsely_done(self) -> bool:
        """Whether `done` is there and speaks of other records: some were lost."""
        return self._read[1].done is False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted name -> value, of all that the run is known by."""
        return flatten(self.value)

    @property
    def full(self) -> bool:
        """Whether it is the full cache as it is, what others are compared with."""
        return (self.value["method"]["name"], self.value["codec"]["name"]) == ("full", "raw")

    @property
    def cache(self) -> str:
        """Method, allocator and codec with all their settings."""
        return json.dumps({group: self.value[group] for group in CACHE_GROUPS}, sort_keys=True)


def flatten(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"task.length": 2048, …} of nested mappings, however deep; an empty one leaves nothing."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= {f"{key}.{name}": own for name, own in flatten(item).items()}
        else:
            flat[key] = item
    return flat


@dataclass
class FoundRuns:
    """Runs of a store. `damaged`: name of a folder -> why its run is left out; `passed_over`: hash of a run that is
    used -> what of its records is not.
    """

    runs: list[StoredRun] = field(default_factory=list)
    unfinished: list[StoredRun] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)

    def note_damage(self, run: StoredRun) -> None:
        """Read the records of a run and keep what is damaged of them."""
        if run.problems:
            own = self.damaged if run.falsely_done else self.passed_over
            own[run.hash] = "; ".join(run.problems)

    def print_damage(self) -> None:
        """Say on stderr what is damaged, one line a run."""
        lines = {name: f"is left out: {why}" for name, why in self.damaged.items()}
        lines |= {name: f"is used without its damage: {why}" for name, why in self.passed_over.items()}
        for name, line in sorted(lines.items()):
            print(escape(f"kvbench: run {name} {line}"), file=sys.stderr)


def check_folder(results: Path) -> None:
    """SettingError for a folder of results in which nothing was ever run."""
    if not (results / "runs").is_dir():
        raise SettingError(f"results={results}: no folder with runs")


def list_folders(results: Path) -> list[Path]:
    """The folders of all runs, damaged ones too, by name."""
    return sorted(path for path in (results / "runs").glob("*") if path.is_dir())


def find_runs(results: Path) -> FoundRuns:
    """All runs whose run.yaml can be read, by hash, in `runs`; their records are read when they are asked for."""
    found = FoundRuns()
    for path in list_folders(results):
        try:
            value = read_run_value(path)
            check_value(value)
        except ValueError as error:
            found.damaged[path.name] = str(error)
            continue
        found.runs.append(StoredRun(path.name, value, RunFolder(results / "runs", value)))
    return found


def find_finished(results: Path) -> FoundRuns:
    """The finished runs and the others, by hash, with their records."""
    every = find_runs(results)
    found = FoundRuns(damaged=every.damaged)
    for run in every.runs:
        found.note_damage(run)
        if run.finished:
            found.runs.append(run)
        elif not run.falsely_done:
            found.unfinished.append(run)
    return found


def check_value(value: Mapping[str, Any]) -> None:
    """ValueError for what run.yaml lacks of the settings that every run has."""
    try:
        for group in NAMED_GROUPS:
            str(value[group]["name"])
        float(value["budget"]), str(value["question"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"run.yaml lacks a setting ({error})") from None


def drop_twins(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """The runs, by hash. Of two that differ in `fidelity` alone, and so have the same answers, the one that is finished
    and compares predictions.
    """
    twins: dict[str, list[StoredRun]] = {}
    for run in runs:
        plain = {name: value for name, value in run.value.items() if name != "fidelity"}
        twins.setdefault(run.hash if plain == run.value else run_hash(plain), []).append(run)

    def rank(run: StoredRun) -> tuple[bool, bool]:
        return run.finished, "fidelity" in run.value

    best = [own[0] if len(own) == 1 else max(own, key=rank) for own in twins.values()]
    return sorted(best, key=lambda run: run.hash)


def load_runs(results: Path) -> list[StoredRun]:
    """The runs, finished or not, by hash, one of each twins; SettingError where none is. Damage is told on stderr."""
    found = find_finished(results)
    found.print_damage()
    if not (runs := [*found.runs, *found.unfinished]):
        raise SettingError(f"{results / 'runs'}: no run there")
    return drop_twins(runs)


def load_finished(results: Path) -> tuple[list[StoredRun], int]:
    """The finished runs, by hash, and how many are not finished; SettingError where none is."""
    runs = load_runs(results)
    found = [run for run in runs if run.finished]
    if not found:
        raise SettingError(f"{results / 'runs'}: no finished run")
    return found, len(runs) - len(found)


def parse_selection(given: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The folder of results and the filters of a command line, `results setting=value,value …`; SettingError."""
    folders = [own for own in given if "=" not in own]
    if len(folders) > 1:
        raise SettingError(f"{folders[1]}: one folder of results, then setting=value")
    filters = [own.split("=", 1) for own in given if "=" in own]
    if len(dict(filters)) < len(filters):
        raise SettingError(f"{' '.join(map('='.join, filters))}: each setting once, with values between commas")
    return Path(folders[0] if folders else "results"), dict(filters)


def filter_runs(runs: Sequence[StoredRun], filters: Mapping[str, str]) -> list[StoredRun]:
    """The runs whose settings are among the values given, a value or several between commas; SettingError for a setting
    that no run has.
    """
    kept = list(runs)
    for name, text in filters.items():
        values = [_parse_value(own) for own in (text, *text.split(","))] + [text, *text.split(",")]
        key = f"{name}.name" if name in NAMED_GROUPS else name
        known = {json.dumps(run.settings[key]) for run in runs if key in run.settings}
        if not known:
            names = sorted({own for run in runs for own in run.settings})
            raise SettingError(f"{name}: no run has such a setting; choose one of {', '.join([*NAMED_GROUPS, *names])}")
        kept = [run for run in kept if key in run.settings and run.settings[key] in values]
        if not kept:
            raise SettingError(f"{name}={text}: no finished run; there are {', '.join(sorted(known))}")
    return kept


def _parse_value(text: str) -> Any:
    """A number, true, false, null or a list; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def find_differences(runs: Iterable[StoredRun], without: Sequence[str]) -> dict[str, list[str]]:
    """Settings in which runs differ, with their values as JSON; `without`: settings or groups left out."""
    runs = list(runs)
    skipped = {*without, "fidelity"}  # which changes no answer
    names = {name for run in runs for name in run.settings if name.split(".")[0] not in skipped}
    found = {name: {json.dumps(run.settings.get(name)) for run in runs} for name in sorted(names)}
    return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def find_baseline(run: StoredRun, runs: Sequence[StoredRun], wanted: str | None = None) -> StoredRun:
    """The full cache's run on the same samples; SettingError if there is none, or several that say different things.

    `wanted`: the hash of the one meant.
    """
    same = [
        own
        for own in runs
        if own.full and own.hash == (wanted or own.hash) and not find_differences([own, run], UNSHARED_SETTINGS)
    ]
    if not same:
        raise SettingError(f"no finished run of the full cache on the same samples{f' is {wanted}' if wanted else ''}")
    if len({json.dumps(_read_answers(own), sort_keys=True) for own in same}) > 1:
        raise SettingError(f"full-cache runs {', '.join(own.hash for own in same)} differ; choose one, --full HASH")
    return same[0]


def _read_answers(run: StoredRun) -> dict[str, list[Any]]:
    keys = ("prompt_hash", "target_hash", "score", "error")
    return {uid: [record[key] for key in keys] for uid, record in run.records.items()}
