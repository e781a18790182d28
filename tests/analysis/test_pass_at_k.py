"""pass@k: the estimate against every subset of answers, and how often its interval holds the truth."""

from itertools import combinations

import numpy as np
import pytest

from kvbench.analysis.intervals import Values, mean
from kvbench.analysis.pass_at_k import (
    count_fewest_answers,
    estimate_pass_at_k,
    group_by_prompt,
    score_prompts,
)


def answers(right: list[list[int]], contexts: list[str] | None = None) -> list[dict]:
    """Records of prompts whose answers are right (1) or wrong (0)."""
    return [
        {
            "uid": f"aime/{prompt}/{n}",
            "subtask": "aime",
            "group": contexts[prompt] if contexts else f"aime/{prompt}",
            "prompt_hash": f"p{prompt}",
            "target_hash": "t",
            "score": 100.0 * value,
        }
        for prompt, own in enumerate(right)
        for n, value in enumerate(own)
    ]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hit = [any(own) for own in combinations([1] * c + [0] * (n - c), k)]
                assert estimate_pass_at_k(k, n, c) == pytest.approx(sum(hit) / len(hit))
    assert estimate_pass_at_k(10, 200, 13) == pytest.approx(1 - np.prod([(187 - i) / (200 - i) for i in range(10)]))
    for wrong in ((0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)):
        with pytest.raises(ValueError, match="pass@"):
            estimate_pass_at_k(*wrong)


def test_prompts_are_the_unit():
    records = answers([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0], [0] * 4])
    assert count_fewest_answers(records) == 4 and count_fewest_answers([]) == 0
    assert list(score_prompts(records, 1).values()) == pytest.approx([25, 100, 50, 0, 75, 50, 0])
    assert score_prompts(records[::-1], 2) == score_prompts(records, 2)
    assert list(score_prompts(records, 2).values()) == pytest.approx([50, 100, 250 / 3, 0, 100, 250 / 3, 0])
    assert [len(own) for own in group_by_prompt(records).values()] == [4] * 7


def test_what_has_no_estimate_is_refused():
    with pytest.raises(ValueError, match="pass@2 of 1 answers"):
        score_prompts(answers([[1, 0], [1]]), 2)
    partial = answers([[1, 0]])
    with pytest.raises(ValueError, match="between right and wrong"):
        score_prompts([partial[0] | {"score": 50.0}, partial[1]], 1)
    with pytest.raises(ValueError, match="aime/0/0: no score"):
        count_fewest_answers([partial[0] | {"score": None}])


@pytest.mark.full
def test_coverage_of_pass_at_2():
    draw, held = np.random.default_rng(0), 0
    for _ in range(400):
        chance = draw.beta(2, 2, 40)  # E[1 - (1 - p)²] = 1 - E[q²] = 1 - 6/20
        scores = score_prompts(answers((draw.random((40, 5)) < chance[:, None]).tolist()), 2)
        own = mean([Values(list(scores.values()), [group for _, group, _, _ in scores])])
        held += own.low <= 70 <= own.high
    assert 0.93 <= held / 400 <= 0.97
