"""Draw a panel's charts (kvbench.report.charts) as SVG for print, with a title, a key and a given width.

Lengths are pixels of the page. Only at the end POINTS converts them to typographic points, so that a figure keeps the
page's proportions of letters, lines and marks. The width of the plots follows from the measured size of the drawn
figure around them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert

from kvbench.analysis.closing_table import EMBEDDED_NOTE, MINIATURE_NOTE
from kvbench.analysis.text_table import format_range
from kvbench.report import charts
from kvbench.report.style import FULL

POINTS = 0.7  # typographic points per pixel: letters of 11 pixels have 7.7 points
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # vl-convert contains the first
LETTER = 5.9  # pixels: letters of a text are not wider than this on average
SUBTITLE = {"subtitleFontSize": 11, "subtitleColor": charts.MUTED, "subtitlePadding": 4}
FULL_KEY = {"label": "full cache", "colour": FULL, "shape": "", "dash": charts.FULL_DASH}  # its entry in a key
PUBLISHED_KEY = {"label": "hollow: published", "colour": charts.INK, "shape": "", "dash": None}
CIRCLE_KEY = {"label": "circle: published", "colour": charts.INK, "shape": "circle", "dash": None}
CONFIG = charts.CONFIG | {
    "font": FONT,
    "background": "white",
    "aria": False,
    "axis": charts.CONFIG["axis"] | {"labelColor": charts.INK, "titleColor": charts.INK},
    "title": {"anchor": "start", "fontSize": 12, "offset": 12, **SUBTITLE},
    "header": {"labelFontSize": 11, "labelColor": charts.INK, "labelPadding": 4},
    "legend": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "gradientThickness": 10},
}


@dataclass(frozen=True)
class Drawing:
    """A chart that is not drawn yet.

    Attributes:
        rows: Its numbers, for the CSV.
        tables: Its data sets.
        chart: Function that returns the chart for a width of one plot in pixels.
        plots: Number of plots next to each other.
        reach: Smallest and largest width of one plot, in pixels.
        key: Entries of the key.
        about: Texts for the subtitle.
    """

    rows: list[dict[str, Any]]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    chart: Callable[[float], alt.TopLevelMixin]
    plots: int
    reach: tuple[float, float]
    key: Sequence[Mapping[str, Any]] = ()
    about: Sequence[str] = ()


def draw_curve(panel: Mapping[str, Any], against: str, total: float) -> Drawing | None:
    """Return the drawing of score against kept share, at most `total` pixels wide; None if there is no curve.

    If all methods were run at one and the same budget, there is no curve to see. The drawing is then a row for each
    method, with a point and its interval.
    """
    series = [entry for entry in panel["series"] if "smallest" in entry]
    if not series:
        return None
    budgets = {point["budget"] for point in panel["points"]}
    names = [entry["label"] for entry in panel["series"]]
    rows = [{"method": names[point["s"]], **point} for point in panel["points"]]
    rows += [{"method": f"full cache, beside {names[point['s']]}", **point} for point in panel["full"]]
    published = panel.get("published", [])  # the page has none
    rows += [{"method": f"{names[score['s']]}, published in {score['table']}", **score} for score in published]
    hollow = [PUBLISHED_KEY] if published else []
    samples, left = ({entry[name] for entry in series} for name in ("samples", "left_out"))
    more = f" ({format_range(left)} not answered everywhere)" if any(left) else ""
    about = [series[0]["average"], f"{format_range(samples)} samples{more}"]
    if len(budgets) == 1:
        return Drawing(
            rows,
            panel,
            make_dots(len(series), bool(published)),
            1,
            (80, total),
            [FULL_KEY, *hollow],
            [f"budget {budgets.pop()}", *about],
        )
    share = charts.BYTES if against == "bytes" else charts.ROWS

    def chart(width: float) -> alt.LayerChart:
        return charts.chart_curve(share, bool(published)).properties(width=width, height=200)

    return Drawing(rows, panel, chart, 1, (80, total), [*series, FULL_KEY, *hollow], about)


def make_dots(count: int, published: bool) -> Callable[[float], alt.LayerChart]:
    """Return the function that makes the chart of scores at one budget, with a row for each of `count` methods."""

    def chart(width: float) -> alt.LayerChart:
        return charts.chart_dots(published).properties(width=width, height=22 * count)

    return chart


def draw_tasks(panel: Mapping[str, Any], total: float) -> Drawing | None:
    """Return the drawing of differences by subtask; None if there are none."""
    if not panel["cells"]:
        return None
    runs = {row["order"]: row["row"] for row in panel["rows"]}
    names = {column["column"]: column["task"] for column in panel["tasks"]}
    rows = [{"run": runs[cell["order"]], "subtask": names[cell["column"]], **cell} for cell in panel["cells"]]
    height, published = 24 * len(runs), has_published(rows)

    def chart(width: float) -> alt.LayerChart:
        return charts.chart_tasks(make_legend(height), published).properties(width=width, height=height)

    key = [CIRCLE_KEY] if published else []
    return Drawing(rows, panel, chart, 1, (30 * len(names), 72 * len(names)), key)


def has_published(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any cell has a published value."""
    return any(row.get("published") is not None for row in rows)


