"""Runs of a store, chosen by their settings, and the full cache's run that each is compared with."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.settings import SettingError
from kvbench.store import RunFolder, run_hash, value_of

NAMED = ("model", "method", "allocator", "codec", "task")  # groups: as a filter their name is meant
CACHE = ("method", "allocator", "codec")
OWN = (*CACHE, "budget", "budget_of", "block_size", "sources")  # what the full cache's run does not share with others


@dataclass(frozen=True)
class Stored:
    """A run."""

    hash: str
    value: Mapping[str, Any]
    folder: RunFolder

    @cached_property
    def records(self) -> dict[str, dict]:
        """uid -> record."""
        return self.folder.records()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted name -> value, of all that the run is known by."""
        return flat(self.value)

    @property
    def full(self) -> bool:
        """Whether it is the full cache as it is, what others are compared with."""
        return self.value["method"]["name"] == "full" and self.value["codec"]["name"] == "raw"

    @property
    def cache(self) -> str:
        """Method, allocator and codec with all their settings."""
        return json.dumps({group: self.value[group] for group in CACHE}, sort_keys=True)


def flat(value: object, name: str = "") -> dict[str, Any]:
    """{"task.length": 2048, …} of nested mappings."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {key: own for part in value for key, own in flat(value[part], f"{name}.{part}" if name else part).items()}


def every(results: Path) -> list[Stored]:
    """The runs, finished or not, by hash; SettingError for a folder without runs. One that cannot be read is named on
    stderr and left out.
    """
    found = []
    for path in sorted((results / "runs").glob("*/run.yaml")):
        try:
            value = value_of(path.parent)
        except ValueError as error:
            print(f"kvbench: run {path.parent.name} is left out: {error}", file=sys.stderr)
            continue
        folder = RunFolder(results / "runs", value)
        found.append(Stored(folder.hash, value, folder))
    if not found:
        raise SettingError(f"{results / 'runs'}: no run there")
    return without_twins(found)


def without_twins(runs: Iterable[Stored]) -> list[Stored]:
    """The runs, by hash. Of two that differ in `fidelity` alone, and so have the same answers, the one that is finished
    and compares predictions.
    """
    twins: dict[str, list[Stored]] = {}
    for run in runs:
        plain = {name: value for name, value in run.value.items() if name != "fidelity"}
        twins.setdefault(run.hash if plain == run.value else run_hash(plain), []).append(run)

    def rank(run: Stored) -> tuple[bool, bool]:
        return run.folder.finished, "fidelity" in run.value

    best = [own[0] if len(own) == 1 else max(own, key=rank) for own in twins.values()]
    return sorted(best, key=lambda run: run.hash)


def read(results: Path) -> tuple[list[Stored], int]:
    """The finished runs, by hash, and how many are not finished; SettingError where none is."""
    runs = every(results)
    found = [run for run in runs if run.folder.finished]
    if not found:
        raise SettingError(f"{results / 'runs'}: no finished run")
    return found, len(runs) - len(found)


def asked(given: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The folder of results and the filters of a command line, `results setting=value,value …`; SettingError."""
    folders = [own for own in given if "=" not in own]
    if len(folders) > 1:
        raise SettingError(f"{folders[1]}: one folder of results, then setting=value")
    filters = [own.split("=", 1) for own in given if "=" in own]
    if len(dict(filters)) < len(filters):
        raise SettingError(f"{' '.join(map('='.join, filters))}: each setting once, with values between commas")
    return Path(folders[0] if folders else "results"), dict(filters)


def chosen(runs: Sequence[Stored], filters: Mapping[str, str]) -> list[Stored]:
    """The runs whose settings are among the values given, a value or several between commas; SettingError for a setting
    that no run has.
    """
    kept = list(runs)
    for name, text in filters.items():
        values = [_value(own) for own in (text, *text.split(","))] + [text, *text.split(",")]
        key = f"{name}.name" if name in NAMED else name
        known = {json.dumps(run.settings[key]) for run in runs if key in run.settings}
        if not known:
            names = sorted({own for run in runs for own in run.settings})
            raise SettingError(f"{name}: no run has such a setting; choose one of {', '.join([*NAMED, *names])}")
        kept = [run for run in kept if key in run.settings and run.settings[key] in values]
        if not kept:
            raise SettingError(f"{name}={text}: no finished run; there are {', '.join(sorted(known))}")
    return kept


def _value(text: str) -> Any:
    """A number, true, false, null or a list; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def differing(runs: Iterable[Stored], without: Sequence[str]) -> dict[str, list[str]]:
    """Settings in which runs differ, with their values as JSON; `without`: settings or groups left out."""
    runs = list(runs)
    skipped = {*without, "fidelity"}  # which changes no answer
    names = {name for run in runs for name in run.settings if name.split(".")[0] not in skipped}
    found = {name: {json.dumps(run.settings.get(name)) for run in runs} for name in sorted(names)}
    return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def baseline(run: Stored, runs: Sequence[Stored], wanted: str | None = None) -> Stored:
    """The full cache's run on the same samples; SettingError if there is none, or several that say different things.

    `wanted`: the hash of the one meant.
    """
    same = [own for own in runs if own.full and own.hash == (wanted or own.hash) and not differing([own, run], OWN)]
    if not same:
        raise SettingError(f"no finished run of the full cache on the same samples{f' is {wanted}' if wanted else ''}")
    if len({json.dumps(_answers(own), sort_keys=True) for own in same}) > 1:
        raise SettingError(f"full-cache runs {', '.join(own.hash for own in same)} differ; choose one, --full HASH")
    return same[0]


def _answers(run: Stored) -> dict[str, list]:
    keys = ("prompt_hash", "target_hash", "score", "error")
    return {uid: [record[key] for key in keys] for uid, record in run.records.items()}
