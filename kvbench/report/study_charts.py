"""Draw the figures of conf/papers/exhibits/ from lines of studies.

The key `chart` of an exhibit names one of these:

    histogram      shares of values by bin, as outlines; `x` is a bin's middle
    scatter        points of several classes: `x`, and the value as the second coordinate
    curves         the value by `x`, or by layer, with its 95 % interval
    heat_map       the value by head (or `x`) and layer (or `y`)
    position_maps  the value by two positions, `x` and `y`
    quantiles      quantiles by layer or series, whose shares are `x`: two thin ends, two thick ends, and the median
    bars           the value by series (or `x`), with its 95 % interval

Lines that differ in quantity, layer or head have plots of their own, those that differ in series have colours. Colours
never stand alone: marks, dashes and lightness tell the same, so that a figure can be read in grey and by colour-blind
readers. A figure shows at most MOST_PLOTS plots, of layers at equal distances; its CSV has all lines.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from textwrap import wrap
from typing import Any, Final

import altair as alt

from kvbench.papers.exhibit_pages import ExhibitPage
from kvbench.papers.exhibits import Exhibit
from kvbench.report import charts
from kvbench.report.figures import COLUMNS, Figure
from kvbench.report.print_charts import LETTER, POINTS, Drawing, make_title
from kvbench.report.style import COLOURS, DASHES, MARKS
from kvbench.store.study_lines import HOLDS, Line

Row = dict[str, Any]
Drawn = tuple[alt.Chart | alt.LayerChart, list[Row]]

MOST_PLOTS = 12
WIDE = 2  # a figure with more plots than this takes the width of the page
LEAST_PLOT = 92  # pixels: the smallest width of a plot
HEIGHT = 150  # pixels of a plot
PALETTE = [COLOURS[name] for name in ("blue", "vermilion", "green", "indigo", "orange", "pink", "sky", "wine", "olive")]
SEQUENCE: Final = "magma"  # lightness falls evenly from small to large values
# From below 0 to above 0. The hue tells the sign; lightness falls all the way, so that a grey copy can be read, too.
OPPOSITES = ["#fff1dc", "#f4b45f", "#a39da1", "#4a84bd", "#0d2f5e"]
SHADES = ["#0d2f5e", "#3f76b0", "#8fb4d9", "#f4b45f", "#fde3bd"]  # colours of bars, from dark to light
SHOWN: dict[str, Row] = {"dash": {"shape": ""}, "shape": {"dash": None}, "bar": {"shape": "square", "dash": None}}
DRAWN = ("quantity", "value", "layer", "head", "x", "y", "low", "high")  # columns of a study's file
CROWDED = ("heat_map", "quantiles")  # charts with a place for each head or layer
COLOURED = {"curves": ("series", "layer")}  # chart -> columns that choose a colour; the series does in other charts


@dataclass(frozen=True)
class Plot:
    """One plot of a figure: its title, and the lines that it draws with their colours, marks and dashes."""

    title: str
    rows: list[Row]


def make_figure(page: ExhibitPage, inches: float | None = None) -> Figure:
    """Return the figure of an exhibit.

    Args:
        page: The exhibit, which is a figure, with the lines of its study.
        inches: Largest width. None: a column, or the page for several plots and for many layers or heads.
    """
    columns = "head" if page.spec["chart"] == "heat_map" else "layer"
    crowded = page.spec["chart"] in CROWDED and len({getattr(line, columns) for line in page.lines}) > MOST_PLOTS
    wide = crowded or len(split_lines(page.spec, page.lines)[0]) > WIDE
    pixels = 72 * (inches or COLUMNS["page" if wide else "column"]) / POINTS
    drawing = draw_exhibit(page.spec, page.lines, pixels)
    return Figure(page.name, drawing, pixels, make_title(page.spec["title"], [page.about, *drawing.about], pixels))


def draw_exhibit(spec: Exhibit, lines: Sequence[Line], total: float) -> Drawing:
    """Return the drawing of lines, at most `total` pixels wide unless one plot needs more."""
    plots, about = split_lines(spec, lines)
    sizes = list(Counter(plot.rows[0]["quantity"] for plot in plots).values())
    alike = len(set(sizes)) == 1 and len(sizes) > 1 < sizes[0]  # each quantity has rows of plots of its own
    beside = count_beside(sizes[0] if alike else len(plots), total)
    kind = KINDS[spec["chart"]]
    key = make_entries(kind, plots) if kind.shows else []
    if kind.shows == "bar" and lines[0].x is None:  # the axis names the series
        key = []

    drawn = []
    for index, plot in enumerate(plots):
        first, lowest = index % beside == 0, index + beside >= len(plots)
        drawn.append(kind.draw(plot, plots, Axes.read(spec, plot, first, lowest)))

    heights = [partial(kind.measure_height, plot) for plot in plots]
    rows = [line._asdict() for line in lines]
    return arrange_plots(rows, plots, drawn, beside, heights, (LEAST_PLOT, kind.most or total), key, about)


def arrange_plots(
    rows: list[Row],
    plots: Sequence[Plot],
    drawn: Sequence[Drawn],
    beside: int,
    heights: Sequence[Callable[[float], float]],
    reach: tuple[float, float],
    key: Sequence[Row],
    about: Sequence[str],
) -> Drawing:
    """Return a drawing of several plots, `beside` of them in a row.

    Args:
        rows: Its numbers.
        plots: The plots, with their titles.
        drawn: The chart and the data of each plot.
        beside: Number of plots beside each other.
        heights: Function of a plot's width in pixels that returns its height, for each plot.
        reach: Smallest and largest width of a plot in pixels.
        key: Entries of the key.
        about: Texts for the subtitle.
    """

    def chart(width: float) -> alt.ConcatChart:
        made = []
        for index, (plot, (chart_of_plot, _), height) in enumerate(zip(plots, drawn, heights, strict=True)):
            size = {"width": width, "height": height(width)}
            named = chart_of_plot.properties(**size, data=alt.NamedData(name=f"plot{index}"))
            made.append(named.properties(title=title_plot(plot.title, width)) if plot.title else named)
        return alt.concat(*made, columns=beside, spacing=12).resolve_scale(color="independent")

    tables = {f"plot{index}": rows for index, (_, rows) in enumerate(drawn)}
    return Drawing(rows, tables, chart, beside, reach, key, about)


def count_beside(count: int, total: float) -> int:
    """Return how many plots stand beside each other, so that rows are full where possible."""
    most = max(1, min(count, int(total // (LEAST_PLOT + 55))))
    return next(
        (columns for columns in range(most, most // 2, -1) if count % columns == 0), ceil(count / ceil(count / most))
    )


def title_plot(text: str, width: float) -> alt.TitleParams:
    """Return the title of one plot."""
    lines = wrap(text, max(12, int(width / LETTER)))
    return alt.TitleParams(lines, fontSize=11, fontWeight="normal", anchor="middle", offset=5, limit=width + 30)


def split_lines(spec: Exhibit, lines: Sequence[Line]) -> tuple[list[Plot], list[str]]:
    """Split lines into plots.

    Args:
        spec: The exhibit.
        lines: The lines that it shows.

    Returns:
        The plots, and texts about layers that have none.
    """
    lines = [line for line in lines if line.series != HOLDS]
    if any(line.x is not None for line in lines):  # a chart by x cannot show a number without one
        lines = [line for line in lines if line.x is not None]
    names = KINDS[spec["chart"]].by
    if spec["chart"] == "curves" and len({line.series for line in lines}) > 1 and lines[0].x is not None:
        names = ("quantity", "layer", "head")  # colours are of the series
    if spec["chart"] == "histogram" and len({line.series for line in lines}) > len(DASHES):
        names = (*names, "series")  # more outlines could not be told apart
    layers = sorted({line.layer for line in lines if line.layer is not None}) if "layer" in names else []
    places = {tuple(getattr(line, name) for name in names) for line in lines}
    about = []
    if len(places) > MOST_PLOTS and len(layers) > 1:
        shown = pick_evenly(layers, max(2, MOST_PLOTS * len(layers) // len(places)))
        about = [f"layers {', '.join(map(str, shown))} of {len(layers)}"]
        lines = [line for line in lines if line.layer in shown]
    classes = ("series",) if "layer" in names or lines[0].x is None else COLOURED.get(spec["chart"], ("series",))
    looks = make_looks(spec, lines, classes)
    rows_by_place: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        place = tuple(getattr(line, name) for name in names)
        row = {name: getattr(line, name) for name in DRAWN}
        rows_by_place.setdefault(place, []).append(row | looks[tuple(getattr(line, name) for name in classes)])
    varying = [name for at, name in enumerate(names) if len({place[at] for place in rows_by_place}) > 1]
    plots = []
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    for place in sorted(
        rows_by_place, key=lambda place: (quantities.index(place[0]), [(one is None, one) for one in place[1:]])
    ):
        values = dict(zip(names, place, strict=True))
        texts = [name_value(spec, name, values[name]) for name in varying]
        plots.append(Plot(", ".join(filter(None, texts)), rows_by_place[place]))
    return plots, about


def pick_evenly(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of some values, the first and the last among them."""
    count = min(count, len(values))
    return [values[round(at * (len(values) - 1) / max(1, count - 1))] for at in range(count)]


