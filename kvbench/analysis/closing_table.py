"""Build the closing table: what a method loses against the full cache and what it costs, by subtask and on average.

Everything is computed here from the records of two runs; a record never stores an average. The table has a row for each
subtask, over the samples that both runs answered:

* the mean scores and the paired interval of their difference (kvbench.analysis.paired),
* the number of samples that score less, more and the same,
* the mean share of bytes held (resident_bytes / full_bytes) and its t interval over contexts,
* the mean share of rows attended during decoding (rows_attended / rows_seen_decoding),
* the medians of the time to first token and of the time per output token after it, in ms.

Rows below the rule are means of the rows above it. The task defines their weights; otherwise there is one average in
which each subtask weighs the same. The last row may be the average over the subtasks that the model can solve
(kvbench.analysis.solvable_subtasks). A second block shows further metrics of the answers
(kvbench.analysis.answer_metrics).

If one side of a pair failed (`error`), the pair is left out and counted. Without a method the table shows the full
cache alone. Notes say so if several runs shared the prefill of a prompt (`shared_prefill`), if questions were read or
answers decoded as one batch (`asked_together`, `decoded_together`), or if several processes used the GPU
(`gpu_processes`).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from scipy.special import bdtr, ndtri

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.answer_metrics import (
    FIDELITY,
    collect_metrics,
    collect_scores,
    count_repeats,
    find_data_kinds,
    find_failure,
    select_answered,
)
from kvbench.analysis.closing_table_format import COST_NAMES, TIME_NAMES, ClosingTable, TableRow
from kvbench.analysis.intervals import TAIL, Mean, Values, compute_means, normalize_weights
from kvbench.analysis.paired import Pair, PairedDifference, PairedScores, compare_averages, pair_records
from kvbench.analysis.run_labels import name_presets
from kvbench.analysis.text_table import NOT_AVAILABLE, pad_numbers
from kvbench.config.catalogue import describe_part, find_preset
from kvbench.store.runs import CACHE_GROUPS, count_things, name_budget
from kvbench.validation import EMBEDDED_MODELS, escape, format_value

Records = Mapping[str, dict[str, Any]]  # uid -> record


EMBEDDED_NOTE = "The embedded reference model tests the harness; it is no evidence about large models."
WEIGHTED_NOTE = (
    "The rows below the rule are means of subtasks, weighted like in the benchmark or in papers that use it."
)
FIDELITY_NOTE = (
    "NLL of the answer: negative log-likelihood of the correct answer's first tokens, which the model reads regardless "
    "of its own answer. KL from the full cache: divergence of its predictions of these tokens from the full cache's. "
    "Both are means in nats a token. Smaller is better, so a sample that counts as gained has become worse."
)
SOLVABLE_NOTE = (
    "{}: covers the subtasks on which this model scores 50 or more with the full cache. They were chosen on other "
    "samples than these (conf/model/{}.yaml)."
)
SHARED_PREFILL_NOTE = (
    "Time to first token of the {}: several cells shared the prefill, so the time is that of the shared part plus the "
    "cell's own part. sweep.share_prefill=false measures each cell alone."
)
SHARED_DECODING_NOTE = (
    "Time per token of the {}: answers of several cells that were decoded as one batch are left out. "
    "sweep.share_decoding=false measures each cell alone."
)
SHARED_QUESTION_NOTE = (
    "Time to first token of the {}: answers whose questions were read as one batch with others are left out. "
    "sweep.share_decoding=false measures each cell alone."
)
SHARED_GPU_NOTE = (
    "Times of the {}: answers that were made while several processes shared a GPU are left out. workers=auto starts "
    "one process on each GPU."
)
SHARED_NOTES = {  # field of a record that counts who shared something -> the note if several did
    "shared_prefill": SHARED_PREFILL_NOTE,
    "decoded_together": SHARED_DECODING_NOTE,
    "asked_together": SHARED_QUESTION_NOTE,
    "gpu_processes": SHARED_GPU_NOTE,
}
NO_INTERVAL_NOTE = (
    "There is no interval if a subtask has only one context, because one context says nothing about others."
)
MINIATURE_NOTE = (
    "Miniature data made by kvbench in the benchmark's format: scores cannot be compared with published ones."
)


def build_run_table(value: Mapping[str, Any], full_records: Records, method_records: Records | None) -> ClosingTable:
    """Build the closing table of a run, with its heading.

    Args:
        value: The run's settings (`run.yaml`).
        full_records: The full cache's records by uid.
        method_records: The run's records by uid; None if the run is the full cache's.

    Raises:
        SettingError: Prompts or targets of a pair differ.
    """
    return finish_tables([draft_run_table(value, full_records, method_records)])[0]


def draft_run_table(
    value: Mapping[str, Any], full_records: Records, method_records: Records | None, brief: bool = False
) -> "TableDraft":
    """Prepare the closing table of a run for `finish_tables`.

    Args:
        value: As in `build_run_table`.
        full_records: Likewise.
        method_records: Likewise.
        brief: Whether to leave out the further metrics, the changed settings, and `full` and `method` of all rows. This
            is several times as fast.

    Raises:
        SettingError: Prompts or targets of a pair differ.
    """
    heading = {
        "model": value["model"]["name"],
        "revision": value["model"].get("identity"),
        **({"weights": value["model"]["weights"]} if value["model"].get("weights") else {}),
        **_describe_architecture(full_records),
        **{group: value[group]["name"] for group in CACHE_GROUPS},
        **({} if brief else {"settings": _describe_settings(value)}),
        "budget": value.get("budget") or name_budget(value),
        **{name: value.get(name) for name in ("block_size", "question")},
        "task": value["task"]["name"],
        "device": value.get("device", {}).get("type"),
        "embedded": is_embedded(value),
    }
    averages = dict(value.get("averages") or []) or None
    solvable = solvable_subtasks.list_solvable(value)
    return draft_table(full_records, method_records, heading, averages, solvable, brief)


def _describe_architecture(records: Records) -> dict[str, str]:
    """Return a line of the heading if a probe admitted the model's architecture."""
    name = next((record["architecture"] for record in records.values() if "architecture" in record), None)
    return {} if name is None else {"architecture": f"{name}, probed, not on the tested list"}


