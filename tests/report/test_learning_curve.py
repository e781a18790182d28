"""The picture of a tuning's learning curve: which points it draws."""

import altair as alt
import pytest

from kvbench.report.learning_curve import draw_lines
from kvbench.report.style import COLOURS


def test_a_line_has_the_points_that_have_a_value():
    points = [{"tokens": 2e6, "a": 1.0, "b": None}, {"tokens": 3e6, "a": 0.0, "b": 4.0}]
    rows = draw_lines(points, {"a": "first", "b": "second"}, "title", alt.Scale()).to_dict()["data"]["values"]
    drawn = [(row["tokens"], row["name"], row["value"]) for row in rows]
    assert sorted(drawn) == [(2, "first", 1), (3, "first", 0), (3, "second", 4)]
    with pytest.raises(ValueError, match=f"{len(COLOURS) + 1} lines, {len(COLOURS)} colours"):
        draw_lines([], {str(number): "a" for number in range(len(COLOURS) + 1)}, "title", alt.Scale())
