"""Check that the records of a results folder are intact and can be paired: `kvbench check results`.

The audit checks for every run:

* run.yaml and its hash,
* that `done` fits the files and counts exactly the records, and the checksum of every line (kvbench.store.run_folder),
* the fields of every record, their types and ranges (kvbench.store.record), and that each sample has one record,
* that prompts and targets equal those of the other runs on the same samples.

It prints one line per run and exits with code 1 if any run is damaged. An unfinished run is not damaged: the command
that started it continues it.

`--replay=n` also executes n random records again and compares them (kvbench.runs.replay). `--seed` chooses them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvbench.store.run_folder import run_hash
from kvbench.store.runs import UNSHARED_SETTINGS, RunRecords, check_folder, count_things, find_finished, find_runs
from kvbench.validation import SettingError

Hashes = tuple[str, str, str]  # a record's uid, and the hashes of its prompt and target


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
    store = find_runs(results)
    known: dict[Hashes, Hashes] = {}  # keeps one tuple for all runs that have these hashes, to save memory
    read = []
    for run in store.runs:
        records = RunRecords(run.folder.path)
        run_hashes = [known.setdefault(hashes, hashes) for hashes in map(get_hashes, records)]
        read.append((run.hash, comparison_key(run.value), run_hashes, records))
    said = find_common_hashes((key, run_hashes) for _, key, run_hashes, records in read if not records.damage)
    lines = {name: ("damaged", [why]) for name, why in store.damaged.items()}
    for name, key, run_hashes, records in read:
        wrong, common = [*records.damage, *records.doubles], said.get(key, {})
        if differ := sum(common.get(hashes[0], hashes) != hashes for hashes in run_hashes):
            have = "has" if differ == 1 else "have"
            wrong.append(f"{count_things(differ, 'sample')} {have} another prompt or target than in most runs")
        state = f"{len(run_hashes)} records, {'finished' if records.finished else 'unfinished'}"
        lines[name] = "damaged" if wrong else state, wrong
    for name in sorted(lines):
        yield name, *lines[name]


def find_common_hashes(runs: Iterable[tuple[str, Sequence[Hashes]]]) -> dict[str, dict[str, Hashes | None]]:
    """Return what most runs have: comparison key -> uid -> the hashes with their uid, or None if there is a tie.

    Args:
        runs: The comparison key and the hashes of each run.
    """
    counters: dict[str, dict[str, Counter[Hashes]]] = {}
    for key, run_hashes in runs:
        counts = counters.setdefault(key, {})
        for hashes in run_hashes:
            counts.setdefault(hashes[0], Counter())[hashes] += 1
    return {
        key: {uid: choose_most_common(counter) for uid, counter in counts.items()} for key, counts in counters.items()
    }


def choose_most_common(counts: Counter[Hashes]) -> Hashes | None:
    """Return the hashes that were counted most often, or None if there is a tie."""
    (most, count), *others = counts.most_common(2)
    return None if others and others[0][1] == count else most


def get_hashes(record: Mapping[str, Any]) -> Hashes:
    """Return a record's uid and the hashes of its prompt and target, as texts: a damaged record may hold anything."""
    return record["uid"], str(record.get("prompt_hash")), str(record.get("target_hash"))


def draw_records(results: Path, count: int, seed: int) -> tuple[list[tuple[str, str]], int]:
    """Draw random records from all runs that are not damaged.

    Args:
        results: The results folder.
        count: How many records to draw.
        seed: Seed of the draw.

    Returns:
        The records as (run hash, uid), and the number of all records.

    Raises:
        SettingError: The store has fewer than `count` records.
    """
    store = find_finished(results)
    records = [(run.hash, uid) for run in [*store.runs, *store.unfinished] for uid in run.records]
    if count > len(records):
        raise SettingError(f"--replay={count}: the store has {len(records)} records")
    return Random(seed).sample(sorted(records), count), len(records)
