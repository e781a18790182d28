"""Draw the papers' figures of scores and costs from their tables.

A figure of scores or costs is a table (kvbench.papers.table_spec) with a key `chart`:

    curves   the measured value by the columns' places, a curve for each row
    grid     the value by column and row, in colours
    bars     the value by column, a bar for each row, or with `stacked: true` one bar of all rows
    sized    as curves, with marks whose areas are the values of the row below

Measured values are filled marks, lines, bars or cells with the intervals of the table. Published values are hollow
marks without a line. A cell without a number leaves a gap, and the figure's page names the command that fills it. Rows
of the table that are not in the paper are not drawn, nor are rows with `sum: true`, which others add up to.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import altair as alt

from kvbench.papers.paper_table import PaperTable
from kvbench.papers.table_spec import (
    Select,
    expand_each,
    is_cost_table,
    merge_parts,
    name_panel,
    name_series,
    to_number,
)
from kvbench.report import charts
from kvbench.report.figures import COLUMNS, Figure
from kvbench.report.print_charts import POINTS, PUBLISHED_KEY, Drawing, make_title
from kvbench.report.study_charts import (
    LEAST_PLOT,
    MOST_PLOTS,
    PALETTE,
    SHADES,
    WIDE,
    Axes,
    Plot,
    Row,
    arrange_plots,
    count_beside,
    find_domain,
)
from kvbench.report.style import FULL_MARK, choose_styles

Chart = alt.Chart | alt.LayerChart

HEIGHT, LOW = 150, 60  # pixels of a plot; of one among many
LARGEST = 420  # square pixels: the area of the largest mark of a chart `sized`
MOST_NAMES = 8  # a figure with a longer key takes the width of the page
CELL = 16  # pixels: height of a grid's cell
BARS = [*SHADES, "#c4c4c4"]
LONG_NAME = 6  # letters of a bar's column that stand upright


def draw_figure(path: Path, spec: Select, table: PaperTable, inches: float | None = None) -> bool:
    """Draw a figure as `path` with the suffixes .svg, .pdf and .png, and return whether there is anything to draw."""
    figure = make_figure(path.name, spec, table, inches)
    if figure is not None:
        figure.write_pictures(path.parent)
    return figure is not None


def make_figure(name: str, spec: Select, table: PaperTable, inches: float | None = None) -> Figure | None:
    """Return the figure of a table; None if no cell has a number that it draws.

    Args:
        name: Name of its files without a suffix.
        spec: The table's specification.
        table: The table.
        inches: Largest width. None: a column, or the page for several plots and for many rows.
    """
    plots = list_plots(spec, table)
    rows = [row for plot in plots for row in plot.rows]
    measured = sum(row["value"] is not None or bool(row["failure"]) for row in rows)
    published = any(row["published"] is not None for row in rows) and spec["chart"] != "grid"
    if not measured and not published:
        return None
    key = [] if spec["chart"] == "grid" else make_key_entries(rows)
    wide = len(plots) > WIDE or len(key) > MOST_NAMES
    pixels = 72 * (inches or COLUMNS["page" if wide else "column"]) / POINTS
    shown = [PUBLISHED_KEY] if published else []
    gaps = "" if measured == len(rows) else f"; {name}.md has the commands that measure the others"
    about = [f"{measured} of {len(rows)} values measured{gaps}"]
    drawing = draw_plots(spec, plots, pixels, [*key, *shown])
    return Figure(name, drawing, pixels, make_title(spec["title"], about, pixels))


def list_plots(spec: Select, table: PaperTable) -> list[Plot]:
    """Return the plots of a figure, with a row for each cell of the table that they show."""
    parts, columns = list(expand_each(spec["rows"])), list(expand_each(spec["columns"]))
    methods = {
        name_series(part): find_method(spec, part, columns)
        for part in parts
        if not part.get("area") and not part.get("sum")
    }
    looks = choose_looks(methods, spec["chart"] == "bars")
    panels: dict[str, list[Row]] = {}
    for part, (_, cells) in zip(parts, table.rows, strict=False):  # rows that are not in the paper follow
        if part.get("sum"):
            continue
        rows = panels.setdefault(name_panel(part), [])
        numbers = [to_number(cell.measured) for cell in cells]
        if part.get("area"):
            for row, number in zip(rows[-len(cells) :], numbers, strict=True):
                row["area"] = number
            continue
        for column, cell, number in zip(columns, cells, numbers, strict=True):
            place = {"column": column["label"], "x": column.get("x", to_number(column["label"]))}
            ends = {name: to_number(getattr(cell, name)) for name in ("low", "high", "published")}
            failure = "" if number is not None else cell.measured
            row = {**place, "value": number, **ends, "failure": failure, "area": None}
            rows.append(row | looks[name_series(part)])
    return [Plot(title, rows) for title, rows in panels.items()]


def find_method(spec: Select, part: Select, columns: Sequence[Select]) -> str:
    """Return the method of a row, which chooses its look."""
    cells = [merge_parts(spec, part, column) for column in columns]
    names = [(one.get("run") or one.get("measured") or {}).get("method") for one in cells]
    return str(next((name for name in names if name not in (None, "full")), "full"))


def choose_looks(methods: dict[str, str], shaded: bool) -> dict[str, Row]:
    """Return label, colour, mark, dash and order of each series.

    Args:
        methods: Name of a series -> its method. If all series have one method, its colour would not tell them apart,
            so that the colours of studies take its place.
        shaded: Whether colours alone tell the series apart. They are then shades from dark to light.
    """
    styles = choose_styles(list(methods.values()))
    looks: dict[str, Row] = {}
    for at, (label, style) in enumerate(zip(methods, styles, strict=True)):
        if style["shape"] == FULL_MARK:
            style |= {"dash": charts.FULL_DASH}
        if len(set(methods.values())) == 1:
            style |= {"colour": PALETTE[at % len(PALETTE)]}
        if shaded:
            style |= {"colour": BARS[at % len(BARS)]}
        looks[label] = {"label": label, "order": at, **style}
    return looks


def make_key_entries(rows: Sequence[Row]) -> list[Row]:
    """Return the entries of the key, one for each series."""
    entries = {row["label"]: row for row in rows}
    return sorted(entries.values(), key=lambda row: row["order"])


def draw_plots(spec: Select, plots: Sequence[Plot], total: float, key: Sequence[Row]) -> Drawing:
    """Return the drawing of a figure, at most `total` pixels wide unless one plot needs more."""
    beside = count_beside(len(plots), total)
    if spec["chart"] == "bars":
        key = [{**entry, "shape": entry["shape"] and "square", "dash": None} for entry in key]
    labels = spec.get("axes", {})
    log = labels.get("log", ())
    drawn = []
    for at, plot in enumerate(plots):
        first, lowest = at % beside == 0, at + beside >= len(plots)
        titles = labels.get("x", "") if lowest else None, labels.get("y", "") if first else None
        axes = Axes(*titles, labels.get("value", ""), tuple([log] if isinstance(log, str) else log))
        alike = [plot] if labels.get("free") == "y" else plots
        options = {"last": at == beside - 1, "ends": labels.get("range"), "from_zero": is_cost_table(spec)}
        chart = KINDS[spec["chart"]](plot, alike, axes, stacked=spec.get("stacked", False), **options)
        drawn.append((chart, plot.rows))
    height = LOW if len(plots) > MOST_PLOTS else HEIGHT
    if spec["chart"] == "grid":
        height = CELL * len({row["label"] for row in plots[0].rows})
    rows = [row for plot in plots for row in plot.rows]
    heights: list[Callable[[float], float]] = [lambda width: float(height)] * len(plots)
    return arrange_plots(rows, plots, drawn, beside, heights, (LEAST_PLOT, total), key, [])


def place_columns(plot: Plot, plots: Sequence[Plot], axes: Axes) -> alt.X:
    """Return the horizontal axis with a tick and a label for each column."""
    labels = {row["x"]: row["column"] for other in plots for row in other.rows}
    pairs = " : ".join(f"abs(datum.value - {x}) < {1e-6 * (abs(x) or 1)} ? '{label}'" for x, label in labels.items())
    shown = f"{pairs} : ''"
    scale = axes.scale("x", domain=find_domain(plots, "x"), nice=False, padding=8)
    return alt.X(
        "x:Q",
        title=axes.x,
        scale=scale,
        axis=alt.Axis(values=sorted(labels), labelExpr=shown, labelOverlap="greedy", labelSeparation=3, grid=False),
    )


def draw_curves(plot: Plot, plots: Sequence[Plot], axes: Axes, from_zero: bool, **_: object) -> Chart:
    """Draw curves with intervals, and published values as hollow marks."""
    y = make_values(plots, axes, from_zero)
    base = alt.Chart().encode(x=place_columns(plot, plots, axes), color=charts.COLOUR, detail="label:N")
    value = alt.Y("value:Q", **y)
    line = base.mark_line(strokeWidth=1.5, invalid="break-paths-filter-domains").encode(y=value, strokeDash=charts.DASH)
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1, opacity=0.6)
    mark = base.transform_filter("isValid(datum.value)").mark_point(filled=True, size=34, opacity=1)
    return charts.stack_layers(
        line,
        spread.encode(y=alt.Y("low:Q", **y), y2="high:Q"),
        mark.encode(y=value, shape=charts.SHAPE),
        mark_published(base, y),
    )


def make_values(plots: Sequence[Plot], axes: Axes, from_zero: bool) -> Row:
    """Return the vertical axis of values, which holds all measured and published values and, if asked, zero."""
    names = ("value", "low", "high", "published")
    known = [row[name] for plot in plots for row in plot.rows for name in names if row[name] is not None]
    known = [value for value in known if value > 0 or "y" not in axes.log]
    from_zero = from_zero and "y" not in axes.log
    known += [0.0] if from_zero else []
    ends = [min(known), max(known)] if known else [0.0, 1.0]
    if ends[0] == ends[1]:
        ends = [ends[0] / 2, ends[1] * 2] if "y" in axes.log else [ends[0] - 0.5, ends[1] + 0.5]
    scale = axes.scale("y", domain=ends, nice="y" not in axes.log, clamp=True, padding=0 if from_zero else 6)
    axis = axes.ticks("y")
    axis.grid = "y" not in axes.log
    return {"title": axes.y, "scale": scale, "axis": axis}


def mark_published(base: alt.Chart, y: Row) -> alt.Chart:
    """Return the hollow marks of published values."""
    mark = base.transform_filter("isValid(datum.published)").mark_point(
        filled=False, size=60, strokeWidth=1.3, opacity=1
    )
    return mark.encode(y=alt.Y("published:Q", **y), shape=charts.SHAPE)


def draw_bars(plot: Plot, plots: Sequence[Plot], axes: Axes, stacked: bool, **_: object) -> Chart:
    """Draw a bar for each column and row. A run that failed has its failure in the bar's place."""
    columns, orders = (list(dict.fromkeys(row[name] for row in plot.rows)) for name in ("column", "order"))
    angle = -40 if max(map(len, columns)) > LONG_NAME and len(columns) > 4 else 0
    place = alt.Axis(labelAngle=angle, domain=False, ticks=False, grid=False)
    base = alt.Chart().encode(
        x=alt.X("column:O", title=axes.x, scale=alt.Scale(domain=columns), axis=place), color=charts.COLOUR
    )
    if stacked:
        ends = [sum_stack(plots, sign) for sign in (-1, 1)]
        scale = axes.scale("y", domain=ends if ends[0] < ends[1] else [0, 1], nice=True)
        value = alt.Y("value:Q", title=axes.y, scale=scale, axis=axes.ticks("y"), stack="zero")
        bars = base.mark_bar(stroke=charts.INK, strokeWidth=0.4)
        return charts.stack_layers(bars.encode(y=value, order="order:O"))
    y = make_values(plots, axes, from_zero=True)
    base = base.encode(xOffset=alt.XOffset("order:O", scale=alt.Scale(domain=orders, paddingInner=0.1)))
    failed = base.transform_filter("datum.failure").mark_text(angle=270, align="left", fontSize=10, dx=3)
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.2)
    return charts.stack_layers(
        base.mark_bar(stroke=charts.INK, strokeWidth=0.4).encode(y=alt.Y("value:Q", **y)),
        spread.encode(y=alt.Y("low:Q", **y), y2="high:Q", color=alt.value(charts.INK)),
        failed.encode(y=alt.datum(0), text="failure:N"),
        mark_published(base, y).encode(color=alt.value(charts.INK)),
    )


