"""The cone constant, against scipy's non-negative least squares and against an enumeration of faces."""

from itertools import combinations

import numpy as np
import pytest
import torch

from kvbench.studies.cone_constant import GAP, Residuals, find_cone_constants
from tests.support.studies import measure_distance


def draw_residuals(heads: int, queries: int, rows: int, dim: int, away: float, dtype=torch.float64) -> Residuals:
    """Random values, and outputs that lie farther and farther away from their mean."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(heads, rows, dim, generator=draw, dtype=dtype)
    anchors = torch.linspace(away / 2, away, queries, dtype=dtype)[:, None] * torch.ones(heads, 1, dim, dtype=dtype)
    pool = torch.rand(heads, queries, rows, generator=draw) < 0.7
    return Residuals(anchors, values, torch.cdist(anchors, values), pool)


def list_directions(residuals: Residuals, head: int, query: int) -> np.ndarray:
    own = residuals.anchors[head, query] - residuals.values[head][residuals.pool[head, query]]
    return (own / own.norm(dim=-1, keepdim=True)).double().numpy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_constant_above_0_is_the_distance_from_the_hull(dtype):
    residuals = draw_residuals(2, 3, 90, 24, 1.5, dtype)
    found = find_cone_constants(residuals, 0)
    for head in range(2):
        for query in range(3):
            exact = measure_distance(list_directions(residuals, head, query))
            assert exact > 0.01
            assert float(found.lower[head, query]) == pytest.approx(exact, abs=GAP)
            assert float(found.upper[head, query]) == pytest.approx(exact, abs=GAP)


def test_a_constant_below_0_is_bounded_by_the_nearest_face():
    residuals = draw_residuals(2, 2, 30, 3, 0.2)
    found = find_cone_constants(residuals, 0)
    for head in range(2):
        for query in range(2):
            points = list_directions(residuals, head, query)
            faces = []
            for corners in combinations(points, 3):
                normal = np.cross(corners[1] - corners[0], corners[2] - corners[0])
                for unit in (normal, -normal) / np.linalg.norm(normal):
                    if (points @ unit).min() >= corners[0] @ unit - 1e-9:  # all points lie on one side of the face
                        faces.append(corners[0] @ unit)
            exact = max(faces)
            assert exact < 0 and float(found.upper[head, query]) <= GAP
            assert exact - 0.01 < float(found.lower[head, query]) <= exact + 1e-9


def test_few_and_equal_directions():
    """One direction has the constant 1; two opposite ones have 0; copies change nothing."""
    values = torch.tensor([[[1.0, 0], [1, 0], [-1, 0], [0, 1]]], dtype=torch.float64)
    pool = torch.tensor([[[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
    anchors = torch.zeros(1, 3, 2, dtype=torch.float64)
    found = find_cone_constants(Residuals(anchors, values, torch.ones(1, 3, 4, dtype=torch.float64), pool), 0)
    assert found.upper[0].tolist() == pytest.approx([1, 0, 0.5**0.5], abs=GAP)
    assert found.lower[0].tolist() == pytest.approx([1, 0, 0.5**0.5], abs=0.01)
