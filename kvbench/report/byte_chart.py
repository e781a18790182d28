"""Draw score over measured bytes (kvbench.analysis.byte_front): a protocol's cells, and the front as a step line."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from kvbench.analysis.byte_front import ByteCell, order_by_bytes
from kvbench.analysis.run_labels import format_budget
from kvbench.analysis.score_matrix import ScoreBlock
from kvbench.report import charts
from kvbench.report.print_charts import Drawing
from kvbench.report.style import choose_styles

HEIGHT = 220  # pixels
OPACITIES = {"front": 1.0, "tie": 0.45, "": 0.15}  # of the marks of a cell
FRONT_LINE = "#9aa0a6"


def draw_bytes(block: ScoreBlock, total: float) -> Drawing | None:
    """Return the drawing of a block, at most `total` pixels wide; None if no cell says its bytes.

    Cells on the front have an interval and full marks, those that tie with one of them lighter marks, others the
    lightest.
    """
    cells = order_by_bytes(block)
    if not cells:
        return None
    labels = list(dict.fromkeys(one.label for one in cells))
    methods = [next(one.cell.run.value["method"]["name"] for one in cells if one.label == label) for label in labels]
    styles = dict(zip(labels, choose_styles(methods), strict=True))
    key = [{"label": label, **style, "dash": None} for label, style in styles.items()]
    rows = [describe_point(one) for one in cells]
    looks = [{name: styles[one.label][name] for name in ("colour", "shape")} for one in cells]
    points = [row | look for row, look in zip(rows, looks, strict=True)]
    steps = [{"share": row["share"], "score": row["score"]} for row in rows if row["front"] is not None]
    steps.append({"share": 1.0, "score": steps[-1]["score"]})  # more bytes bring no more

    def chart(width: float) -> alt.LayerChart:
        return chart_bytes(rows).properties(width=width, height=HEIGHT)

    about = [block.average, f"{block.samples} samples", "line: the front; light marks tie with it"]
    return Drawing(rows, {"bytes": points, "steps": steps}, chart, 1, (80, total), key, about)


def describe_point(one: ByteCell) -> dict[str, Any]:
    """Return the numbers of a cell, for the chart and the CSV."""
    return {
        "label": one.label,
        "budget": format_budget(one.cell.run),
        "share": one.share,
        "score": one.cell.score.value,
        "score_low": one.cell.score.low,
        "score_high": one.cell.score.high,
        "n": one.cell.score.samples,
        "front": one.place,
        "ties": " ".join(map(str, one.ties)),
        "kind": "front" if one.place is not None else "tie" if one.ties else "",
    }


def chart_bytes(rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    """Return the chart of the tables `bytes` and `steps`."""
    least = min(row["share"] for row in rows)
    x = alt.X(
        "share:Q",
        title=charts.BYTES,
        scale=alt.Scale(type="log", domain=[least, 1], nice=False, padding=12),
        axis=alt.Axis(format="~%", values=charts.SHARES, grid=False),
    )
    score = alt.Y("score:Q", title="Score", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(tickCount=5))
    base = alt.Chart(alt.NamedData(name="bytes")).encode(x=x)
    line = alt.Chart(alt.NamedData(name="steps")).mark_line(color=FRONT_LINE, strokeWidth=1.5, interpolate="step-after")
    marks = [
        base.transform_filter(f"datum.kind === '{kind}'")
        .mark_point(filled=True, size=60, opacity=opacity)
        .encode(y=score, color=charts.COLOUR, shape=charts.SHAPE)
        for kind, opacity in reversed(OPACITIES.items())
    ]
    front = base.transform_filter("isValid(datum.front) && isValid(datum.score_low)")
    spread = front.mark_rule(strokeWidth=1.2, opacity=0.6)
    return charts.stack_layers(
        line.encode(x=x, y=score),
        spread.encode(y=alt.Y("score_low:Q", title="Score"), y2="score_high:Q", color=charts.COLOUR),
        *marks,
    )
