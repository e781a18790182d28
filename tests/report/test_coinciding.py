"""Curves that lie on top of each other are found, and drawn one around the other."""

from kvbench.report.charts import build_charts
from kvbench.report.coinciding import MOST, nest_curves


def make_points(curves: dict[str, list[tuple[float, float]]]) -> tuple[list[dict], list[dict]]:
    """Points and series, from the shares and scores of each label."""
    series = [{"s": place, "label": label} for place, label in enumerate(curves)]
    points = [
        {"s": place, "share": share, "score": score}
        for place, curve in enumerate(curves.values())
        for share, score in curve
    ]
    return points, series


def test_curves_that_coincide_are_drawn_one_around_the_other():
    points, series = make_points(
        {
            "one": [(0.1, 50), (0.2, 70), (0.5, 90)],
            "apart": [(0.1, 40), (0.2, 60), (0.5, 80)],
            "same": [(0.1, 50.2), (0.201, 70), (0.5, 89.5)],
            "joins": [(0.1, 10), (0.2, 70), (0.5, 90)],
            "crosses": [(0.1, 90), (0.2, 70), (0.5, 10)],
            "empty": [],
        }
    )
    assert nest_curves(points, series) == [["one", "same", "joins"]]
    assert [entry["covered"] for entry in series] == [2, 0, 1, 0, 0, 0]  # one that only crosses covers a point
    assert [point["over"] for point in points] == [1, 3, 2, 0, 0, 0, 0, 2, 1, 0, 1, 0, 0, 0, 0]


def test_points_alone_that_coincide_are_named():
    points, series = make_points({"one": [(0.1, 50)], "other": [(0.1, 50)]})
    assert nest_curves(points, series) == [["one", "other"]]
    assert [point["over"] for point in points] == [1, 0]


def test_more_series_than_anybody_can_read_are_not_compared():
    points, series = make_points({str(place): [(0.1, 50.0), (0.2, 60.0)] for place in range(MOST + 1)})
    assert nest_curves(points, series) == []
    assert {entry["covered"] for entry in series} == {point["over"] for point in points} == {0}


def test_a_line_and_its_marks_are_as_wide_as_what_covers_them_asks():
    *_, line, mark = build_charts()["curve"]["layer"]
    assert line["encoding"]["strokeWidth"]["field"] == "covered" and mark["encoding"]["size"]["field"] == "over"
    assert line["encoding"]["strokeWidth"]["scale"]["range"][0] == 2  # as thin as ever where nothing covers it