def _describe_settings(value: Mapping[str, Any]) -> str:
    """Return the parts of the cache that have other settings than the default ones, with these, or "default"."""
    texts = {group: describe_part(group, value[group]) for group in CACHE_GROUPS}
    names = {group: value[group]["name"] for group in CACHE_GROUPS}
    for group, preset in {group: find_preset(group, value[group]) for group in CACHE_GROUPS}.items():
        if preset and texts[group].startswith(before := f"{names[group]} {preset}"):
            texts[group] = f"{names[group]} {name_presets(group, value[group])}{texts[group].removeprefix(before)}"
    return "; ".join(text for group, text in texts.items() if text != names[group]) or "default"


def warn_of_data(records: Records, embedded: bool) -> list[str]:
    """Return why scores are no evidence about a benchmark: the embedded model, miniature data, generated text.

    Args:
        records: Records of a run by uid.
        embedded: Whether its model is an embedded one.
    """
    notes = [EMBEDDED_NOTE] if embedded else []
    if "miniature" in find_data_kinds(records):
        notes.append(MINIATURE_NOTE)
    made = [
        what
        for key, what in (("haystack", "haystack"), ("qa", "questions and answers"))
        if any(record["meta"].get(key) == "generated" for record in records.values())
    ]
    if made:
        notes.append(
            f"Generated text ({'; '.join(made)}) replaces the benchmark's own: "
            "scores cannot be compared with published ones."
        )
    return notes


def is_embedded(value: Mapping[str, Any]) -> bool:
    """Return whether a run's model is, or was when the run was made, part of the project."""
    return value["model"]["name"] in (*EMBEDDED_MODELS, "reference_v1")  # stores hold runs of the first version


