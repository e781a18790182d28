"""The report page's charts as figures for print: PDF, SVG and PNG, and a CSV with exactly the numbers that are drawn.

    python -m kvbench.figures results                                       # `make figures`: all that the store holds
    python -m kvbench.figures results question=hidden method=snapkv,dropkv --kind curve,cost --width 5.5

    curve   score against measured share, 95 % bands, the full cache dashed; `subtask=ruler_vt`: of these alone
    tasks   difference from the full cache by subtask
    grid    score by length and depth, one run beside the other
    change  difference from the full cache by length and depth
    cost    difference against bytes held, time to first token, time per output token, with 95 % intervals of times;
            filled: no other run and not the full cache costs as little and scores as much

Any setting of a run chooses, as with kvbench.curves. Runs of different protocols (kvbench.audit.protocol) never share a
figure: it is <model>-<task>-<question>-<hash of the protocol>-<kind>. The same store gives the same SVG.
"""

import csv
import io
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import vl_convert

from kvbench import card
from kvbench.report import printed
from kvbench.report.gather import Panel, panels_of
from kvbench.report.printed import POINTS, SIZE, Drawing
from kvbench.settings import Arguments, SettingError, answered, choose, writable, writing
from kvbench.stored import Found, Stored, asked, check_folder, chosen, find_finished
from kvbench.swept import EACH, SHARES, SOLVABLE, Choice, subtasks
from kvbench.text_table import escape

INCHES = {"curve": 3.25, "tasks": 6.75, "grid": 6.75, "change": 6.75, "cost": 6.75}  # a column of a paper, or both
LEAST, MOST = 2, 20
PPI = 300  # of the PNG
HIDDEN = ("s", "order", "column", "row")  # of a table: what joins it to others


@dataclass(frozen=True)
class Figure:
    """What is drawn, and the name of its files."""

    name: str
    panel: Mapping[str, Any]
    drawing: Drawing
    pixels: float  # wide at most

    def write(self, folder: Path) -> str:
        """Write its four files; a line that says so."""
        text, *size = printed.svg(self.drawing, self.panel, self.pixels)
        sized = [f' width="{{0:.6g}}{unit}" height="{{1:.6g}}{unit}"'.format(*size) for unit in ("pt", "")]
        svg, plain = (SIZE.sub(own, text, count=1) for own in sized)  # the converters take a pixel for a point
        named = folder / self.name
        forms: dict[str, Callable[[], bytes]] = {
            "svg": svg.encode, "pdf": lambda: vl_convert.svg_to_pdf(plain),
            "png": lambda: vl_convert.svg_to_png(plain, ppi=PPI), "csv": table(self.drawing.rows).encode,
        }  # fmt: skip
        for suffix, form in forms.items():
            path = Path(f"{named}.{suffix}")
            with writing(path):
                path.write_bytes(form())
        inches = " x ".join(f"{own / 72:.2f}" for own in size)
        return f"{named}  .pdf .svg .png .csv  {inches} in"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def figures(options: Namespace, found: Found, wanted: Sequence[Stored], refused: dict[str, str]) -> Iterator[Figure]:
    """What there is to draw of the wanted runs; what cannot be compared comes into `refused`, with the reason."""
    for subtask in options.subtasks or [None]:
        choice = Choice(options.against, options.average, subtask)
        parts = ["" if options.against == "bytes" else options.against, options.average or "", subtask or ""]
        curve = "-".join(["curve", *map(slug, filter(None, parts))])
        for panel in panels_of(found, wanted, choice):
            refused |= {f"run {name}": why for name, why in panel.refused.items()}
            for own in panel.shown["series"]:
                if "curve" in options.kinds and "refused" in own:
                    refused[f"{titled(panel)}-{curve}, {own['label']}"] = own["refused"]
            for kind in options.kinds:
                pixels = 72 * (options.width or INCHES[kind]) / POINTS
                drawing = drawn(kind, panel.shown, options.against, pixels)
                if drawing:
                    name = f"{titled(panel)}-{curve if kind == 'curve' else kind}"
                    yield Figure(name, panel.shown, drawing, pixels)


