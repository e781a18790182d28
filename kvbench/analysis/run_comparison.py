"""Compare two runs: what differs in their settings, and which samples one of them gains or loses.

The two runs need not be a method and its full cache. Their samples are paired by uid, and the differences are those of
kvbench.analysis.paired, second run minus first.
"""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvbench.analysis.answer_metrics import collect_scores, select_answered
from kvbench.analysis.intervals import TOLERANCE
from kvbench.analysis.paired import Pair, PairedDifference, compare_subtasks, pair_records
from kvbench.analysis.text_table import Column, format_interval, format_number, format_table, pad_numbers, wrap_texts
from kvbench.store.runs import StoredRun, count_things, find_differences
from kvbench.validation import SettingError, escape

SHOWN = 20  # samples of each list


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
        runs: The runs.
        settings: Dotted name of each setting that differs -> its value in both runs.
        subtasks: Subtask -> paired difference, second minus first.
        average: The difference over all subtasks, each weighing the same.
        lost: Samples that score less in the second run, with both scores.
        gained: Samples that score more in the second run, with both scores.
        alone: Number of samples that only the first run has, and only the second.
        failed: Number of pairs left out because an answer failed in either run.
    """

    runs: tuple[StoredRun, StoredRun]
    settings: dict[str, tuple[Any, Any]]
    subtasks: dict[str, PairedDifference]
    average: PairedDifference
    lost: list[tuple[str, float, float]]
    gained: list[tuple[str, float, float]]
    alone: tuple[int, int]
    failed: int

    def to_text(self, width: int) -> str:
        """Return the comparison as plain text."""
        names = [f"{run.hash} ({run.value['method']['name']})" for run in self.runs]
        lines = wrap_texts([f"A: {names[0]}", f"B: {names[1]}"], width)
        settings = [(name, *map(str, values)) for name, values in self.settings.items()]
        if settings:
            heads = ("setting", "A", "B")
            columns = [Column("", head, itemgetter(at)) for at, head in enumerate(heads)]
            lines += format_table(columns, settings, 0, width)
        else:
            lines.append("All settings, the data and the sources are equal.")
        rows = [*self.subtasks.items(), ("average", self.average)]
        lines += format_table(SCORES, rows, 1, width)
        for title, samples in (("lost", self.lost), ("gained", self.gained)):
            more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
            texts = [f"{uid} {one:g} → {other:g}" for uid, one, other in samples[:SHOWN]]
            lines += ["", *wrap_texts([f"{title}: {', '.join(map(escape, texts)) or 'none'}{more}"], width)]
        notes = ["B - A in points, paired by sample, with 95 % intervals; the average weighs each subtask the same."]
        if any(self.alone):
            notes.append(
                f"Only A has {count_things(self.alone[0], 'sample')}, only B {self.alone[1]}; they are left out."
            )
        if self.failed:
            one = self.failed == 1
            notes.append(
                f"{count_things(self.failed, 'sample')} failed in A or B and {'is' if one else 'are'} left out."
            )
        return "\n".join([*lines, "", *wrap_texts(notes, width)]) + "\n"


def compare_runs(one: StoredRun, other: StoredRun) -> RunComparison:
    """Compare two runs.

    Raises:
        SettingError: They have no sample in common, or prompts or targets of a sample differ.
    """
    pairs = pair_records(one.records, other.records)
    kept = select_answered(pairs)
    if not kept:
        raise SettingError(f"run={other.hash}: no sample that {one.hash} answered, too")
    by_subtask: dict[str, list[Pair]] = {}
    for pair in kept:
        by_subtask.setdefault(str(pair[1]["subtask"]), []).append(pair)
    scores = {name: collect_scores(by_subtask[name]) for name in sorted(by_subtask, key=pad_numbers)}
    changed = [(both[1]["uid"], both[0]["score"], both[1]["score"]) for both in kept]
    differ = find_differences([one, other], ())
    return RunComparison(
        runs=(one, other),
        settings={name: (one.settings.get(name), other.settings.get(name)) for name in differ},
        subtasks={name: compare_subtasks([subtask_scores]) for name, subtask_scores in scores.items()},
        average=compare_subtasks(list(scores.values())),
        lost=[sample for sample in changed if sample[2] < sample[1] - TOLERANCE],
        gained=[sample for sample in changed if sample[2] > sample[1] + TOLERANCE],
        alone=(len(one.records) - len(pairs), len(other.records) - len(pairs)),
        failed=len(pairs) - len(kept),
    )


SCORES = (
    Column("", "subtask", lambda row: row[0]),
    Column("score", "A", lambda row: format_number(row[1].mean_full)),
    Column("score", "B", lambda row: format_number(row[1].mean_method)),
    Column("", "B - A", lambda row: format_number(row[1].difference, sign="+")),
    Column("95 %", "interval", lambda row: format_interval(row[1].low, row[1].high, "+")),
    Column("lost/gained", "/same", lambda row: f"{row[1].lost}/{row[1].gained}/{row[1].same}"),
    Column("", "n", lambda row: str(row[1].samples)),
)
