"""Draw the learning curve of a tuning for a model's card, as SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from kvbench.report.print_charts import CONFIG, tidy_svg
from kvbench.report.style import COLOURS

WIDTH, HEIGHT = 300, 200  # of a plot, in pixels


def draw_learning_curve(
    points: Sequence[Mapping[str, float | None]], scores: Mapping[str, str], losses: Mapping[str, str]
) -> str:
    """Return two plots against the tokens read: lines of scores, and lines of losses.

    Args:
        points: The points of the curve, with `tokens`. A line has no point where a value is None.
        scores: Name of a score in a point, in percent -> what the key calls it.
        losses: The same of losses, in nats.

    Raises:
        ValueError: There are more lines in a plot than colours.
    """
    plots = [
        draw_lines(points, scores, "right answers, %", alt.Scale(domain=[0, 100])),
        draw_lines(points, losses, "nats a token", alt.Scale(zero=True)),
    ]
    chart = alt.hconcat(*plots, spacing=30).resolve_scale(color="independent").configure(**CONFIG)
    return tidy_svg(vl_convert.vegalite_to_svg(chart.to_dict()))


def draw_lines(
    points: Sequence[Mapping[str, float | None]], names: Mapping[str, str], title: str, scale: alt.Scale
) -> alt.Chart:
    """Return a plot with a line for each name."""
    rows: list[dict[str, Any]] = [
        {"tokens": (point["tokens"] or 0) / 1e6, "name": label, "value": point[name]}
        for point in points
        for name, label in names.items()
        if point[name] is not None
    ]
    colours = [colour for colour, _ in zip(COLOURS.values(), names, strict=False)]
    if len(colours) < len(names):
        raise ValueError(f"{len(names)} lines, {len(COLOURS)} colours")
    legend = alt.Legend(title=None, orient="bottom", columns=3, symbolType="stroke")
    return (
        alt.Chart(alt.Data(values=rows), width=WIDTH, height=HEIGHT)
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("tokens:Q", title="million tokens read"),
            y=alt.Y("value:Q", title=title, scale=scale),
            color=alt.Color(
                "name:N",
                sort=list(names.values()),
                scale=alt.Scale(domain=list(names.values()), range=colours),
                legend=legend,
            ),
        )
    )
