"""nearest_tokens: neighbours, residuals and spectra beside plain loops."""

import numpy as np
import pytest
import torch

from kvbench.studies import nearest_tokens
from kvbench.studies.nearest_tokens import NearestTokens, find_nearest
from tests.support.layer_states import read_layers
from tests.support.studies import find_values, study
from tests.support.tiny_models import ids

TOKENS = 60


def search(vectors: np.ndarray, token: int, stride: int, count: int) -> list[int]:
    """The nearest earlier tokens, the nearest first, of equal ones the latest first."""
    earlier = range(0, token, stride)
    return sorted(earlier, key=lambda own: (round(((vectors[token] - vectors[own]) ** 2).sum(), 9), -own))[:count]


def count(values: list[float], low: float, high: float, bins: int) -> np.ndarray:
    return np.histogram(np.clip(values, low, high), bins, (low, high))[0] / len(values)


@pytest.mark.parametrize("model, block", [("llama", None), ("qwen3", 7)])
def test_numbers_are_those_of_plain_loops(model, block, monkeypatch):
    monkeypatch.setattr(nearest_tokens, "COMPARED", 500)
    text = ids(TOKENS)
    lines = study(NearestTokens(), model, TOKENS, block)
    shares = {name: [] for name in ("far", "similar", "smaller", "flatter", "peaked")}
    for layer, states in enumerate(read_layers(model, text)):
        kv = states.stored
        for series, stride, least, first in (("all", 1, 1, 1), ("strided", 10, 4, 31)):
            nearest = [search(kv, token, stride, least)[0] for token in range(first, TOKENS)]
            apart = [token - near for token, near in zip(range(first, TOKENS), nearest, strict=True)]
            cosines = [
                kv[token] @ kv[near] / np.linalg.norm(kv[token]) / np.linalg.norm(kv[near])
                for token, near in zip(range(first, TOKENS), nearest, strict=True)
            ]
            place = {"series": series, "layer": layer}
            found = find_values(lines, quantity="distance", **place)
            np.testing.assert_allclose(found, count(np.log2(apart), 0, 20, 20))
            found = find_values(lines, quantity="cosine", **place)
            np.testing.assert_allclose(found, count(cosines, -1, 1, 40))
            if series == "all":
                shares["far"] += [own > 16 for own in apart[16:]]
                shares["similar"] += [own > 0.9 for own in cosines]
        means = np.array([kv[search(kv, token, 10, 4)].mean(0) for token in range(31, TOKENS)])
        parts = {"kv": kv[31:], "residual": kv[31:] - means}
        unit, norm = np.sqrt((parts["kv"] ** 2).mean()), np.linalg.norm(parts["kv"], axis=1).mean()
        flatness, near = {}, {}
        spectra = {series: np.linalg.svd(x, compute_uv=False) for series, x in parts.items()}
        for series, x in parts.items():
            place = {"series": series, "layer": layer}
            spectrum = spectra[series]
            flatness[series] = (spectrum**2).sum() ** 2 / (spectrum**4).sum()
            near[series] = (abs(x) <= 0.1 * unit).mean()
            assert find_values(lines, quantity="flatness", **place) == pytest.approx([flatness[series]])
            assert find_values(lines, quantity="near_zero", **place) == pytest.approx([near[series]])
            full = np.zeros(kv.shape[1])
            full[: len(spectrum)] = spectrum / spectra["kv"][0]
            found = [line for line in lines if line.quantity == "spectrum" and line.series == series]
            own = [line for line in found if line.layer == layer]
            numbers = [int(line.x) for line in own]
            assert {1, 2, kv.shape[1]} <= set(numbers) and sorted(set(numbers)) == numbers
            np.testing.assert_allclose([line.value for line in own], full[np.array(numbers) - 1], atol=1e-6)
            found = find_values(lines, quantity="norm", **place)
            np.testing.assert_allclose(found, count(np.linalg.norm(x, axis=1) / norm, 0, 2, 40))
            found = find_values(lines, quantity="values", **place)
            np.testing.assert_allclose(found, count((x / unit).flatten(), -4, 4, 40))
        shares["smaller"] += list(np.linalg.norm(parts["residual"], axis=1) < np.linalg.norm(parts["kv"], axis=1))
        shares["flatter"].append(flatness["residual"] > flatness["kv"])
        shares["peaked"].append(near["residual"] > near["kv"])
    for quantity, own in shares.items():
        assert find_values(lines, quantity=quantity, series="holds") == [pytest.approx(np.mean(own))], quantity


def test_of_equal_tokens_the_latest_is_the_nearest():
    """In float32, where their scores differ by rounding."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(3, 96, generator=generator) * 30
    vectors = few[torch.arange(45) % 3]
    nearest, references = find_nearest(vectors, 1, 3)
    assert (torch.arange(3, 45) - nearest).tolist() == [3] * 42 and references.shape == (42, 3)
