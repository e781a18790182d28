"""Write the report page's charts as figures for print: PDF, SVG and PNG, and a CSV with exactly the numbers drawn.

    curve   score against measured share with 95 % bands, the full cache dashed; `subtask=ruler_vt` restricts it. If all
            methods have one and the same budget: a row for each method with its score and interval. Where a paper
            prints a score of the same experiment (kvbench.papers.published_scores), a hollow mark shows it
    tasks   difference from the full cache by subtask
    grid    score by length and depth, one plot per run
    change  difference from the full cache by length and depth. In a cell of these three kinds, a circle has the colour
            of the published value, if a paper prints one of the same experiment
    cost    difference against bytes held, time to first token and time per output token, with 95 % intervals of both;
            filled points are on the Pareto front
    bytes   score against measured bytes for all methods, codecs and budgets (kvbench.analysis.byte_front): a step line
            for the front, lighter marks for cells that tie with one on it

Any setting of a run works as a filter, as in kvbench.analysis.curves. Runs of different protocols
(kvbench.store.audit.comparison_key) never share a figure. Its name is
<model>-<task>-<question>-<hash of the protocol>-<kind>. The same store gives the same SVG.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from kvbench.analysis import solvable_subtasks
from kvbench.analysis.budget_series import SOLVABLE, CurveOptions
from kvbench.analysis.score_matrix import build_blocks
from kvbench.papers.published_scores import find_published
from kvbench.report import print_charts
from kvbench.report.byte_chart import draw_bytes
from kvbench.report.panels import Panel, build_panels
from kvbench.report.print_charts import POINTS, SIZE, Drawing, title_panel
from kvbench.store.csv_rows import format_rows
from kvbench.store.runs import FoundRuns, StoredRun
from kvbench.validation import SettingError, name_file_in_errors

COLUMNS = {"column": 3.25, "page": 6.75}  # inches of one column of a paper with two, and of both
INCHES = {"curve": 3.25, "tasks": 6.75, "grid": 6.75, "change": 6.75, "cost": 6.75, "bytes": 6.75}
LEAST, MOST = 2, 20
PPI = 300  # of the PNG
HIDDEN = ("s", "order", "column", "row", "printed", "over")  # columns that only join a table to others


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Name of its files without a suffix.
        drawing: Its chart.
        pixels: Largest width.
        title: Its title and notes; None for a figure without.
    """

    name: str
    drawing: Drawing
    pixels: float
    title: alt.TitleParams | None

    def write(self, folder: Path) -> str:
        """Write the four files of the figure, and return a line about them."""
        path = folder / f"{self.name}.csv"
        with name_file_in_errors(path):
            path.write_text(format_csv(self.drawing.rows), encoding="utf-8")
        return self.write_pictures(folder, " .csv")

    def write_pictures(self, folder: Path, also: str = "") -> str:
        """Write the figure as SVG, PDF and PNG, and return a line about these and other files of the figure."""
        text, *size = print_charts.render_svg(self.drawing, self.pixels, self.title)
        sized = [f' width="{{0:.6g}}{unit}" height="{{1:.6g}}{unit}"'.format(*size) for unit in ("pt", "")]
        # the converters treat a pixel as a point
        svg, plain = (SIZE.sub(size_text, text, count=1) for size_text in sized)
        named = folder / self.name
        forms: dict[str, Callable[[], bytes]] = {
            "svg": svg.encode,
            "pdf": lambda: vl_convert.svg_to_pdf(plain),
            "png": lambda: vl_convert.svg_to_png(plain, ppi=PPI),
        }
        for suffix, form in forms.items():
            path = Path(f"{named}.{suffix}")
            with name_file_in_errors(path):
                path.write_bytes(form())
        inches = " x ".join(f"{points / 72:.2f}" for points in size)
        return f"{named}  .pdf .svg .png{also}  {inches} in"


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, without the columns that only join tables."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    return format_rows([names, *([row.get(name) for name in names] for row in rows)])


def make_figures(
    options: Namespace, loaded: FoundRuns, wanted: Sequence[StoredRun], refused: dict[str, str]
) -> Iterator[Figure]:
    """Yield the figures of the wanted runs.

    Args:
        options: The parsed command line.
        loaded: The runs of the store.
        wanted: Runs to draw.
        refused: Receives a reason for each run or curve that cannot be drawn.
    """
    for subtask in options.subtasks or [None]:
        choice = CurveOptions(options.against, options.average, subtask)
        parts = ["" if options.against == "bytes" else options.against, options.average or "", subtask or ""]
        curve = "-".join(["curve", *map(make_slug, filter(None, parts))])
        for panel in build_panels(loaded, wanted, choice):
            panel.data["published"] = (
                list_published(panel, subtask, options.results) if "curve" in options.kinds else []
            )
            if {"tasks", "grid", "change"} & set(options.kinds):
                add_published(panel, options.results)
            refused |= {f"run {name}": why for name, why in panel.refused.items()}
            for series in panel.data["series"]:
                if "curve" in options.kinds and "refused" in series:
                    refused[f"{name_figure(panel)}-{curve}, {series['label']}"] = series["refused"]
            for kind in options.kinds:
                pixels = 72 * (options.width or INCHES[kind]) / POINTS
                if kind == "bytes":
                    drawing = draw_panel_bytes(panel, options.average, pixels)
                else:
                    drawing = make_drawing(kind, panel.data, options.against, pixels)
                if drawing:
                    name = f"{name_figure(panel)}-{curve if kind == 'curve' else kind}"
                    title = None if options.plain else title_panel(panel.data, drawing.about, pixels)
                    yield Figure(name, drawing, pixels, title)


