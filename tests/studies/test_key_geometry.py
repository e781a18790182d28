"""The geometry of keys and queries, against the same computed by definition from all pairs, in float64."""

from itertools import combinations

import numpy as np
import pytest

from kvbench.studies import key_geometry
from kvbench.studies.key_geometry import QUANTILES, KeyGeometry
from tests.support.studies import attend, cosine, show_layers, study, values


@pytest.fixture(scope="module")
def layers():
    return show_layers()


@pytest.fixture(scope="module", params=[None, 7], ids=["one block", "blocks"])
def lines(request):
    return study(KeyGeometry(), block_size=request.param)


def test_means_and_the_key_farthest_from_the_anchor(lines, layers):
    means, tops = values(lines, "cosine_of_means"), values(lines, "cosine_of_top")
    opposite, aligned = [], []
    for index, layer in enumerate(layers):
        for head, queries in enumerate(layer["queries"]):
            keys = layer["keys"][head // 3]
            unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
            top = keys[np.argmin(unit @ unit.mean(0))]
            opposite.append(cosine(keys.mean(0), queries.mean(0)))
            aligned.append(cosine(top, queries.mean(0)))
            assert means[index, head] == pytest.approx(opposite[-1], abs=1e-12)
            assert tops[index, head] == pytest.approx(aligned[-1], abs=1e-12)
    assert values(lines, "opposite") == {(): pytest.approx(np.mean(np.array(opposite) < 0))}
    assert values(lines, "aligned") == {(): pytest.approx(np.mean(np.array(aligned) > 0))}


def test_histograms_and_quantiles(lines, layers):
    for series in ("keys", "queries"):
        shares, norms = values(lines, "cosine_to_mean", series), values(lines, "norm", series)
        for index, layer in enumerate(layers):
            every = layer[series]
            cosines = cosine(every, every.mean(1, keepdims=True))
            expected = np.histogram(cosines, key_geometry.BINS, (-1, 1))[0] / cosines.size
            found = [value for (at, _), value in shares.items() if at == index]
            assert found == pytest.approx(expected)
            sizes = np.quantile(np.linalg.norm(every, axis=-1), QUANTILES)
            assert [norms[index, share] for share in QUANTILES] == pytest.approx(sizes)


def test_similarity_by_distance(monkeypatch, layers):
    monkeypatch.setattr(key_geometry, "DISTANCES", 20)  # with all of the other tokens as starts
    monkeypatch.setattr(key_geometry, "SPLIT", 3)
    lines = study(KeyGeometry(), block_size=50)
    found, convex = values(lines, "similarity_at"), []
    for index, layer in enumerate(layers):
        starts = np.arange(layer["keys"].shape[1] - 20)
        curve = [
            np.mean([cosine(keys[starts], keys[starts + x]).mean() for keys in layer["keys"]]) for x in range(1, 21)
        ]
        assert [found[index, x] for x in range(1, 21)] == pytest.approx(curve)
        convex += list(np.diff(curve, 2) >= 0)
        sums = {
            half: sum(curve[abs(x - y) - 1] for x in half for y in range(6) if y not in half)
            for half in combinations(range(6), 3)
        }
        assert values(lines, "split_gap")[(index,)] == pytest.approx(1 - sums[0, 2, 4] / max(sums.values()), abs=1e-12)
    assert values(lines, "convex") == {(): pytest.approx(np.mean(convex))}


def test_maps_of_one_prompt(lines, layers):
    """Those of the heads with the most and the least similar keys; the map of pieces equals the mean of all pairs."""
    spread = {
        (index, head): np.mean(cosine(keys[:64, None], keys[None, :64]))
        for index, layer in enumerate(layers)
        for head, keys in enumerate(layer["keys"])
    }
    for series, choose in (("most", max), ("least", min)):
        index, head = choose(spread, key=spread.get)
        keys = layers[index]["keys"][head, :64]
        shown = values(lines, "similarity_64", series)
        assert shown[index, head, 5.0, 60.0] == pytest.approx(cosine(keys[5], keys[60]))
        weights = attend(layers[index])[3 * head : 3 * head + 3].mean(0)
        assert values(lines, "attention_64", series)[index, head, 5.0, 60.0] == pytest.approx(weights[60, 5])
    pieces = np.array_split(layers[1]["keys"][0], key_geometry.SQUARES)
    size = 150 / key_geometry.SQUARES
    expected = np.mean(cosine(pieces[4][:, None], pieces[9][None]))
    assert values(lines, "similarity_map")[1, 0, 4 * size, 9 * size] == pytest.approx(expected)


def test_a_plane_of_principal_components(monkeypatch, layers):
    monkeypatch.setattr(key_geometry, "POINTS", 150)  # all keys
    lines = study(KeyGeometry())
    every = np.concatenate([layers[0]["keys"][0], *layers[0]["queries"][:3]])
    axes = np.linalg.svd(every - every.mean(0), full_matrices=False)[2][:2]
    axes *= np.sign(axes[[0, 1], np.abs(axes).argmax(1)])[:, None]
    expected = (layers[0]["keys"][0] - every.mean(0)) @ axes.T
    shown = sorted((own.x, own.value) for own in lines if (own.quantity, own.series, own.layer) == ("plane", "keys", 0))
    np.testing.assert_allclose(shown, sorted(map(tuple, expected)), atol=1e-9)