def name_value(spec: Exhibit, name: str, value: object) -> str:
    """Return how a plot's title or a key names a value of a column."""
    if value in (None, ""):
        return ""
    if name in ("layer", "head"):
        return f"{name}\u00a0{value}"  # in one line
    return str(spec.get("names", {}).get(value, str(value).replace("_", " ")))


def make_looks(spec: Exhibit, lines: Iterable[Line], names: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """Return label, colour, mark and dash of each class of lines, which have the same values in columns `names`."""
    classes = list(dict.fromkeys(tuple(getattr(line, name) for name in names) for line in lines))
    dashes, palette = list(DASHES.values()), SHADES if spec["chart"] == "bars" else PALETTE
    return {
        values: {
            "label": ", ".join(filter(None, map(partial(name_value, spec), names, values))),
            "colour": palette[at % len(palette)],
            "shape": MARKS[at % len(MARKS)],
            "dash": dashes[at % len(dashes)],
            "order": at,
        }
        for at, values in enumerate(classes)
    }


def make_entries(kind: "Kind", plots: Iterable[Plot]) -> list[Row]:
    """Return the entries of the key: one for each class, if there are several."""
    entries = {row["label"]: row for plot in plots for row in plot.rows}
    ordered = sorted(entries.values(), key=lambda row: row["order"])
    return [row | SHOWN[kind.shows] for row in ordered] if len(ordered) > 1 else []


@dataclass(frozen=True)
class Axes:
    """Titles and scales of a plot's axes. A title is None where another plot has the same one."""

    x: str | None
    y: str | None
    value: str
    log: tuple[str, ...]

    @classmethod
    def read(cls, spec: Exhibit, plot: Plot, first: bool, lowest: bool) -> "Axes":
        """Read the axes of an exhibit.

        Args:
            spec: The exhibit.
            plot: The plot.
            first: Whether the plot stands first in its row.
            lowest: Whether no plot stands below it.
        """
        texts = spec.get("axes", {})
        quantity = name_value(spec, "quantity", plot.rows[0]["quantity"])
        kind = KINDS[spec["chart"]]
        x, y = (texts.get(name, quantity if usual is None else usual) for name, usual in (("x", kind.x), ("y", kind.y)))
        log = texts.get("log", ())
        value = texts.get("value", quantity)
        return cls(x if lowest else None, y if first else None, value, tuple([log] if isinstance(log, str) else log))

    def ticks(self, name: str) -> alt.Axis:
        """Return the axis x or y with few ticks; very small and large numbers of a logarithmic one as powers of ten."""
        if name not in self.log:
            return ticks()
        short = "datum.value < 0.001 || datum.value >= 10000 ? format(datum.value, '~e') : datum.label"
        return ticks(labelExpr=f"datum.label ? ({short}) : ''")

    def scale(self, name: str, **options: Any) -> alt.Scale:
        """Return the scale of x, y or value."""
        return alt.Scale(type="log" if name in self.log else alt.Undefined, **options)


def find_domain(plots: Iterable[Plot], *names: str) -> list[float]:
    """Return the smallest and the largest value of some columns over all plots."""
    values = [row[name] for plot in plots for row in plot.rows for name in names if row[name] is not None]
    low, high = min(values), max(values)
    return [low, high] if low < high else [low - 0.5, high + 0.5]


def ticks(count: int = 4, **options: Any) -> alt.Axis:
    """Return an axis with few ticks."""
    return alt.Axis(tickCount=count, **options)


def draw_histogram(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw shares by bin as outlines. Bins that are too small to be seen in all plots are cut off at both ends."""
    alike = list_alike(plot, plots)
    top = max(row["value"] for other in alike for row in other.rows)
    seen = [row["x"] for other in alike for row in list_outline(other) if row["value"] > top / (2 * HEIGHT)]
    domain = [min(seen), max(seen)]
    rows = [row for row in list_outline(plot) if domain[0] <= row["x"] <= domain[1]]
    x = alt.X("x:Q", title=axes.x, scale=axes.scale("x", domain=domain, nice=False), axis=axes.ticks("x"))
    y = alt.Y("value:Q", title=axes.y, scale=alt.Scale(domain=[0, top]), axis=ticks(format="~%"))
    line = alt.Chart().mark_line(strokeWidth=1.5)
    return line.encode(x=x, y=y, color=charts.COLOUR, strokeDash=charts.DASH, detail="label:N", order="at:Q"), rows


def list_alike(plot: Plot, plots: Sequence[Plot]) -> list[Plot]:
    """Return the plots of the same quantity, which share their scales."""
    return [other for other in plots if other.rows[0]["quantity"] == plot.rows[0]["quantity"]]


def list_outline(plot: Plot) -> list[Row]:
    """Return two points for each bin, at its edges, which lie in the middle between the middles of bins."""
    rows = []
    for label in dict.fromkeys(row["label"] for row in plot.rows):
        bins = sorted((row for row in plot.rows if row["label"] == label), key=lambda row: row["x"])
        inner = [(before["x"] + after["x"]) / 2 for before, after in zip(bins, bins[1:], strict=False)]
        inner = inner or [bins[0]["x"] + 0.5]
        edges = [2 * bins[0]["x"] - inner[0], *inner, 2 * bins[-1]["x"] - inner[-1]]
        for at, row in enumerate(bins):
            rows += [row | {"x": edges[at], "at": 2 * at}, row | {"x": edges[at + 1], "at": 2 * at + 1}]
    return rows


def find_step(values: Sequence[float]) -> float:
    """Return the smallest distance of sorted values; 1 if there is only one."""
    return min((after - before for before, after in zip(values, values[1:], strict=False)), default=1.0)


def draw_scatter(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw points of several classes. A class of a single point, such as an anchor, is large and lies on top.

    Plots of one layer and head share their scales.
    """
    counts: dict[str, int] = {}
    for row in plot.rows:
        counts[row["label"]] = counts.get(row["label"], 0) + 1
    fields = {"x": "x", "y": "value"}
    rows = [row for row in plot.rows if all(row[fields[name]] > 0 for name in axes.log)]
    place = [plot.rows[0][name] for name in ("layer", "head")]
    beside = [row for other in plots for row in other.rows if [row[name] for name in ("layer", "head")] == place]
    ends = {
        axis: [row[name] for row in beside if axis not in axes.log or row[name] > 0] for axis, name in fields.items()
    }
    x, y = (axes.scale(axis, zero=False, nice=True, domain=[min(ends[axis]), max(ends[axis])]) for axis in fields)
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=axes.x, scale=x, axis=axes.ticks("x")),
        y=alt.Y("value:Q", title=axes.y, scale=y, axis=axes.ticks("y")),
        shape=charts.SHAPE,
    )
    single = [name for name, count in counts.items() if count == 1 and len(counts) > 1]
    many = base.transform_filter(
        alt.FieldOneOfPredicate(field="label", oneOf=[label for label in counts if label not in single])
    )
    one = base.transform_filter(alt.FieldOneOfPredicate(field="label", oneOf=single))
    fill = alt.Fill("colour:N", scale=None, legend=None)
    chart = charts.stack_layers(
        many.mark_point(size=12, strokeWidth=0.9, opacity=0.7).encode(color=charts.COLOUR),
        one.mark_point(filled=True, size=110, opacity=1, stroke="white", strokeWidth=1).encode(fill=fill),
    )
    return chart, rows


