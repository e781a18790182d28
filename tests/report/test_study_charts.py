"""Charts of studies: every number is drawn where it belongs, and what colours tell, something else tells, too."""

from math import fsum
from typing import Any

import pytest

from kvbench.papers.exhibit_pages import ExhibitPage
from kvbench.papers.exhibits import load_exhibits
from kvbench.report.print_charts import make_figure_specification, render_svg
from kvbench.report.study_charts import (
    KINDS,
    MOST_PLOTS,
    OPPOSITES,
    draw_exhibit,
    make_figure,
    pick_evenly,
    split_lines,
)
from kvbench.store.study_lines import Line, read_study
from tests.support.study_folders import list_heads, write_study

TOTAL = 600.0


def make_line(value: float, **place: Any) -> Line:
    return Line("s", place.pop("quantity", "norm"), value, **place)


def draw(chart: str, lines: list[Line], **spec: Any) -> list[dict[str, Any]]:
    """Return the plots of a figure as Vega-Lite specifications."""
    drawing = draw_exhibit({"study": "s", "chart": chart, **spec}, lines, TOTAL)
    assert len(drawing.rows) == len(lines)
    spec = make_figure_specification(drawing, 120, None)
    plots = spec["vconcat"][0]["concat"]
    return [{"rows": spec["datasets"][f"plot{at}"], **plot} for at, plot in enumerate(plots)]


def test_the_area_of_a_histogram_is_the_sum_of_its_shares():
    """The outline is integrated by the trapezoidal rule; bins are of width 0.5, and empty ends are cut off."""
    shares = {-0.75: 0.0, -0.25: 0.25, 0.25: 0.75, 0.75: 0.0}
    [plot] = draw("histogram", [make_line(share, x=x) for x, share in shares.items()])
    points = sorted((row["at"], row["x"], row["value"]) for row in plot["rows"])
    pairs = zip(points, points[1:], strict=False)
    assert fsum((after[1] - before[1]) * (after[2] + before[2]) / 2 for before, after in pairs) == 0.5
    assert plot["encoding"]["x"]["scale"]["domain"] == [-0.5, 0.5]


def test_classes_differ_in_colour_and_in_mark_or_dash():
    lines = [make_line(0.5, series=own, x=0.5) for own in ("a", "b", "c", "d", "e")]
    for chart, looks in (("histogram", "dash"), ("scatter", "shape"), ("curves", "dash")):
        key = draw_exhibit({"chart": chart, "study": "s", "names": {"a": "first"}}, lines, TOTAL).key
        assert [own["label"] for own in key] == ["first", "b", "c", "d", "e"]
        assert len({own["colour"] for own in key}) == len({str(own[looks]) for own in key}) == 5


def test_every_point_of_a_scatter_is_drawn_but_those_that_a_logarithm_lacks():
    lines = [make_line(y, x=x, series="keys") for x, y in ((1.0, 2.0), (0.0, 3.0), (4.0, -1.0))]
    [plot] = draw("scatter", lines)
    assert [(row["x"], row["value"]) for row in plot["rows"]] == [(1.0, 2.0), (0.0, 3.0), (4.0, -1.0)]
    [plot] = draw("scatter", lines, axes={"log": ["x", "y"]})
    assert [(row["x"], row["value"]) for row in plot["rows"]] == [(1.0, 2.0)]
    assert all(layer["encoding"]["x"]["scale"]["type"] == "log" for layer in plot["layer"])


def test_scatters_of_one_head_stand_in_a_row_and_share_their_scales():
    lines = [make_line(y, x=y, quantity=own, layer=0, head=0) for own, y in (("a", 1.0), ("a", 3.0), ("b", 2.0))]
    plots = draw("scatter", [*lines, make_line(9.0, x=9.0, layer=1, head=0)])
    scales = [plot["layer"][0]["encoding"]["y"]["scale"]["domain"] for plot in plots]
    assert scales == [[1.0, 3.0], [1.0, 3.0], [9.0, 9.0]]


