"""Whether the records of a results folder are whole and can be paired: `make check-results`.

    python -m kvbench.audit [results] [--replay n] [--seed s]

`--replay` executes n random records again and compares them (kvbench.replay); `--seed` draws the same ones again.

Of every run: run.yaml and its hash, every line of every file and the fields of its record (kvbench.record), one record
a sample, `done` against the records (kvbench.stored), and the same prompts and targets as the other runs on these
samples. One line a run; exit code 1 if any is damaged. A run that is merely unfinished is not: the command that began
it goes on with it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from secrets import randbelow
from typing import Any

from kvbench.settings import Arguments, SettingError, answered
from kvbench.store import run_hash
from kvbench.stored import OWN, RunRecords, Stored, check_folder, find_runs

HASHES = ("prompt_hash", "target_hash")
ROOT = Path(__file__).resolve().parents[1]


def protocol(value: Mapping[str, Any]) -> str:
    """What runs have in common that can be compared: model, task, data, question, sampling, seed, machine's kind."""
    return run_hash({key: item for key, item in value.items() if key not in OWN})


def audit(results: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(hash, state, what is wrong) of every run; SettingError for a folder without runs."""
    check_folder(results)
    found = find_runs(results)
    said = agreed(found.runs)
    wrong = {name: ("damaged", [why]) for name, why in found.damaged.items()}
    runs = {run.hash: run for run in found.runs}
    for name in sorted([*wrong, *runs]):
        yield name, *(wrong[name] if name in wrong else check(runs[name], said))


def check(run: Stored, said: Mapping[tuple[str, str], Sequence[tuple[str, str]]]) -> tuple[str, list[str]]:
    """The state of a run and what is wrong with its records; `said`: what `agreed` says."""
    records, key, count, differ = RunRecords(run.folder.path, fields=True), protocol(run.value), 0, 0
    for record in records:
        count += 1
        own = hashes(record)
        differ += own not in said.get((key, record["uid"]), [own])  # it may have come since
    wrong = list(records.problems)
    if differ:
        wrong.append(f"{differ} samples whose prompt or target is not that of most runs")
    return "damaged" if wrong else f"{count} records, {'finished' if records.done else 'unfinished'}", wrong


def agreed(runs: Sequence[Stored]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(protocol, uid) -> the hashes that most runs have; none where no hashes have more runs than others."""
    found: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
    for run in runs:
        key = protocol(run.value)
        for record in RunRecords(run.folder.path):
            found.setdefault((key, record["uid"]), Counter())[hashes(record)] += 1
    most = {key: max(own.values()) for key, own in found.items()}
    tied = {key: [one for one, count in own.items() if count == most[key]] for key, own in found.items()}
    return {key: own if len(own) == 1 else [] for key, own in tied.items()}


def hashes(record: Mapping[str, Any]) -> tuple[str, str]:
    """Of its prompt and its target, as JSON: a damaged record has anything there."""
    return tuple(json.dumps(record.get(name)) for name in HASHES)


def draw(results: Path, count: int, seed: int) -> tuple[list[tuple[str, str]], int]:
    """`count` random records of the runs that can be read, as (run, uid), and how many there are; SettingError if there
    are fewer.
    """
    found = [(run.hash, record["uid"]) for run in find_runs(results).runs for record in RunRecords(run.folder.path)]
    if count > len(found):
        raise SettingError(f"REPLAY={count}: there are {len(found)} records")
    return Random(seed).sample(sorted(found), count), len(found)


def number(name: str, text: str, least: int) -> int:
    """A whole number that the command line gives; SettingError for another text."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise SettingError(f"{name}={text}: a whole number of at least {least}")
    return int(text)


def show(arguments: Sequence[str]) -> int:
    """Print what `audit` finds, and what executing records again gives; 1 if a run or a record is damaged."""
    parser = Arguments("kvbench.audit", __doc__)
    parser.add_argument("results", nargs="?", default="results", type=Path)
    parser.add_argument("--replay")
    parser.add_argument("--seed")
    own = parser.parse_args(arguments)
    again = []
    if own.replay is None and own.seed is not None:
        raise SettingError(f"SEED={own.seed}: draws the records of REPLAY=n, which is missing")
    if own.replay is not None:
        count = number("REPLAY", own.replay, 1)
        seed = randbelow(1 << 31) if own.seed is None else number("SEED", own.seed, 0)
        if not any((own.results / "runs").glob("*/run.yaml")):
            raise SettingError(f"{own.results / 'runs'}: no run there")
        there = draw(own.results, count, seed)[1]
        again = [str(own.results.absolute()), "--records", str(count), "--seed", str(seed)]
    damaged = 0
    for name, state, wrong in audit(own.results):
        print(f"{name}  {state}")
        for line in wrong:
            print(f"    {line}")
        damaged += bool(wrong)
    print(f"{damaged} damaged")
    code = 1 if damaged else 0
    if again:
        print(f"replay: {count} of {there} records, drawn with SEED={seed}", flush=True)
        # in a process of its own, so that this module and all that read the store do without torch
        code = subprocess.run([sys.executable, "-m", "kvbench.replay", *again], env=with_kvbench()).returncode or code
    return code


def with_kvbench() -> dict[str, str]:
    """The environment, in which a new process finds this kvbench wherever it is started."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def main(arguments: Sequence[str]) -> int:
    return answered(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
