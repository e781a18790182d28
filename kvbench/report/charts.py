"""Specify the charts of the page (kvbench.report) and of print (kvbench.report.figures) in Vega-Lite, without numbers.

Each chart reads the tables of a panel (kvbench.report.panels) as data sets of the same names. The table `series` states
which series are drawn; rows of other series are left out. Colours, shapes and dashes are part of the data
(kvbench.report.style), so that no scale assigns them by order.
"""

from functools import cache
from typing import Any

import altair as alt

from kvbench.report.style import FULL

INK, MUTED, LINE = "#1a1a1a", "#5f6368", "#e8eaed"
CELL_INK = "#111111"  # colour of numbers in coloured cells, also on a dark page
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SHARES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1]
LOSS = ["#a6381f", "#e08a63", "#f1f3f4", "#7ab0d4", "#1f5f99"]  # worse to better; colour-blind readers see it too
LOSSES = alt.Scale(domain=[-100, -40, 0, 40, 100], range=LOSS, interpolate="rgb", clamp=True)
DARK, GAIN = "abs(datum.diff) > 65", "Difference"
SCORE = ["#f2f4f7", "#bcd3e6", "#6fa3cc", "#2f6ea8", "#123f6d"]
SCORES = alt.Scale(domain=[0, 25, 50, 75, 100], range=SCORE, interpolate="rgb")
FULL_DASH = [4, 3]
CROWD = 60  # a grid with more cells than this shows no numbers in them
CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "gridColor": LINE,
        "domainColor": "#bdc1c6",
        "tickColor": "#bdc1c6",
        "tickSize": 4,
    },
}


def stack_layers(*layers: alt.Chart, **options: Any) -> alt.LayerChart:
    """Return a chart that draws these layers on top of each other."""
    return alt.LayerChart(layer=list(layers), **options)


@cache
def build_charts() -> dict[str, Any]:
    """Return the specifications of all charts of the page, by name. They are the same for every page."""
    charts = {
        "curve": chart_curve(),
        "dots": chart_dots(),
        "tasks": chart_tasks(),
        "grid": chart_grid(),
        **{name: chart_cost(name) for name in COSTS},
    }
    fit = {"autosize": {"type": "fit-x", "contains": "padding"}}
    return {name: make_specification(chart.properties(width="container")) | fit for name, chart in charts.items()}


BYTES = "Measured share of the full cache's bytes"
ROWS = "Measured share of the rows, attended while decoding"
COSTS = {
    "held": ("Bytes held, share of the full cache", ".0%"),
    "ttft": ("Time to first token, ms", "~s"),
    "tpot": ("Time per output token, ms", "~s"),
}
COLOUR = alt.Color("colour:N", scale=None, legend=None)
SHAPE = alt.Shape("shape:N", scale=None, legend=None)
DASH = alt.StrokeDash("dash:N", scale=None, legend=None)
# of curves that lie on top of each other (kvbench.report.coinciding); how many cover one
WIDTH = alt.StrokeWidth("covered:Q", scale=alt.Scale(domain=[0, 3], range=[2, 14], clamp=True), legend=None)
SIZE = alt.Size("over:Q", scale=alt.Scale(domain=[0, 3], range=[60, 480], clamp=True), legend=None)
DIFFERENCE = [
    alt.Tooltip("diff:Q", title="difference", format="+.1f"),
    alt.Tooltip("interval:N", title="95 %"),
    alt.Tooltip("changed:N", title="lost / gained / same"),
]
POINT = [  # of a point of a curve
    alt.Tooltip("label:N", title="method"),
    alt.Tooltip("budget:N"),
    alt.Tooltip("share:Q", title="measured", format=".1%"),
    alt.Tooltip("score:Q", format=".1f"),
    alt.Tooltip("between:N", title="95 %"),
    *DIFFERENCE,
    alt.Tooltip("n:Q", title="samples"),
]


def interval_expression(
    low: str, high: str, sign: str = "", none: str = "one context: none", digits: str = ".1f"
) -> str:
    """Return the Vega expression for the text of an interval, or for the text that replaces a missing one."""
    ends = " + ' to ' + ".join(f"format(datum.{end}, '{sign}{digits}')" for end in (low, high))
    return f"isValid(datum.{low}) ? {ends} : '{none}'"