@dataclass(frozen=True)
class TableDraft:
    """A closing table before its means are computed.

    Attributes:
        heading: Lines above the table.
        rows: Its rows.
        also: The rows of further metrics.
        notes: Lines below the table.
        late_notes: Lines below the note that an interval is missing.
        paired: Whether the table compares a method with the full cache.
        brief: As in `draft_run_table`.
    """

    heading: Mapping[str, str]
    rows: Sequence["RowDraft"]
    also: Sequence["RowDraft"]
    notes: Sequence[str]
    late_notes: Sequence[str]
    paired: bool
    brief: bool

    @property
    def every(self) -> list["RowDraft"]:
        """All rows."""
        return [*self.rows, *self.also]


def finish_tables(drafts: Sequence[TableDraft]) -> list[ClosingTable]:
    """Compute the means of several tables at once, which is faster than one call of `build_run_table` for each."""
    changes = _compare_rows([row for draft in drafts for row in draft.every])
    held = _average_bytes([row for draft in drafts for row in draft.every])
    sides = _average_sides([row for draft in drafts if not draft.brief for row in draft.every])
    tables = []
    for draft in drafts:
        rows = [
            replace(
                row.row,
                interval=next(changes),
                held_low=mean.low if mean else None,
                held_high=mean.high if mean else None,
            )
            for row, mean in zip(draft.every, held, strict=False)
        ]
        if not draft.brief:
            rows = [replace(row, full=full, method=method) for row, (full, method) in zip(rows, sides, strict=False)]
        every, also = tuple(rows[: len(draft.rows)]), tuple(rows[len(draft.rows) :])
        lacking = any(row.interval and row.interval.low is None for row in every)
        notes = [*draft.notes, *([NO_INTERVAL_NOTE] if lacking else []), *draft.late_notes]
        tables.append(ClosingTable(draft.heading, every, also, tuple(map(escape, notes)), draft.paired))
    return tables


def draft_table(
    full_records: Records,
    method_records: Records | None,
    heading: Mapping[str, object],
    averages: Mapping[str, Mapping[str, float]] | None = None,
    listed: Sequence[str] = (),
    brief: bool = False,
) -> TableDraft:
    """Prepare the closing table of two runs' records, or of the full cache alone, for `finish_tables`.

    Args:
        full_records: The full cache's records by uid.
        method_records: The method's records by uid, or None.
        heading: Lines above the table. `task` is printed with the kind of its data, `model` and `revision` also go into
            the notes, and `embedded: True` marks the embedded reference model and is not printed.
        averages: Name of an average -> weights of its subtasks. None for one average with equal weights.
        listed: Subtasks that the model can solve, which get an average of their own.
        brief: As in `draft_run_table`.

    Raises:
        SettingError: Prompts or targets of a pair differ.
    """
    other = full_records if method_records is None else method_records
    pairs = pair_records(full_records, other)
    subtasks: dict[str, list[Pair]] = {}
    for full, method in sorted(pairs, key=lambda both: (both[1]["index"], pad_numbers(both[1]["subtask"]))):
        subtasks.setdefault(method["subtask"], []).append((full, method))
    drafts = {name: _draft_row(name, both) for name, both in subtasks.items()}
    scored = {name: draft.scores[0] for name, draft in drafts.items() if draft.scores}
    solvable = solvable_subtasks.average_solvable(listed, drafts)
    weights: dict[str, Mapping[str, float]] = {**(averages or {"average": dict.fromkeys(scored, 1.0)}), **solvable}
    over: dict[str, Collection[str]] = {**weights}
    if not averages:
        over["average"] = drafts  # including subtasks without an answer
    averaged = []
    for name, shares in weights.items():
        failed = sum(draft.row.failed for subtask, draft in drafts.items() if subtask in over[name])
        kind = "solvable" if name in solvable else "average"
        averaged.append(_draft_average_row(name, kind, shares, drafts, scored, failed))
    further = [
        RowDraft(
            TableRow(name, "also", None, None, None, 0, digits=4 if name in FIDELITY else 1), list(by_subtask.values())
        )
        for name, by_subtask in ([] if brief else collect_metrics(subtasks))
    ]
    notes = _collect_notes(full_records, other, pairs, heading, method_records is not None)
    if averages:
        notes.append(WEIGHTED_NOTE)
    notes += [SOLVABLE_NOTE.format(name, heading.get("model", NOT_AVAILABLE)) for name in solvable]
    if any(draft.row.subtask in FIDELITY for draft in further):
        notes.append(FIDELITY_NOTE)
    for name, shares in weights.items():
        if missing := [subtask for subtask in over[name] if subtask not in scored]:
            notes.append(_describe_missing(name, missing, left_out=over[name] is not shares))
    late = []
    if (fewest := count_repeats(subtasks)) > 1:
        late.append(f"avg@{fewest}: each prompt was answered {fewest} times, and its answers form one group.")
    shown = {escape(str(key)): escape(format_value(value)) for key, value in heading.items() if key != "embedded"}
    if "task" in shown and (kinds := find_data_kinds(other)):
        shown["task"] += escape(f" ({', '.join(kinds)})")
    return TableDraft(shown, (*drafts.values(), *averaged), further, notes, late, method_records is not None, brief)


