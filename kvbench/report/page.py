"""Write the page as one file with style, charting library, specifications and numbers, and the samples in a folder.

If the page would become larger than MOST, its numbers go into script files next to it. Each panel has a file, which is
loaded when the panel comes near the screen. Everything else is in one file, which the page loads first.
"""

import fcntl
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vl_convert

from kvbench.analysis.run_labels import describe_error
from kvbench.config.paths import CACHE
from kvbench.papers.exhibit_pages import ExhibitPage, fill_exhibits
from kvbench.papers.exhibits import load_exhibits
from kvbench.report.charts import SCORE, SHARES, build_charts, make_specification
from kvbench.report.excerpts import write_excerpts
from kvbench.report.lost_points import show_lost_points
from kvbench.report.panels import DATA_ERRORS, TABLES, PageData, gather_results
from kvbench.report.print_charts import make_plots
from kvbench.report.samples import to_embedded_json, write_file, write_samples
from kvbench.report.study_charts import draw_exhibit
from kvbench.report.style import DARK, FULL
from kvbench.stops import waiting
from kvbench.store.study_lines import find_studies
from kvbench.validation import SettingError, name_file_in_errors

HERE = Path(__file__).parent
FOLDER = "report"  # folder of the samples, next to the page
NUMBERS = (*TABLES, "series", "grids", "solvable", "matrix")  # keys of a panel that move into its file
FILES = ("samples", "part", "prompts")  # kinds of files in that folder
DIGITS = 4  # decimal places
COMPACT_TABLES = (*TABLES, "cells")  # tables that are written compactly; "cells" are also those of a grid
MOST = 2_000_000  # largest size of a page, in bytes
STUDY_WIDTH, MARGIN = 760, 55  # pixels: width of a study's charts, and of an axis


def write_report(results: Path, now: datetime, out: Path | None = None, with_prompts: bool = True) -> Path:
    """Write the page and its samples, and return the page's path.

    Args:
        results: The folder of results.
        now: The time that the page states.
        out: The folder that the page is written into. None: the folder of results.
        with_prompts: Whether the page shows text of prompts, which are made again for it.

    Raises:
        SettingError: The folder contains no runs.
    """
    gathered = gather_results(results, now)
    studies, lost = [], []
    try:
        folders = find_studies(results)
        studies = [page for pages in fill_exhibits(results, load_exhibits(), folders).values() for page in pages]
        lost = show_lost_points(folders, [pairing.run for pairing in gathered.pairings])
    except SettingError as error:
        gathered.page["damaged"].append(["studies", str(error)])
    path = (out or results) / "report.html"
    folder = (out or results) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # locked until it is closed; another process that writes the page waits
        with name_file_in_errors(lock.name), waiting():
            fcntl.lockf(lock, fcntl.LOCK_EX)
        write_page(gathered, path, folder, with_prompts, studies, lost)
    return path