def pale(count: str) -> Any:
    """Return the opacity of marks that others cover, by the field that counts these. It tells equal colours apart."""
    return alt.condition(f"datum.{count} > 0", alt.value(0.4), alt.value(1))


def chart_series(name: str) -> alt.Chart:
    """Return a chart of a table's rows that belong to drawn series, with the texts of its tooltips."""
    drawn = alt.LookupData(
        alt.NamedData(name="series"), key="s", fields=["label", "colour", "shape", "dash", "covered"]
    )
    chart = alt.Chart(alt.NamedData(name=name)).transform_lookup(lookup="s", from_=drawn)
    return chart.transform_filter("isValid(datum.label)").transform_calculate(
        between=interval_expression("score_low", "score_high"),
        interval=interval_expression("diff_low", "diff_high", "+"),
        changed="datum.lost + ' / ' + datum.gained + ' / ' + datum.same",
    )


def chart_curve(share: str = BYTES, published: bool = False) -> alt.LayerChart:
    """Chart score against a measured share, with bands. The full cache's score is a dashed line with its band.

    Args:
        share: Title of the horizontal axis.
        published: Whether to draw the table `published`, with hollow marks.
    """
    x = alt.X(
        "share:Q",
        title=share,
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(format="~%", values=SHARES, grid=False),
    )
    score = alt.Y("score:Q", title="Score", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(tickCount=5))
    low, high = alt.Y("score_low:Q", title="Score"), alt.Y2("score_high:Q")
    base = chart_series("points").transform_calculate(covered="datum.covered || 0", over="datum.over || 0")
    base = base.encode(x=x, detail="label:N", color=COLOUR)
    full = chart_series("full").transform_aggregate(groupby=["score", "score_low", "score_high"])  # one line for all
    layers = [
        full.mark_rect(color="#333333", opacity=0.06).encode(y=low, y2=high),
        full.mark_rule(color="#333333", strokeDash=FULL_DASH).encode(y=score),
        base.mark_area(opacity=0.13).encode(y=low, y2=high),
        base.mark_line().encode(y=score, strokeDash=DASH, strokeWidth=WIDTH, opacity=pale("covered")),
        base.mark_point(filled=True).encode(y=score, shape=SHAPE, size=SIZE, opacity=pale("over"), tooltip=POINT),
        *([mark_published().encode(x=x, y=score)] if published else []),
    ]
    return stack_layers(*layers).properties(height=300)


def mark_published() -> alt.Chart:
    """Return the marks of published scores: hollow, in the colour and shape of their methods."""
    marks = chart_series("published").mark_point(filled=False, size=90, strokeWidth=1.6, opacity=1)
    return marks.encode(color=COLOUR, shape=SHAPE)


def chart_dots(published: bool = False) -> alt.LayerChart:
    """Chart the scores of methods at one budget, with 95 % intervals, the highest first.

    The full cache's score is a dashed line with its band.

    Args:
        published: As in `chart_curve`.
    """
    x = alt.X("score:Q", title="Score", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(tickCount=5))
    row = alt.Y(
        "label:N",
        title=None,
        sort=alt.EncodingSortField("score", op="max", order="descending"),
        axis=alt.Axis(labelLimit=280, domain=False, ticks=False, grid=True, labelColor=INK, labelPadding=8),
    )
    base = chart_series("points").encode(y=row)
    full = chart_series("full").transform_aggregate(groupby=["score", "score_low", "score_high"])
    ends = {"x": alt.X("score_low:Q", title="Score"), "x2": alt.X2("score_high:Q")}
    return stack_layers(
        full.mark_rect(color=FULL, opacity=0.06).encode(**ends),
        full.mark_rule(color=FULL, strokeDash=FULL_DASH).encode(x=x),
        base.mark_rule(strokeWidth=1.5).encode(**ends, color=COLOUR),
        base.mark_point(filled=True, size=60, opacity=1).encode(x=x, color=COLOUR, shape=SHAPE, tooltip=POINT),
        *([mark_published().encode(x=x, y=row)] if published else []),
    )


def mark_corner(base: alt.Chart, colour: alt.Color, right: int) -> alt.Chart:
    """Return the marks of published values in cells: circles above and beside the middle, in the colours of the cells.

    Args:
        base: The cells, with their places.
        colour: How a cell's own value becomes its colour.
        right: Distance of a circle from the middle of its cell, in pixels.
    """
    known = base.transform_filter("isValid(datum.published)")
    circle = known.mark_point(filled=True, size=26, opacity=1, stroke=INK, strokeWidth=0.7, xOffset=right, yOffset=-7)
    printed = colour.copy()
    printed.shorthand = "published:Q"
    return circle.encode(color=printed)


