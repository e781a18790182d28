"""The page as one file: style, charting library, specifications, numbers; and the folder of samples beside it.

Where the numbers would make the page larger than MOST, they lie in script files beside it: those of each panel in one
that is loaded when it comes near the screen, all else in one that the page begins with.
"""

import fcntl
from base64 import b64encode
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import vl_convert

from kvbench.report.charts import SCORE, build_charts
from kvbench.report.labels import describe_error
from kvbench.report.panels import DATA_ERRORS, TABLES, PageData, gather_results
from kvbench.report.samples import to_embedded_json, write_file, write_samples
from kvbench.report.style import FULL

HERE = Path(__file__).parent
FOLDER = "report"  # of the samples, beside the page
NUMBERS = (*TABLES, "series", "grids", "solvable")  # of a panel
DIGITS = 4  # after the point
COMPACT_TABLES = (*TABLES, "cells")  # a grid's too
MOST = 2_000_000  # bytes of a page


def write_report(results: Path, now: datetime) -> Path:
    """Write the page and its samples; the page's path. SettingError for a folder without runs."""
    gathered = gather_results(results, now)
    path = results / "report.html"
    folder = results / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # until it is closed: who else makes the page here, waits
        fcntl.lockf(lock, fcntl.LOCK_EX)
        write_page(gathered, path, folder)
    return path


def write_page(gathered: PageData, path: Path, folder: Path) -> None:
    """Write the page and what lies beside it, and take away what lay there for another."""
    page = compact_json(gathered.page | {"files": write_answers(gathered, folder), "folder": FOLDER})
    wanted = {name for own in page["files"] for name in own["names"]}
    text = render_html(page)
    if len(text.encode()) > MOST:
        page, parts = split_data(page, folder)
        text, wanted = render_html(page), wanted | parts
    write_file(path, text)
    for old in (*folder.glob("samples-*.js"), *folder.glob("part-*.js")):
        if old.name not in wanted:
            old.unlink()


def split_data(page: dict[str, Any], folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The page that loads its data, and the names of the files in `folder` that now have them."""
    names = set()

    def put(value: object) -> str:
        text = to_embedded_json(value)
        name = f"part-{sha256(text.encode()).hexdigest()[:16]}.js"
        write_file(folder / name, f'kvbenchPart("{name}",{text});\n')
        names.add(name)
        return name

    panels = [
        {name: own for name, own in panel.items() if name not in NUMBERS}
        | {"part": put({name: panel[name] for name in NUMBERS})}
        for panel in page["panels"]
    ]
    return {"folder": FOLDER, "part": put(page | {"panels": panels})}, names


def write_answers(gathered: PageData, folder: Path) -> list[dict[str, Any]]:
    """What the browser of samples may load."""
    found = []
    for own in gathered.pairings:
        try:
            names = write_samples(folder, own)
        except DATA_ERRORS as error:
            gathered.page["damaged"].append([own.run.hash, f"its samples cannot be shown: {describe_error(error)}"])
            continue
        method = own.run.value["method"]["name"]
        block = own.run.value.get("block_size")
        found.append({"run": own.run.hash, "panel": own.panel, "row": own.name, "names": names})
        found[-1] |= {"method": method, "block": block}
    return found


def render_html(page: dict[str, Any]) -> str:
    """The whole page."""
    library, script = load_scripts()
    data = to_embedded_json(page | {"charts": build_charts(), "ink": FULL, "shades": SCORE})
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
            f"<script>{library}</script>",
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


@cache
def load_scripts() -> tuple[str, str]:
    """The charting library and the page's own."""
    found = vl_convert.javascript_bundle(), (HERE / "page.js").read_text(encoding="utf-8")
    for text in found:
        if "</script" in text.lower() or "<!--" in text:
            raise ValueError("a script that would end itself")
    return found


def content_security_policy() -> str:
    """What the page may do. The library compiles expressions; files beside the page are loaded by its scripts and by
    nobody else.
    """
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in load_scripts())
    return (
        f"default-src 'none'; script-src {allowed} 'strict-dynamic' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def compact_json(value: Any, name: str = "") -> Any:
    """Floats with the digits that a page can show, and tables with their names once: {"names": […], "rows": [[…]]}."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if name in COMPACT_TABLES:
        names = list(value[0]) if value else []
        return {"names": names, "rows": [[compact_json(row[key]) for key in names] for row in value]}
    if isinstance(value, dict):
        return {key: compact_json(own, key) for key, own in value.items()}
    return [compact_json(own) for own in value] if isinstance(value, list | tuple) else value
