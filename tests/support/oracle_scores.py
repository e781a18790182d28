"""What methods score and merge, written out in loops, in float64, for the heads that the dense engine shows."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracles import Score, find_top, fit_protected, keep_by_score, protect_nothing, share_uniformly
from tests.support.tiny_models import distinct, make_double


def unit(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt((x * x).sum())


ANCHORS = {
    "mean_normalised": lambda keys: np.mean([unit(key) for key in keys], axis=0),
    "mean_raw": lambda keys: np.mean(keys, axis=0),
    "median": lambda keys: np.array([sorted(column)[(len(column) - 1) // 2] for column in keys.T]),
}
SIMILAR = {
    "cosine": lambda a, b: unit(a) @ unit(b),
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -math.sqrt(((a - b) ** 2).sum()),
}


def score_unlike(anchor: str, metric: str) -> Score:
    similar = SIMILAR[metric]

    def score(glance: HeadView) -> np.ndarray:
        keys = glance.rows.keys
        if anchor == "pairwise":
            return np.array([-np.mean([similar(key, other) for other in keys]) for key in keys])
        middle = ANCHORS[anchor](keys)
        return np.array([-similar(middle, key) for key in keys])

    return score


def attention(glance: HeadView, window: int) -> np.ndarray:
    """(G, w, n) probabilities of the block's last min(w, T) queries over all rows."""
    rows, count = glance.rows, min(window, glance.queries.shape[1])
    found = np.zeros((len(glance.queries), count, len(rows.places)))
    for g, queries in enumerate(glance.queries):
        for t in range(count):
            query, place = queries[len(queries) - count + t], glance.tokens - count + t
            weights = [
                mass * math.exp(query @ key * glance.scaling) if other <= place else 0.0
                for key, other, mass in zip(rows.keys, rows.places, rows.mass, strict=True)
            ]
            found[g, t] = np.array(weights) / sum(weights)
    return found