def drawn(kind: str, panel: Mapping[str, Any], against: str, pixels: float) -> Drawing | None:
    if kind == "curve":
        return printed.curve(panel, against, pixels)
    if kind == "change":
        return printed.grid(panel, pixels, change=True)
    return {"tasks": printed.tasks, "grid": printed.grid, "cost": printed.cost}[kind](panel, pixels)


def titled(panel: Panel) -> str:
    return "-".join([*(slug(panel.shown[name]) for name in ("model", "task", "question")), panel.key[:8]])


def slug(text: str) -> str:
    """`text` for the name of a file, with a hash where something of it is lost."""
    own = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:40]
    return own if own == text else f"{own}-{sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def draw(given: Sequence[str]) -> int:
    """Write the figures; SettingError, and nothing is written, where there is nothing to draw."""
    options = arguments(given)
    check_folder(options.results)
    found = find_finished(options.results)
    wanted = chosen(found.runs, options.filters)
    for subtask in options.subtasks:
        choose("subtask", subtask, subtasks(wanted))
    if options.average is not None:
        choose("--average", options.average, sorted({EACH, *(name for run in wanted for name in averages(run))}))
    refused: dict[str, str] = {}
    own = list(figures(options, found, wanted, refused))
    found.tell()
    for name, why in sorted(refused.items()):
        print(f"kvbench: {escape(name)} is left out: {escape(why)}", file=sys.stderr)
    if not own:
        raise SettingError(f"{options.results}: nothing there for --kind {','.join(options.kinds)}")
    folder = options.out or options.results / "figures"
    writable("--out" if options.out else "results", folder)
    folder.mkdir(parents=True, exist_ok=True)
    for figure in own:
        print(figure.write(folder))
    if found.unfinished:
        print(f"{len(found.unfinished)} unfinished runs are left out.")
    return 0


def averages(run: Stored) -> list[str]:
    """What `--average` can choose, apart from EACH."""
    return [*dict(run.value.get("averages") or []), *([SOLVABLE] if card.listed(run.value) else [])]


def arguments(given: Sequence[str]) -> Namespace:
    """SettingError for what cannot be used."""
    parser = Arguments("kvbench.figures", __doc__)
    parser.add_argument("chosen", nargs="*", metavar="RESULTS | SETTING=VALUE,VALUE", help="folder; runs")
    parser.add_argument("--kind", help=f"of {','.join(INCHES)}; default: all")
    parser.add_argument("--width", help="inches at most; default: 3.25 for curves, else 6.75")
    parser.add_argument("--against", default="bytes", help="of curves: bytes held, or rows attended while decoding")
    parser.add_argument("--average", help=f"of curves: name of one of the task's averages, {EACH} or {SOLVABLE}")
    parser.add_argument("--out", type=Path, help="folder of the files; default: RESULTS/figures")
    options = parser.parse_intermixed_args(given)
    options.results, options.filters = asked(options.chosen)
    subtasks = options.filters.pop("subtask", None)
    options.subtasks = list(dict.fromkeys(subtasks.split(","))) if subtasks is not None else []
    kinds = "curve" if options.subtasks else ",".join(INCHES)
    options.kinds = list(dict.fromkeys((kinds if options.kind is None else options.kind).split(",")))
    for kind in options.kinds:
        choose("--kind", kind, ["curve"] if options.subtasks else list(INCHES))
    choose("--against", options.against, SHARES)
    options.width = None if options.width is None else inches(options.width)
    return options


def inches(text: str) -> float:
    try:
        if LEAST <= float(text) <= MOST:
            return float(text)
    except ValueError:
        pass
    raise SettingError(f"--width {text}: inches, from {LEAST} to {MOST}")


def main(given: Sequence[str]) -> int:
    return answered(lambda: draw(given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