def test_a_curve_without_x_goes_by_layer_and_has_its_band():
    """The band reaches beyond the curve, which goes from 1 to 2, by half of that at most."""
    lines = [make_line(1 + layer / 2, layer=layer, low=layer / 2, high=1.25 + layer / 2) for layer in range(3)]
    [plot] = draw("curves", lines)
    band, line = plot["layer"]
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")
    assert line["encoding"]["x"]["field"] == "layer" and line["encoding"]["y"]["scale"]["domain"] == [0.5, 2.25]


def test_quantiles_become_the_ends_of_bars():
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    lines = [make_line(10 * share + layer, x=share, layer=layer) for layer in (0, 1) for share in shares]
    [plot] = draw("quantiles", lines)
    names = ("layer", "lowest", "lower", "median", "higher", "highest")
    assert [[row[name] for name in names] for row in plot["rows"]] == [
        [0, 0.5, 2.5, 5.0, 7.5, 9.5], [1, 1.5, 3.5, 6.0, 8.5, 10.5],
    ]  # fmt: skip


def test_values_of_both_signs_have_a_scale_around_zero_that_can_be_read_in_grey():
    lines = [line for line in list_heads() if line.series == ""]
    scale = draw("heat_map", lines)[0]["encoding"]["color"]["scale"]
    assert scale["domain"] == [-0.15, 0.15] and scale["range"] == OPPOSITES
    channels = [[int(own[at : at + 2], 16) for at in (1, 3, 5)] for own in OPPOSITES]
    grey = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in channels]
    assert all(before - after > 20 for before, after in zip(grey, grey[1:], strict=False))


def test_maps_of_a_quantity_share_a_scale_and_stand_in_a_row():
    lines = [
        make_line(value, x=x, y=10.0, series=series, quantity=quantity)
        for series in ("a", "b")
        for quantity, value in (
            ("cosine", -0.5 if series == "a" else 0.25),
            ("attention", 0.25 if series == "a" else 0.5),
        )
        for x in (0.0, 10.0)
    ]
    plots = draw("position_maps", lines)
    assert [" ".join(plot["title"]["text"]) for plot in plots] == [
        "cosine, a",
        "cosine, b",
        "attention, a",
        "attention, b",
    ]
    assert [plot["encoding"]["color"]["legend"] is not None for plot in plots] == [False, True, False, True]
    scales = [plot["encoding"]["color"]["scale"]["domain"] for plot in plots]
    assert scales == [[-0.5, 0.5]] * 2 + [[0.25, 0.5]] * 2
    assert [(row["x"], row["y"]) for row in plots[0]["rows"]] == [(0.0, 10.0), (10.0, 10.0)]


def test_of_many_layers_some_are_shown_and_named():
    plots, about = split_lines({"chart": "histogram"}, [make_line(0.5, x=0.5, layer=layer) for layer in range(30)])
    titles = [plot.title for plot in plots]
    assert len(titles) == MOST_PLOTS and titles[0] == "layer\u00a00" and titles[-1] == "layer\u00a029"
    assert about[0].endswith("of 30")
    assert pick_evenly(range(5), 9) == [0, 1, 2, 3, 4] and pick_evenly(range(5), 1) == [0]


@pytest.mark.parametrize("chart", KINDS)
def test_a_chart_of_one_number_is_drawn(chart):
    """Altair validates each part."""
    assert len(draw(chart, [make_line(0.5, x=0.5, y=0.5, layer=0, head=0)])) == 1


def test_a_figure_is_as_wide_as_asked_and_names_what_it_shows(tmp_path):
    found = read_study(write_study(tmp_path, list_heads()))
    page = ExhibitPage("keydiff_figure14", load_exhibits()["keydiff_figure14"], found, tmp_path)
    figure = make_figure(page, 3.25)
    text, width, _ = render_svg(figure.drawing, figure.pixels, figure.title)
    assert 230 < width <= 72 * 3.25 + 1
    assert all(own in text for own in ("KeyDiff, Figure 14", "reference, 2 prompts", "query head", "layer", "cosine"))
