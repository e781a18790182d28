"""Collect metrics other than the score from records: the task's further metrics (`also`), pass@k, and how answers end.

Each metric is a number for both answers of a pair, with the full cache and with the method, so that it gets the same
paired interval as the score. Numbers count as points, and booleans as 0 and 100. A metric whose maximum is not 100
states it by name in `meta["most"]`. A pair is left out if one side lacks the metric.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from kvbench.analysis.intervals import BOUND
from kvbench.analysis.paired import Pair, PairedScores
from kvbench.analysis.pass_at_k import count_fewest_answers, score_prompts

Record = dict[str, Any]

ENDS: dict[str, tuple[Callable[[Record], float], float]] = {  # name -> function of a record, and its maximum
    "empty answers %": (lambda record: BOUND * (not record["output"].strip()), BOUND),
    "at the length limit %": (lambda record: BOUND * (record["stop"] == "length"), BOUND),
    "tokens": (lambda record: record["tokens_out"], inf),
}

FIDELITY = {"NLL of the answer": "nll", "KL from the full cache": "kl"}  # nats per token, of runs with fidelity=true


def find_failure(record: Mapping[str, Any]) -> str | None:
    """Return the reason why a record has no score; None if it has one."""
    return record["error"] or ("no_score" if record["score"] is None else None)


def select_answered(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs in which both sides have a score."""
    return [both for both in pairs if not any(map(find_failure, both))]


def collect_scores(
    pairs: Sequence[Pair], of: Callable[[Record], float] = lambda record: record["score"], most: float = BOUND
) -> PairedScores:
    """Return a number of each pair's two records, with the groups of their contexts.

    Args:
        pairs: (full, method) records.
        of: Function that reads the number from a record.
        most: Largest possible number; inf if unbounded.
    """
    full, method = ([float(of(both[side])) for both in pairs] for side in (0, 1))
    return PairedScores(full, method, [record["group"] or record["uid"] for _, record in pairs], most)


def collect_metrics(subtasks: Mapping[str, Sequence[Pair]]) -> Iterator[tuple[str, dict[str, PairedScores]]]:
    """Collect all metrics other than the score.

    Args:
        subtasks: Subtask -> its (full, method) records.

    Yields:
        The name of a metric, and the numbers of each subtask that has it. First come the task's further metrics, then
        pass@k if prompts have several answers, then the quantities of `fidelity`, then how answers ended.
    """
    kept = {name: both for name, pairs in subtasks.items() if (both := select_answered(pairs))}
    names = dict.fromkeys(name for pairs in kept.values() for pair in pairs for name in pair[1]["also"])
    for name in names:
        if by_subtask := {
            subtask: scores for subtask, pairs in kept.items() if (scores := _collect_metric(name, pairs))
        }:
            yield _label(name, kept), by_subtask
    for k in _list_powers(count_repeats(subtasks)):
        if by_subtask := {subtask: scores for subtask, pairs in kept.items() if (scores := _collect_passes(k, pairs))}:
            yield f"pass@{k}", by_subtask
    yield from collect_fidelity(subtasks)
    for name, (of, most) in ENDS.items() if kept else ():
        yield name, {subtask: collect_scores(pairs, of, most) for subtask, pairs in kept.items()}


def collect_fidelity(subtasks: Mapping[str, Sequence[Pair]]) -> Iterator[tuple[str, dict[str, PairedScores]]]:
    """Collect the quantities of `fidelity` (kvbench.runs.fidelity), as `collect_metrics` does."""
    for name, key in FIDELITY.items():
        by_subtask = {
            subtask: scores
            for subtask, pairs in subtasks.items()
            if (scores := _collect_fidelity(key, select_answered(pairs)))
        }
        if by_subtask:
            yield name, by_subtask


def count_repeats(subtasks: Mapping[str, Sequence[Pair]]) -> int:
    """Return the smallest number of answers per prompt among subtasks whose prompts all have several answers.

    0 if there is no such subtask.
    """
    counts = [count_fewest_answers(method for _, method in select_answered(pairs)) for pairs in subtasks.values()]
    return min((count for count in counts if count > 1), default=0)


def find_data_kinds(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the kinds of data that the samples were made from: miniature, local, hub. Empty if records do not say."""
    return sorted({str(kind) for record in records.values() if (kind := record["meta"].get("data"))})


def _collect_metric(name: str, pairs: Sequence[Pair]) -> PairedScores | None:
    def of(record: Record) -> float:
        value = record["also"][name]
        return float(BOUND * value if isinstance(value, bool) else value)

    both = [pair for pair in pairs if all(record["also"].get(name) is not None for record in pair)]
    most = max((record["meta"].get("most", {}).get(name, BOUND) for pair in both for record in pair), default=BOUND)
    points = all(0 <= of(record) <= most for pair in both for record in pair)
    return collect_scores(both, of, most if points else inf) if both else None


def _collect_fidelity(key: str, pairs: Sequence[Pair]) -> PairedScores | None:
    """Collect one quantity of kvbench.runs.fidelity from the pairs that have it."""
    both = [pair for pair in pairs if all(record.get("fidelity", {}).get(key) is not None for record in pair)]
    return collect_scores(both, lambda record: record["fidelity"][key], inf) if both else None


def _label(name: str, subtasks: Mapping[str, Sequence[Pair]]) -> str:
    """Return the name of a metric, with a % sign if its values are booleans."""
    records = [record for pairs in subtasks.values() for pair in pairs for record in pair]
    return f"{name} %" if any(isinstance(record["also"].get(name), bool) for record in records) else name


def _collect_passes(k: int, pairs: Sequence[Pair]) -> PairedScores | None:
    """Collect pass@k of prompts; None if a prompt has fewer answers, or if an answer is neither right nor wrong."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    scores = {record["score"] for side in sides for record in side}
    if min(map(count_fewest_answers, sides)) < max(k, 2) or not scores <= {0.0, BOUND}:
        return None
    full, method = (score_prompts(side, k) for side in sides)
    return PairedScores(list(full.values()), list(method.values()), [group for _, group, _, _ in method])


def _list_powers(most: int) -> list[int]:
    """Return 2, 4, 8, … up to `most`, and `most` itself."""
    return sorted({k for k in (2**power for power in range(1, most.bit_length())) if k <= most} | {most} - {0, 1})
