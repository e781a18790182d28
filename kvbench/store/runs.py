"""Read the runs of a store, filter them by their settings, and find the full cache's run to compare each with.

All commands read a store through this module, so that all of them handle damage in the same way:

    left out       A damaged run: a file does not fit `done`, a line does not fit its checksum or is no JSON, a record
                   breaks the rules of kvbench.store.record, a setting those of `check_value`, or `done` counts other
                   records than the folder holds.
    passed over    All but the first record of a sample, where somebody merged folders by hand. The run is used,
                   finished or not.

`find_runs` reads run.yaml only, `find_finished` also reads the records. `FoundRuns` collects what they left out or
passed over, and `FoundRuns.print_damage` prints it on stderr, one line per run. A last line without its end, or with
zeros, is no damage without a `done` that seals the files: a process is writing it now or was stopped, and the next
writer removes it.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.store.record import find_problems, shorten
from kvbench.store.run_folder import (
    CHANGED,
    RunFolder,
    find_changed_files,
    fits_records,
    hash_file,
    list_record_files,
    parse_line,
    read_run_value,
    read_seal,
    read_total,
    run_hash,
    sort_sealed,
)
from kvbench.validation import SettingError, describe_choices, escape, is_number

NAMED_GROUPS = ("model", "method", "allocator", "codec", "task")  # groups that a filter selects by their name
CACHE_GROUPS = ("method", "allocator", "codec")
# settings in which a run and its full-cache run may differ
UNSHARED_SETTINGS = (*CACHE_GROUPS, "budget", "budget_of", "block_size", "sources")
MAX_NAMED = 3  # lines or samples that a message lists


class RunRecords:
    """Iterate over the records of a run's folder, each sample once.

    Of several records of a sample, the first one in a file that `done` seals counts. The records of a damaged run must
    not be used, and only after the last one it is known whether the run is damaged.

    Args:
        path: The folder.

    Attributes:
        damage: A line for each kind of damage, complete after the last record.
        doubles: A line for each file that holds records of samples that others hold too.
        finished: After the last record: whether `done` fits the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: list[str] = []
        self.doubles: list[str] = []
        self.finished = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            seal = read_seal(self.path)  # before the records: once `done` exists, every record is on disk
            files = {file.name: file for file in list_record_files(self.path)}
        except ValueError as error:
            self.damage.append(str(error))
            return
        sealed = {} if seal is None else seal.get("files", {})
        self.damage += find_changed_files(self.path, sealed)
        seen: set[str] = set()
        for name in sort_sealed(files, sealed):
            yield from self._read(files[name], sealed.get(name), seal is not None, seen)
        if seal is not None and not fits_records(seal, seen):
            self.damage.append(f"done does not fit the {len(seen)} records in the folder")
        self.finished = seal is not None and not self.damage

    def _read(self, file: Path, hashed: str | None, done: bool, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Yield the records of a file whose samples are not in `seen`.

        Args:
            file: The file.
            hashed: Its SHA-256 according to `done`, or None.
            done: Whether there is a `done`.
            seen: Samples; those of the file are added.
        """
        sealed = hashed is not None and hash_file(file) == hashed
        if hashed is not None and not sealed:
            self.damage.append(f"{file.name} {CHANGED}")
        wrong: dict[str, list[int]] = {}
        doubles, problems, zeros = [], [], 0
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if zeros:
                    wrong.setdefault("is no JSON", []).append(zeros)
                    zeros = 0
                if not line.endswith(b"\n"):
                    if done:
                        wrong.setdefault("is torn", []).append(number)
                    continue
                try:
                    record = parse_line(line, sealed)
                except ValueError as error:
                    if b"\0" in line and hashed is None:  # a crash of the machine may leave this at the end
                        zeros = number
                    elif line.strip():
                        wrong.setdefault(str(error), []).append(number)
                    continue
                if record["uid"] in seen:
                    doubles.append(record["uid"])
                    continue
                seen.add(record["uid"])
                problems += [f"line {number}, {record['uid']}: {problem}" for problem in find_problems(record)]
                yield record
        self.damage += [f"{file.name}: line {name_some(numbers)} {reason}" for reason, numbers in wrong.items()]
        if problems:
            self.damage.append(f"{file.name}: {name_some(problems)}")
        if doubles:
            self.doubles.append(f"{file.name}: sample {name_some(doubles)} in another line too")


def name_some(names: Sequence[object]) -> str:
    """Return a text with the first of `names` and the number of the others."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(map(str, names[:MAX_NAMED]))}{more}"


def count_things(number: int, name: str) -> str:
    """Return a number with the name of what it counts, such as "1 sample" or "1,200 samples"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class StoredRun:
    """A run of a store. Its records are read when they are first needed."""

    hash: str
    value: Mapping[str, Any]
    folder: RunFolder

    @cached_property
    def _read(self) -> tuple[dict[str, dict[str, Any]], RunRecords]:
        records = RunRecords(self.folder.path)
        return {record["uid"]: record for record in records}, records

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """The run's records by uid."""
        return self._read[0]

    @property
    def damage(self) -> list[str]:
        """A line for each kind of damage. The run is left out if there is any."""
        return self._read[1].damage

    @property
    def finished(self) -> bool:
        """Whether `done` exists and fits the folder."""
        return self._read[1].finished

    def restrict(self, records: Mapping[str, dict[str, Any]]) -> "StoredRun":
        """Return the run as if it had only these of its records, by uid."""
        part = replace(self)
        part.__dict__["_read"] = dict(records), self._read[1]
        return part

    @cached_property
    def planned(self) -> int:
        """Number of samples that the run has when it is finished, as far as its folder and its records say."""
        return max(read_total(self.folder.path) or 0, len(self.records))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings that identify the run, by dotted name."""
        return flatten(self.value)

    @property
    def budget_setting(self) -> str:
        """The dotted name of the setting that decides how many rows stay: the budget, or one of the method."""
        setting = self.value["method"].get("budget_setting")
        return "budget" if setting is None else f"method.{setting}"

    @property
    def budget_name(self) -> str:
        """The budget as given, such as "0.05", or the setting that decides in its place, such as "threshold=-2.0"."""
        return name_budget(self.value)

    @property
    def full(self) -> bool:
        """Whether this is an unchanged full cache, which other runs are compared with."""
        return (self.value["method"]["name"], self.value["codec"]["name"]) == ("full", "raw")

    @property
    def machines(self) -> list[dict[str, Any]]:
        """Descriptions of the machines that worked on the run. One that cannot be read is left out."""
        machines = []
        for path in sorted(self.folder.path.glob("machine*.json")):
            with suppress(OSError, ValueError):
                machines.append(json.loads(path.read_text()))
        return [machine for machine in machines if isinstance(machine, dict)]

    @property
    def cache(self) -> str:
        """Method, allocator and codec with all their settings, as JSON."""
        return json.dumps({group: self.value[group] for group in CACHE_GROUPS}, sort_keys=True)


def flatten(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"task.length": 2048, …} for nested mappings of any depth. An empty mapping adds nothing."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= {f"{key}.{name}": leaf for name, leaf in flatten(item).items()}
        else:
            flat[key] = item
    return flat


def name_budget(value: Mapping[str, Any]) -> str:
    """Return the name of a run's budget (`StoredRun.budget_name`)."""
    setting = value["method"].get("budget_setting")
    return str(value["budget"]) if setting is None else escape(f"{setting}={value['method'][setting]}")


@dataclass
class FoundRuns:
    """Runs that were found in a store.

    Attributes:
        runs: The runs. `find_finished` puts only finished ones here.
        unfinished: The other runs, from `find_finished`.
        damaged: Name of a folder -> why its run is left out.
        passed_over: Hash of a run that is used -> which of its records are not.
    """

    runs: list[StoredRun] = field(default_factory=list)
    unfinished: list[StoredRun] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)

    def note_damage(self, run: StoredRun) -> None:
        """Read the records of a run and note what is left out or passed over."""
        self.note(run.hash, run._read[1])

    def note(self, name: str, records: RunRecords) -> None:
        """Note what is left out or passed over of the run with this hash, whose records have been read."""
        if records.damage:
            self.damaged[name] = "; ".join(records.damage)
        elif records.doubles:
            self.passed_over[name] = "; ".join(records.doubles)

    def print_damage(self) -> None:
        """Print the damage on stderr, one line per run."""
        lines = {name: f"is left out: {why}" for name, why in self.damaged.items()}
        lines |= {name: f"is used without its second records: {why}" for name, why in self.passed_over.items()}
        for name, line in sorted(lines.items()):
            print(escape(f"kvbench: run {name} {line}"), file=sys.stderr)


