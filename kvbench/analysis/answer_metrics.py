"""What records say of answers besides the score: the task's further metrics (`also`), pass@k, and how answers ended.

Each is a number for every pair of answers, with the full cache and with the method, so that it has the paired interval
of every other mean: points as they are, booleans as 0 and 100; what ends elsewhere than at 100 points says so in
`meta["most"]`, by name. Where one side has none the pair is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from kvbench.analysis.intervals import BOUND
from kvbench.analysis.paired import Pair, PairedScores
from kvbench.analysis.pass_at_k import count_fewest_answers, score_prompts

Record = dict[str, Any]

ENDS: dict[str, tuple[Callable[[Record], float], float]] = {  # what it is of a record, and the most it can be
    "empty answers %": (lambda record: BOUND * (not record["output"].strip()), BOUND),
    "at the length limit %": (lambda record: BOUND * (record["stop"] == "length"), BOUND),
    "tokens": (lambda record: record["tokens_out"], inf),
}

FIDELITY = {"NLL of the answer": "nll", "KL from the full cache": "kl"}  # nats a token, where runs have fidelity=true


def find_failure(record: Mapping[str, Any]) -> str | None:
    """Why a record has no score; None if it has."""
    return record["error"] or ("no_score" if record["score"] is None else None)


def select_answered(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs of which both sides have a score."""
    return [both for both in pairs if not any(map(find_failure, both))]


def collect_scores(
    pairs: Sequence[Pair], of: Callable[[Record], float] = lambda record: record["score"], most: float = BOUND
) -> PairedScores:
    """A number of two runs' records, with the groups of their contexts."""
    full, method = ([float(of(both[side])) for both in pairs] for side in (0, 1))
    return PairedScores(full, method, [record["group"] or record["uid"] for _, record in pairs], most)


def collect_metrics(subtasks: Mapping[str, Sequence[Pair]]) -> Iterator[tuple[str, dict[str, PairedScores]]]:
    """Name and, of the subtasks that have it, the numbers: further metrics, pass@k where prompts were answered several
    times, what `fidelity` compared, then how answers ended.
    """
    kept = {name: both for name, pairs in subtasks.items() if (both := select_answered(pairs))}
    names = dict.fromkeys(name for pairs in kept.values() for pair in pairs for name in pair[1]["also"])
    for name in names:
        if found := {own: scores for own, pairs in kept.items() if (scores := _collect_metric(name, pairs))}:
            yield _label(name, kept), found
    for k in _list_powers(count_repeats(subtasks)):
        if found := {own: scores for own, pairs in kept.items() if (scores := _collect_passes(k, pairs))}:
            yield f"pass@{k}", found
    for name, key in FIDELITY.items():
        if found := {own: scores for own, pairs in kept.items() if (scores := _collect_fidelity(key, pairs))}:
            yield name, found
    for name, (of, most) in ENDS.items() if kept else ():
        yield name, {own: collect_scores(pairs, of, most) for own, pairs in kept.items()}


def count_repeats(subtasks: Mapping[str, Sequence[Pair]]) -> int:
    """The fewest answers to a prompt among the subtasks whose prompts all have several; 0 if there is none."""
    counts = [count_fewest_answers(method for _, method in select_answered(pairs)) for pairs in subtasks.values()]
    return min((count for count in counts if count > 1), default=0)


def find_data_kinds(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which data the samples were made from: miniature, local, hub; nothing where the task says nothing."""
    return sorted({str(kind) for record in records.values() if (kind := record["meta"].get("data"))})


def _collect_metric(name: str, pairs: Sequence[Pair]) -> PairedScores | None:
    def of(record: Record) -> float:
        value = record["also"][name]
        return float(BOUND * value if isinstance(value, bool) else value)

    both = [own for own in pairs if all(record["also"].get(name) is not None for record in own)]
    most = max((record["meta"].get("most", {}).get(name, BOUND) for own in both for record in own), default=BOUND)
    points = all(0 <= of(record) <= most for own in both for record in own)
    return collect_scores(both, of, most if points else inf) if both else None


def _collect_fidelity(key: str, pairs: Sequence[Pair]) -> PairedScores | None:
    """One of the quantities of kvbench.runs.fidelity, of the pairs that have it."""
    both = [pair for pair in pairs if all(own.get("fidelity", {}).get(key) is not None for own in pair)]
    return collect_scores(both, lambda record: record["fidelity"][key], inf) if both else None


def _label(name: str, subtasks: Mapping[str, Sequence[Pair]]) -> str:
    """Shares of answers are marked, points are not."""
    records = [record for pairs in subtasks.values() for pair in pairs for record in pair]
    return f"{name} %" if any(isinstance(record["also"].get(name), bool) for record in records) else name


def _collect_passes(k: int, pairs: Sequence[Pair]) -> PairedScores | None:
    """pass@k of prompts; None where one was answered less often or an answer is neither right nor wrong."""
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    scores = {record["score"] for side in sides for record in side}
    if min(map(count_fewest_answers, sides)) < max(k, 2) or not scores <= {0.0, BOUND}:
        return None
    full, method = (score_prompts(side, k) for side in sides)
    return PairedScores(list(full.values()), list(method.values()), [group for _, group, _, _ in method])


def _list_powers(most: int) -> list[int]:
    """2, 4, 8, … up to `most`, and `most` itself."""
    return sorted({k for k in (2**power for power in range(1, most.bit_length())) if k <= most} | {most} - {0, 1})