def sum_stack(plots: Sequence[Plot], sign: int) -> float:
    """Return the end of the longest stack of values above 0 (`sign` 1) or below it (-1)."""
    stacks: dict[tuple[str, str], float] = {}
    for plot in plots:
        for row in plot.rows:
            if row["value"] is not None and sign * row["value"] > 0:
                stacks[plot.title, row["column"]] = stacks.get((plot.title, row["column"]), 0.0) + row["value"]
    return sign * max((sign * end for end in stacks.values()), default=0.0)


def draw_sized(plot: Plot, plots: Sequence[Plot], axes: Axes, from_zero: bool, **_: object) -> Chart:
    """Draw curves whose marks have areas in proportion to a second value."""
    y = make_values(plots, axes, from_zero)
    most = max((row["area"] for other in plots for row in other.rows if row["area"] is not None), default=1.0)
    base = alt.Chart().encode(x=place_columns(plot, plots, axes), color=charts.COLOUR, detail="label:N")
    known = base.transform_filter("isValid(datum.value)")
    size = alt.Size(
        "area:Q",
        scale=alt.Scale(domain=[0, most], range=[0, LARGEST]),
        legend=alt.Legend(title=axes.value, orient="right", tickCount=3, symbolType="circle"),
    )
    value = alt.Y("value:Q", **y)
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1, opacity=0.6)
    return charts.stack_layers(
        base.mark_line(strokeWidth=1, opacity=0.5, invalid="break-paths-filter-domains").encode(y=value),
        spread.encode(y=alt.Y("low:Q", **y), y2="high:Q"),
        known.transform_filter("isValid(datum.area)").mark_point(filled=True, opacity=0.75).encode(y=value, size=size),
        known.transform_filter("!isValid(datum.area)").mark_point(filled=True, size=20).encode(y=value),
        mark_published(base, y),
    )