@dataclass(frozen=True)
class RowDraft:
    """A row before its means are computed.

    Attributes:
        row: The row without `interval`, `full` and `method`.
        scores: The scores that its means come from; empty if it has none.
        weights: The weights of the scores, as in `kvbench.analysis.paired.compare_subtasks`.
        held: The share of bytes held of each sample, for each entry of `scores`; empty if a sample's is unknown.
    """

    row: TableRow
    scores: Sequence[PairedScores]
    weights: Sequence[float] | None = None
    held: Sequence[Values] = ()


def _draft_row(subtask: str, pairs: Sequence[Pair]) -> RowDraft:
    kept = select_answered(pairs)
    full, method = [both[0] for both in kept], [both[1] for both in kept]
    times = {}
    for name, records in (("_full", full), ("", method)):
        timed = [record for record in records if record.get("gpu_processes", 1) == 1]
        times[f"ttft{name}"] = [record["ttft_ms"] for record in timed if record.get("asked_together", 1) == 1]
        times[f"tpot{name}"] = [
            divide(record["decode_ms"], record["tokens_out"] - 1)
            for record in timed
            if record.get("decoded_together", 1) == 1
        ]
    shares = [divide(record["resident_bytes"], record["full_bytes"]) for record in method]
    costs: dict[str, Any] = {
        "held": reduce_known(np.mean, shares),
        "attended": reduce_known(
            np.mean, [divide(record["rows_attended"], record["rows_seen_decoding"]) for record in method]
        ),
        **{name: reduce_known(median, milliseconds) for name, milliseconds in times.items()},
        **{f"{name}_error": reduce_known(median_error, milliseconds) for name, milliseconds in times.items()},
    }
    row = TableRow(subtask, "subtask", None, None, None, len(pairs) - len(kept), **costs)
    if not kept:
        return RowDraft(row, [])
    scores, known = collect_scores(kept), [share for share in shares if share is not None]
    held = [Values(known, scores.groups, -math.inf, math.inf)] if len(known) == len(shares) else []
    return RowDraft(row, [scores], held=held)


def _draft_average_row(
    name: str,
    kind: str,
    weights: Mapping[str, float],
    drafts: Mapping[str, RowDraft],
    scored: Mapping[str, PairedScores],
    failed: int,
) -> RowDraft:
    """Return the weighted mean of rows, without numbers if a subtask has none."""
    if not weights or any(subtask not in scored for subtask in weights):
        return RowDraft(TableRow(name, kind, None, None, None, failed), [])
    shares, rows = list(weights.values()), [drafts[subtask].row for subtask in weights]
    normalize_weights(shares, len(rows))  # rejects bad weights here, where one table alone is built
    costs: dict[str, Any] = {of: average_known([getattr(row, of) for row in rows], shares) for of in COST_NAMES}
    for of in TIME_NAMES:
        costs[f"{of}_error"] = _combine_errors([getattr(row, f"{of}_error") for row in rows], shares)
    row = TableRow(name, kind, None, None, None, failed, **costs)
    held = [values for subtask in weights for values in drafts[subtask].held]
    complete = len(held) == len(weights)
    return RowDraft(row, [scored[subtask] for subtask in weights], shares, held if complete else [])


