"""The page as one file: style, charting library, specifications, numbers; and the folder of samples beside it."""

import sys
from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import vl_convert

from kvbench.report.charts import SCORE, charts
from kvbench.report.gather import TABLES, WRONG, Gathered, gather, said
from kvbench.report.looks import FULL
from kvbench.report.samples import embedded, write
from kvbench.settings import SettingError

HERE = Path(__file__).parent
FOLDER = "report"  # of the samples, beside the page
DIGITS = 4  # after the point
PACKED = (*TABLES, "cells")  # a grid's too
MOST = 2_000_000  # bytes of a page


def report(results: Path, now: datetime) -> Path:
    """Write the page and its samples; the page's path. SettingError for a folder without runs."""
    gathered = gather(results, now)
    path = results / "report.html"
    folder = results / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files = parts(gathered, folder)
    draft = path.with_suffix(".draft")
    draft.write_text(html(gathered.page | {"files": files, "folder": FOLDER}), encoding="utf-8")
    draft.replace(path)
    wanted = {name for own in files for name in own["names"]}
    for old in folder.glob("samples-*.js"):
        if old.name not in wanted:
            old.unlink()
    return path


def parts(gathered: Gathered, folder: Path) -> list[dict[str, Any]]:
    """What the browser of samples may load."""
    found = []
    for own in gathered.pairings:
        try:
            names = write(folder, own)
        except WRONG as error:
            gathered.page["damaged"].append([own.run.hash, f"its samples cannot be shown: {said(error)}"])
            continue
        method = own.run.value["method"]["name"]
        block = own.run.value.get("block_size")
        found.append({"run": own.run.hash, "panel": own.panel, "row": own.name, "names": names})
        found[-1] |= {"method": method, "block": block}
    return found


def html(page: dict[str, Any]) -> str:
    """The whole page."""
    library = vl_convert.javascript_bundle()
    script = (HERE / "page.js").read_text(encoding="utf-8")
    for text in (library, script):
        if "</script" in text.lower() or "<!--" in text:
            raise ValueError("a script that would end itself")
    data = embedded(packed(page) | {"charts": charts(), "ink": FULL, "shades": SCORE})
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (library, script))
    policy = (  # the library compiles expressions; loaded by these two scripts and by nobody else: files of samples
        f"default-src 'none'; script-src {allowed} 'strict-dynamic' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
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


def packed(value: Any, name: str = "") -> Any:
    """Floats with the digits that a page can show, and tables with their names once: {"names": […], "rows": [[…]]}."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if name in PACKED:
        names = list(value[0]) if value else []
        return {"names": names, "rows": [[packed(row[key]) for key in names] for row in value]}
    if isinstance(value, dict):
        return {key: packed(own, key) for key, own in value.items()}
    return [packed(own) for own in value] if isinstance(value, list | tuple) else value


def main(results: Path) -> int:
    try:
        path = report(results, datetime.now(UTC))
    except SettingError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    size = path.stat().st_size
    print(f"{path}  {size / 1e6:.2f} MB")
    if size > MOST:
        print(f"kvbench: {path} has more than {MOST / 1e6:g} MB: a results folder for each study", file=sys.stderr)
    return 0