def list_published(panel: Panel, subtask: str | None, results: Path) -> list[dict[str, Any]]:
    """Return a row for each published score of a panel's points: series, share, score and the table that prints it.

    Args:
        panel: The panel.
        subtask: The only subtask of its points, or None.
        results: The folder of results.
    """
    hashes = {(row["series"], row["budget"]): row["hash"] for row in panel.listed}
    runs = {run.hash: run for run in panel.runs}
    rows = []
    for point in panel.data["points"]:
        run = runs[hashes[panel.data["series"][point["s"]]["label"], point["budget"]]]
        subtasks = {subtask} if subtask else {record["subtask"] for record in run.records.values()}
        for published in find_published(run, subtasks, point["score"], results):
            at = {"s": point["s"], "budget": point["budget"], "share": point["share"]}
            rows.append(at | {"score": published.score, "table": published.table})
    return rows


def add_published(panel: Panel, results: Path) -> None:
    """Add what papers print to the cells of a panel.

    `published` of a subtask is the difference from the full cache that one table prints, and `printed` of a length and
    depth has such a score and such a difference, each None if no paper prints it.

    Args:
        panel: The panel.
        results: The folder of results.
    """
    tasks = {task["column"]: task["task"] for task in panel.data["tasks"]}
    for cell in panel.data["cells"]:
        pair, subtasks = panel.pairings[cell["order"]], {tasks[cell["column"]]}
        full = {score.table: score.score for score in find_published(pair.full, subtasks, cell["full"], results)}
        printed_scores = find_published(pair.run, subtasks, cell["score"], results)
        cell["published"] = next(
            (score.score - full[score.table] for score in printed_scores if score.table in full), None
        )
    pairs = {pairing.name: pairing for pairing in panel.pairings}
    for grid in panel.data["grids"]:
        if (pair := pairs.get(grid["row"])) is None:  # the full cache's own
            continue
        placed: dict[tuple[object, object], set[str]] = {}
        for record in pair.run.records.values():
            place = record["meta"].get("length"), record["meta"].get("depth")
            placed.setdefault(place, set()).add(record["subtask"])
        for cell in grid["cells"]:
            subtasks, where = placed.get((cell["length"], cell["depth"]), set()), {"depth": cell["depth"]}
            values = [(cell["score"], None), (cell["diff"], pair.full)]
            printed = [
                find_published(pair.run, subtasks, value, results, where, full) if value is not None else []
                for value, full in values
            ]
            cell["printed"] = [scores[0].score if scores else None for scores in printed]


def make_drawing(kind: str, panel: Mapping[str, Any], against: str, pixels: float) -> Drawing | None:
    """Return the drawing of a kind, a key of INCHES but bytes; None if the panel has nothing to draw."""
    if kind == "curve":
        return print_charts.draw_curve(panel, against, pixels)
    if kind == "change":
        return print_charts.draw_grid(panel, pixels, change=True)
    return {"tasks": print_charts.draw_tasks, "grid": print_charts.draw_grid, "cost": print_charts.draw_cost}[kind](
        panel, pixels
    )


def draw_panel_bytes(panel: Panel, average: str | None, pixels: float) -> Drawing | None:
    """Return the drawing of a panel's scores over bytes; None if its runs cannot stand in one table."""
    blocks, _ = build_blocks([run for run in panel.runs if not run.full] or panel.runs, panel.runs, average)
    return draw_bytes(blocks[0], pixels) if blocks else None


def name_figure(panel: Panel) -> str:
    """Return the beginning of a figure's name: model, task, question and hash of the protocol."""
    return "-".join([*(make_slug(panel.data[name]) for name in ("model", "task", "question")), panel.key[:8]])


def make_slug(text: str) -> str:
    """Return a text that can be part of a file's name. A hash is added if characters were replaced."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:40]
    return slug if slug == text else f"{slug}-{sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def list_averages(run: StoredRun) -> list[str]:
    """Return the averages that `--average` accepts, except EACH."""
    return [*dict(run.value.get("averages") or []), *([SOLVABLE] if solvable_subtasks.list_solvable(run.value) else [])]


def parse_inches(text: str) -> float:
    """Parse a width: a number of inches, or a name in COLUMNS.

    Raises:
        SettingError: It is neither a name nor a number from LEAST to MOST.
    """
    if text in COLUMNS:
        return COLUMNS[text]
    try:
        if LEAST <= float(text) <= MOST:
            return float(text)
    except ValueError:
        pass
    raise SettingError(f"--width {text}: choose column, page, or a number of inches from {LEAST} to {MOST}")