def write_page(
    gathered: PageData,
    path: Path,
    folder: Path,
    with_prompts: bool = True,
    studies: Sequence[ExhibitPage] = (),
    lost: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the page and its files, and delete files of an earlier page.

    Args:
        gathered: The data of the page.
        path: The page.
        folder: The folder of its files.
        with_prompts: Whether the page shows text of prompts.
        studies: The exhibits of studies.
        lost: What `kvbench.report.lost_points.show_lost_points` returned.
    """
    count = len(gathered.page["panels"])
    left_out = [{"reason": "the page was made without text of the data set"}] * count
    prompts = write_excerpts(folder, gathered.pairings, count) if with_prompts else left_out
    files = write_answers(gathered, folder)
    shown = [show_study(folder, page) for page in studies]
    why = [
        {name: value for name, value in entry.items() if name != "spec"} | {"part": write_part(folder, entry["spec"])}
        for entry in lost
    ]
    more = {"files": files, "prompts": prompts, "folder": FOLDER, "studies": shown, "lost": why}
    page = compact_json(gathered.page | more)
    wanted = {name for entry in page["files"] for name in entry["names"]} | {entry["part"] for entry in [*shown, *why]}
    wanted |= {entry["name"] for entry in prompts if "name" in entry}
    text = render_html(page)
    if len(text.encode()) > MOST:
        page, parts = split_data(page, folder)
        text, wanted = render_html(page), wanted | parts
    write_file(path, text)
    for old in (file for kind in FILES for file in folder.glob(f"{kind}-*.js")):
        if old.name not in wanted:
            old.unlink()


def split_data(page: dict[str, Any], folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Move the data of a page into files in `folder`. Return the page that loads them, and the names of the files."""
    panels = [
        {name: value for name, value in panel.items() if name not in NUMBERS}
        | {"part": write_part(folder, {name: panel[name] for name in NUMBERS})}
        for panel in page["panels"]
    ]
    part = write_part(folder, page | {"panels": panels})
    return {"folder": FOLDER, "part": part}, {part, *(panel["part"] for panel in panels)}


def write_part(folder: Path, value: object) -> str:
    """Write a value into a file that the page loads, and return its name."""
    text = to_embedded_json(value)
    name = f"part-{sha256(text.encode()).hexdigest()[:16]}.js"
    write_file(folder / name, f'kvbenchPart("{name}",{text});\n')
    return name


def show_study(folder: Path, page: ExhibitPage) -> dict[str, Any]:
    """Return what the page says about an exhibit. Its table or its chart goes into a file of its own."""
    if page.table:
        part: dict[str, Any] = {"head": ["", *page.table.titles], "rows": page.table.cells()}
    else:
        drawing = draw_exhibit(page.spec, page.lines, STUDY_WIDTH)
        part = make_specification(make_plots(drawing, STUDY_WIDTH / drawing.plots - MARGIN))
        part["datasets"] = part.get("datasets", {}) | drawing.tables
    said = {"title": page.spec["title"], "model": page.study.about["model"]["name"], "about": page.about}
    return said | {
        "claims": [f"{claim.words} {claim.text}" for claim in page.claims],
        "notes": page.notes,
        "part": write_part(folder, part),
    }


def write_answers(gathered: PageData, folder: Path) -> list[dict[str, Any]]:
    """Write the answers of all pairs, and return the list of files that the page can load."""
    files = []
    for pairing in gathered.pairings:
        try:
            names = write_samples(folder, pairing)
        except DATA_ERRORS as error:
            gathered.page["damaged"].append([pairing.run.hash, f"its samples cannot be shown: {describe_error(error)}"])
            continue
        method = pairing.run.value["method"]["name"]
        block = pairing.run.value.get("block_size")
        files.append({"run": pairing.run.hash, "panel": pairing.panel, "row": pairing.name, "names": names})
        files[-1] |= {"method": method, "block": block}
    return files


def render_html(page: dict[str, Any]) -> str:
    """Return the page as HTML."""
    library, script = load_scripts()
    data = to_embedded_json(
        page | {"charts": build_charts(), "ink": FULL, "dark": DARK, "shades": SCORE, "ticks": SHARES}
    )
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy()}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>kvbench report</title><style>{style}</style></head><body>",
            '<main id="page"><noscript>This page draws its charts with scripts that it holds itself.</noscript></main>',
            f'<script type="application/json" id="data">{data}</script>',
            "<!-- Vega, Vega-Lite, Vega-Embed: BSD-3-Clause, University of Washington Interactive Data Lab -->",
            f'<script type="text/plain" id="library">{library}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


@cache
def load_scripts() -> tuple[str, str]:
    """Return the charting library and the page's own script."""
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in ("intervals.js", "page.js"))
    scripts = load_library(), script
    for text in scripts:
        if "</script" in text.lower() or "<!--" in text:
            raise ValueError("a script contains </script or <!--, which would end it early")
    return scripts


def load_library() -> str:
    """Return the charting library. Bundling it takes seconds, so it is kept in the cache folder.

    The name of the kept file has the version of the bundler and the hash of the text, so that a damaged file is not
    used.
    """
    name = f"charts-{version('vl-convert-python')}"
    for path in CACHE.glob(f"{name}-*.js"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.name == f"{name}-{sha256(text.encode()).hexdigest()}.js":
            return text
    text = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the argument's default
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        write_file(CACHE / f"{name}-{sha256(text.encode()).hexdigest()}.js", text)
    except OSError:
        pass  # a cache folder that cannot be written costs time only
    return text


def content_security_policy() -> str:
    """Return the page's content security policy.

    It allows `unsafe-eval` because the charting library compiles expressions. Only the page's own scripts may load the
    files next to it.
    """
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in load_scripts())
    return (
        f"default-src 'none'; script-src {allowed} 'strict-dynamic' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def compact_json(value: object, name: str = "") -> Any:
    """Round floats to DIGITS places, and write tables with their names only once: {"names": […], "rows": [[…]]}."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if name in COMPACT_TABLES and isinstance(value, list | tuple):  # a method may have a table's name, such as full
        names = list(value[0]) if value else []
        return {"names": names, "rows": [[compact_json(row[key]) for key in names] for row in value]}
    if isinstance(value, dict):
        return {key: compact_json(part, key) for key, part in value.items()}
    return [compact_json(part) for part in value] if isinstance(value, list | tuple) else value