def draw_curves(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw curves with bands; by layer if the lines have no x."""
    by = "x" if plot.rows[0]["x"] is not None else "layer"
    alike = list_alike(plot, plots)
    classes = {row["label"] for row in plot.rows}
    banded = len(classes) <= WIDE  # more bands would hide the curves
    domain = find_curve_domain(alike, banded, "y" in axes.log)
    options: Row = {"scale": axes.scale("y", domain=domain, clamp=True), "axis": axes.ticks("y")}
    x_title = axes.x if by == "x" or axes.x is None else "layer"
    scale = axes.scale("x", domain=find_domain(alike, by), nice=False)
    x = alt.X(f"{by}:Q", title=x_title, scale=scale, axis=axes.ticks("x"))
    base = alt.Chart().encode(x=x, color=charts.COLOUR, detail="label:N")
    band = base.mark_area(opacity=0.15, invalid="break-paths-filter-domains")  # no band where there is no interval
    line = base.mark_line(strokeWidth=1.6).encode(y=alt.Y("value:Q", title=axes.y, **options), strokeDash=charts.DASH)
    bands = [band.encode(y=alt.Y("low:Q", title=axes.y, **options), y2="high:Q")] if banded else []
    return charts.stack_layers(*bands, line), plot.rows


def find_curve_domain(plots: Iterable[Plot], banded: bool, positive: bool) -> list[float]:
    """Return the ends of the vertical axis of curves. Bands reach beyond the curves by half of their range at most."""
    rows = [row for plot in plots for row in plot.rows if row["value"] > 0 or not positive]
    values = [row["value"] for row in rows]
    low, high = min(values), max(values)
    beyond = (high - low) / 2 or 0.05
    lows = [row["low"] for row in rows if banded and row["low"] is not None and not positive]
    highs = [row["high"] for row in rows if banded and row["high"] is not None]
    ends = [max(low - beyond, min([low, *lows])), min(high + beyond, max([high, *highs]))]
    return ends if ends[0] < ends[1] else [low / 2, 2 * high] if positive else [low - beyond, high + beyond]


def make_colours(plot: Plot, plots: Sequence[Plot], axes: Axes) -> alt.Color:
    """Return the scale of colours of a map, the same for all maps of its quantity; around 0 if a value is below it."""
    alike = list_alike(plot, plots)
    low, high = find_domain(alike, "value")
    legend = None
    if plot is alike[-1]:
        legend = alt.Legend(orient="right", gradientLength=110, titleLimit=110, tickCount=4, title=axes.value)
    if "value" in axes.log:
        low = min((row["value"] for other in alike for row in other.rows if row["value"] > 0), default=high)
        scale = axes.scale("value", domain=[low, high], clamp=True, scheme=SEQUENCE, reverse=True)
    elif low < 0:
        scale = alt.Scale(domain=[-max(-low, high), max(-low, high)], range=OPPOSITES, interpolate="rgb")
    else:
        scale = alt.Scale(domain=[low, high], scheme=SEQUENCE, reverse=True)
    return alt.Color("value:Q", scale=scale, legend=legend)


def draw_heat_map(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw cells of layers and heads."""
    place = alt.Axis(labelAngle=0, domain=False, ticks=False, labelOverlap=True)
    chart = alt.Chart().mark_rect(stroke="#ffffff", strokeWidth=0.5)
    x, y = alt.X("head:O", title=axes.x, axis=place), alt.Y("layer:O", title=axes.y, axis=place)
    return chart.encode(x=x, y=y, color=make_colours(plot, plots, axes)), plot.rows


def draw_map(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw cells of two positions, the second one downwards."""
    steps = {name: find_step(sorted({row[name] for row in plot.rows})) for name in ("x", "y")}
    rows = [row | {f"{name}_end": row[name] + 1.03 * steps[name] for name in steps} for row in plot.rows]
    rows = [{name: row[name] for name in ("x", "y", "x_end", "y_end", "value")} for row in rows]
    ends = {name: [min(row[name] for row in rows), max(row[f"{name}_end"] for row in rows)] for name in steps}
    across, down = (alt.Scale(domain=limits, nice=False) for limits in (ends["x"], ends["y"][::-1]))
    x = alt.X("x:Q", title=axes.x, scale=across, axis=ticks(grid=False))
    y = alt.Y("y:Q", title=axes.y, scale=down, axis=ticks(grid=False))
    colour = make_colours(plot, plots, axes)
    return alt.Chart().mark_rect().encode(x=x, x2="x_end:Q", y=y, y2="y_end:Q", color=colour), rows


def draw_quantiles(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw a bar of quantiles for each layer and series."""
    by = "layer" if any(row["layer"] is not None for row in plot.rows) else "label"
    alike = list_alike(plot, plots)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(plot.rows, key=lambda row: row["x"]):
        groups.setdefault((row[by], row["label"]), []).append(row)
    rows = [make_quantile_row(quantiles) for quantiles in groups.values()]
    place = alt.Axis(labelAngle=0, domain=False, ticks=False, labelOverlap=True, grid=False)
    y: Row = {
        "title": axes.y,
        "scale": axes.scale("y", domain=find_domain(alike, "value"), nice=True),
        "axis": axes.ticks("y"),
    }
    base = alt.Chart().encode(
        x=alt.X(f"{by}:O", title=axes.x, axis=place),
        xOffset=alt.XOffset("order:O", scale=alt.Scale(paddingInner=0.1)),
        color=charts.COLOUR,
    )
    chart = charts.stack_layers(
        base.mark_rule(strokeWidth=1).encode(y=alt.Y("lowest:Q", **y), y2="highest:Q"),
        base.mark_rule(strokeWidth=3.5, opacity=0.55).encode(y=alt.Y("lower:Q", **y), y2="higher:Q"),
        base.mark_point(filled=True, size=22, opacity=1).encode(y=alt.Y("median:Q", **y), shape=charts.SHAPE),
    )
    return chart, rows


def make_quantile_row(quantiles: Sequence[Row]) -> Row:
    """Return the ends of the bars of a layer and series, from its quantiles in ascending order."""
    values = [row["value"] for row in quantiles]
    middle = min(quantiles, key=lambda row: abs(row["x"] - 0.5))["value"]
    inner = values[1:-1] or values
    ends = {"lowest": values[0], "highest": values[-1], "lower": inner[0], "higher": inner[-1], "median": middle}
    return {name: quantiles[0][name] for name in ("layer", "label", "colour", "shape", "order")} | ends


def draw_bars(plot: Plot, plots: Sequence[Plot], axes: Axes) -> Drawn:
    """Draw a bar for each series, or for each x and series."""
    by = "x" if any(row["x"] is not None for row in plot.rows) else "label"
    place = alt.Axis(labelAngle=0 if by == "x" else -40, domain=False, ticks=False, labelLimit=110, grid=False)
    x = alt.X(f"{by}:O", title=axes.x if by == "x" else None, sort=None, axis=place)
    base = alt.Chart().encode(x=x)
    if by == "x":
        base = base.encode(xOffset=alt.XOffset("order:O"), color=charts.COLOUR)
    y: Row = {"title": axes.y, "axis": axes.ticks("y"), "scale": axes.scale("y")}
    bars = base.mark_bar(color=SHADES[1], stroke=charts.INK, strokeWidth=0.4).encode(y=alt.Y("value:Q", **y))
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.2)
    ends = spread.encode(y=alt.Y("low:Q", **y), y2="high:Q", color=alt.value(charts.INK))
    return charts.stack_layers(bars, ends), plot.rows


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        draw: Function of a plot, all plots and the plot's axes. It returns the chart without its data, and the data.
        by: Columns; lines with other values in one of them have a plot of their own.
        x: Title of the horizontal axis; None is the quantity. The key `axes` of an exhibit replaces it.
        y: Title of the vertical axis, likewise.
        shows: How the key shows a class: "dash", "shape", "bar" or, for maps, "".
        most: Largest width of a plot in pixels; None is that of the figure.
        square: Whether a plot is as high as it is wide.
    """

    draw: Callable[[Plot, Sequence[Plot], Axes], Drawn]
    by: tuple[str, ...]
    x: str | None
    y: str | None
    shows: str = ""
    most: float | None = None
    square: bool = False

    def measure_height(self, plot: Plot, width: float) -> float:
        """Return the height of a plot in pixels. A heat map has room for the names of up to about 30 layers."""
        if self.square:
            return width
        layers = {row["layer"] for row in plot.rows}
        return max(HEIGHT, min(420, 13 * len(layers))) if self.draw is draw_heat_map else HEIGHT


KINDS = {
    "histogram": Kind(draw_histogram, ("quantity", "layer", "head"), None, "share", "dash"),
    "scatter": Kind(draw_scatter, ("quantity", "layer", "head"), "", "", "shape"),
    "curves": Kind(draw_curves, ("quantity", "head"), "", None, "dash"),
    "heat_map": Kind(draw_heat_map, ("quantity", "series"), "head", "layer"),
    "position_maps": Kind(draw_map, ("quantity", "series", "layer", "head"), "token", "token", most=220, square=True),
    "quantiles": Kind(draw_quantiles, ("quantity",), "layer", None, "shape"),
    "bars": Kind(draw_bars, ("quantity", "layer"), "", None, "bar"),
}
