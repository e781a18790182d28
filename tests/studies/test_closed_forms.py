"""The papers' closed forms, against operations that torch counts, quadrature, and enumeration in loops."""

from itertools import combinations
from math import exp, pi

import pytest
import torch
from scipy.integrate import quad
from torch.utils.flop_counter import FlopCounterMode

from kvbench.interfaces.layout import Layout
from kvbench.kernels.expected_attention import expected_logits, moments
from kvbench.studies import alternating_split, expected_exponential, forward_flops
from kvbench.studies.alternating_split import AlternatingSplit
from kvbench.studies.expected_exponential import ExpectedExponential
from kvbench.studies.forward_flops import ForwardFlops
from kvbench.studies.keep_ratios import KeepRatios
from tests.support.studies import values
from tests.support.tiny_models import ids, tiny

LLAMA = Layout(3, 2, 6, 32, 48, (), None, 512, None)  # of tests.support.tiny_models


def test_operations_of_a_model_are_those_that_torch_counts():
    model, tokens = tiny("llama"), 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids(tokens))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    terms = forward_flops.count_corrected(LLAMA, model.config.vocab_size, model.config.intermediate_size, tokens)
    linear = ("projections", "output", "feed-forward", "logits")
    assert sum(terms[name] for name in linear) == counted
    pairs = tokens * (tokens + 1) // 2
    assert terms["logits of attention"] == terms["values"] == 3 * 6 * 2 * 32 * pairs
    assert terms["total"] == counted + 3 * 6 * (4 * 32 + 3) * pairs


def test_operations_of_scores_are_those_that_torch_counts():
    queries, keys = torch.randn(1, 6, 40, 32), torch.randn(1, 2, 40, 32)
    with FlopCounterMode(display=False) as counter:
        own = moments(queries, implementation="reference")
        expected_logits(own.mean, own.scatter, keys, 1.0, implementation="reference")
    scores, projected = forward_flops.count_scores(LLAMA, 40)
    mean_term = 2 * 40 * 6 * 32  # kvbench adds the mean to a product that it needs anyway
    assert scores == 3 * (counter.get_total_flops() + mean_term)
    assert projected == 3 * 2 * 40 * 48 * 6 * 32


def test_the_printed_terms():
    lines = list(ForwardFlops().compute(LLAMA, tiny("llama").config))
    terms = {series: values(lines, "term", series)[(1024,)] for series in ("embeddings", "feed-forward", "softmax")}
    assert terms == {
        "embeddings": 2 * 1024 * 199 * 48,
        "feed-forward": 3 * 2 * 1024 * (48 * 64 + 48 * 64),
        "softmax": 9 * 6 * 1024**2,
    }
    every = [own.value for own in lines if (own.quantity, own.x) == ("term", 1024) and own.series != "total"]
    assert values(lines, "term", "total")[(1024,)] == sum(every) and len(every) == 8
    scores, _ = forward_flops.count_scores(LLAMA, 1024)
    assert values(lines, "overhead", "scores, printed")[(1024,)] == pytest.approx(scores / sum(every))


def test_the_closed_form_is_the_expectation(monkeypatch):
    monkeypatch.setattr(expected_exponential, "DRAWS", (500, 2000))
    lines = list(ExpectedExponential().compute(None, None))
    assert values(lines, "equal")[()] == values(lines, "covered")[()] == 1
    found = expected_exponential.integrate(torch.tensor(0.3), torch.tensor(1.2))
    exact, _ = quad(lambda x: exp(x - ((x - 0.3) / 1.2) ** 2 / 2) / (1.2 * (2 * pi) ** 0.5), -20, 30)
    assert float(found) == pytest.approx(exact, rel=1e-6)
    without = lambda mean, covariance, keys, scaling: expected_logits(mean, None, keys, scaling)  # noqa: E731
    monkeypatch.setattr(expected_exponential, "expected_logits", without)
    assert values(list(ExpectedExponential().compute(None, None)), "equal")[()] == 0


def test_ratios_are_shares_of_numbers_and_rows():
    """Counted token by token in 1000 tokens of 8 numbers."""
    lines = list(KeepRatios().compute(None, None))
    for target, full in ((30, 5), (20, 4)):
        stored = read = 0.0
        for layer in range(32):
            for token in range(1000):
                raw = layer < full or token % 10 == 0
                stored += 8 * raw + 2 * (layer >= full)
                read += 1 if layer < full else target / 100
        assert values(lines, "stored", "deltakv")[(target,)] == pytest.approx(100 * stored / (32 * 1000 * 8))
        assert values(lines, "read", "deltakv")[(target,)] == pytest.approx(100 * read / (32 * 1000))
    assert values(lines, "packed", "codes")[(30,)] == pytest.approx(29.3, abs=0.05)
    assert values(lines, "packed", "everything")[(30,)] == pytest.approx(45.15625 / 4)
    assert values(lines, "printed_stored")[()] == 1
    assert values(lines, "printed_read")[()] == pytest.approx(0.8)  # not DeltaKV's two


def test_all_splits_are_tried():
    draw = torch.Generator().manual_seed(0)
    functions = torch.rand(5, 5, generator=draw, dtype=torch.float64)
    for function, gap in zip(functions, alternating_split.measure_gaps(functions, 3), strict=True):
        sums = {
            half: sum(float(function[abs(x - y) - 1]) for x in half for y in range(6) if y not in half)
            for half in combinations(range(6), 3)
        }
        assert float(gap) == pytest.approx(1 - sums[0, 2, 4] / max(sums.values()))
    lines = list(AlternatingSplit().compute(None, None))
    assert values(lines, "convex", "holds")[()] == 1 and 0 < values(lines, "other", "holds")[()] < 1
    assert max(values(lines, "gap", "convex").values()) <= 1e-12
