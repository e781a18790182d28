"""Draw the figure of docs/results.md: score over measured bytes, with ties as bands.

It shows the section of the main protocol with most cells, with the question visible. A band spans evicting cells that
hold similar bytes and of which no two are told apart, from the lowest to the highest of their scores. Bands stand to
the right of their cells, and those that overlap side by side. Up to NAMED labels have colours, of which no two are the
same, and stand in the key, the highest score first: those on the front by bytes, those on the front of the cells that
read each prompt once, those that may be the best, and those with the highest scores. Other cells are grey.
Methods that read few of many rows lie at the bytes that they hold, and have hollow marks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from kvbench.analysis.result_lines import Line
from kvbench.report import charts, print_charts
from kvbench.report.figures import INCHES
from kvbench.report.print_charts import POINTS, Drawing
from kvbench.report.results_cells import (
    EVICTING,
    POINT,
    READING,
    TWICE,
    Section,
    classify,
    find_front,
    list_leaders,
    list_methods,
    list_ties,
)
from kvbench.report.results_conclusions import choose_question
from kvbench.report.results_text import format_budget
from kvbench.report.style import COLOURS, choose_styles

FIGURE = "results"  # name of the picture
HEIGHT = 300  # pixels
NAMED = len(COLOURS)  # cells' labels in the key at most
GREY = "#9aa0a6"
BAND, OPACITY = "#56B4E9", 0.5  # of a band
PALE = "#" + "".join(f"{round(255 - OPACITY * (255 - part)):02X}" for part in bytes.fromhex(BAND[1:]))  # on white
BYTES = f"{charts.BYTES} (log scale)"
BESIDE, WIDTH, STEP = (
    1.035,
    1.02,
    1.03,
)  # factors of the bytes: where bands begin, their width, and from one to the next


def choose_figure(sections: Sequence[Section]) -> Section | None:
    """Return the section that the figure shows; None if there is none."""
    visible = choose_question([section for section in sections if list_methods(section.cells)], "visible")
    return max(visible, key=lambda section: len(section.cells)) if visible else None


def draw_figure(section: Section) -> str:
    """Return the SVG of the figure."""
    pixels = 72 * INCHES["tasks"] / POINTS
    drawing = make_drawing(section, pixels)
    full = section.full
    panel = {"model": full["model"], "task": full["task"], "question": full["question"], "notes": []}
    panel["also"] = [text for text in [full["protocol"]] if text]
    return print_charts.render_svg(drawing, pixels, print_charts.title_panel(panel, drawing.about, pixels))[0]


def make_drawing(section: Section, pixels: float) -> Drawing:
    """Return the chart of a section, at most `pixels` wide."""
    classes = list_compared(section)
    leaders = [line for cells in classes for line in list_leaders(cells)]
    cells = section.list_cells(EVICTING, POINT)
    fronts = find_front(cells), find_front([line for line in cells if line["method"] not in TWICE])
    best = find_best_of_labels(leaders), find_best_of_labels(cells)
    named = name_labels([line for some in (*fronts, *best) for line in some])
    styles = choose_looks(named)
    rows = [describe_point(line, styles) for line in list_methods(section.cells)]
    bands = [band for cells in classes for band in describe_bands(list_ties(cells))]
    full = {name: section.full[name] for name in ("score", "score_low", "score_high")}
    key = [{"label": label, **style, "dash": None} for label, style in styles.items()]
    key += [print_charts.FULL_KEY]
    if not all(row["named"] for row in rows):
        key += [{"label": "other cells", "colour": GREY, "shape": "circle", "dash": None}]
    if any(row["kind"] == READING for row in rows):
        entry = {"label": "keeps all rows, reads few", "colour": GREY, "shape": "circle", "dash": None}
        key += [entry | {"hollow": True}]
    if bands:
        key += [{"label": "cells that are not told apart", "colour": PALE, "shape": "square", "dash": None}]
    about = [section.full["average"], f"{section.samples} samples a cell"]

    def chart(width: float) -> alt.LayerChart:
        return chart_ties(min(row["share"] for row in rows)).properties(width=width, height=HEIGHT)

    return Drawing(rows, {"cells": rows, "bands": bands, "whole": [full]}, chart, 1, (80, pixels), key, about)


def list_compared(section: Section) -> list[list[Line]]:
    """Return the classes of evicting cells of one budget and similar bytes that have two cells at least."""
    return [cells for cells in section.list_classes() if len(cells) > 1]


def find_best_of_labels(cells: Sequence[Line]) -> list[Line]:
    """Return the highest cell of each label: the labels with most cells first, and of these the highest scores."""
    labels = [line["label"] for line in cells]
    best = {line["label"]: line for line in sorted(cells, key=lambda line: line["score"])}
    return sorted(best.values(), key=lambda line: (-labels.count(line["label"]), -line["score"], line["label"]))


def name_labels(cells: Sequence[Line]) -> dict[str, str]:
    """Return label -> method of the first NAMED labels of cells, the label of the highest score first."""
    methods = {line["label"]: line["method"] for line in cells}
    scores = {label: max(line["score"] for line in cells if line["label"] == label) for label in methods}
    return {label: methods[label] for label in sorted(list(methods)[:NAMED], key=lambda label: -scores[label])}


def choose_looks(named: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the style of each label: its method's (`choose_styles`), or a free colour if that one is taken."""
    looks, taken = {}, set[str]()
    for label, style in zip(named, choose_styles(list(named.values())), strict=True):
        colour = next(each for each in (style["colour"], *COLOURS.values()) if each not in taken)
        taken.add(colour)
        looks[label] = style | {"colour": colour}
    return looks