def draw_grid(
    plot: Plot, plots: Sequence[Plot], axes: Axes, last: bool, ends: Sequence[float] | None, **_: object
) -> Chart:
    """Draw the value by column and row in colours; a cell without a value stays empty."""
    place = alt.Axis(domain=False, ticks=False, grid=False, labelOverlap=True)
    scale = alt.Scale(domain=ends or find_domain(plots, "value"), range=charts.SCORE, interpolate="rgb")
    legend = alt.Legend(orient="right", gradientLength=110, tickCount=4, title=axes.value) if last else None
    rects = alt.Chart().mark_rect(stroke="#ffffff", strokeWidth=0.5).transform_filter("isValid(datum.value)")
    orders = {name: list(dict.fromkeys(row[name] for row in plot.rows)) for name in ("column", "label")}
    across, down = (alt.Scale(domain=order) for order in orders.values())
    return rects.encode(
        x=alt.X("column:O", title=axes.x, scale=across, axis=place),
        y=alt.Y("label:O", title=axes.y, scale=down, axis=place),
        color=alt.Color("value:Q", scale=scale, legend=legend),
    )


KINDS: Mapping[str, Callable[..., Chart]] = {
    "curves": draw_curves,
    "grid": draw_grid,
    "bars": draw_bars,
    "sized": draw_sized,
}
