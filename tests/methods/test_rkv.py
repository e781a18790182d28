"""R-KV against its equation in loops and float64: last queries, redundancy, cuts while decoding."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import load_settings
from kvbench.kernels.key_redundancy import key_redundancy
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.oracle_scores import assert_scores_are_an_oracles
from tests.support.oracle_shares import share_interpolated
from tests.support.oracles import CLOSE, assert_engines_agree, assert_same_rows, keep_by_score, protect_newest
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, tiny

WINDOW = 5


def find_redundancy(keys: np.ndarray, similar: float) -> np.ndarray:
    """(n,) softmax over the rows of their mean cosine to every row, without the newest that repeats it."""
    n = len(keys)
    total = [0.0] * n
    for i in range(n):
        cosines = [
            0.0 if i == j else keys[i] @ keys[j] / math.sqrt((keys[i] @ keys[i]) * (keys[j] @ keys[j]))
            for j in range(n)
        ]
        repeats = [j for j in range(n) if j != i and cosines[j] > similar]
        if repeats:
            cosines[max(repeats)] = 0.0
        total = [a + b for a, b in zip(total, cosines, strict=True)]
    weights = [math.exp(own / n) for own in total]
    return np.array(weights) / sum(weights)


class LastQueries:
    """Remembers the queries of every layer and head, and cuts while decoding every `interval` tokens."""

    def __init__(self, mix: float = 0.1, kernel: int = 7, similar: float = 0.5, window: int = WINDOW) -> None:
        self.mix, self.kernel, self.similar, self.window = mix, kernel, similar, window
        self.queries: dict[tuple[int, int], np.ndarray] = {}

    def keeps(self, quota: int, *more, interval: int = 1, prompt: int = 60) -> Callable[[list[HeadView]], list[Head]]:
        cut, since = keep_by_score(self.score, quota, protect_newest(self.window), *more), {}

        def note_and_cut(glances: list[HeadView]) -> list[Head]:
            self.note(glances)
            layer, new = glances[0].layer, glances[0].queries.shape[1]
            if glances[0].tokens > prompt:
                since[layer] = since.get(layer, 0) + new
                if since[layer] < interval:
                    return [glance.rows for glance in glances]
                since[layer] = 0
            return cut(glances)

        return note_and_cut

    def note(self, glances: list[HeadView]) -> None:
        for glance in glances:
            key = glance.layer, glance.head
            before = self.queries.get(key, glance.queries[:, :0])
            self.queries[key] = np.concatenate([before, glance.queries], 1)

    def score(self, glance: HeadView) -> np.ndarray:
        queries = self.queries[glance.layer, glance.head][:, -self.window :]
        keys, n = glance.rows.keys, len(glance.rows.places)
        before = [j for j in range(n) if glance.rows.places[j] < glance.tokens - self.window]
        attention = np.zeros(n)
        for t in range(queries.shape[1]):
            logits = [max(query[t] @ keys[j] for query in queries) * glance.scaling for j in before]
            weights = np.exp(np.array(logits) - max(logits, default=0))
            attention[before] += weights / weights.sum() / queries.shape[1]
        half = self.kernel // 2
        pooled = np.zeros(n)
        for place, j in enumerate(before):
            pooled[j] = max(attention[before[max(0, place - half) : place + half + 1]])
        return self.mix * pooled - (1 - self.mix) * find_redundancy(keys, self.similar)


@pytest.mark.cover
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("mix, similar", [(0.1, 0.5), (0.6, 0.1), (1.0, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3", "phi3"], "llama"))
def test_rkv(model, mix, similar, block):
    cut = LastQueries(mix, 7, similar).keeps(13, prompt=30 if block == 1 else 60)
    args = dict(mix=mix, similar=similar, window=WINDOW, decode_interval=1)
    assert_engines_agree(model, cut, "rkv", 13, block, dense_cuts=True, **args)


@pytest.mark.parametrize("block", [None, 9])
def test_rkv_appends_where_it_does_not_cut_while_decoding(block):
    cut = LastQueries().keeps(13)
    held = assert_engines_agree("llama", cut, "rkv", 13, block, window=WINDOW, decoding=False)
    assert len(held.places(0, 0)) == 13 + 7 and held.bytes.state == 0


@pytest.mark.parametrize("block", [None, 9])
def test_heads_share_rows(block):
    """Heads then hold different numbers of rows."""
    cut = LastQueries().keeps(13, share_interpolated(0.2))
    ada = ("ada", {"mode": "interpolate", "alpha": 0.2})
    args = dict(window=WINDOW, decode_interval=1)
    assert_engines_agree("llama", cut, "rkv", 13, block, allocator=ada, dense_cuts=True, **args)


@pytest.mark.parametrize("interval, window", [(3, 5), (6, 4)])
def test_while_decoding_the_last_queries_of_the_text_score(interval, window):
    """Every `interval` tokens, by queries of the answer and, if these are too few, of the prompt."""
    prompt, more = distinct(73).split([60, 13], dim=1)
    dense = DenseEngine("qwen3", LastQueries(window=window).keeps(17, interval=interval), cuts_decoding=True)
    dense.prefill(prompt, None)
    held = kvbench.prefill(
        tiny("qwen3"), prompt, "rkv", 17, method_args={"window": window, "decode_interval": interval}
    )
    assert_same_rows(held, dense)
    lengths = []
    for token in more.split(1, dim=1):
        torch.testing.assert_close(held.extend(token)[0].double(), dense.extend(token), **CLOSE)
        assert_same_rows(held, dense)
        lengths.append(len(held.places(0, 0)))
    assert lengths == [17 + step % interval for step in range(1, 14)]


@pytest.mark.parametrize("block", [None, 11])
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3"], "llama"))
def test_scores_are_those_of_the_equation(model, block, monkeypatch):
    """In float64, of every row, at every cut."""
    assert_scores_are_an_oracles(
        monkeypatch, "rkv", {"window": WINDOW}, LastQueries(), model, block, rtol=1e-9, atol=1e-14
    )


def test_redundancy_with_absent_rows():
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 17, 4, generator=draw, dtype=torch.float64)
    present = torch.arange(17) >= torch.randint(0, 9, (2, 3, 1), generator=draw)
    found = key_redundancy(keys, present, 0.5)
    for sample, head in np.ndindex(2, 3):
        here = present[sample, head]
        expected = find_redundancy(keys[sample, head][here].numpy(), 0.5)
        np.testing.assert_allclose(found[sample, head][here].numpy(), expected, rtol=1e-12)
        assert (found[sample, head][~here] == 0).all()


def test_of_equal_keys_the_newest_is_least_redundant():
    keys = torch.eye(8, dtype=torch.float64)[None, None]
    keys[0, 0, [2, 4, 6]] = keys[0, 0, 2].clone()
    found = key_redundancy(keys, torch.ones(1, 1, 8, dtype=torch.bool), 0.5)[0, 0]
    assert found[2] > found[4] > found[6]  # the newest is held against no key, and the one before it not against it
    torch.testing.assert_close(found[6:], found[:2])  # what nothing repeats, also not the first row


@pytest.mark.parametrize("budget", [2, 5, 6])
def test_a_quota_within_the_window_keeps_the_newest(budget):
    held = kvbench.prefill(tiny("llama"), distinct(60), "rkv", budget)
    for layer, head in np.ndindex(3, 2):
        assert set(range(60 - budget + 1, 60)) <= set(held.places(layer, head).tolist())
        assert len(held.places(layer, head)) == budget
    assert torch.isfinite(held.extend(ids(3))).all()


def test_settings_count():
    def places(**args) -> list:
        held = kvbench.prefill(tiny("llama"), ids(90), "rkv", 20, method_args=args)
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    found = [places(**args) for args in ({}, {"window": 3}, {"kernel": 1}, {"mix": 0.9}, {"mix": 0.9, "similar": 0.0})]
    assert len({str(own) for own in found}) == len(found)


def test_presets_are_the_sources_own():
    text = [load_settings("method", "rkv", {"preset": name}) for name in ("official", "official_class")]
    names = ("mix", "window", "kernel", "similar", "decoding", "decode_interval")
    assert [[own[name] for name in names] for own in text] == [[mix, 8, 7, 0.5, True, 128] for mix in (0.1, 0.07)]


@pytest.mark.parametrize(
    "args, line",
    [
        ({"mix": 1.5}, r"^method.mix=1.5: a share in \[0, 1\]"),
        ({"window": 0}, "^method.window=0: a whole number of at least 1"),
        ({"kernel": 4}, "^method.kernel=4: an odd whole number"),
        ({"similar": 2}, r"^method.similar=2: a share in \[0, 1\]"),
    ],
)
def test_what_is_refused(args, line):
    with pytest.raises(SettingError, match=line):
        kvbench.prefill(tiny("llama"), ids(20), "rkv", 5, method_args=args)