def check_folder(results: Path) -> None:
    """Raise a SettingError if a results folder contains no runs."""
    if not (results / "runs").is_dir():
        raise SettingError(f"results={results}: the folder contains no runs")


def list_folders(results: Path) -> list[Path]:
    """Return the folders of all runs, including damaged ones, sorted by name."""
    return sorted(path for path in (results / "runs").glob("*") if path.is_dir())


def find_runs(results: Path) -> FoundRuns:
    """Return all runs whose settings can be read, sorted by hash. Their records are read when they are needed."""
    store = FoundRuns()
    for path in list_folders(results):
        try:
            value = read_run_value(path)
            check_value(value)
        except ValueError as error:
            store.damaged[path.name] = str(error)
            continue
        store.runs.append(StoredRun(path.name, value, RunFolder(results / "runs", value)))
    return store


def find_finished(results: Path) -> FoundRuns:
    """Return the finished and the unfinished runs, sorted by hash. This reads all records."""
    every = find_runs(results)
    store = FoundRuns(damaged=every.damaged)
    for run in every.runs:
        store.note_damage(run)
        if not run.damage:
            (store.runs if run.finished else store.unfinished).append(run)
    return store


def check_value(value: Mapping[str, Any]) -> None:
    """Raise a ValueError if the settings of a run lack one that every run has, or one has a value that no run has."""
    for name in NAMED_GROUPS:
        named = value.get(name)
        if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
            raise ValueError(f"run.yaml lacks a setting ({name}.name)")
    key = value["method"].get("budget_setting")
    decides = value.get("budget") if key is None else value["method"].get(key) if isinstance(key, str) else None
    if decides is None:
        raise ValueError(f"run.yaml lacks a setting ({'budget' if key is None else f'method.{key}'})")
    for name, (fits, expected) in SETTINGS.items():
        part, _, key = name.rpartition(".")
        group = value.get(part) if part else value
        if isinstance(group, Mapping) and key in group and not fits(group[key]):
            raise ValueError(f"run.yaml: {name} is {shorten(group[key])}, expected {expected}")
    if "question" not in value:
        raise ValueError("run.yaml lacks a setting (question)")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {  # setting -> whether a value fits, and what does
    "budget": (lambda budget: budget is None or (is_number(budget) and budget > 0), "a number above 0 or null"),
    "block_size": (lambda size: size is None or (type(size) is int and size > 0), "a whole number above 0 or null"),
    "question": (("visible", "hidden").__contains__, "visible or hidden"),
    "seed": (_is_count, "a whole number from 0 on"),
    "averages": (lambda averages: isinstance(averages, list), "a list"),
    "sampling.temperature": (lambda temperature: is_number(temperature) and temperature >= 0, "a number from 0 on"),
    "sampling.top_p": (lambda share: is_number(share) and 0 < share <= 1, "a share in (0, 1]"),
    "fidelity": (lambda fidelity: isinstance(fidelity, bool), "true or false"),
    "budget_of": (_is_text, "a text"),
    "data": (_is_text, "a text"),
    "sources": (_is_text, "a text"),
    "model.identity": (_is_text, "a text"),
    "device.type": (_is_text, "a text"),
}