def chart_tasks(legend: alt.Legend | None = None, published: bool = False) -> alt.LayerChart:
    """Chart differences from the full cache, with a row for each run and a column for each subtask.

    Args:
        legend: The legend of colours.
        published: Whether to draw the published differences of the cells, in circles.
    """
    column = alt.X(
        "task:N",
        title=None,
        sort=alt.EncodingSortField("column", op="min"),
        axis=alt.Axis(orient="top", labelAngle=-40, labelLimit=140, domain=False, ticks=False, labelOverlap=False),
    )
    row = alt.Y(
        "row:N",
        title=None,
        sort=alt.EncodingSortField("order", op="min"),
        axis=alt.Axis(labelLimit=230, domain=False, ticks=False, labelColor=INK, labelPadding=8),
    )
    rows = alt.LookupData(alt.NamedData(name="rows"), key="order", fields=["s", "row"])
    names = alt.LookupData(alt.NamedData(name="tasks"), key="column", fields=["task"])
    cells = chart_series("cells")
    cells.transform = [*alt.Chart().transform_lookup(lookup="order", from_=rows).transform, *cells.transform]
    base = cells.transform_lookup(lookup="column", from_=names).encode(x=column, y=row)
    colour = alt.Color("diff:Q", title=GAIN, legend=legend, scale=LOSSES)
    tip = [
        alt.Tooltip("row:N", title="run"),
        alt.Tooltip("task:N"),
        *DIFFERENCE,
        alt.Tooltip("full:Q", title="full cache", format=".1f"),
        alt.Tooltip("score:Q", format=".1f"),
        alt.Tooltip("n:Q", title="samples"),
    ]
    dark = alt.condition(DARK, alt.value("white"), alt.value(CELL_INK))
    stripe = chart_series("rows").mark_rect()
    return stack_layers(
        stripe.encode(x=alt.value(-5), x2=alt.value(-1), y=row, fill=alt.Fill("colour:N", scale=None, legend=None)),
        base.mark_rect(stroke="#ffffff", strokeWidth=2).encode(color=colour, tooltip=tip),
        base.mark_text(fontSize=11).encode(text=alt.Text("diff:Q", format="+.0f"), color=dark, tooltip=tip),
        *([mark_corner(base, colour, 13)] if published else []),
    ).properties(height=24)  # height of one row; the caller multiplies it by the number of rows


def chart_grid(legend: alt.Legend | None = None, change: bool = False, published: bool = False) -> alt.LayerChart:
    """Chart one run's scores by length and depth, or with `change` their differences from the full cache.

    Args:
        legend: The legend of colours.
        change: Whether to chart differences.
        published: Whether to draw the published values of the cells, in circles.
    """
    value, form = ("diff", "+.0f") if change else ("score", ".0f")
    place = alt.Axis(labelAngle=0, domain=False, ticks=False, labelOverlap=True)
    order = alt.EncodingSortField("place", op="min")
    texts = {
        "between": interval_expression("score_low", "score_high"),
        "interval": interval_expression("diff_low", "diff_high", "+"),
    }
    base = (
        alt.Chart()
        .transform_filter(f"isValid(datum.{value})")
        .transform_calculate(place="isNumber(datum.depth) ? datum.depth : -1", **texts)
        .transform_joinaggregate(cells="count()", groupby=[])
        .encode(
            x=alt.X("length:O", title="Length", axis=place),
            y=alt.Y("depth:O", title="Depth, %", sort=order, axis=place),
        )
    )
    tip = [
        alt.Tooltip("length:O"),
        alt.Tooltip("depth:O"),
        alt.Tooltip("score:Q", format=".1f"),
        alt.Tooltip("between:N", title="95 %"),
        alt.Tooltip("diff:Q", title="difference", format="+.1f"),
        alt.Tooltip("interval:N", title="its 95 %"),
        alt.Tooltip("n:Q", title="samples"),
    ]
    colour = alt.Color(
        f"{value}:Q",
        title=GAIN if change else "Score",
        legend=legend,
        scale=LOSSES if change else SCORES,
    )
    dark = alt.condition(DARK if change else "datum.score > 60", alt.value("white"), alt.value(CELL_INK))
    numbers = base.transform_filter(f"datum.cells <= {CROWD}").mark_text(fontSize=10)
    return stack_layers(
        base.mark_rect(stroke="#ffffff", strokeWidth=1).encode(color=colour, tooltip=tip),
        numbers.encode(text=alt.Text(f"{value}:Q", format=form), color=dark, tooltip=tip),
        *([mark_corner(base, colour, 6)] if published else []),
        data=alt.NamedData(name="cells"),
    ).properties(height=150)


