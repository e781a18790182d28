"""activations: the numbers of all channels, beside SciPy's."""

import numpy as np
import pytest
import torch
from scipy import stats

from kvbench.studies import activations
from kvbench.studies.activations import SINKS, Activations, count_modes, describe_channels, expect_normal
from kvbench.studies.study import draw_positions
from tests.support.layer_states import read_layers
from tests.support.studies import find_values, study
from tests.support.tiny_models import ids


def measure_distances(z: np.ndarray) -> np.ndarray:
    """Kolmogorov-Smirnov distance of each column to the normal distribution."""
    count, below = len(z), stats.norm.cdf(np.sort(z, 0))
    found = [max(max((i + 1) / count - c, c - i / count) for i, c in enumerate(own)) for own in below[:, :3].T]
    assert found == pytest.approx([stats.ks_1samp(own, stats.norm.cdf).statistic for own in z[:, :3].T])
    places = np.arange(count)[:, None] / count
    return np.maximum(places + 1 / count - below, below - places).max(0)


MEASURES = {
    "mean": lambda x: abs(x.mean(0)),
    "std": lambda x: x.std(0),
    "skewness": lambda x: abs(stats.skew(x)),
    "kurtosis": stats.kurtosis,
    "distance": lambda x: measure_distances((x - x.mean(0)) / x.std(0)),
}


@pytest.mark.parametrize("model, block", [("llama", None), ("qwen3", 7)])
def test_numbers_of_channels_are_scipys(model, block, monkeypatch):
    monkeypatch.setattr(activations, "SAMPLED", 40)
    monkeypatch.setattr(activations, "CLOSE", 0.09)
    text = ids(60)
    lines = study(Activations(seed=3), model, 60, block)
    places = draw_positions(40, 60, 3, SINKS).numpy()
    assert places.min() >= SINKS and len(places) == 40
    distances = {}
    for layer, own in enumerate(read_layers(model, text)):
        kinds = {"hidden": own.hidden, "normed hidden": own.normed}
        kinds |= {name: np.concatenate(list(x), 1) for name, x in (("queries", own.queries), ("rotated", own.rotated))}
        for series, values in kinds.items():
            channels = values[places]
            for quantity, measure in MEASURES.items():
                [found] = find_values(lines, quantity=quantity, series=series, layer=layer)
                assert found == pytest.approx(measure(channels).mean(), rel=2e-5, abs=1e-6), quantity
            distances.setdefault(series, []).extend(MEASURES["distance"](channels))
            z = (channels - channels.mean(0)) / channels.std(0)
            counts = np.histogram(z.clip(-4, 4), 40, (-4, 4))[0]
            found = find_values(lines, quantity="shares", series=series, layer=layer)
            assert np.abs(np.array(found) * z.size - counts).sum() <= 2, series  # a value at the edge of two bins
    for series, word in (("normed hidden", "states"), ("queries", "queries")):
        [found] = find_values(lines, quantity=f"close_{word}", series="holds")
        assert found == pytest.approx(np.mean(np.array(distances[series]) <= 0.09)) and 0 < found < 1


def test_histograms_are_of_the_shown_layers_and_beside_the_normal_ones():
    lines = study(Activations(), "gemma3", 60, None)
    assert {2, 5} == {line.layer for line in lines if line.quantity == "shares"}
    normal = find_values(lines, quantity="shares", series="normal", layer=2)
    edges = np.linspace(-4, 4, 41)
    edges[[0, -1]] = -np.inf, np.inf
    np.testing.assert_allclose(normal, np.diff(stats.norm.cdf(edges)), atol=1e-12)
    np.testing.assert_allclose(expect_normal().numpy(), normal)
    for series in ("normed hidden", "queries"):
        assert sum(find_values(lines, quantity="channel", series=series, layer=5)) == pytest.approx(1)


def test_modes_are_counted_but_for_small_ones():
    normal = torch.from_numpy(stats.norm.ppf((np.arange(300) + 0.5) / 300))
    parts = [
        normal,
        torch.where(torch.arange(300) < 150, normal * 0.3 - 2, normal * 0.3 + 2),
        normal * 0.2 + 3 * (torch.arange(300) % 3 - 1),
        torch.cat([normal[:-6], torch.full((6,), 5.0)]),  # 2 % apart from the others
    ]
    values = torch.stack(parts, 1)
    z = (values - values.mean(0)) / values.std(0, correction=0)
    assert count_modes(z).tolist() == [1, 2, 3, 1]


def test_a_channel_that_never_changes_does_not_count():
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    values[:, 1] = 2.5
    found = describe_channels(values)
    assert found["count"] == 100 and found["kurtosis"].isfinite().all() and len(found["kurtosis"]) == 2
