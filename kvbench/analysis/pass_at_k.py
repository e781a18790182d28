"""Compute pass@k of prompts with several answers.

A prompt has n answers, and c of them are right. avg@n is the mean over prompts of the mean score of the n answers.

    pass@k = mean over prompts of 1 − C(n − c, k) / C(n, k)

is the unbiased estimate of how often at least one of k answers is right (Chen et al. 2021, "Evaluating Large Language
Models Trained on Code", arXiv 2107.03374, eq. 1). pass@1 equals avg@n for right-or-wrong scores. All answers to a
prompt share its group, so intervals (kvbench.analysis.intervals) count prompts, or contexts if prompts share one.
"""

from collections.abc import Iterable, Mapping
from math import comb
from typing import Any

from kvbench.analysis.intervals import BOUND

Prompt = tuple[str, str, str, str]  # subtask, group, prompt_hash, target_hash


def estimate_pass_at_k(k: int, answers: int, right: int) -> float:
    """Estimate the chance that at least one of k answers is right (Chen et al. 2021, eq. 1).

    Args:
        k: Number of answers drawn without replacement.
        answers: Number of answers n.
        right: Number of right answers c.

    Returns:
        A chance in [0, 1].

    Raises:
        ValueError: k is not in [1, answers], or `right` is not in [0, answers].
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise ValueError(f"pass@{k} of {answers} answers, {right} of them right")
    return 1 - comb(answers - right, k) / comb(answers, k)


def group_by_prompt(records: Iterable[Mapping[str, Any]]) -> dict[Prompt, list[float]]:
    """Return the scores of each prompt's answers, sorted by size.

    Raises:
        ValueError: A record has no score.
    """
    scores: dict[Prompt, list[float]] = {}
    for record in records:
        if record["score"] is None:
            raise ValueError(f"{record['uid']}: no score")
        key = (record["subtask"], record["group"] or record["uid"], record["prompt_hash"], record["target_hash"])
        scores.setdefault(key, []).append(record["score"])
    return {key: sorted(scores[key]) for key in sorted(scores)}


def count_fewest_answers(records: Iterable[Mapping[str, Any]]) -> int:
    """Return the smallest number of answers that any prompt has, 0 if there are no records."""
    return min(map(len, group_by_prompt(records).values()), default=0)


def score_prompts(records: Iterable[Mapping[str, Any]], k: int) -> dict[Prompt, float]:
    """Return pass@k of each prompt in points.

    Raises:
        ValueError: A score is neither 0 nor 100, or a prompt has fewer than k answers.
    """
    estimates = {}
    for key, scores in group_by_prompt(records).items():
        if any(score not in (0.0, BOUND) for score in scores):
            raise ValueError(f"pass@{k}: {key[0]} has scores between right and wrong")
        estimates[key] = BOUND * estimate_pass_at_k(k, len(scores), scores.count(BOUND))
    return estimates