def draw_grid(panel: Mapping[str, Any], total: float, change: bool = False) -> Drawing | None:
    """Return the drawing of scores, or with `change` of differences, by length and depth; None if there are none."""
    cells, seen = [], []
    for grid in panel["grids"]:
        if change and grid["s"] is None:
            continue  # the full cache's own
        if (grid["row"], grid["cells"]) not in seen:
            seen.append((grid["row"], grid["cells"]))
            alike = sum(row == grid["row"] for row, _ in seen)
            name = grid["row"] if alike == 1 else f"{grid['row']} ({alike})"
            for cell in grid["cells"]:
                if not change or cell["diff"] is not None:
                    cells.append({"run": name, **cell, "published": cell.get("printed", (None, None))[change]})
    if not cells:
        return None
    runs = list(dict.fromkeys(cell["run"] for cell in cells))
    lengths, depths = (len({cell[name] for cell in cells}) for name in ("length", "depth"))
    least = max(76, 17 * lengths, min(LETTER * max(map(len, runs)), total - 130))
    beside = max(1, min(len(runs), int((total - 130) // (least + 12))))
    whole = (columns for columns in range(beside, beside // 2, -1) if len(runs) % columns == 0)  # avoids rows with gaps
    beside = next(whole, ceil(len(runs) / ceil(len(runs) / beside)))
    height, published = max(60, min(200, 20 * depths)), has_published(cells)

    def chart(width: float) -> alt.FacetChart:
        grid_chart = charts.chart_grid(make_legend(height), change, published).properties(width=width, height=height)
        header = alt.Header(title=None, labelLimit=width)
        return grid_chart.facet(alt.Facet("run:N", sort=runs, header=header), columns=beside, spacing=12)

    key = [CIRCLE_KEY] if published else []
    return Drawing(cells, {"cells": cells}, chart, beside, (least, max(least, 220)), key)


def draw_cost(panel: Mapping[str, Any], total: float) -> Drawing | None:
    """Return the drawing of differences against costs; None if no cost is known."""
    known = [name for name in charts.COSTS if any(row[name] is not None for row in panel["costs"])]
    if not known:
        return None
    free = [{"run": "full cache", **row} for row in panel["free"]]
    rows = [{"run": row["row"], **row} for row in panel["costs"]] + free
    beside = max(1, min(len(known), int(total // 200)))

    def chart(width: float) -> alt.ConcatChart:
        charts_of_costs = [charts.chart_cost(name).properties(width=width, height=190) for name in known]
        return alt.concat(*charts_of_costs, columns=beside, spacing=18)

    full = {"label": "full cache", "colour": FULL, "shape": "diamond", "dash": None}
    used = {row["s"] for row in panel["costs"]}
    return Drawing(
        rows, panel, chart, beside, (80, 320), [*(entry for entry in panel["series"] if entry["s"] in used), full]
    )


def make_legend(height: float) -> alt.Legend:
    """Return the legend of colours for plots of this height in pixels."""
    return alt.Legend(orient="right", gradientLength=min(height, 150), titleLimit=90)


def make_key(entries: Sequence[Mapping[str, Any]], width: float) -> alt.LayerChart:
    """Return a key of lines, marks and names, in as many columns as fit. The mark of a `hollow` entry is not filled."""
    column = min(width, 42 + LETTER * max(len(entry["label"]) for entry in entries))
    columns = max(1, int(width // column))
    places = [(at % columns * column, 8 + 17 * (at // columns)) for at in range(len(entries))]
    values = [
        {name: entry[name] for name in ("label", "colour", "shape", "dash")}
        | {"hollow": bool(entry.get("hollow")), "x": x, "end": x + 24, "mid": x + 12, "y": y}
        for entry, (x, y) in zip(entries, places, strict=True)
    ]

    def at(name: str) -> alt.X:
        return alt.X(f"{name}:Q", scale=None, axis=None)

    base = alt.Chart(alt.Data(values=values)).encode(y=alt.Y("y:Q", scale=None, axis=None), color=charts.COLOUR)
    line = base.transform_filter("datum.dash").mark_rule(strokeWidth=2)
    marks = [base.transform_filter("datum.shape && !datum.hollow").mark_point(filled=True, size=60, opacity=1)]
    if any(value["hollow"] for value in values):
        marks.append(base.transform_filter("datum.hollow").mark_point(filled=False, size=60, opacity=1))
    name = base.mark_text(align="left", dx=6, fontSize=11, limit=width - 30)
    return charts.stack_layers(
        line.encode(x=at("x"), x2="end", strokeDash=charts.DASH),
        *(mark.encode(x=at("mid"), shape=charts.SHAPE) for mark in marks),
        name.encode(x=at("end"), text="label:N", color=alt.value(charts.INK)),
    ).properties(width=width, height=places[-1][1] + 8)


def title_panel(panel: Mapping[str, Any], about: Sequence[str], total: float) -> alt.TitleParams:
    """Return a title with model, task and question, and a subtitle that distinguishes the protocol."""
    first = f"{panel['model']} · {panel['task']} · question {panel['question']}"
    below = " · ".join([*panel["also"], *about])
    notes = [note for note in panel["notes"] if note in (EMBEDDED_NOTE, MINIATURE_NOTE)]
    return make_title(first, [below, *notes], total)


def make_title(first: str, below: Sequence[str], total: float) -> alt.TitleParams:
    """Return a title and its subtitles, in lines of at most `total` pixels."""
    lines = [line for text in below for line in wrap(text, int(total / LETTER))]
    return alt.TitleParams(wrap(first, int(total / LETTER / 1.15)), subtitle=lines, limit=total)


def make_figure_specification(drawing: Drawing, plot: float, title: alt.TitleParams | None) -> dict[str, Any]:
    """Return the complete specification of a figure, including its numbers."""
    more: dict[str, Any] = {} if title is None else {"title": title}
    figure = make_plots(drawing, plot, config=alt.Config(**CONFIG), **more)
    spec = figure.to_dict(validate=False)  # Altair validated each part when it was made
    tables = {name: drawing.tables[name] for name in sorted(find_data_sets(spec) & drawing.tables.keys())}
    return spec | {"datasets": spec.get("datasets", {}) | tables}


def make_plots(drawing: Drawing, plot: float, **options: Any) -> alt.VConcatChart:
    """Return the plots of a drawing, each `plot` pixels wide, and its key, with these options of the chart."""
    chart = drawing.chart(plot)
    parts: list[Any] = [chart, make_key(drawing.key, plot * drawing.plots)] if drawing.key else [chart]
    scales = alt.ScaleResolveMap(color="independent", shape="independent", strokeDash="independent")
    return alt.VConcatChart(vconcat=parts, spacing=14, resolve=alt.Resolve(scale=scales), **options)


def find_data_sets(spec: object) -> set[str]:
    """Return the names of the data sets that a specification uses."""
    if isinstance(spec, dict):
        names = {spec["data"]["name"]} if set(spec.get("data") or ()) == {"name"} else set()
        return names.union(*map(find_data_sets, spec.values()))
    return set().union(*map(find_data_sets, spec)) if isinstance(spec, list) else set()


def render_svg(drawing: Drawing, total: float, title: alt.TitleParams | None) -> tuple[str, float, float]:
    """Draw a figure.

    Args:
        drawing: The chart.
        total: Largest width in pixels. The figure is wider only if its plots have their smallest width.
        title: Title and notes. None draws neither; a paper's caption states them instead.

    Returns:
        The SVG, and its width and height in points.
    """
    least, most = drawing.reach
    plot = min(most, total / drawing.plots)
    while True:
        text = vl_convert.vegalite_to_svg(make_figure_specification(drawing, plot, title))
        width, height = read_size(text)
        if width <= total + 0.5 or plot <= least:
            return tidy_svg(text), width * POINTS, height * POINTS
        plot = max(least, plot - max(1, (width - total) / drawing.plots))


def read_size(text: str) -> tuple[float, float]:
    """Return the width and height of an SVG; ValueError if it states none."""
    match = SIZE.search(text)
    if match is None:
        raise ValueError("the SVG has no width and height")
    return float(match[1]), float(match[2])


def tidy_svg(text: str) -> str:
    """Return an SVG as it is stored: the same for the same figure, and no longer than needed.

    The converter goes on counting names from figure to figure; here they start at 0. Coordinates have two decimals. The
    font is stated once for the whole figure in place of once for each text.
    """
    names = {name: f"{index}" for index, name in enumerate(dict.fromkeys(match[2] for match in NAME.finditer(text)))}
    text = NAME.sub(lambda match: match[1] + names[match[2]], text)
    fonts = dict.fromkeys(FONT_OF_TEXT.findall(text))
    if len(fonts) == 1:
        text = FONT_OF_TEXT.sub("", text).replace("<svg", f"<svg{[*fonts][0]}", 1)
    return COORDINATES.sub(lambda match: LONG_NUMBER.sub(round_number, match[0]), text)


def round_number(match: re.Match[str]) -> str:
    """Return a number with two decimals, without zeros at its end."""
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


SIZE = re.compile(r' width="([0-9.]+)" height="([0-9.]+)"')
NAME = re.compile(r'((?:id="|url\(#)(?:gradient_|clip))(\d+)')
COORDINATES = re.compile(r' (?:d|transform|width|height|viewBox|[xy][12]?)="[^"]*"')
FONT_OF_TEXT = re.compile(r' font-family="[^"]*"')
LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
