"""Whole engines side by side: what a head keeps by a score that is written out in loops, in float64.

The queries, keys and values are those that the dense engine takes from transformers' own layers.
"""

from collections.abc import Callable

import numpy as np
import torch

import kvbench
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.tiny_models import distinct, tiny

CLOSE = dict(rtol=3e-4, atol=3e-4)
Score = Callable[[HeadView], np.ndarray]


def fit_protected(protected: np.ndarray, quota: int, sinks: int = 0) -> np.ndarray:
    """Protected rows that fit, one row free where the quota is over 1: the first `sinks` rows from the first on, then
    the others from the newest on.
    """
    room = quota - 1 if quota > 1 else quota
    kept = np.zeros_like(protected)
    for row in [*range(min(sinks, len(protected))), *reversed(range(sinks, len(protected)))]:
        if protected[row] and kept.sum() < room:
            kept[row] = True
    return kept


def find_top(scores: np.ndarray, quota: int) -> np.ndarray:
    """Indices of the `quota` largest, ties to the lower index, ascending."""
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
    return np.array(sorted(order[:quota]))


def protect_newest(count: int) -> Callable[[HeadView, int], np.ndarray]:
    return lambda glance, quota: glance.rows.places >= glance.tokens - count


def protect_first(count: int) -> Callable[[HeadView, int], np.ndarray]:
    return lambda glance, quota: glance.rows.places < count


def protect_nothing(glance: HeadView, quota: int) -> np.ndarray:
    return np.zeros(len(glance.rows.places), dtype=bool)


def share_uniformly(scores: list[np.ndarray], protected: list[np.ndarray], quota: int) -> list[int]:
    return [quota] * len(scores)


def keep_by_score(
    score: Score, quota: int, protect=protect_nothing, share=share_uniformly, prompt=60
) -> Callable[[list[HeadView]], list[Head]]:
    """What every head keeps of a layer: `quota` rows on average, by score; shares stay once the prompt is read."""
    before: dict[int, list[int]] = {}

    def cut(glances: list[HeadView]) -> list[Head]:
        if sum(len(glance.rows.places) for glance in glances) <= quota * len(glances):
            return [glance.rows for glance in glances]
        scores = [score(glance) for glance in glances]
        protected = [fit_protected(protect(glance, quota), quota) for glance in glances]
        raised = [np.where(safe, np.inf, own) for own, safe in zip(scores, protected, strict=True)]
        if glances[0].tokens <= prompt or glances[0].layer not in before:
            before[glances[0].layer] = share(raised, protected, quota)
        counts = before[glances[0].layer]
        return [g.rows.take(find_top(own, n)) for g, own, n in zip(glances, raised, counts, strict=True)]

    return cut


def assert_engines_agree(
    model,
    cut,
    method,
    budget,
    block=None,
    tokens=None,
    seed=0,
    allocator="uniform",
    dense_cuts=False,
    parts=(1, 1, 5),
    **args,
):
    """Both engines read the same prompt, then seven tokens more, and hold the same rows; logits agree. Returns held.

    `tokens` is 60 if nothing is said, and 30 if they are read one by one. `dense_cuts`: whether the dense engine cuts
    while decoding too; the method does what its settings say. `parts`: how many of the seven are read at once.
    """
    tokens = tokens or (30 if block == 1 else 60)
    prompt, more = distinct(tokens + 7, seed).split([tokens, 7], dim=1)
    dense = DenseEngine(model, cut, cuts_decoding=dense_cuts)
    expected = dense.prefill(prompt, block)
    allocator, allocator_args = allocator if isinstance(allocator, tuple) else (allocator, {})
    held = kvbench.prefill(
        tiny(model), prompt, method, budget, block, allocator, method_args=args, allocator_args=allocator_args
    )
    torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
    assert_same_rows(held, dense)
    for part in more.split(parts, dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        assert_same_rows(held, dense)
    return held


def assert_same_rows(held, dense):
    for layer in set(dense.held) - set(held.sliding_layers):
        for head, rows in enumerate(dense.held[layer]):
            assert held.places(layer, head).tolist() == rows.places.tolist(), (layer, head)
            assert held.masses(layer, head).tolist() == rows.mass.tolist()
