"""Draw what `kvbench diagnose` found: errors beside scores, maps of layers and heads, and lost rows of answers.

Each chart is an entry of the page's section "Why points were lost", like one of a study. A list in the chart chooses
the cell, the quantity or the sample.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from kvbench.analysis.diagnoses import COLUMNS, FEWEST, Diagnosis, correlate_ranks, read_diagnoses, score_cells
from kvbench.report.charts import CONFIG, INK, stack_layers
from kvbench.report.study_charts import SEQUENCE
from kvbench.report.style import choose_style
from kvbench.store.runs import StoredRun
from kvbench.store.study_lines import StudyFolder

Row = dict[str, Any]

COMPARED = ("local_answer", "accumulated_answer", "dropped_answer", "recall")  # drawn against scores
MAPPED = ("local_answer", "local_prompt", "accumulated_answer", "accumulated_prompt", "dropped_answer", "recall")
WIDTH, HEIGHT, ROW = 620, 260, 13  # pixels of a chart, and of a layer


def show_lost_points(studies: Iterable[StudyFolder], runs: Sequence[StoredRun]) -> list[Row]:
    """Return the entries of the section: title, model, about, claims, notes and the specification of a chart.

    Args:
        studies: The folders of studies.
        runs: The runs of the store.
    """
    rows = []
    for study in studies:
        cells = read_diagnoses(study)
        if not cells:
            continue
        said = {"model": study.about["model"]["name"], "about": f"{study.source}.", "claims": []}
        entries = [draw_scores(cells, score_cells(study, runs)), draw_heads(cells), draw_needles(cells)]
        rows += [said | entry for entry in entries if entry is not None]
    return rows


def name_quantity(name: str) -> str:
    """Return a quantity in words."""
    return " ".join(COLUMNS[name]).replace(
        ",", " at the" if name.endswith("prompt") or name.endswith("answer") else ","
    )


def choose_from(name: str, label: str, options: Sequence[str]) -> alt.Parameter:
    """Return a list from which the reader chooses the rows of a chart."""
    return alt.param(name=name, value=options[0], bind=alt.binding_select(options=list(options), name=f"{label} "))


def finish(chart: alt.Chart | alt.LayerChart | alt.FacetChart, rows: Sequence[Row], height: float) -> Row:
    """Return the specification of a chart with its data."""
    spec = chart.properties(width=WIDTH, height=height, data=alt.NamedData("rows")).configure(**CONFIG)
    specification: Row = spec.to_dict(validate=False)
    specification.pop("$schema")
    return specification | {"datasets": {"rows": list(rows)}}


def draw_scores(cells: Sequence[Diagnosis], scores: dict[str, float]) -> Row | None:
    """Draw errors beside scores, and state their rank correlations. None if no cell has a finished run."""
    if not scores:
        return None
    rows: list[Row] = []
    notes = []
    for quantity in COMPARED:
        finished = [cell for cell in cells if cell.name in scores and quantity in cell.means]
        words, values = name_quantity(quantity), [cell.means[quantity].value for cell in finished]
        for cell, value in zip(finished, values, strict=True):
            style = choose_style(cell.name.split()[0])
            place = {"quantity": words, "cell": cell.name, "value": value, "score": scores[cell.name]}
            rows.append(place | {"colour": style["colour"], "shape": style["shape"]})
        if len(finished) < FEWEST:
            if finished:
                notes.append(f"{words}: {len(finished)} cells have a finished run; a rank correlation needs {FEWEST}.")
        elif (rank := correlate_ranks(values, [scores[cell.name] for cell in finished])) is None:
            notes.append(f"{words}: all cells have the same score or the same value, so there is no rank correlation.")
        else:
            middle, low, high = rank
            notes.append(
                f"{words} and score of {len(finished)} cells: Spearman's rank correlation is {middle:.2f} "
                f"[{low:.2f}, {high:.2f}] (95 %, bootstrap over cells)."
            )
    notes.append(
        "The score is of all samples of a run, the mean over subtasks; the errors are of the prompts diagnosed."
    )
    chosen = choose_from("quantity", "against", list(dict.fromkeys(row["quantity"] for row in rows)))
    base = (
        alt.Chart()
        .transform_filter("datum.quantity === quantity")
        .encode(
            x=alt.X("value:Q", title="mean over layers and heads", scale=alt.Scale(zero=False, nice=True)),
            y=alt.Y("score:Q", title="score", scale=alt.Scale(zero=False, nice=True)),
            tooltip=["cell:N", alt.Tooltip("value:Q", format=".3f"), alt.Tooltip("score:Q", format=".1f")],
        )
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        color=alt.Color("colour:N", scale=None, legend=None), shape=alt.Shape("shape:N", scale=None, legend=None)
    )
    names = base.mark_text(align="left", dx=8, dy=-4, angle=330, fontSize=11, color=INK).encode(text="cell:N")
    chart = stack_layers(points, names).add_params(chosen)
    return {"title": "Errors beside scores", "notes": notes, "spec": finish(chart, rows, HEIGHT)}


def draw_heads(cells: Sequence[Diagnosis]) -> Row:
    """Draw a map of layers and heads for each cell and quantity."""
    rows: list[Row] = [
        {"choice": f"{cell.name}: {name_quantity(name)}", "layer": layer, "head": head, "value": line.value}
        for cell in cells
        for name in MAPPED
        for (layer, head), line in cell.heads.get(name, {}).items()
    ]
    chosen = choose_from("choice", "shown", list(dict.fromkeys(row["choice"] for row in rows)))
    chart = draw_map("datum.choice === choice", "head", "head", "value").add_params(chosen)
    notes = [
        "Recall is of KV heads, all other quantities are of query heads. Layers with a sliding window are left out.",
        "Layers with the largest local errors at the answer: "
        + "; ".join(f"{cell.name}: {', '.join(map(str, cell.worst))}" for cell in cells),
    ]
    layers = len({row["layer"] for row in rows})
    return {"title": "Where errors are", "notes": notes, "spec": finish(chart, rows, max(80, ROW * layers))}


def draw_needles(cells: Sequence[Diagnosis]) -> Row | None:
    """Draw for a sample what is left of its answer's rows after each block, by layer. None if that is not known."""
    rows: list[Row] = [
        {"choice": f"{cell.name}: sample {line.y:.0f}", "layer": line.layer, "block": line.x, "left": line.value}
        for cell in cells
        for line in cell.needles
        if line.quantity == "needles_left" and line.y is not None
    ]
    if not rows:
        return None
    chosen = choose_from("choice", "shown", list(dict.fromkeys(row["choice"] for row in rows)))
    chart = draw_map("datum.choice === choice", "block", "block of the prompt, from 1", "left", [0, 1])
    chart = chart.add_params(chosen)
    notes = [
        "The share of the answer's tokens and KV heads whose rows are held after a block. A token counts from "
        "the block that reads it.",
    ]
    layers = len({row["layer"] for row in rows})
    return {"title": "Where the answer was lost", "notes": notes, "spec": finish(chart, rows, max(80, ROW * layers))}


def draw_map(chosen: str, column: str, title: str, value: str, domain: Sequence[float] | None = None) -> alt.Chart:
    """Return a map of a value by layer and by another column, of the rows that the reader chose."""
    place = alt.Axis(labelAngle=0, domain=False, ticks=False, labelOverlap=True, grid=False)
    scale = alt.Scale(scheme=SEQUENCE, reverse=True, domain=alt.Undefined if domain is None else list(domain))
    legend = alt.Legend(title=None, orient="right", gradientLength=110, tickCount=4)
    return (
        alt.Chart()
        .mark_rect(stroke="#ffffff", strokeWidth=0.5)
        .transform_filter(chosen)
        .encode(
            x=alt.X(f"{column}:O", title=title, axis=place),
            y=alt.Y("layer:O", title="layer", axis=place),
            color=alt.Color(f"{value}:Q", scale=scale, legend=legend),
            tooltip=["layer:O", f"{column}:O", alt.Tooltip(f"{value}:Q", format=".3f")],
        )
    )
