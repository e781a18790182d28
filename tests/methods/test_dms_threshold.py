"""The DMS threshold over several scores, against loops in float64: what is remembered, evicted and kept."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvbench
from kvbench.config.catalogue import build, load_settings, methods_available
from kvbench.interfaces.method import Method
from kvbench.methods.dms_threshold import DMSThreshold
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import make_tiny_method_args
from tests.support.oracle_scores import SNAPKV, score_mean_votes, score_unlike
from tests.support.oracles import CLOSE, assert_same_rows
from tests.support.selection import choose_quick
from tests.support.tiny_models import distinct, ids, make_double, tiny

WINDOW = 9


def score_short(glance: HeadView) -> np.ndarray:
    return np.array([-np.sqrt((key * key).sum()) for key in glance.rows.keys])


def protect_none(glance: HeadView) -> np.ndarray:
    return np.zeros(len(glance.rows.places), dtype=bool)


def protect_last(glance: HeadView) -> np.ndarray:
    return glance.rows.places >= glance.tokens - SNAPKV["window"]


BASES: dict[str, tuple] = {  # settings, score in loops, rows that the base protects
    "knorm": ({}, score_short, protect_none),
    "keydiff": ({}, score_unlike("mean_normalised", "cosine"), protect_none),
    "snapkv": (SNAPKV, score_mean_votes(**SNAPKV), protect_last),
}


class Remembered:
    """The score of every row by the block in which it was read."""

    def __init__(self, score: Callable, protect: Callable, threshold: float) -> None:
        self.score, self.protect, self.threshold = score, protect, threshold
        self.scores: dict[tuple[int, int, int], float] = {}

    def cut(self, glances: list[HeadView]) -> list[Head]:
        kept = []
        for glance in glances:
            scores = np.where(self.protect(glance), np.inf, self.score(glance))
            new = glance.queries.shape[1]
            for place, score in list(zip(glance.rows.places, scores, strict=True))[-new:]:
                self.scores[glance.layer, glance.head, place] = score
            own = [self.scores[glance.layer, glance.head, place] for place in glance.rows.places]
            stays = [
                place >= glance.tokens - WINDOW or score >= self.threshold
                for place, score in zip(glance.rows.places, own, strict=True)
            ]
            kept.append(glance.rows.take(np.array(stays)))
        return kept


def find_threshold(base: str, model: str) -> float:
    """A threshold that the middle of the first block's scores has."""
    _, score, protect = BASES[base]
    found: list[float] = []

    def note(glances: list[HeadView]) -> list[Head]:
        found.extend(own for glance in glances for own in score(glance)[~protect(glance)])
        return [glance.rows for glance in glances]

    DenseEngine(model, note).prefill(distinct(60), None)
    middle = sorted(found)[len(found) // 2 : len(found) // 2 + 2]
    return float(np.mean(middle))


def settings(base: str, threshold: float, **more) -> dict:
    return {"base": base, "base_args": BASES[base][0], "threshold": threshold, "window": WINDOW, **more}


@pytest.mark.cover
@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("model", choose_quick(["llama", "qwen3", "gemma3"], "llama"))
def test_rows_below_the_threshold_go_when_they_leave_the_window(model, base, decoding, block):
    threshold, tokens = find_threshold(base, model), 30 if block == 1 else 60
    prompt, more = distinct(tokens + 25).split([tokens, 25], dim=1)
    dense = DenseEngine(model, Remembered(*BASES[base][1:], threshold).cut, cuts_decoding=decoding)
    expected = dense.prefill(prompt, block)
    args = settings(base, threshold, decoding=decoding)
    held = kvbench.prefill(tiny(model), prompt, "dms_threshold", None, block, method_args=args)
    torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
    assert_same_rows(held, dense)
    for part in more.split([1, 1, 14, 1, 8], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        assert_same_rows(held, dense)
    if base != "snapkv" or block is None:  # with small blocks all rows are in its window when they are read
        counts = {
            len(rows.places) for layer in set(dense.held) - set(held.sliding_layers) for rows in dense.held[layer]
        }
        assert len(counts) > 1 and min(counts) > WINDOW - 1 and min(counts) < tokens + 25


@pytest.mark.cover
@pytest.mark.parametrize("block", [None, 11])
@pytest.mark.parametrize("base", list(BASES))
def test_scores_are_those_of_the_base_when_a_row_was_read(base, block, monkeypatch):
    """In float64, of every row, at every cut."""
    found: list[tuple] = []
    score = DMSThreshold.score
    monkeypatch.setattr(
        DMSThreshold,
        "score",
        lambda self, seen, rows, state: found.append((seen.layer, rows)) or score(self, seen, rows, state),
    )
    threshold = find_threshold(base, "llama")
    oracle = Remembered(*BASES[base][1:], threshold)
    DenseEngine("llama", oracle.cut).prefill(distinct(60), block)
    args = settings(base, threshold)
    kvbench.prefill(make_double("llama"), distinct(60), "dms_threshold", None, block, method_args=args)
    compared = 0
    for layer, rows in found:
        for head, row in zip(*np.nonzero(rows.present[0].numpy()), strict=True):
            expected = oracle.scores[layer, head, int(rows.places[0, head, row])]
            its = float(rows.columns["base_score"][0, head, row])
            assert its == pytest.approx(expected, rel=1e-9, abs=1e-13) or (expected == np.inf and its > 1e300)
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("block", choose_quick([None, 1, 7, 128], None, 7))
def test_extreme_thresholds_keep_everything_or_the_window(block):
    for threshold, count in ((-1e9, 40), (1e9, WINDOW)):
        args = settings("knorm", threshold)
        held = kvbench.prefill(tiny("llama"), distinct(40), "dms_threshold", None, block, method_args=args)
        assert {len(held.places(layer, head)) for layer, head in np.ndindex(3, 2)} == {count}
    args = settings("knorm", 1e9) | {"window": 0}
    held = kvbench.prefill(tiny("llama"), distinct(40), "dms_threshold", None, block, method_args=args)
    assert {len(held.places(layer, head)) for layer, head in np.ndindex(3, 2)} == {1}  # a head keeps one


def test_a_score_equal_to_the_threshold_stays():
    method = build("method", load_settings("method", "dms_threshold"))
    scores = torch.tensor([[[-torch.inf, -0.8, -0.75, -0.4, torch.inf]]])
    assert method.count_rows(scores).tolist() == [[3]]


BUILT: dict[str, Method] = {
    name: build("method", load_settings("method", name, make_tiny_method_args(name, "llama")))
    for name in methods_available()
}


@pytest.mark.parametrize("base", [name for name in BUILT if name != "dms_threshold"])
def test_every_method_is_a_base_or_is_refused(base):
    """Any method that scores what it has just read."""
    own = BUILT[base]
    streams = own.captured is not None and own.captured.streams
    chooses = own.budget_setting is not None or own.overrides("select", "merge", "cut")
    takes = own.overrides("score") and not (streams or chooses or own.needs_extra_reads)
    args = {"base": base, "base_args": make_tiny_method_args(base, "llama"), "threshold": 0.0, "decoding": True}
    if not takes:
        with pytest.raises(SettingError, match=f"^method.base={base}: "):
            kvbench.prefill(tiny("llama"), distinct(60), "dms_threshold", None, method_args=args)
        return
    block = None if own.one_block else 20
    held = kvbench.prefill(tiny("llama"), distinct(60), "dms_threshold", None, block, method_args={**args, "window": 7})
    assert torch.isfinite(held.extend(ids(5))).all()
    assert set(range(58, 65)) <= set(held.places(1, 0).tolist())


@pytest.mark.parametrize(
    "args, line",
    [
        ({"window": -1}, "^method.window=-1: a whole number of at least 0"),
        ({"threshold": "low"}, "^method.threshold=low: a number"),
        ({"budget_setting": None}, "^method.budget_setting=null: choose one of threshold"),
        ({"budget_setting": "window"}, "^method.budget_setting=window: choose one of threshold"),
        ({"base": "kvzip"}, "^method.base=kvzip: dms_threshold needs scores of the block that was read"),
        ({"base": "criticalkv"}, "^method.base=criticalkv: dms_threshold needs scores of the block that was read"),
        ({"base": "full"}, "^method.base=full: dms_threshold needs a method that scores rows"),
        ({"base": "none"}, "^method.base=none: choose one that kvbench run --help lists"),
    ],
)
def test_what_is_refused(args, line):
    with pytest.raises(SettingError, match=line):
        kvbench.prefill(tiny("llama"), ids(20), "dms_threshold", None, method_args=args)


def test_a_budget_is_refused():
    with pytest.raises(SettingError, match=r"^budget=0\.5: dms_threshold decides by method\.threshold"):
        kvbench.prefill(tiny("llama"), ids(20), "dms_threshold", 0.5)
