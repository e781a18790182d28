"""Whether the records of a results folder are whole and can be paired: `make check-results`.

`--replay` executes n random records again and compares them (kvbench.runs.replay); `--seed` draws the same ones again.

Of every run: run.yaml and its hash, every line of every file and the fields of its record (kvbench.store.record), one
record a sample, `done` against the records (kvbench.store.runs), and the same prompts and targets as the other runs on
these samples. One line a run; exit code 1 if any is damaged. A run that is merely unfinished is not: the command that
began it goes on with it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvbench.store.run_folder import run_hash
from kvbench.store.runs import UNSHARED_SETTINGS, RunRecords, StoredRun, check_folder, find_runs
from kvbench.validation import SettingError

ROOT = Path(__file__).resolve().parents[2]


def comparison_key(value: Mapping[str, Any]) -> str:
    """What runs have in common that can be compared: model, task, data, question, sampling, seed, machine's kind."""
    return run_hash({key: item for key, item in value.items() if key not in UNSHARED_SETTINGS})


def audit_runs(results: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(hash, state, what is wrong) of every run; SettingError for a folder without runs."""
    check_folder(results)
    found = find_runs(results)
    said = find_common_hashes(found.runs)
    wrong = {name: ("damaged", [why]) for name, why in found.damaged.items()}
    runs = {run.hash: run for run in found.runs}
    for name in sorted([*wrong, *runs]):
        yield name, *(wrong[name] if name in wrong else check_run(runs[name], said))


def check_run(run: StoredRun, said: Mapping[tuple[str, str], Sequence[tuple[str, str]]]) -> tuple[str, list[str]]:
    """The state of a run and what is wrong with its records; `said`: what `find_common_hashes` says."""
    records, key, count, differ = RunRecords(run.folder.path, fields=True), comparison_key(run.value), 0, 0
    for record in records:
        count += 1
        own = get_hashes(record)
        differ += own not in said.get((key, record["uid"]), [own])  # it may have come since
    wrong = list(records.problems)
    if differ:
        wrong.append(f"{differ} samples whose prompt or target is not that of most runs")
    return "damaged" if wrong else f"{count} records, {'finished' if records.done else 'unfinished'}", wrong


def find_common_hashes(runs: Sequence[StoredRun]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(protocol, uid) -> the hashes that most runs have; none where no hashes have more runs than others."""
    found: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for run in runs:
        key = comparison_key(run.value)
        for record in RunRecords(run.folder.path):
            found.setdefault((key, record["uid"]), Counter())[get_hashes(record)] += 1
    most = {key: max(own.values()) for key, own in found.items()}
    tied = {key: [one for one, count in own.items() if count == most[key]] for key, own in found.items()}
    return {key: own if len(own) == 1 else [] for key, own in tied.items()}


def get_hashes(record: Mapping[str, Any]) -> tuple[str, str]:
    """Of its prompt and its target, as JSON: a damaged record has anything there."""
    return json.dumps(record.get("prompt_hash")), json.dumps(record.get("target_hash"))


def draw_records(results: Path, count: int, seed: int) -> tuple[list[tuple[str, str]], int]:
    """`count` random records of the runs that can be read, as (run, uid), and how many there are; SettingError if there
    are fewer.
    """
    found = [(run.hash, record["uid"]) for run in find_runs(results).runs for record in RunRecords(run.folder.path)]
    if count > len(found):
        raise SettingError(f"REPLAY={count}: there are {len(found)} records")
    return Random(seed).sample(sorted(found), count), len(found)