@cache  # and nobody changes it: Altair's methods change a copy
def chart_cost(name: str) -> alt.LayerChart:
    """Chart score differences against one cost, with 95 % intervals.

    Vertical whiskers are the 95 % intervals of the difference, horizontal ones those of the cost. Where all samples
    hold the same share of bytes, there is no horizontal one. Filled and connected points are on the Pareto front: no
    other run, and not the full cache, is better in both.
    """
    title, form = COSTS[name]
    scale, axis = alt.Scale(zero=True, nice=True), alt.Axis(format=form, tickCount=5)
    x = alt.X(f"{name}:Q", title=title, scale=scale, axis=axis)
    y = alt.Y(
        "diff:Q", title="Score difference from the full cache", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5)
    )
    digits = ".2%" if name == "held" else ".1f"
    spread = interval_expression(f"{name}_low", f"{name}_high", none="none", digits=digits)
    tip = [alt.Tooltip(f"{name}:Q", title="cost", format=digits), alt.Tooltip("spread:N", title="its 95 %")]
    more = [*DIFFERENCE, alt.Tooltip("megabytes:Q", title="MB held", format=".2f")]
    known = f"isValid(datum.{name})"
    base = chart_series("costs").transform_filter(known).transform_calculate(spread=spread).encode(x=x, y=y)
    full = alt.Chart(alt.NamedData(name="free")).transform_filter(known)
    full = full.transform_calculate(spread=spread, row="'full cache'").encode(x=x, y=y)
    front = alt.Chart(alt.NamedData(name="front")).transform_filter(f"datum.cost == '{name}'")
    line = base.mark_line(strokeWidth=1, opacity=0.35)
    best = alt.condition(f"datum.front_{name}", alt.value(1), alt.value(0))
    run = alt.Tooltip("row:N", title="run")
    marks: dict[str, Any] = {"size": 64, "strokeWidth": 1.6, "filled": False, "opacity": 1}
    fill = alt.Fill("colour:N", scale=None, legend=None)
    low = alt.Y("diff_low:Q", title="Score difference from the full cache")
    reach = {"x": alt.X(f"{name}_low:Q", title=title, scale=scale, axis=axis), "x2": f"{name}_high:Q"}
    ends = {
        f"{name}_{end}": f"isValid(datum.{name}_{end}) ? datum.{name}_{end} : datum.{name}" for end in ("low", "high")
    }
    whiskers = [
        base.transform_filter("isValid(datum.diff_low)")
        .mark_rule(opacity=0.3)
        .encode(y=low, y2="diff_high:Q", color=COLOUR),
        base.transform_calculate(**ends).mark_rule(opacity=0.45).encode(**reach, color=COLOUR),
        full.transform_calculate(**ends).mark_rule(opacity=0.45, color=FULL).encode(**reach),
    ]
    return stack_layers(
        line.encode(color=COLOUR, strokeDash=DASH, detail="label:N", order="held:Q"),
        front.mark_line(interpolate="step-after", color="#9aa0a6", strokeWidth=1).encode(
            x=alt.X("at:Q", title=title, scale=scale, axis=axis), y=y
        ),
        *whiskers,
        base.mark_point(**marks).encode(
            color=COLOUR, fill=fill, fillOpacity=best, shape=SHAPE, tooltip=[run, *tip, *more]
        ),
        full.mark_point(**marks | {"size": 90}, shape="diamond", color=FULL, fill=FULL).encode(
            fillOpacity=best, tooltip=[run, *tip]
        ),
    ).properties(height=230)


def make_specification(chart: alt.LayerChart | alt.VConcatChart) -> dict[str, Any]:
    """Return a chart as a specification for the page, with the page's fonts and lines and without a schema address."""
    spec = chart.configure(**CONFIG).to_dict(validate=False)  # Altair validated each part when it was made
    del spec["$schema"]
    return spec