def describe_point(line: Line, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers and the look of a cell."""
    style = styles.get(line["label"], {"colour": GREY, "shape": "circle"})
    return {
        "label": line["label"],
        "budget": format_budget(line["budget"]),
        "share": line["bytes_held"],
        "kind": classify(line),
        "named": line["label"] in styles,
        **{name: line[name] for name in ("score", "score_low", "score_high", "n")},
        "colour": style["colour"],
        "shape": style["shape"],
    }


def describe_bands(ties: Sequence[Sequence[Line]]) -> list[dict[str, float]]:
    """Return the ends of the band of each tie of a class, in the first place to the right that no other one takes."""
    bands: list[dict[str, float]] = []
    right = max((line["bytes_held"] for cells in ties for line in cells), default=0.0)
    lows: list[float] = []  # lower end of the last band at each place
    for cells in ties:
        scores = [line["score"] for line in cells]
        low, high = min(scores) - 1, max(scores) + 1
        place = next((place for place, end in enumerate(lows) if high < end), len(lows))
        lows[place : place + 1] = [low]
        left = right * BESIDE * STEP**place
        bands.append({"share_low": left, "share_high": left * WIDTH, "score_low": low, "score_high": high})
    return bands


def chart_ties(least: float) -> alt.LayerChart:
    """Return the chart of the tables `cells`, `bands` and `whole`.

    Args:
        least: Smallest share of the bytes.
    """
    scale = alt.Scale(type="log", domain=[least, 1], nice=False, padding=14)
    x = alt.X("share:Q", title=BYTES, scale=scale, axis=alt.Axis(format="~%", values=charts.SHARES, grid=False))
    score = alt.Y("score:Q", title="Score", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(tickCount=5))
    low, high = alt.Y("score_low:Q", title="Score"), alt.Y2("score_high:Q")
    bands = alt.Chart(alt.NamedData(name="bands")).mark_rect(color=BAND, opacity=OPACITY)
    whole = alt.Chart(alt.NamedData(name="whole"))
    base = alt.Chart(alt.NamedData(name="cells")).encode(x=x)
    named = base.transform_filter("datum.named")
    reading = f"datum.kind === '{READING}'"
    line = named.transform_filter(f"!({reading})").mark_line(strokeWidth=1, opacity=0.6)
    others = base.transform_filter("!datum.named").encode(y=score, color=charts.COLOUR)
    points = named.encode(y=score, color=charts.COLOUR, shape=charts.SHAPE)
    return charts.stack_layers(
        whole.mark_rect(color=charts.FULL, opacity=0.06).encode(y=low, y2=high),
        bands.encode(x=alt.X("share_low:Q", title=BYTES, scale=scale), x2="share_high:Q", y=low, y2=high),
        whole.mark_rule(color=charts.FULL, strokeDash=charts.FULL_DASH).encode(y=score),
        others.transform_filter(f"!({reading})").mark_point(filled=True, size=22, opacity=0.55),
        others.transform_filter(reading).mark_point(filled=False, size=30, opacity=0.8),
        line.encode(y=score, color=charts.COLOUR, detail="label:N"),
        named.mark_rule(strokeWidth=1.2, opacity=0.5).encode(y=low, y2=high, color=charts.COLOUR),
        points.transform_filter(f"!({reading})").mark_point(filled=True, size=60, opacity=1),
        points.transform_filter(reading).mark_point(filled=False, size=70, opacity=1),
    )