def _compare_rows(rows: Sequence[RowDraft]) -> Iterator[PairedDifference | None]:
    """Yield the difference of each row, None for a row without scores."""
    differences = iter(compare_averages([(row.scores, row.weights) for row in rows if row.scores]))
    return (next(differences) if row.scores else None for row in rows)


def _average_bytes(rows: Sequence[RowDraft]) -> Iterator[Mean | None]:
    """Yield the mean share of bytes held for each row, None for a row in which some sample's share is unknown."""
    means = iter(compute_means([(row.held, row.weights) for row in rows if row.held]))
    return (next(means) if row.held else None for row in rows)


def _average_sides(rows: Sequence[RowDraft]) -> Iterator[tuple[Mean | None, Mean | None]]:
    """Yield the means of the full cache and of the method for each row, None for a row without scores."""
    known = [row for row in rows if row.scores]
    sides = [([scores.full_values for scores in row.scores], row.weights) for row in known]
    sides += [([scores.method_values for scores in row.scores], row.weights) for row in known]
    means = compute_means(sides)
    paired = zip(means[: len(known)], means[len(known) :], strict=True)
    return (next(paired) if row.scores else (None, None) for row in rows)


def _describe_missing(name: str, missing: Sequence[str], left_out: bool) -> str:
    if left_out:
        return f"The average leaves out {', '.join(missing)}: no sample was answered."
    return f"There is no {name}: no sample of {', '.join(missing)} was answered."


def average_known(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the known values, or None if there are none."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _combine_errors(errors: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the standard error of a weighted mean of independent values; None if one error is unknown."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return math.sqrt(sum((weight * error) ** 2 for error, weight in zip(known, weights, strict=True))) / sum(weights)


def median_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the median of independent values from any distribution.

    This is half the distance between two order statistics that enclose the median with a chance near 95 %, divided by
    the normal quantile of their actual chance (Price & Bonett 2001, "Estimating the Variance of the Sample Median").

    Args:
        values: The values.

    Returns:
        The error in the unit of the values; None for fewer than two values.
    """
    count = len(values)
    if count < 2:
        return None
    place = max(1, round((count + 1) / 2 - float(ndtri(TAIL)) * math.sqrt(count / 4)))
    ordered = sorted(values)
    return (ordered[count - place] - ordered[place - 1]) / (2 * float(ndtri(1 - bdtr(place - 1, count, 0.5))))


def divide(part: float | None, whole: float | None) -> float | None:
    """Return part / whole, or None if one is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def reduce_known(of: Callable[[list[float]], float | None], values: Iterable[float | None]) -> float | None:
    """Return what `of` makes of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    reduced = of(known) if known else None
    return None if reduced is None else float(reduced)


def _collect_notes(
    full: Records,
    method: Records,
    pairs: Sequence[Pair],
    heading: Mapping[str, object],
    with_method: bool,
) -> list[str]:
    notes = [f"Model {heading.get('model', NOT_AVAILABLE)}, revision {heading.get('revision') or 'not recorded'}."]
    notes += warn_of_data(method, bool(heading.get("embedded")))
    notes += sorted({record["meta"]["note"] for record in method.values() if "note" in record["meta"]})
    for side, name in ((0, "full cache's"), (1, "method's"))[: 1 + with_method]:
        failures = Counter(failure for both in pairs if (failure := find_failure(both[side])))
        if failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
            count = f"{failures.total()} of {len(pairs)} samples"
            notes.append(f"{count} failed in the {name} run ({kinds}) and are left out on both sides.")
    sides = ("full cache", "method")[: 1 + with_method]
    for field, note in SHARED_NOTES.items():
        if shared := [name for side, name in enumerate(sides) if any(both[side].get(field, 1) > 1 for both in pairs)]:
            notes.append(note.format(" and the ".join(shared)))
    for records, name in ((full, "full cache's"), (method, "method's")):
        if alone := len(records) - len(pairs):
            count = f"{count_things(alone, 'sample')} of the {name} run"
            have, are = ("has", "is") if alone == 1 else ("have", "are")
            notes.append(f"{count} {have} no partner in the other run and {are} left out.")
    return notes
