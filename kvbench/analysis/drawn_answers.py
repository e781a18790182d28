"""Draw answers of a store, for a bundle that is small enough to be published with a page of results.

A bundle of whole runs has every record of a study, which is too much to keep beside the page. A bundle of drawn answers
(`kvbench results bundle --draw N`) has N of them, spread evenly over runs and subtasks, so that readers can execute
these again and compare them with the published rows. No score follows from such a part, so its table lists the answers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from kvbench.store.csv_rows import format_rows
from kvbench.store.runs import StoredRun, count_things
from kvbench.validation import SettingError

NUMBERS = ("score", "resident_bytes", "full_bytes", "rows_held", "rows_attended", "tokens_out")  # fields of a record
COLUMNS = ("hash", "model", "method", "codec", "budget", "question", "subtask", "uid", "prompt_hash", *NUMBERS)


def draw_answers(runs: Sequence[StoredRun], count: int, seed: int) -> list[StoredRun]:
    """Draw answers, as many of one run as of another, and within a run as many of one subtask as of another.

    One that a run has more than others goes to a run drawn at random. Of the subtasks that a run has had least often,
    the one comes next that all runs had least often. Records that hold an error in place of an answer are not drawn.

    Args:
        runs: The runs.
        count: How many answers to draw.
        seed: Seed of the draw.

    Returns:
        The runs of which an answer was drawn, sorted by hash, each with its drawn records only.

    Raises:
        SettingError: The runs have fewer answers.
    """
    random = Random(seed)
    left = {run.hash: shuffle_answers(run, random) for run in sorted(runs, key=lambda run: run.hash)}
    answers = count_answers(runs)
    if count > answers:
        raise SettingError(f"--draw={count}: the runs have {count_things(answers, 'answer')}")
    order, subtasks = list(left), sorted({subtask for uids in left.values() for subtask in uids})
    random.shuffle(order)
    random.shuffle(subtasks)
    drawn: dict[str, list[str]] = {name: [] for name in left}
    of_run: Counter[tuple[str, str]] = Counter()
    of_all: Counter[str] = Counter()

    def choose_subtask(name: str) -> str:
        return min(left[name], key=lambda subtask: (of_run[name, subtask], of_all[subtask], subtasks.index(subtask)))

    while count:
        for name in [name for name in order if left[name]][:count]:
            subtask = choose_subtask(name)
            drawn[name].append(left[name][subtask].pop())
            of_run[name, subtask] += 1
            of_all[subtask] += 1
            if not left[name][subtask]:
                del left[name][subtask]
            count -= 1
    by_hash = {run.hash: run for run in runs}
    return [
        by_hash[name].restrict({uid: by_hash[name].records[uid] for uid in sorted(uids)})
        for name, uids in drawn.items()
        if uids
    ]


def shuffle_answers(run: StoredRun, random: Random) -> dict[str, list[str]]:
    """Return the uids of a run's answers by subtask, in random order."""
    answers: dict[str, list[str]] = {}
    for uid, record in sorted(run.records.items()):
        if not record["error"]:
            answers.setdefault(str(record["subtask"]), []).append(uid)
    for uids in answers.values():
        random.shuffle(uids)
    return answers


def count_answers(runs: Iterable[StoredRun]) -> int:
    """Return the number of records that hold an answer."""
    return sum(not record["error"] for run in runs for record in run.records.values())


def format_answers(runs: Iterable[StoredRun]) -> str:
    """Return all records of runs as CSV, sorted by run and sample, with the columns COLUMNS.

    Names are those of the files of conf/ as the run's settings have them, and numbers have all their digits.
    """
    rows: list[Sequence[object]] = [COLUMNS]
    for run in sorted(runs, key=lambda run: run.hash):
        value = run.value
        about = (run.hash, *(value[group]["name"] for group in ("model", "method", "codec")), run.budget_name)
        for uid, record in sorted(run.records.items()):
            sample = (record["subtask"], uid, record["prompt_hash"])
            rows.append((*about, value["question"], *sample, *(record.get(name) for name in NUMBERS)))
    return format_rows(rows)


def describe_drawn(drawn: Mapping[str, Any], records: int, runs: int) -> str:
    """Return a sentence about a bundle of drawn answers, without its end.

    Args:
        drawn: What its manifest says of the draw.
        records: Number of its answers.
        runs: Number of runs that they are from.
    """
    part = f"{count_things(records, 'answer')} of {count_things(runs, 'run')}"
    whole = f"{count_things(drawn['records'], 'answer')} of {count_things(drawn['runs'], 'run')}"
    return f"{part}, drawn with --draw {records} --seed {drawn['seed']} from {whole}, evenly by run and subtask"