def pool(scores: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Zeros beyond the ends count in averages."""
    half, n = kernel // 2, len(scores)
    neighbours = [scores[max(0, j - half) : j + half + 1] for j in range(n)]
    return np.array([max(near) if pooling == "max" else sum(near) / kernel for near in neighbours])


def score_votes(window: int, kernel: int, pooling: str, group: str) -> Score:
    def score(glance: HeadView) -> np.ndarray:
        outside = glance.rows.places < glance.tokens - window
        if not outside.any():  # the window covers all that is held: then rows of the block only have no votes
            outside = glance.rows.places < glance.tokens - glance.queries.shape[1]
        sums = attention(glance, window).sum(1)[:, outside]
        if group == "before":
            own = pool(sums.mean(0), kernel, pooling)
        else:
            own = np.mean([pool(one, kernel, pooling) for one in sums], axis=0)
        return np.concatenate([own, np.zeros(len(glance.rows.places) - len(own))])

    return score


def score_residual(window: int, kernel: int, pooling: str, epsilon: float, p_dtype: str) -> Score:
    def score(glance: HeadView) -> np.ndarray:
        p = attention(glance, window)
        if p_dtype == "bf16":
            p = torch.from_numpy(p).bfloat16().double().numpy()
        total = np.zeros(p.shape[-1])
        for g in range(p.shape[0]):
            for t, output in enumerate(glance.outputs[g, -p.shape[1] :]):
                for j, value in enumerate(glance.rows.values):
                    total[j] += (p[g, t, j] / (1 - p[g, t, j] + epsilon)) ** 2 * ((output - value) ** 2).sum()
        return pool(total / p.shape[0], kernel, pooling)

    return score


def merge_round(middle: list[list], chunk: int | None, r: float, surplus: int) -> list[list]:
    """One round. A row: [place, mass, key, value]; even rows of a chunk join their most similar odd row."""
    size = chunk or len(middle)
    edges = []
    for start in range(0, len(middle), size):
        members = range(start, min(start + size, len(middle)))
        odd = [j for j in members if (j - start) % 2 == 1]
        for i in members:
            if (i - start) % 2 == 0 and odd:
                similar = [SIMILAR["cosine"](middle[i][2], middle[j][2]) for j in odd]
                edges.append((max(similar), i, odd[int(np.argmax(similar))]))
    count = min(surplus, max(1, int(r * len(edges))))
    kept = sorted(edges, key=lambda edge: (-edge[0], edge[1]))[:count]
    clusters = {j: [j, *(i for _, i, into in kept if into == j)] for _, _, j in kept}
    joined = {i for _, i, _ in kept}
    result = []
    for j, row in enumerate(middle):
        if j in joined:
            continue
        if j in clusters:
            mass = sum(middle[i][1] for i in clusters[j])
            mean = [sum(middle[i][1] * middle[i][part] for i in clusters[j]) / mass for part in (2, 3)]
            row = [row[0], mass, *mean]
        result.append(row)
    return result


def cut_to_centroids(
    quota: int, sinks: int, recents: int, chunk: int | None, r: float, rounds: list[int] | None = None
):
    def cut(glances: list[HeadView]) -> list[Head]:
        kept = []
        for glance in glances:
            rows = glance.rows
            if len(rows.places) <= quota:
                kept.append(rows)
                continue
            protect = (rows.places < sinks) | (rows.places >= glance.tokens - recents)
            protect = fit_protected(
                protect if quota > 1 else np.zeros_like(protect), quota, (rows.places < sinks).sum()
            )
            everything = [list(row) for row in zip(rows.places, rows.mass, rows.keys, rows.values, strict=True)]
            middle = [row for row, safe in zip(everything, protect, strict=True) if not safe]
            count = 0
            while len(middle) > quota - protect.sum():
                middle = merge_round(middle, chunk, r, len(middle) - (quota - protect.sum()))
                count += 1
            if rounds is not None:
                rounds.append(count)
            rest = [row for row, safe in zip(everything, protect, strict=True) if safe]
            both = sorted(middle + rest, key=lambda row: row[0])
            kept.append(Head(*(np.array([row[i] for row in both]) for i in (2, 3, 0, 1))))
        return kept

    return cut


def score_along_output(window: int) -> Callable[[HeadView], np.ndarray]:
    def score(glance: HeadView) -> np.ndarray:
        p, total = attention(glance, window), np.zeros(len(glance.rows.places))
        for g in range(len(p)):
            for t, output in enumerate(glance.outputs[g, -p.shape[1] :]):
                for j, value in enumerate(glance.rows.values):
                    total[j] += p[g, t, j] * (output @ value)
        return total / len(p)

    return score


def protect_chunks(window: int, chunk: int, first: int) -> Callable[[HeadView, int], np.ndarray]:
    """Rows of the first chunks and of the last window // chunk ones."""

    def protect(glance: HeadView, quota: int) -> np.ndarray:
        n = len(glance.rows.places)
        count = -(-n // chunk)
        return np.array([j // chunk < first or j // chunk >= count - window // chunk for j in range(n)])

    return protect


def score_chunks(window: int, kernel: int, chunk: int, first: int) -> Callable[[HeadView], np.ndarray]:
    """c_{t,m} = Σ_{j in m} p_{t,j} v_j of pooled p; anchor_t = Σ c_{t,m} of droppable m; Σ_t ⟨c_{t,m}, anchor_t⟩."""

    def score(glance: HeadView) -> np.ndarray:
        p, n, d = attention(glance, window), *glance.rows.values.shape
        safe = protect_chunks(window, chunk, first)(glance, 0)
        total = np.zeros(n)
        for g in range(len(p)):
            for t in range(p.shape[1]):
                pooled = pool(p[g, t], kernel, "max")
                parts = [slice(start, start + chunk) for start in range(0, n, chunk)]
                sums = [pooled[part] @ glance.rows.values[part] for part in parts]
                anchor = sum((own for own, part in zip(sums, parts, strict=True) if not safe[part][0]), np.zeros(d))
                for own, part in zip(sums, parts, strict=True):
                    total[part] += own @ anchor
        return total / len(p)

    return score


def project_norms(model: str, glance: HeadView) -> np.ndarray:
    """‖W_o^h v_j‖₁, mean over the group's query heads h."""
    weight = make_double(model).model.layers[glance.layer].self_attn.o_proj.weight.detach().numpy()
    groups, dim = len(glance.queries), glance.rows.values.shape[1]
    total = np.zeros(len(glance.rows.values))
    for g in range(groups):
        head = glance.head * groups + g
        own = weight[:, head * dim : (head + 1) * dim]
        total += [sum(abs(own @ value)) for value in glance.rows.values]
    return total / groups


def cut_in_two_stages(
    model, base, quota, alpha, epsilon, protect=protect_nothing, share=share_uniformly, safe_share=0.0
) -> Callable:
    def cut(glances: list[HeadView]) -> list[Head]:
        if sum(len(glance.rows.places) for glance in glances) <= quota * len(glances):
            return [glance.rows for glance in glances]
        scores = [base(glance) for glance in glances]
        safe = [fit_protected(protect(glance, quota), quota) for glance in glances]
        raised = [np.where(own, np.inf, score) for own, score in zip(safe, scores, strict=True)]
        kept = []
        for glance, score, high, own, count in zip(
            glances, scores, raised, safe, share(raised, safe, quota), strict=True
        ):
            second = (score + epsilon) * project_norms(model, glance)
            second[find_top(high, int(alpha * count)).astype(int)] = np.inf
            second[own] = np.inf
            second[find_top(high, max(round(safe_share * quota), int(own.sum()))).astype(int)] = np.inf
            kept.append(glance.rows.take(find_top(second, count)))
        return kept

    return cut


def score_mean_votes(**args) -> Callable[[HeadView], np.ndarray]:
    """SnapKV's votes as means over the window's queries."""
    return lambda glance: score_votes(**args)(glance) / min(args["window"], glance.queries.shape[1])


SNAPKV = dict(window=4, kernel=3, pooling="max", group="after")


class HeavyHitters:
    """Votes of every query head for every place, from every block, also one after which nothing is cut."""

    def __init__(self, norm: str, gqa: str) -> None:
        self.norm, self.gqa, self.votes = norm, gqa, {}

    def keeps(self, quota: int, *more) -> Callable[[list[HeadView]], list[Head]]:
        cut = keep_by_score(self.score, quota, *more)

        def count_and_cut(glances: list[HeadView]) -> list[Head]:
            for glance in glances:
                self.count(glance)
            return cut(glances)

        return count_and_cut

    def count(self, glance: HeadView) -> None:
        for g, row in enumerate(attention(glance, glance.queries.shape[1]).sum(1)):
            for place, vote in zip(glance.rows.places, row, strict=True):
                key = (glance.layer, glance.head, g, place)
                self.votes[key] = self.votes.get(key, 0.0) + vote

    def score(self, glance: HeadView) -> np.ndarray:
        scores = []
        for place in glance.rows.places:
            own = [self.votes[glance.layer, glance.head, g, place] for g in range(len(glance.queries))]
            total = max(own) if self.gqa == "max" else sum(own) / len(own)
            scores.append(total / (glance.tokens - place) if self.norm == "count" else total)
        return np.array(scores)


class Oracle(Protocol):
    """A method written out in loops."""

    score: Score

    def keeps(self, quota: int) -> Callable[[list[HeadView]], list[Head]]: ...


def assert_scores_are_an_oracles(
    monkeypatch: pytest.MonkeyPatch, name: str, args: dict, oracle: Oracle, model: str, block: int | None,
    **close: float,
) -> None:  # fmt: skip
    """Compare a method's scores with its oracle's: in float64, of every row, at every cut.

    Args:
        monkeypatch: Notes the method's scores.
        name: The method's name.
        args: Its settings beside its defaults.
        oracle: Its oracle.
        model: Name of a tiny model.
        block: Block size of the prefill.
        close: Tolerances of numpy's `assert_allclose`.
    """
    found: list[tuple] = []
    kind = type(build("method", load_settings("method", name, args)))
    score, own, expected = kind.score, oracle.score, []

    def note(self, observation, rows, state):
        scores = score(self, observation, rows, state)
        found.append((observation.layer, rows.places, scores))
        return scores

    monkeypatch.setattr(kind, "score", note)
    oracle.score = lambda glance: expected.append((glance, own(glance))) or expected[-1][1]
    DenseEngine(model, oracle.keeps(13)).prefill(distinct(60), block)
    kvbench.prefill(make_double(model), distinct(60), name, 13, block, method_args=args)
    heads = found[0][1].shape[1]
    assert len(expected) == heads * len(found) > 0
    for number, (glance, scores) in enumerate(expected):
        layer, places, its = found[number // heads]
        assert layer == glance.layer and places[0, glance.head].tolist() == glance.rows.places.tolist()
        np.testing.assert_allclose(its[0, glance.head].numpy(), scores, **close)