def drop_twins(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Return the runs, sorted by hash, without twins.

    Twins differ only in `fidelity` and therefore have the same answers. The finished twin that compares predictions is
    preferred.
    """
    twins: dict[str, list[StoredRun]] = {}
    for run in runs:
        plain = {name: value for name, value in run.value.items() if name != "fidelity"}
        twins.setdefault(run.hash if plain == run.value else run_hash(plain), []).append(run)

    def rank(run: StoredRun) -> tuple[bool, bool]:
        return run.finished, "fidelity" in run.value

    best = [group[0] if len(group) == 1 else max(group, key=rank) for group in twins.values()]
    return sorted(best, key=lambda run: run.hash)


def list_runs(results: Path) -> list[StoredRun]:
    """Return all runs without reading their records, and print on stderr which run.yaml cannot be read.

    Raises:
        SettingError: The folder contains no runs.
    """
    check_folder(results)
    store = find_runs(results)
    store.print_damage()
    return store.runs


def load_runs(results: Path) -> list[StoredRun]:
    """Return all runs, finished or not, without twins (`drop_twins`), and print damage on stderr.

    Raises:
        SettingError: There is no run.
    """
    store = find_finished(results)
    store.print_damage()
    if not (runs := [*store.runs, *store.unfinished]):
        raise SettingError(f"{results / 'runs'}: no run there")
    return drop_twins(runs)


def parse_filters(given: Sequence[str]) -> dict[str, str]:
    """Return filters by setting, from texts of the form `setting=value,value`.

    Raises:
        SettingError: A setting is given twice.
    """
    filters = [setting.split("=", 1) for setting in given]
    if len(dict(filters)) < len(filters):
        raise SettingError(f"{' '.join(given)}: give each setting once, with commas between values")
    return dict(filters)


def filter_runs(runs: Sequence[StoredRun], filters: Mapping[str, str]) -> list[StoredRun]:
    """Return the runs that pass all filters.

    Args:
        runs: The runs.
        filters: Setting -> allowed values, separated by commas. A group such as `method` stands for its name.

    Raises:
        SettingError: No run has such a setting, or no run passes.
    """
    kept = list(runs)
    for name, text in filters.items():
        values = [_parse_value(choice) for choice in (text, *text.split(","))] + [text, *text.split(",")]
        key = f"{name}.name" if name in NAMED_GROUPS else name
        known = {json.dumps(run.settings[key]) for run in runs if key in run.settings}
        if not known:
            names = sorted({setting for run in runs for setting in run.settings})
            raise SettingError(f"{name}: no run has this setting; {describe_choices(name, [*NAMED_GROUPS, *names])}")
        kept = [run for run in kept if key in run.settings and run.settings[key] in values]
        if not kept:
            raise SettingError(f"{name}={text}: no finished run has this; there are {', '.join(sorted(known))}")
    return kept


def _parse_value(text: str) -> Any:
    """Return the number, boolean, null or list that a text spells, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def choose_run(runs: Sequence[StoredRun], start: str) -> StoredRun:
    """Return the run whose hash begins so.

    Raises:
        SettingError: There is no such run, or there are several.
    """
    fitting = [run for run in runs if run.hash.startswith(start)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise SettingError(f"run={start}: no run has such a hash; kvbench results scores --format csv lists them")
    raise SettingError(
        f"run={start}: begins the hashes of {len(fitting)} runs: {name_some([run.hash for run in fitting])}"
    )


def find_differences(runs: Iterable[StoredRun], without: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings in which runs differ.

    Args:
        runs: The runs to compare.
        without: Settings and groups to ignore. `fidelity` is always ignored, because it changes no answer.

    Returns:
        Dotted name of a setting -> its values as JSON.
    """
    runs = list(runs)
    skipped = {*without, "fidelity"}
    names = {name for run in runs for name in run.settings if not skipped & {name, name.split(".")[0]}}
    values_by_name = {name: {json.dumps(run.settings.get(name)) for run in runs} for name in sorted(names)}
    return {name: sorted(values) for name, values in values_by_name.items() if len(values) > 1}


def find_baseline(run: StoredRun, runs: Sequence[StoredRun], wanted: str | None = None) -> StoredRun:
    """Return the full cache's run on the same samples as `run`.

    Args:
        run: The run to compare.
        runs: The runs to choose from. Unfinished ones count only if there is no finished one.
        wanted: Hash of the full cache's run, if there are several with different answers.

    Raises:
        SettingError: There is no such run, or there are several with different answers.
    """
    alike = [
        candidate for candidate in runs if candidate.full and not find_differences([candidate, run], UNSHARED_SETTINGS)
    ]
    same = [
        candidate
        for candidate in [candidate for candidate in alike if candidate.finished] or alike
        if candidate.hash == (wanted or candidate.hash)
    ]
    if not same:
        named = f" has the hash {wanted}" if wanted else ""
        raise SettingError(f"no finished run of the full cache on the same samples{named}")
    if len({json.dumps(_read_answers(candidate), sort_keys=True) for candidate in same}) > 1:
        hashes = ", ".join(candidate.hash for candidate in same)
        raise SettingError(f"full-cache runs {hashes} differ in their answers; choose one with --full HASH")
    return same[0]


def _read_answers(run: StoredRun) -> dict[str, list[Any]]:
    keys = ("prompt_hash", "target_hash", "score", "error")
    return {uid: [record[key] for key in keys] for uid, record in run.records.items()}
