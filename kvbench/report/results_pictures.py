"""Draw the pictures of the pages of results: scores of a section, at one budget or as curves over the bytes held."""

import re
from collections.abc import Mapping, Sequence

from kvbench.report import print_charts
from kvbench.report.figures import INCHES, make_slug
from kvbench.report.print_charts import POINTS
from kvbench.report.results_cells import Section, is_decided, list_budgets, list_methods
from kvbench.report.results_tables import WIDE
from kvbench.report.results_text import format_budget
from kvbench.report.style import choose_styles

MOST_CURVES = 12  # methods of a picture


def list_pictures(section: Section, pictures: Mapping[str, str]) -> list[str]:
    """Return the names of the pictures of a section."""
    names = [name_picture(section, budget) for budget in (*list_budgets(section.cells), None)]
    return [name for name in names if name in pictures]


def name_picture(section: Section, budget: float | int | str | None) -> str:
    """Return the name of a picture: of one budget, or of a curve if `budget` is None."""
    parts = [section.part, *map(make_slug, filter(None, section.protocol))]
    return "-".join(["measured", *parts, "curve" if budget is None else f"{budget:g}"])


def draw_pictures(sections: Sequence[Section]) -> dict[str, str]:
    """Draw pictures of each section: a curve if there are more than WIDE budgets, otherwise scores at each budget.

    Where methods decide how many rows stay, there is a curve too.

    Returns:
        Name of a picture -> its SVG.
    """
    pictures = {}
    for section in sections:
        budgets = list_budgets(section.cells)
        decided = any(map(is_decided, section.cells))
        shown = [None] if len(budgets) > WIDE else [*budgets, *([None] if decided else [])]
        for budget in shown:
            pictures[name_picture(section, budget)] = draw_picture(section, budget)
    return pictures


def shorten_label(label: str) -> str:
    """Return a label without what a reader of a picture can do without, because long ones are cut.

    Of presets that set the same, whose names a slash joins, the first is named.
    """
    return re.sub(r"/\S+", "", label).removeprefix("full · ").replace("codec.path=", "").replace("codec.", "")


def draw_picture(section: Section, budget: float | int | str | None) -> str:
    """Return the SVG of scores against bytes held, or at one budget."""
    cells, full = section.cells, section.full
    chosen = [line for line in list_methods(cells) if budget in (None, line["budget"])]
    labels = list(dict.fromkeys(line["label"] for line in chosen))
    if budget is None:  # curves of all variants would hide each other
        plain = [line for line in chosen if (line["allocator"], line["codec"]) == ("uniform", "raw")]
        means = {label: [line["score"] for line in plain if line["label"] == label] for label in labels}
        ordered = sorted(
            (label for label in labels if means[label]), key=lambda label: -sum(means[label]) / len(means[label])
        )
        labels = [label for label in labels if label in ordered[:MOST_CURVES]]
        chosen = [line for line in plain if line["label"] in labels]
    methods = [next(line["method"] for line in chosen if line["label"] == label) for label in labels]
    shown = {"smallest": None, "samples": full["n"], "left_out": 0, "average": full["average"]}
    series = [
        {"s": place, "label": shorten_label(label)} | style | shown
        for place, (label, style) in enumerate(zip(labels, choose_styles(methods), strict=True))
    ]
    points = [
        {
            "s": labels.index(line["label"]),
            "budget": format_budget(line["budget"]),
            "share": line["bytes_held"],
            "diff": line["difference"],
            "diff_low": line["low"],
            "diff_high": line["high"],
            "lost": line["lost"],
            "gained": line["gained"],
            "same": line["n"] - line["lost"] - line["gained"],
            **{name: line[name] for name in ("score", "score_low", "score_high", "n")},
        }
        for line in chosen
    ]
    whole = [
        {"s": line["s"]} | {name: full[name] for name in ("score", "score_low", "score_high", "n")} for line in series
    ]
    panel = {"model": full["model"], "task": full["task"], "question": full["question"], "notes": []}
    panel |= {"also": [text for text in [full["protocol"]] if text], "series": series, "points": points, "full": whole}
    pixels = 72 * INCHES["tasks"] / POINTS
    drawing = print_charts.draw_curve(panel, "bytes", pixels)
    assert drawing is not None  # every series has points
    title = print_charts.title_panel(panel, drawing.about, pixels)
    return print_charts.render_svg(drawing, pixels, title)[0]
