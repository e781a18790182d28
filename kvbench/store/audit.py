"""Check that the records of a results folder are intact and can be paired: `make check-results`.

The audit checks for every run:

* run.yaml and its hash,
* every line of every file, and the fields of its record (kvbench.store.record),
* that each sample has one record, and that `done` counts exactly the records (kvbench.store.runs),
* that prompts and targets equal those of the other runs on the same samples.

It prints one line per run and exits with code 1 if any run is damaged. An unfinished run is not damaged: the command
that started it continues it.

`--replay=n` also executes n random records again and compares them (kvbench.runs.replay). `--seed` chooses them.
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


def comparison_key(value: Mapping[str, Any]) -> str:
    """Return a hash of the settings that two comparable runs share.

    These are the model, task, data, question, sampling, seed and kind of machine.
    """
    return run_hash({key: item for key, item in value.items() if key not in UNSHARED_SETTINGS})


def audit_runs(results: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Check every run of a results folder.

    Yields:
        The run's hash, its state and a list of problems.

    Raises:
        SettingError: The folder contains no runs.
    """
    check_folder(results)
    found = find_runs(results)
    said = find_common_hashes(found.runs)
    wrong = {name: ("damaged", [why]) for name, why in found.damaged.items()}
    runs = {run.hash: run for run in found.runs}
    for name in sorted([*wrong, *runs]):
        yield name, *(wrong[name] if name in wrong else check_run(runs[name], said))


def check_run(run: StoredRun, said: Mapping[tuple[str, str], Sequence[tuple[str, str]]]) -> tuple[str, list[str]]:
    """Check the records of one run.

    Args:
        run: The run.
        said: The result of `find_common_hashes`.

    Returns:
        The run's state ("damaged", or how many records it has) and a list of problems.
    """
    records, key, count, differ = RunRecords(run.folder.path, fields=True), comparison_key(run.value), 0, 0
    for record in records:
        count += 1
        own = get_hashes(record)
        differ += own not in said.get((key, record["uid"]), [own])  # a record may be newer than `said`
    wrong = list(records.problems)
    if differ:
        wrong.append(f"{differ} samples have another prompt or target than in most runs")
    return "damaged" if wrong else f"{count} records, {'finished' if records.done else 'unfinished'}", wrong


def find_common_hashes(runs: Sequence[StoredRun]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return (comparison key, uid) -> the hashes that most runs have, or nothing if there is a tie."""
    found: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for run in runs:
        key = comparison_key(run.value)
        for record in RunRecords(run.folder.path):
            found.setdefault((key, record["uid"]), Counter())[get_hashes(record)] += 1
    most = {key: max(own.values()) for key, own in found.items()}
    tied = {key: [one for one, count in own.items() if count == most[key]] for key, own in found.items()}
    return {key: own if len(own) == 1 else [] for key, own in tied.items()}


def get_hashes(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the hashes of a record's prompt and target as JSON, because a damaged record may hold anything there."""
    return json.dumps(record.get("prompt_hash")), json.dumps(record.get("target_hash"))


def draw_records(results: Path, count: int, seed: int) -> tuple[list[tuple[str, str]], int]:
    """Draw random records from all runs that can be read.

    Args:
        results: The results folder.
        count: How many records to draw.
        seed: Seed of the draw.

    Returns:
        The records as (run hash, uid), and the number of all records.

    Raises:
        SettingError: The store has fewer than `count` records.
    """
    found = [(run.hash, record["uid"]) for run in find_runs(results).runs for record in RunRecords(run.folder.path)]
    if count > len(found):
        raise SettingError(f"REPLAY={count}: the store has {len(found)} records")
    return Random(seed).sample(sorted(found), count), len(found)
